"""The values of a scaled graph by the role that its metadata give them."""

from __future__ import annotations

import dataclasses
import re

import onnx_ir as ir

from graphscale.checks.patterns import accumulators
from graphscale.checks.verification.pair import Pair
from graphscale.graph.values import values_by_name
from graphscale.passes.nodes.update_rule import initial_values
from graphscale.policy.loss_scale import DynamicLossScale

__all__ = ["COUNTERS", "Roles", "find_roles"]

# The counters of telemetry, and what it tells of a step.
COUNTERS = ("steps", "skipped_steps", "consecutive_skips", "last_skip_step")
_TOLD = ("all_finite", "stuck", "cause", "offender", "zero_fraction")


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
        told: the names of the outputs that tell of a step.
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
    told: frozenset[str]
    scaled_loss: ir.Value | None


def find_roles(pair: Pair) -> tuple[Roles | None, str | None]:
    """Find the values that the metadata name, or say which is not there."""
    graph, names = pair.scaled.graph, pair.stamp.names
    values = values_by_name(graph)
    wanted = ["loss_scale"]
    dynamic = isinstance(pair.policy, DynamicLossScale)
    if isinstance(pair.policy, DynamicLossScale):
        wanted += [*initial_values(pair.policy.rule, pair.policy.state), "all_finite"]
        wanted += [] if pair.policy.rule.on_stuck == "hold" else ["stuck"]
    wanted += [role for role in (*COUNTERS, *_TOLD) if role in names]
    for role in wanted:
        if role not in names:
            return None, f"the metadata name no value for the {role.replace('_', ' ')}"
        if names[role] not in values:
            return None, f"there is no value {names[role]!r}, which the metadata call the {role.replace('_', ' ')}"
    outputs = {value.name: value for value in graph.outputs}
    for role in _TOLD:
        if role in names and names[role] not in outputs:
            return None, f"{names[role]!r}, which the metadata call {role!r}, is no output"
    found = {role: values[names[role]] for role in wanted}
    roles = [role for role in wanted if role not in (*COUNTERS, *_TOLD)] if dynamic else []
    carried = {role: found[role] for role in (*roles, *(r for r in COUNTERS if r in found))}
    written = {n.inputs[0]: n for n in accumulators(graph) if n.inputs[0] is not None}
    next_values = {}
    for role, state in carried.items():
        node = written.get(state)
        output = outputs.get(pair.stamp.state.get(state.name or "", ""))
        value = node.inputs[1] if node is not None else output
        if value is not None:
            next_values[role] = value
    following: dict[str, str | None] = {}
    for state in carried.values():
        following[state.name or ""] = None if state in written else pair.stamp.state.get(state.name or "")
    in_place = {value.name for value in written}
    for item in pair.states:
        following[item.name] = None if item.name in in_place else item.output
    originals = {value.name for value in pair.found.graph.outputs}
    # In-place state may also have its next value among the outputs, for whoever wants to look at it.
    shown = {f"{state.name}.next" for state in carried.values()}
    return Roles(
        scale=found["loss_scale"],
        all_finite=found.get("all_finite"),
        stuck=found.get("stuck"),
        scale_states={role: found[role] for role in roles},
        counters={role: found[role] for role in COUNTERS if role in found},
        next_values=next_values,
        following=following,
        buffers=frozenset(item.name for item in pair.states if item.output is None),
        written=frozenset(value.name or "" for value in written),
        told=frozenset({names[role] for role in _TOLD if role in names} | shown),
        scaled_loss=next((v for v in graph.outputs if _is_scaled_loss(v) and v.name not in originals), None),
    ), None


def _is_scaled_loss(value: ir.Value) -> bool:
    return re.fullmatch(r"scaled_loss(_\d+)?", value.name or "") is not None
