"""graphscale lower-training: replace training operators of ONNX Runtime by standard ones."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from graphscale.cli.options import ModelPath, output_path
from graphscale.cli.show import is_verbose, list_counts, print_json, say, show_rows, warn

__all__ = ["lower_training"]


def lower_training(
    model: ModelPath,
    output: Annotated[Path, output_path("The lowered graph.")],
) -> None:
    """Replace the operators of ONNX Runtime's training builds by standard ones, for any build.

    `graphscale scale` accepts the result as well as MODEL.

    Examples:
        graphscale lower-training original.onnx -o standard.onnx
    """
    from graphscale.files import writing
    from graphscale.ort.standard_forms import lower_training_ops

    writing.check_new_output(output)
    result = lower_training_ops(model)
    result.save(output)
    report = result.report
    print_json(report.to_dict)
    say(f"{model} in standard operators -> {output}")
    replaced = list_counts(report.replaced) or "nothing"
    say(f"replaced: {replaced}; {report.nodes_before} nodes before, {report.nodes_after} after")
    if report.states and is_verbose():
        show_rows([("carried state", [f"{state} -> {output}" for output, state in report.states.items()])])
    warn(report.warnings)
