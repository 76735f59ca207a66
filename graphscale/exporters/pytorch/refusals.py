"""Reasons why PyTorch cannot trace or convert a step, in one line that names the module."""

from __future__ import annotations

import re
import traceback
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from graphscale.errors import ExportError, one_line
from graphscale.exporters.pytorch.example_batch import ExampleBatch, LossCall
from graphscale.exporters.pytorch.random_operators import RandomOperators
from graphscale.exporters.pytorch.torch_optimizers import OTHERS

__all__ = ["refuse"]

_OPERATOR = re.compile(r"(?:op='|target=torch\.ops\.)(\w+\.\w+)")
_LAYERS = Path(torch.nn.modules.__file__).parent
_DATA_DEPENDENT = ("DataDependent", "DynamicOutputShape", "UnbackedSymInt", "data-dependent", "unbacked")
_FIXED_BATCH = ("Constraints violated", "ConstraintViolation", "marked as dynamic", "specialized")


def refuse(error: BaseException, module: Any, batch: ExampleBatch, loss: LossCall, advice: str) -> ExportError:
    """Return the error to raise for one of PyTorch's; `advice` is the end of one with an unknown reason."""
    chain: list[BaseException] = []
    while error is not None and error not in chain:
        chain.append(error)
        error = error.__cause__ or error.__context__  # type: ignore[assignment]
    texts = [f"{type(part).__name__}: {part}" for part in chain]
    if (name := _find_optimizer(chain[0])) is not None:
        return ExportError(f"PyTorch cannot trace its optimizer {name} ({one_line(texts[-1])[:200]}); {OTHERS}")
    for part, text in zip(chain, texts, strict=True):
        if any(mark in text for mark in _DATA_DEPENDENT):
            if (inner := _find_function(part) or _find_layer(part)) is not None:
                return ExportError(
                    f"{inner} cannot be exported: it decides by the values of a tensor; use another layer or loss, or "
                    "other options of it"
                )
            return ExportError(
                f"the step cannot be a graph: {_where(part)} depends on the values of a tensor (.item(), a condition, "
                "or a shape that follows from data); write it with torch.where, or masks"
            )
    if any("complex-valued" in text for text in texts):
        return ExportError(
            "the step computes with complex numbers, as FFTs do, for which PyTorch's exporter has no ONNX form; use "
            "real numbers alone"
        )
    for text in texts:
        if "No ONNX function found" in text or "NotImplementedError" in text:
            if (found := _OPERATOR.search(text)) is not None:
                return ExportError(_lacking(found.group(1), module, batch, loss))
    if any(mark in text for text in texts for mark in _FIXED_BATCH):
        return ExportError(
            "the module works for some sizes of the batch alone; pass dynamic_batch=False, or take the size from the "
            "tensors"
        )
    return ExportError(f"PyTorch cannot export the step: {one_line(texts[-1])[:300]}{advice}")


def _find_optimizer(error: BaseException) -> str | None:
    """Return the module of `torch.optim` in whose step an error was raised."""
    folder = Path(torch.optim.__file__).parent
    files = (Path(frame.filename) for frame in traceback.extract_tb(error.__traceback__))
    return next((file.stem.strip("_") for file in files if file.parent == folder and file.stem != "optimizer"), None)


def _find_function(error: BaseException) -> str | None:
    """Return the function of torch.nn.functional in which an error was raised."""
    frames = traceback.extract_tb(error.__traceback__)
    names = (frame.name for frame in frames if frame.filename == torch.nn.functional.__file__)
    return next((f"torch.nn.functional.{name}" for name in names), None)


def _where(error: BaseException) -> str:
    """Return the last line of the user's own code in a traceback."""
    package = str(Path(torch.__file__).parent)
    own = str(Path(__file__).parent)
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not frame.filename.startswith((package, own, "<")):
            return f"{Path(frame.filename).name}:{frame.lineno}, {frame.line!r},"
    return "a part of the module"


def _find_layer(error: BaseException) -> str | None:
    """Return the file of torch.nn with the layer in which an error was raised."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename).parent == _LAYERS]
    inner = frames[-1:] if frames and Path(frames[-1].filename).name != "module.py" else []
    return next((f"a layer of torch.nn ({Path(frame.filename).name}:{frame.lineno})" for frame in inner), None)


def _lacking(operator: str, module: Any, batch: ExampleBatch, loss: LossCall) -> str:
    name = operator.rpartition(".")[2]
    place = _find_module(name.removesuffix("_backward"), module, batch, loss)
    return f"{place} has no ONNX form: PyTorch's exporter lacks the operator {operator}; use another layer there"


def _find_module(operator: str, module: Any, batch: ExampleBatch, loss: LossCall) -> str:
    """Find the part of a module that calls an operator."""
    names = {id(part): name for name, part in module.named_modules()}
    stack: list[Any] = []
    found: list[Any] = []

    class Watch(TorchDispatchMode):  # type: ignore[misc]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func._schema.name.removeprefix("aten::").strip("_") == operator.strip("_"):
                found.append(stack[-1] if stack else None)
            return func(*args, **(kwargs or {}))

    before = torch.nn.modules.module.register_module_forward_pre_hook(lambda part, args: stack.append(part))
    after = torch.nn.modules.module.register_module_forward_hook(
        lambda part, args, output: stack.pop() and None, always_call=True
    )
    try:
        with RandomOperators(torch.zeros((), dtype=torch.int64)), Watch():
            loss(module, batch.fill(batch.tensors))
    finally:
        before.remove()
        after.remove()
    part = next((part for part in found if part is not None), None)
    if part is None:
        return "the loss, or the module's own forward," if found else "a part of the step"
    name = names.get(id(part), "")
    return f"the module {name!r} ({type(part).__name__})" if name else f"the forward of {type(part).__name__}"
