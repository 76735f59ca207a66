"""Random small training graphs: forward pass, loss, backward pass in an exporter's manner, optimizer, metrics."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Callable
from typing import Any

import numpy as np
from hypothesis import assume
from hypothesis.vendor.pretty import RepresentationPrinter

import graphscale as gs
from tests.tape.losses import random_loss
from tests.tape.optimizers import random_metrics, random_optimizer
from tests.tape.render import Presentation, Rendered, render
from tests.tape.trace import Style, Tape, Var


@dataclasses.dataclass(frozen=True, repr=False)
class Step:
    """A training graph, and what is known of it from how it was made.

    Attributes:
        tape: its nodes and leaves.
        loss: the loss.
        outputs: all outputs, the loss first.
        gradients: `{weight: gradient}` of all trained weights.
        carried: `{present value: next value}`.
    """

    tape: Tape
    loss: Var
    outputs: tuple[Var, ...]
    gradients: dict[Var, Var]
    carried: dict[Var, Var]

    def __repr__(self) -> str:
        return f"Step({self.tape.style}, {len(self.tape.nodes)} nodes)"

    def _repr_pretty_(self, printer: RepresentationPrinter, cycle: bool) -> None:
        printer.text(repr(self))  # Else hypothesis prints every field of every value.

    def render(self, how: Presentation) -> Rendered:
        """Write it as a model."""
        return render(self.tape.nodes, self.leaves, self.outputs, how)

    @property
    def leaves(self) -> list[Var]:
        """The inputs, weights and states that something reads: an unread input might be a moment, and is refused."""
        read = {value for node in self.tape.nodes for value in node.inputs} | set(self.carried)
        return [value for value in self.tape.leaves if value in read]

    def sample(self, rendered: Rendered) -> dict[str, np.ndarray]:
        """A value for every input of the model without an initializer."""
        kept = {tensor.name for tensor in rendered.model.graph.initializer}
        return {rendered.names[v]: numbers_of(v) for v in self.leaves if rendered.names[v] not in kept}

    def answers(self, rendered: Rendered) -> dict[str, Any]:
        """The roles of the outputs that graphscale asks about, as the content of a roles file; mostly nothing."""
        names = rendered.names
        states = {names[following]: names[present] for present, following in self.carried.items()}
        gradients = {names[gradient] for gradient in self.gradients.values()}
        asked = [entry.name for entry in gs.roles(rendered.model).open]
        return {
            "states": {name: states[name] for name in asked if name in states},
            "gradients": [name for name in asked if name in gradients],
            "losses": [name for name in asked if name == names[self.loss]],
            "metrics": [name for name in asked if name not in {*gradients, *states, names[self.loss]}],
        }

    def is_tame(self) -> bool:
        """Return whether all numbers stay far from overflow and underflow, also when multiplied by the loss scale."""
        arrays = [node.output.array for node in self.tape.nodes if node.output.array.dtype.kind == "f"]
        sizes = np.abs(np.concatenate([np.ravel(a) for a in arrays]))
        return bool(np.isfinite(sizes).all() and sizes.max() < 1e12 and sizes[sizes > 0].min() > 1e-20)


def numbers_of(value: Var) -> np.ndarray:
    """The numbers of a leaf, in the dtype of the model."""
    return value.array.astype(np.float32) if value.array.dtype.kind == "f" else value.array


def differentiated(tape: Tape) -> tuple[Var, Var, dict[Var, Var]]:
    """Write a random network, its loss and the backward pass; returns prediction, loss, and `{weight: gradient}`."""
    network = _Network(tape)
    prediction = network.predict(tape.choices.randint(1, 6))
    trained = [w for w in network.weights if w.needs]
    loss = random_loss(tape, prediction, trained, network.pool)
    tape.backward(loss)
    return prediction, loss, {w: computed(tape, tape.cotangents[w]) for w in trained if w in tape.cotangents}


def random_step(
    choices: random.Random,
    differentiate: Callable[[Tape], tuple[Var, Var, dict[Var, Var]]] = differentiated,
    follow: Callable[[Tape, dict[Var, Var]], dict[Var, Var]] | None = None,
) -> Step:
    """Make a step.

    Args:
        choices: a source of choices.
        differentiate: writes the forward and the backward pass, as `differentiated` does.
        follow: writes what follows for `{weight: gradient}`, and returns the carried state; by default, a random
            optimizer in half of the steps.
    """
    style = Style(
        seed=choices.choice(("one", "folded", "simplified")),
        sums=choices.choice(("Add", "Sum")),
        transposed_gemm=choices.choice((False, True)),
        recompute=choices.choice(("none", "none", "some", "all")),
    )
    tape = Tape(choices, np.random.default_rng(choices.getrandbits(32)), style)
    prediction, loss, gradients = differentiate(tape)
    # With an optimizer behind it, nothing tells a gradient in a graph without any contraction.
    follows = tape.contractions and (follow or tape.flag())
    carried = (follow or random_optimizer)(tape, gradients) if follows else {}
    outputs = [loss, *carried.values()]
    if not carried or tape.flag(6):
        outputs += gradients.values()
    outputs += random_metrics(tape, prediction, loss, list(gradients.values()))
    return Step(tape, loss, tuple(dict.fromkeys(outputs)), gradients, carried)


def tame_step(choices: random.Random) -> Step:
    """Make a step of tame numbers and with at least one gradient, for a test that hypothesis runs."""
    step = random_step(choices)
    assume(step.gradients and step.is_tame())
    return step


def random_presentation(choices: random.Random, step: Step) -> Presentation:
    """A way to write a step down."""
    # A scalar initializer that is no input is a constant, and no counter.
    alone = all(value.shape for value in step.carried)
    return Presentation(
        seed=choices.getrandbits(32),
        shuffled=choices.choice((False, True)),
        names=choices.choice(("plain", "random", "tempting")),
        constants=choices.choice(("shared", "copies", "nodes")),
        weights=choices.choice(("input", "both", "initializer") if alone else ("input", "both")),
        value_info=choices.choice((True, True, False)),
        opset=choices.choice((20, 17, 18, 21)),
    )


def computed(tape: Tape, gradient: Var) -> Var:
    """A gradient as a value that a node computes, and none of the forward pass."""
    if gradient.node is None or gradient in tape.forward:
        return tape.op("Identity", gradient)
    return gradient


class _Network:
    """A random forward pass; the pool holds its matrices, a row for each sample."""

    def __init__(self, tape: Tape) -> None:
        self.tape = tape
        self.choices = tape.choices
        self.weights: list[Var] = []
        self.rows = self.choices.randint(2, 4)
        self.pool: list[Var] = []
        columns = self.choices.randint(2, 4)
        if tape.flag(4):
            table = self.weight(self.choices.randint(2, 5), columns)
            ids = tape.leaf(tape.numbers.integers(0, table.shape[0], self.rows), "input")
            self.pool.append(tape.op("Gather", table, ids, axis=0))
        else:
            self.pool.append(tape.leaf(tape.numbers.normal(size=(self.rows, columns)), "input"))

    def predict(self, layers: int) -> Var:
        """The prediction of a network of so many layers; it depends on a trained weight."""
        kinds: list[Callable[[Var], Var]] = [
            *(self.dense, self.activation, self.residual, self.gated, self.norm, self.attention),
            *(self.elementwise, self.moved, self.cut, self.masked, self.gathered, self.normalised),
        ]
        first = self.pool[0]
        self.pool.append(self.dense(first) if not first.needs or self.tape.flag() else first)
        for _ in range(layers):
            y = self.choices.choice(kinds)(self.pool[-1])
            self.pool.append(self.tape.op("Tanh", y) if y.largest > 8 else y)
        y = self.pool[-1]
        if not y.needs or self.tape.flag():
            y = self.dense(y, trained=True)
        self.pool = [v for v in self.pool if v.needs] or [y]
        return y

    def weight(self, *shape: int, trained: bool | None = None) -> Var:
        """A weight, trained or frozen, sometimes one that is in use already."""
        shared = [w for w in self.weights if w.shape == shape and (w.needs or not trained)]
        if shared and self.tape.flag():
            return self.choices.choice(shared)
        needs = trained or not self.weights or not self.tape.flag(8)
        array = self.tape.numbers.normal(size=shape) / math.sqrt(shape[0])
        self.weights.append(self.tape.leaf(array, "weight", needs))
        return self.weights[-1]

    def dense(self, x: Var, trained: bool | None = None) -> Var:
        tape, columns = self.tape, self.choices.randint(2, 4)
        spelling = self.choices.randrange(4)
        if spelling == 2:
            return tape.op("Gemm", x, self.weight(x.shape[1], columns, trained=trained), self.weight(columns))
        if spelling == 3:
            weight = self.weight(columns, x.shape[1], trained=trained)
            return tape.op("Gemm", x, weight, self.weight(columns), transB=1)
        weight = self.weight(x.shape[1], columns, trained=trained)
        if tape.flag(4):
            weight = tape.transpose(self.weight(columns, x.shape[1], trained=trained))
        y = tape.op("MatMul", x, weight)
        return y if spelling else tape.op("Add", y, self.weight(columns))

    def activation(self, x: Var) -> Var:
        tape = self.tape
        kind = self.choices.randrange(8)
        if kind == 4:
            inner = tape.op("Erf", tape.op("Div", x, math.sqrt(2.0)))
            return tape.mul(tape.mul(x, 0.5), tape.op("Add", inner, 1.0))
        if kind == 5:
            return tape.mul(x, tape.op("Sigmoid", x))
        if kind == 6:
            return tape.op("Exp", tape.op("Tanh", x) if x.largest > 2 else x)
        if kind == 7:
            return tape.op("Clip", x, -0.7, 0.7)
        return tape.op(("Tanh", "Relu", "Sigmoid", "Softplus")[kind], x)

    def residual(self, x: Var) -> Var:
        other = self.choice_like(x)
        return self.tape.op(self.choices.choice(("Add", "Sub", "Sum")), x, self.activation(other))

    def choice_like(self, x: Var) -> Var:
        return self.choices.choice([v for v in self.pool if v.shape == x.shape] or [x])

    def gated(self, x: Var) -> Var:
        other = self.choice_like(x)
        if self.tape.flag():
            return self.tape.mul(x, self.tape.op("Sigmoid", other))
        positive = self.tape.op("Add", self.tape.op("Mul", other, other), 1.0)
        return self.tape.op("Div", x, self.tape.op("Sqrt", positive) if self.tape.flag() else positive)

    def norm(self, x: Var) -> Var:
        """Layer normalization, spelled out."""
        tape = self.tape
        centred = tape.op("Sub", x, tape.reduce("ReduceMean", x, (-1,), keepdims=1))
        variance = tape.reduce("ReduceMean", tape.op("Mul", centred, centred), (-1,), keepdims=1)
        spread = tape.op("Sqrt", tape.op("Add", variance, 0.1))
        y = tape.op("Div", centred, spread)
        if tape.flag(3):
            return y
        return tape.op("Add", tape.mul(y, self.weight(x.shape[1])), self.weight(x.shape[1]))

    def attention(self, x: Var) -> Var:
        tape, heads = self.tape, self.choices.choice((1, 1, 2))
        width = 2 * heads
        q, k, v = (tape.op("MatMul", x, self.weight(x.shape[1], width)) for _ in range(3))
        if heads == 2:
            q, k, v = (self.split(part, heads) for part in (q, k, v))
        scores = tape.mul(tape.op("MatMul", q, tape.transpose(k)), 1.0 / math.sqrt(2.0))
        if tape.flag(3):
            keep = np.tri(self.rows, dtype=bool)
            scores = tape.op("Where", keep, scores, -10.0)
        y = tape.op("MatMul", tape.op("Softmax", scores, axis=-1), v)
        if heads == 2:
            y = tape.op("Reshape", tape.op("Transpose", y, perm=[1, 0, 2]), np.asarray([self.rows, width]))
        return y

    def split(self, x: Var, heads: int) -> Var:
        shape = np.asarray([self.rows, heads, x.shape[1] // heads])
        return self.tape.op("Transpose", self.tape.op("Reshape", x, shape), perm=[1, 0, 2])

    def elementwise(self, x: Var) -> Var:
        kind = self.choices.randrange(4)
        if kind == 0:
            return self.tape.mul(x, self.weight(x.shape[1]))
        if kind == 1:
            return self.tape.op("Neg", x)
        if kind == 2:
            return self.tape.op("Sub", self.weight(x.shape[1]), x)
        return self.tape.mul(x, self.choices.choice((0.5, 2.0, -1.5)))

    def moved(self, x: Var) -> Var:
        """The same numbers in another layout, worked on, and back."""
        tape = self.tape
        if tape.flag():
            y = tape.op("Reshape", x, np.asarray([x.shape[1], x.shape[0]]))
        else:
            y = tape.transpose(x)
        if tape.flag():
            y = tape.op("MatMul", y, self.weight(x.shape[0], x.shape[0]))
        else:
            y = self.activation(y)
        return tape.transpose(y)

    def cut(self, x: Var) -> Var:
        """Two parts of the columns, one of them worked on, put together."""
        if x.shape[1] < 2:
            return self.tape.op("Concat", x, self.choice_like(x), axis=1)
        at = self.choices.randint(1, x.shape[1] - 1)
        bounds = ((0, at), (at, x.shape[1]))
        parts = [self.tape.op("Slice", x, *(np.asarray([b]) for b in (*bound, 1))) for bound in bounds]
        return self.tape.op("Concat", self.activation(parts[0]), parts[1], axis=1)

    def masked(self, x: Var) -> Var:
        kind = self.choices.randrange(3)
        if kind == 0:
            kept = self.tape.numbers.random(x.shape) < 0.8
            return self.tape.mul(x, self.tape.leaf(kept / 0.8, "input"))
        if kind == 1:
            mask = self.tape.leaf(self.tape.numbers.random(x.shape) < 0.5, "input")
            return self.tape.op("Where", mask, x, self.activation(self.choice_like(x)))
        return self.tape.op("Where", self.tape.op("Greater", x, 0.0), x, self.tape.mul(x, 0.1))

    def gathered(self, x: Var) -> Var:
        ids = self.tape.leaf(self.tape.numbers.integers(0, self.rows, self.rows), "input")
        return self.tape.op("Gather", x, ids, axis=0)

    def normalised(self, x: Var) -> Var:
        return self.tape.op(self.choices.choice(("Softmax", "LogSoftmax")), x, axis=-1)
