"""A user's answers about roles."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from graphscale.analysis.roles.role_table import NAMED, STATED
from graphscale.errors import RolesError, one_line

__all__ = ["NO_ANSWERS", "Answers"]

# The fields of a roles file, each with its explanation for a reader.
FIELDS = {
    "losses": "outputs that are losses: the backward pass differentiates them",
    "states": "output: input, where the output is the next value of the input; all are guarded",
    "gradients": "outputs that are gradients",
    "metrics": "outputs that no later step reads, and constants",
    "kept": "outputs among the states that advance on skipped steps, too",
}
LISTS = ("losses", "gradients", "metrics", "kept")


@dataclasses.dataclass(frozen=True)
class Answers:
    """Roles that a user names.

    Attributes:
        losses: the losses.
        states: `{output name: input name}`.
        gradients: the outputs that are gradients.
        metrics: the outputs that no later step reads.
        kept: the outputs among the states that advance on skipped steps, too.
        forced: True if the answers hold even against the graph; those with a source never do.
        accepted: True if the proposals hold for all outputs that are left open.
        sources: for each output whose role the model states, the place of the statement; for each output that a
            pattern names, the pattern as an option.
        file: the roles file as an option, such as "--roles roles.json", for messages; empty for none.
        filed: the names in that file.
    """

    losses: tuple[str, ...] = ()
    states: Mapping[str, str] = dataclasses.field(default_factory=dict)
    gradients: tuple[str, ...] = ()
    metrics: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()
    forced: bool = False
    accepted: bool = False
    sources: Mapping[str, str] = dataclasses.field(default_factory=dict)
    file: str = ""
    filed: frozenset[str] = frozenset()

    @classmethod
    def parse(cls, text: str | bytes, where: str) -> Answers:
        """Read the answers from JSON.

        Raises:
            RolesError: the text is no JSON, or as for `of`.
        """
        from graphscale.files.contents import parse_json  # most users answer nothing

        try:
            return cls.of(parse_json(text), where)
        except (ValueError, RecursionError) as error:
            raise RolesError(f"{where}: it is not JSON: {one_line(error)}") from error

    @classmethod
    def of(cls, content: Any, where: str = "roles") -> Answers:
        """Read the answers from the content of a roles file.

        Raises:
            RolesError: the content has another form or field, or names an output twice.
        """
        if content is None or isinstance(content, Answers):
            return content or NO_ANSWERS
        if not isinstance(content, Mapping):
            raise RolesError(f"{where}: expected an object with {', '.join(FIELDS)}, got {type(content).__name__}")
        for field in content:
            if field not in (*FIELDS, "help", "open"):
                raise RolesError(f"{where}: there is no field {field!r}; expected {', '.join(FIELDS)}")
        states = content.get("states", {})
        texts = [*states, *states.values()] if isinstance(states, Mapping) else [None]
        if not all(isinstance(text, str) for text in texts):
            raise RolesError(f"{where}: states must be an object of output names and input names")
        lists: dict[str, tuple[str, ...]] = {}
        for field in LISTS:
            names = content.get(field, ())
            if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
                raise RolesError(f"{where}: {field} must be a list of names")
            lists[field] = tuple(names)
        answers = cls(lists["losses"], dict(states), lists["gradients"], lists["metrics"], lists["kept"])
        answers.refuse_doubles(where)
        return answers

    def merge(
        self,
        losses: Iterable[str] = (),
        gradients: Iterable[str] = (),
        states: Mapping[str, str] | None = None,
        kept: Iterable[str] = (),
        forced: bool = False,
        accepted: bool = False,
    ) -> Answers:
        """Return the answers with single names added; gradients are places, and may be next states as well.

        Raises:
            RolesError: a name has another role already.
        """
        for output, value in (states or {}).items():
            if self.states.get(output, value) != value:
                raise RolesError(
                    f"--update {output}={value}: the roles file says that {output!r} is the next value of "
                    f"{self.states[output]!r}"
                )
        merged = dataclasses.replace(
            self,
            losses=tuple(dict.fromkeys((*self.losses, *losses))),
            states={**self.states, **(states or {})},
            kept=tuple(dict.fromkeys((*self.kept, *kept))),
            forced=self.forced or forced,
            accepted=self.accepted or accepted,
        )
        merged.refuse_doubles("roles")
        places = tuple(dict.fromkeys((*self.gradients, *gradients)))
        dataclasses.replace(merged, states={}, gradients=places).refuse_doubles("roles")
        return merged

    def complete(self, stated: Answers, places: Collection[str] = ()) -> Answers:
        """Return the answers, completed by the model's statements.

        Args:
            stated: the statements, each name with its source.
            places: the values that the user names as gradients: next states, but no losses and no metrics.
        """
        named, taken = set(self.outputs), {*self.states.values()}

        def others(names: Iterable[str]) -> tuple[str, ...]:
            return tuple(name for name in names if name not in named)

        pairs = {name: stated.states[name] for name in others(stated.states) if stated.states[name] not in taken}
        return dataclasses.replace(
            self,
            losses=self.losses or others(name for name in stated.losses if name not in places),
            states={**self.states, **pairs},
            gradients=(*self.gradients, *others(stated.gradients)),
            metrics=(*self.metrics, *others(name for name in stated.metrics if name not in places)),
            kept=(*self.kept, *others(stated.kept)),
            sources={**self.sources, **{name: stated.sources[name] for name in others(stated.sources)}},
        )

    def to_json(self) -> str:
        """Return the content of a roles file."""
        return json.dumps({field: getattr(self, field) for field in FIELDS})

    @property
    def outputs(self) -> tuple[str, ...]:
        """The outputs with named roles, repeated for each role."""
        return (*self.losses, *self.states, *self.gradients, *self.metrics)

    def label(self, name: str, option: str) -> str:
        """Return the origin of an output's role for a message: the model's statement, the roles file, or an option."""
        own = f"{self.file}:" if name in self.filed else option
        return f"{self.sources.get(name, own)} {name}"

    def evidence(self, name: str | None) -> str:
        """Return the evidence for an output's named role."""
        source = self.sources.get(name or "")
        return NAMED if source is None else f"{STATED}{source}"

    def refuse_doubles(self, where: str) -> None:
        """Refuse an output with two roles.

        Raises:
            RolesError: an output has two roles.
        """
        seen: set[str] = set()
        for name in self.outputs:
            if name in seen:
                raise RolesError(f"{where}: {name!r} has two roles")
            seen.add(name)


NO_ANSWERS = Answers()
