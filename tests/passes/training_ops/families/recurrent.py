"""Recipes of the recurrent operators that keep their gates, and of their gradients."""

from __future__ import annotations

from typing import Any

import numpy as np

from graphscale.passes.lower_training_ops.time_steps import LONGEST
from tests.passes.training_ops.cases import Case
from tests.passes.training_ops.drawing import Draw, recipe


# The kernels abort on an empty batch, and on no steps GRUTraining does as well.
def _sizes(draw: Draw) -> tuple[int, int, int, int]:
    if draw.chance(20):
        return LONGEST + 2, draw.size(1, 2), draw.size(1, 2), draw.size(1, 2)
    return draw.size(1, 5), draw.size(1, 4), draw.size(1, 4), draw.size(1, 5)


def _weights(draw: Draw, shape: tuple[int, ...]) -> np.ndarray:
    return draw.floats(shape) * np.float32(0.3)


def _operands(draw: Draw, gates: int, steps: int, batch: int, width: int, size: int) -> list[np.ndarray]:
    """Draw the sequence, and the weights of all gates for it and for the hidden state."""
    return [draw.floats((steps, batch, width)), *(_weights(draw, (1, gates * size, n)) for n in (width, size))]


def _maybe(draw: Draw, shape: tuple[int, ...]) -> np.ndarray | None:
    return draw.floats(shape) if draw.chance(70) else None


def _options(draw: Draw, size: int, activations: tuple[str, ...], **others: Any) -> dict[str, Any]:
    # The kernels take these names of activations in small letters alone.
    drawn = draw.options(direction=("forward",), activations=([*activations],))
    return {"hidden_size": size, **drawn, **others}


@recipe("LSTMTraining")
def draw_lstm(draw: Draw) -> Case:
    steps, batch, width, size = _sizes(draw)
    operands = [
        *_operands(draw, 4, steps, batch, width, size),
        _maybe(draw, (1, 8 * size)),
        None,
        _maybe(draw, (1, batch, size)),
        _maybe(draw, (1, batch, size)),
        _maybe(draw, (1, 3 * size)),
    ]
    attributes = _options(draw, size, ("sigmoid", "tanh", "tanh"))
    return draw.case(*operands, attributes=attributes, outputs=5, unnamed=draw.pick((), (1,), (1, 2)))


@recipe("GRUTraining")
def draw_gru(draw: Draw) -> Case:
    steps, batch, width, size = _sizes(draw)
    operands = [
        *_operands(draw, 3, steps, batch, width, size),
        _maybe(draw, (1, 6 * size)),
        None,
        _maybe(draw, (1, batch, size)),
    ]
    attributes = _options(draw, size, ("sigmoid", "tanh"), linear_before_reset=draw.pick(0, 1))
    return draw.case(*operands, attributes=attributes, outputs=3, unnamed=draw.pick((), (1,)))


@recipe("LSTMGrad")
def draw_lstm_gradient(draw: Draw) -> Case:
    steps, batch, width, size = _sizes(draw)
    hidden, state = (steps, 1, batch, size), (1, batch, size)
    gates = np.abs(np.tanh(draw.floats((steps, 1, batch, 4 * size))))
    operands = [
        *_operands(draw, 4, steps, batch, width, size),
        None,
        _maybe(draw, state),
        _maybe(draw, state),
        draw.floats(hidden),
        draw.floats(hidden),
        gates,
        *(_maybe(draw, shape) for shape in (hidden, state, state)),
    ]
    unnamed = draw.pick((), (0,), (4,), (3, 5), (6,))
    return draw.case(
        *operands, attributes=_options(draw, size, ("sigmoid", "tanh", "tanh")), outputs=7, unnamed=unnamed
    )


@recipe("GRUGrad")
def draw_gru_gradient(draw: Draw) -> Case:
    steps, batch, width, size = _sizes(draw)
    hidden, state = (steps, 1, batch, size), (1, batch, size)
    gates = np.abs(np.tanh(draw.floats((steps, 1, batch, 3 * size))))
    operands = [
        *_operands(draw, 3, steps, batch, width, size),
        _maybe(draw, (1, 6 * size)),
        None,
        _maybe(draw, state),
        draw.floats(hidden),
        gates,
        *(_maybe(draw, shape) for shape in (hidden, state)),
    ]
    attributes = _options(draw, size, ("sigmoid", "tanh"), linear_before_reset=draw.pick(0, 1))
    return draw.case(*operands, attributes=attributes, outputs=5, unnamed=draw.pick((), (0,), (3,), (4,)))
