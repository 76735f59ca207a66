"""The results of a check of gradients, as data."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from graphscale.checks.derivatives.differences import AGREES, DISAGREES, UNSURE, Direction
from graphscale.process.summary import Row, Summary, few

__all__ = ["UNCHECKED", "GradientCheck", "WeightCheck", "count_agreeing", "is_derivative", "judge"]

UNCHECKED = "unchecked"
_VERDICTS = (DISAGREES, AGREES, UNSURE, UNCHECKED)
_SHOWN = 4  # weights
# Ratios of gradients to slopes within this distance are one factor.
_ONE_FACTOR = 1e-2


@dataclasses.dataclass(frozen=True)
class WeightCheck:
    """The check of the gradient of one weight.

    Attributes:
        weight: the name of the input or initializer; None for a gradient without a weight.
        gradient: the name of its gradient, or None.
        verdict: "agrees", "disagrees", "unsure" where differences cannot decide, or "unchecked".
        error: the largest relative error along a direction with a verdict; None without one.
        directions: the comparisons.
        detail: an explanation of the verdict.
    """

    weight: str | None
    gradient: str | None
    verdict: str
    error: float | None = None
    directions: tuple[Direction, ...] = ()
    detail: str = ""


@dataclasses.dataclass(frozen=True, repr=False)
class GradientCheck(Summary):
    """The results of `check_gradients`.

    Attributes:
        loss: the name of the loss.
        dtype: "float64" where ONNX's reference evaluator ran the graph, "float32" where ONNX Runtime did.
        weights: the checks of all weights, and of gradients without a weight.
        notes: facts about the check for the user, a sentence each.
    """

    loss: str
    dtype: str
    weights: tuple[WeightCheck, ...]
    notes: tuple[str, ...] = ()

    def _summarize(self) -> tuple[str, Iterable[Row]]:
        kinds = {verdict: [each for each in self.weights if each.verdict == verdict] for verdict in _VERDICTS}
        rows: list[Row] = []
        for each in kinds[DISAGREES][:_SHOWN]:
            rows.append((each.weight or each.gradient or "?", each.detail or each.verdict))
        for verdict, found in kinds.items():
            if found:
                rows.append((verdict, f"{len(found)}: {few([each.weight or each.gradient for each in found])}"))
        return f"gradients of {self.loss!r} against differences, in {self.dtype}", rows

    @property
    def ok(self) -> bool:
        """True if gradients agree, and none disagrees."""
        return is_derivative(self.weights)

    def count(self, verdict: str) -> int:
        """Return the number of weights with a verdict."""
        return sum(each.verdict == verdict for each in self.weights)

    def to_dict(self) -> dict[str, Any]:
        """Return the results as plain dicts, lists, strings and numbers."""
        return {"ok": self.ok, **dataclasses.asdict(self)}


def is_derivative(checks: Sequence[WeightCheck]) -> bool:
    """Return whether gradients agree with the derivative of a loss, without a contradiction."""
    return count_agreeing(checks) > 0 and not any(each.verdict == DISAGREES for each in checks)


def count_agreeing(checks: Sequence[WeightCheck]) -> int:
    """Return the number of gradients that agree with a derivative, without zeros, which agree with every loss."""
    agreeing = (each for each in checks if each.verdict == AGREES)
    return sum(any(direction.measured for direction in each.directions) for each in agreeing)


def judge(weight: str, gradient: str, directions: tuple[Direction, ...]) -> WeightCheck:
    """Sum up the comparisons along all directions of a weight."""
    verdicts = [each.verdict for each in directions]
    verdict = next((v for v in (DISAGREES, AGREES) if v in verdicts), UNSURE)
    errors = [each.error for each in directions if each.error is not None and each.verdict != UNSURE]
    detail = next((each.reason for each in directions if each.reason), "")
    if verdict == DISAGREES:
        wrong = max((each for each in directions if each.verdict == DISAGREES), key=lambda each: each.error or 0.0)
        ratios = [each.expected / each.measured for each in directions if each.measured]
        if ratios and np.ptp(ratios) <= _ONE_FACTOR * abs(ratios[0]) and abs(ratios[0] - 1) > _ONE_FACTOR:
            detail = f"it is {ratios[0]:.3g} times the derivative"
        else:
            along = "a random direction" if wrong.kind == "random" else "the gradient"
            detail = f"along {along} the loss rises by {wrong.measured:.4g}, the gradient says {wrong.expected:.4g}"
    return WeightCheck(weight, gradient, verdict, max(errors, default=None), directions, detail)
