"""Recipes of language models and of sequences with a curriculum: what is carried besides weights and moments."""

import math
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.zoo.pytorch.recipes import (
    EXPORTER,
    SCRAMBLED,
    adam_state,
    adamw,
    call,
    clip_norm,
    copies_of,
    grads_of,
    matrices,
    optax_adam,
    parameters,
    select,
    zeros_of,
)
from models.zoo.steps import Arrays, Inputs, Outputs, Step, Style, kind


def hashed(seed: Tensor, *shape: int) -> Tensor:
    """Return numbers between 0 and 1 from a counter, by multiplications modulo a prime."""
    index = torch.arange(math.prod(shape)).reshape(shape)
    mixed = (seed * 7919 + index * 104729 + 12345) % 2147483647
    mixed = (mixed * 48271) % 2147483647
    return ((mixed * 16807) % 2147483647).float() / 2147483647.0


def lstm(x: Tensor, h: Tensor, c: Tensor, weights: Arrays, layer: int) -> tuple[Tensor, Tensor, Tensor]:
    """Run a layer with the weights as nn.LSTM stores them; the sequence comes first."""
    made = []
    for now in x:
        gates = F.linear(now, weights[f"rnn.weight_ih_l{layer}"], weights[f"rnn.bias_l{layer}"])
        gates = gates + F.linear(h, weights[f"rnn.weight_hh_l{layer}"])
        i, f, g, o = gates.chunk(4, -1)
        c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
        h = torch.sigmoid(o) * torch.tanh(c)
        made.append(h)
    return torch.stack(made), h, c


@kind("awd-language-model")
def awd_language_model() -> Iterator[Step]:
    """Truncated backpropagation, dropped weights by a carried counter, and averages that a plateau starts."""
    words, width, hidden, length, rows = 23, 9, 11, 5, 3
    params = {"embedding": 0.3 * torch.randn(words, width)}
    for layer, (enter, leave) in enumerate(((width, hidden), (hidden, width))):
        params[f"rnn.weight_ih_l{layer}"] = torch.randn(4 * leave, enter) / enter**0.5
        params[f"rnn.weight_hh_l{layer}"] = torch.randn(4 * leave, leave) / leave**0.5
        params[f"rnn.bias_l{layer}"] = torch.zeros(4 * leave)
    params["decoder.bias"] = torch.zeros(words)
    text = torch.randint(words, (length + 1, rows))
    batch = {"data": text[:-1].clone(), "targets": text[1:].clone()}
    hiddens = {f"{name}{layer}": torch.zeros(rows, size) for layer, size in enumerate((hidden, width)) for name in "hc"}

    def objective(weights: Arrays, values: Arrays, start: Arrays) -> tuple[Tensor, tuple[Arrays, Arrays]]:
        own = dict(weights)
        if "seed" in values:
            for layer in range(2):
                name = f"rnn.weight_hh_l{layer}"
                keep = hashed(values["seed"] * 2 + layer, *weights[name].shape) < 0.7
                own[name] = weights[name] * keep.float() / 0.7
        x, states = weights["embedding"][values["data"]], {}
        for layer in range(2):
            x, h, c = lstm(x, start[f"h{layer}"], start[f"c{layer}"], own, layer)
            states |= {f"h{layer}": h.detach(), f"c{layer}": c.detach()}
        logits = x @ weights["embedding"].T + weights["decoder.bias"]
        entropy = F.cross_entropy(logits.flatten(0, 1), values["targets"].flatten())
        penalty = 2 * x.square().mean() + (x[1:] - x[:-1]).square().mean()
        total = entropy + 0.1 * penalty if "seed" in values else entropy
        return total, ({"ce": entropy, "perplexity": torch.exp(entropy)}, states)

    def averaged(values: Arrays) -> Outputs:
        weights = select(values, params)
        loss, (metrics, states), grads = grads_of(lambda w: objective(w, values, values), weights)
        grads, _ = clip_norm(grads, 0.25)
        history, place = values["logs"], values["log_place"] % 6
        worse = metrics["ce"].detach() > history.min()
        on = values["averaging"] | (worse & (values["log_place"] >= 6))
        count = values["averaged"] + on.float()
        for name, w in weights.items():
            states[name] = w - values["lr"] * (grads[name] + 1.2e-6 * w)
            old = values[f"ax.{name}"]
            states[f"ax.{name}"] = torch.where(on, old + (states[name] - old) / count.clamp(min=1.0), states[name])
        states |= {"logs": history.index_copy(0, place[None], metrics["ce"].detach()[None]), "averaging": on}
        states |= {"log_place": values["log_place"] + 1, "averaged": count, "seed": values["seed"] + 1}
        return Outputs({"loss": loss}, metrics, states=states)

    def plain(values: Arrays) -> Outputs:
        weights = select(values, params)
        start = {name: values[name] * (1 - values["new_document"])[:, None] for name in hiddens}
        loss, (metrics, states), grads = grads_of(lambda w: objective(w, values, start), weights)
        grads, norm = clip_norm(grads, 1.0)
        states |= optax_adam(weights, grads, values, 2e-3)
        return Outputs({"loss": loss}, {"perplexity": metrics["perplexity"], "norm": norm}, states=states)

    carried = {"seed": torch.tensor(100), "logs": torch.linspace(3.5, 3.0, 6), "log_place": torch.tensor(9)}
    carried |= {"averaging": torch.tensor(False), "averaged": torch.tensor(0.0)}
    states = params | copies_of(params, "ax") | hiddens | carried
    yield Step("triggered-average", Inputs(batch, states, {"lr": torch.tensor(0.5)}), averaged)
    states = params | zeros_of(params, "mu", "nu") | {"count": torch.tensor(0, dtype=torch.int32)} | hiddens
    given = Inputs(batch | {"new_document": torch.tensor([0.0, 1.0, 0.0])}, states)
    yield Step("resets", given, plain, Style(names="exporter", opset=21))


class SmallDecoder(nn.Module):
    """A causal decoder of two blocks with rotary positions left out."""

    def __init__(self, words: int = 29, width: int = 12, length: int = 6) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(words, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList()
        for _ in range(2):
            block = {"norm1": nn.LayerNorm(width), "qkv": nn.Linear(width, 3 * width), "proj": nn.Linear(width, width)}
            block |= {"norm2": nn.LayerNorm(width), "up": nn.Linear(width, 20), "gate": nn.Linear(width, 20)}
            self.blocks.append(nn.ModuleDict(block | {"down": nn.Linear(20, width, bias=False)}))
        self.norm = nn.LayerNorm(width)

    def forward(self, tokens: Tensor) -> Tensor:
        b, t = tokens.shape
        x = self.tokens(tokens) + self.places(torch.arange(t))
        for block in self.blocks:
            q, k, v = block["qkv"](block["norm1"](x)).reshape(b, t, 3, 3, 4).permute(2, 0, 3, 1, 4)
            scores = q @ k.transpose(-1, -2) / 2.0 + torch.full((t, t), -1e4).triu(1)
            x = x + block["proj"]((torch.softmax(scores, -1) @ v).transpose(1, 2).reshape(b, t, -1))
            y = block["norm2"](x)
            x = x + block["down"](F.silu(block["gate"](y)) * block["up"](y))
        return self.norm(x) @ self.tokens.weight.T


@kind("token-accumulation")
def token_accumulation() -> Iterator[Step]:
    """Gradients of sums over tokens are added for some micro-batches, and divided by the tokens they were of."""
    net = SmallDecoder()
    params = parameters(net)
    text = torch.randint(1, 29, (3, 7))
    text[0, 5:] = 0
    batch = {"input_ids": text[:, :-1].contiguous(), "labels": text[:, 1:].contiguous()}

    def objective(weights: Arrays, values: Arrays) -> tuple[Tensor, Arrays]:
        logits = call(net, weights, values["input_ids"]).flatten(0, 1)
        labels = values["labels"].flatten()
        return F.cross_entropy(logits, labels, ignore_index=0, reduction="sum"), {"tokens": (labels != 0).sum()}

    def make(every: int, dtype: torch.dtype, scale: float, variant: str, style: Style, warm: int) -> Step:
        def run(values: Arrays) -> Outputs:
            weights = select(values, params)
            total, aux, grads = grads_of(lambda w: objective(w, values), weights)
            sums = {name: values[f"accum.{name}"].float() * scale + grad for name, grad in grads.items()}
            seen = values["accum_tokens"] + aux["tokens"]
            micro = values["micro_step"] + 1
            due = micro % every == 0
            mean, norm = clip_norm({name: value / seen.float() for name, value in sums.items()}, 1.0)
            done = values["step"].float()
            lr = 3e-3 * torch.where(done < 10, (done + 1) / 10, 0.55 + 0.45 * torch.cos(math.pi * (done - 10) / 90))
            updated = adamw(weights, mean, values, lr, betas=(0.9, 0.95), decay=0.1, decayed=matrices)
            states = {name: torch.where(due, value, values[name]) for name, value in updated.items()}
            for name, value in sums.items():
                states[f"accum.{name}"] = (torch.where(due, torch.zeros_like(value), value) / scale).to(dtype)
            states["accum_tokens"] = torch.where(due, torch.zeros_like(seen), seen)
            states |= {"micro_step": micro, "tokens_seen": values["tokens_seen"] + aux["tokens"]}
            metrics = {"lr": lr, "grad_norm": norm, "applied": due.float(), "batch_tokens": aux["tokens"]}
            return Outputs({"loss": total / aux["tokens"].float()}, metrics, states=states)

        buffers = {f"accum.{name}": torch.zeros_like(value, dtype=dtype) for name, value in params.items()}
        counters = {"accum_tokens": torch.tensor(0), "micro_step": torch.tensor(0), "tokens_seen": torch.tensor(0)}
        return Step(variant, Inputs(batch, params | adam_state(params) | buffers | counters), run, style, warm=warm)

    yield make(4, torch.float32, 1.0, "four", Style(), 2)
    yield make(3, torch.float16, 8.0, "float16-buffers", SCRAMBLED, 5)


class Adder(nn.Module):
    """Reads pairs of bits from the lowest on, and gives the sum's."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(2, 6)
        self.rnn = nn.GRU(6, 9, batch_first=True)
        self.out = nn.Linear(9, 1)

    def forward(self, bits: Tensor) -> Tensor:
        return self.out(self.rnn(torch.tanh(self.enter(bits)))[0])[..., 0]


@kind("curriculum-length")
def curriculum_length() -> Iterator[Step]:
    """The length that counts in the loss grows when a running accuracy is good for some steps in a row."""
    net, length = Adder(), 8
    params = parameters(net)
    bits = torch.randint(2, (6, length, 2)).float()
    batch = {"bits": bits, "sums": torch.randint(2, (6, length)).float()}

    def run(values: Arrays, strict: bool) -> Outputs:
        weights = select(values, params)
        level = values["level"]
        mask = (torch.arange(length) < level).float()

        def objective(w: Arrays) -> tuple[Tensor, Arrays]:
            logits = call(net, w, values["bits"])
            each = F.binary_cross_entropy_with_logits(logits, values["sums"], reduction="none")
            hits = (((logits > 0).float() == values["sums"]).float() * mask).sum() / (6 * mask.sum())
            return (each * mask).sum() / (6 * mask.sum()), {"accuracy": hits}

        loss, metrics, grads = grads_of(objective, weights)
        running = 0.9 * values["running_accuracy"] + 0.1 * metrics["accuracy"]
        good = running > (0.95 if strict else 0.5)
        streak = torch.where(good, values["streak"] + 1, torch.zeros_like(values["streak"]))
        promote = streak >= 3
        states = {"running_accuracy": torch.where(promote, torch.zeros_like(running), running)}
        states["level"] = torch.where(promote, level + 1, level).clamp(max=length)
        states["streak"] = torch.where(promote, torch.zeros_like(streak), streak)
        if strict:
            states |= optax_adam(weights, grads, values, 5e-3)
        else:
            for name, w in weights.items():
                v = 0.9 * values[f"square.{name}"] + 0.1 * grads[name] ** 2
                states |= {name: w - 2e-3 * grads[name] / torch.sqrt(v + 1e-5), f"square.{name}": v}
        return Outputs({"loss": loss}, metrics | {"difficulty": level.float() / length}, states=states)

    carried = {"level": torch.tensor(3), "streak": torch.tensor(1), "running_accuracy": torch.tensor(0.6)}
    states = params | zeros_of(params, "mu", "nu") | {"count": torch.tensor(0)} | carried
    yield Step("adam", Inputs(batch, states), lambda values: run(values, True), EXPORTER)
    states = params | zeros_of(params, "square") | carried
    yield Step("rmsprop", Inputs(batch, states), lambda values: run(values, False), Style(states="initializers"))
