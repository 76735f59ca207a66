"""A writer of one node's standard form, as nodes before it."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable
from typing import Any, Self

import numpy as np
import onnx_ir as ir

from graphscale.errors import UnsupportedModelError
from graphscale.graph.builder import Builder
from graphscale.graph.inference import infer_results
from graphscale.graph.types import dtype_of
from graphscale.graph.values import is_float, node_name, op_name
from graphscale.operators import attribute, rule_of
from graphscale.passes.lower_training_ops.schema_types import alike

__all__ = ["NodeWriter", "Operand"]

# A value, a number (a scalar constant of the operator's type), an array (a constant), or None for an omitted operand.
Operand = ir.Value | float | np.ndarray[Any, Any] | None


@dataclasses.dataclass(frozen=True)
class NodeWriter:
    """A writer of nodes of the default domain, placed before one node.

    By default, ONNX infers the types and shapes of results.

    Attributes:
        build: the builder of the nodes, at their place.
        node: the node to be replaced.
    """

    build: Builder
    node: ir.Node

    @classmethod
    def before(cls, node: ir.Node, build: Builder) -> Self:
        """Return a writer for a node, in the main graph or in a body."""
        prefix = next((value.name for value in node.outputs if value.name), node.op_type.lower())
        return cls(dataclasses.replace(build, prefix=prefix, at=("before", node)), node)

    @functools.cached_property
    def opset(self) -> int:
        """The version of the default domain."""
        imports = self.build.editor.graph.opset_imports
        return imports.get("", imports.get("ai.onnx", 1))

    @functools.cached_property
    def dtype(self) -> ir.DataType:
        """The dtype of the node's data: the first floating-point operand in its degree rule."""
        rule, count = rule_of(self.node), len(self.node.inputs)
        indices = range(count) if rule is None else rule.operands(count)
        data = [value for i in indices if (value := self.input(i)) is not None]
        if not data:
            raise self.refusal("it has no data")
        return dtype_of(next((value for value in data if is_float(value)), data[0]))

    def input(self, index: int) -> ir.Value | None:
        """Return an input of the node; None if omitted."""
        return self.node.inputs[index] if index < len(self.node.inputs) else None

    def data(self, index: int) -> ir.Value:
        """Return a required input of the node."""
        value = self.input(index)
        if value is None:
            raise self.refusal(f"input {index} is missing")
        return value

    def wants(self, index: int) -> bool:
        """Return whether an output of the node has readers."""
        if index >= len(self.node.outputs):
            return False
        value = self.node.outputs[index]
        return value.is_graph_output() or bool(value.uses())

    def attribute(self, name: str, default: Any = None) -> Any:
        """Return an attribute of the node, or its operator's default."""
        return attribute(self.node, name, default)

    def refusal(self, reason: str) -> UnsupportedModelError:
        """Return the error for a node that cannot be replaced."""
        return UnsupportedModelError(
            f"{op_name(self.node)} node {node_name(self.node)!r} has no standard form: {reason}"
        )

    def number(self, number: float, dtype: ir.DataType | None = None) -> ir.Value:
        """Return the scalar constant of a number, by default of the dtype of the node's data."""
        return self.constant(np.asarray(number, dtype=(dtype or self.dtype).numpy()))

    def integers(self, *numbers: int) -> ir.Value:
        """Return the constant vector of some int64 numbers: axes, sizes or a shape."""
        return self.constant(np.asarray(numbers, dtype=np.int64))

    def constant(self, array: np.ndarray[Any, Any]) -> ir.Value:
        """Return the model's constant of an array; equal arrays share one."""
        return self.build.editor.shared_array(f"graphscale/{self.build.mark}", array)

    def __call__(self, op_type: str, *operands: Operand, **options: Any) -> ir.Value:
        """Write a node with one result, and return the result; see `several`."""
        return self.several(1, op_type, *operands, **options)[0]

    def several(
        self,
        count: int,
        op_type: str,
        *operands: Operand,
        like: ir.Value | None = None,
        dtype: ir.DataType | None = None,
        shape: Iterable[Any] | None = None,
        **attributes: Any,
    ) -> tuple[ir.Value, ...]:
        """Write a node with some results, and return them.

        Args:
            count: number of results.
            op_type: the operator, in the default domain.
            operands: its inputs. A number gets the common dtype of the operator's operands.
            like: a value with the dtype and shape of the first result.
            dtype: the dtype of the first result.
            shape: the shape of the first result.
            attributes: the node's attributes; None for an omitted one.
        """
        kept = {name: value for name, value in attributes.items() if value is not None}
        values = [self._value(op_type, i, operands) for i in range(len(operands))]
        name = f"{self.build.prefix}.{op_type.lower()}"
        if like is not None:
            dtype, shape = dtype or like.dtype, like.shape if shape is None else shape
        declared = (name, dtype, None if shape is None else ir.Shape(shape))
        outputs = [declared, *[(name, None, None)] * (count - 1)]
        node = self.build.node(op_type, values, outputs, attributes=kept)
        infer_results(node, self.opset)
        return tuple(node.outputs)

    def _value(self, op_type: str, index: int, operands: tuple[Operand, ...]) -> ir.Value | None:
        operand = operands[index]
        if operand is None or isinstance(operand, ir.Value):
            return operand
        if isinstance(operand, np.ndarray):
            return self.constant(operand)
        same = alike(op_type, self.opset, index, len(operands))
        values = (operands[i] for i in same)
        dtypes = (value.dtype for value in values if isinstance(value, ir.Value))
        return self.number(operand, next((dtype for dtype in dtypes if dtype is not None), None))
