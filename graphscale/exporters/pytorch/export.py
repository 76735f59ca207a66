"""One training step of a PyTorch module as an ONNX file: forward, backward, clipping, optimizer."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable, Mapping
from typing import Any

from graphscale.exporters.export_report import ExportReport, compare_steps
from graphscale.exporters.requirements import require
from graphscale.exporters.step_file import complete_step, unique_names
from graphscale.files import model_files
from graphscale.files.writing import check_output

__all__ = ["export_step"]

_STEPS = 2  # compared ones: moments take part from the second on


def export_step(
    module: Any,
    example_batch: Mapping[str, Any] | tuple[Any, ...],
    loss: Callable[..., Any],
    optimizer: Any = "adamw",
    path: str | os.PathLike[str] = "step.onnx",
    *,
    clip_norm: float | None = None,
    dynamic_batch: bool = True,
    masters: bool = False,
) -> ExportReport:
    """Write the training step of a module as one ONNX file, if ONNX Runtime computes the same from it as PyTorch.

    Weights, buffers and the optimizer's state are inputs with their values in the file, and their next values are
    outputs: `fc1.weight` and `fc1.weight.next`, `fc1.weight.exp_avg` and `fc1.weight.exp_avg.next`. Each batch tensor
    is an input of its name, `learning_rate` (float32, one number) is another, `loss` is an output. The roles are in the
    metadata, so that `gs.scale(path)` needs no hint. Neither the module nor the optimizer changes.

    Args:
        module: a torch.nn.Module, in the mode in which it trains. Its parameters without `requires_grad` are constants.
        example_batch: a batch, a mapping from names to tensors, or a tuple of the module's arguments and a target.
        loss: the loss of a batch, one number. For a mapping, `loss(module, batch)`; for a tuple,
            `loss(module(*arguments), target)`. It may return a pair with a mapping of metrics, tensors by name.
        optimizer: "adamw", "adam", or "sgd" (with momentum 0.9); a class of torch.optim, alone, with its options as a
            pair, or as functools.partial; an optimizer of the module's parameters, whose groups and state are kept; or
            a pair of functions, `initialize(weights) -> state` and
            `update(gradients, weights, state, learning_rate) -> (next weights, next state)`, on tensors by name.
        path: the file. Weights above 1 GB go to `NAME.data` beside it.
        clip_norm: the largest global norm of the gradients, as in torch.nn.utils.clip_grad_norm_; None for no clipping.
        dynamic_batch: let the first axis of the batch's tensors, as far as they have the length of the first one's,
            have any length.
        masters: keep float32 masters of the weights in the state, and compute with float16 weights, `fc1.weight` and
            `fc1.weight.master`.

    Returns:
        The report of the comparison: two steps of ONNX Runtime against two of PyTorch. Print it.

    Raises:
        ExportError: PyTorch's exporter cannot export a part of the step, ONNX Runtime computes something else, or an
            argument does not fit. Nothing is written.
    """
    require("pytorch", ("torch", "torch"), ("onnxscript", "onnxscript"))
    import torch

    from graphscale.exporters.pytorch.reference import reference_steps
    from graphscale.exporters.pytorch.tracing import to_onnx, trace
    from graphscale.exporters.pytorch.training_step import LOSS, TrainingStep

    target = check_output(path)
    with warnings.catch_warnings(), _quiet_loggers():
        warnings.simplefilter("ignore")
        step = TrainingStep.make(module, example_batch, loss, optimizer, clip_norm=clip_norm, masters=masters)
        unique_names([*step.batch, *step.first, *step.outputs])
        traced = trace(step, dynamic_batch)
        model = to_onnx(step, traced.module, dynamic_batch)
        expected, exact = reference_steps(step, _STEPS)
        checked = model if traced.comparable is None else to_onnx(step, traced.comparable, dynamic_batch)
        batch, first = step.arrays(step.batch), step.arrays(step.first)
        for each in {id(model): model, id(checked): checked}.values():
            complete_step(
                each,
                first,
                step.pairs,
                losses=[LOSS],
                metrics=step.metrics,
                documentation=f"Training step of {type(module).__name__}, exported from PyTorch {torch.__version__}.",
            )
        errors = compare_steps(checked, batch, first, step.pairs, expected, exact)
    model_files.save(model, target)
    return ExportReport(
        path=os.fspath(path),
        framework=f"PyTorch {torch.__version__}",
        nodes=len(model.graph),
        inputs=tuple(step.batch),
        states=len(step.first),
        steps=_STEPS,
        errors=errors,
        notes=tuple(traced.notes),
    )


class _quiet_loggers:  # noqa: N801
    """Silence of the exporter's loggers in a block."""

    NAMES = ("torch.onnx", "onnxscript", "onnx_ir", "torch.export")

    def __enter__(self) -> None:
        self._levels = {name: logging.getLogger(name).level for name in self.NAMES}
        for name in self.NAMES:
            logging.getLogger(name).setLevel(logging.CRITICAL)

    def __exit__(self, *_: object) -> None:
        for name, level in self._levels.items():
            logging.getLogger(name).setLevel(level)
