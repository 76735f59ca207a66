"""The session that a run trains with, of this process or of several that train together."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, Self

from graphscale.graph.stamp import Stamp
from graphscale.session import GradientRange, InputSpec, StepResult

__all__ = ["StepSession"]


class StepSession(Protocol):
    """The members of `graphscale.Session` that training uses."""

    stamp: Stamp
    inputs: dict[str, InputSpec]

    @property
    def loss_scale(self) -> float:
        """The loss scale that the next step uses."""

    @property
    def good_steps(self) -> int:
        """Good steps in a row since the loss scale changed last."""

    @property
    def counters(self) -> dict[str, int]:
        """The counters of telemetry."""

    @property
    def ranges(self) -> dict[str, GradientRange]:
        """The ranges of the gradients by name, as telemetry measured them last."""

    def step(self, feeds: Mapping[str, Any], *, fetch: Sequence[str] | None = None) -> StepResult:
        """Run one training step."""

    def save_state(self, path: str | os.PathLike[str], extra: Mapping[str, str] | None = None) -> None:
        """Write all carried state to a file."""

    def load_state(self, path: str | os.PathLike[str]) -> dict[str, str]:
        """Read all carried state from a file, and return its extra texts."""

    def export(self, path: str | os.PathLike[str]) -> None:
        """Write the step with the present state in it."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *error: Any) -> None: ...
