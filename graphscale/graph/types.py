"""Undeclared dtypes of values by the operators alone, and the numbers that dtypes hold."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import onnx_ir as ir

from graphscale.errors import UnsupportedModelError
from graphscale.graph.values import own_dtype, subgraphs
from graphscale.graph.walks import reach
from graphscale.operators import OPERATORS, Kind, rule_of

__all__ = ["dtype_of", "dtypes_of", "holds_all"]

# The binary digits of the significands.
_DIGITS = {ir.DataType.FLOAT16: 11, ir.DataType.BFLOAT16: 8, ir.DataType.FLOAT: 24, ir.DataType.DOUBLE: 53}


def dtype_of(value: ir.Value) -> ir.DataType:
    """Return the dtype of a floating-point value: its own, or that of its operands.

    Raises:
        UnsupportedModelError: neither the model nor the operators determine the dtype.
    """
    for current in reach([value], _of_the_same_dtype):
        dtype = own_dtype(current)
        if dtype is not None:
            return dtype
    raise UnsupportedModelError(
        f"the dtype of value {value.name!r} is not known; run shape inference on the model before scaling it"
    )


def dtypes_of(nodes: Iterable[ir.Node]) -> dict[ir.Value, ir.DataType]:
    """Return the known dtypes of the results of some nodes, in one pass.

    Args:
        nodes: the nodes in execution order, with those of bodies after the node around them.
    """
    found: dict[ir.Value, ir.DataType] = {}
    for node in nodes:
        for i, value in enumerate(node.outputs):
            dtype = own_dtype(value)
            if dtype is None and ((rule := rule_of(node)) is None or rule.has_degree(i)):
                sources = (found.get(v) or own_dtype(v) for v in _of_the_same_dtype(value))
                dtype = next((source for source in sources if source is not None), None)
            if dtype is not None:
                found[value] = dtype
    return found


def _of_the_same_dtype(value: ir.Value) -> Iterator[ir.Value]:
    """Yield the values with the dtype of a value, by its operator's definition."""
    node = value.producer()
    if node is None:
        return
    rule, bodies = rule_of(node), subgraphs(node)
    if bodies:
        # The first output of a Loop's body is its condition.
        yield bodies[0].outputs[(value.index() or 0) + (1 if node.op_type == "Loop" else 0)]
    elif rule is not None and (rule.kind not in (Kind.SHAPE, Kind.DEGREE_0, Kind.COMPARE) or node.op_type == "Sign"):
        like = OPERATORS[node.domain, node.op_type].like
        indices = rule.operands(len(node.inputs)) if like is None else (like,)
        operands = (node.inputs[i] for i in indices if i < len(node.inputs))
        yield from (operand for operand in operands if operand is not None)


def holds_all(wide: ir.DataType | None, narrow: ir.DataType | None) -> bool:
    """Return whether a type holds all numbers of another one; NumPy's safe casts round 64-bit integers and float8."""
    if wide is None or narrow is None or wide is narrow:
        return wide is narrow and wide is not None
    digits = _count_digits(narrow)
    if not 0 < digits <= _count_digits(wide):
        return False
    if narrow in _DIGITS:
        return wide in (ir.DataType.FLOAT, ir.DataType.DOUBLE)  # the others have fewer exponents
    return wide in _DIGITS or wide.is_signed() or not narrow.is_signed()


def _count_digits(dtype: ir.DataType) -> int:
    """Return the binary digits of all whole numbers from zero to a power of two that a type holds; 0 if unknown."""
    if dtype.is_integer():
        return dtype.bitwidth - dtype.is_signed()
    return 1 if dtype is ir.DataType.BOOL else _DIGITS.get(dtype, 0)
