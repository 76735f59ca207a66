"""Random operands and attributes, and the recipes that make nodes of them."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import numpy as np
import onnx

from tests.operators.values import Data

T = TypeVar("T")


@dataclasses.dataclass
class Call:
    """One node: see the arguments of `make_case`."""

    operands: list[Data | None]
    attributes: dict[str, Any] = dataclasses.field(default_factory=dict)
    outputs: int = 1
    captured: dict[str, Data] = dataclasses.field(default_factory=dict)
    results: list[Data] = dataclasses.field(default_factory=list)


class Draw:
    """Random choices for one node.

    Attributes:
        choices: source of the choices.
        op: the operator.
        opset: the version of ai.onnx.
        dtype: the type of the floating-point operands.
        words: the words that were there to choose from for attributes.
    """

    def __init__(self, choices: random.Random, operator: tuple[str, str], opset: int) -> None:
        self.choices, self.op, self.opset = choices, operator[1], opset
        self.words: set[str] = set()
        # Few of ONNX Runtime's own operators have float16 kernels for a CPU.
        others = [] if operator[0] else [np.float64, np.float16]
        self.dtype: Any = choices.choice([np.float32] * 6 + others)

    def pick(self, *options: T) -> T:
        """Choose one of the options."""
        return self.choices.choice(options)

    def chance(self, percent: int = 50) -> bool:
        """Return true so often."""
        return self.choices.randrange(100) < percent

    def size(self, low: int = 1, high: int = 4) -> int:
        """Choose a number, both ends included."""
        return self.choices.randint(low, high)

    def shape(self, low: int = 0, high: int = 4, *, empty: bool = True) -> tuple[int, ...]:
        """Choose a shape with so many axes; now and then one of them is empty."""
        shape = [self.size() for _ in range(self.size(low, high))]
        if empty and shape and self.chance(10):
            shape[self.choices.randrange(len(shape))] = 0
        return tuple(shape)

    def image(self, rank: int | None = None, least: int = 4) -> tuple[int, ...]:
        """Choose a batch, channels and one to three spatial axes."""
        spatial = rank if rank is not None else self.pick(1, 2, 2, 3)
        return (self.size(1, 2), self.size(1, 3), *(self.size(least, least + 3) for _ in range(spatial)))

    def floats(self, shape: Iterable[int], *, positive: bool = False, dtype: Any = None) -> np.ndarray:
        """Draw multiples of 1/8, no zeros: sums of a few products of them are exact in each type."""
        eighths = self._generator().integers(1, 33, tuple(shape))
        signs = 1 if positive else self._generator().choice([-1, 1], eighths.shape)
        return np.asarray(eighths * signs / 8, dtype or self.dtype)

    def integers(self, low: int, high: int, shape: Iterable[int], dtype: Any = np.int64) -> np.ndarray:
        """Draw integers, `high` excluded."""
        shape = tuple(shape)
        return np.asarray(self._generator().integers(low, max(high, low + 1), shape), dtype)

    def booleans(self, shape: Iterable[int]) -> np.ndarray:
        """Draw truth values."""
        return np.asarray(self._generator().integers(0, 2, tuple(shape)), np.bool_)

    def axis(self, rank: int) -> int:
        """Choose an axis, from the front or from the back."""
        return self.choices.randrange(-rank, rank)

    def axes(self, rank: int, low: int = 1) -> list[int]:
        """Choose some axes, from the front or from the back."""
        chosen = sorted(self.choices.sample(range(rank), self.size(min(low, rank), rank)))
        return [axis - rank if self.chance(30) else axis for axis in chosen]

    def broadcast(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Choose a shape that can be broadcast to another."""
        kept = shape[self.size(0, len(shape)) :] if self.chance(40) else shape
        return tuple(1 if self.chance(20) else dim for dim in kept)

    def word(self, *words: str) -> str:
        """Choose one of the words that an attribute may have."""
        self.words.update(words)
        return self.pick(*words)

    def options(self, **attributes: Sequence[Any]) -> dict[str, Any]:
        """Choose a value for each attribute, or leave it out."""
        self.words.update(value for values in attributes.values() for value in values if isinstance(value, str))
        return {name: self.pick(*values) for name, values in attributes.items() if not self.chance(25)}

    def _generator(self) -> np.random.Generator:
        return np.random.default_rng(self.choices.getrandbits(32))


Recipe = Callable[[Draw], Call]
RECIPES: dict[tuple[str, str], Recipe] = {}


def recipe(names: str, domain: str = "") -> Callable[[Recipe], Recipe]:
    """Enter a recipe for these operators."""

    def enter(function: Recipe) -> Recipe:
        for name in names.split():
            assert (domain, name) not in RECIPES, name
            RECIPES[domain, name] = function
        return function

    return enter


def onnx_type(dtype: Any) -> int:
    """Return the number that ONNX has for a type."""
    return int(onnx.helper.np_dtype_to_tensor_dtype(np.dtype(dtype)))
