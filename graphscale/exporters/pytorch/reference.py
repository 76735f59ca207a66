"""The framework's own step: the real module, autograd and torch.optim, on the example batch."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from graphscale.errors import ExportError, one_line
from graphscale.exporters.pytorch.optimizers import TorchRule
from graphscale.exporters.pytorch.training_step import LEARNING_RATE, LOSS, MASTER, LossModule, TrainingStep
from graphscale.exporters.step_file import next_name
from graphscale.files.tensor_files import Arrays

__all__ = ["reference_steps"]


def reference_steps(step: TrainingStep, count: int) -> tuple[list[Arrays], list[Arrays] | None]:
    """Train a copy of the module for some steps; return the outputs of each, and the same in float64.

    The second is None where the module cannot compute in float64.
    """
    expected = _train(step, count, torch.float32)
    try:
        return expected, None if step.masters else _train(step, count, torch.float64)
    except Exception:  # of the user's code, in a type that it may not know
        return expected, None


def _train(step: TrainingStep, count: int, dtype: Any) -> list[Arrays]:
    with torch.random.fork_rng(devices=[]), _KeepAll():
        net = _copy_net(step)
        widen = _widened if dtype is torch.float64 else _unchanged
        net = net.double() if dtype is torch.float64 else net
        batch = {name: widen(value) for name, value in step.batch.items() if name != LEARNING_RATE}
        trainer = _Trainer(step, net)
        return [trainer.step(batch) for _ in range(count)]


def _copy_net(step: TrainingStep) -> LossModule:
    try:
        net: LossModule = copy.deepcopy(step.net).cpu()
    except Exception as error:  # of the user's code
        raise ExportError(f"the module cannot be copied for the comparison: {one_line(error)}") from error
    return net


def _widened(value: Any) -> Any:
    return value.double() if value.is_floating_point() else value


def _unchanged(value: Any) -> Any:
    return value


class _KeepAll(TorchFunctionMode):  # type: ignore[misc]
    """Dropout that keeps every element, as the traced graph for the comparison does."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(function, "__name__", "")
        if function in (torch.dropout, torch.dropout_):
            x, p, training = (*args, *kwargs.values())[:3]
            return x / (1 - p) if training and p else x
        if name == "scaled_dot_product_attention" and kwargs.get("dropout_p"):
            return function(*args, **kwargs | {"dropout_p": 0.0}) / (1 - kwargs["dropout_p"])
        return function(*args, **kwargs)


class _Trainer:
    """PyTorch's loop: forward, backward, clip_grad_norm_, optimizer."""

    def __init__(self, step: TrainingStep, net: LossModule) -> None:
        self.training_step, self.net, self.rule = step, net, step.rule
        named = dict(net.module.named_parameters())
        self.params = {name: named[name] for name in step.weights}
        self.targets = self.params
        if step.masters:
            self.targets = {name: param.detach().clone().requires_grad_() for name, param in self.params.items()}
            for param in named.values():
                param.data = TrainingStep.halves({"": param.data})[""]
        wide = next(iter(self.targets.values())).dtype
        self.state = {n: v.to(wide) if v.is_floating_point() and v.dim() else v for n, v in step.state.items()}
        self.optimizer = self._make_optimizer(step.rule) if isinstance(step.rule, TorchRule) else None

    def _make_optimizer(self, rule: TorchRule) -> Any:
        groups = [{"params": [self.targets[n] for n in names], **options} for names, options in rule.groups]
        made = rule.kind(groups)
        for name, trained in rule.trained.items():
            made.state[self.targets[name]] = {key: value.clone() for key, value in trained.items()}
        return made

    def step(self, batch: dict[str, Any]) -> Arrays:
        """Run one step; return its outputs."""
        step = self.training_step
        for param in self.params.values():
            param.grad = None
        loss, metrics, _ = self.net(TrainingStep.halves(batch) if step.masters else batch)
        loss.reshape(()).backward()
        for name, target in self.targets.items():
            gradient = self.params[name].grad
            target.grad = torch.zeros_like(target) if gradient is None else gradient.to(target.dtype)
        if step.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(list(self.targets.values()), step.clip_norm)
        self._update()
        buffers = dict(self.net.module.named_buffers())
        found = {LOSS: loss.reshape(()).float() if step.masters else loss.reshape(()), **metrics}
        if step.masters:
            with torch.no_grad():
                for name, param in self.params.items():
                    param.copy_(self.targets[name])
            found |= {next_name(f"{name}{MASTER}"): value for name, value in self.targets.items()}
        found |= {next_name(name): param for name, param in self.params.items()}
        found |= {next_name(name): buffers[name] for name in step.buffers}
        found |= {next_name(name): value for name, value in self.state.items()}
        return TrainingStep.arrays({name: value.detach().clone() for name, value in found.items()})

    def _update(self) -> None:
        if self.optimizer is not None:
            self.optimizer.step()
            for name, target in self.targets.items():
                for key, value in self.optimizer.state[target].items():
                    if f"{name}.{key}" in self.state:
                        self.state[f"{name}.{key}"] = value
            return
        gradients = {name: target.grad for name, target in self.targets.items()}
        weights = {name: target.detach() for name, target in self.targets.items()}
        rate = torch.tensor(self.rule.learning_rate)
        moved, self.state = self.rule.update(gradients, weights, self.state, rate)
        with torch.no_grad():
            for name, target in self.targets.items():
                target.copy_(moved[name])
