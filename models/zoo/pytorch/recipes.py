"""Parts of the recipes of `kinds_recipes_*.py`: gradients by torch.func, and optimizers as libraries write them.

A recipe keeps the names of its module's parameters; the state of an optimizer is named by its slot and the parameter.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from models.zoo.steps import Arrays, Style

PLAIN, EXPORTER = Style(), Style(names="exporter")
SCRAMBLED = Style(names="scrambled", order="shuffled")
BARE = Style(names="scrambled", order="shuffled", shapes="inputs")


def everything(_: str) -> bool:
    """Select every parameter."""
    return True


def matrices(name: str) -> bool:
    """Select what weight decay is usual for."""
    return not name.endswith("bias") and "norm" not in name


def parameters(net: nn.Module, prefix: str = "") -> Arrays:
    """Return the module's parameters by their names."""
    return {f"{prefix}{name}": value.detach().clone() for name, value in net.named_parameters()}


def call(net: nn.Module, params: Arrays, *args: Tensor, prefix: str = "") -> Tensor:
    """Call the module with these parameters."""
    own = {name[len(prefix) :]: value for name, value in params.items() if name.startswith(prefix)}
    return torch.func.functional_call(net, own, args)


def select(values: Arrays, params: Arrays, tag: str = "") -> Arrays:
    """Return the values of these names."""
    return {name: values[f"{tag}{name}"] for name in params}


def grads_of(objective: Callable, params: Arrays) -> tuple[Tensor, Arrays, Arrays]:
    """Return the loss, what the objective returns beside it, and the gradients."""
    grads, (loss, aux) = torch.func.grad_and_value(objective, has_aux=True)(params)
    return loss, aux, grads


def zeros_of(params: Arrays, *slots: str) -> Arrays:
    """Return zeros for each slot and parameter."""
    return {f"{slot}.{name}": torch.zeros_like(value) for slot in slots for name, value in params.items()}


def copies_of(params: Arrays, slot: str) -> Arrays:
    """Return a copy of each parameter."""
    return {f"{slot}.{name}": value.clone() for name, value in params.items()}


def norm_of(tensors: Arrays) -> Tensor:
    """Return the norm of all tensors together."""
    return torch.stack([value.float().norm() for value in tensors.values()]).norm()


def clip_norm(grads: Arrays, limit: float | Tensor) -> tuple[Arrays, Tensor]:
    """Return clip_grad_norm_ of torch.nn.utils, and the norm before."""
    norm = norm_of(grads)
    factor = torch.clamp(limit / (norm + 1e-6), max=1.0)
    return {name: grad * factor for name, grad in grads.items()}, norm


def moving(values: Arrays, params: Arrays, slot: str, decay: float | Tensor) -> Arrays:
    """Return the next moving averages of the parameters."""
    return {
        f"{slot}.{name}": values[f"{slot}.{name}"] * decay + (1 - decay) * value.detach()
        for name, value in params.items()
    }


def adamw(
    params: Arrays,
    grads: Arrays,
    values: Arrays,
    lr: float | Tensor,
    *,
    betas: tuple[float, float] = (0.9, 0.999),
    decay: float = 0.0,
    decayed: Callable[[str], bool] = everything,
    step: str = "step",
) -> Arrays:
    """Return AdamW as torch.optim writes it."""
    count = values[step] + 1
    t = count.to(torch.float32)
    bias1, bias2 = 1 - betas[0] ** t, 1 - betas[1] ** t
    states: Arrays = {}
    for name, param in params.items():
        mean = torch.lerp(values[f"exp_avg.{name}"], grads[name], 1 - betas[0])
        square = torch.addcmul(values[f"exp_avg_sq.{name}"] * betas[1], grads[name], grads[name], value=1 - betas[1])
        if decay and decayed(name):
            param = param * (1 - lr * decay)
        denominator = square.sqrt() / bias2.sqrt() + 1e-6
        states[name] = param - lr / bias1 * (mean / denominator)
        states |= {f"exp_avg.{name}": mean, f"exp_avg_sq.{name}": square}
    return states | {step: count}


def adam_state(params: Arrays, step: str = "step", count: Tensor | None = None) -> Arrays:
    """Return the state of `adamw`."""
    return zeros_of(params, "exp_avg", "exp_avg_sq") | {step: torch.tensor(0) if count is None else count}


def keras_adam(params: Arrays, grads: Arrays, values: Arrays, lr: float | Tensor, step: str = "iterations") -> Arrays:
    """Return Adam as Keras writes it: the corrections are in the rate."""
    t = values[step].to(torch.float32) + 1
    alpha = lr * torch.sqrt(1 - 0.999**t) / (1 - 0.9**t)
    states: Arrays = {}
    for name, param in params.items():
        m, v, grad = values[f"m.{name}"], values[f"v.{name}"], grads[name]
        m = m + (grad - m) * (1 - 0.9)
        v = v + (grad.square() - v) * (1 - 0.999)
        states |= {name: param - m * alpha / (torch.sqrt(v) + 1e-5), f"m.{name}": m, f"v.{name}": v}
    return states | {step: values[step] + 1}


def optax_adam(params: Arrays, grads: Arrays, values: Arrays, lr: float | Tensor, count: str = "count") -> Arrays:
    """Return Adam as optax writes it: an update that is added."""
    following = values[count] + 1
    t = following.to(torch.float32)
    states: Arrays = {}
    for name, param in params.items():
        mu = 0.1 * grads[name] + 0.9 * values[f"mu.{name}"]
        nu = 0.001 * (grads[name] * grads[name]) + 0.999 * values[f"nu.{name}"]
        update = (mu / (1 - 0.9**t)) / (torch.sqrt(nu / (1 - 0.999**t)) + 1e-6)
        states |= {name: param + -lr * update, f"mu.{name}": mu, f"nu.{name}": nu}
    return states | {count: following}


def heavy_ball(
    params: Arrays,
    grads: Arrays,
    values: Arrays,
    lr: float | Tensor,
    *,
    beta: float | Tensor = 0.9,
    decay: float = 0.0,
    decayed: Callable[[str], bool] = everything,
    nesterov: bool = False,
) -> Arrays:
    """Return SGD with momentum as torch.optim writes it."""
    states: Arrays = {}
    for name, param in params.items():
        grad = grads[name] + decay * param if decay and decayed(name) else grads[name]
        buffer = values[f"momentum.{name}"] * beta + grad
        direction = grad + beta * buffer if nesterov else buffer
        states |= {name: param - lr * direction, f"momentum.{name}": buffer}
    return states


def adagrad(params: Arrays, grads: Arrays, values: Arrays, lr: float | Tensor) -> Arrays:
    """Return Adagrad."""
    states: Arrays = {}
    for name, param in params.items():
        total = torch.addcmul(values[f"sum.{name}"], grads[name], grads[name])
        states |= {name: torch.addcdiv(param, -lr * grads[name], total.sqrt() + 1e-5), f"sum.{name}": total}
    return states
