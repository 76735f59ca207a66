"""Evidence by recurrence: a hidden state that a network reads as it reads its own values in later time steps.

In `h1 = Tanh(x1 @ w + h0 @ u); h2 = Tanh(x2 @ w + h1 @ u)` the weight `u` multiplies `h0` as it multiplies `h1`: `h2`
is the next value of `h0`. The cell state of an LSTM is gated, and no weight multiplies it. Each time step reads a batch
of its own, which layers with shared weights do not.
"""

from __future__ import annotations

from collections.abc import Iterator

import onnx_ir as ir

from graphscale.analysis.roles.step_interface import VIEWS, Interface
from graphscale.analysis.updates import same_type
from graphscale.graph.values import inputs_of, is_float, is_scalar
from graphscale.graph.walks import source_by_trait

__all__ = ["pair_recurrent"]


def pair_recurrent(step: Interface) -> None:
    """Pair outputs with hidden states that they follow from by products with one weight, one behind the other."""
    outputs = [value for value in step.open_outputs() if _may_be_hidden(step, value)]
    inputs = [value for value in step.graph.inputs if step.is_open(value) and value in step.topology.forward]
    if not outputs or not inputs:
        return
    behind = {value: [*_later_products(step, value)] for value in inputs if is_float(value) and not is_scalar(value)}
    candidates: dict[ir.Value, list[ir.Value]] = {}
    for output in outputs:
        above = step.topology.ancestors([output])
        candidates[output] = [
            value
            for value, later in behind.items()
            if same_type(output, value) and any(result in above for node in later for result in node.outputs)
        ]
    hidden = {output: values for output, values in candidates.items() if values}
    cells = {
        output: [v for v in step.open_inputs_like(output) if not behind.get(v) and v in step.held_possibly(output)]
        for output in hidden
    }
    step.settle(cells, "it is gated beside a hidden state")
    left = {output: values for output, values in hidden.items() if output not in step.outputs}
    step.settle(left, "a weight multiplies it as it multiplies its own later values")


def _may_be_hidden(step: Interface, value: ir.Value) -> bool:
    return is_float(value) and not is_scalar(value) and value not in step.behind_gradients


def _later_products(step: Interface, value: ir.Value) -> Iterator[ir.Node]:
    """Yield the products behind that of a value with a weight: of the same weight with a value of the same type."""
    topology = step.topology
    for node in topology.contractions:
        if node.outputs[0] not in topology.forward:
            continue
        for operand, weight in _operands(step, node):
            if value is not operand and value not in step.held_possibly(operand):
                continue
            behind = topology.descendants(nodes={node})
            for other in topology.contractions:
                if other is not node and other.outputs[0] in behind and other.outputs[0] in topology.forward:
                    shared = (o for o, w in _operands(step, other) if w is weight and same_type(o, operand))
                    if any(o in behind and _reads_batch(step, o, value) for o in shared):
                        yield other


def _reads_batch(step: Interface, operand: ir.Value, value: ir.Value) -> bool:
    """Return whether a batch, weighted, is added to or joined with what an operand follows from a value."""
    topology = step.topology
    above, behind = topology.ancestors([operand]), topology.descendants({value})
    for node in topology.nodes:
        if node.op_type not in ("Add", "Concat", "Sum", "Gemm") or node.outputs[0] not in above:
            continue
        operands = inputs_of(node)
        if any(each in behind for each in operands):
            for each in operands:
                sources = [v for v in topology.ancestors([each]) if v.producer() is None] if each not in behind else []
                weights = [v for v in sources if v in topology.states and step.has_gradient(v)]
                batches = [v for v in sources if v.is_graph_input() and v not in weights and not is_scalar(v)]
                if batches and (weights or node.op_type == "Concat"):
                    return True
    return False


def _operands(step: Interface, node: ir.Node) -> Iterator[tuple[ir.Value, ir.Value]]:
    """Yield the operands of a product that another operand, a weight or a view of one, multiplies."""
    operands = inputs_of(node)[:2]
    for operand, other in zip(operands, reversed(operands), strict=True):
        weight = source_by_trait(other, VIEWS)
        if weight.producer() is None and weight in step.topology.states and step.has_gradient(weight):
            yield operand, weight
