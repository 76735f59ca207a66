"""The choice of the losses: the set of scalar outputs whose gradients explain the backward pass.

Each candidate is solved alone; sets of several only while contractions stay without an explanation. Sets that lead to
the same edits are one choice: only its name is open. The choice that fits, covers the most contractions and
begins at constants is certain if no other one is better in any of these.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import onnx_ir as ir

from graphscale.analysis.loss import find_carried_number, is_number
from graphscale.analysis.roles.answers import Answers
from graphscale.analysis.solution import Solution
from graphscale.analysis.topology import Topology
from graphscale.errors import GradientError, GraphscaleError, LossError, SeedNotFoundError
from graphscale.graph.values import constant_tensor, inputs_of, is_float
from graphscale.graph.walks import ancestors
from graphscale.operators import Kind, may_bend, rule_of
from graphscale.process.stages import report_stage

if TYPE_CHECKING:
    from graphscale.analysis.loss_rivals import Faults, Rank

__all__ = ["LossChoice", "choose_losses"]

# limits, since each is solved, and compared with each other one
_MOST_LOSSES = 64
_MOST_SETS = 60

# Errors of a candidate that has no backward pass, such as a metric.
_NO_BACKWARD = (SeedNotFoundError, GradientError)

_DIFFERENTIATED = "the scalar output that the backward pass differentiates"
_SAME = "the likeliest one, and each other one leads to the same scaled graph"

# The fitness of a solution without a fault.
_FITTING = (True, True, 0, 0)

Losses = tuple[ir.Value, ...]


@dataclasses.dataclass(frozen=True)
class LossChoice:
    """The chosen losses.

    Attributes:
        solution: the losses, with their places of the scale.
        how: the evidence for them.
        certain: True if no other set fits as well.
        warnings: notes for the user on weights without a gradient.
    """

    solution: Solution
    how: str
    certain: bool
    warnings: tuple[str, ...] = ()


def choose_losses(
    candidates: Sequence[ir.Value],
    solve: Callable[[Losses], Solution],
    answers: Answers,
    named: Sequence[ir.Value] = (),
) -> LossChoice:
    """Choose the losses among the scalar outputs that may be losses, or those that the user named.

    Args:
        candidates: the scalar outputs that may be losses.
        solve: solves the graph for some losses.
        answers: the answers of the user.
        named: the losses that the user named.

    Raises:
        LossError, SeedNotFoundError, NonlinearGradientError, UnknownOperatorError, GradientError,
            UnsupportedModelError: no set of the candidates has a backward pass that can be scaled.
    """
    if len(candidates) > _MOST_LOSSES and not named:
        raise LossError(f"{len(candidates)} outputs could be the loss, too many to try; name it with --loss")
    fitness = _Fitness(candidates)
    solutions, failures = _solve_sets(fitness, solve, tuple(named))
    # Of outputs that are no numbers, none need be a loss.
    errors = [each for each in failures.items() if named or is_number(each[0])]
    errors.sort(key=lambda failure: isinstance(failure[1], _NO_BACKWARD))
    best, rivals, alike = (solutions[0] if solutions else None), list[ir.Value](), list[ir.Value]()
    if len(solutions) > 1:
        from graphscale.analysis.loss_rivals import Choices  # most steps have one solution

        choices = Choices(solutions, fitness.rank)
        best, rivals, alike = choices.best, choices.rivals, choices.alike
    if best is None or (best.coverage.total == 0 and errors and not isinstance(errors[0][1], _NO_BACKWARD)):
        from graphscale.analysis.loss_rivals import explain_failures  # for the message

        # The backward pass belongs to a loss that cannot be scaled.
        raise explain_failures(errors, bool(named))
    if best.no_derivative is not None:
        raise SeedNotFoundError(
            f"the graph does not differentiate the loss {best.topology.loss.name!r}: {best.no_derivative}; in an "
            "estimate without derivatives, nothing is scaled; else name the edge where it enters with --seed-edge "
            "NODE:INDEX"
        )
    unexplained = fitness.describe(best)
    if named:
        warnings = [f"{each}; it is neither scaled nor checked" for each in unexplained]
        return LossChoice(best, answers.evidence(best.topology.loss.name), True, tuple(warnings))
    best = _with_differentiated_loss(_with_further_losses(best, candidates, solve), solve)
    if rivals:
        names = ", ".join(repr(loss.name) for loss in rivals)
        return LossChoice(best, f"it is the likeliest, but the backward pass also fits {names}", False)
    if unexplained:
        return LossChoice(best, f"it is the likeliest, but {'; '.join(unexplained)}", False)
    if best.selects is not None:
        how = f"the scale would enter at {best.selects}, a choice by the data, and no weight is a sum with a gradient"
        return LossChoice(best, how, False)
    number = _find_carried_number(best)
    if number is not None:
        how = f"it may be a running sum or average, and the next value of {number.name!r}"
        return LossChoice(best, how, False)
    return LossChoice(best, _SAME if alike else _DIFFERENTIATED, True)


def _solve_sets(
    fitness: _Fitness, solve: Callable[[Losses], Solution], named: Losses
) -> tuple[list[Solution], dict[ir.Value, GraphscaleError]]:
    """Solve sets of losses, the smallest first, until one explains all; return them, and failures of single ones."""
    candidates, solutions = fitness.candidates, list[Solution]()
    failures: dict[ir.Value, GraphscaleError] = {}
    for losses in _iterate_sets(fitness, solutions, named):
        if not named and len(candidates) > 1 and len(losses) == 1:
            report_stage(f"trying {losses[0].name} as the loss", candidates.index(losses[0]), len(candidates))
        try:
            solution = solve(losses)
        except GraphscaleError as error:
            failures.update({losses[0]: error} if losses == named or len(losses) == 1 else {})
            continue
        if losses == named or solution.differentiates_all:
            solutions.append(solution)
    return solutions, failures


def _iterate_sets(fitness: _Fitness, solutions: Sequence[Solution], named: Losses) -> Iterator[Losses]:
    """Yield sets of candidates, those of one size before larger ones, while no solution explains the graph."""
    candidates = fitness.candidates
    if named:
        yield named
        # Each of several losses may stand for all, those of micro-batches, say.
        others = [value for value in candidates if value not in named]
        if not solutions:
            yield from ((*named, *more) for more in _iterate_subsets(others, _MOST_SETS))
        return
    yield from ((candidate,) for candidate in candidates)
    if len(candidates) > 1 and not any(fitness.explains(each, solutions) for each in solutions):
        # Losses that are computed by next weights come after those whose gradients move the weights.
        ordered = sorted(candidates, key=lambda loss: len(ancestors([loss])))
        yield from (losses for losses in _iterate_subsets(ordered, _MOST_SETS) if len(losses) > 1)


def _iterate_subsets(values: Sequence[ir.Value], most: int) -> Iterator[Losses]:
    subsets = (each for count in range(1, len(values) + 1) for each in itertools.combinations(values, count))
    return itertools.islice(subsets, most)


def _with_further_losses(
    best: Solution, candidates: Sequence[ir.Value], solve: Callable[[Losses], Solution]
) -> Solution:
    """Return a solution with the other candidates that have cotangents of their own, where the edits stay the same."""
    for value in candidates:
        losses = best.topology.losses
        known = best.topology.ancestors(losses)
        if value in known or value in best.reached or not best.learns_from(value):
            continue
        # Derivatives of a known loss, such as probabilities, may also be read by a metric.
        derived = best.topology.descendants(best.topology.tail)
        own = (v for v in best.topology.ancestors([value]) if v not in known and v.producer() is not None)
        if not any(v in best.solver.live and v not in derived for v in own):
            continue
        with contextlib.suppress(GraphscaleError):  # no loss then
            further = solve((*losses, value))
            if further.differentiates_all and further.edits_as(best):
                best = further
    return best


def _with_differentiated_loss(best: Solution, solve: Callable[[Losses], Solution]) -> Solution:
    """Return the solution of the value below functions at the end of a loss whose derivatives no gradient reads."""
    loss, node = best.topology.loss, best.topology.loss.producer()
    rule = None if node is None else rule_of(node)
    if len(best.topology.losses) > 1 or node is None or rule is None:
        return best
    floats = [value for value in (*inputs_of(node), *node.outputs) if is_float(value)]
    is_read = any(value in best.read or constant_tensor(value) is not None for value in floats)
    if is_read if rule.kind is not Kind.LINEAR else not may_bend(node):
        return best
    from graphscale.analysis.loss_rivals import find_differentiated  # most losses are sums or means

    inner = find_differentiated(best)
    if inner is not loss:
        with contextlib.suppress(GraphscaleError):  # the function of it stands for it
            other = solve((inner,))
            if other.edits_as(best):
                return other
    return best


class _Fitness:
    """The faults of solutions.

    Args:
        candidates: the scalar outputs that may be losses.
    """

    def __init__(self, candidates: Sequence[ir.Value]) -> None:
        self.candidates = candidates
        self._topologies: dict[ir.Value, Topology] = {}
        self._faults: dict[Solution, Faults] = {}
        self._unexplained: dict[Solution, dict[ir.Value, list[ir.Value]]] = {}

    def explains(self, solution: Solution, others: Sequence[Solution] = ()) -> bool:
        """Return whether each contraction belongs to a forward pass, to the covered backward pass, or the optimizer.

        A contraction that another solution covers is no forward pass: the loss may measure the other's gradients.
        """
        topology = solution.topology
        covered = (node for other in others for node in {*other.coverage.nodes}.difference(other.coverage.missed))
        if any(not topology.forward.isdisjoint(node.outputs) for node in covered):
            return False
        if not self.fits(solution) or topology.reads_next_weights or self.unexplained(solution):
            return False
        cone = topology.ancestors(self.candidates)
        rest = (topology.contractions & topology.backward) - solution.others - {*solution.coverage.nodes}
        return all(any(value in cone for value in node.outputs) for node in rest)

    def fits(self, solution: Solution) -> bool:
        """Return whether a solution covers the backward pass: nothing is missed, and the scale enters at seeds."""
        return self.faults(solution) == _FITTING and solution.coverage.covered > 0

    def faults(self, solution: Solution) -> Faults:
        """Return the faults of a solution; a greater tuple is better."""
        if solution not in self._faults:
            # A contraction of another scalar's forward pass is no part of the backward pass.
            missed = len(solution.coverage.missed)
            if missed:
                others = [value for value in self.candidates if value not in solution.reached]
                cone = solution.topology.ancestors(others)
                missed = sum(not any(value in cone for value in node.outputs) for node in solution.coverage.missed)
            seeds = solution.no_derivative is None
            self._faults[solution] = not solution.solver.unscales_cotangents, seeds, -solution.misfits, -missed
        return self._faults[solution]

    def unexplained(self, solution: Solution) -> Mapping[ir.Value, Sequence[ir.Value]]:
        """Return the terms that move weights of each candidate without a scale."""
        if solution not in self._unexplained:
            terms = {loss: self._find_terms(solution, loss) for loss in self.candidates if solution.moves_others}
            self._unexplained[solution] = {loss: each for loss, each in terms.items() if each}
        return self._unexplained[solution]

    def _find_terms(self, solution: Solution, loss: ir.Value) -> list[ir.Value]:
        topology = solution.topology
        if loss in solution.reached:
            return []  # a measure of the gradients
        if loss not in topology.losses:
            if loss not in self._topologies:
                self._topologies[loss] = topology.of(loss)
            topology = self._topologies[loss]
        return solution.unexplained(topology)

    def rank(self, group: Sequence[Solution]) -> Rank:
        """Return the rank of solutions with the same edits."""
        from graphscale.analysis.loss_rivals import Rank  # most steps have one solution

        fitting = [each for each in group if self.fits(each)]
        unexplained = max((-len(self.unexplained(each)) for each in fitting), default=0)
        of = [each for each in fitting if -len(self.unexplained(each)) == unexplained] or group
        covered, constant = max(each.coverage.covered for each in of), any(each.begins_with_constants for each in of)
        return Rank(bool(fitting) and not unexplained, max(map(self.faults, group)), unexplained, covered, constant)

    def describe(self, solution: Solution) -> list[str]:
        """Describe the weights of each candidate that move without a scale."""
        found = self.unexplained(solution).items()
        terms = [(", ".join(repr(value.name) for value in values), loss) for loss, values in found]
        return [f"{each} moves a weight of {loss.name!r}, and no gradient explains it" for each, loss in terms]


def _find_carried_number(solution: Solution) -> ir.Value | None:
    """Find a number whose next value may be the loss, a stored one only where the file may store state."""
    topology, number = solution.topology, None
    for may_be_stored in (True, False):
        found = (find_carried_number(topology.graph, loss, may_be_stored) for loss in topology.losses)
        number = next((value for value in found if value is not None), None)
        if number is None or number.is_graph_input() or topology.may_store_state(solution.solver.plan.unscaled.keys()):
            break
    return number
