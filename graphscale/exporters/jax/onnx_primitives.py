"""Primitives with one operator of ONNX each, where jax2onnx has detours or mistakes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import onnx_ir as ir
from jax import lax
from jax.extend.core import Primitive
from jax2onnx.plugins.plugin_system import PLUGIN_REGISTRY

__all__ = ["PRIMITIVES", "matmul", "pad_edges", "put_rows", "take_rows"]

Lowering = Callable[..., Any]


class _Plugin:
    """A lowering as jax2onnx wants it."""

    def __init__(self, write: Lowering) -> None:
        self._write = write

    def lower(self, ctx: Any, eqn: Any) -> None:
        """Write the node of an equation."""
        values = [ctx.get_value_for_var(variable) for variable in eqn.invars]
        result = ctx.get_value_for_var(eqn.outvars[0], name_hint=ctx.fresh_name(eqn.primitive.name))
        written = self._write(ctx, *values, outputs=[result.name], **eqn.params)
        written.type, written.shape = result.type, result.shape
        ctx.bind_value_for_var(eqn.outvars[0], written)


def _define(name: str, compute: Callable[..., Any], write: Lowering) -> Any:
    """Define a primitive by a function of JAX with its shapes and values, and by its node."""
    primitive = Primitive(f"graphscale_{name}")
    primitive.def_impl(compute)

    def shape(*avals: Any, **params: Any) -> Any:
        specs = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in avals]
        found = jax.eval_shape(lambda *values: compute(*values, **params), *specs)
        return jax.core.ShapedArray(found.shape, found.dtype)

    primitive.def_abstract_eval(shape)
    PLUGIN_REGISTRY[primitive.name] = _Plugin(write)
    return primitive


def _write_matmul(ctx: Any, a: Any, b: Any, *, outputs: list[str]) -> Any:
    return ctx.builder.MatMul(a, b, _outputs=outputs)


def _write_take(ctx: Any, rows: Any, row: Any, *, outputs: list[str]) -> Any:
    return ctx.builder.Gather(rows, row, axis=0, _outputs=outputs)


def _write_put(ctx: Any, rows: Any, row: Any, updates: Any, *, reduction: str, outputs: list[str]) -> Any:
    places = ctx.builder.Cast(row, to=int(ir.DataType.INT64), _outputs=[ctx.fresh_name("row")])
    places.type, places.shape = ir.TensorType(ir.DataType.INT64), row.shape
    return ctx.builder.ScatterND(rows, places, updates, reduction=reduction, _outputs=outputs)


def _write_pad(ctx: Any, x: Any, filling: Any, *, edges: tuple[tuple[int, int], ...], outputs: list[str]) -> Any:
    pads = [low for low, _ in edges] + [high for _, high in edges]
    sizes = ctx.builder.add_initializer_from_array(ctx.fresh_name("pads"), np.asarray(pads, np.int64))
    return ctx.builder.Pad(x, sizes, filling, _outputs=outputs)


def _put(rows: Any, row: Any, updates: Any, reduction: str) -> Any:
    place = jnp.asarray(rows).at[jnp.asarray(row)[:, 0]]
    names = {"none": "set", "add": "add", "mul": "multiply", "min": "min", "max": "max"}
    return getattr(place, names[reduction])(updates)


_matmul_p = _define("matmul", jnp.matmul, _write_matmul)
_take_p = _define("take_rows", lambda rows, row: jnp.take(rows, row, axis=0, mode="clip"), _write_take)
_put_p = _define("put_rows", _put, _write_put)
_pad_p = _define("pad", lambda x, filling, edges: lax.pad(x, filling, [(*sizes, 0) for sizes in edges]), _write_pad)
PRIMITIVES = (_matmul_p, _take_p, _put_p, _pad_p)


def pad_edges(x: Any, filling: Any, edges: tuple[tuple[int, int], ...]) -> Any:
    """Pad each axis by two numbers of elements, zero or more."""
    return _pad_p.bind(x, filling, edges=edges)


def matmul(a: Any, b: Any) -> Any:
    """Multiply stacks of matrices, or a stack by a matrix."""
    return _matmul_p.bind(a, b)


def take_rows(rows: Any, row: Any) -> Any:
    """Return rows `[n, ...]` at int32 numbers within `n`, of any shape."""
    return _take_p.bind(rows, row)


def put_rows(rows: Any, row: Any, updates: Any, reduction: str) -> Any:
    """Put `[k, ...]` into rows `[n, ...]` at int32 numbers `[k, 1]` within `n`: none, add, mul, min or max."""
    return _put_p.bind(rows, row, updates, reduction=reduction)
