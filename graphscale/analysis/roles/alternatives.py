"""Numbers that an output holds whichever alternative a condition or a bound chooses."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import onnx_ir as ir

from graphscale.analysis.updates import AverageFactors, Factors, KnownFactors, find_terms
from graphscale.graph.values import constant_number, constant_tensor, inputs_of, is_float, subgraphs
from graphscale.graph.walks import follows_from_numbers, reach, source_by_trait
from graphscale.operators import Kind, Trait, has_trait, rule_of

__all__ = ["alternatives_of", "always_holds", "is_next_number", "is_step_of", "sums_with"]

_VIEWS = Trait.RESHAPE | Trait.CAST | Trait.PERMUTE | Trait.REPEAT
_NOT, _ITSELF, _IN_SUM = 0, 1, 2
_LOGIC = frozenset(("And", "Or", "Xor", "Not"))


def always_holds(output: ir.Value, number: ir.Value) -> bool:
    """Return whether an output holds a number on all its ways, or on one of them in a sum with something else.

    `Where(flag, rate * 0.5, rate)` and `Where(first, norm, 0.9 * mean + 0.1 * norm)` are next values, and so is a
    count that begins anew, `Where(flag, 0, count + 1)`; `Min(norm, limit)` is a metric, or the least norm so far. What
    follows from numbers alone may be a schedule, `rate * decay ** count`: it holds a number by constant factors. Else,
    where nothing reads the output, `rate * Where(flag, 0.5, 1)` is a next value; read by others, it is a rate itself.
    """
    factors: Factors = KnownFactors() if follows_from_numbers(output) else AverageFactors()
    if not output.uses() and isinstance(factors, AverageFactors):
        factors = _ChosenFactors(factors)
    return _grade(output, number, factors, _is_sum_or_count) != _NOT


def is_next_number(output: ir.Value, numbers: Sequence[ir.Value]) -> bool:
    """Return whether an output is the next value of the first of some stored numbers, and of no other one.

    It is a count, be it one that begins anew, or a choice between the number itself and others that hold it. No node
    reads the choice, and it does not follow from numbers: `Where(flag, rate * 0.5, rate)` may be the rate in use.
    """
    number = numbers[0]
    held = [each for each in numbers if always_holds(output, each)]
    if number not in held or not all(is_step_of(other, number) for other in held if other is not number):
        return False
    if not is_float(output):
        return True
    return not output.uses() and number in alternatives_of(output) and not follows_from_numbers(output)


def is_step_of(step: ir.Value, count: ir.Value) -> bool:
    """Return whether a number is the one that is added to another, and is no count itself."""
    sums = [node for node, _ in step.uses() if node.op_type == "Add" and count in node.inputs]
    if not sums or constant_number(step) != 1:
        return False
    return len(step.uses()) > 1 or constant_number(count) != 1


def alternatives_of(output: ir.Value) -> Collection[ir.Value]:
    """Return the values that conditions and bounds choose an output from, itself if there are none."""
    return {*reach([output], _chosen)}


def _chosen(value: ir.Value) -> Sequence[ir.Value]:
    node = value.producer()
    if node is not None and rule_of(node) is not None and has_trait(node, _VIEWS):
        return inputs_of(node)[:1]
    return _alternatives(value) or ()


def sums_with(output: ir.Value, number: ir.Value) -> bool:
    """Return whether an output is, on one of its ways at least, a sum of a share of a number with something else."""
    return _grade(output, number, _ChosenFactors(AverageFactors()), _is_sum) == _IN_SUM


class _ChosenFactors(Factors):
    """The same as some factors, with 1 for a choice between constants, and for a flag as a number."""

    def __init__(self, factors: Factors) -> None:
        super().__init__()
        self._factors = factors

    def __missing__(self, value: ir.Value) -> float:
        ends = [each for each in alternatives_of(value) if not _chosen(each)]
        is_chosen = ends != [value] and all(map(constant_tensor, ends))
        is_chosen = is_chosen or _is_flag(source_by_trait(value, _VIEWS))
        self[value] = number = self._factors[value] or float(is_chosen)
        return number


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
    """Return the values that one is chosen from, but constant bounds, and those that it is a sum with shares of."""
    node, alternatives = value.producer(), _alternatives(value)
    if alternatives is not None or node is None or node.domain not in ("", "ai.onnx"):
        return alternatives or (), ()
    if node.op_type in ("Clip", "Relu"):
        return (), inputs_of(node)[:1]
    return (), [operand for operand, factor in find_terms(node, value, factors, _VIEWS) if factor]


def _alternatives(value: ir.Value) -> Sequence[ir.Value] | None:
    """Return the values that a condition or a bound chooses one from, but constant bounds; None for another node."""
    node = value.producer()
    if node is None or node.domain not in ("", "ai.onnx"):
        return None
    if node.op_type == "If":
        return [branch.outputs[value.index() or 0] for branch in subgraphs(node)]
    if node.op_type == "Where":
        return inputs_of(node)[1:]
    if node.op_type in ("Max", "Min"):
        return [operand for operand in inputs_of(node) if constant_tensor(operand) is None]
    return None
