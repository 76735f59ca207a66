"""Modules in half precision: float16 with normalizations in float32, and refusals of types that cannot be exported."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from graphscale.errors import ExportError

__all__ = ["Bfloat16Watch", "advice", "halve", "refuse_bfloat16"]

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


class Bfloat16Watch(TorchDispatchMode):  # type: ignore[misc]
    """A watch for operators that compute in bfloat16, in a `with` block.

    Attributes:
        has_found: True after one did.
    """

    def __init__(self) -> None:
        super().__init__()
        self.has_found = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.has_found |= _has_bfloat16(tree_leaves(result))
        return result


def _has_bfloat16(values: Iterable[Any]) -> bool:
    return any(isinstance(value, torch.Tensor) and value.dtype == torch.bfloat16 for value in values)


def refuse_bfloat16(module: Any, batch: Iterable[Any]) -> None:
    """Check that neither a module nor a batch holds bfloat16.

    Raises:
        ExportError: one does.
    """
    if _has_bfloat16((*module.parameters(), *module.buffers())):
        raise ExportError(
            "the module is in bfloat16, which needs no loss scale, and for which ONNX Runtime has no kernels on a CPU; "
            "pass module.float(), and masters=True for float16"
        )
    if _has_bfloat16(batch):
        raise ExportError("the example batch holds bfloat16, which no step can be fed with; pass float32 tensors")


def advice(module: Any, masters: bool) -> str:
    """Return the end of an error that another type of the module may avoid.

    There is one for a module in float16 without float32 masters, and for one in float64.
    """
    dtypes = {parameter.dtype for parameter in module.parameters()}
    if torch.float16 in dtypes and not masters:
        return "; the module is in float16: pass masters=True, for float32 masters"
    if torch.float64 not in dtypes:
        return ""
    # ONNX Runtime 1.19.2 makes FusedMatMul of products in float64, and has no kernel for it.
    return (
        "; the module is in float64, for which ONNX Runtime lacks kernels, and a learning rate of float32 is too "
        "coarse: pass module.float() and a batch of float32"
    )
