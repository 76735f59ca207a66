"""Bags of embeddings as formulas: the rows of a matrix, summed or averaged by bag."""

from __future__ import annotations

from typing import Any

import torch

from graphscale.errors import ExportError

__all__ = ["FORMULAS"]

Tensor = Any
_aten = torch.ops.aten
_SUM, _MEAN = 0, 1


def _embedding_bag(
    weight: Tensor,
    indices: Tensor,
    offsets: Tensor,
    scale_grad_by_freq: bool = False,
    mode: int = _SUM,
    sparse: bool = False,
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int = -1,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute the bags, the bag of each index, the size of each bag, and an unused tensor."""
    if mode not in (_SUM, _MEAN):
        raise ExportError("EmbeddingBag with mode='max' cannot be exported; use mode='sum' or mode='mean'")
    if scale_grad_by_freq:
        raise ExportError("EmbeddingBag with scale_grad_by_freq=True cannot be exported; leave it out")
    starts = (offsets[:-1] if include_last_offset else offsets).long()
    # Each start counts one more bag from its place on; several at one place are empty bags.
    marks = torch.zeros(indices.shape[0] + 1, dtype=torch.int64).scatter_add(0, starts, torch.ones_like(starts))
    bags = marks.cumsum(0)[: indices.shape[0]] - 1
    counted = (indices != padding_idx).to(weight.dtype).unsqueeze(1)
    rows = weight.index_select(0, indices) * counted
    if per_sample_weights is not None:
        rows = rows * per_sample_weights.unsqueeze(1)
    sizes = _summed(counted, bags, starts.shape[0])
    result = _summed(rows, bags, starts.shape[0])
    if mode == _MEAN:
        result = result / sizes.clamp(min=1)
    return result, bags, sizes.squeeze(1).to(indices.dtype), torch.zeros_like(starts)


def _summed(rows: Tensor, places: Tensor, count: int) -> Tensor:
    """Sum the rows of each place."""
    zeros = torch.zeros(count, rows.shape[1], dtype=rows.dtype)
    return zeros.scatter_add(0, places.long().unsqueeze(1).expand(-1, rows.shape[1]), rows)


def _backward(
    grad: Tensor,
    indices: Tensor,
    offsets: Tensor,
    bags: Tensor,
    sizes: Tensor,
    maximum_indices: Tensor,
    num_weights: int,
    scale_grad_by_freq: bool,
    mode: int,
    sparse: bool,
    per_sample_weights: Tensor | None,
    padding_idx: int = -1,
) -> Tensor:
    """Compute the gradient of the matrix."""
    if mode == _MEAN:
        grad = grad / sizes.clamp(min=1).to(grad.dtype).unsqueeze(1)
    rows = grad.index_select(0, bags)
    if per_sample_weights is not None:
        rows = rows * per_sample_weights.unsqueeze(1)
    return _summed(rows * (indices != padding_idx).to(grad.dtype).unsqueeze(1), indices, num_weights)


def _per_sample_weights_backward(
    grad: Tensor, weight: Tensor, indices: Tensor, offsets: Tensor, bags: Tensor, mode: int, padding_idx: int = -1
) -> Tensor:
    """Compute the gradient of the factors of the rows."""
    products = (grad.index_select(0, bags) * weight.index_select(0, indices)).sum(1)
    return products * (indices != padding_idx).to(products.dtype)


FORMULAS = {
    _aten._embedding_bag.default: _embedding_bag,
    _aten._embedding_bag_forward_only.default: _embedding_bag,
    _aten._embedding_bag_backward.default: _backward,
    _aten._embedding_bag_per_sample_weights_backward.default: _per_sample_weights_backward,
}
