"""Training steps dominated by their gradients: square weights, small batches, plain SGD."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import onnx_ir as ir
from graphs import constant, variable
from onnx_ir.passes.common import RemoveUnusedNodesPass
from tape import Tape

__all__ = ["KINDS", "Arrays", "GradientSet"]

Arrays = dict[str, np.ndarray]

BATCH = 8
RATE = 1e-3
# The kinds of gradients: contractions; sums of two contractions, of weights that are used twice; contractions times a
# mask, of a pruned network; the same with a mask that is fed, which is as large as the gradient; and contractions whose
# rows are put in another order, without a bound that gs.Session knows. Of the last two it reads the gradients.
KINDS = ("products", "sums", "masked", "fed masks", "ordered")


class GradientSet:
    """A step of a linear network with softmax cross-entropy.

    Args:
        count: of weights.
        width: weights are float32 [width, width].
        kind: of gradients, one of `KINDS`.
        constant_rate: the learning rate is a constant of the graph, no input.
    """

    def __init__(self, count: int, width: int, kind: str, *, constant_rate: bool) -> None:
        self._width, self._kind, self._constant_rate = width, kind, constant_rate
        self._kept = np.random.default_rng(2).random((width, width)) < 0.5
        self._order = np.random.default_rng(3).permutation(width)
        self._names = [f"weight{i}" for i in range(count)]

    def model(self) -> ir.Model:
        """The step: x [8, width] and targets [8] to the loss and the next weights."""
        tape, square = Tape(), (self._width, self._width)
        x, targets = variable("x", (BATCH, self._width)), variable("targets", (BATCH,), ir.DataType.INT64)
        rate = tape.number(RATE) if self._constant_rate else variable("learning_rate", ())
        weights = [variable(name, square) for name in self._names]
        mask = variable("mask", square)
        if self._kind == "masked":
            mask = tape.constants.setdefault("mask", constant("mask", self._kept.astype(np.float32)))
        y = x
        for weight in weights * (2 if self._kind == "sums" else 1):
            used = self._masked(tape, weight, mask) if "mask" in self._kind else weight
            y = tape.logits(y, self._ordered(tape, weight) if self._kind == "ordered" else used)
        loss, change = tape.cross_entropy(y, targets)
        loss.name = "loss"
        cotangents = {y: change}
        tape.backward(cotangents)
        outputs = []
        for weight in weights:
            step = tape.op("Mul", cotangents[weight], rate, shape=square)
            outputs.append(tape.op("Sub", weight, step, shape=square))
            outputs[-1].name = f"{weight.name}.next"
        fed = [x, targets, *([] if self._constant_rate else [rate]), *([mask] if self._kind == "fed masks" else [])]
        graph = ir.Graph(
            [*fed, *weights],
            [loss, *outputs],
            nodes=tape.build.nodes,
            initializers=list(tape.constants.values()),
            opset_imports={"": 20},
            name="gradient_set",
        )
        model = ir.Model(graph, ir_version=10, producer_name="gradient_sets")
        RemoveUnusedNodesPass()(model)  # the cotangent of x
        return model

    def _masked(self, tape: Tape, weight: ir.Value, mask: ir.Value) -> ir.Value:
        """A weight with half of its elements kept at zero."""

        def pull(g: ir.Value) -> Iterable[tuple[ir.Value, ir.Value]]:
            yield weight, tape.op("Mul", g, mask, shape=weight.shape)

        return tape.record(tape.op("Mul", weight, mask, shape=weight.shape), pull)

    def _ordered(self, tape: Tape, weight: ir.Value) -> ir.Value:
        """A weight with its rows in another order."""
        there, back = (
            tape.constants.setdefault(name, constant(name, order))
            for name, order in (("order", self._order), ("order_back", np.argsort(self._order)))
        )

        def pull(g: ir.Value) -> Iterable[tuple[ir.Value, ir.Value]]:
            yield weight, tape.op("Gather", g, back, shape=weight.shape)

        return tape.record(tape.op("Gather", weight, there, shape=weight.shape), pull)

    def weights(self) -> Arrays:
        """The first weights."""
        random, width = np.random.default_rng(0), self._width
        deviation = np.float32(width**-0.5)
        return {name: deviation * random.standard_normal((width, width), np.float32) for name in self._names}

    def batches(self, count: int) -> list[Arrays]:
        """Return the batches, to be fed in turn."""
        random, found, kept = np.random.default_rng(1), [], self._kept.astype(np.float32)
        for _ in range(count):
            batch = {
                "x": random.standard_normal((BATCH, self._width), np.float32),
                "targets": random.integers(self._width, size=BATCH),
            }
            batch |= {} if self._constant_rate else {"learning_rate": np.array(RATE, np.float32)}
            found.append(batch | ({"mask": kept} if self._kind == "fed masks" else {}))
        return found
