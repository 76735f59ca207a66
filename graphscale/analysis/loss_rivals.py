"""Several solutions of a training graph, compared: those with the same edits are one choice, and one is the best."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import onnx_ir as ir

from graphscale.analysis.loss import smooth_operands
from graphscale.analysis.solution import Solution
from graphscale.errors import GraphscaleError, LossError
from graphscale.graph.values import constant_tensor, inputs_of, is_scalar
from graphscale.graph.walks import ancestors, reach
from graphscale.operators import Kind, rule_of

__all__ = ["Choices", "Faults", "Rank", "explain_failures"]

# The faults of a solution; a greater tuple is better.
Faults = tuple[bool, bool, int, int]


class Rank(NamedTuple):
    """The rank of a choice; a greater tuple is better."""

    fits: bool
    faults: Faults
    unexplained: int
    covered: int
    constant: bool


class Choices:
    """The solutions of a graph by their edits, and the best of them.

    Args:
        solutions: the solutions.
        rank: returns the rank of solutions with the same edits.

    Attributes:
        best: the solution to take.
        rivals: the losses of solutions with other edits that may be right as well.
        alike: the losses that lead to the same edits, and may be the one that is differentiated.
    """

    def __init__(self, solutions: Sequence[Solution], rank: Callable[[Sequence[Solution]], Rank]) -> None:
        if any(each.coverage.covered for each in solutions):
            solutions = [each for each in solutions if each.coverage.covered]
        groups: list[list[Solution]] = []
        for solution in solutions:
            same = next((group for group in groups if group[0].edits_as(solution)), None)
            if same is None:
                groups.append([solution])
            else:
                same.append(solution)
        ranks = [rank(group) for group in groups]
        top = max(ranks)
        equal = [group for group, each in zip(groups, ranks, strict=True) if each == top]
        names = [_name(group)[0] for group in equal]
        preferred = [one for one in names if all(one is other or _supersedes(one, other) for other in names)]
        self.best = (preferred or names)[0]
        others = [group for group, each in zip(groups, ranks, strict=True) if _competes(each, top)]
        others += [] if preferred else equal[1:]
        self.rivals = [_name(group)[0].topology.loss for group in others]
        self.alike = [each.topology.loss for each in _name(equal[names.index(self.best)])[1:]]


def _name(group: Sequence[Solution]) -> list[Solution]:
    """Return the solutions with the fewest losses, first the one that the backward pass reads most of."""
    fewest = min(len(each.topology.losses) for each in group)
    few = [each for each in group if len(each.topology.losses) == fewest]
    left = [one for one in few if not any(other is not one and _supersedes(other, one) for other in few)]
    left = left or few
    if len(left) == 1:
        return left
    return sorted(left, key=lambda each: -sum(value in each.read for value in each.topology.forward))


def _competes(rank: Rank, top: Rank) -> bool:
    """Return whether a choice may be right beside the best one: it fits as well, and is better in some way."""
    mine, best = (*rank.faults, *rank[2:]), (*top.faults, *top[2:])
    return rank.fits is top.fits and any(one > other for one, other in zip(mine, best, strict=True))


def _supersedes(one: Solution, other: Solution) -> bool:
    """Return whether a loss is a function of another set's and differentiated as such, or that one is, and not."""
    mine, others = (
        [loss for loss in solution.topology.losses if loss not in another.topology.losses]
        for solution, another in ((one, other), (other, one))
    )
    if len(mine) != 1 or len(others) != 1:
        return False
    if others[0] in one.topology.forward:
        return _differentiates(one, mine[0], others[0])
    return mine[0] in other.topology.forward and not _differentiates(other, others[0], mine[0])


def _differentiates(solution: Solution, loss: ir.Value, part: ir.Value) -> bool:
    """Return whether gradients read all that the derivative of a loss by an operand of it depends on.

    A total needs nothing; a product its other factor, unless it is a constant, which may be folded, in a total; any
    other function its operand or its result. The loss plus numbers has the same derivatives.
    """
    topology, read = solution.topology, solution.read
    below, above = topology.descendants({topology.recomputed.get(part, part)}), topology.ancestors([loss])
    is_total, is_function, lacks_constants = False, False, False
    for node in topology.nodes:
        varying = [value for value in topology.operands(node) if value in below]
        if not varying or not any(value in below and value in above for value in node.outputs):
            continue
        rule, rest = rule_of(node), [value for value in inputs_of(node) if value not in below]
        if rule is not None and rule.kind is Kind.LINEAR:
            if not all(_moves_weights(solution, value) for value in rest):
                return False
            is_total |= len(rule.operands(len(node.inputs))) > 1 and not all(map(_is_of_numbers, rest))
        elif rule is not None and _is_multiple(node, rule.kind, varying):
            unread = [value for value in rest if value not in read]
            if any(constant_tensor(value) is None for value in unread):
                return False
            is_function, lacks_constants = True, lacks_constants or bool(unread)
        elif any(value in read for value in (*varying, *node.outputs)):
            is_function = True
        else:
            return False
    return is_total or (is_function and not lacks_constants)


def _moves_weights(solution: Solution, term: ir.Value) -> bool:
    """Return whether gradients read each weight that a term of a loss depends on without a layer, as in a penalty."""
    topology = solution.topology

    def above(value: ir.Value) -> Sequence[ir.Value]:
        return () if value.producer() in topology.contractions else smooth_operands(value)

    def above_gradient(value: ir.Value) -> Sequence[ir.Value]:
        return () if value.producer() in topology.contractions else topology.flat.above(value)

    weights = {v for v in reach([term], above) if v in topology.held_states and not is_scalar(v)}
    if not weights:
        return True
    gradients = solution.solver.plan.unscaled.keys()
    readers = {
        node for value in gradients for node in topology.consumers(value) if node.op_type in ("Add", "Sub", "Sum")
    }
    sums = [value for node in readers for value in node.outputs if not value.is_graph_output()]
    return weights <= {*reach((*gradients, *sums), above_gradient)}


def _is_of_numbers(value: ir.Value) -> bool:
    sources = (v for v in ancestors([value]) if v.producer() is None or constant_tensor(v) is not None)
    return all(map(is_scalar, sources))


def _is_multiple(node: ir.Node, kind: Kind, varying: Sequence[ir.Value]) -> bool:
    """Return whether a node multiplies one of its operands that vary, or divides it, by others."""
    is_one = len(varying) == 1 and sum(value is varying[0] for value in node.inputs) == 1
    return is_one and (kind is Kind.PRODUCT or (kind is Kind.QUOTIENT and node.inputs[0] is varying[0]))


def explain_failures(failures: Sequence[tuple[ir.Value, GraphscaleError]], named: bool) -> GraphscaleError:
    """Return the error for the user where no set of losses can be scaled."""
    if not failures:
        return LossError(
            "no scalar floating-point output that could be the loss was found, as in an inference graph; export the "
            "training graph (loss and gradients) with the loss among its outputs, or, if the graph computes it, name "
            "it with --loss"
        )
    first = failures[0][1]
    if named or len(failures) == 1:
        return first
    others = "; ".join(f"{loss.name!r}: {error}" for loss, error in failures[1:3])
    return type(first)(f"{first}; other candidates for the loss: {others}")
