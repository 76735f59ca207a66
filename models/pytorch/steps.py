"""From a network and a loss to a training step: gradients only, or with an optimizer inside.

A step is a pure function from named tensors to named tensors, which is what the exporter needs: the weights
and the optimizer's state are inputs, and their next values are outputs.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

Tensors = dict[str, Tensor]
# (model, data, weights) -> loss, or (loss, {name: further output}); data is all of the step's inputs
Loss = Callable[[Callable, Tensors, Tensors], Tensor | tuple[Tensor, Tensors]]


@dataclass(frozen=True)
class Step:
    """A training step and one sample value of each of its inputs, in the order of the graph's inputs."""

    run: Callable[[Tensors], Tensors]
    inputs: Tensors
    dynamic: tuple[str, ...] = ()
    """Inputs whose first dimension, the batch, stays dynamic in the exported graph."""


def weights_of(net: nn.Module) -> Tensors:
    """Return the network's initial weights."""
    return {name: weight.detach().clone() for name, weight in net.named_parameters()}


def zeros_like(weights: Tensors, suffix: str) -> Tensors:
    """Return an all-zero optimizer state for each weight, named after it."""
    return {f"{name}.{suffix}": torch.zeros_like(weight) for name, weight in weights.items()}


def differentiate(net: nn.Module, loss: Loss, values: Tensors) -> tuple[Tensors, Tensors]:
    """Return the loss (with the loss's further outputs), and the gradient of each weight."""

    def objective(weights: Tensors) -> tuple[Tensor, Tensors]:
        result = loss(lambda *args: torch.func.functional_call(net, weights, args), values, weights)
        value, extra = result if isinstance(result, tuple) else (result, {})
        return value, {"loss": value, **extra}

    weights = {name: values[name] for name, _ in net.named_parameters()}
    gradients, (_, outputs) = torch.func.grad_and_value(objective, has_aux=True)(weights)
    return outputs, gradients


def gradients(net: nn.Module, loss: Loss, data: Tensors, dynamic: tuple[str, ...] = ()) -> Step:
    """Return a step that gives the loss and the gradients: the optimizer is someone else's business."""

    def run(values: Tensors) -> Tensors:
        outputs, grads = differentiate(net, loss, values)
        return outputs | {f"grad.{name}": grad for name, grad in grads.items()}

    return Step(run, data | weights_of(net), dynamic)


def sgd(net: nn.Module, loss: Loss, data: Tensors, *, rate: float, clip_value: float | None = None) -> Step:
    """Return a step with plain SGD inside; `clip_value` clamps every element of the gradients."""

    def run(values: Tensors) -> Tensors:
        outputs, grads = differentiate(net, loss, values)
        if clip_value is not None:
            grads = {name: grad.clamp(-clip_value, clip_value) for name, grad in grads.items()}
        return outputs | {f"{name}.next": values[name] - rate * grad for name, grad in grads.items()}

    return Step(run, data | weights_of(net))


def momentum(
    net: nn.Module,
    loss: Loss,
    data: Tensors,
    *,
    rate: float | str,
    decay: float = 0.9,
    dynamic: tuple[str, ...] = (),
) -> Step:
    """Return a step with `torch.optim.SGD(momentum=...)` inside; the rate is a number or an input's name."""

    def run(values: Tensors) -> Tensors:
        outputs, grads = differentiate(net, loss, values)
        step_size = values[rate] if isinstance(rate, str) else rate
        buffers = {name: decay * values[f"{name}.momentum"] + grad for name, grad in grads.items()}
        outputs |= {f"{name}.next": values[name] - step_size * buffers[name] for name in grads}
        return outputs | {f"{name}.momentum.next": buffer for name, buffer in buffers.items()}

    weights = weights_of(net)
    return Step(run, data | weights | zeros_like(weights, "momentum"), dynamic)


def adam(net: nn.Module, loss: Loss, data: Tensors, *, betas: tuple[float, float] = (0.9, 0.99)) -> Step:
    """Return a step with `torch.optim.Adam` inside; `learning_rate` and `epsilon` are inputs, and so is the counter.

    The epsilon is an input because gradients far below 1 need one far below 1e-8, and the exporter drops such a number.
    """

    def run(values: Tensors) -> Tensors:
        outputs, grads = differentiate(net, loss, values)
        count = values["step"] + 1
        correction1 = 1 - betas[0] ** count
        correction2 = (1 - betas[1] ** count).sqrt()
        weights, firsts, seconds = {}, {}, {}
        for name, grad in grads.items():
            first = values[f"{name}.exp_avg"].lerp(grad, 1 - betas[0])
            second = (values[f"{name}.exp_avg_sq"] * betas[1]).addcmul(grad, grad, value=1 - betas[1])
            update = first / (second.sqrt() / correction2 + values["epsilon"])
            weights[f"{name}.next"] = values[name] - values["learning_rate"] / correction1 * update
            firsts[f"{name}.exp_avg.next"] = first
            seconds[f"{name}.exp_avg_sq.next"] = second
        return outputs | weights | firsts | seconds | {"step.next": count}

    weights = weights_of(net)
    state = zeros_like(weights, "exp_avg") | zeros_like(weights, "exp_avg_sq")
    return Step(run, data | weights | state | {"step": torch.zeros(())})


def adamw_with_clipping(
    net: nn.Module,
    loss: Loss,
    data: Tensors,
    *,
    rate: float = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-6,
    weight_decay: float = 0.01,
    max_norm: float = 0.5,
) -> Step:
    """Return a step with `clip_grad_norm_` and `torch.optim.AdamW` inside; the step counter is carried too.

    Not with AdamW's default epsilon: the exporter takes adding 1e-8 for adding zero, and drops it.
    """

    def run(values: Tensors) -> Tensors:
        outputs, grads = differentiate(net, loss, values)
        norms = [torch.linalg.vector_norm(grad) for grad in grads.values()]
        shrink = (max_norm / (torch.linalg.vector_norm(torch.stack(norms)) + 1e-6)).clamp(max=1.0)
        count = values["step"] + 1
        correction1 = 1 - betas[0] ** count
        correction2 = (1 - betas[1] ** count).sqrt()
        weights, firsts, seconds = {}, {}, {}
        for name, grad in grads.items():
            grad = grad * shrink
            first = values[f"{name}.exp_avg"].lerp(grad, 1 - betas[0])
            second = (values[f"{name}.exp_avg_sq"] * betas[1]).addcmul(grad, grad, value=1 - betas[1])
            update = first / (second.sqrt() / correction2 + eps)
            decayed = values[name] * (1 - rate * weight_decay)
            weights[f"{name}.next"] = decayed - rate / correction1 * update
            firsts[f"{name}.exp_avg.next"] = first
            seconds[f"{name}.exp_avg_sq.next"] = second
        return outputs | weights | firsts | seconds | {"step.next": count}

    weights = weights_of(net)
    state = zeros_like(weights, "exp_avg") | zeros_like(weights, "exp_avg_sq")
    return Step(run, data | weights | state | {"step": torch.zeros(())})
