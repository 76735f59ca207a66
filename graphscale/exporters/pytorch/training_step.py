"""A training step as a pure function of tensors by name."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from graphscale.errors import ExportError, one_line
from graphscale.exporters.pytorch.optimizers import Tensors, UpdateRule, make_rule
from graphscale.exporters.step_file import next_name

__all__ = ["LEARNING_RATE", "LOSS", "MASTER", "LossModule", "TrainingStep"]

LEARNING_RATE, LOSS = "learning_rate", "loss"
MASTER = ".master"


class LossModule(torch.nn.Module):  # type: ignore[misc]
    """A module with its loss: it returns the loss, the metrics, and the buffers after the forward pass."""

    def __init__(self, module: Any, loss: Callable[..., Any], positional: tuple[str, ...] | None) -> None:
        super().__init__()
        self.module, self.loss, self.positional = module, loss, positional

    def forward(self, batch: Tensors) -> tuple[Any, Tensors, Tensors]:
        """Compute the loss of a batch."""
        if self.positional is None:
            result = self.loss(self.module, dict(batch))
        else:
            *arguments, target = (batch[name] for name in self.positional)
            result = self.loss(self.module(*arguments), target)
        value, metrics = result if isinstance(result, tuple) else (result, {})
        return value, dict(metrics), dict(self.module.named_buffers())


@dataclasses.dataclass(frozen=True)
class TrainingStep:
    """A training step.

    Attributes:
        net: the module with its loss.
        rule: the optimizer.
        batch: a value for each input that is fed, the learning rate last.
        dynamic: names of the batch tensors whose first axis is the batch.
        weights: the trained parameters.
        constants: the other parameters, and buffers that the step leaves unchanged.
        buffers: buffers that the step changes.
        state: the optimizer's state.
        metrics: names of the metrics.
        clip_norm: the largest global norm of the gradients, or None.
        masters: float32 masters of float16 weights are in the state.
    """

    net: LossModule
    rule: UpdateRule
    batch: Tensors
    dynamic: frozenset[str]
    weights: Tensors
    constants: Tensors
    buffers: Tensors
    state: Tensors
    metrics: tuple[str, ...]
    clip_norm: float | None
    masters: bool

    @staticmethod
    def make(
        module: Any,
        example_batch: Any,
        loss: Callable[..., Any],
        optimizer: Any,
        *,
        clip_norm: float | None,
        masters: bool,
    ) -> TrainingStep:
        """Return the step of a module; see `export_step`.

        Raises:
            ExportError: an argument does not fit, or the loss cannot be computed.
        """
        if not isinstance(module, torch.nn.Module):
            raise ExportError(f"the module must be a torch.nn.Module, not a {type(module).__name__}")
        if not callable(loss):
            raise ExportError("the loss must be a function, such as torch.nn.functional.cross_entropy")
        if clip_norm is not None and not clip_norm > 0:
            raise ExportError(f"clip_norm must be positive, or None; got {clip_norm}")
        batch, positional = _name_batch(module, example_batch)
        trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
        if not trained:
            raise ExportError("the module has no parameter with requires_grad: there is nothing to train")
        rule = make_rule(optimizer, trained)
        lengths = [value.shape[0] for value in batch.values() if value.dim()]
        dynamic = frozenset(name for name, value in batch.items() if value.dim() and value.shape[0] == lengths[0])
        batch[LEARNING_RATE] = torch.tensor(rule.learning_rate, dtype=torch.float32)
        step = TrainingStep(
            net=LossModule(module, loss, positional),
            rule=rule,
            batch=batch,
            dynamic=dynamic,
            weights=_copies(trained),
            constants=_copies({name: p for name, p in module.named_parameters() if name not in trained}),
            buffers=_copies(dict(module.named_buffers())),
            state={},
            metrics=(),
            clip_norm=clip_norm,
            masters=masters,
        )
        return step._settle()

    def _settle(self) -> TrainingStep:
        """Run the forward pass once: find the buffers that change, and the metrics; make the optimizer's state."""
        given = {name: value.clone() for name, value in self.buffers.items()}
        versions = {name: value._version for name, value in given.items()}
        computed = self.halves(self.weights) if self.masters else self.weights
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            try:
                value, metrics, after = self._forward(self.batch, computed | self.constants, given)
            except ExportError:
                raise
            except Exception as error:  # of the user's code
                raise ExportError(
                    f"the loss of the example batch cannot be computed: {type(error).__name__}: {one_line(error)}"
                ) from error
        if not isinstance(value, torch.Tensor) or value.numel() != 1 or not value.is_floating_point():
            found = f"{value.dtype} {list(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
            raise ExportError(f"the loss must be one floating-point number, a tensor; it is {found}. Take its mean")
        if not bool(torch.isfinite(value)):
            raise ExportError(f"the loss of the example batch is {float(value)}: pass a batch with a finite loss")
        # The kernel of batch normalization changes its statistics without a new version.
        changed = {
            name
            for name, old in given.items()
            if after[name] is not old or old._version != versions[name] or not torch.equal(old, self.buffers[name])
        }
        buffers = {name: value for name, value in self.buffers.items() if name in changed}
        unchanged = {name: value for name, value in self.buffers.items() if name not in changed}
        return dataclasses.replace(
            self,
            constants=self.constants | unchanged,
            buffers=buffers,
            state=self.rule.initialize(self.weights),
            metrics=tuple(metrics),
        )

    @property
    def first(self) -> Tensors:
        """The first values of all carried inputs."""
        if not self.masters:
            return self.weights | self.buffers | self.state
        masters = {f"{name}{MASTER}": value for name, value in self.weights.items()}
        return self.halves(self.weights) | masters | self.buffers | self.state

    @property
    def pairs(self) -> dict[str, str]:
        """The carried input of each output with a next value."""
        return {next_name(name): name for name in self.first}

    @property
    def outputs(self) -> tuple[str, ...]:
        """Names of all outputs."""
        return (LOSS, *self.metrics, *self.pairs)

    def run(self, values: Tensors) -> Tensors:
        """Run the step on a value for each input and constant; return all outputs by name."""
        masters = {n: values[f"{n}{MASTER}" if self.masters else n] for n in self.weights}
        state = {name: values[name] for name in self.state}
        loss, metrics, gradients, buffers = self.differentiate(values)
        gradients = self.clip(gradients)
        moved, following = self.rule.update(gradients, masters, state, values[LEARNING_RATE])
        results = {LOSS: loss, **metrics}
        if self.masters:
            results |= {next_name(name): value for name, value in self.halves(moved).items()}
            results |= {next_name(f"{name}{MASTER}"): value for name, value in moved.items()}
        else:
            results |= {next_name(name): value for name, value in moved.items()}
        results |= {next_name(name): value for name, value in (buffers | following).items()}
        return {name: results[name].detach() for name in self.outputs}

    def differentiate(self, values: Tensors) -> tuple[Any, Tensors, Tensors, Tensors]:
        """Return the loss, the metrics, the gradient of each weight, and the next buffers."""
        weights = {name: values[name].detach().requires_grad_() for name in self.weights}
        buffers = {name: values[name].clone() for name in self.buffers}
        loss, metrics, after = self._forward(values, weights | {n: values[n] for n in self.constants}, buffers)
        found = torch.autograd.grad(loss.reshape(()), list(weights.values()), allow_unused=True)
        gradients = dict(zip(weights, found, strict=True))
        if all(gradient is None for gradient in found):
            raise ExportError(
                "the loss depends on no weight of the module: compute it with the module that it is given"
            )
        zeros = {name: torch.zeros_like(weights[name]) for name, gradient in gradients.items() if gradient is None}
        gradients = {name: zeros.get(name, gradient) for name, gradient in gradients.items()}
        if self.masters:
            gradients = {name: gradient.float() for name, gradient in gradients.items()}
            loss = loss.float()
        next_buffers = {name: after[name].detach() for name in self.buffers}
        return loss.reshape(()).detach(), {n: v.detach() for n, v in metrics.items()}, gradients, next_buffers

    def clip(self, gradients: Tensors) -> Tensors:
        """Clip gradients by their global norm, as torch.nn.utils.clip_grad_norm_ does."""
        if self.clip_norm is None:
            return gradients
        norms = torch.stack([torch.linalg.vector_norm(gradient) for gradient in gradients.values()])
        factor = torch.clamp(self.clip_norm / (torch.linalg.vector_norm(norms) + 1e-6), max=1.0)
        return {name: gradient * factor for name, gradient in gradients.items()}

    def _forward(self, batch: Tensors, weights: Tensors, buffers: Tensors) -> tuple[Any, Tensors, Tensors]:
        values = {f"module.{name}": value for name, value in (weights | buffers).items()}
        fed = {name: batch[name] for name in self.batch if name != LEARNING_RATE}
        if self.masters:
            fed = self.halves(fed)
        value, metrics, after = torch.func.functional_call(self.net, values, (fed,))
        for name, metric in metrics.items():
            if not isinstance(metric, torch.Tensor):
                raise ExportError(f"the metric {name!r} must be a tensor, not a {type(metric).__name__}")
        return value, metrics, after

    @staticmethod
    def halves(values: Tensors) -> Tensors:
        """Return the floating-point tensors in float16, the others unchanged."""
        return {name: value.half() if value.is_floating_point() else value for name, value in values.items()}

    @staticmethod
    def arrays(values: Mapping[str, Any]) -> dict[str, np.ndarray[Any, Any]]:
        """Return tensors as arrays."""
        return {name: value.detach().contiguous().numpy() for name, value in values.items()}


def _name_batch(module: Any, example: Any) -> tuple[Tensors, tuple[str, ...] | None]:
    """Return the tensors of a batch by name, and the order of their names if the batch is a tuple."""
    if isinstance(example, Mapping):
        named, positional = dict(example), None
    elif isinstance(example, tuple | list) and len(example) >= 2:
        parameters = inspect.signature(module.forward).parameters.values()
        names = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        if any(p.kind is p.VAR_POSITIONAL for p in parameters):
            names += [f"input{index}" for index in range(len(names), len(example))]
        if len(names) < len(example) - 1:
            raise ExportError(f"the module takes {len(names)} arguments; the batch has {len(example) - 1} and a target")
        positional = (*names[: len(example) - 1], "target")
        named = dict(zip(positional, example, strict=True))
    else:
        raise ExportError("the example batch must be a mapping from names to tensors, or a tuple (input, ..., target)")
    for name, value in named.items():
        if not isinstance(name, str) or not name:
            raise ExportError(f"the tensors of a batch are named by text, not by {name!r}")
        if not isinstance(value, torch.Tensor):
            raise ExportError(f"{name!r} of the example batch must be a tensor, not a {type(value).__name__}")
        if name in (LEARNING_RATE, LOSS):
            raise ExportError(f"{name!r} is a name of the step itself: rename this tensor of the batch")
    if not any(value.dim() for value in named.values()):
        raise ExportError("the example batch has no tensor with an axis")
    return _copies(named), positional


def _copies(values: Mapping[str, Any]) -> Tensors:
    """Return copies that stand on the CPU and belong to nobody."""
    return {name: value.detach().cpu().clone().contiguous() for name, value in values.items()}
