"""One forward operator with its operands, and the table of all."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from graphscale.operators import MICROSOFT

_SEEDS = itertools.count()
KNOWN, SYMBOLS, UNKNOWN = "known", "symbols", "unknown"


@dataclasses.dataclass(frozen=True)
class Forward:
    """One node of a forward graph; the loss is the sum of its first result times numbers that are fed.

    Attributes:
        op_type: the operator.
        operands: arrays; None for one that is left out.
        torch: PyTorch's form: a function of the module `torch` and the operands; None if there is none.
        attributes: its attributes.
        domain: the operator's domain.
        outputs: number of results.
        constants: the indices of operands that are initializers.
        varied: the indices of operands whose gradients are asked for.
        opset: the version of ai.onnx.
        shapes: shapes of its inputs in the model: the sizes of the axes, symbols for them, or not even their number.
    """

    op_type: str
    operands: tuple[np.ndarray | None, ...]
    torch: Callable[..., Any] | None
    attributes: dict[str, Any]
    domain: str
    outputs: int
    constants: tuple[int, ...]
    varied: tuple[int, ...]
    opset: int
    shapes: str

    @property
    def is_refused(self) -> bool:
        """True for a gradient graph without a standard form.

        Sums over computed axes need opset 13 where the number of axes is not known, and ResizeGrad is linear.
        """
        is_nearest = self.attributes.get("mode") == "nearest"
        return is_nearest or (self.shapes == UNKNOWN and self.opset < 13)

    def feeds(self) -> dict[str, np.ndarray]:
        """The operands that are fed, by name."""
        operands = enumerate(self.operands)
        return {f"x{i}": value for i, value in operands if value is not None and i not in self.constants}


# By a name that says the operator and the variation.
FORWARD: dict[str, Forward] = {}


def forward(
    op_type: str,
    *operands: np.ndarray | None,
    torch: Callable[..., Any] | None = None,
    name: str = "",
    domain: str = "",
    outputs: int = 1,
    constants: Iterable[int] = (),
    varied: Iterable[int] | None = None,
    opset: int = 17,
    shapes: str = KNOWN,
    **attributes: Any,
) -> None:
    """Enter an operator; by default the gradients of all operands of floating point that are fed are asked for."""
    fed = [(i, value) for i, value in enumerate(operands) if value is not None and i not in (*constants,)]
    asked = tuple(i for i, value in fed if value.dtype.kind == "f") if varied is None else (*varied,)
    key = " ".join(filter(None, (op_type, name)))
    assert key not in FORWARD, key
    FORWARD[key] = Forward(op_type, operands, torch, attributes, domain, outputs, (*constants,), asked, opset, shapes)


def microsoft(op_type: str, *operands: np.ndarray | None, **options: Any) -> None:
    """Enter an operator of ONNX Runtime's own."""
    forward(op_type, *operands, domain=MICROSOFT, **options)


def floats(*shape: int, low: float = -2, high: float = 2) -> np.ndarray:
    """Return numbers within bounds, the same in each run, none of them near 0 or equal to another."""
    size = int(np.prod(shape))
    numbers = np.random.default_rng(next(_SEEDS)).permutation(np.linspace(low, high, size + 1)[1:])
    return np.asarray(np.where(np.abs(numbers) < 0.01, 0.05, numbers), np.float32).reshape(shape)


def integers(*numbers: Any) -> np.ndarray:
    """Return int64 numbers."""
    return np.asarray(numbers, np.int64)
