"""The edit of a seed and an index: one kind at one place, sometimes two or three."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
from onnx import ModelProto

import benchmarks.edits.attributes
import benchmarks.edits.metadata
import benchmarks.edits.nodes  # noqa: F401
from benchmarks.edits.draw import KINDS, Draw

__all__ = ["Edited", "edit"]

_MORE = 0.1  # the share of edits to which one more is added, and one more


@dataclasses.dataclass(frozen=True)
class Edited:
    """An edited model.

    Attributes:
        model: the model.
        kinds: the kinds of its edits.
        places: their places.
    """

    model: ModelProto
    kinds: tuple[str, ...]
    places: tuple[str, ...]

    @property
    def kind(self) -> str:
        """The kind of the edit, or how many there are."""
        return self.kinds[0] if len(self.kinds) == 1 else "two or three edits"


def edit(model: ModelProto, rng: np.random.Generator, donors: Sequence[ModelProto] = ()) -> Edited:
    """Edit a copy of a model at random; the copy differs.

    Args:
        model: the model.
        rng: the generator: the same state makes the same edit.
        donors: other models, whose parts may be put into the copy.
    """
    names, before = list(KINDS), model.SerializeToString(deterministic=True)
    kinds: list[str] = []
    places: list[str] = []
    wanted = 1 + sum(rng.random(2) < _MORE)
    while len(kinds) < wanted:
        name = names[int(rng.integers(len(names)))]
        copy = ModelProto.FromString(before)
        try:
            where = KINDS[name](Draw(copy, rng, donors))
            after = copy.SerializeToString(deterministic=True)
        except Exception:  # an earlier edit has left nothing that can be read, or the field cannot hold the value
            continue
        if where is not None and after != before:
            kinds.append(name)
            places.append(where)
            before = after
    return Edited(ModelProto.FromString(before), tuple(kinds), tuple(places))
