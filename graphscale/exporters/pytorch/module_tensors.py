"""The tensors of a module by name, and calls of the module with others in their places."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

__all__ = ["buffers_of", "parameters_of", "placed"]

Tensor = Any


def parameters_of(module: Any) -> dict[str, Tensor]:
    """Return the parameters of a module by name; a shared one has its first name."""
    return dict(module.named_parameters())


def buffers_of(module: Any) -> dict[str, Tensor]:
    """Return the buffers of a module by name, those that it does not save too; a shared one has its first name."""
    return dict(module.named_buffers())


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
