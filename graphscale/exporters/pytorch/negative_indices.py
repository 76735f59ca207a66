"""Negative indices of a batch: PyTorch refuses them in these operators, and ONNX counts them from the end."""

from __future__ import annotations

from typing import Any

import torch

from graphscale.exporters.step_file import REFUSED_INDEX

__all__ = ["refuse_negative", "refuse_negative_indices"]

_aten = torch.ops.aten

# The position of the index among the arguments.
_INDEXED = {
    _aten.embedding.default: 1,
    _aten.gather.default: 2,
    _aten.index_select.default: 2,
    _aten.scatter.src: 2,
    _aten.scatter.value: 2,
    _aten.scatter_add.default: 2,
    _aten.scatter_reduce.two: 2,
}


def refuse_negative(index: Any) -> Any:
    """Make negative indices smaller than any axis is long, so that a runtime refuses them."""
    return torch.where(index < 0, REFUSED_INDEX, index)


def refuse_negative_indices(graph: Any) -> None:
    """Let a runtime refuse negative indices of the batch in a traced graph.

    Before: `y = gather(x, 1, target)`
    After:  `y = gather(x, 1, where(target < 0, -2147483648, target))`
    """
    bounded: dict[Any, Any] = {}
    for node in list(graph.nodes):
        place = _INDEXED.get(node.target)
        if place is None or not _is_fed(node.args[place]):
            continue
        index = node.args[place]
        if index not in bounded:
            with graph.inserting_after(index):
                is_negative = graph.call_function(_aten.lt.Scalar, (index, 0))
            with graph.inserting_after(is_negative):
                bounded[index] = graph.call_function(_aten.where.ScalarSelf, (is_negative, REFUSED_INDEX, index))
        node.update_arg(place, bounded[index])


def _is_fed(index: Any) -> bool:
    """Return whether an index depends on whole numbers of the batch, or on a cast of fed numbers."""
    pending = [index]
    for node in pending:
        if node.op == "placeholder":
            return True
        pending += [
            each
            for each in node.all_input_nodes
            if each not in pending and (each.op == "placeholder" or not _is_float(each))
        ]
    return False


def _is_float(node: Any) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.is_floating_point()
