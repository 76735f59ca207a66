"""A set of losses with its places of the scale: the solution of a training graph for these losses."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable, Collection, Container, Sequence, Set

import onnx_ir as ir

from graphscale.analysis.edits import Place
from graphscale.analysis.loss import is_differentiable, is_number, smooth_operands
from graphscale.analysis.places import find_held_numbers
from graphscale.analysis.solve import Solver
from graphscale.analysis.topology import Topology
from graphscale.analysis.training_result import Coverage, measure_coverage
from graphscale.analysis.updates import DIRECT, NEXT_STATE, ByType, find_terms, known_factors, same_type
from graphscale.errors import GradientError, GraphscaleError, NonlinearGradientError, SeedNotFoundError
from graphscale.flow.degree import ZERO
from graphscale.graph.values import Use, constant_tensor, is_float, is_scalar
from graphscale.graph.walks import NodeIndex, reach
from graphscale.operators import Trait, may_bend

__all__ = ["Solution", "solve_losses"]

_SUMS = frozenset(("ReduceSum", "ReduceMean", "ReduceSumSquare"))


@dataclasses.dataclass(frozen=True, eq=False)
class Solution:
    """A set of losses, with its places of the scale.

    Attributes:
        topology: the dependences of each value, for these losses.
        solver: the edits.
        coverage: the backward contractions, and those without a scaled operand.
        others: contractions of the optimizer, and those that measure the step.
    """

    topology: Topology
    solver: Solver
    coverage: Coverage
    others: Set[ir.Node]

    @functools.cached_property
    def reached(self) -> Set[ir.Value]:
        """The values that depend on a place where the scale enters."""
        plan = self.solver.plan
        return self.topology.descendants(plan.scaled_values, {use.node for use in plan.scaled_edges})

    @functools.cached_property
    def explained(self) -> Set[ir.Value]:
        """The values that depend on a gradient."""
        return self.solver.explained

    @functools.cached_property
    def moves_others(self) -> bool:
        """True if a state moves that no gradient reaches."""
        topology = self.topology
        rest = (
            v for v in topology.graph.outputs if v not in self.explained and is_float(v) and topology.is_backward(v)
        )
        return any(c >= NEXT_STATE for output in rest for c in topology.coefficients(output).values())

    def unexplained(self, topology: Topology) -> list[ir.Value]:
        """Return the terms that move weights of a loss, perhaps another one, without a scale."""
        terms = _find_learnt_terms(topology, self.explained)
        return [v for v in terms if v not in self.topology.forward and self.solver.plan.degree(v) == 0]

    @functools.cached_property
    def misfits(self) -> int:
        """The number of cotangents to unscale that are no gradients of state: a wrong choice unscales activations."""
        forced = (each.value for each in self.solver.plan.unscaled.values() if each.reason is not None)
        live, topology = self.solver.live, self.topology
        return sum(not (value not in live or is_scalar(value) or topology.may_be_state(value)) for value in forced)

    @functools.cached_property
    def differentiates_all(self) -> bool:
        """True if, for each of several losses, cotangents depend on values that this loss alone is computed from."""
        topology = self.topology
        if len(topology.losses) == 1:
            return True
        # Next weights of one loss, by which another one is computed, are no part of the other.
        ends = {value.producer() for value in topology.anew}
        passes = (topology.ancestors([loss], stop=ends.__contains__) for loss in topology.losses)
        above = [{value for value in each if value.producer()} for each in passes]
        live = self.solver.live | topology.ancestors(self.solver.learnt)
        return all(any(v in live for v in own.difference(*(a for a in above if a is not own))) for own in above)

    @functools.cached_property
    def begins_with_constants(self) -> bool:
        """True if the scale enters at constants alone, other than stored numbers with a next value."""
        values = {place.value for place in self.solver.plan.places}
        return all(constant_tensor(value) is not None for value in values) and values.isdisjoint(
            find_held_numbers(self.topology)
        )

    @functools.cached_property
    def moves_weights(self) -> bool:
        """True if gradients leave the graph, or may move a state of the losses; False if they move others alone."""
        topology, moved = self.topology, self.moved
        if moved is None or not moved or not moved.isdisjoint(topology.forward):
            return True
        tensors = ByType(v for v in topology.states if v in topology.forward and is_float(v) and not is_scalar(v))
        nexts = (v for v in topology.graph.outputs if v in self.explained and v not in topology.forward)
        return any(is_float(v) and tensors.like(v) for v in nexts)

    def learns_from(self, loss: ir.Value) -> bool:
        """Return whether a loss is a differentiable function of a state that gradients move, where they move any."""
        return not self.moved or not self.moved.isdisjoint(reach([loss], self._smooth_operands))

    @functools.cached_property
    def selects(self) -> str | None:
        """The place where the scale enters at a choice by the data, if weights are no sums with gradients, or None."""
        topology, places = self.topology, self.solver.plan.places
        if self.moved is None or not self.moved.isdisjoint(topology.forward):
            return None
        found = (place for place in places if place.value in self.fed and not is_differentiable(place.value))
        return next(map(str, found), None)

    @functools.cached_property
    def moved(self) -> Set[ir.Value] | None:
        """The states in sums with gradients; None if gradients leave the graph, or a node writes into its operands."""
        topology = self.topology
        writes = topology.nodes_like(lambda operator: bool(operator.traits & Trait.EFFECT))
        if writes or any(map(ir.Value.is_graph_output, self.solver.plan.unscaled)):
            return None
        nexts = (v for v in topology.graph.outputs if v in self.explained)
        held = (each for v in nexts for each in topology.coefficients(v).items())
        return {state for state, c in held if c >= NEXT_STATE}

    @functools.cached_property
    def fed(self) -> Set[ir.Value]:
        """The values that depend on a tensor among the inputs."""
        return self.topology.descendants({value for value in self.topology.graph.inputs if not is_scalar(value)})

    @functools.cached_property
    def no_derivative(self) -> str | None:
        """The reason why the gradients are no derivatives of the losses; None where there is none.

        The scale enters at cotangents, which depend on the tail of a loss, or on a target. A loss is a differentiable
        function of a layer or a weight; the derivative of a sum does not depend on the sum, and that of a value without
        a layer has none.
        """
        topology, plan = self.topology, self.solver.plan
        if self.solver.seed is not None:
            return None
        if not self.moves_weights:
            return "its gradients move no weight that it depends on"
        layers = any(not topology.forward.isdisjoint(node.outputs) for node in topology.contractions)
        weights = topology.held_states & topology.forward
        smooth = reach(topology.losses, self._smooth_operands)
        if (layers or weights) and not any(v in weights or v.producer() in topology.contractions for v in smooth):
            return "no layer or weight changes it in a differentiable way"
        sums = self._find_sums()
        for place in sorted(plan.places, key=lambda place: topology.position(place.value)):
            if place.value in self.fed and not topology.is_late(place.value):
                return f"the scale would enter at {place}, where the data is, and not the result of a layer"
            if place.value not in sums and any(v in sums for v in reach([place.value], self._smooth_operands)):
                return f"the scale would enter at {place}, which depends on the value of the loss"
        indexed = topology.nodes_like(
            lambda operator: bool(operator.traits & (Trait.INDEXES_AXIS | Trait.INDEXES_AXES))
        )
        tables = any(not topology.forward.isdisjoint(node.outputs) for node in indexed)
        if self.coverage.covered and not (layers or tables):
            return "no layer computes it, and the backward pass has one"
        return None

    def _smooth_operands(self, value: ir.Value) -> Collection[ir.Value]:
        node, flat = value.producer(), self.topology.flat
        return flat.above(value) if node is None or node in flat.entries else smooth_operands(value)

    def _find_sums(self) -> set[ir.Value]:
        """Find the sums and means that the losses are, or are sums of."""
        factors = known_factors(self.topology.flat.origins)

        def terms(value: ir.Value) -> Sequence[ir.Value]:
            node = value.producer()
            known = () if node is None else find_terms(node, value, factors, DIRECT)
            return [operand for operand, factor in known if factor and is_number(operand)]

        found = ((v, v.producer()) for v in reach(self.topology.losses, terms))
        return {v for v, node in found if node is not None and node.op_type in _SUMS}

    @functools.cached_property
    def read(self) -> Set[ir.Value]:
        """The values that the gradients are computed from."""
        return self.topology.ancestors(self.solver.plan.unscaled)

    def edits_as(self, other: Solution) -> bool:
        """Return whether another solution has the same places and unscalings."""
        mine, others = self.solver.plan, other.solver.plan
        return {*mine.places} == {*others.places} and mine.unscaled == others.unscaled


def solve_losses(
    graph: ir.Graph,
    losses: Sequence[ir.Value],
    held: Collection[ir.Value],
    seed: Use | None,
    chosen: Sequence[ir.Value],
    index: NodeIndex,
) -> Solution:
    """Solve a graph for some losses; after a refusal, again without a scale in bodies, if it protects others.

    Args:
        graph: the main graph.
        losses: the losses.
        held: the initializers with a next value among the outputs.
        seed: None to find the places; else the only edge where the scale enters.
        chosen: values named as gradients.
        index: the nodes of the graph.

    Raises:
        SeedNotFoundError, NonlinearGradientError, UnknownOperatorError, GradientError, UnsupportedModelError: the scale
            fits no backward pass of these losses.
    """
    make = functools.partial(Topology, graph, losses[0], held, others=losses[1:], index=index)
    try:
        return _without_other_layers(_solve_moving(make, seed, chosen), chosen)
    except GraphscaleError:
        with contextlib.suppress(GraphscaleError):
            if index.holders:
                solution = _solve_moving(functools.partial(make, closed=True), seed, chosen)
                if solution.coverage.covered:
                    return solution
        raise


def _solve_moving(make: Callable[..., Topology], seed: Use | None, chosen: Sequence[ir.Value]) -> Solution:
    """Solve a graph; after a refusal, again with forward passes at weights that gradients moved."""
    try:
        return _solve(make(), seed, chosen)
    except NonlinearGradientError:
        topology = make(moving=True)
        if not topology.anew:
            raise
        solution = _solve(topology, seed, chosen)
        if solution.solver.unscales_cotangents:
            raise
        return solution


def _without_other_layers(solution: Solution, chosen: Sequence[ir.Value]) -> Solution:
    """Return the solution without the layers of a loss that is no output, at other weights or samples, if it fits.

    The operands of a layer depend on no tail of a loss, on no target, and its result leads to a cotangent.
    """
    topology = solution.topology
    if solution.no_derivative is None:
        return solution

    def is_cotangent(value: ir.Value) -> bool:
        return topology.is_backward(value) and (value not in solution.fed or topology.is_late(value))

    layers = {n for n in solution.coverage.nodes if not any(map(is_cotangent, topology.operands(n)))}
    with contextlib.suppress(GraphscaleError):  # the first solution stands
        other = _solve(topology.without(layers), solution.solver.seed, chosen)
        leads = all(value in other.solver.live for node in layers for value in node.outputs)
        if leads and other.coverage.covered and other.no_derivative is None:
            return other
    return solution


def _solve(topology: Topology, seed: Use | None, chosen: Sequence[ir.Value]) -> Solution:
    loss = topology.loss
    for value in chosen:
        if value in topology.forward:
            raise GradientError(
                f"--gradient {value.name}: the loss {loss.name!r} depends on this value, so it is no gradient of it"
            )
    solver, optimizer = _find_edits(topology, seed, chosen)
    solver = _with_learnt_terms(solver, chosen)
    topology, plan = solver.topology, solver.plan
    if not plan.places:
        raise SeedNotFoundError(
            f"no place was found where the loss scale can enter the backward pass of loss {loss.name!r}: "
            + _why_no_place(solver)
        )
    if plan.degree(loss) not in (0, ZERO):
        raise SeedNotFoundError(f"the loss {loss.name!r} would itself be scaled; name the loss with --loss")
    for value in chosen:
        if value not in plan.unscaled and value not in solver.lost:
            raise GradientError(
                f"--gradient {value.name}: the loss scale does not reach this value; is it computed by the "
                "backward pass?"
            )
    if not plan.unscaled:
        raise SeedNotFoundError(f"the scale that enters at {plan.places[0]} reaches no gradient and no update")
    others = optimizer | topology.validating | solver.statistics
    return Solution(topology, solver, measure_coverage(topology, plan, solver.cotangents, others), others)


def _find_edits(topology: Topology, seed: Use | None, chosen: Sequence[ir.Value]) -> tuple[Solver, Set[ir.Node]]:
    """Return the solver, after `solve`, and the contractions that belong to no backward pass."""
    solver, error = Solver(topology, seed, chosen), None
    try:
        behind = topology.descendants({*chosen})
        wanted: list[ir.Value] = []
        if not solver.cotangents:
            from graphscale.analysis.learnt import GradientLikeValues  # few steps have no contraction

            wanted = [v for v in GradientLikeValues(topology).of(topology.graph.outputs) if v not in behind]
        solver.solve(wanted)
    except (NonlinearGradientError, SeedNotFoundError) as refusal:
        error = refusal
    again: Set[ir.Node] = set()
    unsettled = error is not None or solver.unscales_cotangents
    if unsettled:
        from graphscale.analysis.other_contractions import find_reconstructions  # few steps need it

        again = find_reconstructions(topology, solver.cotangents)
    # A normalization ahead of a contraction of the optimizer ends the scale, and nothing is refused.
    is_behind = not error and bool(_find_places_behind_gradients(solver))
    if unsettled or again or is_behind or solver.plan.missed(topology.contractions & topology.backward):
        with contextlib.suppress(NonlinearGradientError, SeedNotFoundError):  # the first solution stands
            from graphscale.analysis.other_contractions import solve_without_others  # few steps need it

            other = solve_without_others(topology, seed, chosen, again)
            if other is not None:
                rest = other[0].topology.contractions & topology.backward - other[1]
                if error or is_behind or not other[0].plan.missed(rest):
                    return other
    if error:
        raise error
    return solver, set()


def _with_learnt_terms(solver: Solver, chosen: Sequence[ir.Value]) -> Solver:
    """Return the solver of the same edits, and more for weights without a gradient, if these allow it."""
    topology = solver.topology
    if solver.seed is not None or not solver.cotangents or solver.unscales_cotangents:
        return solver
    learnt = _find_learnt_terms(topology, solver.explained)
    if learnt:
        with contextlib.suppress(GraphscaleError):  # the step is open then
            other = Solver(topology, None, chosen, solver.optimizer)
            other.solve(learnt=learnt)
            backward = topology.contractions & topology.backward
            if not other.unscales_cotangents and other.plan.missed(backward) <= solver.plan.missed(backward):
                return other
    return solver


def _find_learnt_terms(topology: Topology, explained: Container[ir.Value]) -> list[ir.Value]:
    """Find the terms that move weights of the loss, where their next values are not explained by known gradients."""
    moved: list[tuple[ir.Value, ir.Value]] = []
    for output in topology.graph.outputs:
        is_moved = output in topology.tail_dependent and output not in topology.forward and output not in explained
        held = topology.coefficients(output).items() if is_moved and is_float(output) else ()
        weights = (v for v, c in held if c >= NEXT_STATE and v in topology.forward and same_type(output, v))
        moved += ((output, weight) for weight in itertools.islice(weights, 1))
    if not moved:
        return []
    from graphscale.analysis.learnt import find_learnt_terms  # few steps have such weights

    return find_learnt_terms(topology, moved)


def _find_places_behind_gradients(solver: Solver) -> tuple[Place, ...]:
    """Find the places where a scale enters at a value that depends on no loss but through unscaled gradients.

    A next weight is such a value, unlike the seed of a second loss, which reads the moved weight, and unlike a bounded
    cotangent, which is unscaled before its bound.
    """
    topology, unscaled = solver.topology, solver.plan.unscaled
    ends = {value.producer() for value in unscaled}
    tail, targets = topology.tail, topology.targets

    def depends_on_loss(value: ir.Value) -> bool:
        above = topology.ancestors([value], stop=(ends - {value.producer()}).__contains__)
        return any(v in tail or v in targets or (v.producer() is None and topology.late_inputs(v)) for v in above)

    def is_bounded(value: ir.Value) -> bool:
        node = value.producer()
        return node is not None and (node in topology.flat.entries or may_bend(node))

    places = [each for each in solver.plan.places if not is_bounded(each.value)]
    reads = topology.ancestors(each.value for each in places)
    if unscaled.keys().isdisjoint(reads):
        return ()
    behind = topology.descendants(unscaled.keys())
    return tuple(each for each in places if each.value in behind and not depends_on_loss(each.value))


def _why_no_place(solver: Solver) -> str:
    if not solver.topology.backward:
        return "nothing but the loss reaches the outputs; is this an inference graph? Export the training graph"
    if not solver.cotangents:
        return "no gradient operator, and no contraction that reads a cotangent; name one with --seed-edge NODE:INDEX"
    nodes = ", ".join(repr(node.name) for node in list(solver.cotangents)[:3])
    return f"the demand from {nodes} reached no value that can be scaled; name an edge with --seed-edge NODE:INDEX"
