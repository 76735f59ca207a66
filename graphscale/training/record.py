"""The record of one training step, and its form as a row of a metrics file."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, get_args, get_type_hints

from graphscale.files.contents import parse_json
from graphscale.policy.names import ScaledValue
from graphscale.session import GradientRange

__all__ = ["StepRecord"]

_TELEMETRY = tuple(v.value for v in (ScaledValue.CAUSE, ScaledValue.OFFENDER, ScaledValue.ZERO_FRACTION))
_SCALES, _NUMBERS = ("loss_scale", "next_loss_scale"), ("step", "epoch", "good_steps")
_ACTIVATION, _RANGES = ScaledValue.ACTIVATION.value, ScaledValue.RANGES.value
_PREFIX = "output."  # for an output with the name of a column of the record


@dataclasses.dataclass(frozen=True)
class StepRecord:
    """The record of one step.

    Attributes:
        step: its number in the run, from 1; skipped steps count.
        epoch: the number of its epoch, from 1.
        loss: the unscaled loss; may be infinite or NaN.
        loss_scale: the loss scale of the step.
        next_loss_scale: the loss scale of the next step.
        applied: True if its update was applied; else the step was skipped.
        good_steps: good steps in a row after the step.
        learning_rate: the fed learning rate; None for a step without such an input.
        cause: "nan" or "inf" after a non-finite gradient; None otherwise, and without telemetry.
        offender: the name of the first gradient that was not finite; None otherwise, and without telemetry.
        zero_fraction: the share of the gradients' elements that were zero, 0 to 1; None without telemetry.
        activation: the name of the first value of the forward pass that was not finite, empty for none; None without
            telemetry of activations.
        ranges: the ranges of the gradients by name, if the step measured them, else empty; None without telemetry of
            ranges.
        stuck: True if the run ends since the loss scale is stuck, for a policy with `on_stuck` "flag" or "stop".
        outputs: other outputs of the step that are single numbers, by name.
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
    activation: str | None = None
    ranges: Mapping[str, GradientRange] | None = None
    stuck: bool = False
    outputs: Mapping[str, float] = dataclasses.field(default_factory=dict)

    def to_row(self) -> dict[str, Any]:
        """Return `{column: value}`, in a fixed order, with columns of telemetry only for a step with telemetry."""
        row = {name: getattr(self, name) for name in _COLUMNS if name not in _TELEMETRY}
        if self.zero_fraction is not None:
            row |= {name: getattr(self, name) for name in _TELEMETRY}
        if self.activation is not None:
            row[_ACTIVATION] = self.activation or None
        if self.ranges is not None:
            row[_RANGES] = {name: each._asdict() for name, each in self.ranges.items()} or None
        return row | {_PREFIX + name if name in _OWN else name: value for name, value in self.outputs.items()}

    @classmethod
    def from_row(cls, row: Mapping[str, Any]) -> StepRecord:
        """Make the record of a row; numbers, booleans and None may be texts, as in a CSV file.

        Raises:
            ValueError: a column is missing, or its value is of another kind or out of range; the message names the
                column.
        """
        known: dict[str, Any] = {}
        for name, (kind, optional) in _COLUMNS.items():
            value = row.get(name)
            if value not in (None, ""):
                known[name] = _read(name, value, kind)
            elif not optional:
                raise ValueError(f"{name} is missing")
        wrong = next((name for name in _SCALES if not 0 < known[name] < math.inf), None)
        wrong = wrong or next((name for name in _NUMBERS if not 0 <= known.get(name, 0) < 2**63), None)
        if wrong is not None:
            raise ValueError(f"{wrong} is {row[wrong]!r:.40}")
        if _ACTIVATION in row:
            known[_ACTIVATION] = _read(_ACTIVATION, row[_ACTIVATION] or "", str)
        if _RANGES in row:
            known[_RANGES] = _read_ranges(row[_RANGES])
        prefixed = {_PREFIX + name: name for name in _OWN}
        others = {
            prefixed.get(name, name): _read(name, value, float)
            for name, value in row.items()
            if name not in _OWN and value not in (None, "")
        }
        return cls(**known, outputs=others)


def _read(name: str, value: Any, kind: type) -> Any:
    try:
        if kind is float and not isinstance(value, bool):
            return float(value)  # also "NaN", "Infinity" and "-Infinity"
        if isinstance(value, str) and kind is not str:
            return int(value) if kind is int else {"true": True, "false": False}[value]
        if type(value) is not kind:
            raise TypeError
    except (KeyError, TypeError, ValueError, OverflowError):
        raise ValueError(f"{name} is {value!r}") from None
    return value


def _read_ranges(value: Any) -> dict[str, GradientRange]:
    """Read ranges, an object or, in a CSV file, a text of JSON."""
    try:
        if isinstance(value, str) and value:
            value = parse_json(value.encode())
        items = value.items() if value else ()
        return {name: GradientRange(**{k: _read(k, v, float) for k, v in each.items()}) for name, each in items}
    except (AttributeError, TypeError, RecursionError):
        raise ValueError(f"{_RANGES} is {value!r:.40}") from None


# The type of each column, and True if it may be missing or empty.
_COLUMNS: dict[str, tuple[type, bool]] = {
    name: (next(iter(get_args(kind)), kind), bool(get_args(kind)))
    for name, kind in get_type_hints(StepRecord).items()
    if name not in (_ACTIVATION, _RANGES, "stuck", "outputs")
}
_OWN = (*_COLUMNS, _ACTIVATION, _RANGES)
