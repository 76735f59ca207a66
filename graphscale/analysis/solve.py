"""The solver for the places where the scale enters and comes out: demands, propagation, conflicts.

The work list has graph order. Each node's degrees follow from the rule table. Where a backward contraction or a
gradient operator has no cotangent of degree 1, the solver moves this demand up to the seed; where a rule is violated,
it unscales an operand, or scales a second loss. Edits are only added to the plan, so the work ends.
"""

from __future__ import annotations

import functools
import heapq
from collections.abc import Iterable, Sequence, Set
from typing import TYPE_CHECKING

import onnx_ir as ir

from graphscale.analysis.edits import Place, Plan, find_end, find_explained, find_tensor
from graphscale.analysis.places import find_cotangents, find_places
from graphscale.analysis.predictions import find_predictions, find_statistics
from graphscale.analysis.topology import Topology
from graphscale.analysis.updates import NEXT_STATE
from graphscale.errors import NonlinearGradientError, SeedNotFoundError, UnknownOperatorError
from graphscale.flow.degree import ZERO, Conflict, Degree, degree_of
from graphscale.graph.values import (
    Use,
    is_known_zero,
    is_scalar,
    is_tensor,
    node_name,
    op_name,
    operand_at,
    operands_of,
)
from graphscale.operators import Kind, may_bend, rule_of

if TYPE_CHECKING:
    from graphscale.flow.bodies import Body

__all__ = ["Solver"]

# Average number of visits per node before the search counts as lost. Real graphs take less than 3.
_PATIENCE = 30


class Solver:
    """The solver of one training graph for one choice of the loss.

    Args:
        topology: forward, backward and dependence of every value.
        seed: None to find the places; else the only edge where the scale enters.
        gradients: values named as gradients, which are unscaled; no value behind them is backward.
        optimizer: contractions that demand no scale: they are part of the optimizer.

    Attributes:
        seed, optimizer: as given.
        plan: the edits, after `solve`.
        lost: the reason why a value is not linear in the seed: it depends on an unscaled value.
        cotangents: each backward contraction and gradient operator, with the inputs known to be cotangents.
        statistics: contractions of covariances, and those behind them.
        learnt: gradients that the scale reaches by no contraction.
        live: the ancestors of those inputs.
    """

    def __init__(
        self, topology: Topology, seed: Use | None, gradients: Sequence[ir.Value], optimizer: Set[ir.Node] = frozenset()
    ) -> None:
        self.topology = topology
        self.plan = Plan()
        self.seed = seed
        self.optimizer = optimizer
        self.learnt: Sequence[ir.Value] = ()
        self._gradients = tuple(gradients)
        self._queue: list[int] = []
        self._queued: set[int] = set()
        self._visits = 0
        self._numbers: Set[ir.Value] = set()
        self.lost: dict[ir.Value, str] = {}
        readers = {node for value in gradients for node in topology.consumers(value)}
        self.statistics = find_statistics(topology)
        self.cotangents = self._find_cotangents(topology.descendants(nodes=readers), optimizer)
        self.live = topology.ancestors(
            (operand_at(use) for uses in self.cotangents.values() for use in uses),
            stop=(lambda node: node.outputs[0] in topology.anew) if topology.anew else None,
        )

    def solve(self, wanted: Iterable[ir.Value] = (), learnt: Sequence[ir.Value] = ()) -> Plan:
        """Return the plan.

        Args:
            wanted: values that look like gradients, where no cotangent is known: the scale reaches them if it can.
            learnt: gradients that the scale reaches by no contraction.

        Raises:
            NonlinearGradientError: a cotangent depends on the seed in a non-linear way.
            UnknownOperatorError: an operator without a rule reads a scaled value.
        """
        wanted = [*wanted]
        self._numbers = self.topology.ancestors(value for value in (*wanted, *learnt) if is_scalar(value))
        for value in self._gradients:
            self.plan.unscale(value).everywhere = True
        if self.seed is not None:
            self._enter(Place(operand_at(self.seed), self.seed))
        for node in self.cotangents:
            self._enqueue(node)
        for position in self.topology.flat.entries.values():
            self._push(position)
        self._work()
        if self.seed is None:
            self._reach((*self._gradients, *wanted))
        self._unscale_outputs()
        self.learnt = learnt
        if learnt:
            self._reach(learnt, force=True)
            self._unscale_outputs()
        self._prune()
        if self.topology.flat.entries:
            from graphscale.analysis.body_checks import check_bodies  # few steps have bodies

            check_bodies(self.topology.flat, self.plan)
        return self.plan

    @functools.cached_property
    def explained(self) -> Set[ir.Value]:
        """The values that depend on a gradient, after `solve`."""
        return find_explained(self.topology, self.plan.unscaled)

    @property
    def unscales_cotangents(self) -> bool:
        """True if a contraction of the backward pass depends on an unscaled value."""
        return not self.live.isdisjoint(self.plan.unscaled)

    def _find_cotangents(self, behind: Set[ir.Value], optimizer: Set[ir.Node]) -> dict[ir.Node, tuple[Use, ...]]:
        topology, cotangents = self.topology, {}
        for node in sorted(topology.propagating & topology.backward - optimizer, key=topology.index.__getitem__):
            is_other = node in topology.validating or node in self.statistics or not behind.isdisjoint(node.outputs)
            rule = None if is_other else rule_of(node)
            if rule is not None and (uses := find_cotangents(topology, node, rule)):
                cotangents[node] = uses
        predictions = find_predictions(topology, cotangents)
        return {node: uses for node, uses in cotangents.items() if node not in predictions}

    # --- the work list ----------------------------------------------------------------------------------------------

    def _enqueue(self, node: ir.Node) -> None:
        self._push(self.topology.index[node])

    def _push(self, position: int) -> None:
        if position not in self._queued:
            self._queued.add(position)
            heapq.heappush(self._queue, position)

    def _work(self) -> None:
        while self._queue:
            self._visits += 1
            index = heapq.heappop(self._queue)
            self._queued.discard(index)
            node, bodies, ends = self.topology.flat.steps[index]
            if self._visits > _PATIENCE * (len(self.topology.nodes) + 1):
                raise _unsettled(node)
            if bodies and not ends:
                for value, element in self.plan.flow.entering(node, bodies):
                    self._set(value, degree_of(element))
            else:
                self._visit(node, bodies)

    def _visit(self, node: ir.Node, bodies: Sequence[Body]) -> None:
        if self.seed is None and node in self.cotangents and self._demand(node):
            self._enqueue(node)
            return
        result = self._join(node, bodies) if bodies else self.plan.evaluate(node)
        if isinstance(result, Conflict):
            self._settle(node, result)
            self._enqueue(node)
            return
        lost = None if bodies else self._why_lost(node, operands_of(node))
        for value, degree in zip(node.outputs, result, strict=True):
            if bodies:
                lost = self._why_lost(node, self.topology.flat.above(value))
            if lost is not None:
                self.lost.setdefault(value, lost)
            if value in self.plan.scaled_values and degree is not ZERO:
                if degree == 0:
                    degree = 1
                else:
                    self.plan.scaled_values.discard(value)
            self._set(value, degree)

    def _join(self, node: ir.Node, bodies: Sequence[Body]) -> Sequence[Degree] | Conflict:
        """Return the degrees of the results of a node's bodies; those of branches must agree."""
        results = self.topology.flat.results[node]
        degrees = [ZERO if is_known_zero(value) else self.plan.output(value) for value in results]
        joined: list[Degree] = []
        for first in range(len(node.outputs)):
            operands = range(first, len(results), len(results) // len(bodies))
            known = {degrees[i] for i in operands} - {ZERO}
            if len(known) > 1:
                others = tuple(i for i in operands if degrees[i] == 0)
                return Conflict(node, tuple(i for i in operands if degrees[i]), others)
            joined.append(known.pop() if known else ZERO)
        return joined

    def _set(self, value: ir.Value, degree: Degree) -> None:
        if self.plan.degree(value) != degree:
            self.plan.flow.elements[value] = degree
            self._enqueue_consumers(value)

    def _enqueue_consumers(self, value: ir.Value) -> None:
        flat = self.topology.flat
        for node in (flat.main_node(node) for node, _ in value.uses()):
            self._push(flat.entries[node] if node in flat.entries else flat.index[node])
        for output in flat.exits.get(value, ()):
            self._enqueue_maker(output)

    def _demand(self, node: ir.Node) -> bool:
        """Move the demand for degree 1 up from a cotangent that lacks it; return whether the plan changed."""
        places: dict[Place, None] = {}
        for use in self.cotangents[node]:
            value = operand_at(use)
            if self.plan.edge(use.node, use.idx) == 0 and not is_known_zero(value):
                self._refuse_if_lost(node, value)
                places.update((p, None) for p in find_places(self.topology, self.plan, value, use, force=True))
        for place in places:
            self._enter(place)
        return bool(places)

    def _enter(self, place: Place) -> None:
        self.plan.add(place)
        if place.edge is None:
            self._enqueue_maker(place.value)
        else:
            self._enqueue(self.topology.flat.main_node(place.edge.node))

    def _enqueue_maker(self, value: ir.Value) -> None:
        node = value.producer()
        assert node is not None
        self._enqueue(node)

    def _why_lost(self, node: ir.Node, operands: Sequence[ir.Value]) -> str | None:
        flat = self.topology.flat
        sides = dict.fromkeys((*operands, *map(flat.origin, operands))) if flat.owners else operands
        if self.lost.keys().isdisjoint(sides) and self.plan.unscaled.keys().isdisjoint(sides):
            return None
        for value in sides:
            if value in self.lost:
                return self.lost[value]
            unscale = self.plan.unscaled.get(value)
            if unscale is not None and self.plan.degree(value) not in (0, ZERO) and not _bounds(node):
                if unscale.everywhere or any(map(unscale.covers, flat.uses_at(node, flat.origin(value)))):
                    return str(unscale.reason or "")
        return None

    def _refuse_if_lost(self, node: ir.Node, value: ir.Value) -> None:
        if (origin := self.topology.origin(value)) in self.lost:
            raise NonlinearGradientError(
                f"the gradient is not linear in the seed: {self.lost[origin]}, and the backward pass goes on from "
                f"there to {value.name!r} at node {node_name(node)!r} (a gradient penalty?); name the loss that the "
                "whole graph differentiates with --loss, or where the optimizer begins with --gradient"
            )

    # --- conflicts --------------------------------------------------------------------------------------------------

    def _settle(self, node: ir.Node, conflict: Conflict) -> None:
        if conflict.unknown:
            names = ", ".join(repr(operand_at(Use(conflict.node, i)).name) for i in conflict.operands)
            raise UnknownOperatorError(
                f"operator {op_name(conflict.node)} of node {node_name(conflict.node)!r} reads {names} on the "
                "gradient path, and graphscale has no rule for it; replace it with operators that have one, or name "
                "the gradient before it with --gradient"
            )
        if self.seed is None and conflict.others and self._scale_others(conflict):
            return
        uses = [Use(conflict.node, i) for i in conflict.operands]
        read = self.topology.flat.operand_at
        first = min(uses, key=lambda use: self.topology.position(read(use)), default=None)
        if first is None or self._is_inner(read(first)):
            self._unscale_entering(node, conflict)
        else:
            self._unscale(first, conflict)

    def _scale_others(self, conflict: Conflict) -> bool:
        """At a sum of degrees 1 and 0, scale the terms of degree 0, of a second loss or the same cotangent."""
        node = conflict.node
        topology = self.topology
        if node not in topology.index or (may_bend(node) and node not in topology.flat.entries):
            return False
        is_cotangent = any(value in self.live for value in node.outputs)
        places: dict[Place, None] = {}
        for use in (Use(node, i) for i in conflict.others):
            value = topology.flat.operand_at(use)
            data = value in topology.activation_dependent or value in topology.target_dependent
            if topology.origin(value) in self.lost or not (is_cotangent or (data and topology.is_backward(value))):
                return False
            if not is_cotangent and self._belongs_to_the_optimizer(value):
                return False
            added = find_places(topology, self.plan, value, use)
            if not added and is_cotangent and data:
                # A residual of the forward pass, a term of the cotangent.
                added = (Place(value, use),)
            if not added or any(place.edge is not None and place.edge.node in topology.flat.entries for place in added):
                return False
            places.update((place, None) for place in added)
        for place in places:
            self._enter(place)
        return bool(places)

    def _unscale(self, use: Use, conflict: Conflict) -> None:
        if use in self.plan.scaled_edges:
            del self.plan.scaled_edges[use]
            return
        value = self._end_above(self.topology.flat.operand_at(use))
        if not is_tensor(value):
            use = find_tensor(value)
            value = operand_at(use)
        is_branch = use.node in self.topology.flat.entries
        unscale = self.plan.unscale(value)
        unscale.reason = unscale.reason or (Conflict(use.node, ()) if is_branch else conflict)
        whole = conflict.node.outputs[0]
        is_sum = conflict.node.op_type in ("Add", "Sub", "Sum") and conflict.node in self.topology.index
        if is_sum and conflict.others and not self._belongs_to_the_optimizer(whole):
            unscale.wholes.add(whole)
        if value in self.live and not is_branch:
            unscale.edges.add(use)
        else:
            unscale.everywhere = True
            self._enqueue_consumers(value)

    def _belongs_to_the_optimizer(self, value: ir.Value) -> bool:
        """Return whether a sum with a gradient is a next state, or reads a moment, and so is no gradient itself."""
        states = self.topology.coefficients(value)
        held = {state: c for state, c in states.items() if state in self.topology.held_states} if states else {}
        return any(NEXT_STATE <= c < 2 or state not in self.topology.forward for state, c in held.items())

    def _end_above(self, value: ir.Value) -> ir.Value:
        return find_end(self.topology, self.plan, self.live, value, self._numbers)

    def _is_inner(self, value: ir.Value) -> bool:
        """Return whether a value belongs to a body that nothing is known of."""
        return self.topology.number(value) < 0

    def _unscale_entering(self, node: ir.Node, conflict: Conflict) -> None:
        """Unscale all values that enter a subgraph with an inner conflict."""
        found = [v for v in self.topology.operands(node) if self.plan.degree(v) not in (0, ZERO)]
        edges = [use for v in found for use in self.topology.flat.uses_at(node, v)]
        if all(self.plan.unscale(operand_at(edge)).covers(edge) for edge in edges):
            raise _unsettled(node)
        for edge in edges:
            unscale = self.plan.unscale(operand_at(edge))
            unscale.reason = unscale.reason or conflict
            unscale.edges.add(edge)

    # --- outputs ----------------------------------------------------------------------------------------------------

    def _reach(self, values: Iterable[ir.Value], *, force: bool = False) -> None:
        """Demand degree 1 of gradients without a contraction: those of element-wise models."""
        for value in values:
            for place in () if value in self.lost else find_places(self.topology, self.plan, value, force=force):
                if force or place.value is not value:
                    self._enter(place)
            self._work()

    def _unscale_outputs(self) -> None:
        for value in self.topology.graph.outputs:
            if self.plan.output(value) not in (0, ZERO):
                # A scalar is a metric of a gradient, such as its largest element.
                source = self._end_above(value) if is_scalar(value) else value
                use = None if is_tensor(source) else find_tensor(source)
                source = source if use is None else operand_at(use)
                unscale = self.plan.unscale(source)
                if source in self.live and use is not None:
                    unscale.edges.add(use)
                    unscale.reason = unscale.reason or Conflict(use.node, (use.idx,))
                    self._enqueue(use.node)
                elif source in self.live:
                    unscale.output = True
                else:
                    unscale.everywhere = True
                    self._enqueue_consumers(source)
        self._work()

    def _prune(self) -> None:
        """Remove needless unscalings: a value with an unscaled source has degree 0 itself."""
        for value in list(self.plan.unscaled):
            if self.plan.degree(value) in (0, ZERO):
                del self.plan.unscaled[value]


def _bounds(node: ir.Node) -> bool:
    """Return whether a node bounds its operands: its result is a cotangent again, and the scale can enter there."""
    rule = rule_of(node)
    return rule is not None and rule.kind is Kind.LINEAR and may_bend(node)


def _unsettled(node: ir.Node) -> SeedNotFoundError:
    return SeedNotFoundError(
        f"the search for the places of the loss scale does not settle at {node_name(node)!r}; name where it enters "
        "with --seed-edge NODE:INDEX, or what the gradients are with --gradient"
    )
