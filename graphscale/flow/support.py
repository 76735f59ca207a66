"""Support: the sources that a value depends on, output by output through bodies.

An output of an If depends on its condition, and on the operands of its branches for this output; an output of a Loop or
Scan on the operands of the body in any round, and on the number of rounds. A shape is no dependence, nor is the length
of a scanned value.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Container, Iterable, Mapping, Sequence
from types import MappingProxyType

import onnx_ir as ir

from graphscale.flow.interpreter import Domain, Flow
from graphscale.graph.values import reads_shape
from graphscale.graph.walks import ancestors, is_contradiction

__all__ = ["SupportDomain", "depends_on", "reach"]


class SupportDomain(Domain[int]):
    """Sets of sources, a bit each.

    Args:
        stop: values that count as independent.
        sources: `{source: its bit}`, computed values among them.
    """

    default = 0

    def __init__(self, stop: Container[ir.Value] = (), sources: Mapping[ir.Value, int] = MappingProxyType({})) -> None:
        self._stop = stop
        self._sources = sources

    def transfer(self, node: ir.Node, operands: Sequence[int]) -> Sequence[int]:
        if node.op_type == "Where" and is_contradiction(node.inputs[0]):
            return operands[2:]  # a condition that never holds only delays the value
        sources = functools.reduce(operator.or_, operands, 0)
        return [0 if sources and reads_shape(node) else sources] * len(node.outputs)

    def opaque(self, node: ir.Node, operands: Sequence[int]) -> Sequence[int]:
        return [functools.reduce(operator.or_, operands, 0)] * len(node.outputs)

    def join(self, node: ir.Node, elements: Sequence[int]) -> int:
        return functools.reduce(operator.or_, elements)

    def control(self, element: int, condition: int) -> int:
        return element | condition

    def write(self, value: ir.Value, element: int) -> int:
        return self._sources.get(value, 0) | (0 if value in self._stop else element)


def reach(
    nodes: Iterable[ir.Node],
    sources: Iterable[ir.Value],
    stop: Container[ir.Value] = (),
    functions: Mapping[ir.OperatorIdentifier, ir.Function] | None = None,
) -> set[ir.Value]:
    """Return some values, and those that depend on them.

    Args:
        nodes: the nodes of a main graph, in execution order.
        sources: the values.
        stop: values to leave out, with the paths through them.
        functions: the model-local functions.
    """
    bits = dict.fromkeys(sources, 1)
    flow = Flow(SupportDomain(stop, bits), bits, functions)
    flow.visit_all(nodes)
    return {value for value, element in flow.elements.items() if element}


def depends_on(value: ir.Value, source: ir.Value, graph: ir.Graph) -> bool:
    """Return whether one value of a main graph depends on another."""
    above = ancestors([value])
    return source in above and value in reach((node for node in graph if not above.isdisjoint(node.outputs)), [source])
