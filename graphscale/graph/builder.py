"""Inserting nodes into an onnx_ir graph: unique names, types, and the mark of the pass that made them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import onnx_ir as ir

from graphscale.graph.marks import PASS_KEY
from graphscale.graph.values import subgraphs

__all__ = ["PASS_KEY", "Editor", "Position", "inserted", "read_only", "replace_reads", "shape_like"]

# Where to put a new node: after or before another one, or, with None, at the end of the graph.
Position = tuple[Literal["after", "before"], ir.Node] | None


class Editor:
    """Adds nodes, state and outputs to a main graph.

    Args:
        graph: the graph to change.

    Attributes:
        renamed: `(wanted, given)` for each wanted name that was taken.
    """

    def __init__(self, graph: ir.Graph) -> None:
        self.graph = graph
        self.renamed: list[tuple[str, str]] = []
        self._positions: dict[ir.Value, int] = {}
        self._taken_over: dict[ir.Value, ir.Value] = {}
        self._names: set[str] = set()
        self.refresh()

    def refresh(self) -> None:
        """Take note of the names that others have put into the graph since."""
        _add_names(self.graph, self._names)

    def unique(self, wanted: str, *, report: bool = False) -> str:
        """Return the wanted name, with a numeric suffix if it is taken."""
        name, suffix = wanted, 1
        while name in self._names:
            name, suffix = f"{wanted}_{suffix}", suffix + 1
        self._names.add(name)
        if report and name != wanted:
            self.renamed.append((wanted, name))
        return name

    def node(
        self,
        pass_name: str,
        op_type: str,
        inputs: Sequence[ir.Value | None],
        outputs: Sequence[tuple[str, ir.DataType | None, ir.Shape | Sequence[int] | None]],
        *,
        domain: str = "",
        attributes: Mapping[str, Any] | None = None,
        at: Position = None,
    ) -> ir.Node:
        """Create a node and put it after or before another one, or at the end of the graph.

        Args:
            pass_name: the pass that inserts it.
            op_type: the operator.
            inputs: its inputs.
            outputs: `(name, dtype, shape)` of each output, None for what is not known; names that are taken get a
                suffix.
            domain: the operator's domain; it is added to the graph's opset imports.
            attributes: the node's attributes.
            at: `("after", node)` or `("before", node)`.
        """
        values = [
            ir.Value(
                name=self.unique(name),
                type=None if dtype is None else ir.TensorType(dtype),
                shape=None if shape is None else ir.Shape(shape),
            )
            for name, dtype, shape in outputs
        ]
        node = ir.node(
            op_type,
            inputs,
            domain=domain,
            attributes=attributes or {},
            outputs=values,
            name=self.unique(f"graphscale/{pass_name}/{values[0].name}"),
            metadata_props={PASS_KEY: pass_name},
        )
        if domain:
            self.graph.opset_imports.setdefault(domain, 1)
        if at is None:
            self.graph.append(node)
        elif at[0] == "after":
            self.graph.insert_after(at[1], node)
        else:
            self.graph.insert_before(at[1], node)
        return node

    def constant(self, name: str, array: np.ndarray[Any, Any]) -> ir.Value:
        """Add an initializer that is no graph input: a constant."""
        return self._initializer(name, array)

    def shared_constant(self, name: str, array: np.ndarray[Any, Any]) -> ir.Value:
        """The constant of this name, which is added if it is not there. The name must say what it holds."""
        existing = self.graph.initializers.get(name)
        return self.constant(name, array) if existing is None else existing

    def state(self, name: str, array: np.ndarray[Any, Any]) -> ir.Value:
        """Add an initializer that is also a graph input, so that runtimes neither fold nor pre-pack it."""
        value = self._initializer(name, array, report=True)
        self.graph.inputs.append(value)
        return value

    def _initializer(self, name: str, array: np.ndarray[Any, Any], report: bool = False) -> ir.Value:
        unique = self.unique(name, report=report)
        tensor = ir.tensor(array, name=unique)
        value = ir.Value(name=unique, type=ir.TensorType(tensor.dtype), shape=ir.Shape(array.shape), const_value=tensor)
        self.graph.register_initializer(value)
        return value

    def output(self, value: ir.Value, wanted: str) -> None:
        """Append a value to the graph's outputs, under the name wanted if it is not taken."""
        if value.name == wanted:
            pass
        elif re.fullmatch(re.escape(wanted) + r"_\d+", value.name or ""):
            self.renamed.append((wanted, value.name or ""))
        else:
            value.name = self.unique(wanted, report=True)
        self.graph.outputs.append(value)

    def current(self, value: ir.Value) -> ir.Value:
        """What stands for a graph output now: the value that took over its name last, or itself."""
        while value in self._taken_over:
            value = self._taken_over[value]
        return value

    def _output_position(self, value: ir.Value) -> int:
        # Positions are looked up in a table: a step may have as many outputs as weights.
        outputs = self.graph.outputs
        position = self._positions.get(value)
        if position is None or position >= len(outputs) or outputs[position] is not value:
            self._positions = {output: i for i, output in enumerate(outputs)}
            position = self._positions[value]
        return position

    def take_over_output(self, old: ir.Value, new: ir.Value, suffix: str) -> None:
        """Let `new` be the graph output that `old` is, with its name, type and shape; `old` gets a suffix."""
        position = self._output_position(old)
        name = old.name or "output"
        old.name = self.unique(f"{name}.{suffix}")
        new.name = name
        new.type = old.type
        new.shape = old.shape
        self.graph.outputs[position] = new
        self._taken_over[old] = new


def replace_reads(old: ir.Value, new: ir.Value, uses: Iterable[Any]) -> None:
    """Let these readers of `old` read `new`. Take `old.uses()` before the node that makes `new` reads `old`."""
    for node, index in uses:
        assert node.inputs[index] is old
        node.replace_input_with(index, new)


def read_only(node: ir.Node, values: Sequence[ir.Value]) -> None:
    """Let a node of any number of inputs read these values, and no other ones."""
    node.resize_inputs(len(values))
    for index, value in enumerate(values):
        node.replace_input_with(index, value)


def inserted(nodes: Iterable[ir.Node]) -> dict[str, dict[str, int]]:
    """For each pass, how many of a graph's nodes it put there, by operator."""
    counts: dict[str, Counter[str]] = {}
    for node in nodes:
        name = node.metadata_props.get(PASS_KEY)
        if name is not None:
            counts.setdefault(name, Counter())[node.op_type] += 1
    return {name: dict(counter) for name, counter in counts.items()}


def shape_like(value: ir.Value) -> ir.Shape | None:
    """A value's shape for another one, if it is known: a copy, unless nobody can change it."""
    return value.shape if value.shape is None or value.shape.frozen else value.shape.copy()


def _add_names(graph: ir.Graph, names: set[str]) -> None:
    names.update([value.name or "" for value in (*graph.inputs, *graph.initializers.values())])
    for node in graph:
        names.add(node.name or "")
        for value in node.outputs:
            names.add(value.name or "")
        for body in subgraphs(node):
            _add_names(body, names)
