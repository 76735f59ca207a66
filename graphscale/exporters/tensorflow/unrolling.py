"""Recurrent layers without loops, whose gradients have no ONNX equivalent."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import keras

__all__ = ["unrolled"]


@contextlib.contextmanager
def unrolled(model: Any) -> Iterator[list[str]]:
    """Let recurrent layers write their time steps one after the other.

    Yields:
        The names of the layers.
    """
    layers = [layer for layer in model._flatten_layers() if isinstance(layer, keras.layers.RNN) and not layer.unroll]
    for layer in layers:
        layer.unroll = True
    try:
        yield [layer.name for layer in layers]
    finally:
        for layer in layers:
            layer.unroll = False
