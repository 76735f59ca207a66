"""The values of a scaled graph by the role that its metadata give them."""

from __future__ import annotations

import dataclasses
import re

import onnx_ir as ir

from graphscale.checks.patterns import find_accumulators
from graphscale.checks.scaled_graph import COUNTERS, OUTPUTS
from graphscale.checks.verification.pair import Pair
from graphscale.passes.nodes.update_rule import initial_values
from graphscale.policy.loss_scale import DynamicLossScale

__all__ = ["Roles", "find_roles"]


@dataclasses.dataclass(frozen=True)
class Roles:
    """The values of a scaled graph by their roles.

    Attributes:
        scale: the loss scale.
        all_finite: the flag of the finite check; None where there is none.
        stuck: the flag of a scale that is stuck, where the policy has one.
        scale_states: the state of the loss scale by role, `loss_scale` among it; empty for a fixed one.
        counters: the counters of telemetry by role.
        next_values: the next values of these by role, as they are written or leave the graph.
        following: `{state: output}` for everything carried, None where it is written in place.
        buffers: the buffers that the original itself writes.
        written: the states that are written in place.
        reports: the names of the outputs that report on a step.
        scaled_loss: the output that is the loss times the scale, where it was asked for.
    """

    scale: ir.Value
    all_finite: ir.Value | None
    stuck: ir.Value | None
    scale_states: dict[str, ir.Value]
    counters: dict[str, ir.Value]
    next_values: dict[str, ir.Value]
    following: dict[str, str | None]
    buffers: frozenset[str]
    written: frozenset[str]
    reports: frozenset[str]
    scaled_loss: ir.Value | None


def find_roles(pair: Pair) -> tuple[Roles | None, str | None]:
    """Find the values that the metadata name, or say which is not there."""
    graph, names = pair.scaled.graph, pair.stamp.names
    found, outputs = pair.reading.named, {value.name: value for value in graph.outputs}
    wanted, states = ["loss_scale"], list[str]()
    if isinstance(pair.policy, DynamicLossScale):
        states = ["loss_scale", *initial_values(pair.policy.rule, pair.policy.state)]
        wanted += [*states, "all_finite", *([] if pair.policy.rule.on_stuck == "hold" else ["stuck"])]
    for role in (*wanted, *(role for role in (*COUNTERS, *OUTPUTS) if role in names)):
        if role not in names:
            return None, f"the metadata name no value for the {role.replace('_', ' ')}"
        if role not in found:
            return None, f"there is no value {names[role]!r}, which the metadata call the {role.replace('_', ' ')}"
    for role in OUTPUTS:
        if role in names and names[role] not in outputs:
            return None, f"{names[role]!r}, which the metadata call {role!r}, is no output"
    carried = {role: found[role] for role in (*states, *COUNTERS) if role in found}
    written = {node.inputs[0]: node for node in find_accumulators(graph) if node.inputs[0] is not None}
    next_values: dict[str, ir.Value] = {}
    following: dict[str, str | None] = {}
    for role, state in carried.items():
        output = pair.stamp.state.get(state.name or "")
        following[state.name or ""] = None if state in written else output
        value = written[state].inputs[1] if state in written else outputs.get(output or "")
        if value is not None:
            next_values[role] = value
    in_place = {value.name for value in written}
    following |= {item.name: None if item.name in in_place else item.output for item in pair.states}
    originals = {value.name for value in pair.analysis.graph.outputs}
    exposed = re.compile(r"scaled_loss(_\d+)?").fullmatch
    # In-place state may also have its next value among the outputs, to be looked at.
    shown = {f"{state.name}.next" for state in carried.values()}
    return Roles(
        scale=found["loss_scale"],
        all_finite=found.get("all_finite"),
        stuck=found.get("stuck"),
        scale_states={role: found[role] for role in states},
        counters={role: found[role] for role in COUNTERS if role in found},
        next_values=next_values,
        following=following,
        buffers=frozenset(item.name for item in pair.states if item.output is None),
        written=frozenset(value.name or "" for value in written),
        reports=frozenset({names[role] for role in OUTPUTS if role in names} | shown),
        scaled_loss=next((v for name, v in outputs.items() if exposed(name or "") and name not in originals), None),
    ), None
