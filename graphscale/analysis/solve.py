"""The solver for the places where the scale enters and comes out: demands, propagation, conflicts.

The work list has graph order. Each node's degrees follow from the rule table. Where a backward contraction or a
gradient operator has no cotangent of degree 1, the solver moves this demand up to the seed; where a rule is violated,
it unscales an operand, or scales a second loss. Edits are only added to the plan, so the work ends.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence, Set

import onnx_ir as ir

from graphscale.analysis.edits import Place, Plan
from graphscale.analysis.other_contractions import find_predictions
from graphscale.analysis.places import find_cotangents, find_places
from graphscale.analysis.topology import Topology
from graphscale.analysis.updates import NEXT_STATE
from graphscale.errors import NonlinearGradientError, SeedNotFoundError, UnknownOperatorError, UnsupportedModelError
from graphscale.flow.degree import ZERO, Conflict
from graphscale.graph.values import (
    Use,
    is_known_zero,
    is_scalar,
    is_tensor,
    main_node,
    node_name,
    op_name,
    operand_at,
    uses_at,
)
from graphscale.operators import Kind, Trait, has_trait, may_bend, rule_of

__all__ = ["Solver"]

# Average number of visits per node before the search counts as lost. Real graphs take less than 3.
_PATIENCE = 30

_VIEWS = Trait.VIEW | Trait.PERMUTE


class Solver:
    """The solver of one training graph for one choice of the loss.

    Args:
        topology: forward, backward and dependence of every value.
        seed: None to find the places; else the only edge where the scale enters.
        gradients: values named as gradients, which are unscaled; no value behind them is backward.
        optimizer: contractions that demand no scale: they are part of the optimizer.

    Attributes:
        plan: the edits, after `solve`.
        lost: the reason why a value is not linear in the seed: it depends on an unscaled value.
        cotangents: each backward contraction and gradient operator, with the inputs known to be cotangents.
        live: the ancestors of those inputs.
    """

    def __init__(
        self, topology: Topology, seed: Use | None, gradients: Sequence[ir.Value], optimizer: Set[ir.Node] = frozenset()
    ) -> None:
        self.topology = topology
        self.plan = Plan()
        self._seed = seed
        self._gradients = tuple(gradients)
        self._queue: list[int] = []
        self._queued: set[int] = set()
        self._visits = 0
        self._is_of_numbers = False
        self.lost: dict[ir.Value, str] = {}
        readers = {node for value in gradients for node in topology.consumers(value)}
        self.cotangents = self._find_cotangents(topology.descendants(nodes=readers), optimizer)
        self.live = topology.ancestors(
            (operand_at(use) for uses in self.cotangents.values() for use in uses),
            stop=(lambda node: node.outputs[0] in topology.anew) if topology.anew else None,
        )

    def solve(self, wanted: Iterable[ir.Value] = ()) -> Plan:
        """Return the plan.

        Args:
            wanted: values that look like gradients, where no cotangent is known: the scale reaches them if it can.

        Raises:
            NonlinearGradientError: a cotangent depends on the seed in a non-linear way.
            UnknownOperatorError: an operator without a rule reads a scaled value.
        """
        wanted = [*wanted]
        self._is_of_numbers = any(map(is_scalar, wanted))
        for value in self._gradients:
            self.plan.unscale(value).everywhere = True
        if self._seed is not None:
            self._enter(Place(operand_at(self._seed), self._seed))
        for node in self.cotangents:
            self._enqueue(node)
        self._work()
        if self._seed is None:
            self._reach((*self._gradients, *wanted))
        self._unscale_outputs()
        self._prune()
        return self.plan

    @property
    def unscales_cotangents(self) -> bool:
        """True if a contraction of the backward pass depends on an unscaled value."""
        return not self.live.isdisjoint(self.plan.unscaled)

    def _find_cotangents(self, behind: Set[ir.Value], optimizer: Set[ir.Node]) -> dict[ir.Node, tuple[Use, ...]]:
        topology, cotangents = self.topology, {}
        for node in topology.nodes:
            if node not in topology.propagating or node not in topology.backward or node in optimizer:
                continue
            is_other = node in topology.validating or not behind.isdisjoint(node.outputs)
            rule = None if is_other else rule_of(node)
            if rule is not None and (uses := find_cotangents(topology, node, rule)):
                cotangents[node] = uses
        predictions = find_predictions(topology, cotangents)
        return {node: uses for node, uses in cotangents.items() if node not in predictions}

    # --- the work list ----------------------------------------------------------------------------------------------

    def _enqueue(self, node: ir.Node) -> None:
        index = self.topology.index[node]
        if index not in self._queued:
            self._queued.add(index)
            heapq.heappush(self._queue, index)

    def _work(self) -> None:
        while self._queue:
            self._visits += 1
            index = heapq.heappop(self._queue)
            self._queued.discard(index)
            node = self.topology.nodes[index]
            if self._visits > _PATIENCE * (len(self.topology.nodes) + 1):
                raise _unsettled(node)
            self._visit(node)

    def _visit(self, node: ir.Node) -> None:
        if self._seed is None and node in self.cotangents and self._demand(node):
            self._enqueue(node)
            return
        result = self.plan.evaluate(node)
        if isinstance(result, Conflict):
            self._settle(node, result)
            self._enqueue(node)
            return
        lost = self._why_lost(node)
        for value, degree in zip(node.outputs, result, strict=True):
            if lost is not None:
                self.lost.setdefault(value, lost)
            if value in self.plan.scaled_values and degree is not ZERO:
                if degree == 0:
                    degree = 1
                else:
                    self.plan.scaled_values.discard(value)
            if self.plan.degree(value) != degree:
                self.plan.flow.elements[value] = degree
                self._enqueue_consumers(value)

    def _enqueue_consumers(self, value: ir.Value) -> None:
        owners = self.topology.owners
        for node, _ in value.uses():
            self._enqueue(main_node(owners, node) if owners else node)

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
        node = place.value.producer() if place.edge is None else main_node(self.topology.owners, place.edge.node)
        assert node is not None
        self._enqueue(node)

    def _why_lost(self, node: ir.Node) -> str | None:
        operands = self.topology.operands(node)
        if self.lost.keys().isdisjoint(operands) and self.plan.unscaled.keys().isdisjoint(operands):
            return None
        for value in operands:
            if value in self.lost:
                return self.lost[value]
            unscale = self.plan.unscaled.get(value)
            if unscale is not None and self.plan.degree(value) not in (0, ZERO) and not _bounds(node):
                if any(map(unscale.covers, uses_at(self.topology.owners, node, value))):
                    return str(unscale.reason or "")
        return None

    def _refuse_if_lost(self, node: ir.Node, value: ir.Value) -> None:
        if value in self.lost:
            raise NonlinearGradientError(
                f"the gradient is not linear in the seed: {self.lost[value]}, and the backward pass goes on from "
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
        if self._seed is None and conflict.others and self._scale_others(conflict):
            return
        uses = [Use(conflict.node, i) for i in conflict.operands]
        first = min(uses, key=lambda use: self.topology.position(operand_at(use)), default=None)
        if first is None or self._is_inner(operand_at(first)):
            self._unscale_entering(node, conflict)
        else:
            self._unscale(first, conflict)

    def _scale_others(self, conflict: Conflict) -> bool:
        """At a sum of degrees 1 and 0, scale the terms of degree 0, of a second loss or the same cotangent."""
        node = conflict.node
        if node not in self.topology.index or may_bend(node):
            return False
        topology = self.topology
        is_cotangent = any(value in self.live for value in node.outputs)
        places: dict[Place, None] = {}
        for i in conflict.others:
            value, use = operand_at(Use(node, i)), Use(node, i)
            data = value in topology.activation_dependent or value in topology.target_dependent
            if value in self.lost or not (is_cotangent or (data and topology.is_backward(value))):
                return False
            if not is_cotangent and self._belongs_to_the_optimizer(value):
                return False
            added = find_places(topology, self.plan, value, use)
            if not added and is_cotangent and data:
                # A residual of the forward pass, a term of the cotangent.
                added = (Place(value, use),)
            if not added:
                return False
            places.update((place, None) for place in added)
        for place in places:
            self._enter(place)
        return bool(places)

    def _unscale(self, use: Use, conflict: Conflict) -> None:
        if use in self.plan.scaled_edges:
            del self.plan.scaled_edges[use]
            return
        value = self._source(operand_at(use))
        if not is_tensor(value):
            use = self._use_of_tensor(value)
            value = operand_at(use)
        unscale = self.plan.unscale(value)
        unscale.reason = unscale.reason or conflict
        whole = conflict.node.outputs[0]
        is_sum = conflict.node.op_type in ("Add", "Sub", "Sum") and conflict.node in self.topology.index
        if is_sum and conflict.others and not self._belongs_to_the_optimizer(whole):
            unscale.wholes.add(whole)
        if value in self.live:
            unscale.edges.add(use)
        else:
            unscale.everywhere = True
            self._enqueue_consumers(value)

    def _use_of_tensor(self, value: ir.Value) -> Use:
        """Find the tensor in a sequence of gradients, and its reader, since a sequence cannot be divided.

        Raises:
            UnsupportedModelError: the sequence is made in a body.
        """
        above = value
        while (node := above.producer()) is not None and (rule := rule_of(node)) is not None:
            operands = rule.operands(len(node.inputs)) if rule.kind is Kind.LINEAR else ()
            if len(operands) != 1:
                break
            use = Use(node, operands[0])
            above = operand_at(use)
            if is_tensor(above):
                return use
        raise UnsupportedModelError(
            f"{value.name!r} is a sequence of gradients, which cannot be divided by the loss scale; let its members "
            "leave the body as tensors"
        )

    def _belongs_to_the_optimizer(self, value: ir.Value) -> bool:
        """Return whether a sum with a gradient is a next state, or reads a moment, and so is no gradient itself."""
        states = self.topology.coefficients(value)
        held = {state: c for state, c in states.items() if state in self.topology.held_states} if states else {}
        return any(NEXT_STATE <= c < 2 or state not in self.topology.forward for state, c in held.items())

    def _source(self, value: ir.Value) -> ir.Value:
        """Find the end of the backward pass: up from a use of a gradient, past factors such as the learning rate.

        Views of a gradient without other readers belong to it: the last view has its name.
        """
        path = [value]
        while value not in self.live:
            node = value.producer()
            rule = None if node is None else rule_of(node)
            if node is None or rule is None or rule.kind not in (Kind.LINEAR, Kind.PRODUCT, Kind.QUOTIENT):
                break
            uses = [Use(node, i) for i, v in enumerate(node.inputs) if v is not None and self.plan.edge(node, i) == 1]
            if len(uses) != 1 or uses[0] in self.plan.scaled_edges or not self._is_factor_or_view(*uses[0]):
                break
            above = operand_at(uses[0])
            if above in self.live or self._is_inner(above) or not is_tensor(above):
                break
            value = above
            path.append(value)
        while len(path) > 1:
            reader = path[-2].producer()
            shared = len(path[-1].uses()) > 1 or path[-1].is_graph_output()
            if reader is None or not has_trait(reader, _VIEWS) or shared:
                break
            path.pop()
        return path[-1]

    def _is_factor_or_view(self, node: ir.Node, index: int) -> bool:
        """Return whether a node views, measures or multiplies a gradient by a number.

        Where weights are numbers, a sum over the batch is a gradient itself.
        """
        if node.op_type in ("Mul", "Div"):
            return all(is_scalar(v) for i, v in enumerate(node.inputs) if i != index and v is not None)
        return has_trait(node, _VIEWS | Trait.SIGN) or (not self._is_of_numbers and is_scalar(node.outputs[0]))

    def _is_inner(self, value: ir.Value) -> bool:
        """Return whether a value belongs to a subgraph, where no pass inserts a division by the scale."""
        producer = value.producer()
        if producer is not None:
            return producer not in self.topology.index
        return value not in self.topology.states and not value.is_initializer()

    def _unscale_entering(self, node: ir.Node, conflict: Conflict) -> None:
        """Unscale all values that enter a subgraph with an inner conflict."""
        found = [v for v in self.topology.operands(node) if self.plan.degree(v) not in (0, ZERO)]
        edges = [use for v in found for use in uses_at(self.topology.owners, node, v)]
        if all(self.plan.unscale(operand_at(edge)).covers(edge) for edge in edges):
            raise _unsettled(node)
        for edge in edges:
            unscale = self.plan.unscale(operand_at(edge))
            unscale.reason = unscale.reason or conflict
            unscale.edges.add(edge)

    # --- outputs ----------------------------------------------------------------------------------------------------

    def _reach(self, values: Iterable[ir.Value]) -> None:
        """Demand degree 1 of gradients without a contraction: those of element-wise models."""
        for value in values:
            for place in () if value in self.lost else find_places(self.topology, self.plan, value):
                if place.value is not value:
                    self._enter(place)
            self._work()

    def _unscale_outputs(self) -> None:
        for value in self.topology.graph.outputs:
            if self.plan.output(value) not in (0, ZERO):
                # A scalar is a metric of a gradient, such as its largest element.
                source = self._source(value) if is_scalar(value) else value
                use = None if is_tensor(source) else self._use_of_tensor(source)
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
