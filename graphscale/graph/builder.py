"""Builders that insert nodes into an onnx_ir graph, with unique names, types, and the mark of their pass."""

from __future__ import annotations

import dataclasses
import hashlib
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, Self

import numpy as np
import onnx_ir as ir

from graphscale.graph.marks import PASS_KEY
from graphscale.graph.values import rename
from graphscale.graph.walks import NodeIndex

__all__ = [
    "PASS_KEY",
    "Builder",
    "Editor",
    "Names",
    "Position",
    "behind",
    "count_inserted",
    "replace_inputs",
    "replace_outputs",
    "replace_reads",
]

# The place of a new node: after or before another one, or, with None, at the end of the graph.
Position = tuple[Literal["after", "before"], ir.Node] | None
_Dims = ir.Shape | Sequence[int | str | None] | None


class Names(set[str]):
    """A growing set of taken names."""

    def __init__(self, names: Iterable[str] = ()) -> None:
        super().__init__(names)
        self._suffixes: dict[str, int] = {}  # the next suffix to try for each wanted name

    def reserve(self, wanted: str) -> str:
        """Reserve and return the wanted name, with a numeric suffix if it is taken."""
        name, suffix = wanted, self._suffixes.get(wanted, 1)
        while name in self:
            name, suffix = f"{wanted}_{suffix}", suffix + 1
        self._suffixes[wanted] = suffix
        self.add(name)
        return name


class Editor:
    """An editor of a main graph: it adds constants, state and outputs, and its builders add nodes.

    Args:
        graph: the graph to change.
        index: its nodes, if they are known.

    Attributes:
        index: its nodes without those of the builders.
        renamed: `(wanted, given)` for each wanted name that was taken.
        made: the nodes of its builders.
        dtypes: the dtypes of all values, None for an unknown one.
    """

    def __init__(self, graph: ir.Graph, index: NodeIndex | None = None) -> None:
        self.graph = graph
        self.index = index or NodeIndex(graph)
        self.renamed: list[tuple[str, str]] = []
        self.made: list[ir.Node] = []
        self.dtypes = {*self.index.dtypes}
        self._shared: dict[str, ir.Value] = {}
        self._positions: dict[ir.Value, int] = {}
        self._taken_over: dict[ir.Value, ir.Value] = {}
        self._names = Names(self.index.names)

    def refresh(self) -> None:
        """Reserve names, and note dtypes, that other code has added to the graph since."""
        self.index.refresh()
        self._names.update(self.index.names)
        self.dtypes |= self.index.dtypes

    def unique(self, wanted: str, *, report: bool = False) -> str:
        """Reserve and return the wanted name, with a numeric suffix if it is taken."""
        name = self._names.reserve(wanted)
        if report and name != wanted:
            self.renamed.append((wanted, name))
        return name

    def builder(self, mark: str, prefix: str = "", **defaults: Any) -> Builder:
        """Return a builder of nodes in this graph; see `Builder` for the defaults."""
        return Builder(self, mark, prefix, **defaults)

    def constant(self, name: str, array: np.ndarray[Any, Any], *, report: bool = False) -> ir.Value:
        """Add an initializer that is no graph input: a constant."""
        unique = self.unique(name, report=report)
        value = ir.val(unique, const_value=ir.tensor(array, name=unique))
        self.graph.register_initializer(value)
        return value

    def shared_constant(self, name: str, array: np.ndarray[Any, Any]) -> ir.Value:
        """Return this editor's constant of a name, added on the first call; the name must identify its content."""
        if name not in self._shared:  # a constant of the graph with this name may have other content
            self._shared[name] = self.constant(name, array)
        return self._shared[name]

    def shared_array(self, prefix: str, array: np.ndarray[Any, Any]) -> ir.Value:
        """Return this editor's constant of an array, added on the first call, under a name with its content."""
        flat = np.ascontiguousarray(array)
        shown = array.size <= 4 and array.ndim <= 1
        content = "x".join(map(str, flat.ravel().tolist())) if shown else hashlib.sha256(flat.tobytes()).hexdigest()
        sizes = "".join(f"[{size}]" for size in array.shape)
        return self.shared_constant(f"{prefix}.{array.dtype}{sizes}.{content}", array)

    def state(self, name: str, array: np.ndarray[Any, Any]) -> ir.Value:
        """Add an initializer that is also a graph input, so that runtimes neither fold nor pre-pack it."""
        value = self.constant(name, array, report=True)
        self.graph.inputs.append(value)
        return value

    def output(self, value: ir.Value, wanted: str) -> None:
        """Append a value to the graph's outputs, under the wanted name if it is free."""
        if re.fullmatch(re.escape(wanted) + r"_\d+", value.name or ""):
            self.renamed.append((wanted, value.name or ""))
        elif value.name != wanted:
            value.name = self.unique(wanted, report=True)
        self.graph.outputs.append(value)

    def current_output(self, value: ir.Value) -> ir.Value:
        """Return the last value that took over the name of a graph output, or the output itself."""
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

    def replace(self, old: ir.Value, new: ir.Value, uses: Iterable[Any], suffix: str) -> None:
        """Redirect readers of `old` to `new`, which takes over a graph output with the name of `old`."""
        replace_reads(old, new, uses)
        if old.is_graph_output():
            self.take_over_output(old, new, suffix)

    def replace_result(self, old: ir.Value, new: ir.Value, suffix: str) -> None:
        """Let a value take over the name, the type and all readers of another one, which gets a suffix.

        Args:
            old: the value to replace, in the main graph or in a body.
            new: a value of the same graph that is no input, no output, and has no name from a user.
            suffix: the suffix of the new name of `old`.
        """
        if old.is_graph_output() and old.graph is self.graph:
            self.take_over_output(old, new, suffix)
        else:
            name, new.name = old.name or "", None
            rename(old, self.unique(f"{name}.{suffix}"))
            new.name = name
            new.type, new.shape = old.type or new.type, old.shape or new.shape
            if old.is_graph_output():
                replace_outputs(old, new)
        old.replace_all_uses_with(new)

    def take_over_output(self, old: ir.Value, new: ir.Value, suffix: str) -> None:
        """Replace the graph output `old` by `new`, with its name, type, shape and text; `old` gets a suffix."""
        position = self._output_position(old)
        name = old.name or "output"
        rename(old, self.unique(f"{name}.{suffix}"))
        new.name = name
        new.type = old.type
        new.shape = old.shape
        new.doc_string, old.doc_string = old.doc_string, None
        self.graph.outputs[position] = new
        self._taken_over[old] = new


@dataclasses.dataclass(frozen=True)
class Builder:
    """A builder of nodes with unique names, types and the mark of a pass, at one place of a graph or in a body.

    `onnx_ir.tape.Tape` is not its base, since it can only append, does not make names unique, and leaves the dtypes,
    shapes and marks of all nodes to the caller.

    Attributes:
        editor: the source of names, and of the graph if there is no body.
        mark: the pass that inserts the nodes.
        prefix: the beginning of default names of results: `prefix.operator`.
        at: the default place of nodes: after or before a node, or at the end.
        dtype: the default dtype of results.
        shape: the default shape of results; None for an unknown shape.
        body: the body to build; None for the editor's graph.
        is_marked: True for nodes with the mark; those of an original have none.
    """

    editor: Editor
    mark: str
    prefix: str = ""
    at: Position = None
    dtype: ir.DataType | None = None
    shape: _Dims = None
    body: ir.Graph | None = None
    is_marked: bool = True

    def op(
        self,
        op_type: str,
        inputs: Sequence[ir.Value | None],
        *,
        name: str | None = None,
        like: ir.Value | None = None,
        dtype: ir.DataType | None = None,
        shape: _Dims = None,
        at: Position = None,
        domain: str = "",
        **attributes: Any,
    ) -> ir.Value:
        """Add a node with one result, and return the result.

        Args:
            op_type: the operator.
            inputs: its inputs.
            name: the wanted name of the result.
            like: a value with the shape of the result, and its dtype unless one is given.
            dtype: the dtype of the result.
            shape: the shape of the result.
            at: the place of the node.
            domain: the operator's domain.
            attributes: the node's attributes.
        """
        if name is None:
            name = f"{self.prefix}.{op_type.lower()}" if self.prefix else op_type.lower()
        dtype = dtype or self.dtype or (None if like is None else like.dtype)
        if shape is None:
            shape = self.shape if like is None else like.shape
        node = self.node(op_type, inputs, [(name, dtype, shape)], at=at, domain=domain, attributes=attributes)
        return node.outputs[0]

    def cast(self, value: ir.Value, to: ir.DataType, **options: Any) -> ir.Value:
        """Add a cast of a value, by default with the value's shape; the options are those of `op`."""
        return self.op("Cast", [value], **{"like": value, **options}, dtype=to, to=to)

    def reshape(self, value: ir.Value, shape: Sequence[int], **options: Any) -> ir.Value:
        """Add a Reshape to known sizes, or return the value if it has this shape; the options are those of `op`."""
        if value.shape == shape:
            return value
        name = f"graphscale/{self.mark}.shape.{'x'.join(map(str, shape))}"
        wanted = self.editor.shared_constant(name, np.asarray(shape, dtype=np.int64))
        return self.op("Reshape", [value, wanted], dtype=value.dtype, shape=shape, **options)

    def number(self, number: float | Sequence[int], dtype: ir.DataType) -> ir.Value:
        """Add a Constant node of a scalar, or a vector of some numbers."""
        array = np.asarray(number, dtype=dtype.numpy())
        return self.op("Constant", [], dtype=dtype, shape=array.shape, value=ir.tensor(array))

    def node(
        self,
        op_type: str,
        inputs: Sequence[ir.Value | None],
        outputs: Sequence[tuple[str, ir.DataType | None, _Dims]],
        *,
        at: Position = None,
        domain: str = "",
        attributes: Mapping[str, Any] | None = None,
    ) -> ir.Node:
        """Add a node with any number of results.

        Args:
            op_type: the operator.
            inputs: its inputs.
            outputs: `(wanted name, dtype, shape)` of each result, None for an unknown dtype or shape.
            at: the place of the node.
            domain: the operator's domain, which is added to the graph's opset imports.
            attributes: the node's attributes.
        """
        graph, unique = self.editor.graph, self.editor.unique
        values = [
            ir.val(unique(name), dtype, None if shape is None else ir.Shape(shape)) for name, dtype, shape in outputs
        ]
        node = ir.node(
            op_type,
            inputs,
            domain=domain,
            attributes=attributes or {},
            outputs=values,
            name=unique(f"graphscale/{self.mark}/{values[0].name}"),
            metadata_props={PASS_KEY: self.mark} if self.is_marked else None,
        )
        self.editor.made.append(node)
        self.editor.dtypes.update([dtype for _, dtype, _ in outputs])
        if domain:
            graph.opset_imports.setdefault(domain, 1)
        side, anchor = at or self.at or ("after", None)
        if anchor is None:
            (graph if self.body is None else self.body).append(node)
        else:
            assert anchor.graph is not None
            (anchor.graph.insert_after if side == "after" else anchor.graph.insert_before)(anchor, node)
        return node

    def within(self, name: str, nodes: Iterable[ir.Node] = ()) -> Self:
        """Return a builder of a new body with a name, which begins with some nodes of no graph.

        A body has no inputs, reads the values around it, and has the opset imports of the model.
        """
        return dataclasses.replace(self, at=None, body=ir.Graph([], [], nodes=nodes, name=name))

    def closed(self, outputs: Iterable[ir.Value]) -> ir.Graph:
        """Return the body with its outputs."""
        assert self.body is not None
        self.body.outputs.extend(outputs)
        return self.body


def behind(value: ir.Value) -> Position:
    """Return the place after the node that computes a value; the end of the graph for an input."""
    producer = value.producer()
    return None if producer is None else ("after", producer)


def replace_reads(old: ir.Value, new: ir.Value, uses: Iterable[Any]) -> None:
    """Redirect readers of `old` to `new`. Call `old.uses()` before the node of `new` reads `old`."""
    for node, index in uses:
        assert node.inputs[index] is old
        node.replace_input_with(index, new)


def replace_outputs(old: ir.Value, new: ir.Value) -> None:
    """Replace `old` by `new` in the outputs of its body."""
    assert isinstance(old.graph, ir.Graph)
    outputs = old.graph.outputs
    for index in [i for i, value in enumerate(outputs) if value is old]:
        outputs[index] = new


def replace_inputs(node: ir.Node, values: Sequence[ir.Value]) -> None:
    """Replace all inputs of a node of any number of inputs."""
    node.resize_inputs(len(values))
    for index, value in enumerate(values):
        node.replace_input_with(index, value)


def count_inserted(nodes: Iterable[ir.Node]) -> dict[str, dict[str, int]]:
    """Count the nodes that each pass inserted, by operator: `{pass: {operator: count}}`."""
    marks = ((node.metadata_props.get(PASS_KEY), node.op_type) for node in nodes)
    counts: dict[str, dict[str, int]] = {}
    for (name, op_type), count in Counter(marks).items():
        if name is not None:
            counts.setdefault(name, {})[op_type] = count
    return counts
