"""The record of the scaling, read from a scaled model, and tests of its parts."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx_ir as ir

from graphscale.errors import ModelFileError
from graphscale.files.contents import parse_json
from graphscale.graph.stamp import OPTIONAL, VERSION, Stamp, explain_loss, has_lost_stamp
from graphscale.policy.names import ScaledValue

__all__ = ["find_wrong_number", "read_stamp"]

_RELEASE = re.compile(r"\d+(\.\d+)*[\w.+-]{,40}")
_MOST = 2**53  # far below the overflow of an integer count


def read_stamp(source: ir.Model | Mapping[str, str], name: str) -> Stamp:
    """Read the stamp of a scaled model, or from its metadata.

    Raises:
        ModelFileError: the stamp is missing or damaged.
    """
    metadata = source.metadata_props if isinstance(source, ir.Model) else source
    if VERSION not in metadata:
        if isinstance(source, ir.Model) and has_lost_stamp(source):
            raise ModelFileError(explain_loss(name))
        raise ModelFileError(f"{name} carries no loss scale; scale it first: graphscale scale MODEL -o OUT")
    texts = {field.name: metadata.get(f"graphscale.{field.name}", "") for field in dataclasses.fields(Stamp)}
    contents, damaged = dict[str, Any](), f"{name} has damaged graphscale metadata"
    for key in ("policy", "state", "names", "report", *OPTIONAL):
        try:
            contents[key] = parse_json(texts[key] or OPTIONAL.get(key, ""))
        except (ValueError, RecursionError) as error:
            raise ModelFileError(f"{damaged}: graphscale.{key}: {error}") from error
    stamp = Stamp(version=texts["version"], target=texts["target"], **contents)
    if (wrong := _wrong_field(stamp)) is not None:
        raise ModelFileError(f"{damaged}: graphscale.{wrong} has another form than expected")
    return stamp


def _wrong_field(stamp: Stamp) -> str | None:
    """Return the first field of a stamp with a part of the wrong type."""
    if not _RELEASE.fullmatch(stamp.version):
        return "version"
    if not stamp.target:
        return "target"
    for field in ("policy", "state", "names", "report", "telemetry"):
        if not isinstance(getattr(stamp, field), dict):
            return field
    for field in ("state", "names"):
        if not all(isinstance(text, str) for text in getattr(stamp, field).values()):
            return field
    if not isinstance(stamp.policy.get("class_name"), str) or not isinstance(stamp.policy.get("config"), dict):
        return "policy"
    rows = stamp.report.get("state", [])
    rows = rows if isinstance(rows, list) else [None]
    if not all(isinstance(row, dict) and isinstance(row.get("input"), str) for row in rows):
        return "report"
    ranges = stamp.telemetry.get(ScaledValue.RANGES, {"every": 1})
    every = ranges.get("every") if isinstance(ranges, dict) and len(ranges) == 1 else None
    if type(every) is not int or not 1 <= every <= 2**24:
        return "telemetry"
    told = [("telemetry", stamp.telemetry.get(kind, [])) for kind in ("gradients", "activations")]
    for field, names in (*told, ("in_place", stamp.in_place), ("accepted", stamp.accepted)):
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            return field
    return None


def find_wrong_number(stamp: Stamp, state: Mapping[str, Any]) -> str | None:
    """Return the fault of the loss scale or of a count in carried state, `{name: array}`, or None."""
    for role in ScaledValue:
        name = stamp.names.get(role, "")
        if name not in state or not (role.is_count or role is ScaledValue.LOSS_SCALE):
            continue
        array = np.asarray(state[name])
        number = float(array.item()) if array.size == 1 else math.nan
        if role is ScaledValue.LOSS_SCALE and not 0 < number < math.inf:
            return f"the loss scale {name!r} is {number:g}; it must be finite and above 0"
        from_first = role is ScaledValue.GOOD_STEPS and stamp.policy["config"].get("growth_delay") == "first"
        least = -1 if from_first else 0
        if role.is_count and not (least <= number <= _MOST and number.is_integer()):
            return f"the count {name!r} is {number:.17g}; it must be a whole number from {least} to 2**53"
    return None
