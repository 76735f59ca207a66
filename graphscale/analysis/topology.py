"""Which part of a training graph is forward, which is backward, and what each value depends on.

Forward is what the loss depends on. Everything else that can reach a gradient or carried state is backward. In
reverse mode a cotangent depends on the deepest forward values, those behind the last contraction (the *tail*); a saved
activation, a residual of a derivative or a recomputed activation depends on shallower ones only.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import onnx_ir as ir

from graphscale.analysis.recomputed import recomputed_values
from graphscale.analysis.rules import IN_PLACE
from graphscale.analysis.updates import Factors, own_coefficients
from graphscale.analysis.values import (
    is_float,
    is_scalar,
    main_node,
    main_nodes,
    node_name,
    operands_of,
    present,
    rule_of,
    subgraphs,
)
from graphscale.errors import ModelFileError

__all__ = ["Topology", "check_order", "contains_contraction"]


_MANY = -1


class Topology:
    """The reach of every value of a main graph, for one choice of the loss.

    Args:
        graph: the main graph.
        loss: the loss.
        held: the initializers that some output is the next value of, if they are weights or moments at all.

    Attributes:
        nodes: the nodes in graph order; `index` gives the place of each.
        owners: for each nested graph, the node of the main graph that it belongs to.
        reads: what each node reads, in graph order: its inputs, and what its subgraphs capture.
        contractions: the nodes that are contractions, or have one in their subgraphs.
        propagating: these, and gradient operators: where gradients go through a backward node for certain.
        forward: the values that the loss depends on, the loss among them, and what is computed again of them.
        tail: the forward values from which the loss is reached without a further contraction.
        states: the graph inputs, and the initializers that are weights or moments: no constants.
        backward: the nodes outside of forward that reach a gradient, or carried state.
        depth: for each value, the greatest forward depth it depends on: nodes on the longest path from the inputs.
        late: for each value, a bit set of the inputs it depends on that enter the forward pass in its tail: labels.
        activation_dependent: values that depend on a forward value that mixes several inputs.
        tail_dependent: values that depend on such a value of the tail.
        target_dependent: values that depend on a target, an input that says what an output shall be.
        propagated: values that depend on a backward contraction or gradient operator, as residuals never do.
    """

    def __init__(self, graph: ir.Graph, loss: ir.Value, held: Iterable[ir.Value] = ()) -> None:
        self.graph = graph
        self.loss = loss
        self.nodes = tuple(graph)
        self.index = {node: i for i, node in enumerate(self.nodes)}
        self.owners = main_nodes(self.nodes)
        self.reads = {node: operands_of(node) if self.owners else present(node) for node in self.nodes}
        # Each node with its results and what it reads, so that loops over all nodes need not ask each.
        self._rows = [(node, node.outputs, operands) for node, operands in self.reads.items()]
        check_order(graph, self.reads)
        self.forward = self.ancestors([loss])
        rules = {node: rule_of(node) for node in self.nodes}
        if self.owners:
            self.contractions = frozenset(node for node in self.nodes if contains_contraction(node))
        else:
            self.contractions = frozenset(node for node, rule in rules.items() if rule is not None and rule.contraction)
        operators = {node for node, rule in rules.items() if rule is not None and rule.gradient}
        self.propagating = self.contractions | operators
        self.tail = self.ancestors([loss], stop=self.contractions.__contains__)
        self.states = frozenset(graph.inputs) | self._weights(set(held))
        self._coefficients: dict[ir.Value, dict[ir.Value, float]] = {}
        self._factors = Factors()
        self.late: dict[ir.Value, int] = {}
        # Of the states that a value depends on: the number of the only one, or _MANY.
        self._roots: dict[ir.Value, int] = {}
        self.depth: dict[ir.Value, int] = {}
        self.activation_dependent: set[ir.Value] = set()
        self.tail_dependent: set[ir.Value] = set()
        self.propagated: set[ir.Value] = set()
        self._spread()
        again = recomputed_values(self.nodes, self.forward, self.activation_dependent)
        if again:
            self.forward |= again.keys()
            self.tail |= {value for value, original in again.items() if original in self.tail}
            self._spread()
        self.target_dependent = self._descendants(self.targets)
        self.backward = self._backward_nodes()
        for node, results, operands in self._rows:
            if (node in self.propagating and node in self.backward) or not self.propagated.isdisjoint(operands):
                self.propagated.update(results)

    def coefficients(self, value: ir.Value) -> dict[ir.Value, float]:
        """The states on which a value depends directly, each with its coefficient; see `own_coefficients`."""
        if value not in self._coefficients:
            self._coefficients[value] = own_coefficients(value, self.states, self._factors)
        return self._coefficients[value]

    def operands(self, node: ir.Node) -> tuple[ir.Value, ...]:
        """What a node reads: its inputs, and what its subgraphs capture."""
        found = self.reads.get(node)
        return operands_of(node) if found is None else found

    def is_backward(self, value: ir.Value) -> bool:
        """Whether the value is computed by a backward node."""
        return value.producer() in self.backward

    def consumers(self, value: ir.Value) -> Iterator[ir.Node]:
        """The nodes of the main graph that read a value, also through a subgraph."""
        seen: set[ir.Node] = set()
        owners = self.owners
        for node, _ in value.uses():
            node = main_node(owners, node) if owners else node
            if node not in seen:
                seen.add(node)
                yield node

    def ancestors(self, values: Iterable[ir.Value], stop: Callable[[ir.Node], bool] | None = None) -> set[ir.Value]:
        """The values that some values depend on, themselves included; not going up through nodes where to stop."""
        found = set(values)
        # Values of subgraphs first, from one to the next; then the main graph, from its end.
        pending = list(found)
        while pending:
            node = pending.pop().producer()
            if node is None or node in self.index or (stop is not None and stop(node)):
                continue
            new = [operand for operand in operands_of(node) if operand not in found]
            found.update(new)
            pending += new
        for node, results, operands in reversed(self._rows):
            if not found.isdisjoint(results) and not (stop is not None and stop(node)):
                found.update(operands)
        return found

    def _descendants(self, values: set[ir.Value]) -> set[ir.Value]:
        found = set(values)
        for _, results, operands in self._rows if found else ():
            if not found.isdisjoint(operands):
                found.update(results)
        return found

    def _backward_nodes(self) -> set[ir.Node]:
        sinks = [value for value in self.graph.outputs if value is not self.loss and self.may_be_state(value)]
        if not sinks:
            sinks = [value for value in self.graph.outputs if value is not self.loss]
        for node in self.nodes:
            if (node.domain, node.op_type) in IN_PLACE:
                sinks.extend(node.outputs)
        reached = self.ancestors(sinks)
        return {
            node
            for node, results, _ in self._rows
            if not reached.isdisjoint(results) and self.forward.isdisjoint(results)
        }

    def may_be_state(self, value: ir.Value) -> bool:
        """Whether an output could be a gradient or a next state: it has the shape of a state that is no target."""
        return value.shape is None or (is_float(value) and tuple(value.shape) in self._state_shapes)

    @functools.cached_property
    def _state_shapes(self) -> set[tuple[int | ir.SymbolicDim, ...]]:
        states = (value for value in self.states if is_float(value) and value not in self.targets)
        return {tuple(value.shape) for value in states if value.shape is not None}

    @functools.cached_property
    def targets(self) -> set[ir.Value]:
        """Inputs that meet an activation of their own shape in the tail: they say what an output shall be."""
        return {
            value
            for value in self.late
            if value.is_graph_input() and value.shape is not None and len(value.shape) > 0
            if any(self._meets_activation(node, value) for node in self.consumers(value))
        }

    def _meets_activation(self, node: ir.Node, value: ir.Value) -> bool:
        if node in self.contractions or node.outputs[0] not in self.forward or node.outputs[0].shape != value.shape:
            return False
        return any(v in self.activation_dependent for v in self.operands(node) if v is not value)

    def _weights(self, held: set[ir.Value]) -> frozenset[ir.Value]:
        """The initializers that are weights (the forward pass reads them), or moments (held beside weights)."""
        read = {
            value
            for value in self.graph.initializers.values()
            if value in self.forward and is_float(value) and not value.is_graph_input() and not is_scalar(value)
        }
        return frozenset(read | held if read & held else read)

    def _spread(self) -> None:
        for value in self.states:
            self._roots[value] = len(self._roots) + 1 if value not in self._roots else self._roots[value]
            readers = [node for node in self.consumers(value) if not self.forward.isdisjoint(node.outputs)]
            if readers and value not in self.late and all(any(v in self.tail for v in n.outputs) for n in readers):
                self.late[value] = 1 << len(self.late)
        for _, results, operands in self._rows:
            self._spread_node(results, operands)

    def _spread_node(self, results: Sequence[ir.Value], operands: tuple[ir.Value, ...]) -> None:
        roots, lates, depths = self._roots, self.late, self.depth
        root, late, depth = 0, 0, 0
        for operand in operands:
            other = roots.get(operand, 0)
            root = other if root == 0 else root if other in (0, root) else _MANY
            late |= lates.get(operand, 0)
            below = depths.get(operand, 0)
            depth = below if below > depth else depth
        activation = not self.activation_dependent.isdisjoint(operands)
        tail = not self.tail_dependent.isdisjoint(operands)
        is_forward = not self.forward.isdisjoint(results)
        mixes = is_forward and root == _MANY
        for value in results:
            if root:
                roots[value] = root
            if late:
                lates[value] = late
            depths[value] = depth + 1 if is_forward else depth
            if activation or (mixes and is_float(value)):
                self.activation_dependent.add(value)
            if tail or (mixes and is_float(value) and value in self.tail):
                self.tail_dependent.add(value)


def check_order(graph: ir.Graph, operands: Mapping[ir.Node, Iterable[ir.Value]], name: str = "the graph") -> None:
    """Refuse a graph that reads a value before it is computed.

    Args:
        graph: the main graph.
        operands: what each of its nodes reads, in graph order.
        name: what to call the graph in messages.

    Raises:
        ModelFileError: with the first value that nothing computes, or that comes too late.
    """
    for value in graph.outputs:
        if value.producer() is None and not (value.is_graph_input() or value.is_initializer()):
            raise ModelFileError(f"output {value.name!r} of {name} is computed by no node")
    known = {*graph.inputs, *graph.initializers.values()}
    seen: set[ir.Node] = set()
    for node, values in operands.items():
        for value in () if known.issuperset(values) else values:
            producer = value.producer()
            if producer is None and not (value.is_graph_input() or value.is_initializer()):
                raise ModelFileError(f"node {node_name(node)!r} of {name} reads {value.name!r}, which nothing computes")
            if producer is not None and producer not in seen:
                raise ModelFileError(
                    f"{name} is not in topological order: node {node_name(node)!r} reads {value.name!r} before it is "
                    "computed; sort the graph first"
                )
        seen.add(node)
        known.update(node.outputs)


def contains_contraction(node: ir.Node) -> bool:
    """Whether a node is a contraction, or has one in its subgraphs."""
    rule = rule_of(node)
    if rule is not None and rule.contraction:
        return True
    return any(contains_contraction(inner) for body in subgraphs(node) for inner in body)
