"""The table of roles: the part of each input and output of a training graph in the step."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import onnx_ir as ir

from graphscale.analysis.updates import same_type
from graphscale.process.summary import Row, Summary, few

__all__ = ["ACCEPTED", "NAMED", "STATED", "Assigned", "Role", "RoleEntry", "RoleTable", "Roles"]

# The evidence of a role that the user names.
NAMED = "named"
# The beginning of the evidence of a role that the model states.
STATED = "stated by "
# The beginning of the evidence of a proposal that the user accepts.
ACCEPTED = "accepted: "


class Role(enum.Enum):
    """The part of an input or an output in the step."""

    LOSS = "loss"
    METRIC = "metric"
    GRADIENT = "gradient"
    STATE = "state"
    WEIGHT = "weight"  # an input whose gradient leaves the graph
    BATCH = "batch"
    HYPERPARAMETER = "hyperparameter"
    CONSTANT = "constant"


@dataclasses.dataclass(frozen=True)
class RoleEntry:
    """The role of an input or output, or of an initializer that holds state.

    Attributes:
        name: its name.
        kind: "input" or "output".
        role: one of "loss", "metric", "gradient", "state", "weight", "batch", "hyperparameter" and "constant".
        pair: of carried state: the output that is its next value, or the input that is its present one; else None.
        evidence: the reason for the role.
        certain: True if the evidence excludes all other roles; else the role is a proposal.
    """

    name: str
    kind: str
    role: str
    pair: str | None
    evidence: str
    certain: bool

    def __str__(self) -> str:
        """Return the role with its evidence."""
        role = self.role
        if self.pair is not None:
            role = f"next value of {self.pair}" if self.kind == "output" else f"{role}, then {self.pair}"
        return f"{role}: {self.evidence}" if self.certain else f"{role}? {self.evidence}"


@dataclasses.dataclass(frozen=True, repr=False)
class RoleTable(Summary):
    """The roles of all inputs and outputs, by name.

    Attributes:
        entries: the entries of inputs, then those of outputs, in the graph's order.
        others: for each open output, the further inputs of its type without a certain next value.
    """

    entries: tuple[RoleEntry, ...]
    others: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict, compare=False)

    def _summarize(self) -> tuple[str, Iterable[Row]]:
        roles: dict[Row, list[str]] = {}
        for entry in self.entries:
            roles.setdefault((f"{entry.kind}s", entry.role), []).append(entry.name)
        rows = [(f"{kind}, {role}", f"{len(names)}: {few(names)}") for (kind, role), names in roles.items()]
        doubt = f", {len(self.open)} of them open" if self.open else ""
        return f"{len(self.entries)} inputs and outputs{doubt}", rows

    def __iter__(self) -> Iterator[RoleEntry]:
        """Iterate over the entries."""
        return iter(self.entries)

    @property
    def open(self) -> tuple[RoleEntry, ...]:
        """The outputs with a proposal as their role."""
        return tuple(entry for entry in self.entries if entry.kind == "output" and not entry.certain)

    @property
    def accepted(self) -> tuple[RoleEntry, ...]:
        """The outputs whose proposal the user accepted."""
        return tuple(e for e in self.entries if e.kind == "output" and e.evidence.startswith(ACCEPTED))

    def to_dict(self) -> list[dict[str, Any]]:
        """Return the table as plain dicts."""
        return [dataclasses.asdict(entry) for entry in self.entries]


@dataclasses.dataclass(frozen=True)
class Assigned:
    """A role that is assigned to a value.

    Attributes:
        role: the role.
        evidence: the reason for it.
        pair: of carried state: the other value of the pair.
        certain: True if the evidence excludes all other roles.
    """

    role: Role
    evidence: str
    pair: ir.Value | None = None
    certain: bool = True

    @property
    def is_named(self) -> bool:
        """True if the user names the role, or the model states it."""
        return self.evidence == NAMED or self.evidence.startswith(STATED)


@dataclasses.dataclass(frozen=True)
class Roles:
    """The roles of the inputs and outputs of a graph, and of the initializers that hold state."""

    inputs: Mapping[ir.Value, Assigned]
    outputs: Mapping[ir.Value, Assigned]

    def states(self) -> dict[ir.Value, ir.Value]:
        """Return `{output: input}` of the certain carried state."""
        return {o: each.pair for o, each in self.outputs.items() if each.pair is not None and each.certain}

    def accept(self) -> Roles:
        """Return the roles with all proposals as certain roles, whose evidence says that they were accepted."""

        def accept(each: Assigned) -> Assigned:
            return each if each.certain else dataclasses.replace(each, evidence=ACCEPTED + each.evidence, certain=True)

        inputs, outputs = ({v: accept(each) for v, each in values.items()} for values in (self.inputs, self.outputs))
        return Roles(inputs, outputs)

    def _others(self, output: ir.Value) -> tuple[str, ...]:
        """Return the names of the inputs of an open output's type that have no certain next value, but its proposal."""
        free = (v for v, each in self.inputs.items() if each.pair is None or not each.certain)
        return tuple(v.name or "" for v in free if same_type(output, v) and v is not self.outputs[output].pair)

    def table(self) -> RoleTable:
        """Return the table, by the present names of the values."""
        kinds = (("input", self.inputs), ("output", self.outputs))
        return RoleTable(
            tuple(
                RoleEntry(
                    value.name or "",
                    kind,
                    each.role.value,
                    None if each.pair is None else each.pair.name,
                    each.evidence,
                    each.certain,
                )
                for kind, values in kinds
                for value, each in values.items()
            ),
            {value.name or "": self._others(value) for value, each in self.outputs.items() if not each.certain},
        )
