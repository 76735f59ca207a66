"""What one training step did, and the same as a row of a metrics file."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

__all__ = ["StepRecord"]

_TELEMETRY = ("cause", "offender", "zero_fraction")
_PREFIX = "output."  # of an output that is called like one of the record's own columns


@dataclasses.dataclass(frozen=True)
class StepRecord:
    """What one step did.

    Attributes:
        step: its number in the run, from 1; skipped steps count.
        epoch: the number of its epoch, from 1.
        loss: the unscaled loss; may be infinite or NaN.
        loss_scale: the loss scale that the step used.
        next_loss_scale: the loss scale that it left for the next one.
        applied: whether its update was applied; else the step was skipped.
        good_steps: good steps in a row after it.
        learning_rate: what was fed; None where the step has no such input.
        cause: "nan" or "inf" where a gradient was not finite; None otherwise, and without telemetry.
        offender: the name of the first gradient that was not finite; None otherwise, and without telemetry.
        zero_fraction: the share of the gradients' elements that were zero, 0 to 1; None without telemetry.
        stuck: whether the loss scale is stuck, for a policy with `on_stuck="flag"`.
        outputs: the other outputs of the step that are single numbers, by name.
    """

    step: int
    epoch: int
    loss: float
    loss_scale: float
    next_loss_scale: float
    applied: bool
    good_steps: int = 0
    learning_rate: float | None = None
    cause: str | None = None
    offender: str | None = None
    zero_fraction: float | None = None
    stuck: bool = False
    outputs: Mapping[str, float] = dataclasses.field(default_factory=dict)

    def to_row(self) -> dict[str, Any]:
        """Return `{column: value}`, in a fixed order; the columns of telemetry only where there is telemetry."""
        row = {name: getattr(self, name) for name in _COLUMNS if name not in _TELEMETRY}
        if self.zero_fraction is not None:
            row |= {name: getattr(self, name) for name in _TELEMETRY}
        return row | {_PREFIX + name if name in _COLUMNS else name: value for name, value in self.outputs.items()}

    @classmethod
    def from_row(cls, row: Mapping[str, Any]) -> StepRecord:
        """The inverse of `to_row`; numbers, booleans and None may be texts, as in a CSV file.

        Raises:
            ValueError: a column is missing, or its value is of another kind. The message names the column.
        """
        known: dict[str, Any] = {}
        for name, (read, optional) in _COLUMNS.items():
            value = row.get(name)
            if value not in (None, ""):
                known[name] = _read(name, value, read)
            elif not optional:
                raise ValueError(f"{name} is missing")
        prefixed = {_PREFIX + name: name for name in _COLUMNS}
        others = {
            prefixed.get(name, name): _read(name, value, _number)
            for name, value in row.items()
            if name not in _COLUMNS and value not in (None, "")
        }
        return cls(**known, outputs=others)


def _read(name: str, value: Any, read: Any) -> Any:
    try:
        return read(value)
    except (TypeError, ValueError, OverflowError):
        raise ValueError(f"{name} is {value!r}") from None


def _number(value: Any) -> float:
    if isinstance(value, bool):
        raise TypeError
    return float(value)  # also "NaN", "Infinity" and "-Infinity"


def _integer(value: Any) -> int:
    number = int(value) if isinstance(value, str) else value
    if isinstance(number, bool) or not isinstance(number, int):
        raise TypeError
    return number


def _flag(value: Any) -> bool:
    flags = {True: True, False: False, "true": True, "false": False}
    if not isinstance(value, bool | str):
        raise TypeError
    try:
        return flags[value]
    except KeyError:
        raise ValueError from None


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError
    return value


# How each column is read, and whether it may be missing or empty.
_COLUMNS: dict[str, tuple[Any, bool]] = {
    "step": (_integer, False),
    "epoch": (_integer, False),
    "loss": (_number, False),
    "loss_scale": (_number, False),
    "next_loss_scale": (_number, False),
    "applied": (_flag, False),
    "good_steps": (_integer, False),
    "learning_rate": (_number, True),
    "cause": (_text, True),
    "offender": (_text, True),
    "zero_fraction": (_number, True),
}
