"""The forward and the backward part of a training graph, and the dependences of each value.

The loss depends on the forward part. Every other node that can reach a gradient or carried state is backward. In
reverse mode a cotangent depends on the deepest forward values, those behind the last contraction (the *tail*); a saved
activation, a residual of a derivative or a recomputed activation depends only on shallower values.
"""

from __future__ import annotations

import copy
import functools
import operator
from collections.abc import Callable, Collection, Container, Iterable, Mapping, Set
from itertools import compress

import onnx_ir as ir

from graphscale.analysis.recomputed import find_recomputed_values
from graphscale.analysis.updates import (
    NEXT_STATE,
    ByType,
    Factors,
    find_coefficients,
    find_holders,
    is_stored,
    same_type,
    type_of,
)
from graphscale.flow.flat_graph import FlatGraph
from graphscale.graph.numbering import Numbering, ValueSet
from graphscale.graph.values import contains_contraction, inputs_of, is_float, is_known_zero, is_scalar
from graphscale.graph.walks import NodeIndex, reach
from graphscale.operators import Trait

__all__ = ["Topology"]

_MANY = -1


class Topology:
    """The dependences of every value of a main graph, for one choice of the loss.

    Args:
        graph: the main graph.
        loss: the loss.
        held: the initializers with a next value among the outputs, if they are weights or moments at all.
        moving: find further forward passes, at weights that the first gradients have updated.
        others: further losses, each with a backward pass of its own.
        closed: True to leave the bodies of nodes out.
        index: the nodes of the graph, if they are known.

    Attributes:
        losses: the loss, and the others.
        flat: the graph with the nodes of its bodies in their place.
        nodes: the nodes in execution order, those of bodies included; `index` has the position of each.
        parts: the same, with the results and operands of each, and a node with bodies once for each output.
        contractions: the nodes that are contractions.
        propagating: the contractions, and gradient operators: nodes that certainly propagate gradients in the backward
            pass.
        forward: the losses, their ancestors, and values equal to one of these.
        tail: the forward values from which a loss is reached without a further contraction.
        states: the graph inputs, and the initializers that are weights or moments: no constants.
        backward: the nodes outside of forward that reach a gradient, or carried state.
        activation_dependent: values that depend on a forward value that mixes several inputs.
        tail_dependent: values that depend on such a value of the tail.
        target_dependent: values that depend on a target, an input for comparison with an output.
        propagated: values that depend on a backward contraction or gradient operator, unlike residuals.
        recomputed: `{value: its equal}`, values outside of the first forward pass by their equal in it.
        anew: the values of further forward passes, and the moved weights among their operands, each with its
            counterpart in the first pass, whose dependences it has.
    """

    def __init__(
        self,
        graph: ir.Graph,
        loss: ir.Value,
        held: Iterable[ir.Value] = (),
        *,
        moving: bool = False,
        others: Iterable[ir.Value] = (),
        closed: bool = False,
        index: NodeIndex | None = None,
    ) -> None:
        self.graph = graph
        self.loss = loss
        self.losses = (loss, *others)
        self._held = frozenset(held)
        self.flat = FlatGraph(graph, closed, index)
        self.nodes, self.index = self.flat.nodes, self.flat.index
        self.operands, self.consumers, self.nodes_like = self.flat.operands, self.flat.consumers, self.flat.nodes_like
        self.origin, self.position = self.flat.origin, self.flat.position
        self.parts = [*self.flat.parts()]
        self._numbering = Numbering(graph, self.parts, self.flat.origins)
        if not self._numbering.ordered:
            from graphscale.graph.order import check_order  # it names the fault

            check_order(graph)
        self._rows = self._numbering.rows
        self.contractions = frozenset(self.nodes_like(lambda operator: operator.rule.contraction))
        self.contractions |= {node for node in self.flat.opaque if contains_contraction(node)}
        self.propagating = self.contractions.union(self.nodes_like(lambda operator: operator.rule.gradient))
        self.forward = self.ancestors(self.losses)
        self.states = frozenset(graph.inputs) | self._weights(self._held)
        self._coefficients: dict[ir.Value, dict[ir.Value, float]] = {}
        self.factors = Factors(origins=self.flat.origins)
        later = self._later_weights() if len(self.losses) > 1 else {}
        ends = {value.producer() for value in later}
        if later:
            self.forward = self.ancestors(self.losses, stop=ends.__contains__)
            self.forward.exclude(later)
        self.tail = self.ancestors(self.losses, stop=(self.contractions | ends).__contains__)
        count = len(self._numbering.values)
        # The number of the only state that a value depends on, or _MANY.
        self._roots, self._late, self._depth = [0] * count, [0] * count, [0] * count
        self._late_states: dict[ir.Value, int] = {}
        self.anew: dict[ir.Value, ir.Value] = later
        self.activation_dependent = ValueSet(self._numbering, bytearray(count))
        self.tail_dependent = ValueSet(self._numbering, bytearray(count))
        for root, value in enumerate(self.states, 1):
            self._roots[self._numbering.numbers[value]] = root
        self._spread()
        moved = self._moved_weights() if moving else {}
        again = self.recomputed = self._recomputed(moved)
        moved = {v: w for v, w in moved.items() if any(o in again for n in self.consumers(v) for o in n.outputs)}
        self.anew = {**later, **moved, **again} if moved else later
        if again:
            self.forward.include(again)
            self.tail.include([value for value, original in again.items() if original in self.tail])
            self._spread()
        self.target_dependent = self.descendants(self.targets)
        self._backward = ValueSet(self._numbering, bytearray(count))
        self.backward = self._backward_nodes()
        self.propagated = self._find_propagated()

    def of(self, loss: ir.Value) -> Topology:
        """Return the topology of the graph for another loss."""
        return Topology(self.graph, loss, self._held, index=self.flat.known)

    def without(self, nodes: Set[ir.Node]) -> Topology:
        """Return a copy in which some contractions propagate no gradients."""
        other = copy.copy(self)
        other.contractions, other.propagating = self.contractions - nodes, self.propagating - nodes
        other.propagated = other._find_propagated()
        return other

    def _find_propagated(self) -> ValueSet:
        return self.descendants(nodes=self.propagating & self.backward, stop=self.anew)

    def coefficients(self, value: ir.Value) -> dict[ir.Value, float]:
        """Return the states on which a value depends directly, each with its coefficient; see `find_coefficients`."""
        if value not in self._coefficients:
            self._coefficients[value] = find_coefficients(value, self.states, self.factors)
        return self._coefficients[value]

    def held(self, value: ir.Value) -> list[ir.Value]:
        """Return the states in a value with a coefficient near one."""
        return [state for state, c in self.coefficients(value).items() if c >= NEXT_STATE]

    def is_backward(self, value: ir.Value) -> bool:
        """Return whether a backward node computes the value."""
        return value in self._backward

    def number(self, value: ir.Value) -> int:
        """Return the position of a value among all; -1 for one in a body that nothing is known of."""
        return self._numbering.numbers.get(value, -1)

    def depth(self, value: ir.Value) -> int:
        """Return the greatest forward depth above a value: the number of nodes of the longest path from the inputs."""
        return self._depth[number] if (number := self.number(value)) >= 0 else 0

    def late_inputs(self, value: ir.Value) -> int:
        """Return a bit set of a value's labels: inputs among its ancestors that enter the forward pass in its tail."""
        return self._late[number] if (number := self.number(value)) >= 0 else 0

    def is_late(self, value: ir.Value) -> bool:
        """Return whether a value depends on the tail of a loss, or on a target."""
        late = (self.tail_dependent, self.tail, self.target_dependent)
        return any(value in each for each in late) or self.late_inputs(value) & self.fed_late != 0

    def ancestors(self, values: Iterable[ir.Value], stop: Callable[[ir.Node], bool] | None = None) -> ValueSet:
        """Return some values and their ancestors, up to the nodes where to `stop`.

        The graph is a row of bytes and is read once from its end: a walk from value to value takes several times as
        long on a graph of a hundred thousand nodes.
        """
        marks = self._numbering.marks(values)
        for node, first, end, operands in reversed(self._rows[: self._numbering.count_rows(marks.rfind(1))]):
            if marks.find(1, first, end) >= 0 and not (stop is not None and stop(node)):
                for operand in operands:
                    marks[operand] = 1
        return ValueSet(self._numbering, marks)

    def _recomputed(self, moved: Mapping[ir.Value, ir.Value]) -> dict[ir.Value, ir.Value]:
        """Map values outside of forward to forward values that they equal, apart from moved weights."""
        marks = self.forward.marks
        is_forward = [marks.find(1, first, end) >= 0 for _, first, end, _ in self._rows]
        forward = compress(self.parts, is_forward)
        rest = compress(self.parts, map(operator.not_, is_forward))
        return find_recomputed_values(forward, rest, self.activation_dependent, moved, self.flat.origins)

    def _moved_weights(self) -> dict[ir.Value, ir.Value]:
        """Map values outside of forward that contain a weight, with its shape, to the weight.

        An input with the type of only one weight may be an older value of that weight, as in SVRG.
        """
        kept = self.held_states
        shapes = {None, *(state.shape.dims for state in kept if state.shape is not None)}
        moved: dict[ir.Value, ir.Value] = {}
        for node in self.nodes:
            value = node.outputs[0]
            if value not in self.forward and (None if value.shape is None else value.shape.dims) in shapes:
                moved.update((value, state) for state in [*self.coefficients(value)][:1] if state in kept)
        for value in self.states - self.forward:
            weights = [state for state in kept if state in self.forward and same_type(state, value)]
            moved.update((value, weight) for weight in weights if len(weights) == 1)
        return moved

    @functools.cached_property
    def fed_late(self) -> int:
        """The labels of late inputs other than weights and operands of layers: targets, weights of samples."""
        rest = {v: bit for v, bit in self._late_states.items() if v not in self.held_states}
        layers = {node for node in self.contractions if not self.forward.isdisjoint(node.outputs)}
        return sum(bit for v, bit in rest.items() if layers.isdisjoint(self.consumers(v)))

    @functools.cached_property
    def held_states(self) -> frozenset[ir.Value]:
        """The states in an output with a coefficient near one: an input without next value is no moment."""
        return frozenset(state for output in self.graph.outputs for state in self.held(output))

    @property
    def reads_next_weights(self) -> bool:
        """True if the losses depend on weights that are computed behind contractions, as next weights are."""
        return bool(self._moved_by(self.forward, self.forward))

    def _later_weights(self) -> dict[ir.Value, ir.Value]:
        """Map weights that the loss's gradients have moved, and another loss depends on, to the original weights.

        The loss of an actor is computed by the critic's next weights.
        """
        first = self.ancestors([self.loss])
        moved = self._moved_by(first, self.ancestors(self.losses[1:]))
        return {value: weight for value, weight in moved.items() if value not in first}

    def _moved_by(self, forward: Set[ir.Value], among: Container[ir.Value]) -> dict[ir.Value, ir.Value]:
        """Map values behind the contractions of a forward pass to the carried state of that pass in them."""
        kept = self.held_states.intersection(forward)
        behind = self.descendants(nodes={node for node in self.contractions if not forward.isdisjoint(node.outputs)})
        kinds, moved = {type_of(state) for state in kept}, dict[ir.Value, ir.Value]()
        nodes = [node for node in self.nodes if node.outputs[0] in among] if kept else []
        holding = find_holders(kept, nodes, self.factors)
        for value in (node.outputs[0] for node in nodes):
            if value in holding and value in behind and type_of(value) in kinds:
                held = (weight for weight in self.held(value) if weight in kept and type_of(weight) == type_of(value))
                moved.update((value, weight) for weight in held)
        return moved

    def descendants(
        self, values: Set[ir.Value] = frozenset(), nodes: Set[ir.Node] = frozenset(), stop: Container[ir.Value] = ()
    ) -> ValueSet:
        """Return some values, the results of some nodes, and all descendants.

        The result excludes values where to `stop`.
        """
        marks = self._numbering.marks(values)
        begin = 0 if nodes else self._numbering.count_rows(marks.find(1)) if values else len(self._rows)
        for node, first, end, operands in self._rows[begin:]:
            depends = node in nodes
            for operand in operands:
                if marks[operand]:
                    depends = True
                    break
            if depends and (not stop or self._numbering.values[first] not in stop):
                marks[first:end] = b"\1" * (end - first)
        return ValueSet(self._numbering, marks)

    def _backward_nodes(self) -> set[ir.Node]:
        others = [value for value in self.graph.outputs if value is not self.loss]
        sinks = [value for value in others if self.may_be_state(value)] or others
        effects = self.nodes_like(lambda operator: bool(operator.traits & Trait.EFFECT))
        sinks += (value for node in effects for value in node.outputs)
        reached, forward = self.ancestors(sinks).marks, self.forward.marks
        backward: set[ir.Node] = set()
        for node, first, end, _ in self._rows:
            if reached.find(1, first, end) >= 0 and forward.find(1, first, end) < 0:
                self._backward.marks[first:end] = b"\1" * (end - first)
                backward.add(node)
        return backward

    def may_store_state(self, gradients: Collection[ir.Value]) -> bool:
        """Return whether initializers may be state: False where all weights are inputs.

        An exporter keeps all states in one way. A weight is read by the loss, and a gradient has its type; a tensor of
        a single repeated number is a constant of a normalization, if no other tensor is a weight.

        Args:
            gradients: the gradients of the loss.
        """
        read = (value for value in self.forward if self.flat.is_source(value) and not is_scalar(value))
        read = (value for value in read if not (self.factors[value] or is_known_zero(value)))
        weights = set(filter(ByType(gradients).like, read))
        weights = (weights & self.held_states) or weights  # other weights are frozen
        return not weights or any(map(is_stored, weights))

    def may_be_state(self, value: ir.Value) -> bool:
        """Return whether an output could be a gradient or a next state, by the shapes of states, without targets."""
        return value.shape is None or (value.shape.dims in self._state_shapes and is_float(value))

    @functools.cached_property
    def _state_shapes(self) -> set[tuple[int | ir.SymbolicDim, ...]]:
        states = (value for value in self.states if is_float(value) and value not in self.targets)
        return {value.shape.dims for value in states if value.shape is not None}

    @functools.cached_property
    def validating(self) -> Set[ir.Node]:
        """The nodes behind a next weight, in an output or before a choice: they measure the step."""
        # A node reads an output, or an operand of the choice of an output.
        others = ((value, value.producer()) for value in self.graph.outputs if value not in self.forward)
        pending = [value for value, node in others if value.uses() or (node is not None and node.op_type == "Where")]
        nexts: set[ir.Value] = set()
        while pending:
            value = pending.pop()
            held = self.held(value) if value not in nexts and value.producer() is not None else ()
            if any(state in self.forward for state in held):
                nexts.add(value)
                node = value.producer()
                pending += inputs_of(node)[1:] if node is not None and node.op_type == "Where" else []
        nexts -= self.forward | self.anew.keys()
        readers = {node for value in nexts for node in self.consumers(value)}
        if not readers:
            return readers
        behind = self.descendants(nodes=readers)
        # A second loss may be computed at the next weights of the first; a condition is a number, or a flag.
        tensors = (value for value in self.graph.outputs if not is_scalar(value))

        def above(value: ir.Value) -> Collection[ir.Value]:
            return () if is_scalar(value) or value.dtype is ir.DataType.BOOL else self.flat.above(value)

        leading = set(reach(tensors, above))
        return {node for node in self.nodes if node.outputs[0] in behind and leading.isdisjoint(node.outputs)}

    @functools.cached_property
    def targets(self) -> set[ir.Value]:
        """Inputs for comparison with an output: they meet an activation of their own shape in the tail."""
        return {
            value
            for value in self._late_states
            if value.is_graph_input() and value.shape is not None and len(value.shape) > 0
            if any(self._meets_activation(node, value) for node in self.consumers(value))
        }

    def _meets_activation(self, node: ir.Node, value: ir.Value) -> bool:
        if node in self.contractions or node.outputs[0] not in self.forward or node.outputs[0].shape != value.shape:
            return False
        return any(v in self.activation_dependent for v in self.operands(node) if v is not value)

    def _weights(self, held: Set[ir.Value]) -> frozenset[ir.Value]:
        """Find the initializers that are weights (read by the forward pass), or moments (held beside weights)."""
        stored = (value for value in self.graph.initializers.values() if not value.is_graph_input())
        read = {value for value in stored if value in self.forward and is_float(value) and not is_scalar(value)}
        return frozenset(read | held if read & held else read)

    def _spread(self) -> None:
        """Propagate the dependences of each value from the states; repeat it for newly found forward values."""
        for value in self.states:
            if value not in self._late_states:
                readers = [node for node in self.consumers(value) if any(v in self.forward for v in node.outputs)]
                if readers and all(any(v in self.tail for v in n.outputs) for n in readers):
                    bit = self._late_states[value] = 1 << len(self._late_states)
                    self._late[self._numbering.numbers[value]] = bit
        values, forward, tail = self._numbering.values, self.forward.marks, self.tail.marks
        roots, lates, depths = self._roots, self._late, self._depth
        activations, tails = self.activation_dependent.marks, self.tail_dependent.marks
        numbers = self._numbering.numbers
        same = {numbers[value]: numbers[original] for value, original in self.anew.items()}
        for _, first, end, operands in self._rows:
            root = late = depth = is_activation = is_tail = 0
            for operand in operands:
                other = roots[operand]
                if other:
                    root = other if root in (0, other) else _MANY
                late |= lates[operand]
                below = depths[operand]
                depth = below if below > depth else depth
                is_activation |= activations[operand]
                is_tail |= tails[operand]
            is_forward = forward.find(1, first, end) >= 0
            for number in range(first, end):
                if same and number in same:
                    original = same[number]
                    for row in (roots, lates, depths, activations, tails):
                        row[number] = row[original]
                    continue
                if root:
                    roots[number] = root
                if late:
                    lates[number] = late
                depths[number] = depth + is_forward
                mixes = is_forward and root == _MANY and is_float(values[number])
                activations[number] = is_activation or mixes
                tails[number] = is_tail or (mixes and tail[number])
