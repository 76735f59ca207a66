"""graphscale split: cut a scaled step at its gradients."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from graphscale.cli.options import BUCKET_SIZE, argument, option, output_path
from graphscale.cli.show import is_verbose, print_json, say, shorten, show_rows
from graphscale.files import writing

__all__ = ["split"]


def split(
    step: Annotated[Path, argument("A scaled training step.", metavar="STEP.onnx")],
    output: Annotated[
        tuple[Path, Path],
        output_path(
            "The two halves; stage 2 of the first is GRADS.2.onnx, and so on.", metavar="GRADS.onnx UPDATE.onnx"
        ),
    ],
    bucket_size: Annotated[
        str, option("The largest size of a bucket: bytes, or like 25MiB.", metavar="SIZE")
    ] = BUCKET_SIZE,
    stages: Annotated[
        int, option("Models for the first half: one's buckets are reduced while the next runs.", metavar="N")
    ] = 1,
) -> None:
    """Cut a scaled step at its gradients, to reduce them over replicas in between.

    GRADS computes the unscaled gradients, in buckets. UPDATE takes the reduced buckets, checks them, updates the loss
    scale and applies the guarded update. Run one after the other they are the step, bit for bit.

    Examples:
        graphscale split step.onnx -o grads.onnx update.onnx
        graphscale split step.onnx -o grads.onnx update.onnx --stages 2
    """
    from graphscale.replicas import splitting

    for path in output:
        writing.check_new_output(path)
    result = splitting.split(step, bucket_bytes=bucket_size, stages=stages)
    result.save(*output)
    report = result.report
    print_json(report.to_dict)
    paths = [*(splitting.stage_path(output[0], i) for i in range(report.stages)), output[1]]
    gradients = [f"{name} {shape}" for name, shape in report.gradients.items()]
    buckets = [f"{b['name']} {b['dtype']}[{b['elements']}], {b['bytes']} bytes" for b in report.buckets]
    say(f"{step} -> {', '.join(map(str, paths))}")
    say(f"{len(gradients)} gradients in {len(buckets)} bucket{'s' * (len(buckets) != 1)}")
    if not is_verbose():
        return
    show_rows(
        [
            (f"gradients ({len(gradients)})", shorten(gradients)),
            (f"buckets ({len(buckets)})", shorten(buckets)),
            ("mean of replicas", list(report.average) or ["gradients alone"]),
            ("of one replica", [name for name in report.outputs if name not in report.average] or ["nothing"]),
            ("nodes", [f"{count} in {path}" for count, path in zip(report.nodes, paths, strict=True)]),
        ]
    )
