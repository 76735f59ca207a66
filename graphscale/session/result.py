"""The result of a step: its outputs, and its status."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from graphscale.files.tensor_files import Arrays
from graphscale.policy.names import ScaledValue
from graphscale.process.summary import Row, Summary

__all__ = ["GradientRange", "StepResult"]

_SHOWN = 10  # outputs
_CAUSES = (None, "nan", "inf")


class GradientRange(NamedTuple):
    """The range of a gradient in one step.

    Attributes:
        largest: the largest magnitude among its finite elements, without the loss scale; 0 if there are none.
        zeros: the share of its elements that are zero, from 0 to 1.
        overflow: the share of its elements that are infinite or NaN, from 0 to 1.
    """

    largest: float
    zeros: float
    overflow: float


class StepResult(Summary, dict[str, np.ndarray[Any, Any]]):
    """The fetched outputs of a step, `{output name: array}`, without the carried state.

    Args:
        outputs: the outputs.
        status: the outputs that report on the step, by role, as numbers, or as values on a GPU that are read on demand:
            `all_finite`, `stuck`, and with telemetry `cause`, `offender`, `activation` and `zero_fraction`, where the
            step has them.
        telemetry: the names of the checked `gradients`, in order, and of the checked `activations`.
        accepts: True if a non-finite step is applied where the scale is stuck.
    """

    def __init__(
        self, outputs: Arrays, status: Mapping[str, Any], telemetry: Mapping[str, Sequence[str]], accepts: bool
    ) -> None:
        super().__init__(outputs)
        self._status = status
        self._telemetry = telemetry
        self._accepts = accepts

    @property
    def all_finite(self) -> bool:
        """True if every gradient was finite, and always for a fixed loss scale, which does not check."""
        return bool(self._read(ScaledValue.ALL_FINITE))

    @property
    def stuck(self) -> bool:
        """True if the loss scale is stuck by the definition of its policy; False for a policy without one."""
        return bool(self._read(ScaledValue.STUCK))

    @property
    def applied(self) -> bool:
        """True if the update was applied; else the step was skipped, and all carried state is unchanged."""
        return self.all_finite or (self._accepts and self.stuck)

    @property
    def cause(self) -> str | None:
        """The reason why the first offending gradient was not finite, "nan" or "inf"; None without telemetry."""
        return _CAUSES[int(self._read(ScaledValue.CAUSE))]

    @property
    def offender(self) -> str | None:
        """The name of the first gradient that was not finite; None if all were, and without telemetry."""
        index = int(self._read(ScaledValue.OFFENDER))
        return None if index < 0 else self._telemetry["gradients"][index]

    @property
    def activation(self) -> str | None:
        """The name of the first value of the forward pass that was not finite, if a gradient was not.

        None if all these values were finite, and without telemetry of activations.
        """
        index = int(self._read(ScaledValue.ACTIVATION))
        return None if index < 0 else self._telemetry["activations"][index]

    @property
    def zero_fraction(self) -> float | None:
        """The share of gradient elements that are zero, from 0 to 1; None without telemetry."""
        value = self._read(ScaledValue.ZERO_FRACTION)
        return None if value is None else float(value)

    def _summarize(self) -> tuple[str, Iterable[Row]]:
        # The status of a step on a GPU is there: a short form copies nothing from it.
        is_here = not any(hasattr(value, "numpy") for value in self._status.values())
        line = ("applied" if self.applied else "skipped") if is_here else "a step on a GPU"
        shown = list(self.items())[:_SHOWN]
        rows: list[Row] = [(name, _short(array)) for name, array in shown]
        if len(self) > len(shown):
            rows.append(("...", f"and {len(self) - len(shown)} more"))
        if is_here and self.offender is not None:
            rows.append(("first not finite", f"{self.offender} ({self.cause})"))
        return line, rows

    def _read(self, role: ScaledValue) -> Any:
        value = self._status.get(role)
        if value is None:
            return role.default
        return value.numpy() if hasattr(value, "numpy") else value


def _short(array: Any) -> str:
    """Return the number of an array of one element, or the dtype and shape."""
    if array.size != 1:
        return f"{array.dtype}{list(array.shape)}"
    number = array.item()
    return str(number) if isinstance(number, bool | int | str) else f"{float(number):.6g}"
