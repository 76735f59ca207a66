"""Comparison of an exported step, run by ONNX Runtime, with PyTorch's own steps."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from graphscale.errors import ExportError
from graphscale.exporters.export_report import make_runner
from graphscale.exporters.pytorch.example_batch import ExampleBatch, LossCall
from graphscale.exporters.pytorch.random_operators import RandomOperators
from graphscale.exporters.pytorch.traced_step import LOSS, RANDOM_STATE, StepFunction, plain_kernels
from graphscale.exporters.step_file import gradient_name, next_name

__all__ = ["TOLERANCES", "compare"]

Tensors = dict[str, Any]
Arrays = dict[str, Any]

# The largest errors that are accepted, relative to the largest value of each tensor; of updates and moments, which
# follow from the same gradients, a tenth. Single kernels of two runtimes differ by some units of rounding, and
# gradients are long sums of them. Where weights are float16, all is compared as float16, and gradients with the
# largest of them all: ONNX Runtime computes in float32 on a CPU, and rounds less often.
TOLERANCES = {torch.float64: 1e-7, torch.float32: 1e-3, torch.float16: 5e-2}
_EXACT = ("updates", "moments", "weights")
# A gradient that is this much smaller than the largest of all may be rounding alone.
_NOISE = 1e-4
# Where it still differs, PyTorch computes it in float64, too: the gradient of a bias before a batch normalization is
# zero, and the rest is rounding. That of the exported step may be so many times as large.
_ROUNDING = 30
# Where it differs even so, this many gradients of weights that differ by rounding are tried.
_NEARBY = 8


@dataclasses.dataclass
class _Errors:
    """The largest errors by kind, and those that are too large; `coarse` if weights are float16."""

    coarse: bool
    largest: dict[str, float] = dataclasses.field(default_factory=dict)
    refused: list[str] = dataclasses.field(default_factory=list)

    def add(self, kind: str, name: str, got: Any, wanted: Any, scale: float | None = None, slack: float = 0.0) -> None:
        """Compare an array with a tensor; `scale` stands for its largest value, and errors up to `slack` for none."""
        wanted = wanted.detach()
        if got.dtype != wanted.numpy().dtype or got.shape != tuple(wanted.shape):
            self.refused.append(f"{name} is {got.dtype}{list(got.shape)}, not {wanted.dtype}{list(wanted.shape)}")
            return
        a, b = got.astype(np.float64), wanted.double().numpy()
        with np.errstate(invalid="ignore"):
            off = np.where((a == b) | (np.isnan(a) & np.isnan(b)), 0.0, np.abs(a - b))
        worst = float(off.max(initial=0))
        # An infinite element must not excuse the errors of the others.
        largest = float(np.abs(b[np.isfinite(b)]).max(initial=0)) if scale is None else scale
        error = 0.0 if worst <= slack else worst / max(largest, 1e-30)
        error = error if np.isfinite(error) else float("inf")
        self.largest[kind] = max(self.largest.get(kind, 0.0), error)
        dtype = torch.float16 if self.coarse and wanted.dtype.is_floating_point else wanted.dtype
        limit = TOLERANCES.get(dtype, 0.0) * (0.1 if kind in _EXACT else 1)
        if error > limit:
            self.refused.append(f"{name} by {error:.1e} ({kind}; at most {limit:.0e})")


def compare(
    path: Path, step: StepFunction, module: Any, batch: ExampleBatch, loss: LossCall, dynamic: list[str]
) -> tuple[dict[str, float], int]:
    """Compare two steps, and further ones with other batch sizes, with those of PyTorch.

    Returns:
        the largest relative errors by kind, and the number of steps.

    Raises:
        ExportError: one is above its tolerance, or ONNX Runtime cannot run the step.
    """
    run = make_runner(path)
    eager = _EagerLoop(step, module, batch, loss)
    carried: Arrays = {name: value.numpy() for name, value in step.carried.items()}
    errors = _Errors(bool(step.masters))
    batches = list(_batches(step.batch, dynamic))
    for count, tensors in enumerate(batches):
        feeds = {name: value.numpy() for name, value in tensors.items()} | carried
        results = run(feeds)
        eager.compare(tensors, results, count, errors)
        if errors.refused:
            more = f", and {len(errors.refused) - 1} others" if len(errors.refused) > 1 else ""
            raise ExportError(
                f"the exported step differs from PyTorch in step {count + 1}: {errors.refused[0]}{more}; nothing was "
                "written"
            )
        carried = {name: results[next_name(name)] for name in carried}
    return errors.largest, len(batches)


def _largest(tensor: Any) -> float:
    return float(tensor.detach().abs().max()) if tensor.numel() else 0.0


def _agree(got: Arrays, wanted: Tensors, scales: dict[str, float], slack: dict[str, float]) -> bool:
    return all(
        got[name].shape == gradient.shape
        and _largest(torch.from_numpy(got[name]) - gradient)
        <= max(TOLERANCES.get(gradient.dtype, 0.0) * scales[name], slack[name])
        for name, gradient in wanted.items()
    )


def _batches(batch: Tensors, dynamic: list[str]) -> Iterator[Tensors]:
    """Yield the example batch twice, then larger and smaller ones where its size is free."""
    yield batch
    yield batch
    if dynamic:
        size = batch[dynamic[0]].shape[0]
        yield {name: torch.cat((v, v[:1])) if name in dynamic else v for name, v in batch.items()}
        if size > 2:
            yield {name: v[: size - 1] if name in dynamic else v for name, v in batch.items()}


class _EagerLoop:
    """A training loop of PyTorch, with a copy of the module."""

    def __init__(self, step: StepFunction, module: Any, batch: ExampleBatch, loss: LossCall) -> None:
        self._step, self._batch, self._loss = step, batch, loss
        self._module = copy.deepcopy(module)
        self._parameters = dict(self._module.named_parameters())
        self._moved = {
            name: torch.nn.Parameter(step.masters[name].clone()) if name in step.masters else self._parameters[name]
            for name in step.weights
        }
        self._optimizer = step.optimizer.make_eager({name: self._moved[name] for name in step.optimizer.weights})

    def compare(self, tensors: Tensors, results: Mapping[str, Any], count: int, errors: _Errors) -> None:
        """Make a step and compare it; the optimizer gets the gradients of the exported step."""
        step = self._step
        state = torch.zeros((), dtype=torch.int64) if step.random_state is None else step.random_state + count
        for parameter in self._parameters.values():
            parameter.grad = None
        module_before = copy.deepcopy(self._module)
        loss, metrics = self._run(self._module, tensors, state)
        if not torch.isfinite(loss).all():
            raise ExportError(f"the loss is {float(loss):g} on the example batch; pass a batch with a finite loss")
        errors.add("loss", LOSS, results[LOSS], loss.reshape(()), max(abs(float(loss.detach())), 1e-3))
        for name in step.metrics:
            errors.add("metrics", name, results[name], torch.as_tensor(metrics[name]))
        self._compare_gradients(tensors, state, results, module_before, count, errors)
        before = {name: weight.detach().clone() for name, weight in self._moved.items()}
        # ONNX Runtime may have widened them.
        found = {n: torch.from_numpy(results[gradient_name(n)]).to(w.dtype) for n, w in self._moved.items()}
        self._optimizer.step(self._clip(found))
        for name, weight in self._moved.items():
            if not torch.isfinite(weight).all():
                raise ExportError(
                    f"PyTorch's own step {count + 1} makes {name} infinite or NaN on the example batch; pass another "
                    "batch, or options of the optimizer"
                )
            label = f"{name}.master" if name in step.masters else name
            self._compare_weight(label, results[next_name(label)], before[name], weight, errors)
            with torch.no_grad():
                self._parameters[name].copy_(weight)
        for name, value in self._optimizer.state().items():
            errors.add("moments", name, results[next_name(name)], value)
        buffers = dict(self._module.named_buffers()) | self._parameters
        for name in step.buffers:
            errors.add("buffers", name, results[next_name(name)], buffers[name])
        for name, value in step.constants.items():
            errors.add("constants", name, value.numpy(), buffers[name])
        if step.random_state is not None:
            errors.add("buffers", RANDOM_STATE, results[next_name(RANDOM_STATE)], (state + 1) % 2**31)

    def _run(self, module: Any, tensors: Tensors, state: Any) -> tuple[Any, Tensors]:
        """Compute the loss and the metrics of a module, and its gradients; by other kernels only where it draws."""
        is_random = self._step.random_state is not None
        with plain_kernels() if is_random else contextlib.nullcontext(), RandomOperators(state):
            result = self._loss(module, self._batch.fill(tensors))
            loss, metrics = result if isinstance(result, tuple) else (result, {})
            loss.reshape(()).backward()
        return loss, metrics

    def _compare_gradients(
        self, tensors: Tensors, state: Any, results: Mapping[str, Any], before: Any, count: int, errors: _Errors
    ) -> None:
        found = {name: self._parameters[name].grad for name in self._step.weights}
        wanted = {name: g if g is not None else torch.zeros_like(self._parameters[name]) for name, g in found.items()}
        for name, gradient in wanted.items():
            if not torch.isfinite(gradient).all():
                raise ExportError(
                    f"the gradient of {name} is infinite or NaN in PyTorch's own step {count + 1} on the example "
                    "batch; pass another batch, or change the module where its slope is infinite"
                )
        # PyTorch's exporter leaves out casts to float16 that a cast to float32 follows.
        got = {n: results[gradient_name(n)].astype(g.numpy().dtype, copy=False) for n, g in wanted.items()}
        scales, slack = self._scales(wanted, errors), dict.fromkeys(wanted, 0.0)
        if not _agree(got, wanted, scales, slack):
            slack = self._rounding(wanted, before, tensors, state)
            if not _agree(got, wanted, scales, slack):
                wanted = self._nearby(got, wanted, slack, before, tensors, state, errors)
                scales = self._scales(wanted, errors)
        for name, gradient in wanted.items():
            errors.add("gradients", name, got[name], gradient, scales[name], slack[name])

    @staticmethod
    def _scales(gradients: Tensors, errors: _Errors) -> dict[str, float]:
        largest = max(map(_largest, gradients.values()), default=0.0)
        return {name: max(_largest(g), largest * (1 if errors.coarse else _NOISE)) for name, g in gradients.items()}

    def _rounding(self, wanted: Tensors, before: Any, tensors: Tensors, state: Any) -> dict[str, float]:
        """Estimate the errors of gradients by rounding, from those of PyTorch in float64."""
        doubled = {name: v.double() if v.is_floating_point() else v for name, v in tensors.items()}
        precise = self._gradients(before, doubled, state, lambda module: module.double())
        largest = max(map(_largest, wanted.values()), default=0.0)
        found = dict.fromkeys(wanted, 0.0)
        for name in precise.keys() & wanted.keys():
            # Of larger errors rounding is no cause: float64 took another way through the module.
            limit = TOLERANCES.get(wanted[name].dtype, 0.0) * largest
            error = _ROUNDING * _largest(wanted[name] - precise[name])
            found[name] = min(error, limit) if math.isfinite(error) else 0.0
        return found

    def _nearby(
        self,
        got: Arrays,
        wanted: Tensors,
        slack: dict[str, float],
        before: Any,
        tensors: Tensors,
        state: Any,
        errors: _Errors,
    ) -> Tensors:
        """Find gradients of PyTorch that agree, of weights that differ by rounding; else return those given.

        Gradients jump where rounding decides, as in a ReLU of nearly zero, and the kernels of two runtimes round
        otherwise. A step that is right with weights so near is right. Zeros stay zeros.
        """
        generator = torch.Generator().manual_seed(0)

        def move(module: Any) -> Any:
            with torch.no_grad():
                for weight in module.parameters():
                    if weight.is_floating_point():
                        noise = torch.randn(weight.shape, generator=generator).to(weight.dtype)
                        weight.mul_(1 + 4 * torch.finfo(weight.dtype).eps * noise)
            return module

        for _ in range(_NEARBY):
            gradients = self._gradients(before, tensors, state, move)
            near = {name: gradients.get(name, torch.zeros_like(gradient)) for name, gradient in wanted.items()}
            if gradients and _agree(got, near, self._scales(near, errors), slack):
                return near
        return wanted

    def _gradients(self, before: Any, tensors: Tensors, state: Any, change: Callable[[Any], Any]) -> Tensors:
        """Compute the gradients of a changed copy of the module; none where it cannot."""
        try:
            module = change(copy.deepcopy(before))
            self._run(module, tensors, state)
        except Exception:  # it may have numbers of its own in float32
            return {}
        return {name: p.grad for name, p in module.named_parameters() if p.grad is not None}

    @staticmethod
    def _compare_weight(name: str, got: Any, before: Any, after: Any, errors: _Errors) -> None:
        size, change = _largest(after), _largest(after - before)
        # A weight is rounded once or twice in each step.
        errors.add("updates", name, got, after, change, 4 * torch.finfo(after.dtype).eps * size)
        errors.add("weights", name, got, after)

    def _clip(self, gradients: Tensors) -> Tensors:
        """Clip gradients by PyTorch's own function."""
        held = {name: gradient.clone() for name, gradient in gradients.items()}
        if self._step.clip_norm is not None:
            carriers = [torch.nn.Parameter(torch.zeros_like(gradient)) for gradient in held.values()]
            for carrier, gradient in zip(carriers, held.values(), strict=True):
                carrier.grad = gradient
            torch.nn.utils.clip_grad_norm_(carriers, self._step.clip_norm)
        return held
