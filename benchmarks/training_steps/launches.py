"""CUDA kernels of the finite check in a step, counted in the graph that ONNX Runtime executes.

Read in core/providers/cuda of microsoft/onnxruntime: `Sum` adds up at most eight values of equal shapes in one kernel
(math/variadic_elementwise_ops.cc), or two of any shapes; otherwise it clears its result, and runs a kernel for each
value. `Reshape` hands on the memory of its operand (tensor/reshape.cc). Each other node is a kernel; a library beneath
may split a product or a sum in two, and the graph does not show that.
"""

from __future__ import annotations

import onnx

__all__ = ["launches"]

_MARK = "graphscale/check-finite/"
_ONE = frozenset(("Cast", "IsNaN", "MatMul", "Mul", "Not", "ReduceSum"))
_MOST = 8


def launches(model: onnx.ModelProto) -> int | None:
    """Count the kernels of a model's finite check by standard operators; return None without a check.

    Args:
        model: a graph, as ONNX Runtime's optimizers leave it.

    Raises:
        LookupError: the check has an operator without known kernels.
    """
    tensors = {value.name: value.type.tensor_type for value in model.graph.value_info}
    shapes = {name: tensor.shape.dim for name, tensor in tensors.items() if tensor.HasField("shape")}
    known = {
        name: [dim.dim_value for dim in dims]
        for name, dims in shapes.items()
        if all(dim.HasField("dim_value") for dim in dims)
    }
    nodes = [node for node in model.graph.node if node.name.startswith(_MARK)]
    return sum(_launches(node, known) for node in nodes) if nodes else None


def _launches(node: onnx.NodeProto, shapes: dict[str, list[int]]) -> int:
    if node.op_type == "Sum":
        count = len(node.input)
        is_equal = all(name in shapes and shapes[name] == shapes[node.input[0]] for name in node.input)
        return 1 if count <= 2 or (count <= _MOST and is_equal) else count + 1
    if node.op_type != "Reshape" and node.op_type not in _ONE:
        raise LookupError(
            f"no facts about the CUDA kernels of {node.op_type} ({node.name}): look them up, and add them"
        )
    return int(node.op_type != "Reshape")
