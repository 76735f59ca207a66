"""A GPT-like training step: decoder blocks, tied embedding, cross-entropy, backward pass, clipping, AdamW.

Layer norm and GELU are spelled out, the backward pass reads what the forward pass has saved, and the gradients are
clipped by their global norm. Every weight has two moments; all of them are graph inputs with an initializer, in the
file of the model or in one beside it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnx_ir as ir
from graphs import constant, variable
from tape import Tape

__all__ = ["Size", "blocks_for", "gpt_step"]

BETA1, BETA2, EPSILON, DECAY, LARGEST_NORM = 0.9, 0.95, 1e-8, 0.1, 1.0
DEVIATION = 0.02  # of the weights at first


@dataclasses.dataclass(frozen=True)
class Size:
    """The size of a model.

    Attributes:
        blocks: number of decoder blocks.
        width: of the residual stream; a multiple of `heads`.
        heads: of the attention.
        context: tokens in a sequence.
        vocabulary: number of tokens.
        batch: sequences in a batch.
    """

    blocks: int
    width: int = 16
    heads: int = 2
    context: int = 8
    vocabulary: int = 32
    batch: int = 2

    @property
    def rows(self) -> int:
        """Tokens in a batch."""
        return self.batch * self.context

    def weights(self) -> dict[str, tuple[int, ...]]:
        """The shapes of all weights by name."""
        width, shapes = self.width, {"token_embedding": (self.vocabulary, self.width)}
        shapes["position_embedding"] = (self.context, width)
        for i in range(self.blocks):
            for layer, inner, outer in (
                *((name, width, width) for name in ("query", "key", "value", "projection")),
                ("expand", width, 4 * width),
                ("contract", 4 * width, width),
            ):
                shapes[f"block{i}.{layer}.weight"] = (inner, outer)
                shapes[f"block{i}.{layer}.bias"] = (outer,)
            shapes |= {f"block{i}.norm{n}.{part}": (width,) for n in (1, 2) for part in ("gain", "bias")}
        return shapes | {"norm.gain": (width,), "norm.bias": (width,)}


def blocks_for(nodes: int) -> int:
    """Return the number of blocks in a graph of about so many nodes."""
    one, two = (len(gpt_step(Size(blocks)).graph) for blocks in (1, 2))
    return max(1, round((nodes - 2 * one + two) / (two - one)))


def gpt_step(size: Size, weights: Path | None = None) -> ir.Model:
    """The training step of a GPT of this size.

    Args:
        size: its size.
        weights: a file to put weights, moments and the mask into, which the model then refers to; None to keep them in
            the model.
    """
    tape, store = Tape(), _Store(weights)
    shapes = size.weights()
    states = {name: store.add(name, shape) for name, shape in shapes.items()}
    moments = {name: [store.add(f"{name}.moment{i}", shape) for i in (1, 2)] for name, shape in shapes.items()}
    tokens, targets = (variable(name, (size.rows,), ir.DataType.INT64) for name in ("tokens", "targets"))
    rate, count = variable("learning_rate", ()), variable("step", ())
    mask = np.triu(np.full((size.context, size.context), -np.inf, np.float32), 1)
    tape.constants["mask"] = store.keep("mask", mask)

    loss, cotangents = _forward(tape, size, states, tokens, targets)
    tape.backward(cotangents)
    next_count = tape.op("Add", count, tape.number(1), shape=())
    updated = _adamw(tape, states, moments, cotangents, rate, next_count)
    outputs = {"loss": loss, "step.next": next_count, **updated}
    for name, value in outputs.items():
        value.name = name
    kept = [*states.values(), *(moment for pair in moments.values() for moment in pair)]
    graph = ir.Graph(
        [tokens, targets, rate, count, *kept],
        list(outputs.values()),
        nodes=tape.build.nodes,
        initializers=[*tape.constants.values(), *kept],
        opset_imports={"": 20},
        name="gpt_like",
    )
    return ir.Model(graph, ir_version=10, producer_name="gpt_like")


def _forward(
    tape: Tape, size: Size, states: Mapping[str, ir.Value], tokens: ir.Value, targets: ir.Value
) -> tuple[ir.Value, dict[ir.Value, ir.Value]]:
    """The loss, and the cotangent to begin with."""
    rows, width = size.rows, size.width
    table, positions = states["token_embedding"], states["position_embedding"]
    x = tape.view(tape.embed(table, tokens, rows), (size.batch, size.context, width))
    x = tape.view(tape.add_rows(x, positions), (rows, width))
    for i in range(size.blocks):
        block = {name.removeprefix(f"block{i}."): v for name, v in states.items() if name.startswith(f"block{i}.")}
        x = tape.add(x, _attention(tape, size, block, tape.layer_norm(x, block["norm1.gain"], block["norm1.bias"])))
        y = tape.layer_norm(x, block["norm2.gain"], block["norm2.bias"])
        y = tape.gelu(tape.linear(y, block["expand.weight"], block["expand.bias"]))
        x = tape.add(x, tape.linear(y, block["contract.weight"], block["contract.bias"]))
    logits = tape.logits(tape.layer_norm(x, states["norm.gain"], states["norm.bias"]), table)
    loss, cotangent = tape.cross_entropy(logits, targets)
    return loss, {logits: cotangent}


def _attention(tape: Tape, size: Size, block: Mapping[str, ir.Value], x: ir.Value) -> ir.Value:
    """Causal self-attention on x [rows, width]."""
    inner = size.width // size.heads
    split = (size.batch, size.context, size.heads, inner)

    def heads(layer: str, perm: list[int]) -> ir.Value:
        projected = tape.linear(x, block[f"{layer}.weight"], block[f"{layer}.bias"])
        return tape.transpose(tape.view(projected, split), perm)

    query, key, value = heads("query", [0, 2, 1, 3]), heads("key", [0, 2, 3, 1]), heads("value", [0, 2, 1, 3])
    scores = tape.causal_softmax(tape.matmul(query, key), tape.constants["mask"], 1 / math.sqrt(inner))
    mixed = tape.transpose(tape.matmul(scores, value), [0, 2, 1, 3])
    mixed = tape.view(mixed, (size.rows, size.width))
    return tape.linear(mixed, block["projection.weight"], block["projection.bias"])


def _adamw(
    tape: Tape,
    states: Mapping[str, ir.Value],
    moments: Mapping[str, list[ir.Value]],
    cotangents: Mapping[ir.Value, ir.Value],
    rate: ir.Value,
    count: ir.Value,
) -> dict[str, ir.Value]:
    """The next weights and moments, by the names of the outputs to be; gradients are clipped by their global norm."""
    number = tape.number

    def op(op_type: str, *inputs: ir.Value) -> ir.Value:
        shape = max((tuple(value.shape) for value in inputs), key=len)
        return tape.op(op_type, *inputs, shape=shape)

    gradients = [cotangents[state] for state in states.values()]
    squares = [tape.op("ReduceSum", op("Mul", g, g), shape=(), keepdims=0) for g in gradients]
    norm = op("Sqrt", op("Sum", *squares))
    clip = op("Min", op("Div", number(LARGEST_NORM), op("Add", norm, number(1e-6))), number(1))
    rest1, rest2 = (op("Sub", number(1), op("Pow", number(beta), count)) for beta in (BETA1, BETA2))
    decay = op("Sub", number(1), op("Mul", rate, number(DECAY)))
    found = {}
    for (name, weight), gradient in zip(states.items(), gradients, strict=True):
        g, (first, second) = op("Mul", gradient, clip), moments[name]
        first = op("Add", op("Mul", first, number(BETA1)), op("Mul", g, number(1 - BETA1)))
        second = op("Add", op("Mul", second, number(BETA2)), op("Mul", op("Mul", g, g), number(1 - BETA2)))
        root = op("Add", op("Sqrt", op("Div", second, rest2)), number(EPSILON))
        step = op("Mul", op("Div", op("Div", first, rest1), root), rate)
        found[f"{name}.next"] = op("Sub", op("Mul", weight, decay), step)
        found[f"{name}.moment1.next"], found[f"{name}.moment2.next"] = first, second
    return found


class _Store:
    """Keeps arrays in the model, or in a file beside it."""

    def __init__(self, path: Path | None) -> None:
        self._random, self._path = np.random.default_rng(0), path
        if path is not None:
            path.write_bytes(b"")

    def add(self, name: str, shape: tuple[int, ...]) -> ir.Value:
        """A weight or a moment with plausible numbers."""
        array = DEVIATION * self._random.standard_normal(shape, np.float32)
        if name.endswith("gain"):
            array += 1
        elif name.endswith(".moment2"):
            array *= array
        return self.keep(name, array)

    def keep(self, name: str, array: np.ndarray) -> ir.Value:
        """An initializer with these numbers."""
        if self._path is None:
            return constant(name, array)
        with self._path.open("ab") as file:
            offset = file.tell()
            file.write(array.tobytes())
        value = variable(name, array.shape)
        value.const_value = ir.ExternalTensor(
            self._path.name,
            offset,
            array.nbytes,
            ir.DataType.FLOAT,
            shape=ir.Shape(array.shape),
            name=name,
            base_dir=self._path.parent,
        )
        return value
