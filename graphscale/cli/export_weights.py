"""graphscale export-weights: write trained weights into an inference model or a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from graphscale.cli.options import argument, option, output_path
from graphscale.cli.show import is_verbose, print_json, say, shorten
from graphscale.files import writing

__all__ = ["export_weights"]


def export_weights(
    source: Annotated[
        Path,
        argument(
            "The trained weights: a saved state (.npz, .safetensors), or a training step that holds them.",
            metavar="STEP_OR_STATE",
        ),
    ],
    destination: Annotated[
        Path,
        argument("The model or checkpoint to fill, by the names of weights.", metavar="INFERENCE_MODEL"),
    ],
    output: Annotated[Path, output_path("The model or checkpoint with the trained weights.")],
    partial: Annotated[bool, option("Keep weights that the source lacks.")] = False,
) -> None:
    """Write trained weights into an inference model or a checkpoint, by name. The given files are not changed.

    Examples:
        graphscale export-weights fused.onnx artifacts/eval_model.onnx -o trained.onnx
        graphscale export-weights state.npz original.onnx -o trained.onnx --partial
    """
    from graphscale.ort.fusing import export_weights as export

    writing.check_new_output(output, marked=False)
    result = export(source, destination, partial=partial)
    result.save(output)
    print_json(lambda: {"written": result.written, "kept": result.kept, "unused": result.unused})
    say(f"{len(result.written)} arrays from {source} -> {output}")
    if result.kept:
        say(f"kept: {', '.join(shorten(result.kept))}")
    if result.unused:
        details = f": {', '.join(result.unused)}" if is_verbose() else " (-v shows them)"
        say(f"no use there for {len(result.unused)} others, such as moments and constants{details}")
