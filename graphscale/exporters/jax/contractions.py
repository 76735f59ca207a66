"""Rules of products and convolutions: the layouts that jax2onnx lowers right."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from graphscale.errors import ExportError
from graphscale.exporters.jax.onnx_primitives import matmul, pad_edges
from graphscale.exporters.jax.rewriting import rule

__all__ = ["spread"]


@rule("dot_general")
def _dot_general(lhs: Any, rhs: Any, dimension_numbers: Any, preferred_element_type: Any = None, **_: Any) -> Any:
    """Multiply matrices, or stacks of them: rows by columns.

    jax2onnx lowers a contraction over dimension 0 to a Gemm of the wrong shape.
    """
    (left, right), (left_batch, right_batch) = dimension_numbers
    if preferred_element_type is not None:
        lhs, rhs = (lax.convert_element_type(value, preferred_element_type) for value in (lhs, rhs))
    left_free = [axis for axis in range(lhs.ndim) if axis not in (*left, *left_batch)]
    right_free = [axis for axis in range(rhs.ndim) if axis not in (*right, *right_batch)]
    result = (
        *(lhs.shape[axis] for axis in left_batch),
        *(lhs.shape[axis] for axis in left_free),
        *(rhs.shape[axis] for axis in right_free),
    )
    if not (*left, *right):
        rank = len(left_batch)
        a = lax.expand_dims(_order(lhs, [*left_batch, *left_free]), range(lhs.ndim, lhs.ndim + len(right_free)))
        b = lax.expand_dims(_order(rhs, [*right_batch, *right_free]), range(rank, rank + len(left_free)))
        return lax.mul(jnp.broadcast_to(a, result), jnp.broadcast_to(b, result))
    a = _order(lhs, [*left_batch, *left_free, *left])
    b = _order(rhs, [*right_batch, *right, *right_free])
    stacks = [lhs.shape[axis] for axis in left_batch]
    rows, inner, columns = (
        [lhs.shape[axis] for axis in left_free],
        math.prod(lhs.shape[axis] for axis in left),
        math.prod(rhs.shape[axis] for axis in right_free),
    )
    if stacks or not rows:
        rows = [math.prod(rows)]
    product = matmul(_reshape(a, (*stacks, *rows, inner)), _reshape(b, (*stacks, inner, columns)))
    return _reshape(product, result)


def _order(x: Any, axes: Sequence[int]) -> Any:
    return x if list(axes) == list(range(x.ndim)) else lax.transpose(x, tuple(axes))


def _reshape(x: Any, shape: tuple[Any, ...]) -> Any:
    return x if tuple(x.shape) == tuple(shape) else lax.reshape(x, shape)


@rule("conv_general_dilated")
def _convolution(
    lhs: Any,
    rhs: Any,
    window_strides: Sequence[int],
    padding: Sequence[tuple[int, int]],
    lhs_dilation: Sequence[int],
    rhs_dilation: Sequence[int],
    dimension_numbers: Any,
    feature_group_count: int,
    batch_group_count: int,
    preferred_element_type: Any = None,
    **_: Any,
) -> Any:
    """Convolve with the batch and the channels ahead of the space, by one stride and padding of no negative size."""
    if preferred_element_type is not None:
        lhs, rhs = (lax.convert_element_type(value, preferred_element_type) for value in (lhs, rhs))
    x, kernel = _order(lhs, dimension_numbers.lhs_spec), _order(rhs, dimension_numbers.rhs_spec)
    for axis, (step, (low, high)) in enumerate(zip(lhs_dilation, padding, strict=True), start=2):
        x = spread(x, axis, step)
        if low < 0 or high < 0:
            x = lax.slice_in_dim(x, max(-low, 0), x.shape[axis] - max(-high, 0), axis=axis)
    padding = [(max(low, 0), max(high, 0)) for low, high in padding]
    if batch_group_count > 1:
        x = _batch_to_channels(x, batch_group_count)
        feature_group_count = batch_group_count
    result = lax.conv_general_dilated_p.bind(
        x,
        kernel,
        window_strides=tuple(window_strides),
        padding=tuple(padding),
        lhs_dilation=(1,) * len(padding),
        rhs_dilation=tuple(rhs_dilation),
        dimension_numbers=lax.conv_dimension_numbers(x.shape, kernel.shape, None),
        feature_group_count=feature_group_count,
        batch_group_count=1,
        precision=None,
        preferred_element_type=np.dtype(x.dtype),
        out_sharding=None,
    )
    inverse = np.argsort(dimension_numbers.out_spec)
    return _order(result, [int(axis) for axis in inverse])


def _batch_to_channels(x: Any, groups: int) -> Any:
    """Let each group of the batch be a group of channels: `[g n, c, ...]` becomes `[n, g c, ...]`."""
    batch, channels, *space = x.shape
    if not isinstance(batch, int):
        raise ExportError("a grouped convolution goes along the batch: pass dynamic_batch=False")
    parts = lax.transpose(lax.reshape(x, (groups, batch // groups, channels, *space)), (1, 0, *range(2, x.ndim + 1)))
    return lax.reshape(parts, (batch // groups, groups * channels, *space))


def spread(x: Any, axis: int, step: int, filling: Any = None) -> Any:
    """Put `step - 1` numbers, zeros or copies of a scalar, between the elements along an axis."""
    if step == 1:
        return x
    size = x.shape[axis]
    wide = lax.expand_dims(x, (axis + 1,))
    shape = (*wide.shape[: axis + 1], step - 1, *wide.shape[axis + 2 :])
    gap = jnp.broadcast_to(np.zeros((), x.dtype) if filling is None else filling, shape)
    both = lax.concatenate([wide, gap], axis + 1)
    joined = lax.reshape(both, (*x.shape[:axis], size * step, *x.shape[axis + 1 :]))
    return lax.slice_in_dim(joined, 0, (size - 1) * step + 1, axis=axis)


@rule("pad")
def _pad(x: Any, filling: Any, padding_config: Sequence[tuple[int, int, int]]) -> Any:
    """Pad without gaps and without cutting."""
    for axis, (low, high, gap) in enumerate(padding_config):
        x = spread(x, axis, gap + 1, filling)
        if low < 0 or high < 0:
            x = lax.slice_in_dim(x, max(-low, 0), x.shape[axis] - max(-high, 0), axis=axis)
    edges = tuple((max(low, 0), max(high, 0)) for low, high, _ in padding_config)
    return pad_edges(x, filling, edges) if any(map(any, edges)) else x
