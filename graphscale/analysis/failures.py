"""Which nodes cannot fail at run time, whatever numbers flow through them."""

from __future__ import annotations

import onnx_ir as ir

from graphscale.graph.values import constant_tensor, is_scalar

__all__ = ["cannot_fail"]


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# One operand, any shape, no index into it.
_UNARY = _names(
    "Abs Cast Ceil Constant Cos Erf Exp Floor Identity IsInf IsNaN Log LogSoftmax Neg Not Reciprocal Relu Round Shape "
    "Sigmoid Sign Sin Size Softmax Sqrt Tanh Transpose"
)
# Reductions over all axes, or over axes that are constants: shape inference has seen them.
_REDUCTIONS = _names("ReduceL1 ReduceL2 ReduceMean ReduceSum ReduceSumSquare")
# They fail on operands of different shapes.
_ELEMENTWISE = _names(
    "Add And Div Equal Greater GreaterOrEqual Less LessOrEqual Max Mean Min Mul Or Pow Sub Sum Where Xor"
)


def cannot_fail(node: ir.Node) -> bool:
    """Whether a node gives a result for all inputs of their known types and shapes."""
    if node.domain != "":
        return False
    if node.op_type in _REDUCTIONS:
        axes = node.inputs[1] if len(node.inputs) > 1 else None
        return axes is None or constant_tensor(axes) is not None
    if node.op_type in _UNARY:
        return True
    return node.op_type in _ELEMENTWISE and _shapes_agree(node)


def _shapes_agree(node: ir.Node) -> bool:
    """Whether the shapes of operands are known to agree: nobody compares what is fed for two axes of one name."""
    shapes = [value.shape for value in node.inputs if value is not None and not is_scalar(value)]
    return len(shapes) <= 1 or all(shape is not None and shape.is_static() for shape in shapes)
