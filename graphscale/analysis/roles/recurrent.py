"""Evidence by recurrence: a network reads a hidden state as it reads the state's values in later time steps.

In `h1 = Tanh(x1 @ w + h0 @ u); h2 = Tanh(x2 @ w + h1 @ u)` the weight `u` multiplies `h0` as it multiplies `h1`: `h2`
is the next value of `h0`. The cell state of an LSTM is gated, and no weight multiplies it. Each time step reads a batch
of its own, unlike layers with shared weights.
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
    """Pair outputs with hidden states, by a chain of products with one weight."""
    outputs = [v for v in step.open_outputs() if is_float(v) and not is_scalar(v) and v not in step.behind_gradients]
    like = {value for output in outputs for value in step.open_inputs_like(output) if value.is_graph_input()}
    behind = {value: [*_later_products(step, value)] for value in like if value in step.topology.forward}
    if not any(behind.values()):
        return
    candidates: dict[ir.Value, list[ir.Value]] = {}
    for output in outputs:
        above = step.topology.ancestors([output])
        candidates[output] = [
            value
            for value, later in behind.items()
            if same_type(output, value) and any(result in above for node in later for result in node.outputs)
        ]
    hidden = {output: values for output, values in candidates.items() if values}
    cells = {o: [v for v in step.open_inputs_like(o) if v in step.held_possibly(o)] for o in hidden}
    step.settle(cells, "it is gated beside a hidden state")
    left = {output: values for output, values in hidden.items() if output not in step.outputs}
    step.settle(left, "a weight multiplies it as it multiplies its own later values")


def _later_products(step: Interface, value: ir.Value) -> Iterator[ir.Node]:
    """Yield the products behind that of a value with a weight: those of the weight with a value of the same type."""
    behind = step.topology.descendants({value})
    products: dict[ir.Value, list[tuple[ir.Node, ir.Value]]] = {}
    for node in step.topology.contractions:
        if node.outputs[0] in behind and node.outputs[0] in step.topology.forward:
            for operand, weight in _operands(step, node):
                products.setdefault(weight, []).append((node, operand))
    for shared in (each for each in products.values() if len(each) > 1):
        for node, operand in shared:
            if value is not operand and value not in step.held_possibly(operand):
                continue
            later = step.topology.descendants(nodes={node})
            for other, another in shared:
                if another in later and same_type(another, operand) and _reads_batch(step, another, value):
                    yield other


def _reads_batch(step: Interface, operand: ir.Value, value: ir.Value) -> bool:
    """Return whether a weighted batch is added to or joined with a value between two products."""
    topology = step.topology
    above, behind = topology.ancestors([operand]), topology.descendants({value})
    for node in topology.nodes:
        if node.op_type not in ("Add", "Concat", "Sum", "Gemm") or node.outputs[0] not in above:
            continue
        apart = [each for each in inputs_of(node) if each not in behind]
        if len(apart) == len(inputs_of(node)):
            continue
        sources = [each for each in topology.ancestors(apart) if topology.flat.is_source(each)]
        weights = [each for each in sources if _is_weight(step, each)]
        batches = [each for each in sources if each.is_graph_input() and each not in weights and not is_scalar(each)]
        if batches and (weights or node.op_type == "Concat"):
            return True
    return False


def _operands(step: Interface, node: ir.Node) -> Iterator[tuple[ir.Value, ir.Value]]:
    """Yield the operands of a product whose other operand is a weight or a view of one."""
    operands = inputs_of(node)[:2]
    for operand, other in zip(operands, reversed(operands), strict=True):
        weight = source_by_trait(other, VIEWS)
        if _is_weight(step, weight):
            yield operand, weight


def _is_weight(step: Interface, value: ir.Value) -> bool:
    """Return whether the loss reads a value with a next value, or with a gradient in a graph without next values."""
    if value.producer() is not None or value not in step.topology.states or not is_float(value):
        return False
    are_updated = any(each.pair is not None for each in step.inputs.values())
    is_updated = value in step.inputs and step.inputs[value].pair is not None
    return step.has_gradient(value) and (is_updated or not are_updated)
