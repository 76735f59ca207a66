"""Backward operators that PyTorch's ONNX exporter cannot translate, or gets wrong, in terms of others.

Each formula is the transpose of a linear operator of the forward pass, as its PyTorch documentation defines it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch._decomp import get_decompositions

__all__ = ["decompositions"]

aten = torch.ops.aten
Ints = list[int]


def convolution_backward(
    grad: Any,
    x: Any,
    weight: Any,
    bias_sizes: Ints | None,
    stride: Ints,
    padding: Ints,
    dilation: Ints,
    transposed: bool,
    output_padding: Ints,
    groups: int,
    mask: list[bool],
) -> tuple[Any, Any, Any]:
    """Express the gradients of a convolution by convolutions."""
    spatial = x.dim() - 2
    stride, padding, dilation = (_spread(sizes, spatial) for sizes in (stride, padding, dilation))
    grad_x = grad_weight = None
    if mask[0] and transposed:
        grad_x = aten.convolution(grad, weight, None, stride, padding, dilation, False, [0] * spatial, groups)
    elif mask[0]:
        sizes = zip(x.shape[2:], grad.shape[2:], weight.shape[2:], stride, padding, dilation, strict=True)
        missing = [full - ((size - 1) * step - 2 * pad + gap * (k - 1) + 1) for full, size, k, step, pad, gap in sizes]
        grad_x = aten.convolution(grad, weight, None, stride, padding, dilation, True, missing, groups)
    if mask[1]:
        # A transposed convolution is the transpose of a convolution: its input and the cotangent change places.
        wide, narrow = (grad, x) if transposed else (x, grad)
        parts = zip(wide.chunk(groups, 1), narrow.chunk(groups, 1), strict=True)
        found = []
        for part_wide, part_narrow in parts:
            # The batch becomes the channels: a convolution of the one with the other.
            swapped = part_wide.transpose(0, 1), part_narrow.transpose(0, 1)
            share = aten.convolution(*swapped, None, dilation, padding, stride, False, [0] * spatial, 1)
            for axis, size in enumerate(weight.shape[2:], start=2):
                share = share.narrow(axis, 0, size)
            found.append(share.transpose(0, 1))
        grad_weight = torch.cat(found)
    return grad_x, grad_weight, grad.sum([0, *range(2, grad.dim())]) if mask[2] else None


def avg_pool_backward(
    grad: Any,
    x: Any,
    kernel: Ints,
    stride: Ints,
    padding: Ints,
    ceil_mode: bool,
    count_include_pad: bool,
    divisor_override: int | None,
) -> Any:
    """Spread each cotangent evenly over its window: a transposed convolution with ones, a channel at a time."""
    spatial = len(kernel) if len(kernel) > 1 else x.dim() - 2
    kernel, padding = _spread(kernel, spatial), _spread(padding, spatial)
    stride = _spread(stride, spatial) if stride else kernel
    if ceil_mode:
        raise NotImplementedError("average pooling with ceil_mode=True")
    sizes = x.shape[-spatial:]
    flat = grad.reshape(-1, 1, *grad.shape[-spatial:])
    if divisor_override or count_include_pad or not any(padding):
        flat = flat / (divisor_override or math.prod(kernel))
    else:
        ones = torch.ones([1, 1, *sizes], dtype=grad.dtype)
        window = torch.ones([1, 1, *kernel], dtype=grad.dtype)
        flat = flat / aten.convolution(ones, window, None, stride, padding, [1] * spatial, False, [0] * spatial, 1)
    missing = [
        full - ((size - 1) * step - 2 * pad + k)
        for full, size, k, step, pad in zip(sizes, grad.shape[-spatial:], kernel, stride, padding, strict=True)
    ]
    window = torch.ones([1, 1, *kernel], dtype=grad.dtype)
    spread = aten.convolution(flat, window, None, stride, padding, [1] * spatial, True, missing, 1)
    return spread.reshape(x.shape)


def adaptive_avg_pool_backward(grad: Any, x: Any) -> Any:
    """Multiply by the transposed matrix of means, axis by axis."""
    spatial = 3 if x.dim() == 5 else 2
    for axis in range(-spatial, 0):
        grad = _along(grad, axis, _means(x.shape[axis], grad.shape[axis], grad.dtype))
    return grad


def nearest_backward(grad: Any, output_size: Ints, input_size: Ints, *scales: float | None) -> Any:
    """Add the cotangents of the pixels that were copied: nearest-neighbour interpolation is a matrix product."""
    for axis, scale in zip(range(-len(output_size), 0), scales, strict=True):
        full = input_size[axis]
        ratio = 1 / scale if scale else full / grad.shape[axis]
        source = [min(math.floor(place * ratio), full - 1) for place in range(grad.shape[axis])]
        matrix = torch.nn.functional.one_hot(torch.tensor(source), full).to(grad.dtype)
        grad = _along(grad, axis, matrix)
    return grad


def linear_backward(grad: Any, output_size: Ints, input_size: Ints, align_corners: bool, *scales: float | None) -> Any:
    """Multiply by the transposed matrix of linear interpolation, axis by axis."""
    for axis, scale in zip(range(-len(output_size), 0), scales, strict=True):
        full, size = input_size[axis], grad.shape[axis]
        eye = torch.eye(full, dtype=torch.float64)[:, None, :]
        factor = None if scale is None or align_corners else scale
        matrix = torch.nn.functional.interpolate(
            eye,
            size=None if factor else size,
            scale_factor=factor,
            mode="linear",
            align_corners=align_corners,
        )[:, 0, :]
        grad = _along(grad, axis, matrix.T.to(grad.dtype))
    return grad


def _along(x: Any, axis: int, matrix: Any) -> Any:
    """Multiply an axis of a tensor by a constant matrix."""
    return torch.movedim(torch.matmul(torch.movedim(x, axis, -1), matrix), -1, axis)


def _means(full: int, size: int, dtype: Any) -> Any:
    """Return the matrix of adaptive means: one row per result."""
    rows = torch.zeros(size, full, dtype=dtype)
    for place in range(size):
        start, end = (place * full) // size, -((-(place + 1) * full) // size)
        rows[place, start:end] = 1 / (end - start)
    return rows


def _spread(sizes: Ints, spatial: int) -> Ints:
    return list(sizes) * spatial if len(sizes) == 1 else list(sizes)


@functools.cache
def decompositions() -> dict[Any, Callable[..., Any]]:
    """Return the operators to replace while a step is traced."""
    # The exporter fakes the second output of nll_loss_forward, the number of targets, as 1, and the backward pass
    # divides by it. It gives batch normalization the running statistics, where a training step has those of the batch.
    found: dict[Any, Callable[..., Any]] = dict(
        get_decompositions(
            [
                aten.nll_loss_forward,
                aten.nll_loss2d_forward,
                aten.native_batch_norm,
                aten._native_batch_norm_legit,
                aten._native_batch_norm_legit_functional,
                aten.native_batch_norm_backward,
                aten.native_layer_norm_backward,
                aten.native_group_norm,
                aten.native_group_norm_backward,
                aten.max_pool2d_with_indices_backward,
                aten.binary_cross_entropy,
                aten.huber_loss,
                aten.huber_loss_backward,
                aten.embedding_dense_backward,
            ]
        )
    )
    found |= {
        aten.convolution_backward.default: convolution_backward,
        aten.avg_pool2d_backward.default: avg_pool_backward,
        aten.avg_pool3d_backward.default: avg_pool_backward,
        aten._adaptive_avg_pool2d_backward.default: adaptive_avg_pool_backward,
        aten._adaptive_avg_pool3d_backward.default: adaptive_avg_pool_backward,
        aten.upsample_nearest1d_backward.default: nearest_backward,
        aten.upsample_nearest2d_backward.default: nearest_backward,
        aten.upsample_nearest3d_backward.default: nearest_backward,
        aten.upsample_linear1d_backward.default: linear_backward,
        aten.upsample_bilinear2d_backward.default: linear_backward,
    }
    return found
