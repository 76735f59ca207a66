"""The tensors of a module by name, and calls of the module with others in their places."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch

__all__ = ["buffers_of", "copied", "parameters_of", "placed"]

Tensor = Any


def parameters_of(module: Any) -> dict[str, Tensor]:
    """Return the parameters of a module by name; a shared one has its first name."""
    return dict(module.named_parameters())


def buffers_of(module: Any) -> dict[str, Tensor]:
    """Return the buffers of a module by name, those that it does not save too; a shared one has its first name."""
    return dict(module.named_buffers())


def copied(module: Any, memo: dict[int, Any] | None = None) -> Any:
    """Copy a module; tensors that it computed and keeps, such as its last activations, lose their history.

    Args:
        module: the module, or an object that holds one.
        memo: objects that are not copied by their identity, as for copy.deepcopy.
    """
    copy_leaf = torch.Tensor.__deepcopy__

    def copy_tensor(tensor: Tensor, memo: dict[int, Any]) -> Tensor:
        if tensor.is_leaf:
            return copy_leaf(tensor, memo)
        return memo.setdefault(id(tensor), tensor.detach().clone())

    with mock.patch.object(torch.Tensor, "__deepcopy__", copy_tensor):
        return copy.deepcopy(module, memo)


def _places(module: Any) -> Iterator[tuple[dict[str, Any], str, str]]:
    """Yield each place of a tensor in a module: a dict, the key in it, and the tensor's name."""
    names = {id(tensor): name for name, tensor in (parameters_of(module) | buffers_of(module)).items()}
    for part in module.modules():
        for tensors in (part._parameters, part._buffers):
            for key, tensor in tensors.items():
                if tensor is not None:
                    yield tensors, key, names[id(tensor)]


@contextlib.contextmanager
def placed(module: Any, tensors: dict[str, Tensor]) -> Iterator[None]:
    """Put tensors in the places of a module's parameters and buffers in a `with` block.

    Args:
        module: the module.
        tensors: `{name: tensor}`; afterwards it holds those that the module put in their places itself.
    """
    before = [(held, key, name, held[key]) for held, key, name in _places(module)]
    for held, key, name, _ in before:
        held[key] = tensors.get(name, held[key])
    try:
        yield
        for held, key, name, _ in before:
            if name in tensors:
                tensors[name] = held[key]
    finally:
        for held, key, _, tensor in before:
            held[key] = tensor
