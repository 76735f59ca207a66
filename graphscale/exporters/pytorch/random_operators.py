"""Random operators of PyTorch as arithmetic on a state: the same numbers in the exported step and in PyTorch.

Operators of ONNX that draw random numbers have no state that a step could carry, and no two runtimes draw the same.
Here each draw is a hash of three whole numbers: the state, which counts steps, the number of the draw within the step,
and the place of the element. The hash has products, sums and remainders only, whose translation to ONNX is exact.
"""

from __future__ import annotations

import math
import random
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["RandomOperators", "generator_states"]

Tensor = Any
_aten = torch.ops.aten
_PRIME = 2**31 - 1
_OFFSET = 0x15A4E35B  # below 2**29: the square of a remainder and it stays below 2**63


def _mixed(x: Tensor) -> Tensor:
    """Mix the bits of whole numbers below the prime; the fifth power permutes the remainders of this prime."""
    for _ in range(2):
        square = x * x % _PRIME
        x = square * square % _PRIME * x % _PRIME + _OFFSET
    return x % _PRIME


def generator_states() -> dict[str, Any]:
    """Return the states of the global generators. No step may draw from them: a trace keeps their numbers."""
    _, numbers, *rest = np.random.get_state()
    return {
        "Python's random": random.getstate(),
        "numpy.random": (np.asarray(numbers).tobytes(), *rest),
        "PyTorch's generator": torch.get_rng_state().numpy().tobytes(),
    }


class RandomOperators(TorchDispatchMode):  # type: ignore[misc]
    """Replaces the random operators of PyTorch in a `with` block.

    Args:
        state: an int64 scalar, another one in each step.

    Attributes:
        draws: number of draws.
        refused: the names of operators that draw, and that are not replaced.
    """

    def __init__(self, state: Tensor) -> None:
        super().__init__()
        self.state, self.draws = state, 0
        self.refused: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name.removeprefix("aten::")
        if (draw := getattr(self, f"_{name}", None)) is not None:
            return draw(*args, **{k: v for k, v in kwargs.items() if k != "generator"})
        if torch.Tag.nondeterministic_seeded in func.tags and not self._is_idle(func, args):
            self.refused.append(str(func))
        return func(*args, **kwargs)

    @staticmethod
    def _is_idle(func: Any, args: Any) -> bool:
        """Return whether attention is called without dropout, or a layer as RReLU outside of training."""
        names = [argument.name for argument in func._schema.arguments]
        places = [names.index(name) for name in ("dropout_p", "training") if name in names]
        return bool(places) and not any(args[place : place + 1] and args[place] for place in places)

    def _uniform_numbers(self, like: Tensor) -> Tensor:
        """Draw float32 numbers from (0, 1] of the shape of a tensor."""
        self.draws += 1
        key = _mixed((self.state * 1_000_003 + self.draws * 2_147_001_325) % _PRIME)
        places = torch.arange(like.numel(), dtype=torch.int64, device=like.device)
        drawn = _mixed((places * 48_271 + key) % _PRIME)
        return ((drawn.to(torch.float32) + 0.5) * (1.0 / _PRIME)).reshape(like.shape)

    def _normal_numbers(self, like: Tensor) -> Tensor:
        """Draw float32 numbers of the standard normal distribution (Box and Muller)."""
        radius = (-2.0 * self._uniform_numbers(like).log()).sqrt()
        return radius * (2.0 * math.pi * self._uniform_numbers(like)).cos()

    def _native_dropout(self, x: Tensor, p: float, train: bool | None) -> Any:
        if train is False or p == 0:
            return x, torch.ones_like(x, dtype=torch.bool)
        if p == 1:
            return torch.zeros_like(x), torch.zeros_like(x, dtype=torch.bool)
        mask = self._bernoulli(x, 1 - p)  # PyTorch calls either operator
        return x * (mask / (1 - p)), mask.to(torch.bool)

    def _bernoulli(self, x: Tensor, p: float | None = None) -> Tensor:
        return (self._uniform_numbers(x) < (x if p is None else p)).to(x.dtype)

    def _bernoulli_(self, x: Tensor, p: Any = 0.5) -> Tensor:
        return x.copy_(self._uniform_numbers(x) < p)

    def _uniform_(self, x: Tensor, low: float = 0.0, high: float = 1.0) -> Tensor:
        return x.copy_(self._uniform_numbers(x) * (high - low) + low)

    def _normal_(self, x: Tensor, mean: float = 0.0, std: float = 1.0) -> Tensor:
        return x.copy_(self._normal_numbers(x) * std + mean)

    def _exponential_(self, x: Tensor, lambd: float = 1.0) -> Tensor:
        return x.copy_(-self._uniform_numbers(x).log() / lambd)

    def _rand_like(self, x: Tensor, **options: Any) -> Tensor:
        return self._uniform_numbers(x).to(options.get("dtype") or x.dtype)

    def _randn_like(self, x: Tensor, **options: Any) -> Tensor:
        return self._normal_numbers(x).to(options.get("dtype") or x.dtype)

    def _rand(self, size: Any, **options: Any) -> Tensor:
        return self._uniform_numbers(torch.empty(size)).to(options.get("dtype") or torch.get_default_dtype())

    def _randn(self, size: Any, **options: Any) -> Tensor:
        return self._normal_numbers(torch.empty(size)).to(options.get("dtype") or torch.get_default_dtype())
