"""Kinds from the field, text: answers as spans, a language model with adapters."""

import math
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.zoo.pytorch.field_parts import ADAM, Optimizer, adam, clip_norm, lamb, matrices, one_step, zeros
from models.zoo.steps import Arrays, Inputs, Outputs, Step, Style, kind


class Block(nn.Module):
    """A block of a transformer with several heads; the mask is added to the scores."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.ln1, self.ln2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.fc1, self.fc2 = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        b, t, c = x.shape
        q, k, v = self.qkv(self.ln1(x)).view(b, t, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4).unbind(0)
        mixed = torch.softmax(q @ k.transpose(2, 3) / math.sqrt(c // self.heads) + mask, -1) @ v
        x = x + self.proj(mixed.transpose(1, 2).reshape(b, t, c))
        return x + self.fc2(F.gelu(self.fc1(self.ln2(x))))


class SpanReader(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.word_embeddings, self.position_embeddings = nn.Embedding(40, 16), nn.Embedding(10, 16)
        self.segment_embeddings = nn.Embedding(2, 16)
        self.encoder = nn.ModuleList([Block(16, 2), Block(16, 2)])
        self.qa_outputs = nn.Linear(16, 2)

    def forward(self, tokens: Tensor, segments: Tensor, attention_mask: Tensor) -> tuple[Tensor, Tensor]:
        x = (
            self.word_embeddings(tokens)
            + self.position_embeddings(torch.arange(10))
            + self.segment_embeddings(segments)
        )
        mask = (1.0 - attention_mask)[:, None, None, :] * -1e4
        for block in self.encoder:
            x = block(x, mask)
        logits = self.qa_outputs(x) + mask[:, 0, 0, :, None]
        return logits[..., 0], logits[..., 1]


@kind("field-span-answers")
def span_answers() -> Iterator[Step]:
    """Start and end of an answer in a text: LAMB after a warm-up; frozen embeddings and AdamW with a fed rate."""

    def objective(net: Callable, values: Arrays) -> tuple[Tensor, Arrays, Arrays]:
        start, end = net(values["input_ids"], values["token_type_ids"], values["attention_mask"])
        first = F.cross_entropy(start, values["start_positions"])
        last = F.cross_entropy(end, values["end_positions"])
        exact = (start.argmax(1) == values["start_positions"]) & (end.argmax(1) == values["end_positions"])
        return (first + last) / 2, {"start_loss": first, "end_loss": last, "exact_match": exact.float().mean()}, {}

    batch = {"input_ids": torch.randint(40, (3, 10)), "token_type_ids": (torch.arange(10) > 3).long().repeat(3, 1)}
    batch["attention_mask"] = (torch.arange(10) < torch.tensor([[10], [8], [9]])).float()
    batch |= {"start_positions": torch.tensor([4, 5, 6]), "end_positions": torch.tensor([5, 7, 8])}

    def linear(values: Arrays, t: Tensor) -> Tensor:
        return 2e-3 * torch.minimum(t / 20, ((400 - t) / 380).clamp(min=0.0))

    layerwise = Optimizer(lamb, {"m": zeros, "v": zeros}, linear, matrices(0.01), "global_step", "{slot}.{weight}")
    yield one_step("lamb", SpanReader(), batch, objective, layerwise, clip=clip_norm(1.0), loss_name="total_loss")
    fed = {"lr": torch.tensor(5e-4)}
    tuned = Optimizer(adam, ADAM, lambda values, t: values["lr"], matrices(0.01), "step")
    style = Style(names="exporter")
    yield one_step(
        "frozen-embeddings", SpanReader(), batch, objective, tuned, style, fed=fed, frozen=lambda name: "embed" in name
    )


def rms(x: Tensor, scale: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * scale


def decoder(base: Arrays, adapters: Arrays, tokens: Tensor) -> Tensor:
    """Return the logits of a decoder with low-rank adapters beside its queries and values."""
    x = base["embed"][tokens]
    batch, length, width = x.shape
    causal = torch.full((length, length), -1e4).triu(1)

    def adapted(x: Tensor, name: str) -> Tensor:
        return x @ base[name] + 2.0 * (x @ adapters[f"{name}.lora_A"]) @ adapters[f"{name}.lora_B"]

    for layer in ("layers.0", "layers.1"):
        h = rms(x, base[f"{layer}.norm1"])
        q, k, v = adapted(h, f"{layer}.q"), h @ base[f"{layer}.k"], adapted(h, f"{layer}.v")
        q, k, v = (part.view(batch, length, 2, width // 2).transpose(1, 2) for part in (q, k, v))
        mixed = torch.softmax(q @ k.transpose(2, 3) / (width // 2) ** 0.5 + causal, -1) @ v
        x = x + mixed.transpose(1, 2).reshape(batch, length, width) @ base[f"{layer}.o"]
        h = rms(x, base[f"{layer}.norm2"])
        gate = h @ base[f"{layer}.gate"]
        x = x + (gate * torch.sigmoid(gate) * (h @ base[f"{layer}.up"])) @ base[f"{layer}.down"]
    return rms(x, base["norm"]) @ base["embed"].T


def language_weights(vocabulary: int, width: int, hidden: int, rank: int) -> tuple[Arrays, Arrays]:
    base, adapters = {"embed": torch.randn(vocabulary, width) / 4, "norm": torch.ones(width)}, {}
    for layer in ("layers.0", "layers.1"):
        base |= {f"{layer}.norm{i}": 1 + 0.1 * torch.randn(width) for i in (1, 2)}
        base |= {f"{layer}.{name}": torch.randn(width, width) / width**0.5 for name in "qkvo"}
        base |= {f"{layer}.{name}": torch.randn(width, hidden) / width**0.5 for name in ("gate", "up")}
        base[f"{layer}.down"] = torch.randn(hidden, width) / hidden**0.5
        for name in ("q", "v"):
            adapters[f"{layer}.{name}.lora_A"] = torch.randn(width, rank) / width**0.5
            adapters[f"{layer}.{name}.lora_B"] = torch.zeros(rank, width)
    return base, adapters


def lora_step(variant: str, every: int, style: Style) -> Step:
    """Return a step that applies AdamW each time, or the mean of several gradients at once."""
    base, adapters = language_weights(29, 12, 20, 3)
    slots = {f"{name}.{slot}": torch.zeros_like(weight) for name, weight in adapters.items() for slot in ADAM}
    sums = {f"{name}.grad": torch.zeros_like(weight) for name, weight in adapters.items()} if every > 1 else {}
    counters = {"step": torch.tensor(0)} | ({"micro_step": torch.tensor(0, dtype=torch.int32)} if every > 1 else {})

    def objective(weights: Arrays, values: Arrays) -> tuple[Tensor, Arrays]:
        logits = decoder({name: values[name] for name in base}, weights, values["input_ids"][:, :-1])
        labels, real = values["input_ids"][:, 1:], values["loss_mask"][:, 1:]
        each = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view_as(real)
        loss = (each * real).sum() / real.sum().clamp(min=1.0)
        return loss, {"perplexity": torch.exp(loss), "tokens": real.sum()}

    def run(values: Arrays) -> Outputs:
        weights = {name: values[name] for name in adapters}
        grads, (loss, metrics) = torch.func.grad_and_value(objective, has_aux=True)(weights, values)
        states, due = {}, None
        if every > 1:
            grads = {name: values[f"{name}.grad"] + grad / every for name, grad in grads.items()}
            due = (values["micro_step"] + 1) % every == 0
            states["micro_step"] = (values["micro_step"] + 1) % every
            states |= {f"{name}.grad": torch.where(due, 0.0, grad) for name, grad in grads.items()}
        clipped, norm = clip_norm(1.0)(grads)
        t = values["step"] + 1
        following = {"step": t}
        for name, weight in weights.items():
            own = {slot: values[f"{name}.{slot}"] for slot in ADAM}
            following[name], after = adam(weight, clipped[name], own, t.float(), values["lr"], 0.01)
            following |= {f"{name}.{slot}": value for slot, value in after.items()}
        if due is not None:
            following = {name: torch.where(due, value, values[name]) for name, value in following.items()}
        return Outputs({"lm_loss": loss}, metrics | norm, states=following | states)

    batch = {"input_ids": torch.randint(29, (2, 9)), "loss_mask": (torch.rand(2, 9) > 0.2).float()}
    inputs = Inputs(batch, adapters | slots | sums | counters, {"lr": torch.tensor(1e-3)}, base)
    return Step(variant, inputs, run, style, warm=7)


@kind("field-adapted-decoder")
def adapted_decoder() -> Iterator[Step]:
    """A frozen decoder with low-rank adapters: perplexity beside the loss; gradients of four micro-batches at once."""
    yield lora_step("each-step", 1, Style(names="exporter", embedded_constants=True))
    yield lora_step("accumulated", 4, Style())
