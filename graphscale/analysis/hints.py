"""Hints of a user to the analysis."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

__all__ = ["NO_HINTS", "Hints"]


@dataclasses.dataclass(frozen=True)
class Hints:
    """Names that a user gives for parts of a training graph, in place of those that the analysis would find.

    Attributes:
        loss: the name of the loss; None to find it among the scalar floating-point outputs.
        seed: `NODE:INDEX`, the input of a node where the scale enters; None to find the places.
        gradients: names of values that are gradients: the scale comes out there.
        updates: `{output name: input name}` for carried state that is not to be found by itself.
    """

    loss: str | None = None
    seed: str | None = None
    gradients: tuple[str, ...] = ()
    updates: Mapping[str, str] | None = None

    def __post_init__(self) -> None:
        """Take any sequence of gradients, and None."""
        object.__setattr__(self, "gradients", tuple(self.gradients or ()))

    @staticmethod
    def of(options: Any) -> Hints:
        """Return the hints among the attributes of an object, such as a pass."""
        return Hints(**{field.name: getattr(options, field.name) for field in dataclasses.fields(Hints)})


NO_HINTS = Hints()
