"""Parts of the steps from the field: a network of torch.nn, an optimizer beside it, and one step of both."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from models.zoo.steps import PLAIN, Arrays, Inputs, Outputs, Step, Style

# (call of the network, all inputs) -> loss, metrics, next states
Objective = Callable[[Callable, Arrays], tuple[Tensor, Arrays, Arrays]]


@dataclass(frozen=True)
class Optimizer:
    """One update for each weight: (weight, gradient, its slots, number of the step, rate, decay) -> weight, slots."""

    update: Callable[..., tuple[Tensor, Arrays]]
    slots: dict[str, Callable[[Tensor], Tensor | None]] = field(default_factory=dict)
    """The first value of each slot; None where a weight has none of it."""
    rate: Callable[[Arrays, Tensor], Any] = lambda values, t: 0.01
    """The learning rate, of all inputs and the number of the step."""
    decay: Callable[[str, Tensor], float] = lambda name, weight: 0.0
    counter: str = ""
    """The name of the number of the step, an int64."""
    label: str = "{weight}.{slot}"

    def initial(self, weights: Arrays) -> Arrays:
        states = {
            self.label.format(weight=name, slot=slot): make(weight)
            for name, weight in weights.items()
            for slot, make in self.slots.items()
            if make(weight) is not None
        }
        return states | ({self.counter: torch.tensor(0)} if self.counter else {})

    def step(self, weights: Arrays, grads: Arrays, values: Arrays) -> tuple[Arrays, Any]:
        """Return the next weights and slots, and the rate in use."""
        count = values[self.counter] + 1 if self.counter else torch.zeros(())
        rate = self.rate(values, count.to(torch.float32))
        moved, states = {}, {}
        for name, weight in weights.items():
            labels = {slot: self.label.format(weight=name, slot=slot) for slot in self.slots}
            own = {slot: values[label] for slot, label in labels.items() if label in values}
            decay = self.decay(name, weight)
            moved[name], after = self.update(weight, grads[name], own, count.to(torch.float32), rate, decay)
            states |= {labels[slot]: value for slot, value in after.items()}
        return moved | states | ({self.counter: count} if self.counter else {}), rate


def adam(p, g, s, t, lr, wd, beta1=0.9, beta2=0.999, eps=1e-6):
    """AdamW as torch.optim orders it; AMSGrad if there is a slot for the largest."""
    p = p * (1 - lr * wd) if wd else p
    m = torch.lerp(s["exp_avg"], g, 1 - beta1)
    v = torch.addcmul(s["exp_avg_sq"] * beta2, g, g, value=1 - beta2)
    after = {"exp_avg": m, "exp_avg_sq": v}
    if "max_exp_avg_sq" in s:
        v = after["max_exp_avg_sq"] = torch.maximum(s["max_exp_avg_sq"], v)
    denominator = v.sqrt() / (1 - beta2**t).sqrt() + eps
    return p - lr / (1 - beta1**t) * (m / denominator), after


def momentum(p, g, s, t, lr, wd, beta=0.9, nesterov=False):
    g = g + wd * p if wd else g
    buffer = s["momentum_buffer"] * beta + g
    return p - lr * (g + beta * buffer if nesterov else buffer), {"momentum_buffer": buffer}


def nesterov(p, g, s, t, lr, wd):
    return momentum(p, g, s, t, lr, wd, nesterov=True)


def rmsprop(p, g, s, t, lr, wd, alpha=0.95, eps=1e-5):
    g = g + wd * p if wd else g
    square = torch.addcmul(alpha * s["square_avg"], g, g, value=1 - alpha)
    if "momentum_buffer" not in s:
        return p - lr * g / (square.sqrt() + eps), {"square_avg": square}
    buffer = 0.8 * s["momentum_buffer"] + g / (square + eps).sqrt()
    return p - lr * buffer, {"square_avg": square, "momentum_buffer": buffer}


def adagrad(p, g, s, t, lr, wd):
    total = s["sum"] + g.pow(2)
    return torch.addcdiv(p, g, total.sqrt() + 1e-6, value=-lr), {"sum": total}


def lion(p, g, s, t, lr, wd, beta1=0.95, beta2=0.98):
    direction = torch.sign(s["momentum"] * beta1 + g * (1 - beta1))
    return p * (1 - lr * wd) - lr * direction, {"momentum": torch.lerp(g, s["momentum"], beta2)}


def lamb(p, g, s, t, lr, wd, eps=1e-6):
    m, v = 0.9 * s["m"] + 0.1 * g, 0.999 * s["v"] + 0.001 * g.square()
    move = (m / (1 - 0.9**t)) / (eps + torch.sqrt(v / (1 - 0.999**t))) + wd * p
    length, size = p.pow(2).sum().sqrt(), move.pow(2).sum().sqrt()
    trust = torch.where((length > 0) & (size > 0), length / (size + eps), torch.ones_like(length))
    return p - lr * trust * move, {"m": m, "v": v}


def nadam(p, g, s, t, lr, wd, eps=1e-6):
    g = g + wd * p if wd else g
    mu, ahead = 0.9 * (1 - 0.5 * 0.96 ** (0.004 * t)), 0.9 * (1 - 0.5 * 0.96 ** (0.004 * (t + 1)))
    product = s["mu_product"] * mu
    m, v = s["exp_avg"].lerp(g, 0.1), s["exp_avg_sq"] * 0.999 + 0.001 * g * g
    root = (v / (1 - 0.999**t)).sqrt() + eps
    p = p - lr * (1 - mu) / (1 - product) * g / root - lr * ahead / (1 - product * ahead) * m / root
    return p, {"exp_avg": m, "exp_avg_sq": v, "mu_product": product}


def radam(p, g, s, t, lr, wd, beta2=0.9, eps=1e-5):
    m, v = s["exp_avg"] * 0.9 + g * 0.1, s["exp_avg_sq"] * beta2 + (1 - beta2) * g * g
    limit = 2 / (1 - beta2) - 1
    rho = limit - 2 * t * beta2**t / (1 - beta2**t)
    fraction = ((rho - 4) * (rho - 2) * limit / ((limit - 4) * (limit - 2) * rho)).clamp(min=1e-4)
    rectified = fraction.sqrt() * (1 - beta2**t).sqrt() / (v.sqrt() + eps)
    return p - lr * m / (1 - 0.9**t) * torch.where(rho > 5.0, rectified, 1.0), {"exp_avg": m, "exp_avg_sq": v}


def adadelta(p, g, s, t, lr, wd, rho=0.9, eps=1e-5):
    square = s["square_avg"] * rho + g * g * (1 - rho)
    delta = (s["acc_delta"] + eps).sqrt() / (square + eps).sqrt() * g
    return p - lr * delta, {"square_avg": square, "acc_delta": s["acc_delta"] * rho + delta * delta * (1 - rho)}


zeros = torch.zeros_like
ADAM = {"exp_avg": zeros, "exp_avg_sq": zeros}
MOMENTUM = {"momentum_buffer": zeros}


def matrices(amount: float) -> Callable[[str, Tensor], float]:
    """Decay matrices and kernels only: no biases, norms or embeddings."""
    return lambda name, weight: amount if weight.dim() > 1 and "emb" not in name else 0.0


def norm_of(tensors: Iterable[Tensor]) -> Tensor:
    return torch.sqrt(sum(torch.sum(tensor * tensor) for tensor in tensors))


def clip_norm(limit: float) -> Callable[[Arrays], tuple[Arrays, Arrays]]:
    """Clip as torch.nn.utils.clip_grad_norm_ does; the norm before is a metric."""

    def clip(grads: Arrays) -> tuple[Arrays, Arrays]:
        norm = norm_of(grads.values())
        factor = torch.clamp(limit / (norm + 1e-6), max=1.0)
        return {name: grad * factor for name, grad in grads.items()}, {"grad_norm": norm}

    return clip


def batch_norm(x: Tensor, scale: Tensor, shift: Tensor, mean: Tensor, variance: Tensor) -> tuple[Tensor, ...]:
    """Normalize channels, the second dimension; return the next running mean and variance, too."""
    axes = [axis for axis in range(x.dim()) if axis != 1]
    shape = [-1 if axis == 1 else 1 for axis in range(x.dim())]
    now = x.mean(axes)
    spread = (x - now.view(shape)).square().mean(axes)
    y = (x - now.view(shape)) / (spread.view(shape) + 1e-5).sqrt() * scale.view(shape) + shift.view(shape)
    return y, torch.lerp(mean, now.detach(), 0.1), torch.lerp(variance, spread.detach(), 0.1)


def one_step(
    variant: str,
    net: nn.Module,
    batch: Arrays,
    objective: Objective,
    optimizer: Optimizer,
    style: Style = PLAIN,
    *,
    loss_name: str = "loss",
    states: Arrays | None = None,
    fed: Arrays | None = None,
    constants: Arrays | None = None,
    frozen: Callable[[str], bool] = lambda name: False,
    clip: Callable[[Arrays], tuple[Arrays, Arrays]] = lambda grads: (grads, {}),
    ema: float = 0.0,
    show_rate: str = "",
) -> Step:
    """Return the step of a network: forward, backward, clipping, the optimizer, and an average of the weights."""
    parameters = {name: weight.detach().clone() for name, weight in net.named_parameters()}
    weights = {name: weight for name, weight in parameters.items() if not frozen(name)}
    held = {name: weight for name, weight in parameters.items() if frozen(name)}

    def run(values: Arrays) -> Outputs:
        leaves = {name: values[name].detach().requires_grad_() for name in weights}
        full = leaves | {name: values[name] for name in held}

        def call(*inputs: Tensor) -> Any:
            return torch.func.functional_call(net, full, inputs)

        loss, metrics, following = objective(call, values)
        found = torch.autograd.grad(loss, list(leaves.values()))
        grads, more = clip(dict(zip(leaves, found, strict=True)))
        moved, rate = optimizer.step({name: values[name] for name in weights}, grads, values)
        metrics = {name: value.detach() for name, value in (metrics | more).items()}
        if show_rate:
            metrics[show_rate] = torch.as_tensor(rate) * 1.0
        if ema:
            moved |= {f"ema.{name}": values[f"ema.{name}"] * ema + moved[name] * (1 - ema) for name in weights}
        return Outputs({loss_name: loss.detach()}, metrics, states=moved | following)

    averages = {f"ema.{name}": weight.clone() for name, weight in weights.items()} if ema else {}
    carried = weights | optimizer.initial(weights) | averages | (states or {})
    return Step(variant, Inputs(batch, carried, fed or {}, held | (constants or {})), run, style)
