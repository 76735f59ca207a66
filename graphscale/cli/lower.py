"""graphscale lower: make a scaled graph as fast as one runtime allows."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from graphscale.cli.options import Json, argument, option
from graphscale.cli.show import show_report
from graphscale.targets import target_names

__all__ = ["lower"]

TARGETS = target_names(lambda target: bool(target.plain))


def lower(
    scaled: Annotated[Path, argument("A graph that graphscale scale wrote for target onnx.")],
    output: Annotated[Path, option("Where to write the lowered graph.", "-o", "--output")],
    target: Annotated[str, option(f"The runtime: {TARGETS}.")] = "ort-cpu",
    json: Json = False,
) -> None:
    """Make a scaled graph as fast as one runtime allows: the same step, by standard operators, with the same state.

    `graphscale scale --target ort-cpu` does both at once, and `graphscale strip` undoes both.
    """
    from graphscale import pipeline
    from graphscale.files import writing

    writing.check_new_output(output)
    result = pipeline.lower(scaled, target)
    result.save(output)
    show_report(result.report, json, f"{scaled} lowered -> {output}")
