"""A user's hints for the analysis, and the roles that a model states."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import onnx_ir as ir

from graphscale.analysis.roles.answers import NO_ANSWERS, Answers
from graphscale.errors import GradientError, LossError, RolesError, UpdateError
from graphscale.files.training_info import read_bindings
from graphscale.graph.stamp import ROLES_KEY

__all__ = ["NO_HINTS", "Hints", "read_stated_roles"]

_INFO = "training_info"


@dataclasses.dataclass(frozen=True)
class Hints:
    """A user's names for parts of a training graph, in place of those that the analysis finds.

    Attributes:
        loss: the name of the loss, or several names; None to find it among the scalar floating-point outputs.
        seed: `NODE:INDEX`, the input of a node where the scale enters; None to find the places.
        gradients: names of values that are gradients: the scale comes out there.
        updates: `{output name: input name}` for carried state that the analysis cannot pair. A pattern, with one `{}`
            in both names, pairs each output and input that it names.
        roles: answers about roles, or the content of a roles file, or None.
    """

    loss: str | Sequence[str] | None = None
    seed: str | None = None
    gradients: Sequence[str] = ()
    updates: Mapping[str, str] | None = None
    roles: Any = None

    def __post_init__(self) -> None:
        """Accept any sequence of gradients, and None.

        Raises:
            LossError: the loss is neither a name nor several.
            GradientError: the gradients are one text.
            UpdateError: the updates are no mapping.
        """
        losses = (self.loss,) if isinstance(self.loss, str) else self.loss or ()
        if not isinstance(losses, Sequence) or not all(isinstance(name, str) for name in losses):
            raise LossError(f"a loss is a name, and several losses a list of names; got {self.loss!r}")
        object.__setattr__(self, "loss", tuple(losses) or None)
        if isinstance(self.gradients, str):
            raise GradientError(f"gradients are a list of names; pass gradients=[{self.gradients!r}]")
        if not isinstance(self.updates, Mapping | None):
            raise UpdateError(f"updates map outputs to inputs, as in {{'w.next': 'w'}}; got {self.updates!r}")
        object.__setattr__(self, "gradients", tuple(self.gradients or ()))

    @property
    def answers(self) -> Answers:
        """All answers about roles, from the roles file and single names.

        Raises:
            RolesError: two of them contradict each other.
        """
        return Answers.of(self.roles).merge(self.loss or (), self.gradients, self.updates or {})

    def stated_by(self, model: ir.Model) -> Hints:
        """Return the hints, with a model's stated roles where the user gives none.

        Raises:
            RolesError: two answers contradict each other, or a statement has another form.
            UpdateError: a pattern names no pair, or two patterns name different ones.
        """
        pairs, patterns = dict(self.updates or {}), dict[str, str]()
        if any("{}" in str(name) for name in pairs):
            from graphscale.analysis.name_patterns import expand_patterns  # few users name one

            pairs, patterns = expand_patterns(model.graph, pairs)
        answers = dataclasses.replace(self, updates=pairs).answers
        answers = dataclasses.replace(answers, sources={**answers.sources, **patterns})
        return dataclasses.replace(
            self, updates=pairs, roles=answers.complete(read_stated_roles(model), self.gradients)
        )

    @staticmethod
    def of(options: Any) -> Hints:
        """Return the hints among the attributes of an object, such as a pass."""
        return Hints(**{field.name: getattr(options, field.name) for field in dataclasses.fields(Hints)})


NO_HINTS = Hints()


def read_stated_roles(model: ir.Model) -> Answers:
    """Read the roles that a model states, each with its source.

    The sources are the metadata property `graphscale.roles` and ONNX's `training_info`.

    Raises:
        RolesError: a statement has another form, or two contradict each other.
    """
    text = model.metadata_props.get(ROLES_KEY)
    answers = NO_ANSWERS if text is None else Answers.parse(text, ROLES_KEY)
    states, sources = dict(answers.states), dict.fromkeys((*answers.outputs, *answers.kept), ROLES_KEY)
    others = (*answers.losses, *answers.gradients, *answers.metrics)
    for output, value in read_bindings(model):
        source = sources.setdefault(output, _INFO)
        if states.setdefault(output, value) != value or output in others:
            raise RolesError(f"{_INFO} {output}={value}: {source} gives {output!r} another role; correct one of them")
    return dataclasses.replace(answers, states=states, sources=sources)
