"""graphscale lower-training: replace training operators of ONNX Runtime by standard ones."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from graphscale.cli.options import Json, ModelPath, option
from graphscale.cli.show import list_counts, print_json, say, shorten, show_rows, warn

__all__ = ["lower_training"]


def lower_training(
    model: ModelPath,
    output: Annotated[Path, option("Where to write the lowered graph.", "-o", "--output")],
    json: Json = False,
) -> None:
    """Replace the operators that only training builds of ONNX Runtime have by standard ones: any build runs the result.

    `graphscale scale` takes the result as it takes MODEL.
    """
    from graphscale.files import writing
    from graphscale.ort.standard_forms import lower_training_ops

    writing.check_new_output(output)
    result = lower_training_ops(model)
    result.save(output)
    report = result.report
    if json:
        print_json(report.to_dict())
        return
    say(f"{model} in standard operators -> {output}")
    rows = [("replaced", [list_counts(report.replaced) or "nothing"])]
    if report.states:
        rows.append(("carried state", shorten([f"{state} -> {output}" for output, state in report.states.items()])))
    show_rows([*rows, ("nodes", [f"{report.nodes_before} before, {report.nodes_after} after"])])
    warn(report.warnings)
