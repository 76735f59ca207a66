"""Single numbers: those in all alternatives of an output, and stored ones whose next value it may be."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence

import onnx_ir as ir

from graphscale.analysis.loss import is_complemented
from graphscale.analysis.roles.nearness import likeness
from graphscale.analysis.roles.step_interface import Interface
from graphscale.analysis.updates import (
    LEAST_SHARE,
    NEXT_STATE,
    Factors,
    average_factors,
    find_coefficients,
    find_terms,
    known_factors,
    same_type,
)
from graphscale.graph.values import (
    constant_number,
    constant_tensor,
    inputs_of,
    is_float,
    is_known_zero,
    is_scalar,
    loop_start,
    subgraphs,
)
from graphscale.graph.walks import follows_from_numbers, reach, source_by_trait
from graphscale.operators import Kind, Trait, has_trait, rule_of

__all__ = ["always_holds", "is_next_number", "numbers_below"]

_VIEWS = Trait.RESHAPE | Trait.CAST | Trait.PERMUTE | Trait.REPEAT
_NOT, _ITSELF, _IN_SUM = 0, 1, 2
_LOGIC = frozenset(("And", "Or", "Xor", "Not"))
# A number of this many digits is computed: a programmer writes fewer.
_MOST_DIGITS = 5


def always_holds(output: ir.Value, number: ir.Value) -> bool:
    """Return whether all alternatives of an output contain a number, or one of them as a term of a sum.

    `Where(flag, rate * 0.5, rate)` and `Where(first, norm, 0.9 * mean + 0.1 * norm)` are next values, and so is a
    count that begins anew, `Where(flag, 0, count + 1)`; `Min(norm, limit)` is a metric, or the least norm so far. A
    number computed from numbers alone may be a schedule, `rate * decay ** count`: only constant factors count there.
    Otherwise, `rate * Where(flag, 0.5, 1)` is a next value if the output has no readers; with readers, it is a rate
    itself.
    """
    may_be_schedule = follows_from_numbers(output)
    factors = known_factors() if may_be_schedule else average_factors()
    if not (may_be_schedule or output.uses()):
        factors = _chosen_factors(factors)
    return _grade(output, number, factors, _is_sum_or_count) != _NOT


def is_next_number(output: ir.Value, numbers: Sequence[ir.Value]) -> bool:
    """Return whether an output is the next value of the first of some stored numbers, and of no other.

    Such an output is a count, with or without restarts, or a choice between the number itself and others that contain
    it. The choice has no readers, and is not computed from numbers: `Where(flag, rate * 0.5, rate)` may be the present
    rate.
    """
    number = numbers[0]
    held = [each for each in numbers if always_holds(output, each)]
    if number not in held or not all(_is_step_of(other, number) for other in held if other is not number):
        return False
    if not is_float(output):
        return True
    return not output.uses() and number in _alternatives_of(output) and not follows_from_numbers(output)


def _is_step_of(step: ir.Value, count: ir.Value) -> bool:
    """Return whether a number is the increment of another number, and no count itself."""
    sums = [node for node, _ in step.uses() if node.op_type == "Add" and count in node.inputs]
    if not sums or constant_number(step) != 1:
        return False
    return len(step.uses()) > 1 or constant_number(count) != 1


def _alternatives_of(output: ir.Value) -> Collection[ir.Value]:
    """Return the alternatives of conditions and bounds for an output, itself if there are none."""
    return {*reach([output], _chosen)}


def _chosen(value: ir.Value) -> Sequence[ir.Value]:
    node = value.producer()
    if node is not None and has_trait(node, _VIEWS):
        return inputs_of(node)[:1]
    return _alternatives(value) or ()


def _chosen_factors(factors: Factors) -> Factors:
    """Return a copy of some factors, with 1 for a choice between constants, and for a flag as a number."""

    def find(value: ir.Value) -> float:
        ends = [each for each in _alternatives_of(value) if not _chosen(each)]
        is_chosen = ends != [value] and all(map(constant_tensor, ends))
        return factors[value] or float(is_chosen or _is_flag(source_by_trait(value, _VIEWS)))

    return Factors(find)


def _is_flag(value: ir.Value) -> bool:
    node = value.producer()
    rule = None if node is None else rule_of(node)
    is_compared = rule is not None and rule.kind is Kind.COMPARE
    return value.dtype is ir.DataType.BOOL or is_compared or (node is not None and node.op_type in _LOGIC)


def _grade(output: ir.Value, number: ir.Value, factors: Factors, is_sum: Callable[[ir.Value, ir.Value], bool]) -> int:
    known = {number: _ITSELF}
    pending = [output]
    while pending:
        value = pending[-1]
        alternatives, terms = _operands(value, factors)
        unknown = [each for each in (*alternatives, *terms) if each not in known]
        if unknown and value not in known:
            pending += unknown
            continue
        pending.pop()
        if value not in known:
            ways = [known[each] for each in alternatives]
            held = max((known[each] for each in terms), default=_NOT)
            known[value] = _IN_SUM if _IN_SUM in ways else min(ways, default=_NOT) if ways else held
            if held and is_sum(value, number):
                known[value] = _IN_SUM
    return known[output]


def _is_sum(value: ir.Value, number: ir.Value) -> bool:
    node = value.producer()
    return node is not None and node.op_type in ("Add", "Sub", "Sum") and not any(map(constant_tensor, node.inputs))


def _is_sum_or_count(value: ir.Value, number: ir.Value) -> bool:
    node = value.producer()
    return _is_sum(value, number) or (node is not None and node.op_type == "Add" and number in node.inputs)


def _operands(value: ir.Value, factors: Factors) -> tuple[Sequence[ir.Value], Sequence[ir.Value]]:
    """Return the alternatives of a value, without constant bounds, and the terms of its sum."""
    node, alternatives = value.producer(), _alternatives(value)
    if alternatives is not None or node is None or node.domain:
        return alternatives or (), ()
    if node.op_type in ("Clip", "Relu"):
        return (), inputs_of(node)[:1]
    return (), [operand for operand, factor in find_terms(node, value, factors, _VIEWS) if factor]


def _alternatives(value: ir.Value) -> Sequence[ir.Value] | None:
    """Return the alternatives of a condition or a bound, without constant bounds; None for another node."""
    node = value.producer()
    if node is None or node.domain:
        return None
    if node.op_type == "If":
        return [branch.outputs[value.index() or 0] for branch in subgraphs(node)]
    if node.op_type == "Where":
        return inputs_of(node)[1:]
    if node.op_type in ("Max", "Min"):
        return [operand for operand in inputs_of(node) if constant_tensor(operand) is None]
    return None


def numbers_below(step: Interface, output: ir.Value, may_be_stored: bool) -> list[ir.Value]:
    """Return the initializers with a number whose next value an output may be, the likeliest first.

    Counters, flags, averages, rates, weights of one element. Without other stored state, a number that is added to a
    metric is a constant.
    """
    node, sources = output.producer(), {*step.sources_of(output)}
    if not is_scalar(output) or node is None:
        return []
    is_alone = not any(value.is_graph_input() for value in sources)
    # Numbers computed from counters may belong to a schedule.
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
        # A metric has no readers and no axes; a weight has axes, even with a single element.
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
        # A rate multiplies values computed from a count: other numbers are added to the count, or divide it.
        is_rate = is_scheduled and not any(
            node.op_type in ("Add", "Sub") or (node.op_type == "Div" and index == 1) for node, index in value.uses()
        )
        if value in held or is_rate or (is_weight and output.shape):
            return True
        # At least one alternative of the output is a sum with a share of the number.
        is_summed = _grade(output, value, _chosen_factors(average_factors()), _is_sum) == _IN_SUM
        return is_summed and not 0 < abs(shares.get(value, 0.0)) <= LEAST_SHARE

    stored = (value for value in step.graph.initializers.values() if not value.is_graph_input())
    near = [value for value in stored if value in sources and same_type(output, value) and may_be_state(value)]

    return sorted(near, key=lambda value: _rank(output, value, near, held.get(value, 0.0), step.factors), reverse=True)


def _rank(
    output: ir.Value, value: ir.Value, others: Collection[ir.Value], share: float, factors: Factors
) -> tuple[object, ...]:
    """Rank a number by the likelihood that an output is its next value.

    Zeros are a restart if several nodes read them, or a condition chooses them; a constant has few digits; counters add
    one, and no number is multiplied by it.
    """
    node, likely, chosen = output.producer(), likeness(value, output), _alternatives_of(output)
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
        not any(_is_step_of(value, other) for other in others if other is not value),
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
    """Yield an output, and the first values of a loop among its alternatives."""
    yield output
    yield from (start for value in _alternatives_of(output) if (start := loop_start(value)) is not None)


def _flags_above(value: ir.Value) -> tuple[ir.Value, ...]:
    """Return the operands of a logical operator, none for another node."""
    node = value.producer()
    return () if node is None or node.op_type not in (*_LOGIC, "Where") else inputs_of(node)
