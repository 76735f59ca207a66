"""Nearness of inputs and outputs, in the graph and by name, for the choice among proposals alone."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator

import onnx_ir as ir

from graphscale.analysis.roles.facts import VIEWS, Facts
from graphscale.analysis.updates import find_terms, shares
from graphscale.graph.values import constant_tensor, inputs_of, subgraphs
from graphscale.graph.walks import source_by_trait
from graphscale.operators import has_trait

__all__ = ["Nearness"]

# Limit of the values searched above an output; an update has a few dozens.
_MOST_VALUES = 300
_MEETS, _IS_UNREAD, _IS_FAR = 1000, 4000, 5000
_DEPENDS = {0: 0, 1: 3000, 2: 2000}


class Nearness:
    """The distances of outputs from inputs.

    Few nodes lie between a state and its next value, and all keep its shape. An output for comparison with the state
    ranks next, then an output that depends on the state otherwise.

    Args:
        step: the facts about the step.
    """

    def __init__(self, step: Facts) -> None:
        self._step, self._dependence = step, step.dependence
        self._factors = shares(step.factors)
        self._known: dict[ir.Value, dict[ir.Value, int]] = {}

    def distance(self, output: ir.Value, value: ir.Value) -> int:
        """Return the distance of an output from an input."""
        if output not in self._known:
            met = dict.fromkeys((*self._met(output), *self._along(output)), _MEETS)
            self._known[output] = met | self._find_distances(output)
        found = self._known[output].get(value)
        if found is not None:
            # A step may also return the weights of the last step.
            return found if found or value not in self._step.topology.forward else _IS_FAR
        ways = self._dependence.count_ways(output, value)
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
        for value in self._step.above(inputs[0]):
            if value.shape is not None and [*value.shape] == rest:
                yield source_by_trait(value, VIEWS)


def loop_start(value: ir.Value) -> ir.Value | None:
    """Return the first value of a Loop's output, None for other values."""
    node = value.producer()
    first = 2 + (value.index() or 0)
    is_loop = node is not None and node.op_type == "Loop" and not node.domain
    return node.inputs[first] if node is not None and is_loop and first < len(node.inputs) else None
