"""A module in float16, with its normalizations in float32."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_map

__all__ = ["halve"]

_NORMALIZATIONS = (
    torch.nn.modules.batchnorm._NormBase,
    torch.nn.LayerNorm,
    torch.nn.GroupNorm,
    torch.nn.RMSNorm,
)


def halve(module: Any) -> Any:
    """Put a module into float16: parameters, buffers and inputs; its results are float32 again.

    Normalizations compute in float32, with float32 weights, since their sums overflow float16.
    """
    module.half()
    for part in module.modules():
        if isinstance(part, _NORMALIZATIONS):
            part.float()
            _cast_calls(part, torch.float32, torch.float16)
    _cast_calls(module, torch.float16, torch.float32)
    return module


def _cast_calls(module: Any, inputs: Any, outputs: Any) -> None:
    """Cast the inputs and the results of a module."""

    def cast(value: Any, dtype: Any) -> Any:
        return value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value

    def before(_: Any, args: Any, kwargs: Any) -> Any:
        return tree_map(lambda value: cast(value, inputs), (args, kwargs))

    def after(_: Any, args: Any, result: Any) -> Any:
        return tree_map(lambda value: cast(value, outputs), result)

    module.register_forward_pre_hook(before, with_kwargs=True, prepend=True)
    module.register_forward_hook(after)
