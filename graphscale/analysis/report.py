"""The report of an analysis and of a scaling, as data, for a table or JSON."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from graphscale.analysis.roles.role_table import RoleEntry
from graphscale.process.summary import Row, Summary, few

__all__ = [
    "STATE_OF_SCALE",
    "TELEMETRY",
    "WRITTEN_IN_PLACE",
    "GradientReport",
    "PlaceReport",
    "Report",
    "StateReport",
    "describe_policy",
]

# The origins of carried state that the original graph does not have.
STATE_OF_SCALE = "state of the loss scale"
TELEMETRY = "telemetry"
WRITTEN_IN_PLACE = "written in place"


@dataclasses.dataclass(frozen=True)
class PlaceReport:
    """A place where the loss scale enters: a value for all its readers, or for one node's input."""

    value: str
    node: str | None = None
    input: int | None = None


@dataclasses.dataclass(frozen=True)
class GradientReport:
    """A gradient: a value that is divided by the loss scale."""

    value: str
    dtype: str
    shape: str
    output: bool

    @property
    def type(self) -> str:
        """The dtype and the shape, such as "FLOAT[10,64]"."""
        return "of unknown type" if self.dtype == self.shape == "?" else f"{self.dtype}{self.shape}"


@dataclasses.dataclass(frozen=True)
class StateReport:
    """A piece of carried state.

    Attributes:
        input: the input with the present value.
        output: the output with its next value; None for state that is written in place.
        how: the evidence for the pair, or the origin of state that scaling added.
    """

    input: str
    output: str | None
    how: str


@dataclasses.dataclass(frozen=True, repr=False)
class Report(Summary):
    """The report of `inspect` or `scale`.

    Attributes:
        loss: the name of the loss.
        loss_found: the evidence for the loss.
        places: the places where the loss scale enters.
        coverage: the share of backward contractions and gradient operators that compute on a scaled operand;
            None for a graph without any, with nothing to protect.
        contractions: number of backward contractions and gradient operators.
        missed: the names of those without a scaled operand.
        gradients: the values that are divided by the loss scale.
        state: the carried state.
        roles: the roles of all inputs, then of all outputs.
        accumulators: in-place accumulators of gradients.
        warnings: notes for the user, a sentence each.
        policy: class name and config of the loss scale; None before scaling.
        target: the target; None before scaling.
        nodes_before: nodes of the main graph before scaling.
        nodes_after: nodes of the main graph after scaling.
        inserted: for each pass, the number of inserted nodes of each operator.
        renamed: `{wanted: given}` for names that were in use.
        proved: True if the static proof was run on the result.
        replaced: `{operator: nodes}` of training operators for which the target has no kernel.
        autocast: the report of mixed precision, as a dict; None without it.
        trial: the result of the trial, or the reason for none; None if none was asked for.
    """

    loss: str
    loss_found: str
    places: tuple[PlaceReport, ...]
    coverage: float | None
    contractions: int
    missed: tuple[str, ...]
    gradients: tuple[GradientReport, ...]
    state: tuple[StateReport, ...]
    accumulators: tuple[str, ...]
    warnings: tuple[str, ...]
    policy: dict[str, Any] | None = None
    target: str | None = None
    nodes_before: int = 0
    nodes_after: int = 0
    inserted: dict[str, dict[str, int]] = dataclasses.field(default_factory=dict)
    renamed: dict[str, str] = dataclasses.field(default_factory=dict)
    proved: bool = False
    replaced: dict[str, int] = dataclasses.field(default_factory=dict)
    autocast: dict[str, Any] | None = None
    roles: tuple[RoleEntry, ...] = ()
    trial: str | None = None

    @property
    def coverage_text(self) -> str:
        """The coverage in words, such as "100 % (5 of 5 backward contractions)"."""
        if self.coverage is None or self.contractions == 0:
            return "nothing to protect (no contraction and no gradient operator in the backward pass)"
        covered = self.contractions - len(self.missed)
        return f"{100 * self.coverage:.0f} % ({covered} of {self.contractions} backward contractions)"

    def _summarize(self) -> tuple[str, Iterable[Row]]:
        places = [p.value if p.node is None else f"{p.value} at {p.node}:{p.input}" for p in self.places]
        rows: list[Row] = [
            ("loss", self.loss),
            ("scale enters", few(places, 2)),
            ("coverage", self.coverage_text),
            ("gradients", _counted([gradient.value for gradient in self.gradients])),
            ("carried state", _counted([state.input for state in self.state])),
        ]
        if self.warnings:
            rows.append(("warnings", few(self.warnings, 1)))
        if self.policy is None:
            return f"{self.nodes_after} nodes, without a loss scale", rows
        rows.append(("loss scale", describe_policy(self.policy)))
        rows.append(("nodes", f"{self.nodes_before} before, {self.nodes_after} after"))
        rows.append(("proof", "every output and carried state is free of the scale" if self.proved else "none"))
        return f"scaled for target {self.target}", rows

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain dicts, lists, strings and numbers."""
        # dataclasses.asdict copies each string of each row by itself.
        return {
            name: tuple(each if isinstance(each, str) else dict(vars(each)) for each in value)
            if isinstance(value, tuple)
            else copy.deepcopy(value)
            for name, value in vars(self).items()
            if (name, value) != ("trial", None)
        }


def describe_policy(policy: Mapping[str, Any]) -> str:
    """Return a policy as its constructor would be called, from its class name and config."""
    config = ", ".join(f"{name}={value}" for name, value in policy.get("config", {}).items())
    return f"{policy.get('class_name', '?')}({config})"


def _counted(names: Sequence[str]) -> str:
    return f"{len(names)}: {few(names)}" if names else "none"
