"""Lowered steps: lint looks at their plain form, once that is shown to give the graph."""

from __future__ import annotations

import onnx_ir as ir

from graphscale.checks.linting.lint_report import Finding
from graphscale.checks.translation.models import compare_models
from graphscale.graph.stamp import read_stamp
from graphscale.lowering.lower_model import lower_model, plain_form
from graphscale.targets import get_target

__all__ = ["read_lowered"]


def read_lowered(model: ir.Model, name: str) -> tuple[ir.Model, list[Finding]]:
    """Return the plain form of a lowered model, and the differences between the model and that form lowered again.

    Args:
        model: a lowered model.
        name: its name for messages.

    Raises:
        ModelFileError: its record of the plain form is missing or damaged.
    """
    stamp, plain = read_stamp(model, name), plain_form(model, name)
    again = plain.clone()
    lower_model(again, get_target(stamp.target))
    differences = compare_models(model, again, "the lowered graph").differences
    if stamp.in_place != read_stamp(again, name).in_place:
        differences.append("graphscale.in_place names other states than may share one buffer")
    return plain, [Finding("GS503", f"{each}: the plain form in the metadata, lowered") for each in differences[:1]]
