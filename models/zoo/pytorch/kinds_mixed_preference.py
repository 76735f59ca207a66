"""Kinds as people export them, of language models that are tuned: preferences against a frozen reference."""

from collections.abc import Iterator
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from models.zoo.pytorch.kinds_mixed_sequences import prefixed, rms_norm, self_attention, zeros
from models.zoo.pytorch.kinds_mixed_vision import clipped
from models.zoo.pytorch.problems import Problem, matrix
from models.zoo.pytorch.training import differentiate
from models.zoo.steps import Arrays, Inputs, Outputs, Step, Style, kind


def preference() -> Problem:
    """Return direct preference optimization of a small decoder; the reference's weights are constants."""
    width, vocabulary, length = 18, 21, 7
    future = torch.full((length, length), -1e4).triu(1)

    def log_probability(w: Arrays, tokens: Tensor, mask: Tensor) -> Tensor:
        x = w["embed"][tokens[:, :-1]] + w["position"]
        x = x + self_attention(rms_norm(x, w["norm1"]), w["qkv"], w["proj"], 2, future)
        x = x + F.gelu(rms_norm(x, w["norm2"]) @ w["up"]) @ w["down"]
        logp = torch.log_softmax(x @ w["lm_head"], -1)
        return (logp.gather(-1, tokens[:, 1:, None])[..., 0] * mask).sum(-1)

    def loss(w: Arrays, values: Arrays) -> tuple[Tensor, Outputs]:
        reference = {name: values[f"ref_{name}"] for name in w}
        rewards = {}
        for side in ("chosen", "rejected"):
            tokens, mask = values[f"{side}_ids"], values[f"{side}_mask"]
            ratio = log_probability(w, tokens, mask) - log_probability(reference, tokens, mask)
            rewards[side] = values["beta"] * ratio
        margin = rewards["chosen"] - rewards["rejected"]
        metrics = {f"reward_{side}": reward.mean() for side, reward in rewards.items()}
        metrics |= {"reward_margin": margin.mean(), "reward_accuracy": (margin > 0).float().mean()}
        return -F.logsigmoid(margin).mean(), Outputs(metrics=metrics)

    weights = {"embed": 0.5 * torch.randn(vocabulary, width), "position": 0.1 * torch.randn(length, width)}
    weights |= {"norm1": torch.ones(width), "qkv": matrix(width, 3 * width), "proj": matrix(width, width)}
    weights |= {"norm2": torch.ones(width), "up": matrix(width, 30), "down": matrix(30, width)}
    weights["lm_head"] = matrix(width, vocabulary)
    data = {}
    for side in ("chosen", "rejected"):
        data |= {f"{side}_ids": torch.randint(vocabulary, (3, length + 1))}
        data |= {f"{side}_mask": (torch.arange(length) >= torch.tensor([[2], [3], [1]])).float()}
    frozen = prefixed("ref_", {name: weight + 0.02 * torch.randn_like(weight) for name, weight in weights.items()})
    return Problem(weights, data, loss, hyperparameters={"beta": torch.tensor(0.5)}, constants=frozen)


@kind("preference-tuning")
def preference_tuning() -> Iterator[Step]:
    """Preferences against a frozen reference: RMSprop with linear warm-up, or AdamW with a fed rate, accumulated."""
    net = preference()

    def rmsprop(values: Arrays) -> Outputs:
        outputs, grads = differentiate(net, values)
        grads, norm = clipped(grads, 10.0)
        step, states = values["step"] + 1, {}
        rate = 1e-3 * (step / 20).clamp(max=1.0)
        for name, grad in grads.items():
            square = 0.99 * values[f"{name}_square_avg"] + 0.01 * grad * grad
            states |= {name: values[name] - rate * grad / (square.sqrt() + 1e-5), f"{name}_square_avg": square}
        metrics = outputs.metrics | {"grad_norm": norm}
        return replace(outputs, metrics=metrics, states=states | {"step": step})

    def accumulated(values: Arrays) -> Outputs:
        outputs, grads = differentiate(net, values)
        micro = values["micro_step"] + 1
        due = micro == 4
        time = values["optimizer_step"] + due.float()
        states = {"micro_step": torch.where(due, 0, micro), "optimizer_step": time}
        for name in net.weights:
            total = values[f"acc_{name}"] + grads[name] / 4
            m = 0.9 * values[f"m_{name}"] + 0.1 * total
            v = 0.95 * values[f"v_{name}"] + 0.05 * total * total
            power = time.clamp(min=1.0)
            move = m / (1 - 0.9**power) / ((v / (1 - 0.95**power)).sqrt() + 1e-6) + 0.01 * values[name]
            states[name] = torch.where(due, values[name] - values["lr"] * move, values[name])
            states[f"m_{name}"] = torch.where(due, m, values[f"m_{name}"])
            states[f"v_{name}"] = torch.where(due, v, values[f"v_{name}"])
            states[f"acc_{name}"] = torch.where(due, torch.zeros_like(total), total)
        return replace(outputs, states=states)

    squares = {f"{name}_square_avg": torch.zeros_like(weight) for name, weight in net.weights.items()}
    inputs = Inputs(net.batch, net.weights | squares | {"step": torch.tensor(0.0)}, net.hyperparameters, net.constants)
    yield Step("rmsprop", inputs, rmsprop, Style(embedded_constants=True))
    states = net.weights | zeros("m_", net.weights) | zeros("v_", net.weights) | zeros("acc_", net.weights)
    states |= {"micro_step": torch.tensor(0), "optimizer_step": torch.tensor(0.0)}
    fed = net.hyperparameters | {"lr": torch.tensor(1e-3)}
    inputs = Inputs(net.batch, states, fed, net.constants)
    yield Step("accumulated", inputs, accumulated, Style(names="exporter"), warm=3)
