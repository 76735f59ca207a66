"""read: the step of a scaled file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import onnx_ir as ir

from graphscale.analysis.hazards import find_in_place_writes
from graphscale.analysis.report import STATE_OF_SCALE, TELEMETRY
from graphscale.errors import InvalidLossScaleError, ModelFileError, one_line
from graphscale.graph.marks import CHECK_FINITE, DELAY_UPDATE, PASS_KEY, UNSCALE_GRADIENTS
from graphscale.graph.stamp import Stamp
from graphscale.graph.stamp_reading import read_stamp
from graphscale.graph.values import Use, is_source, operand_at, uses_of, values_by_name
from graphscale.operators import Trait, nodes_with
from graphscale.policy.loss_scale import DynamicLossScale, get_policy
from graphscale.policy.names import Kind, ScaledValue
from graphscale.step.training_step import UNSCALED, Carried, Quotient, Scale, Step
from graphscale.targets import TARGETS

__all__ = ["read"]

# The origins of state that every step changes, applied or not.
_OWN = (STATE_OF_SCALE, TELEMETRY)
_FLAGS = (ScaledValue.ALL_FINITE, ScaledValue.STUCK)
_TELEMETRY = tuple(v for v in ScaledValue if v.kind in (Kind.TELEMETRY, Kind.RESULT) and v not in _FLAGS)


def read(model: ir.Model, name: str = "the model") -> Step:
    """Read the step of a scaled model: the metadata name values, and the graph says the rest.

    A value that the graph lacks is left out: another tool may have dropped it, and each model of an artifact folder has
    a part of the values. A scale outside of the graph stands for one that the graph lacks. The fields of the analysis
    of an original, such as roles and coverage, are empty.

    Args:
        model: the model, which is not changed.
        name: its name in messages.

    Raises:
        ModelFileError: the model carries no loss scale, or its metadata are damaged.
    """
    stamp, graph = read_stamp(model, name), model.graph
    values = values_by_name(graph)
    named = {role: values[stamp.names[role]] for role in ScaledValue if stamp.names.get(role) in values}
    carried = _read_carried(stamp, graph, values)
    written = {(each.input, each.next) for each in carried if each.in_place}
    return Step(
        graph=graph,
        loss=named.get(ScaledValue.LOSS, ir.val("")),
        model=model,
        metadata=stamp,
        accumulators=tuple(n for n in nodes_with(graph, Trait.ACCUMULATOR) if (*n.inputs[:2],) not in written),
        scales=(_read_scale(stamp, named, carried, name),),
        all_finite=named.get(ScaledValue.ALL_FINITE),
        guard=_find_guard(stamp, graph, named),
        quotients=tuple(_read_quotients(graph)),
        carried=carried,
        telemetry={role: named[role] for role in _TELEMETRY if role in named},
    )


def _read_carried(stamp: Stamp, graph: ir.Graph, values: Mapping[str, ir.Value]) -> tuple[Carried, ...]:
    """Return the carried state: that with a next value among the outputs, then that written in place."""
    results = {value.name: value for value in graph.outputs}
    writes = {state.name: node for node in find_in_place_writes(graph) if (state := node.inputs[0]) is not None}
    origins = {row["input"]: str(row.get("how", "")) for row in stamp.report.get("state", ())}
    pairs = [(values.get(source), results.get(output), False) for source, output in stamp.state.items()]
    pairs += [(values.get(name), writes[name].inputs[1], True) for name in origins if name in writes]
    return tuple(
        Carried(state, following, in_place, how := origins.get(state.name or "", ""), how not in _OWN)
        for state, following, in_place in pairs
        if state is not None and is_source(state) and following is not None
    )


def _read_quotients(graph: ir.Graph) -> Iterator[Quotient]:
    """Yield the quotients of gradients by the marks of their nodes; which values are checked is not read."""
    for node in graph:
        if node.op_type == "Div" and _has_mark(node, UNSCALE_GRADIENTS):
            value = node.outputs[0]
            yield Quotient((value.name or "").removesuffix(UNSCALED), value, ())


def _read_scale(stamp: Stamp, named: Mapping[ScaledValue, ir.Value], carried: tuple[Carried, ...], name: str) -> Scale:
    try:
        policy = get_policy(stamp.policy)
    except (InvalidLossScaleError, AttributeError, KeyError, TypeError) as error:
        raise ModelFileError(f"{name} has damaged graphscale metadata: its policy: {one_line(error)}") from error
    outside = ir.val(stamp.names.get(ScaledValue.LOSS_SCALE, ""), ir.DataType.FLOAT, ())
    roles = policy.rule.carried(policy.state) if isinstance(policy, DynamicLossScale) else ()
    states = {role: named[role] for role in (*roles, ScaledValue.WINDOW_FINITE) if role in named}
    nexts = {each.input: each.next for each in carried}
    return Scale(
        policy=policy,
        # A file for a target of a newer version is read like one for the target that any runtime executes.
        target=TARGETS.get(stamp.target, TARGETS["onnx"]),
        value=named.get(ScaledValue.LOSS_SCALE, outside),
        states=states,
        next={role: nexts[state] for role, state in states.items() if state in nexts},
        stuck=named.get(ScaledValue.STUCK),
    )


def _find_guard(stamp: Stamp, graph: ir.Graph, named: Mapping[ScaledValue, ir.Value]) -> ir.Value | None:
    """Return the finite flag, after the nodes that it waits for."""
    window, flag = named.get(ScaledValue.WINDOW_FINITE), named.get(ScaledValue.ALL_FINITE)
    for write in find_in_place_writes(graph):
        if write.inputs[0] is window:
            number = operand_at(Use(write, 1)).producer()
            return None if number is None else number.inputs[0]
    if flag is None and ScaledValue.WINDOW_FINITE in stamp.names:  # an optimizer model
        return next((n.outputs[0] for n in graph if n.op_type == "Not" and _has_mark(n, CHECK_FINITE)), None)
    waiting = [use.node for use in uses_of(flag)] if flag is not None else []
    return next((n.outputs[0] for n in waiting if n.op_type == "Or" and _has_mark(n, DELAY_UPDATE)), flag)


def _has_mark(node: ir.Node, mark: str) -> bool:
    return node.metadata_props.get(PASS_KEY) == mark
