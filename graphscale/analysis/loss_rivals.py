"""Several solutions of a training graph, compared: those with the same edits are one choice, and one is the best."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Sequence, Set
from typing import NamedTuple

import onnx_ir as ir

from graphscale.analysis.loss import is_differentiable, is_number, smooth_operands
from graphscale.analysis.roles.naming import widest_pattern, words_of
from graphscale.analysis.solution import Solution
from graphscale.analysis.topology import Topology
from graphscale.analysis.updates import NEXT_STATE, find_coefficients, same_type
from graphscale.errors import GraphscaleError, LossError
from graphscale.graph.values import constant_tensor, inputs_of, is_float, is_scalar
from graphscale.graph.walks import ancestors, reach
from graphscale.operators import Kind, rule_of

__all__ = ["Choices", "Faults", "Rank", "explain_failures", "find_differentiated", "find_unreduced_losses"]

_CHOICES = frozenset(("Max", "Min", "ReduceMax", "ReduceMin"))
_LOSS_WORDS = frozenset(("loss", "losses", "objective", "criterion", "cost", "total", "nll", "elbo"))

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
        sets: list[list[Solution]] = []
        for solution in solutions:
            same = next((each for each in sets if each[0].edits_as(solution)), None)
            if same is None:
                sets.append([solution])
            else:
                same.append(solution)
        ranks, groups = [rank(each) for each in sets], [_best_of(each, rank) for each in sets]
        top, states = max(ranks), _find_named_states(solutions[0].topology.graph)
        equal = [_name(group) for group, each in zip(groups, ranks, strict=True) if each == top]
        others = [_name(group) for group, each in zip(groups, ranks, strict=True) if _competes(each, top)]
        if all(_is_named(each[0], states) for each in equal):  # then any loss that is not may be right
            others = [_name(group) for group, each in zip(groups, ranks, strict=True) if each != top]
        preferred = _prefer([each[0] for each in equal])
        is_open = bool(others) or preferred is None
        self.best = _propose([each[0] for each in (*equal, *others)], states) if is_open else preferred
        rest = [each for each in (*equal, *others) if each[0] is not self.best] if is_open else []
        self.rivals = [each[0].topology.loss for each in rest]
        self.alike = [each.topology.loss for group in equal if group[0] is self.best for each in group[1:]]


def _find_named_states(graph: ir.Graph) -> Container[ir.Value]:
    """Find the outputs that are named as next values."""
    return widest_pattern(graph.outputs, (*graph.inputs, *graph.initializers.values()), graph.outputs, lambda _: False)


def _is_named(solution: Solution, states: Container[ir.Value]) -> bool:
    return any(loss in states for loss in solution.topology.losses)


def _best_of(group: Sequence[Solution], rank: Callable[[Sequence[Solution]], Rank]) -> list[Solution]:
    """Return the solutions with the fewest faults."""
    faults = [rank([each])[:3] for each in group]
    return [each for each, mine in zip(group, faults, strict=True) if mine == max(faults)]


def _name(group: Sequence[Solution]) -> list[Solution]:
    """Return the solutions with the fewest losses, the likeliest first."""
    fewest = min(len(each.topology.losses) for each in group)
    few = [each for each in group if len(each.topology.losses) == fewest]
    left = [one for one in few if not any(other is not one and _supersedes(other, one) for other in few)]
    return sorted(left or few, key=_likelihood) if len(left or few) > 1 else left


def _prefer(solutions: Sequence[Solution]) -> Solution | None:
    """Return the first solution whose loss supersedes all others."""
    return next((one for one in solutions if all(one is other or _supersedes(one, other) for other in solutions)), None)


def _propose(solutions: Sequence[Solution], states: Container[ir.Value]) -> Solution:
    """Return the likeliest of several solutions: no next value by its name, then a total of the others."""
    left = [each for each in solutions if not _is_named(each, states)] or solutions
    return _prefer(left) or min(left, key=_likelihood)


def _likelihood(solution: Solution) -> tuple[int, int, bool, int]:
    """Return a key: the loss of all that the gradients read, with its derivatives, named so, and read the most first.

    A derivative depends on nothing that its function does not depend on.
    """
    topology, read = solution.topology, solution.read
    others = sum(value in read and value not in topology.forward for value in topology.graph.inputs)
    is_named = any(not _LOSS_WORDS.isdisjoint(words_of((loss.name or "").lower())) for loss in topology.losses)
    return others, _count_lacking(solution), not is_named, -sum(value in read for value in topology.forward)


def _count_lacking(solution: Solution) -> int:
    """Return how many functions, from the last layer to the losses, have no derivative among the gradients.

    That of a root, a quotient or a maximum of all examples depends on its operands, that of an error on its sign.
    """
    varying, topology = _find_varying(solution.topology), solution.topology
    nodes = (v.producer() for v in varying if v in topology.tail)
    return sum(node is not None and not _has_derivative(solution, node, varying) for node in nodes)


def _find_varying(topology: Topology) -> set[ir.Value]:
    """Find the differentiable functions of a layer's result in the forward pass."""
    varying = set[ir.Value]()
    for node in topology.nodes:
        value = node.outputs[0]
        smooth = value in topology.forward and smooth_operands(value)
        if smooth and (node in topology.contractions or not varying.isdisjoint(smooth)):
            varying.add(value)
    return varying


def find_differentiated(solution: Solution) -> ir.Value:
    """Find the value whose gradients are computed: the loss, or the only operand of functions without derivatives."""
    loss, varying = solution.topology.loss, _find_varying(solution.topology)
    while (node := loss.producer()) is not None and loss in varying and node not in solution.topology.contractions:
        moving = [value for value in solution.topology.operands(node) if value in varying]
        alone = all(value in moving or constant_tensor(value) is not None for value in inputs_of(node))
        if len(moving) != 1 or not alone or _has_derivative(solution, node, varying):
            break
        loss = moving[0]
    return loss


def _has_derivative(solution: Solution, node: ir.Node, varying: Set[ir.Value]) -> bool:
    """Return whether gradients read all that the derivative of an error, or of a number, depends on."""
    rule, read = rule_of(node), solution.read
    moving = [value for value in solution.topology.operands(node) if value in varying]
    if node.op_type in ("Abs", "Pow") or (node.op_type == "Mul" and len({*node.inputs}) == 1):
        return any(_is_sign(each) is (node.op_type == "Abs") for v in moving for each in _readers(solution, v))
    if rule is None or not is_number(node.outputs[0]):
        return True
    if node.op_type in _CHOICES:
        return node.outputs[0] in read
    if rule.kind in (Kind.LINEAR, Kind.BODY):
        return True
    if _is_multiple(node, rule.kind, moving):
        rest = (value for value in inputs_of(node) if value not in moving)
        return all(value in read or constant_tensor(value) is not None for value in rest)
    return any(value in read for value in (*moving, *node.outputs))


def _readers(solution: Solution, value: ir.Value) -> Iterator[ir.Node]:
    """Yield the nodes on the way to gradients that read a value."""
    return (node for node in solution.topology.consumers(value) if node.outputs[0] in solution.read)


def _is_sign(node: ir.Node) -> bool:
    rule = rule_of(node)
    return rule is not None and rule.kind in (Kind.COMPARE, Kind.DEGREE_0)


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

    learnt = topology.held_states if solution.moved is None else solution.moved
    weights = {v for v in reach([term], above) if v in learnt and not is_scalar(v)}
    return not weights or weights <= {*reach(_sums(topology, solution.solver.plan.unscaled), above_gradient)}


def _sums(topology: Topology, gradients: Iterable[ir.Value]) -> Iterator[ir.Value]:
    """Yield gradients, and the sums and products with them that no later step reads."""

    def below(value: ir.Value) -> Iterator[ir.Value]:
        for node in topology.consumers(value):
            if node.op_type in ("Add", "Sub", "Sum", "Mul"):
                yield from (each for each in node.outputs if not each.is_graph_output())

    return reach(gradients, below)


def _is_of_numbers(value: ir.Value) -> bool:
    sources = (v for v in ancestors([value]) if v.producer() is None or constant_tensor(v) is not None)
    return all(map(is_scalar, sources))


def _is_multiple(node: ir.Node, kind: Kind, varying: Sequence[ir.Value]) -> bool:
    """Return whether a node multiplies one of its operands that vary, or divides it, by others."""
    is_one = len(varying) == 1 and sum(value is varying[0] for value in node.inputs) == 1
    return is_one and (kind is Kind.PRODUCT or (kind is Kind.QUOTIENT and node.inputs[0] is varying[0]))


def find_unreduced_losses(graph: ir.Graph, others: set[ir.Value]) -> list[ir.Value]:
    """Find the outputs that may be the losses of samples or of models: no sums with state; new types first."""
    holders = [*graph.inputs, *graph.initializers.values()]
    computed = [v for v in graph.outputs if v not in others and v.producer() is not None and is_float(v)]
    computed = [v for v in computed if v.dtype is not None and is_differentiable(v)]
    states = {value for value in holders if is_float(value)}
    found = [v for v in computed if not any(c >= NEXT_STATE for c in find_coefficients(v, states).values())]
    return [v for v in found if not any(same_type(v, each) for each in holders)] or found


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
