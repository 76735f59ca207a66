"""The analysis of a training graph: its loss, the places of the scale, its gradients and its updates."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from typing import TYPE_CHECKING

import onnx_ir as ir

from graphscale.analysis.attempt import Attempt, TryTogether
from graphscale.analysis.edits import Plan
from graphscale.analysis.hints import NO_HINTS, Hints, resolve_pairs
from graphscale.analysis.loss import find_loss_candidates, resolve_loss
from graphscale.analysis.loss_evidence import choose_attempt
from graphscale.analysis.other_contractions import OptimizerContractions
from graphscale.analysis.places import find_gradient_like_values
from graphscale.analysis.recomputed import is_copy
from graphscale.analysis.roles.answers import Answers, ask
from graphscale.analysis.roles.assignment import assign_roles
from graphscale.analysis.roles.role_table import Roles
from graphscale.analysis.solve import Solver
from graphscale.analysis.topology import Topology
from graphscale.analysis.training_result import TrainingGraph, measure_coverage
from graphscale.analysis.updates import NEXT_STATE, Update, find_held_initializers, same_type, zeros_as_inputs
from graphscale.errors import (
    GradientError,
    GraphscaleError,
    LossError,
    NonlinearGradientError,
    RolesError,
    SeedNotFoundError,
    UnsupportedModelError,
    UpdateError,
    suggest,
)
from graphscale.flow.degree import ZERO
from graphscale.graph.values import Use, inputs_of, is_float, subgraphs, value_label, values_by_name
from graphscale.operators import Trait, nodes_with
from graphscale.process.stages import report_stage

if TYPE_CHECKING:
    from graphscale.analysis.bodies import Unrolled

__all__ = ["TrainingGraph", "analyse"]

# limit, since each is tried, and compared with each other one
_MOST_LOSSES = 64


def analyse(graph: ir.Graph, hints: Hints = NO_HINTS, *, asking: bool = True) -> TrainingGraph:
    """Analyse the main graph of a model.

    Args:
        graph: the main graph, with no calls of model-local functions in it.
        hints: the user's names.
        asking: True to refuse a graph with an open role of an output; else such a role is a proposal.

    Raises:
        LossError, SeedNotFoundError, NonlinearGradientError, UnknownOperatorError, GradientError, UpdateError,
            RolesError, UnsupportedModelError: the message names the value, node or body, and the remedy.
    """
    unrolled = None
    if any(map(subgraphs, graph)):
        from graphscale.analysis.bodies import unroll_bodies  # few steps have bodies

        unrolled = unroll_bodies(graph)
    if unrolled is None:
        return _analyse(graph, hints, asking)
    result = _look_into_bodies(graph, unrolled, hints)
    if asking and (table := result.roles.table()).open:
        raise ask(table)
    return result


def _look_into_bodies(graph: ir.Graph, unrolled: Unrolled, hints: Hints) -> TrainingGraph:
    """Analyse a graph, and a copy whose bodies run once; return the analysis that protects more contractions."""
    inside: TrainingGraph | None = None
    failure: GraphscaleError | None = None
    refusal: GraphscaleError | None = None  # an error that names a body
    try:
        inside = unrolled.restore(_analyse(unrolled.graph, hints, asking=False, runs=False))
    except UnsupportedModelError as error:
        refusal = error
    except GraphscaleError as error:
        failure, refusal = error, None if hints.answers.losses else unrolled.explain(error)
    try:
        whole = _analyse(graph, hints, asking=False)
    except GraphscaleError as error:
        if inside is None:
            raise (refusal or error) from error
        return inside
    if inside is not None:
        return inside if inside.coverage.covered > whole.coverage.covered else whole
    reason = refusal or failure
    if reason is not None and whole.coverage.covered == 0:
        # Bodies may have contractions to protect.
        raise reason
    return whole


def _analyse(graph: ir.Graph, hints: Hints, asking: bool, runs: bool = True) -> TrainingGraph:
    """Analyse a main graph by itself; with `runs`, a runtime may execute it to choose between losses."""
    named = resolve_pairs(graph, hints.answers)
    with zeros_as_inputs(graph, named):
        result = _analyse_inputs(graph, hints, named, asking, runs)
        with zeros_as_inputs(graph, result.updates) as more:
            return _analyse(graph, hints, asking, runs) if more else result


def _analyse_inputs(graph: ir.Graph, hints: Hints, named: Sequence[Update], asking: bool, runs: bool) -> TrainingGraph:
    """Analyse a main graph whose states are inputs, but for those that no pair is known of."""
    report_stage("looking for the loss, the gradients and the carried state")
    answers = hints.answers
    values = values_by_name(graph) if hints.gradients or answers.losses else {}
    edge = None if hints.seed is None else _seed_edge(graph, hints.seed)
    # The scale comes out here; a gradient of a roles file may be computed from these values.
    chosen = [_named_gradient(values, name) for name in hints.gradients]
    others = {*answers.states, *answers.gradients, *answers.metrics, *hints.gradients}
    candidates = found = find_loss_candidates(graph, {value for value in graph.outputs if value.name in others})
    if answers.losses:
        candidates = [resolve_loss(values, name, answers.label(name, "--loss")) for name in answers.losses]
    if len(candidates) > _MOST_LOSSES:
        raise LossError(f"{len(candidates)} outputs could be the loss, too many to try; name it with --loss")
    held = find_held_initializers(graph)
    attempts: list[Attempt] = []
    failures: list[tuple[ir.Value, GraphscaleError]] = []

    def join(losses: Sequence[ir.Value]) -> Attempt | None:
        """Try several losses at once; None for a refusal, or if the scale comes out too early for one of them."""
        with contextlib.suppress(GraphscaleError):
            attempt = _solve_attempt(Topology(graph, losses[0], held, others=losses[1:]), edge, chosen)
            if not attempt.solver.unscales_cotangents:
                return attempt
        return None

    if len(answers.losses) > 1 and (joint := join(candidates)) is not None:
        attempts, candidates = [joint], []
    for number, candidate in enumerate(candidates):
        if len(candidates) > 1:
            report_stage(f"trying {candidate.name} as the loss", number, len(candidates))
        try:
            attempts.append(_attempt(graph, candidate, edge, chosen, held))
        except (SeedNotFoundError, GradientError) as error:
            failures.append((candidate, error))
        except GraphscaleError as error:
            failures.insert(0, (candidate, error))
    attempts = attempts or _attempt_several(candidates, found, join)
    if not attempts:
        raise _explain(failures, bool(answers.losses))
    # The loss of a further pass explains the whole step, if it explains its own backward pass.
    covering = {a.topology.loss for a in attempts if a.coverage.covered}
    attempts = [a for a in attempts if covering.isdisjoint(a.topology.anew)]
    attempts = [a for a in attempts if not any(a.is_gradient_of(other) for other in attempts)] or attempts
    failed = {candidate: isinstance(e, SeedNotFoundError | GradientError) for candidate, e in failures}
    best, how, certain = choose_attempt(graph if runs else None, attempts, failed, answers, join)
    if best.coverage.total == 0 and failures and not isinstance(failures[0][1], SeedNotFoundError | GradientError):
        # The backward pass belongs to a loss that cannot be scaled.
        raise _explain(failures, bool(answers.losses))
    return _finish(graph, best, how, certain, named, set(chosen), answers, asking)


def _attempt(
    graph: ir.Graph, loss: ir.Value, seed: Use | None, chosen: Sequence[ir.Value], held: Collection[ir.Value]
) -> Attempt:
    """Try a loss; after a refusal, again with further forward passes at weights that its gradients moved."""
    try:
        return _solve_attempt(Topology(graph, loss, held), seed, chosen)
    except NonlinearGradientError:
        topology = Topology(graph, loss, held, moving=True)
        if not topology.anew:
            raise
        attempt = _solve_attempt(topology, seed, chosen)
        if attempt.solver.unscales_cotangents:
            raise
        return attempt


def _attempt_several(candidates: Sequence[ir.Value], further: Sequence[ir.Value], join: TryTogether) -> list[Attempt]:
    """Try several losses at once, each computed like the first: those of micro-batches, or of parallel networks."""
    attempts: list[Attempt] = []
    for loss in candidates:
        others = [other for other in further if is_copy(loss, other)]
        if others and not any(loss in attempt.topology.losses for attempt in attempts):
            attempt = join((loss, *others))
            if attempt is not None and attempt.differentiates_all:
                attempts.append(attempt)
    return attempts


def _solve_attempt(topology: Topology, seed: Use | None, chosen: Sequence[ir.Value]) -> Attempt:
    loss = topology.loss
    for value in chosen:
        if value in topology.forward:
            raise GradientError(
                f"--gradient {value.name}: the loss {loss.name!r} depends on this value, so it is no gradient of it"
            )
    solver, optimizer = _solve(topology, seed, chosen)
    plan = solver.plan
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
    others = optimizer | topology.validating
    return Attempt(topology, solver, measure_coverage(topology, plan, solver.cotangents, others))


def _solve(topology: Topology, seed: Use | None, chosen: Sequence[ir.Value]) -> tuple[Solver, Set[ir.Node]]:
    """Return the solver, after `solve`, and the contractions that belong to the optimizer."""
    solver = Solver(topology, seed, chosen)
    try:
        behind = topology.descendants({*chosen})
        wanted = () if solver.cotangents else (v for v in find_gradient_like_values(topology) if v not in behind)
        solver.solve(wanted)
    except (NonlinearGradientError, SeedNotFoundError) as error:
        other = _solve_without_optimizer(topology, seed, chosen)
        if other is None:
            raise error from None
        return other
    # A normalization ahead of a contraction of the optimizer ends the scale, and nothing is refused.
    if _find_missed(solver, topology.contractions & topology.backward):
        with contextlib.suppress(NonlinearGradientError, SeedNotFoundError):  # the first solution stands
            other = _solve_without_optimizer(topology, seed, chosen)
            if other is not None and not _find_missed(other[0], topology.contractions & topology.backward - other[1]):
                return other
    return solver, set()


def _solve_without_optimizer(
    topology: Topology, seed: Use | None, chosen: Sequence[ir.Value]
) -> tuple[Solver, Set[ir.Node]] | None:
    """Solve without the contractions that may be the optimizer's; return None if one of those missed may be another."""
    optimizer = OptimizerContractions(topology)
    solver = Solver(topology, seed, chosen, optimizer.nodes)
    if not optimizer.nodes or not solver.cotangents:
        return None
    solver.solve()
    missed = _find_missed(solver, optimizer.nodes)
    if solver.unscales_cotangents or not optimizer.are_behind_gradients(solver.plan.unscaled, missed):
        return None
    return solver, missed


def _find_missed(solver: Solver, contractions: Iterable[ir.Node]) -> Set[ir.Node]:
    return {node for node in contractions if not any(solver.plan.edge(node, i) for i in range(len(node.inputs)))}


def _why_no_place(solver: Solver) -> str:
    if not solver.topology.backward:
        return "nothing but the loss reaches the outputs; is this an inference graph? Export the training graph"
    if not solver.cotangents:
        return "no gradient operator, and no contraction that reads a cotangent; name one with --seed-edge NODE:INDEX"
    nodes = ", ".join(repr(node.name) for node in list(solver.cotangents)[:3])
    return f"the demand from {nodes} reached no value that can be scaled; name an edge with --seed-edge NODE:INDEX"


def _explain(failures: Sequence[tuple[ir.Value, GraphscaleError]], named: bool) -> GraphscaleError:
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


def _finish(
    graph: ir.Graph,
    attempt: Attempt,
    how: str,
    certain: bool,
    named: Sequence[Update],
    chosen: set[ir.Value],
    answers: Answers,
    asking: bool,
) -> TrainingGraph:
    topology, plan = attempt.topology, attempt.solver.plan
    # An output that scales with the loss is a gradient, unless the user answers otherwise: a moment may decay at once.
    gradients = {v for v in plan.unscaled if v.is_graph_output()} | chosen
    wrong = next((u for u in named if u.output in gradients and u.input in topology.forward), None)
    if wrong is not None:
        raise UpdateError(
            f"{answers.label(wrong.output.name or '', '--update')}={wrong.input.name}: the output is a gradient, it "
            "scales with the loss; it cannot be the next value of a weight"
        )
    if attempt.coverage.total == 0:
        _refuse_held(gradients - chosen, topology, plan)
    roles = assign_roles(topology, plan, named, chosen, answers)
    if not certain:
        losses = {v: roles.outputs[v] for v in topology.losses}
        doubted = {v: dataclasses.replace(each, evidence=how, certain=False) for v, each in losses.items()}
        roles = dataclasses.replace(roles, outputs={**roles.outputs, **doubted})
    states = {output.name for output in roles.states()}
    for name in answers.kept:
        if name not in states:
            raise RolesError(
                f"{answers.label(name, '--keep')}: the graph has no carried state of this name among its "
                f"outputs{suggest(name, sorted(filter(None, states)), 'there are')}"
            )
    table = roles.table()
    if table.open and asking:
        raise ask(table)
    places = sorted(plan.places, key=lambda p: topology.position(p.value if p.edge is None else p.edge.node.outputs[0]))
    return TrainingGraph(
        graph=graph,
        reads=topology.reads,
        owners=topology.owners,
        loss=topology.loss,
        loss_found=how,
        places=tuple(places),
        unscalings=tuple(sorted(plan.unscaled.values(), key=lambda u: topology.position(u.value))),
        roles=roles,
        updates=_updates(roles, named, answers),
        accumulators=tuple(nodes_with(topology.nodes, Trait.ACCUMULATOR)),
        coverage=attempt.coverage,
        degrees=plan.degrees(),
        warnings=tuple(attempt.coverage.warnings()),
    )


def _refuse_held(gradients: set[ir.Value], topology: Topology, plan: Plan) -> None:
    """Refuse a gradient that may be the next value of a state, where no contraction separates the optimizer.

    Such a value contains the state, or is its product with a value where the scale enters: an exponentiated gradient.
    """
    for value in (output for output in topology.graph.outputs if output in gradients):
        held, node = topology.coefficients(value), value.producer()
        factors = inputs_of(node) if node is not None and node.op_type in ("Mul", "Div") else ()
        is_entered = not plan.scaled_values.isdisjoint(factors)
        products = (v for v in factors if is_entered and v in topology.states and same_type(v, value))
        state = next((state for state, c in held.items() if c >= NEXT_STATE), next(products, None))
        if state is not None:
            raise UpdateError(
                f"output {value_label(value)} could be the next value of {state.name!r}, or a gradient, and no "
                f"contraction tells where the optimizer begins; name the gradient: --gradient {value.name}, or the "
                "optimizer's operand"
            )


def _updates(roles: Roles, named: Sequence[Update], answers: Answers) -> tuple[Update, ...]:
    """Return the certain pairs of carried state, first those that the user named."""
    pairs = {update.output: update.input for update in named} | roles.states()
    return tuple(
        Update(output, value, roles.outputs[output].evidence, output.name in answers.kept)
        for output, value in pairs.items()
    )


def _named_gradient(values: Mapping[str, ir.Value], name: str) -> ir.Value:
    if name not in values:
        raise GradientError(f"--gradient {name}: the graph has no value of this name{suggest(name, values)}")
    if values[name].producer() is None or not is_float(values[name]):
        raise GradientError(f"--gradient {name}: {value_label(values[name])} is not computed by a floating-point node")
    return values[name]


def _seed_edge(graph: ir.Graph, seed: str) -> Use:
    name, _, index = seed.rpartition(":")
    if not (name and index.isascii() and index.isdecimal()):
        raise SeedNotFoundError(
            f"--seed-edge {seed}: expected NODE:INDEX, the name of a node and the index of its input"
        )
    node = next((node for node in graph if node.name == name), None)
    if node is None:
        names = [node.name for node in graph if node.name]
        hint = suggest(name, names, "there are") if names else "; the nodes of this graph have no names"
        raise SeedNotFoundError(f"--seed-edge {seed}: there is no node {name!r}{hint}")
    if int(index) >= len(node.inputs):
        raise SeedNotFoundError(f"--seed-edge {seed}: the node {name!r} has {len(node.inputs)} inputs, counted from 0")
    value = node.inputs[int(index)]
    if value is None or not is_float(value):
        raise SeedNotFoundError(f"--seed-edge {seed}: that input is not a floating-point value")
    return Use(node, int(index))
