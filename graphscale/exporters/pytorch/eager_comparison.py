"""PyTorch's own steps, for the comparison with an exported step."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from graphscale.errors import ExportError
from graphscale.exporters.comparison import OwnStep
from graphscale.exporters.pytorch.example_batch import ExampleBatch, LossCall, explain
from graphscale.exporters.pytorch.module_tensors import copied
from graphscale.exporters.pytorch.random_operators import RandomOperators
from graphscale.exporters.pytorch.traced_step import LOSS, RANDOM_STATE, StepFunction, plain_kernels
from graphscale.exporters.step_file import gradient_name, next_name
from graphscale.files.tensor_files import Arrays

__all__ = ["batches_of", "first_values", "make_own_step"]

Tensors = dict[str, Any]


def make_own_step(step: StepFunction, module: Any, batch: ExampleBatch, loss: LossCall) -> OwnStep:
    """Return PyTorch's step for the comparison: the module and its optimizer in a loop."""
    loops = {1: _EagerLoop(step, module, batch, loss)}

    def run(number: int, batch: Arrays, state: Arrays, gradients: Arrays) -> Arrays:
        loops.pop(number - 1, None)
        try:
            loop = loops[number].copy()
            outputs = loop.run(batch, state, gradients)
        except Exception as error:  # of the user's code
            raise ExportError(
                f"the module, the loss or the optimizer fails in step {number} of the comparison: {explain(error)}"
            ) from error
        loops.setdefault(number + 1, loop)  # that of the first run, whose numbers are undisturbed
        return outputs

    pairs = {next_name(name): name for name in step.carried}
    gradients = {gradient_name(name): name for name in step.weights}
    is_half = any(weight.dtype == torch.float16 for weight in step.weights.values())
    results = (LOSS, *step.metrics, *gradients, *map(next_name, step.buffers)) if is_half else ()
    return OwnStep("PyTorch", run, pairs, [LOSS], gradients, dict.fromkeys(results, "float16"))


def first_values(step: StepFunction) -> Arrays:
    """Return the first values of the carried inputs, and the constants."""
    return {name: value.numpy() for name, value in (step.carried | step.constants).items()}


def batches_of(batch: Tensors, dynamic: list[str]) -> Iterator[Arrays]:
    """Yield the example batch twice, then larger and smaller ones where its size is free."""
    arrays = {name: value.numpy() for name, value in batch.items()}
    yield arrays
    yield arrays
    if dynamic:
        size = batch[dynamic[0]].shape[0]
        yield {name: torch.cat((v, v[:1])).numpy() if name in dynamic else arrays[name] for name, v in batch.items()}
        if size > 2:
            yield {name: v[: size - 1] if name in dynamic else v for name, v in arrays.items()}


class _EagerLoop:
    """A training loop of PyTorch, with a copy of the module."""

    def __init__(self, step: StepFunction, module: Any, batch: ExampleBatch, loss: LossCall) -> None:
        self._step, self._batch, self._loss = step, batch, loss
        self._module = copied(module)
        self._moved = {
            name: torch.nn.Parameter(step.masters[name].clone()) if name in step.masters else parameter
            for name, parameter in self._module.named_parameters()
            if name in step.weights
        }
        self._optimizer = step.optimizer.make_eager({name: self._moved[name] for name in step.optimizer.weights})

    def copy(self) -> _EagerLoop:
        """Return a loop in the same state."""
        shared = (self._step, self._step.optimizer, self._batch, self._loss)
        found: _EagerLoop = copied(self, {id(each): each for each in shared})
        return found

    def run(self, batch: Arrays, state: Arrays, gradients: Arrays) -> Arrays:
        """Make a step from a state; the optimizer gets the gradients of the exported step.

        The loop keeps what the optimizer has not made yet: it makes most of its state in its first step.
        """
        step, given = self._step, {name: torch.tensor(value) for name, value in state.items()}
        tensors = self._tensors()
        with torch.no_grad():
            for name in (*step.weights, *step.buffers, *step.constants):
                tensors[name].copy_(given[name])
            for name in step.masters:
                self._moved[name].copy_(given[f"{name}.master"])
        self._optimizer.load(given)
        random = given.get(RANDOM_STATE, torch.zeros((), dtype=torch.int64))
        loss, metrics, own = self._differentiate({name: torch.tensor(value) for name, value in batch.items()}, random)
        self._optimizer.step(self._clip({n: torch.tensor(gradients[n]).to(w.dtype) for n, w in self._moved.items()}))
        # The module may have put other tensors in the places of its buffers.
        tensors = self._tensors()
        with torch.no_grad():
            for name in step.masters:
                tensors[name].copy_(self._moved[name])
        following = {name: tensors[name] for name in (*step.weights, *step.buffers)} | self._optimizer.state()
        following |= {f"{name}.master": self._moved[name] for name in step.masters}
        if step.random_state is not None:
            following[RANDOM_STATE] = (random + 1) % 2**31
        outputs = {LOSS: loss.reshape(()), **{name: torch.as_tensor(metrics[name]) for name in step.metrics}}
        outputs |= {next_name(name): value for name, value in following.items()}
        outputs |= {name: tensors[name] for name in step.constants}
        found = {name: value.detach().clone().numpy() for name, value in outputs.items()}
        # ONNX Runtime may have widened gradients.
        return found | {gradient_name(n): g.numpy().astype(gradients[n].dtype) for n, g in own.items()}

    def _tensors(self) -> Tensors:
        return {**dict(self._module.named_buffers()), **dict(self._module.named_parameters())}

    def _differentiate(self, batch: Tensors, random: Any) -> tuple[Any, Tensors, Tensors]:
        """Compute the loss, the metrics and the gradients; by other kernels only where the module draws."""
        parameters = dict(self._module.named_parameters())
        for parameter in parameters.values():
            parameter.grad = None
        is_random = self._step.random_state is not None
        with plain_kernels() if is_random else contextlib.nullcontext(), RandomOperators(random):
            result = self._loss(self._module, self._batch.fill(batch))
            loss, metrics = result if isinstance(result, tuple) else (result, {})
            loss.reshape(()).backward()
        found = {name: (parameters[name], parameters[name].grad) for name in self._step.weights}
        return loss, metrics, {n: torch.zeros_like(p) if g is None else g.clone() for n, (p, g) in found.items()}

    def _clip(self, gradients: Tensors) -> Tensors:
        """Clip gradients by PyTorch's own function."""
        if self._step.clip_norm is not None:
            carriers = [torch.nn.Parameter(torch.zeros_like(gradient)) for gradient in gradients.values()]
            for carrier, gradient in zip(carriers, gradients.values(), strict=True):
                carrier.grad = gradient
            torch.nn.utils.clip_grad_norm_(carriers, self._step.clip_norm)
        return gradients
