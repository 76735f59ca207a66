"""The gradients of a Keras step, as `tf.GradientTape` gives them to the optimizer."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import tensorflow as tf

from graphscale.files.tensor_files import Arrays
from graphscale.graph.builder import Names

__all__ = ["GradientRecord"]


class GradientRecord:
    """The losses whose gradients a step takes, and these gradients.

    Args:
        given: gradients that the step gets instead, by name; None for its own.

    Attributes:
        losses: a tensor for each call of `GradientTape.gradient`.
        gradients: a tensor for each weight that has a gradient, by the path of the weight: the rows alone where the
            gradient consists of rows and their indices.
    """

    def __init__(self, given: Arrays | None = None) -> None:
        self.losses: list[Any] = []
        self.gradients: dict[str, Any] = {}
        self._given = given
        self._names = Names()

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Record the gradients that are taken inside."""
        original = tf.GradientTape.gradient

        def gradient(tape: Any, target: Any, sources: Any, *args: Any, **kwargs: Any) -> Any:
            self.losses.append(target)
            found = original(tape, target, sources, *args, **kwargs)
            pairs = zip(tf.nest.flatten(sources), tf.nest.flatten(found), strict=True)
            return tf.nest.pack_sequence_as(found, [self._take(*pair) for pair in pairs])

        with mock.patch.object(tf.GradientTape, "gradient", gradient):
            yield

    def _take(self, source: Any, found: Any) -> Any:
        if found is None:
            return None
        name = self._names.reserve(str(getattr(source, "path", getattr(source, "name", "input"))))
        rows = isinstance(found, tf.IndexedSlices)
        self.gradients[name] = found.values if rows else tf.convert_to_tensor(found)
        if self._given is None:
            return found
        value = tf.constant(self._given[name])
        return tf.IndexedSlices(value, found.indices, found.dense_shape) if rows else value
