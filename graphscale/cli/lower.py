"""graphscale lower: make a scaled graph as fast as one runtime allows."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from graphscale.cli.options import argument, option, output_path
from graphscale.cli.show import show_summary
from graphscale.targets import TARGETS

__all__ = ["lower"]

_NAMES = [name for name, target in TARGETS.items() if target.plain]


def lower(
    scaled: Annotated[Path, argument("A graph that graphscale scale wrote for target onnx.")],
    output: Annotated[Path, output_path("The lowered graph.")],
    target: Annotated[
        str, option(f"The runtime: {', '.join(_NAMES)}.", choices=_NAMES, metavar="TARGET", rich_help_panel="Output")
    ] = "ort-cpu",
) -> None:
    """Make a scaled graph as fast as one runtime allows: the same step, by standard operators, with the same state.

    `graphscale scale --target ort-cpu` does both at once, and `graphscale strip` undoes both.

    Examples:
        graphscale lower step.onnx -o lowered.onnx
    """
    from graphscale.entries.lowered import lower as lower_step
    from graphscale.files import writing

    writing.check_new_output(output)
    result = lower_step(scaled, target)
    result.save(output)
    show_summary(result.report, f"{scaled} lowered -> {output}")
