"""The values that a scaled file names, by their role: kinds, names, types, defaults and texts."""

from __future__ import annotations

import dataclasses
import enum
from typing import Any

import numpy as np

__all__ = ["COUNTERS", "RESULTS", "STATES", "Kind", "ScaledValue"]


class Kind(enum.Enum):
    """A kind of a value in a scaled file."""

    ORIGINAL = "a value of the original"
    SCALE = "carried state of a dynamic loss scale"
    WINDOW = "carried state of a window of accumulated gradients, in an artifact folder"
    TELEMETRY = "carried state of telemetry"
    RESULT = "an output that reports on the step"


@dataclasses.dataclass(frozen=True)
class _Facts:
    """The facts of a value; see `ScaledValue`."""

    kind: Kind
    dtype: str
    text: str = ""
    wanted: str | None = None
    default: Any = None


_COUNT = "count"


class ScaledValue(enum.StrEnum):
    """A value of a scaled file. Its text is its role, the key of its name in `graphscale.names`.

    Attributes:
        kind: its kind.
        wanted: its name in the graph, unless another value has it.
        is_count: True for a count of steps: int64, or float32 where the target writes state in place.
        default: a state's first value, None where the policy has it; the value of a result that a file lacks.
        text: its note in the `doc_string` of an input or output; empty for a value without one.
    """

    kind: Kind
    wanted: str
    is_count: bool
    default: Any
    text: str
    _dtype: str

    LOSS = "loss", _Facts(Kind.ORIGINAL, "float32")
    LOSS_SCALE = "loss_scale", _Facts(Kind.SCALE, "float32", "the loss scale", wanted="current_loss_scale")
    GOOD_STEPS = (
        "good_steps",
        _Facts(Kind.SCALE, _COUNT, "the count of finite steps since the loss scale last changed"),
    )
    HYSTERESIS_LEFT = (
        "hysteresis_left",
        _Facts(Kind.SCALE, _COUNT, "the count of steps not finite that it takes to lower the loss scale"),
    )
    BAD_STEPS = "bad_steps", _Facts(Kind.SCALE, _COUNT, "the count of steps not finite in a row")
    WINDOW_FINITE = "window_finite", _Facts(Kind.WINDOW, "float32", default=-1)
    STEPS = "steps", _Facts(Kind.TELEMETRY, _COUNT, "the count of steps", default=0)
    SKIPPED_STEPS = "skipped_steps", _Facts(Kind.TELEMETRY, _COUNT, "the count of skipped steps", default=0)
    CONSECUTIVE_SKIPS = (
        "consecutive_skips",
        _Facts(Kind.TELEMETRY, _COUNT, "the count of skipped steps in a row", default=0),
    )
    LAST_SKIP_STEP = "last_skip_step", _Facts(Kind.TELEMETRY, _COUNT, "the number of the last skipped step", default=0)
    RANGES = (
        "ranges",
        _Facts(
            Kind.TELEMETRY, "float32", "the ranges of the gradients when they were last measured", "gradient_ranges", 0
        ),
    )
    ALL_FINITE = (
        "all_finite",
        _Facts(Kind.RESULT, "bool", "true if all gradients of this step were finite", default=True),
    )
    STUCK = "stuck", _Facts(Kind.RESULT, "bool", "true if the loss scale is stuck", default=False)
    CAUSE = (
        "cause",
        _Facts(Kind.RESULT, "int64", "the cause of a skip: 0 for none, 1 for NaN, 2 for infinity", "skip_cause", 0),
    )
    OFFENDER = (
        "offender",
        _Facts(
            Kind.RESULT,
            "int64",
            "the index of the first gradient that was not finite, in graphscale.telemetry; -1 for none",
            "first_offender",
            -1,
        ),
    )
    ACTIVATION = (
        "activation",
        _Facts(
            Kind.RESULT,
            "int64",
            "the index of the first forward value that was not finite, in graphscale.telemetry; -1 for none",
            "first_activation",
            -1,
        ),
    )
    ZERO_FRACTION = "zero_fraction", _Facts(Kind.RESULT, "float32", "the share of gradient elements that are zero")

    def __new__(cls, role: str, facts: _Facts) -> ScaledValue:
        """Return a member, whose text is its role."""
        member = str.__new__(cls, role)
        member._value_ = role
        member.kind, member.text, member.default = facts.kind, facts.text, facts.default
        member.wanted = facts.wanted or role
        member.is_count = facts.dtype == _COUNT
        member._dtype = "int64" if member.is_count else facts.dtype
        return member

    def __repr__(self) -> str:
        """Return the role in quotes, as messages show it."""
        return repr(self.value)

    def dtype(self, *, in_place: bool = False) -> np.dtype[Any]:
        """Return the type of the value's arrays, for a target that writes state in place, or for another one."""
        return np.dtype(np.float32 if self.is_count and in_place else self._dtype)

    @property
    def words(self) -> str:
        """The role in words, for messages."""
        return self.value.replace("_", " ")


# The carried state that has a note, the counts of telemetry, and the outputs that report on a step.
STATES = tuple(value for value in ScaledValue if value.kind in (Kind.SCALE, Kind.TELEMETRY))
COUNTERS = tuple(value for value in STATES if value.kind is Kind.TELEMETRY and value.is_count)
RESULTS = tuple(value for value in ScaledValue if value.kind is Kind.RESULT)
