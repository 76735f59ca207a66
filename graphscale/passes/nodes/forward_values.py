"""The values of the forward pass that are finite in a normal step."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import onnx_ir as ir

from graphscale.graph.cones import nodes_above
from graphscale.graph.inference import dtypes_by_name
from graphscale.graph.values import Use, constant_tensor, is_float, is_tensor, operand_at, operands_of
from graphscale.operators import Trait, has_trait, overwritten_inputs, writing_nodes

__all__ = ["find_forward_values"]

# Operators that may give finite numbers for an infinity: a mask of -inf ends there.
_BOUNDED = frozenset(
    {"Softmax", "Exp", "Sigmoid", "Tanh", "Erf", "Clip", "Max", "Min", "ReduceMax", "ReduceMin", "ReduceLogSumExp"}
)
_REARRANGES = Trait.EXACT & ~Trait.CAST  # a cast may overflow
_LARGEST_CONSTANT = 2**24  # elements; larger constants are weights, and are not read


def find_forward_values(model: ir.Model, loss: ir.Value, carried: Collection[ir.Value]) -> dict[ir.Value, ir.DataType]:
    """Find the float32 and float64 values above the loss: inputs first, then results in the order of nodes.

    Smaller types are left out: ONNX Runtime computes them in float32 on a CPU, and a check would round the value. The
    results of casts to float32 are included.

    Constants, carried state, running statistics, and results with the numbers of an operand, such as transposes, are
    left out, too. So are results of an infinite constant, such as scores plus a mask of -inf, which are infinite in
    every step.

    Args:
        model: the model; values without a declared or inferred type are left out.
        loss: the loss.
        carried: the inputs that are carried state, and no running statistics.

    Returns:
        the values with their dtypes, in order.
    """
    above = nodes_above(loss)
    nodes = [node for node in model.graph if node in above]
    read = dict.fromkeys(value for node in nodes for value in operands_of(node))
    typed = dtypes_by_name(model)
    statistics = {operand_at(Use(n, i)) for n in writing_nodes(model.graph) for i in overwritten_inputs(n)}
    values = [v for v in read if v.is_graph_input() and not v.is_initializer() and v not in {*carried, *statistics}]
    infinite = {value for value in read if _is_infinite_constant(value)}
    for node in nodes:
        if node.op_type not in _BOUNDED and not infinite.isdisjoint(operands_of(node)):
            infinite.update(node.outputs)
        values += () if has_trait(node, _REARRANGES) else node.outputs
    sound = [v for v in values if v not in infinite and constant_tensor(v) is None and is_tensor(v)]
    found = {value: value.dtype or typed.get(value.name or "") for value in sound}
    return {value: dtype for value, dtype in found.items() if dtype in (ir.DataType.FLOAT, ir.DataType.DOUBLE)}


def _is_infinite_constant(value: ir.Value) -> bool:
    tensor = constant_tensor(value)
    if tensor is None or not is_float(value) or tensor.size > _LARGEST_CONSTANT:
        return False
    return not np.isfinite(tensor.numpy()).all()
