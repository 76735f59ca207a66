"""The validation: the original scaled once more, and compared with the file that claims to come from it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import onnx_ir as ir

from graphscale.analysis.hints import Hints
from graphscale.checks.translation.correspondence import Correspondence
from graphscale.checks.translation.expectation import Claims, expect_model, read_claims
from graphscale.checks.translation.metadata import metadata_differences
from graphscale.checks.translation.models import compare_models
from graphscale.graph.builder import Names
from graphscale.graph.stamp import Stamp, read_stamp
from graphscale.graph.values import rename
from graphscale.policy.loss_scale import LossScale
from graphscale.targets import get_target

__all__ = ["Translation", "validate_translation"]


@dataclasses.dataclass(frozen=True)
class Translation:
    """The differences between a scaled model and that which the original gives, a sentence each.

    Attributes:
        claims: the options of the scaling, as the file claims them.
        graph: differences between nodes, constants, inputs, outputs, types and functions: the file may still compute
            the same by other means.
        starts: differences between initial values, by the input's name.
        metadata: differences between the metadata.
        nodes: the nodes that correspond, each with its counterpart in the expected model.
        stamp: the metadata that the file should have.
        expected: the expected model.
    """

    claims: Claims
    graph: tuple[str, ...]
    starts: Mapping[str, str]
    metadata: tuple[str, ...]
    nodes: Mapping[ir.Node, ir.Node]
    stamp: Stamp
    expected: ir.Model


def validate_translation(
    original: ir.Model, scaled: ir.Model, stamp: Stamp, policy: LossScale, hints: Hints
) -> Translation:
    """Compare a scaled model with that which the original gives.

    Values that only have other names get those that the original gives.

    Args:
        original: the model before scaling, as it was given to the scaling.
        scaled: the scaled model.
        stamp: its metadata, which are believed in nothing but the options: policy, target, telemetry and so on.
        policy: its loss scale.
        hints: the hints of the user.

    Raises:
        GraphscaleError: the original cannot be scaled with these options, or a role is open.
    """
    claims = read_claims(scaled, stamp, policy, original)
    expected = expect_model(original, claims, hints)
    same = compare_models(scaled, expected)
    newest = get_target(claims.target).max_ir_version
    if scaled.ir_version > max(newest, expected.ir_version):
        same.differences.append(f"the IR version is {scaled.ir_version}, and {claims.target} loads up to {newest}")
    wanted = read_stamp(expected.metadata_props, "the expected model")
    metadata = tuple(metadata_differences(scaled, stamp, expected, wanted, same))
    if not same.differences:
        _rename(scaled.graph, same)
    return Translation(claims, tuple(same.differences), same.starts, metadata, same.nodes, wanted, expected)


def _rename(graph: ir.Graph, same: Correspondence) -> None:
    """Give values and nodes the names of their counterparts."""
    if all(value.name == other.name for value, other in same.values.items()):
        return
    held = list(graph.initializers.values())
    graph.initializers.clear()
    taken = Names(other.name or "" for other in same.back)
    for value, wanted in same.values.items():
        if value.name != wanted.name:
            rename(value, wanted.name or "")
    for node, counterpart in same.nodes.items():
        node.name = counterpart.name
    for value in held:
        if value not in same.values and value.name in taken:
            rename(value, taken.reserve(value.name or ""))
        graph.initializers[value.name or ""] = value
