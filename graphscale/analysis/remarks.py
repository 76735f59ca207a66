"""Remarks for the user on a step: its own tests and scale, and numbers that may be state."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Sequence

import onnx_ir as ir

from graphscale.analysis.edits import Plan
from graphscale.analysis.loss import LEAST_SCALE
from graphscale.analysis.roles.naming import likeness
from graphscale.analysis.roles.role_table import Role, Roles
from graphscale.analysis.topology import Topology
from graphscale.analysis.updates import Update, same_type
from graphscale.graph.cones import descendants
from graphscale.graph.values import constant_number, inputs_of, is_float, is_scalar, subgraphs
from graphscale.graph.walks import source_by_trait
from graphscale.operators import Kind, Trait, has_trait
from graphscale.process.summary import few

__all__ = ["make_remarks"]

# Numbers that stand for infinity in a comparison.
_LARGEST = frozenset((65504.0, (2 - 2**-23) * 2.0**127, sys.float_info.max))


def make_remarks(topology: Topology, plan: Plan, roles: Roles, states: Sequence[Update]) -> Iterator[str]:
    """Yield remarks, a sentence each.

    Args:
        topology: the topology of the graph.
        plan: the places of the loss scale, and of the divisions by it.
        roles: the roles of the inputs and outputs.
        states: the certain carried state.
    """
    yield from _note_own_tests(topology, plan, states)
    yield from _note_numbers(roles, states)
    yield from _note_folded_scale(topology, plan)


# --- states that follow a test of gradients ---------------------------------------------------------------------------


def _note_own_tests(topology: Topology, plan: Plan, states: Sequence[Update]) -> Iterator[str]:
    """Yield a note on the states that gradients reach by tests of finiteness alone, and that a guard would keep.

    Such a state is a count of errors. A step counter that is selected as the weights are needs no note: both stay on a
    step that is not applied.
    """
    tests = {*topology.nodes_like(lambda operator: bool(operator.traits & Trait.FINITENESS_TEST))}
    tests.update(filter(_is_test, topology.nodes_like(lambda operator: operator.rule.kind is Kind.COMPARE)))
    if not tests:
        return
    others = [node for node in topology.nodes if node not in tests]
    data = descendants(others, {*topology.losses, *plan.unscaled, *plan.degrees()}, operands=topology.operands)
    read = (node for node in tests if not data.isdisjoint(topology.operands(node)))
    flags = topology.descendants({value for node in read for value in node.outputs})
    learnt = {_find_selection(each) for each in states if each.output in data}
    own = [each for each in states if each.output in flags and each.output not in data and not each.kept]
    own = [each for each in own if (selection := _find_selection(each)) is None or selection not in learnt]
    if own:
        names = [each.output.name or "" for each in own]
        yield (
            f"{', '.join(map(repr, names))}: the step's own test of its gradients decides on this state, and a skipped "
            f"step keeps it, so that it counts no error; to let it advance: {' '.join(f'--keep {n}' for n in names)}"
        )


def _is_test(node: ir.Node) -> bool:
    """Return whether a comparison tests whether a value is finite."""
    numbers = [number for value in inputs_of(node) if (number := constant_number(value)) is not None]
    return len({*node.inputs}) == 1 or any(math.isinf(number) or number in _LARGEST for number in numbers)


def _find_selection(state: Update) -> tuple[ir.Value | None, int] | None:
    """Return the condition that selects between a state and a new value, and the state's branch; None for others."""
    output = source_by_trait(state.output, Trait.VIEW)
    node = output.producer()
    if node is None or node.op_type not in ("Where", "If"):
        return None
    index = output.index() or 0
    branches = inputs_of(node)[1:] if node.op_type == "Where" else [body.outputs[index] for body in subgraphs(node)]
    kept = (i for i, value in enumerate(branches) if source_by_trait(value, Trait.VIEW) is state.input)
    return next(((node.inputs[0], i) for i in kept), None)


# --- numbers that may be state ----------------------------------------------------------------------------------------


def _note_numbers(roles: Roles, states: Sequence[Update]) -> Iterator[str]:
    """Yield a note on numbers for a log where a number is fed without a next value, and names say nothing."""
    if not states or any(likeness(each.input, each.output)[0] == 1 for each in states):
        return
    fed = [v for v, each in roles.inputs.items() if each.role is Role.HYPERPARAMETER and is_float(v)]
    logs = [o for o, each in roles.outputs.items() if each.role is Role.METRIC and each.certain and not each.is_named]
    logs = [o for o in logs if is_float(o) and is_scalar(o) and any(same_type(o, v) for v in fed)]
    if logs:
        output, value = logs[0], next(v for v in fed if same_type(logs[0], v))
        yield (
            f"no name tells whether {few([repr(o.name) for o in logs])} is for a log, or the next value of a number "
            f"that is fed, {few([repr(v.name) for v in fed])}; if it is: --update {output.name}={value.name}"
        )


# --- a constant loss scale that was folded into other numbers ---------------------------------------------------------


def _note_folded_scale(topology: Topology, plan: Plan) -> Iterator[str]:
    """Yield a note on a constant that divides all gradients, where the number that begins them is as much too large.

    A mean begins with one or two, divided by a number of elements, and a learning rate does not change that.
    """
    factors = [_find_factors(topology, value) for value in plan.unscaled]
    common = factors[0].intersection(*factors) if factors else set[float]()
    shapes = [v.shape for v in topology.graph.inputs if v in topology.forward and v.shape]
    counts = {count for shape in shapes if shape.is_static() for count in _count(shape.numpy())}
    for factor in sorted(f for f in common if f <= 1 / LEAST_SCALE and math.frexp(f)[0] == 0.5):
        for place in plan.places:
            number = constant_number(place.value)
            if number and not _begins_mean(number, counts) and _begins_mean(number * factor, counts):
                yield (
                    f"the step has a constant loss scale of its own, {1 / factor:g}, and the new one multiplies it: "
                    f"{place.value.name!r} is as much too large, and {factor:g} multiplies all gradients; export the "
                    "step without it"
                )
                return


def _find_factors(topology: Topology, value: ir.Value) -> set[float]:
    """Return the constants that multiply a gradient before any other operator reads it."""
    factors = set[float]()
    while len(readers := [*topology.consumers(value)]) == 1 and not value.is_graph_output():
        (node,) = readers
        numbers = [number for v in inputs_of(node) if v is not value and (number := constant_number(v))]
        if not has_trait(node, Trait.VIEW):
            if len(numbers) != 1 or not (node.op_type == "Mul" or (node.op_type == "Div" and node.inputs[0] is value)):
                break
            factors.add(numbers[0] if node.op_type == "Mul" else 1 / numbers[0])
        value = node.outputs[0]
    return factors


def _count(shape: tuple[int, ...]) -> Iterator[int]:
    """Yield the numbers of examples, and of all elements, of a batch."""
    yield from (1, shape[0], math.prod(shape))


def _begins_mean(number: float, counts: set[int]) -> bool:
    """Return whether a number is one or two, divided by a number of elements."""
    return any(math.isclose(abs(number) * count, k, rel_tol=1e-3) for count in counts for k in (1, 2))
