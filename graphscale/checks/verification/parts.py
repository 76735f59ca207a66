"""One of several models that scaling or splitting gives, against the one that it should be."""

from __future__ import annotations

import onnx_ir as ir

from graphscale.checks.translation.metadata import metadata_differences
from graphscale.checks.translation.models import compare_models
from graphscale.checks.verification.verify_report import UNPROVED, Check
from graphscale.graph.stamp import Stamp, read_stamp

__all__ = ["compare_part"]


def compare_part(found: ir.Model, name: str, stamp: Stamp, expected: ir.Model, version: str) -> list[Check]:
    """Return the checks of one model: its nodes, initial values and metadata.

    Args:
        found: the model.
        name: its name in the report.
        stamp: its metadata.
        expected: the model that it should be.
        version: the version of graphscale that the others name.
    """
    same = compare_models(found, expected, f"the graph of {name}")
    wanted = read_stamp(expected.metadata_props, f"the expected {name}")
    what = f"{len(same.nodes)} nodes, each the original's or an inserted piece"
    starts = [value for value in expected.graph.inputs if value.const_value is not None]
    checks = [Check.proved(f"translation of {name}", same.differences, what, UNPROVED)]
    if starts or same.starts:
        checks.append(Check.proved(f"initial values of {name}", same.starts.values(), f"{len(starts)} inputs"))
    different = [*metadata_differences(found, stamp, expected, wanted, same)]
    if stamp.version != version:
        different.append(f"graphscale.version is {stamp.version!r}, and should be {version!r}")
    return [*checks, Check.proved(f"metadata of {name}", different, f"of graphscale {stamp.version}")]
