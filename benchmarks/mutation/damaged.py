"""A scaled model that is damaged: its values by name and role, and ways to insert and replace."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from graphscale.graph.builder import PASS_KEY, Editor, replace_reads
from graphscale.graph.stamp_reading import read_stamp

__all__ = ["FLOAT", "Damaged", "FileEdit"]

FLOAT = ir.DataType.FLOAT
FileEdit = Callable[[onnx.ModelProto], object]


class Damaged:
    """A copy of a scaled model, with its inserted nodes by the pass that made them.

    Args:
        model: the scaled model; it is not changed.
    """

    def __init__(self, model: ir.Model) -> None:
        self.model = model.clone()
        self.graph = self.model.graph
        self.stamp = read_stamp(self.model.metadata_props, "the model")
        self.editor = Editor(self.graph)
        self.values = {v.name: v for v in (*self.graph.inputs, *self.graph.initializers.values())}
        self.values.update((v.name, v) for node in self.graph for v in node.outputs)
        self.nodes = {node.name: node for node in self.graph}
        self._file_edits: list[FileEdit] = []

    def by(self, pass_name: str, op_type: str | None = None) -> list[ir.Node]:
        """The nodes that a pass inserted."""
        return [
            node
            for node in self.graph
            if node.metadata_props.get(PASS_KEY) == pass_name and op_type in (None, node.op_type)
        ]

    def role(self, name: str) -> ir.Value | None:
        """The value that the metadata give a role."""
        return self.values.get(self.stamp.names.get(name, ""))

    @property
    def scale(self) -> ir.Value:
        value = self.role("loss_scale")
        assert value is not None
        return value

    @property
    def rule(self) -> ir.Function | None:
        """The update rule, where it is a function."""
        return self.model.functions.get(("graphscale", "UpdateLossScale", ""))

    def make(
        self,
        op_type: str,
        inputs: list[ir.Value],
        after: ir.Node | None,
        dtype: ir.DataType | None = FLOAT,
        **attributes: object,
    ) -> ir.Value:
        """Insert a node after another one; return its output."""
        at = None if after is None else ("after", after)
        return self.editor.builder("mutant", "mutant", at=at).op(op_type, inputs, dtype=dtype, **attributes)

    def constant(self, array: np.ndarray) -> ir.Value:
        return self.editor.constant("mutant.constant", array)

    def replace(self, old: ir.Value, new: ir.Value, keep: tuple[ir.Node, ...] = ()) -> None:
        """Let what reads one value read another one, and leave the graph in its place."""
        replace_reads(old, new, [use for use in old.uses() if use.node not in keep])
        if old.is_graph_output():
            if new.is_graph_input() or new.is_graph_output() or new.is_initializer():
                new = self.make("Identity", [new], new.producer(), old.dtype)
            self.editor.take_over_output(old, new, "mutated")

    def around(self, value: ir.Value, op_type: str, *others: ir.Value, dtype: ir.DataType | None = None) -> None:
        """Put an operator on a value, for whatever reads it."""
        new = self.make(op_type, [value, *others], value.producer(), dtype or value.dtype)
        self.replace(value, new, keep=(new.producer(),))  # type: ignore[arg-type]

    def wrap(self, value: ir.Value, make: Callable[[ir.Value], ir.Value]) -> None:
        """Let the readers of a value read what is made of it, except for the writes in place."""
        readers = [use for use in value.uses() if not (use.node.op_type.startswith("InPlace") and use.idx == 0)]
        new = make(value)
        replace_reads(value, new, readers)
        if value.is_graph_output() and not value.is_graph_input():
            self.editor.take_over_output(value, new, "mutated")

    def producer(self, site: str) -> ir.Node:
        """The node that computes a value."""
        node = self.values[site].producer()
        assert node is not None
        return node

    def number(self, number: float | bool, dtype: ir.DataType | None = FLOAT) -> ir.Value:
        """A scalar constant."""
        assert dtype is not None
        return self.constant(np.asarray(number, dtype=dtype.numpy()))

    def both(self, condition: ir.Value) -> None:
        """Let steps be applied only where a further condition holds."""
        flag = self.role("all_finite")
        assert flag is not None
        self.wrap(flag, lambda value: self.make("And", [value, condition], value.producer(), ir.DataType.BOOL))

    def read(self, key: str) -> Any:
        """A property of the scaling, without `graphscale.`."""
        return json.loads(self.model.metadata_props[f"graphscale.{key}"])

    def write(self, key: str, value: Any) -> None:
        self.model.metadata_props[f"graphscale.{key}"] = json.dumps(value)

    def edit_file(self, edit: FileEdit) -> None:
        """Edit the file that the damaged model is written to."""
        self._file_edits.append(edit)

    def finish(self) -> ir.Model | onnx.ModelProto:
        """The damaged model, with its nodes in order and without inserted ones that nothing reads any more."""
        self.tidy()
        if not self._file_edits:
            return self.model
        proto = ir.to_proto(self.model)
        for edit in self._file_edits:
            edit(proto)
        return proto

    def tidy(self) -> None:
        """Put the nodes in order, and remove inserted ones that nothing reads any more."""
        self.graph.sort()
        for node in reversed(list(self.graph)):
            unread = not any(value.uses() or value.is_graph_output() for value in node.outputs)
            if unread and PASS_KEY in node.metadata_props and not node.op_type.startswith("InPlace"):
                self.graph.remove(node, safe=True)
