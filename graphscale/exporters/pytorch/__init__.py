"""Training steps of PyTorch modules: one ONNX file of forward pass, backward pass and optimizer, and back."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from graphscale.exporters.export_report import ExportReport
from graphscale.exporters.requirements import require

if TYPE_CHECKING:
    from graphscale.pipeline import ScaledModel
    from graphscale.session import Session

__all__ = ["export_step", "load_weights"]

_MODULES = (("torch", "torch"), ("onnxscript", "onnxscript"))


def export_step(
    module: Any,
    example_batch: Any,
    loss: Any,
    optimizer: Any,
    path: str | os.PathLike[str],
    *,
    clip_norm: float | None = None,
    dynamic_batch: bool = True,
    masters: bool = False,
) -> ExportReport:
    """Export a training step of a PyTorch module as one ONNX file.

    Before the file is written, ONNX Runtime runs the step, and its results are compared with those of PyTorch: the
    module itself with its optimizer on the example batch, for two steps, and where the size of the batch is free for
    two further ones with a larger and a smaller batch.

    The inputs of the step are the tensors of the batch, which are fed, and others with first values: weights by their
    names in the module (`fc1.weight`), buffers that the module changes, moments (`fc1.weight.exp_avg`), counters
    (`optimizer.step`), and `learning_rate`, a float32 scalar. The outputs are `loss`, metrics, and the next value of
    each weight, buffer and moment: `fc1.weight.next`. The file states these roles. Parameters that require no
    gradient, that the loss does not depend on, or that the optimizer does not update are constants.

    The step is that of the module's present mode: call `module.train()` before, or `module.eval()`. Dropout and other
    random operators draw from a state of their own, the input `random_state`, which counts steps; PyTorch draws other
    numbers from its generator.

    Args:
        module: a `torch.nn.Module`; it is not changed.
        example_batch: a dict of tensors, a tuple such as `(x, target)`, or one tensor. The inputs of the step have the
            names of the keys, or those of the arguments of the module's forward and of the loss.
        loss: a loss of torch, such as `torch.nn.functional.cross_entropy`, or another module, called with the
            module's output and the target: of a tuple the last tensor, of a dict those that are no arguments of the
            module's forward. Or a function of the module and the batch, as it was given, that returns the loss, or the
            loss and a dict of metrics.
        optimizer: the name of a class of torch.optim in any case, "adamw" or "sgd"; a class with a dict of its
            options, `(torch.optim.SGD, {"lr": 0.1, "momentum": 0.9})`; an optimizer of the module's parameters, which
            goes on from its present state; or a function of dicts of tensors
            `(gradients, weights, state, learning_rate) -> (next_weights, next_state)`, with a dict of its first state
            if it has any: `(function, state)`.
        path: the file; weights of more than 1 GB in total go to a file beside it.
        clip_norm: the largest global norm of the gradients, as for `torch.nn.utils.clip_grad_norm_`; None for no
            clipping.
        dynamic_batch: let the first axis of the batch have any size: that of the first tensor, and all that are equal.
        masters: put the module into float16, but for its normalizations, and carry float32 masters of the weights,
            `fc1.weight.master`, which the optimizer updates.

    Returns:
        the names and sizes of the step, and the largest relative errors against PyTorch.

    Raises:
        ExportError: PyTorch is missing, an argument does not fit, a part of the step has no ONNX form, or the exported
            step computes something else than PyTorch; nothing is written.
        OutputError: the file cannot be written.
    """
    require("pytorch", *_MODULES)
    from graphscale.exporters.pytorch.exporting import export

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "TF32 acceleration")  # of builds for CPUs, wherever oneDNN is left out
        return export(module, example_batch, loss, optimizer, path, clip_norm, dynamic_batch, masters)


def load_weights(
    source: Session | ScaledModel | Mapping[str, Any] | str | os.PathLike[str], module: Any
) -> tuple[str, ...]:
    """Load trained weights and buffers back into a PyTorch module.

    Args:
        source: a `Session`, a state as its `state_dict()`, a file of `save_state` (.safetensors) or of numpy.savez
            (.npz), or a trained step: a .onnx file, as `Session.export` writes it, or a model.
        module: the module that was exported, or another one with parameters and buffers of the same names.

    Returns:
        the names of the parameters and buffers that were loaded. Those that the step leaves unchanged keep their
        values.

    Raises:
        ExportError: PyTorch is missing, or a weight or buffer is missing, or has another shape or dtype; then nothing
            has changed.
        ModelFileError: the file cannot be read.
    """
    require("pytorch", *_MODULES)
    from graphscale.exporters.pytorch.module_weights import load

    return load(source, module)
