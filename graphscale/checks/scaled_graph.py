"""The reader of scaled graphs for verify, lint and the drawings: values by the roles in the metadata."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping

import onnx_ir as ir

from graphscale.graph.stamp import Stamp, read_stamp
from graphscale.graph.values import values_by_name

__all__ = ["ScaledGraph", "find_scaled_loss", "read_scaled_graph"]

_SCALED_LOSS = re.compile(r"scaled_loss(_\d+)?")


@dataclasses.dataclass(frozen=True)
class ScaledGraph:
    """The main graph of a scaled model, read by its metadata, without a check of them.

    Attributes:
        stamp: the metadata.
        values: all values by name.
        named: the existing values among those in the metadata, by role.
    """

    stamp: Stamp
    values: Mapping[str, ir.Value]
    named: Mapping[str, ir.Value]


def read_scaled_graph(model: ir.Model, name: str) -> ScaledGraph:
    """Read the main graph of a scaled model by its metadata.

    Raises:
        ModelFileError: the metadata are missing or damaged.
    """
    stamp, values = read_stamp(model.metadata_props, name), values_by_name(model.graph)
    return ScaledGraph(stamp, values, {role: values[name] for role, name in stamp.names.items() if name in values})


def find_scaled_loss(scaled: ir.Graph, original: ir.Graph) -> ir.Value | None:
    """Find the scaled loss among the outputs of a scaled graph, by its name; None without one."""
    names = {value.name for value in original.outputs}
    found = (v for v in scaled.outputs if _SCALED_LOSS.fullmatch(v.name or "") and v.name not in names)
    return next(found, None)
