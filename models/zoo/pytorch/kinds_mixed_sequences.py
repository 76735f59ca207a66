"""Kinds as people export them, of sequences: a decoder, speech, forecasts with carried states, preferences."""

import math
from collections.abc import Iterator
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from models.zoo.pytorch.kinds_mixed_vision import clipped, global_norm
from models.zoo.pytorch.problems import Problem, advance, matrix
from models.zoo.pytorch.training import differentiate
from models.zoo.steps import Arrays, Inputs, Outputs, Step, Style, kind

EXPORTER, SCRAMBLED = Style(names="exporter"), Style(names="scrambled", order="shuffled")


def prefixed(prefix: str, arrays: Arrays) -> Arrays:
    """Return the arrays with a prefix before their names."""
    return {f"{prefix}{name}": value for name, value in arrays.items()}


def zeros(prefix: str, arrays: Arrays) -> Arrays:
    """Return zeros of the shapes of the arrays, with a prefix before their names."""
    return {f"{prefix}{name}": torch.zeros_like(value) for name, value in arrays.items()}


def rms_norm(x: Tensor, gain: Tensor) -> Tensor:
    """Apply root mean square normalization."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * gain


def self_attention(x: Tensor, qkv: Tensor, out: Tensor, heads: int, mask: Tensor | None = None) -> Tensor:
    """Apply attention of several heads; the mask is added to the scores."""
    batch, length, width = x.shape
    q, k, v = (x @ qkv).reshape(batch, length, 3, heads, width // heads).permute(2, 0, 3, 1, 4).unbind(0)
    scores = q @ k.transpose(-1, -2) / math.sqrt(width // heads)
    scores = scores if mask is None else scores + mask
    return (torch.softmax(scores, -1) @ v).transpose(1, 2).reshape(batch, length, width) @ out


def decoder() -> Problem:
    """Return a decoder of two layers with gated feed-forward parts and tied embeddings."""
    width, hidden, vocabulary, length = 24, 40, 33, 8
    future = torch.full((length, length), -1e4).triu(1)

    def loss(w: Arrays, values: Arrays) -> tuple[Tensor, Outputs]:
        x = w["wte"][values["input_ids"]] + w["wpe"]
        for n in ("h0_", "h1_"):
            x = x + self_attention(rms_norm(x, w[f"{n}norm1"]), w[f"{n}qkv"], w[f"{n}proj"], 3, future)
            y = rms_norm(x, w[f"{n}norm2"])
            x = x + (F.silu(y @ w[f"{n}gate"]) * (y @ w[f"{n}up"])) @ w[f"{n}down"]
        logits = rms_norm(x, w["norm"]) @ w["wte"].T
        mask, total = values["loss_mask"], values["loss_mask"].sum()
        each = F.cross_entropy(logits.flatten(0, 1), values["targets"].flatten(), reduction="none")
        nll = (each * mask.flatten()).sum() / total
        z_loss = 1e-3 * (torch.logsumexp(logits, -1).square() * mask).sum() / total
        hits = (logits.argmax(-1) == values["targets"]).float()
        metrics = {"perplexity": torch.exp(nll), "z_loss": z_loss, "token_accuracy": (hits * mask).sum() / total}
        return nll + z_loss, Outputs(metrics=metrics)

    weights = {"wte": 0.3 * torch.randn(vocabulary, width), "wpe": 0.1 * torch.randn(length, width)}
    for n in ("h0_", "h1_"):
        weights |= {f"{n}norm1": torch.ones(width), f"{n}qkv": matrix(width, 3 * width)}
        weights |= {f"{n}proj": 0.5 * matrix(width, width), f"{n}norm2": torch.ones(width)}
        weights |= {f"{n}gate": matrix(width, hidden), f"{n}up": matrix(width, hidden)}
        weights[f"{n}down"] = 0.5 * matrix(hidden, width)
    text = torch.randint(vocabulary, (3, length + 1))
    data = {"input_ids": text[:, :-1].contiguous(), "targets": text[:, 1:].contiguous()}
    data["loss_mask"] = (torch.arange(length) < torch.tensor([[8], [5], [7]])).float()
    return Problem(weights | {"norm": torch.ones(width)}, data, loss)


@kind("decoder-language-trainer")
def decoder_language_trainer() -> Iterator[Step]:
    """A small decoder: AdamW with warm-up, cosine and clipping, or Lion with a fed rate and averaged weights."""
    net = decoder()

    def adamw(values: Arrays) -> Outputs:
        outputs, grads = differentiate(net, values)
        grads, norm = clipped(grads, 1.0)
        step = values["global_step"] + 1
        time = step.float()
        cosine = 0.1 + 0.45 * (1 + torch.cos(math.pi * ((time - 10) / 190).clamp(0, 1)))
        lr = 3e-3 * torch.where(step < 10, time / 10, cosine)
        states: Arrays = {}
        for name in net.weights:
            weight, grad = values[name], grads[name]
            m = 0.9 * values[f"m_{name}"] + 0.1 * grad
            v = 0.95 * values[f"v_{name}"] + 0.05 * grad.square()
            move = (m / (1 - 0.9**time)) / ((v / (1 - 0.95**time)).sqrt() + 1e-6)
            states[name] = weight - lr * (move + 0.1 * weight if weight.dim() > 1 else move)
            states |= {f"m_{name}": m, f"v_{name}": v}
        metrics = outputs.metrics | {"grad_norm": norm, "learning_rate": lr}
        return replace(outputs, metrics=metrics, states=states | {"global_step": step})

    def lion(values: Arrays) -> Outputs:
        outputs, grads = differentiate(net, values)
        states: Arrays = {}
        for name in net.weights:
            weight, grad, m = values[name], grads[name], values[f"exp_avg_{name}"]
            weight = weight * (1 - values["lr"] * values["weight_decay"])
            states[name] = weight - values["lr"] * torch.sign(m.lerp(grad, 0.1))
            states[f"exp_avg_{name}"] = m.lerp(grad, 0.01)
            states[f"ema_{name}"] = torch.lerp(states[name], values[f"ema_{name}"], 0.99)
        return replace(outputs, states=states)

    moments = zeros("m_", net.weights) | zeros("v_", net.weights)
    yield Step("adamw", Inputs(net.batch, net.weights | moments | {"global_step": torch.tensor(0)}), adamw, EXPORTER)
    states = net.weights | zeros("exp_avg_", net.weights) | prefixed("ema_", net.weights)
    fed = {"lr": torch.tensor(3e-4), "weight_decay": torch.tensor(0.1)}
    yield Step("lion", Inputs(net.batch, states, fed), lion)


def acoustic_model() -> Problem:
    """Return frames of speech to phones: features normalized by running statistics, convolutions, attention."""
    width, phones = 20, 9

    def loss(w: Arrays, values: Arrays) -> tuple[Tensor, Outputs]:
        mel = values["mel"]
        mean = torch.lerp(values["cmvn_mean"], mel.mean((0, 1)), 0.05)
        variance = torch.lerp(values["cmvn_var"], (mel - mean).square().mean((0, 1)), 0.05)
        x = (mel - mean) * torch.rsqrt(variance + 1e-3) * values["time_mask"][:, :, None]
        x = F.relu(F.conv1d(x.transpose(1, 2), w["conv1"], w["conv1_bias"], 2, 1))
        x = F.relu(F.conv1d(x, w["conv2"], w["conv2_bias"], 1, 1)).transpose(1, 2)
        present = (torch.arange(x.shape[1]) < values["frames"][:, None]).float()
        x = x + self_attention(x, w["qkv"], w["proj"], 2, (present[:, None, None] - 1) * 1e4)
        logp = torch.log_softmax(F.layer_norm(x, (width,), w["ln_scale"], w["ln_shift"]) @ w["out"] + w["out_bias"], -1)
        each = -logp.gather(-1, values["phones"][..., None])[..., 0]
        each = 0.9 * each - 0.1 * logp.mean(-1)
        total = present.sum()
        wrong = (logp.argmax(-1) != values["phones"]).float()
        metrics = {"frame_error_rate": (wrong * present).sum() / total}
        metrics["entropy"] = -((logp.exp() * logp).sum(-1) * present).sum() / total
        return (each * present).sum() / total, Outputs(
            metrics=metrics, states={"cmvn_mean": mean, "cmvn_var": variance}
        )

    weights = {"conv1": 0.2 * torch.randn(16, 12, 3), "conv1_bias": torch.zeros(16)}
    weights |= {"conv2": 0.2 * torch.randn(width, 16, 3), "conv2_bias": torch.zeros(width)}
    weights |= {"qkv": matrix(width, 3 * width), "proj": matrix(width, width), "ln_scale": torch.ones(width)}
    weights |= {"ln_shift": torch.zeros(width), "out": matrix(width, phones), "out_bias": torch.zeros(phones)}
    data = {"mel": 2 + torch.randn(3, 18, 12), "time_mask": torch.ones(3, 18), "frames": torch.tensor([9, 6, 8])}
    data["time_mask"][:, 4:7] = 0
    data["phones"] = torch.randint(phones, (3, 9))
    return Problem(weights, data, loss, {"cmvn_mean": torch.zeros(12), "cmvn_var": torch.ones(12)})


@kind("speech-frame-trainer")
def speech_frame_trainer() -> Iterator[Step]:
    """Phones of frames with running feature statistics: Adam by Noam's schedule, or Adafactor with factored moments."""
    net = acoustic_model()

    def noam(values: Arrays) -> Outputs:
        outputs, grads = differentiate(net, values)
        step = values["step"] + 1
        rate = 20**-0.5 * torch.minimum(step**-0.5, step * 40**-1.5) * 0.3
        states: Arrays = {"step": step}
        for name in net.weights:
            m = torch.lerp(values[f"{name}_m"], grads[name], 0.1)
            v = 0.98 * values[f"{name}_v"] + 0.02 * grads[name] ** 2
            size = rate * torch.sqrt(1 - 0.98**step) / (1 - 0.9**step)
            states |= {name: values[name] - size * m / (torch.sqrt(v) + 1e-6), f"{name}_m": m, f"{name}_v": v}
        metrics = outputs.metrics | {"rate": rate, "grad_norm": global_norm(grads)}
        return replace(outputs, metrics=metrics, states=states | outputs.states)

    def adafactor(values: Arrays) -> Outputs:
        outputs, grads = differentiate(net, values)
        step = values["step"] + 1
        beta, rate = 1 - step**-0.8, torch.minimum(torch.tensor(1e-2), torch.rsqrt(step))
        states: Arrays = {"step": step}
        for name in net.weights:
            weight, grad = values[name], grads[name]
            square = grad.square() + 1e-12
            if weight.dim() > 1:
                row = beta * values[f"{name}_row"] + (1 - beta) * square.mean(-1)
                column = beta * values[f"{name}_col"] + (1 - beta) * square.mean(-2)
                states |= {f"{name}_row": row, f"{name}_col": column}
                left = torch.rsqrt(row / row.mean(-1, keepdim=True))[..., None]
                update = grad * left * torch.rsqrt(column)[..., None, :]
            else:
                states[f"{name}_full"] = beta * values[f"{name}_full"] + (1 - beta) * square
                update = grad * torch.rsqrt(states[f"{name}_full"])
            update = update / update.square().mean().sqrt().clamp(min=1.0)
            states[name] = weight - rate * weight.square().mean().sqrt().clamp(min=1e-3) * update
        return replace(outputs, states=states | outputs.states)

    moments = {f"{name}_{slot}": torch.zeros_like(w) for name, w in net.weights.items() for slot in "mv"}
    counter = {"step": torch.tensor(0.0)}
    yield Step("noam", Inputs(net.batch, net.weights | moments | net.states | counter), noam)
    factors: Arrays = {}
    for name, weight in net.weights.items():
        if weight.dim() > 1:
            factors |= {f"{name}_row": torch.zeros(weight.shape[:-1])}
            factors |= {f"{name}_col": torch.zeros(*weight.shape[:-2], weight.shape[-1])}
        else:
            factors[f"{name}_full"] = torch.zeros_like(weight)
    yield Step("adafactor", Inputs(net.batch, net.weights | factors | net.states | counter), adafactor, EXPORTER)


def forecaster(gaussian: bool) -> Problem:
    """Return a forecaster of two recurrent layers whose states go on to the next window, unless a series starts."""
    sizes, outputs = (14, 10), 2 if gaussian else 3
    levels = torch.tensor([0.1, 0.5, 0.9])

    def loss(w: Arrays, values: Arrays) -> tuple[Tensor, Outputs]:
        go_on = 1 - values["is_start"][:, None]
        first, second, made = values["hidden1"] * go_on, values["hidden2"] * go_on, []
        for time in range(values["target"].shape[1]):
            first, _ = advance("gru", values["covariates"][:, time] @ w["in1"] + w["bias1"], first, None, w["rec1"])
            second, _ = advance("gru", first @ w["in2"] + w["bias2"], second, None, w["rec2"])
            made.append(second @ w["head"] + w["head_bias"])
        guess, target = torch.stack(made, 1), values["target"]
        states = {"hidden1": first.detach(), "hidden2": second.detach()}
        if gaussian:
            centre, spread = guess[..., 0], F.softplus(guess[..., 1]) + 1e-2
            value = (torch.log(spread) + 0.5 * ((target - centre) / spread).square()).mean()
            metrics = {"rmse": (centre - target).square().mean().sqrt(), "mean_spread": spread.mean()}
        else:
            gap = target[..., None] - guess
            value = torch.maximum(levels * gap, (levels - 1) * gap).mean()
            inside = (target >= guess[..., 0]) & (target <= guess[..., 2])
            metrics = {"mae": (guess[..., 1] - target).abs().mean(), "coverage": inside.float().mean()}
        return value, Outputs(metrics=metrics, states=states)

    a, b = sizes
    weights = {"in1": matrix(5, 3 * a), "rec1": matrix(a, 3 * a), "bias1": torch.zeros(3 * a)}
    weights |= {"in2": matrix(a, 3 * b), "rec2": matrix(b, 3 * b), "bias2": torch.zeros(3 * b)}
    weights |= {"head": matrix(b, outputs), "head_bias": torch.zeros(outputs)}
    data = {"covariates": torch.randn(4, 6, 5), "target": torch.randn(4, 6), "is_start": torch.tensor([0.0, 0, 1, 0])}
    return Problem(weights, data, loss, {"hidden1": torch.zeros(4, a), "hidden2": torch.zeros(4, b)})


@kind("stateful-forecaster")
def stateful_forecaster() -> Iterator[Step]:
    """Forecasts with carried hidden states: quantiles by RMSprop with momentum, or a density by NAdam, scrambled."""
    quantiles, density = forecaster(False), forecaster(True)

    def rmsprop(values: Arrays) -> Outputs:
        outputs, grads = differentiate(quantiles, values)
        states: Arrays = {}
        for name, grad in grads.items():
            grad = grad.clamp(-0.5, 0.5)
            square = torch.addcmul(0.95 * values[f"square_avg_{name}"], grad, grad, value=0.05)
            buffer = 0.9 * values[f"momentum_{name}"] + grad / (square.sqrt() + 1e-5)
            states |= {name: values[name] - 2e-3 * buffer, f"square_avg_{name}": square, f"momentum_{name}": buffer}
        return replace(outputs, states=states | outputs.states)

    def nadam(values: Arrays) -> Outputs:
        outputs, grads = differentiate(density, values)
        grads, norm = clipped(grads, 2.0)
        step, states = values["steps"] + 1, {}
        for name, grad in grads.items():
            m = 0.9 * values[f"m_{name}"] + 0.1 * grad
            v = 0.99 * values[f"v_{name}"] + 0.01 * grad * grad
            ahead = 0.9 * m / (1 - 0.9 ** (step + 1)) + 0.1 * grad / (1 - 0.9**step)
            states |= {name: values[name] - 3e-3 * ahead / ((v / (1 - 0.99**step)).sqrt() + 1e-6)}
            states |= {f"m_{name}": m, f"v_{name}": v}
        metrics = outputs.metrics | {"grad_norm": norm}
        return replace(outputs, metrics=metrics, states=states | outputs.states | {"steps": step})

    moments = zeros("square_avg_", quantiles.weights) | zeros("momentum_", quantiles.weights)
    yield Step("quantiles", Inputs(quantiles.batch, quantiles.weights | moments | quantiles.states), rmsprop)
    moments = zeros("m_", density.weights) | zeros("v_", density.weights) | {"steps": torch.tensor(0.0)}
    yield Step("density", Inputs(density.batch, density.weights | moments | density.states), nadam, SCRAMBLED)
