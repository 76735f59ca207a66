"""Rules of windows, as of pooling: slices with steps."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from graphscale.errors import ExportError
from graphscale.exporters.jax.contractions import spread
from graphscale.exporters.jax.rewriting import rule

__all__: list[str] = []


def _least(dtype: Any) -> Any:
    return -np.inf if jnp.issubdtype(dtype, np.floating) else np.iinfo(dtype).min


def _most(dtype: Any) -> Any:
    return np.inf if jnp.issubdtype(dtype, np.floating) else np.iinfo(dtype).max


def _reduce_window(combine: Callable[[Any, Any], Any], neutral: Callable[[Any], Any]) -> Callable[..., Any]:
    def compute(
        x: Any,
        window_dimensions: Sequence[int],
        window_strides: Sequence[int],
        padding: Sequence[tuple[int, int]],
        base_dilation: Sequence[int] | None = None,
        window_dilation: Sequence[int] | None = None,
        **_: Any,
    ) -> Any:
        """Combine shifted slices, one axis after the other."""
        filling = np.asarray(neutral(x.dtype), x.dtype)
        for axis, size in enumerate(window_dimensions):
            gap = 1 if base_dilation is None else base_dilation[axis]
            step, apart = window_strides[axis], 1 if window_dilation is None else window_dilation[axis]
            if size == 1 and gap == 1 and step == 1 and not any(padding[axis]):
                continue
            x = _pad_axis(spread(x, axis, gap, filling), axis, padding[axis], filling)
            count = (x.shape[axis] - (size - 1) * apart - 1) // step + 1
            parts = [_every(x, axis, place * apart, count, step) for place in range(size)]
            x = parts[0]
            for part in parts[1:]:
                x = combine(x, part)
        return x

    return compute


rule("reduce_window_sum")(_reduce_window(lax.add, lambda dtype: 0))
rule("reduce_window_max")(_reduce_window(lax.max, _least))
rule("reduce_window_min")(_reduce_window(lax.min, _most))


def _pad_axis(x: Any, axis: int, edges: tuple[int, int], filling: Any) -> Any:
    if not any(edges):
        return x
    return lax.pad(x, filling, [(*edges, 0) if at == axis else (0, 0, 0) for at in range(x.ndim)])


def _every(x: Any, axis: int, start: int, count: Any, step: int) -> Any:
    return lax.slice_in_dim(x, start, start + (count - 1) * step + 1, step, axis)


@rule("select_and_scatter_add")
def _select_and_scatter_add(
    source: Any,
    operand: Any,
    select_prim: Any,
    window_dimensions: Sequence[int],
    window_strides: Sequence[int],
    padding: Sequence[tuple[int, int]],
) -> Any:
    """Add each cotangent to the first largest element of its window."""
    is_max = select_prim is lax.ge_p
    filling = np.asarray((_least if is_max else _most)(operand.dtype), operand.dtype)
    wide = lax.pad(operand, filling, [(*edges, 0) for edges in padding])
    places = list(itertools.product(*map(range, window_dimensions)))
    parts = [_window(wide, place, source.shape, window_strides) for place in places]
    chosen = parts[0]
    for part in parts[1:]:
        chosen = (lax.max if is_max else lax.min)(chosen, part)
    taken = None
    total = None
    for place, part in zip(places, parts, strict=True):
        here = lax.eq(part, chosen)
        first = here if taken is None else lax.bitwise_and(here, lax.bitwise_not(taken))
        taken = here if taken is None else lax.bitwise_or(taken, here)
        share = lax.select(first, source, jnp.zeros_like(source))
        for axis, (start, step, size) in enumerate(zip(place, window_strides, wide.shape, strict=True)):
            share = spread(share, axis, step)
            share = _pad_axis(share, axis, (start, size - start - share.shape[axis]), np.zeros((), share.dtype))
        total = share if total is None else lax.add(total, share)
    edges = [(-low, -high, 0) for low, high in padding]
    return lax.pad(total, np.zeros((), source.dtype), edges) if any(map(any, padding)) else total


def _window(x: Any, place: Sequence[int], counts: Sequence[Any], strides: Sequence[int]) -> Any:
    for axis, (start, count, step) in enumerate(zip(place, counts, strides, strict=True)):
        x = _every(x, axis, start, count, step)
    return x


@rule("select_and_gather_add")
def _select_and_gather_add(
    tangents: Any,
    operand: Any,
    select_prim: Any,
    window_dimensions: Sequence[int],
    window_strides: Sequence[int],
    padding: Sequence[tuple[int, int]],
    base_dilation: Sequence[int] | None = None,
    window_dilation: Sequence[int] | None = None,
    **_: Any,
) -> Any:
    """Return the tangent of the first largest element of each window."""
    if any(step != 1 for step in (*(base_dilation or ()), *(window_dilation or ()))):
        raise ExportError("jax2onnx has no translation for select_and_gather_add with a dilation")
    is_max = select_prim is lax.ge_p
    filling = np.asarray((_least if is_max else _most)(operand.dtype), operand.dtype)
    wide = lax.pad(operand, filling, [(*edges, 0) for edges in padding])
    moved = lax.pad(tangents, np.zeros((), tangents.dtype), [(*edges, 0) for edges in padding])
    counts = [
        (size - window) // step + 1
        for size, window, step in zip(wide.shape, window_dimensions, window_strides, strict=True)
    ]
    best = result = None
    for place in itertools.product(*map(range, window_dimensions)):
        part, tangent = (_window(value, place, counts, window_strides) for value in (wide, moved))
        if best is None:
            best, result = part, tangent
            continue
        better = (lax.gt if is_max else lax.lt)(part, best)
        best, result = lax.select(better, part, best), lax.select(better, tangent, result)
    return result
