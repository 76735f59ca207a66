"""The record of the scaling in a scaled model, in its `metadata_props`."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Collection, Mapping
from typing import Any

import onnx_ir as ir

from graphscale.errors import AlreadyScaledError
from graphscale.files.training_info import ROLES_KEY, drop_training_info
from graphscale.graph.marks import PASS_KEY, SCALE_LOSS, UNSCALE_GRADIENTS
from graphscale.graph.notes import annotate, compose_notes, describe_model
from graphscale.graph.walks import NodeIndex
from graphscale.policy.names import ScaledValue

__all__ = [
    "OPTIONAL",
    "ROLES_KEY",
    "SPLIT_KEY",
    "VERSION",
    "Stamp",
    "explain_loss",
    "has_lost_stamp",
    "is_scaled",
    "refuse_scaled",
]

VERSION = "graphscale.version"
# On a half of a split step: its number, and its whole.
SPLIT_KEY = "graphscale.split"
# Marks that only a loss scale leaves: a function of this domain, and the nodes of two passes.
_DOMAIN = "graphscale"
_PASSES = (SCALE_LOSS, UNSCALE_GRADIENTS)
_NAMES = tuple(f"graphscale/{name}/" for name in _PASSES)
# Fields that most stamps lack, with their defaults.
OPTIONAL = {"telemetry": "{}", "in_place": "[]", "accepted": "[]"}


@dataclasses.dataclass(frozen=True)
class Stamp:
    """The metadata of a scaled model.

    Attributes:
        version: the version of graphscale that scaled the model.
        policy: `{"class_name": ..., "config": {...}}` of the loss scale.
        state: `{input name: output name}` of the carried state.
        target: the target.
        names: the names in this graph of `loss`, `loss_scale`, `good_steps`, the policy's other counts, `stuck` and
            `all_finite`, where present.
        report: the report of the scaling.
        telemetry: with telemetry, `gradients`: the names of the checked gradients, in the order of the index of an
            offender; `ranges`, if measured: `{"every": steps}`; `activations`, if checked: the names of values of the
            forward pass, in the order of the index; else empty.
        in_place: the carried inputs whose next value a host may write over the present one: both in one buffer.
        accepted: the outputs whose roles were open, and whose proposals the user accepted.
    """

    version: str
    policy: dict[str, Any]
    state: dict[str, str]
    target: str
    names: dict[str, str]
    report: dict[str, Any]
    telemetry: dict[str, Any] = dataclasses.field(default_factory=dict)
    in_place: list[str] = dataclasses.field(default_factory=list)
    accepted: list[str] = dataclasses.field(default_factory=list)

    @property
    def carried(self) -> frozenset[str]:
        """The names of all carried inputs and initializers."""
        return frozenset((*self.state, *(state["input"] for state in self.report.get("state", ()))))

    def next_values(self, carried: Collection[str]) -> set[str]:
        """Return the names of all outputs that are next values of carried inputs."""
        return {*self.state.values(), *(f"{name}.next" for name in self.names.values() if name in carried)}

    def find_wrong_notes(self, model: ir.Model, others: Mapping[tuple[str, str], str]) -> list[str]:
        """Return the differences between the notes in a model with this stamp and the right ones, a sentence each.

        Args:
            model: the model.
            others: notes of values that the stamp does not have, by kind and name.
        """
        from graphscale.graph.note_check import find_wrong_notes

        return find_wrong_notes(model, self._describe(model), {**others, **self._notes()})

    def _describe(self, model: ir.Model) -> str:
        is_part = SPLIT_KEY in model.metadata_props
        return describe_model(self.target, self.state, self.names.get(ScaledValue.LOSS_SCALE), is_part=is_part)

    def _notes(self) -> dict[tuple[str, str], str]:
        states = self.report.get("state", ())
        return compose_notes(self.state, self.names, [s["input"] for s in states if s.get("output") is None])

    def role_of(self, name: str) -> str | None:
        """Return the role of an input of the original, with its evidence; None for a report without it."""
        for entry in self.report.get("roles", ()):
            if isinstance(entry, dict) and (entry.get("name"), entry.get("kind")) == (name, "input"):
                return f"{entry.get('role')}: {entry.get('evidence')}"
        return None

    def write(self, model: ir.Model) -> None:
        """Write the stamp and its notes into a model, in place of the stated roles, which the report contains."""
        drop_training_info(model)
        annotate(model, self._describe(model), self._notes(), anew=is_scaled(model))
        model.metadata_props.pop(ROLES_KEY, None)
        for name, value in vars(self).items():
            if value or name not in OPTIONAL:
                model.metadata_props[f"graphscale.{name}"] = value if isinstance(value, str) else json.dumps(value)


def is_scaled(model: ir.Model) -> bool:
    """Return whether graphscale has scaled this model."""
    return VERSION in model.metadata_props


def refuse_scaled(model: ir.Model, name: str, index: NodeIndex | None = None) -> None:
    """Refuse a model that carries a loss scale already.

    Args:
        model: the model.
        name: its name for messages.
        index: the nodes of its graph, if they are known.

    Raises:
        AlreadyScaledError: the model carries a loss scale.
    """
    if is_scaled(model):
        raise AlreadyScaledError(
            f"{name} already carries a loss scale (graphscale {model.metadata_props[VERSION]}, target "
            f"{model.metadata_props.get('graphscale.target', '?')}); scale the original graph instead"
        )
    if has_lost_stamp(model, index):
        raise AlreadyScaledError(explain_loss(name))


def has_lost_stamp(model: ir.Model, index: NodeIndex | None = None) -> bool:
    """Return whether graphscale has scaled a model without a stamp, whose metadata another tool has dropped."""
    index = index or NodeIndex(model.graph)
    return (
        any(domain == _DOMAIN for domain, _ in index.by_operator)
        or any(name.startswith(_NAMES) for name in index.names)
        or any(node.metadata_props.get(PASS_KEY) in _PASSES for nodes in index.by_operator.values() for node in nodes)
    )


def explain_loss(name: str) -> str:
    """Explain a scaled model without a stamp."""
    return f"{name} was scaled by graphscale, and another tool has dropped its metadata; scale the original graph again"
