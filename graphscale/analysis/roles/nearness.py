"""Nearness of inputs and outputs, in the graph and by name, for the choice among proposals alone."""

from __future__ import annotations

import functools
import heapq
import itertools
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping

import onnx_ir as ir

from graphscale.analysis.roles.step_interface import VIEWS, Dependence, Interface
from graphscale.analysis.updates import find_terms, shares
from graphscale.graph.values import constant_tensor, inputs_of, loop_start, subgraphs
from graphscale.graph.walks import source_by_trait
from graphscale.operators import has_trait

__all__ = ["Nearness", "common_words", "find_between", "find_positions", "likeness", "words_of"]

# Limit of the values searched above an output; an update has a few dozens.
_MOST_VALUES = 300
_MEETS, _IS_UNREAD, _IS_FAR = 1000, 4000, 5000
_DEPENDS = {0: 0, 1: 3000, 2: 2000}
# A rank, less is nearer: equality of the whole name, the distance, the equal share of the name, and its length.
_Rank = tuple[int, int, float, int]


class Nearness:
    """The distances of outputs from inputs, and the likeliest pairs.

    Few nodes lie between a state and its next value, and all keep its shape. An output for comparison with the state
    ranks next, then an output that depends on the state otherwise.

    Args:
        step: the interface of the step.
        dependence: the dependence of the outputs on the inputs.
    """

    def __init__(self, step: Interface, dependence: Dependence) -> None:
        self._step, self._dependence = step, dependence
        self._factors = shares(step.factors)
        self._known: dict[ir.Value, dict[ir.Value, int]] = {}

    def assign(
        self, candidates: Mapping[ir.Value, Collection[ir.Value]], by_interface: bool = True
    ) -> dict[ir.Value, ir.Value]:
        """Return pairs of outputs and inputs, the nearest first, each output and input once.

        Args:
            candidates: the inputs for each output.
            by_interface: True to consider names and order, too.

        Among equally near pairs, the first is that of the output that is equally near to fewer inputs; then a pair
        between the same known pairs; then that of an input with fewer readers, or in the loss.
        """
        forward = self._step.topology.forward
        edges = [(self._rank(o, v, by_interface), o, v) for o, values in candidates.items() for v in values]
        alike = Counter((rank[:2], output) for rank, output, _ in edges)

        def order(edge: tuple[_Rank, ir.Value, ir.Value]) -> tuple[float, ...]:
            rank, output, value = edge
            is_elsewhere = not by_interface or self.between.get(output) is not value
            return *rank[:2], alike[rank[:2], output], is_elsewhere, value not in forward, len(value.uses()), *rank[2:]

        pairs: dict[ir.Value, ir.Value] = {}
        taken: set[ir.Value] = set()
        for _, output, value in sorted(edges, key=order):
            if output not in pairs and value not in taken:
                pairs[output] = value
                taken.add(value)
        return pairs

    @functools.cached_property
    def between(self) -> dict[ir.Value, ir.Value]:
        """The open outputs and inputs between two known pairs, paired in order, if equally many."""
        pairs = {value: each.pair for value, each in self._step.outputs.items() if each.pair is not None}
        return find_between(self._step.graph, pairs)

    def _rank(self, output: ir.Value, value: ir.Value, by_interface: bool) -> _Rank:
        """Return the distance of an output from an input; the input's name inside the output's comes first."""
        share, length = likeness(value, output) if by_interface else (0.0, 0)
        return -length if share == 1 else 0, self._distance(output, value), -share, -length

    def _distance(self, output: ir.Value, value: ir.Value) -> int:
        if output not in self._known:
            met = dict.fromkeys((*self._met(output), *self._along(output)), _MEETS)
            self._known[output] = met | self._find_distances(output)
        found = self._known[output].get(value)
        if found is not None:
            # A step may also return the weights of the last step.
            return found if found or value not in self._step.topology.forward else _IS_FAR
        ways = (value in self._dependence.of(output)) + (value in self._dependence.plain(output))
        return _DEPENDS[ways] or (_IS_FAR if value.uses() else _IS_UNREAD)

    def _find_distances(self, output: ir.Value) -> dict[ir.Value, int]:
        """Return the inputs with a path to an output through values of its shape, and the length of the path."""
        topology, ends = self._step.topology, self._step.plan.unscaled
        known: dict[ir.Value, int] = {}
        pending = [(0, 0, output)]
        order = itertools.count(1)
        while pending and len(known) < _MOST_VALUES:
            length, _, value = heapq.heappop(pending)
            if value in known:
                continue
            known[value] = length
            node = value.producer()
            if node is not None and (value is output or value not in ends or node in topology.contractions):
                for operand, cost in self._above(node, value):
                    heapq.heappush(pending, (length + cost, next(order), operand))
        return {value: length for value, length in known.items() if value.producer() is None}

    def _above(self, node: ir.Node, value: ir.Value) -> Iterator[tuple[ir.Value, int]]:
        """Yield the operands of an element-wise result, with distances; a product without a number is longer."""
        if node.op_type == "If":
            yield from ((branch.outputs[value.index() or 0], 0) for branch in subgraphs(node))
        elif (start := loop_start(value)) is not None:
            yield start, 1
        elif has_trait(node, VIEWS):
            yield from ((operand, 0) for operand in inputs_of(node)[:1])
        elif not node.op_type.startswith("Reduce"):
            terms = {operand for operand, factor in find_terms(node, value, self._factors, VIEWS) if factor}
            is_product = node in self._step.topology.contractions
            for operand in terms if is_product else inputs_of(node):
                if operand.shape is None or value.shape is None or operand.shape == value.shape:
                    yield operand, 1 if operand in terms else 2

    def _met(self, output: ir.Value) -> Iterator[ir.Value]:
        """Yield the inputs that a node reads beside an output: old values for comparison with the new one."""
        topology = self._step.topology
        for view in self._step.views(output):
            for node in topology.consumers(view):
                if node not in topology.contractions:
                    yield from (source_by_trait(each, VIEWS) for each in topology.operands(node))

    def _along(self, output: ir.Value) -> Iterator[ir.Value]:
        """Yield the inputs repeated along the reduced axes of an output, such as the moments of SM3."""
        node = self._step.views(output)[-1].producer()
        if node is None or not node.op_type.startswith("Reduce") or len(inputs := inputs_of(node)) < 2:
            return
        axes, shape = constant_tensor(inputs[1]), inputs[0].shape
        if axes is None or not axes.dtype.is_integer() or shape is None:
            return
        over = {int(axis) % max(len(shape), 1) for axis in axes.numpy().flat}
        rest = [1 if axis in over else dim for axis, dim in enumerate(shape)]
        for value in self._step.topology.ancestors([inputs[0]]):
            if value.shape is not None and [*value.shape] == rest:
                yield source_by_trait(value, VIEWS)


def find_between(graph: ir.Graph, pairs: Mapping[ir.Value, ir.Value]) -> dict[ir.Value, ir.Value]:
    """Return the other outputs and inputs between two pairs, paired in order, if equally many."""
    inputs, outputs = graph.inputs, graph.outputs
    known = [*find_positions(graph, pairs)]
    return {
        outputs[index]: inputs[before + index - first]
        for (first, before), (last, behind) in itertools.pairwise(known)
        for index in range(first + 1, last)
        if last - first == behind - before
    }


def find_positions(graph: ir.Graph, pairs: Mapping[ir.Value, ir.Value]) -> Iterable[tuple[int, int]]:
    """Yield the positions of the outputs and the inputs of some pairs, in the order of the outputs."""
    places = {value: index for index, value in enumerate(graph.inputs)}
    for index, value in enumerate(graph.outputs):
        if value in pairs and pairs[value] in places:
            yield index, places[pairs[value]]


def likeness(value: ir.Value, output: ir.Value) -> tuple[float, int]:
    """Return the part of an input's name at an end of an output's name, in words: as a share, and its length."""
    name, other = words_of(value), words_of(output)
    common = max(_length(common_words(name, other)), _length(common_words(name[::-1], other[::-1])))
    return common / max(_length(name), 1), common


def words_of(value: ir.Value) -> list[str]:
    """Return the words, numbers and separators of a value's name."""
    return re.findall(r"[^\W\d_]+|\d+|[\W_]+", value.name or "")


def common_words(one: list[str], other: list[str]) -> list[str]:
    """Return the common first words of two names."""
    return [word for word, same in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))]


def _length(words: list[str]) -> int:
    """Return the length of words; numbers alone have length 0."""
    return sum(map(len, words)) if any(map(str.isalpha, words)) else 0
