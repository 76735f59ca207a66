"""Writing nodes in place of an operator of TensorFlow, and the registry of lowerings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from tf2onnx import utils

__all__ = ["NodeWriter", "handlers", "lower"]

Lowering = Callable[["NodeWriter", Any], str | tuple[str, ...]]
_LOWERINGS: dict[str, Lowering] = {}


class NodeWriter:
    """Writes operators beside a node of a tf2onnx graph; values are names."""

    def __init__(self, ctx: Any, node: Any) -> None:
        self.ctx = ctx
        self.dtype = utils.map_onnx_to_numpy_type(ctx.get_dtype(node.output[0]))

    def op(self, kind: str, *inputs: str, **attributes: Any) -> str:
        """Add a node; return its output."""
        output: str = self.ctx.make_node(kind, list(inputs), attr=attributes).output[0]
        return output

    def constant(self, value: Any, dtype: Any = None) -> str:
        """Return a constant, of the node's type by default."""
        name = utils.make_name("constant")
        output: str = self.ctx.make_const(name, np.array(value, dtype or self.dtype)).output[0]
        return output

    def integers(self, values: Sequence[int]) -> str:
        """Return an int64 vector."""
        return self.constant(values, np.int64)

    def shape(self, value: str) -> list[int]:
        """Return the static shape of a value; -1 is the size of the batch."""
        shape: list[int] | None = self.ctx.get_shape(value)
        if shape is None or shape.count(-1) > 1:
            raise NotImplementedError("a tensor with more than one size that is not known")
        return shape

    def known(self, sizes: Sequence[int], subject: str) -> list[int]:
        """Return sizes that the lowering needs to know."""
        if -1 in sizes:
            raise NotImplementedError(f"{subject} along the batch")
        return list(sizes)

    def count(self, value: str, axes: Sequence[int]) -> str:
        """Return how many numbers stand along these axes."""
        shape = self.shape(value)
        sizes = [shape[axis] for axis in axes]
        if -1 not in sizes:
            return self.constant(np.prod(sizes))
        own = self.op("Gather", self.op("Shape", value), self.integers(axes))
        return self.op("Cast", self.op("ReduceProd", own, keepdims=0), to=utils.map_numpy_to_onnx_dtype(self.dtype))

    def mean(self, value: str, axes: Sequence[int]) -> str:
        """Return the mean over axes; the form of ReduceMean depends on the opset."""
        total = self.op("ReduceSum", value, self.integers(axes), keepdims=0)
        return self.op("Div", total, self.count(value, axes))

    def multiply(self, *factors: str) -> str:
        """Multiply from the left."""
        product, *rest = factors
        for factor in rest:
            product = self.op("Mul", product, factor)
        return product

    def where_positive(self, tested: str, then: str, otherwise: str) -> str:
        """Choose by the sign of a value."""
        return self.op("Where", self.op("Greater", tested, self.constant(0)), then, otherwise)

    def reshape(self, value: str, shape: Sequence[int]) -> str:
        """Reshape; -1 is the size of the batch."""
        return self.op("Reshape", value, self.integers(shape))

    def zeros_like(self, value: str) -> str:
        """Return zeros of the node's type in the shape of a value."""
        return self.op("Expand", self.constant(0), self.op("Shape", value))

    def scatter_sums(self, zeros: str, places: str, values: str) -> str:
        """Add values to zeros at places of the first axis."""
        return self.op("ScatterElements", zeros, places, values, axis=0, reduction="add")

    def equals_position(self, index: str, count: int | str, axis: int = -1) -> str:
        """Compare int32 or int64 indices with 0 to count - 1 along a new axis; one out of range equals no position."""
        # OneHot of ONNX counts negative indices from the end.
        dtype, rank = utils.map_onnx_to_numpy_type(self.ctx.get_dtype(index)), len(self.ctx.get_shape(index)) + 1
        behind = [1] * (rank - 1 - axis % rank)
        if isinstance(count, int):
            positions = self.constant(np.arange(count).reshape(-1, *behind), dtype)
        else:
            end = self.op("Cast", count, to=utils.map_numpy_to_onnx_dtype(dtype))
            positions = self.op("Range", self.constant(0, dtype), end, self.constant(1, dtype))
            positions = self.reshape(positions, [-1, *behind])
        return self.op("Equal", self.op("Unsqueeze", index, self.integers([axis])), positions)

    def channels_first(self, value: str) -> str:
        """Move the last axis behind the first one."""
        rank = len(self.shape(value))
        return self.op("Transpose", value, perm=[0, rank - 1, *range(1, rank - 1)])

    def channels_last(self, value: str, rank: int) -> str:
        """Move the second axis to the end."""
        return self.op("Transpose", value, perm=[0, *range(2, rank), 1])


def static_numbers(writer: NodeWriter, node: Any, index: int) -> list[int]:
    """Return the numbers of an input that is a constant, or the shape of a tensor; -1 is the size of the batch."""
    source = node.inputs[index]
    while source.type in ("Cast", "Identity"):
        source = source.inputs[0]
    if source.is_const():
        return [int(each) for each in np.ravel(source.get_tensor_value(as_list=False))]
    if source.type == "Shape":
        return writer.shape(source.input[0])
    raise NotImplementedError("indices or sizes that are computed")


def lower(*names: str) -> Callable[[Lowering], Lowering]:
    """Register the lowering of operators."""

    def register(lowering: Lowering) -> Lowering:
        _LOWERINGS.update(dict.fromkeys(names, lowering))
        return lowering

    return register


def handlers(failed: dict[str, str]) -> dict[str, tuple[Callable[..., None], list[Any]]]:
    """Return the lowerings in the form of tf2onnx's `custom_op_handlers`.

    Args:
        failed: gets the name of each node without a lowering, and the reason.
    """

    def handler(lowering: Lowering) -> Callable[..., None]:
        def handle(ctx: Any, node: Any, _name: str, _args: list[Any]) -> None:
            try:
                results = lowering(NodeWriter(ctx, node), node)
            except NotImplementedError as error:
                failed[node.name] = f"{node.type} with {error}"
                raise
            results = results if isinstance(results, tuple) else (results,)
            outputs, shapes, dtypes = node.output, node.output_shapes, node.output_dtypes
            ctx.remove_node(node.name)
            for result, output, shape, dtype in zip(results, outputs, shapes, dtypes, strict=False):
                ctx.make_node("Identity", [result], outputs=[output], shapes=[shape], dtypes=[dtype])

        return handle

    return {name: (handler(lowering), []) for name, lowering in _LOWERINGS.items()}
