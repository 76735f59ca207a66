"""Hints of a user to the analysis."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import onnx_ir as ir

from graphscale.analysis.roles.answers import Answers
from graphscale.analysis.roles.stated import read_stated_roles

__all__ = ["NO_HINTS", "Hints"]


@dataclasses.dataclass(frozen=True)
class Hints:
    """Names that a user gives for parts of a training graph, in place of those that the analysis would find.

    Attributes:
        loss: the name of the loss; None to find it among the scalar floating-point outputs.
        seed: `NODE:INDEX`, the input of a node where the scale enters; None to find the places.
        gradients: names of values that are gradients: the scale comes out there.
        updates: `{output name: input name}` for carried state that is not to be found by itself.
        roles: answers about roles, or what a roles file holds, or None.
    """

    loss: str | None = None
    seed: str | None = None
    gradients: tuple[str, ...] = ()
    updates: Mapping[str, str] | None = None
    roles: Any = None

    def __post_init__(self) -> None:
        """Take any sequence of gradients, and None."""
        object.__setattr__(self, "gradients", tuple(self.gradients or ()))

    @property
    def answers(self) -> Answers:
        """All answers about roles, of the roles file and of single names.

        Raises:
            RolesError: two of them contradict each other.
        """
        losses = () if self.loss is None else (self.loss,)
        return Answers.of(self.roles).merge(losses, self.gradients, self.updates or {})

    def stated_by(self, model: ir.Model) -> Hints:
        """Return the hints, with the roles that a model states itself where the user is silent.

        Raises:
            RolesError: two answers contradict each other, or a statement has another form.
        """
        return dataclasses.replace(self, roles=self.answers.complete(read_stated_roles(model), self.gradients))

    @staticmethod
    def of(options: Any) -> Hints:
        """Return the hints among the attributes of an object, such as a pass."""
        return Hints(**{field.name: getattr(options, field.name) for field in dataclasses.fields(Hints)})


NO_HINTS = Hints()
