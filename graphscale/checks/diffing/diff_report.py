"""The differences between two models, as data."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from graphscale.process.summary import Row, Summary

__all__ = ["Change", "DiffReport", "Entry", "NodeEntry", "OpCount", "Rewiring", "ValueEntry"]


@dataclasses.dataclass(frozen=True)
class OpCount:
    """The numbers of nodes of an operator, subgraphs and functions included."""

    op: str
    before: int
    after: int

    @property
    def difference(self) -> int:
        """The growth of the number."""
        return self.after - self.before


@dataclasses.dataclass(frozen=True)
class NodeEntry:
    """A node of only one model.

    Attributes:
        name: its name, or the operator and first output of a nameless node.
        op: its operator, with the domain if it has one.
        inputs: the names of its operands; empty for an omitted one.
        outputs: the names of its results.
        scope: its place: empty for the main graph, else the node or function around it.
    """

    name: str
    op: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    scope: str = ""


@dataclasses.dataclass(frozen=True)
class Rewiring:
    """An edge with another source.

    Attributes:
        reader: the name of the reading node in the second model; for a graph output, the output's name.
        input: the index of the node's input; None for a graph output.
        before: the name of the operand in the first model; for a graph output, the node that computes it.
        after: the name in the second model.
        scope: as for `NodeEntry`.
    """

    reader: str
    input: int | None
    before: str
    after: str
    scope: str = ""


@dataclasses.dataclass(frozen=True)
class ValueEntry:
    """An input, output or initializer of only one model."""

    name: str
    dtype: str
    shape: str

    @property
    def type(self) -> str:
        """The dtype and the shape, as in `FLOAT[8,10]`."""
        return self.dtype + self.shape


@dataclasses.dataclass(frozen=True)
class Change:
    """A difference in a part of both models."""

    name: str
    before: str
    after: str


Entry = NodeEntry | Rewiring | ValueEntry | Change | str


@dataclasses.dataclass(frozen=True, repr=False)
class DiffReport(Summary):
    """The differences between a first model and a second one.

    Attributes:
        nodes_before: the nodes of the first model's main graph.
        nodes_after: the nodes of the second model's main graph.
        matched: number of nodes of the main graphs that were recognized as the same.
        related: True if these are at least half of the smaller graph; else the models are unrelated.
        ops: every operator of either model, by name.
        inserted: the added nodes by the pass in their mark.
        added: the added nodes without a mark; those of an added function count as that function.
        removed: the nodes of the first model only; those of a removed function count as that function.
        attributes: attributes of matched nodes that changed, named `node.attribute`.
        rewired: edges with another source.
        renamed: values with another name: `before` and `after` are names, `name` is the node that computes them.
        retyped: values of another dtype or shape, where both are known.
        reordered: True if matched nodes of the main graph have another order.
        inputs_added: graph inputs of the second model only.
        inputs_removed: graph inputs of the first model only.
        outputs_added: graph outputs of the second model only.
        outputs_removed: graph outputs of the first model only.
        initializers_added: initializers of the second model only.
        initializers_removed: initializers of the first model only.
        initializers_changed: initializers of another dtype or shape; or of other content, which is compared up to 16
            elements: weights are never read.
        functions_added: model-local functions of the second model only.
        functions_removed: model-local functions of the first model only.
        metadata: metadata properties that were added (`before` is empty), removed or changed.
        versions: differences of the IR version, opset versions and similar fields.
    """

    nodes_before: int
    nodes_after: int
    matched: int
    related: bool
    ops: tuple[OpCount, ...]
    inserted: dict[str, tuple[NodeEntry, ...]]
    added: tuple[NodeEntry, ...]
    removed: tuple[NodeEntry, ...]
    attributes: tuple[Change, ...]
    rewired: tuple[Rewiring, ...]
    renamed: tuple[Change, ...]
    retyped: tuple[Change, ...]
    reordered: bool
    inputs_added: tuple[ValueEntry, ...]
    inputs_removed: tuple[ValueEntry, ...]
    outputs_added: tuple[ValueEntry, ...]
    outputs_removed: tuple[ValueEntry, ...]
    initializers_added: tuple[ValueEntry, ...]
    initializers_removed: tuple[ValueEntry, ...]
    initializers_changed: tuple[Change, ...]
    functions_added: tuple[str, ...]
    functions_removed: tuple[str, ...]
    metadata: tuple[Change, ...]
    versions: tuple[Change, ...]

    def _summarize(self) -> tuple[str, Iterable[Row]]:
        rows: list[Row] = [("nodes", f"{self.nodes_before} before, {self.nodes_after} after, {self.matched} in both")]
        rows += [(f"inserted by {name}", len(nodes)) for name, nodes in self.inserted.items()]
        rows += [(title.lower(), len(found)) for title, _, found in self.sections() if found]
        return "different" if self.different else "no difference", rows

    @property
    def different(self) -> bool:
        """True if the models differ."""
        numbers = ("nodes_before", "nodes_after", "matched", "related", "ops")
        found = (getattr(self, field.name) for field in dataclasses.fields(self) if field.name not in numbers)
        return any(found) or any(op.difference for op in self.ops)

    def sections(self) -> Iterator[tuple[str, str, Sequence[Entry]]]:
        """Yield the title, the name of the first column, and the entries of each kind of difference."""
        yield "Added", "operator", self.added
        yield "Removed", "operator", self.removed
        yield "Edges rewired", "reader", self.rewired
        yield "Values renamed", "given by", self.renamed
        yield "Values retyped", "value", self.retyped
        yield "Attributes", "attribute", self.attributes
        for kind in ("inputs", "outputs", "initializers"):
            for how in ("added", "removed"):
                yield f"{kind.capitalize()} {how}", "name", getattr(self, f"{kind}_{how}")
        yield "Initializers changed", "initializer", self.initializers_changed
        yield "Functions added", "function", self.functions_added
        yield "Functions removed", "function", self.functions_removed
        yield "Metadata", "property", self.metadata
        yield "Versions", "what", self.versions

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain dicts, lists, strings and numbers, with `different` and each `difference`."""
        found = dataclasses.asdict(self)
        found["ops"] = [{**dataclasses.asdict(op), "difference": op.difference} for op in self.ops]
        return {"different": self.different, **found}
