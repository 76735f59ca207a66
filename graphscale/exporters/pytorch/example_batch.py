"""The example batch: its tensors by name, and the call of the module and the loss on it."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from graphscale.errors import ExportError, one_line

__all__ = ["ExampleBatch", "LossCall"]

Tensor = Any


class ExampleBatch:
    """A batch of tensors by name: a mapping, a sequence as a DataLoader yields it, or one tensor.

    Args:
        batch: the batch; arrays of numpy become tensors, and all else but tensors stays fixed.
        names: the names of the tensors of a sequence.

    Attributes:
        tensors: `{name: tensor}`.

    Raises:
        ExportError: it holds no tensor, a tensor that is sparse, or two of one name.
    """

    def __init__(self, batch: Any, names: Sequence[str]) -> None:
        self.tensors: dict[str, Tensor] = {}
        if isinstance(batch, torch.Tensor | np.ndarray):
            self._form = self._read(batch, names[0])
            return
        if not isinstance(batch, Mapping | Sequence) or isinstance(batch, str):
            raise ExportError(
                f"the example batch is a {type(batch).__name__}; pass a dict of tensors, or a tuple as (x, target)"
            )
        self._form = self._read(batch, "", names)
        if not self.tensors:
            raise ExportError("the example batch holds no tensor; pass a dict of tensors, or a tuple as (x, target)")

    def _read(self, part: Any, name: str, names: Sequence[str] = ()) -> Any:
        """Return a form of the batch: containers, with a name for each tensor."""
        if isinstance(part, Mapping):
            return {key: self._read(value, f"{name}.{key}" if name else str(key)) for key, value in part.items()}
        if isinstance(part, list | tuple):
            keys = names or [str(i) for i in range(len(part))]
            return tuple(self._read(v, f"{name}.{k}" if name else k) for k, v in zip(keys, part, strict=True))
        if isinstance(part, np.ndarray):
            part = torch.from_numpy(part)
        if not isinstance(part, torch.Tensor):
            return _Fixed(part)
        if part.layout != torch.strided or part.is_quantized or part.is_complex():
            raise ExportError(f"the example batch: {name!r} is sparse, quantized or complex; pass a dense real tensor")
        if name in self.tensors:
            raise ExportError(f"the example batch has two tensors named {name!r}; rename one")
        self.tensors[name] = part.detach().cpu().contiguous()
        return name

    @property
    def usage(self) -> str:
        """The call of a module on the first tensor, and the last one as target, in Python."""
        if not isinstance(self._form, dict | tuple):
            return "module(batch)"
        keys: list[Any] = list(self._form) if isinstance(self._form, dict) else list(range(len(self._form)))
        return ", ".join((f"module(batch[{keys[0]!r}])", *(f"batch[{key!r}]" for key in keys[1:][-1:])))

    def fill(self, tensors: Mapping[str, Tensor]) -> Any:
        """Return the batch in its original form, with new tensors."""

        def filled(form: Any) -> Any:
            if isinstance(form, dict):
                return {key: filled(value) for key, value in form.items()}
            if isinstance(form, tuple):
                return tuple(map(filled, form))
            return form.value if isinstance(form, _Fixed) else tensors[form]

        return filled(self._form)


class _Fixed:
    """A part of a batch that is no tensor."""

    def __init__(self, value: Any) -> None:
        self.value = value


class LossCall:
    """The call of a loss on a module and a batch.

    A loss of torch, or another module, gets the module's output and the targets; any other function gets the module
    and the batch.

    Args:
        module: the module.
        loss: the loss.

    Raises:
        ExportError: it cannot be called.
    """

    def __init__(self, module: Any, loss: Any) -> None:
        if not callable(loss):
            raise ExportError(
                f"the loss is a {type(loss).__name__}; pass a loss of torch.nn, or a function of the module and the "
                "batch that returns the loss"
            )
        inner = loss.func if isinstance(loss, functools.partial) else loss
        of_torch = (getattr(inner, "__module__", None) or "torch").partition(".")[0] == "torch"
        self.loss, self.is_plain = loss, of_torch or isinstance(loss, torch.nn.Module)
        self.parameters = _positional(module.forward)
        self.more = _positional(loss.forward if isinstance(loss, torch.nn.Module) else loss)[1:]

    def names(self, batch: Any) -> list[str]:
        """Return names for the tensors of a sequence: the arguments of the module, then those of the loss."""
        if isinstance(batch, Mapping) or not isinstance(batch, Sequence):
            return self.parameters[:1] or ["x"]
        count = len(batch)
        inputs = (self.parameters or ["x"])[: max(1, count - 1)]
        inputs += [f"{inputs[-1]}_{i}" for i in range(1, max(1, count - 1) - len(inputs) + 1)]
        targets = (self.more if self.is_plain else []) or ["target"]
        names = inputs + [name for name in targets if name not in inputs]
        return [*names, *(f"batch_{i}" for i in range(len(names), count))][:count]

    def __call__(self, module: Any, batch: Any) -> Any:
        """Compute the loss.

        Raises:
            ExportError: the batch does not fit a loss of torch.
        """
        if not self.is_plain:
            return self.loss(module, batch)
        if isinstance(batch, Mapping):
            inputs = {key: value for key, value in batch.items() if key in self.parameters}
            targets = [value for key, value in batch.items() if key not in inputs]
            if not inputs or not targets:
                raise ExportError(
                    f"the keys {', '.join(map(str, batch))} of the example batch must hold arguments of the module's "
                    f"forward ({', '.join(self.parameters)}) and a target; or pass a function of the module and the "
                    "batch as loss"
                )
            return self.loss(module(**inputs), *targets)
        if isinstance(batch, torch.Tensor) or len(batch) < 2:
            raise ExportError("the loss needs a target; pass (x, target) as example batch, or a function as loss")
        return self.loss(module(*batch[:-1]), batch[-1])


def _positional(function: Callable[..., Any]) -> list[str]:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # a builtin
        return []
    return [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]


def explain(error: Exception) -> str:
    """Return a text of an exception of the user's own code."""
    return f"{type(error).__name__}: {one_line(error)}"
