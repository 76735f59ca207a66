"""The stored numbers that an output may be the next value of, the likeliest first."""

from __future__ import annotations

from collections.abc import Collection, Iterator

import onnx_ir as ir

from graphscale.analysis.loss import is_complemented
from graphscale.analysis.roles.alternatives import alternatives_of, always_holds, is_step_of, sums_with
from graphscale.analysis.roles.names import likeness
from graphscale.analysis.roles.step_interface import Interface
from graphscale.analysis.updates import LEAST_SHARE, NEXT_STATE, Factors, find_coefficients, same_type
from graphscale.graph.values import constant_number, inputs_of, is_float, is_known_zero, is_scalar, loop_start
from graphscale.graph.walks import reach

__all__ = ["numbers_below"]

# A number of so many digits is computed: a programmer writes fewer.
_MOST_DIGITS = 5


def numbers_below(step: Interface, output: ir.Value, may_be_stored: bool) -> list[ir.Value]:
    """Return the initializers that may hold a number that an output is the next value of, the likeliest first.

    Counters, flags, averages, rates, weights of one element. Where no state is stored otherwise, a number that is added
    to a metric is a constant.
    """
    node, sources = output.producer(), {*step.sources_of(output)}
    if not is_scalar(output) or node is None:
        return []
    is_alone = not any(value.is_graph_input() for value in sources)
    # Numbers that follow from counters may be those of a schedule.
    counters = {value for value in sources if value in step.inputs}
    is_counted = all(is_scalar(value) and (value in counters or not value.is_graph_input()) for value in sources)
    is_scheduled = bool(counters) and is_counted and output not in step.behind_gradients
    least = NEXT_STATE if is_alone else 0.0
    held = {value: c for each in _begun(output) for value, c in step.held(each).items() if c >= least}
    shares = find_coefficients(output, sources, step.factors, least=0.0)
    flags = {*reach([output], _flags_above)}

    def may_be_state(value: ir.Value) -> bool:
        if not is_float(output):
            return is_alone or value in step.held_possibly(output) or value in flags
        # Nothing reads a metric, and it has no axes; weights have some, be it one element long.
        is_read = bool(output.shape) or bool(output.uses())
        is_weight = value in step.topology.forward and output in step.behind_gradients
        if value is output or (step.factors[output] == step.factors[value] != 0 and not (is_read or is_weight)):
            return False  # a constant is added to a metric
        if len(value.uses()) > 1 and is_complemented(value):
            return False
        if not (may_be_stored or is_weight or likeness(value, output)[0] == 1):
            return value in held and (is_alone or (NEXT_STATE <= held[value] != 1 and not is_counted))
        if is_scheduled and value in node.inputs and node.op_type in ("Min", "Max"):
            return False  # the bound of a schedule
        # A rate multiplies what follows from a count: others are added to the count, or divide it.
        is_rate = is_scheduled and not any(
            node.op_type in ("Add", "Sub") or (node.op_type == "Div" and index == 1) for node, index in value.uses()
        )
        if value in held or is_rate or (is_weight and output.shape):
            return True
        return sums_with(output, value) and not 0 < abs(shares.get(value, 0.0)) <= LEAST_SHARE

    stored = (value for value in step.graph.initializers.values() if not value.is_graph_input())
    near = [value for value in stored if value in sources and same_type(output, value) and may_be_state(value)]

    return sorted(near, key=lambda value: _rank(output, value, near, held.get(value, 0.0), step.factors), reverse=True)


def _rank(
    output: ir.Value, value: ir.Value, others: Collection[ir.Value], share: float, factors: Factors
) -> tuple[object, ...]:
    """Rank a number by how likely an output is its next value.

    Zeros begin something anew, if several nodes read them, or they are chosen; a constant has few digits; counters add
    one, and no number is multiplied by it.
    """
    node, likely, chosen = output.producer(), likeness(value, output), alternatives_of(output)
    is_chosen = value in chosen and any(other not in chosen for other in others)
    begins_anew = is_known_zero(value) and (len(value.uses()) > 1 or is_chosen)
    is_factor = any(reader.op_type == "Mul" for reader, _ in value.uses())
    is_operand = node is not None and value in node.inputs and not begins_anew
    return (
        likely[0] == 1,
        not begins_anew,
        is_operand and _is_computed(value),
        factors[value] != 1 or is_factor,
        always_holds(output, value),
        _is_computed(value),
        value in chosen or is_operand,
        not any(is_step_of(value, other) for other in others if other is not value),
        likely,
        share,
        len(value.uses()),
        any(reader.op_type == "Add" and reader.inputs[0] is value for reader, _ in value.uses()),
    )


def _is_computed(number: ir.Value) -> bool:
    """Return whether a number has more digits than a programmer writes."""
    held = constant_number(number)
    if held is None or not is_float(number):
        return False
    digits = f"{held:.6e}".partition("e")[0].replace(".", "").rstrip("0")
    return len(digits) > _MOST_DIGITS


def _begun(output: ir.Value) -> Iterator[ir.Value]:
    """Yield an output, and what a loop begins with that it is chosen from."""
    yield output
    yield from (start for value in alternatives_of(output) if (start := loop_start(value)) is not None)


def _flags_above(value: ir.Value) -> tuple[ir.Value, ...]:
    """Return the operands of a logical operator, none for another node."""
    node = value.producer()
    return () if node is None or node.op_type not in ("And", "Or", "Xor", "Not", "Where") else inputs_of(node)
