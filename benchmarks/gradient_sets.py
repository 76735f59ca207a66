"""Training steps that are little more than their gradients: square weights, small batches, plain SGD."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
from graphs import variable
from tape import Tape

__all__ = ["Arrays", "GradientSet"]

Arrays = dict[str, np.ndarray]

BATCH = 8
RATE = 0.01


class GradientSet:
    """A step of a linear network with softmax cross-entropy.

    Args:
        count: of weights.
        width: weights are float32 [width, width].
        tied: use each weight twice. Then its gradient is a sum of two contractions: gs.Session, which knows the bound
            of one, must unscale and test the sum itself.
        constant_rate: the learning rate is a constant of the graph, no input.
    """

    def __init__(self, count: int, width: int, *, tied: bool, constant_rate: bool) -> None:
        self._width, self._tied, self._constant_rate = width, tied, constant_rate
        self._names = [f"weight{i}" for i in range(count)]

    def model(self) -> ir.Model:
        """The step: x [8, width] and targets [8] to the loss and the next weights."""
        tape, square = Tape(), (self._width, self._width)
        x, targets = variable("x", (BATCH, self._width)), variable("targets", (BATCH,), ir.DataType.INT64)
        rate = tape.number(RATE) if self._constant_rate else variable("learning_rate", ())
        weights = [variable(name, square) for name in self._names]
        y = x
        for weight in weights * (2 if self._tied else 1):
            y = tape.logits(y, weight)
        loss, change = tape.cross_entropy(y, targets)
        loss.name = "loss"
        cotangents = {y: change}
        tape.backward(cotangents)
        outputs = []
        for weight in weights:
            step = tape.op("Mul", cotangents[weight], rate, shape=square)
            outputs.append(tape.op("Sub", weight, step, shape=square))
            outputs[-1].name = f"{weight.name}.next"
        fed = [x, targets, *([] if self._constant_rate else [rate])]
        graph = ir.Graph(
            [*fed, *weights],
            [loss, *outputs],
            nodes=tape.build.nodes,
            initializers=list(tape.constants.values()),
            opset_imports={"": 20},
            name="gradient_set",
        )
        return ir.Model(graph, ir_version=10, producer_name="gradient_sets")

    def weights(self) -> Arrays:
        """The first weights."""
        random, width = np.random.default_rng(0), self._width
        deviation = np.float32(width**-0.5)
        return {name: deviation * random.standard_normal((width, width), np.float32) for name in self._names}

    def batches(self, count: int) -> list[Arrays]:
        """What is fed, in turn."""
        random, found = np.random.default_rng(1), []
        for _ in range(count):
            batch = {
                "x": random.standard_normal((BATCH, self._width), np.float32),
                "targets": random.integers(self._width, size=BATCH),
            }
            found.append(batch if self._constant_rate else batch | {"learning_rate": np.array(RATE, np.float32)})
        return found
