"""The correspondence of two graphs, from the outputs back: each node of one equals a node of the other.

Outputs correspond by position and name. Their nodes must have the same operator and equal attributes, and their
operands must correspond in turn, up to inputs of the same name and constants of equal bits. So inner names and the
order of nodes are free, and no search is needed.
"""

from __future__ import annotations

import dataclasses
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import onnx
import onnx_ir as ir

from graphscale.checks.translation.signatures import sign_nodes
from graphscale.checks.translation.tensor_bits import tensor_difference
from graphscale.graph.marks import MARKS
from graphscale.graph.values import node_name, op_name

__all__ = ["Correspondence", "Graph", "Size", "attribute_difference", "type_difference"]

Graph = ir.Graph | ir.Function

_BODIES = (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS)
_MOST = 20  # limit of differences: with more, the graphs are not the same


@dataclasses.dataclass
class Correspondence:
    """The values and nodes of a found graph, each with its counterpart in the expected one.

    Attributes:
        values: the values.
        back: the inverse of `values`.
        nodes: the nodes.
        matched: the matched nodes of the expected graph.
        differences: the nodes and values without a counterpart, a sentence each.
        starts: the differences between the initial values of inputs, a sentence each, by the input's name.
        declared: the values with a type or shape declared in the found graph, but not in the expected one. A runtime
            uses declarations: it replaces the shape of a value by a constant.
    """

    values: dict[ir.Value, ir.Value] = dataclasses.field(default_factory=dict)
    back: dict[ir.Value, ir.Value] = dataclasses.field(default_factory=dict)
    nodes: dict[ir.Node, ir.Node] = dataclasses.field(default_factory=dict)
    matched: set[ir.Node] = dataclasses.field(default_factory=set)
    differences: list[str] = dataclasses.field(default_factory=list)
    starts: dict[str, str] = dataclasses.field(default_factory=dict)
    declared: list[tuple[ir.Value, ir.Value]] = dataclasses.field(default_factory=list)
    _pending: deque[tuple[ir.Value | None, ir.Value | None, str]] = dataclasses.field(default_factory=deque)
    _known: set[tuple[str | None, tuple[str, str, str]]] = dataclasses.field(default_factory=set)
    _scopes: list[tuple[Graph, Graph, str]] = dataclasses.field(default_factory=list)
    _strangers: set[ir.Node | None] = dataclasses.field(default_factory=set)
    _is_marked: bool = False
    _unmarked: list[str] = dataclasses.field(default_factory=list)

    def compare(self, found: Graph, expected: Graph, where: str = "the graph", named: bool = True) -> None:
        """Compare two graphs, and add their differences.

        Args:
            found: the graph to check.
            expected: its expected form.
            where: the graph, for messages.
            named: True if inputs and outputs must have the same names in both.
        """
        self._known = {(node.name, node.op_identifier()) for node in expected.all_nodes()}
        self._enter(found, expected, where, named)
        self._walk()
        for scope in self._scopes:  # grows, as leftovers have bodies of their own
            self._pair_leftovers(*scope)
        self._scopes.clear()
        if self._is_marked:
            self.differences += self._unmarked[:1]

    def _enter(self, found: Graph, expected: Graph, where: str, named: bool) -> None:
        self._scopes.append((found, expected, where))
        counts = [Counter(node.name for node in graph) for graph in (found, expected)]
        twice = [{name for name, n in each.items() if name and n > 1} for each in counts]
        self.differences += [f"{where} has two nodes named {name!r}" for name in sorted(twice[0] - twice[1])]
        for kind in ("inputs", "outputs"):
            mine, theirs = getattr(found, kind), getattr(expected, kind)
            if named and [value.name for value in mine] != [value.name for value in theirs]:
                self.differences += _list_differences(mine, theirs, f"the {kind} of {where}")
                wanted = {value.name: value for value in theirs}
                pairs = [(value, wanted[value.name]) for value in mine if value.name in wanted]
            else:
                if len(mine) != len(theirs):
                    self.differences.append(f"{where} has {len(mine)} {kind}, and should have {len(theirs)}")
                pairs = list(zip(mine, theirs, strict=False))
            for one, other in pairs:
                what = f"the {kind[:-1]} {one.name!r} of {where}"
                if kind == "inputs":
                    # A file has no type for a function's input.
                    self._pair_values(one, other, is_typed=isinstance(found, ir.Graph))
                else:
                    self._pending.append((one, other, what))
                if isinstance(found, ir.Graph) and one.type is None and other.type is not None:
                    self.differences.append(f"{what} has no type")
                if named and (one.type, one.shape) != (other.type, other.shape):
                    labels = [f"{value.type}, shape {value.shape}" for value in (one, other)]
                    self.differences.append(f"{one.name!r} is {labels[0]}, and should be {labels[1]}")

    def _compare_types(self, found: ir.Value, expected: ir.Value) -> None:
        problem = type_difference(found, expected)
        if problem is not None:
            self.differences.append(f"{found.name!r} {problem}")
        elif type_difference(found, expected, lambda size, wanted: size in (None, wanted)) is not None:
            self.declared.append((found, expected))
        if found.type is None and expected.type is not None and not _is_inferred(found):
            self.differences.append(f"{found.name!r} lacks its type, {expected.type}: no runtime infers it")

    def _pair_values(self, found: ir.Value, expected: ir.Value, is_typed: bool = True) -> None:
        self.values[found], self.back[expected] = expected, found
        if is_typed:
            self._compare_types(found, expected)
        one, other = found.const_value, expected.const_value
        problem: str | None = None
        if one is not None and other is not None:
            problem = tensor_difference(one, other)
        elif one is not other:
            problem = "has no initial value" if one is None else "has an initial value, and should have none"
        if problem is not None and expected.is_graph_input():
            self.starts[found.name or ""] = f"the initial value of {found.name!r} {problem}"
        elif problem is not None:
            self.differences.append(f"the constant {found.name!r} {problem}")

    def _walk(self) -> None:
        while self._pending and len(self.differences) < _MOST:
            found, expected, reader = self._pending.popleft()
            if found is None or expected is None:
                if found is not expected:
                    self.differences.append(f"{reader} is {'missing' if found is None else f'given, {found.name!r}'}")
                continue
            if self.values.get(found) is expected:
                continue
            one, other = found.producer(), expected.producer()
            is_new = found not in self.values and expected not in self.back
            if is_new and one is not None and other is not None and self._pair_nodes(one, other, found, expected):
                continue
            if is_new and one is None and other is None and not found.is_graph_input() | expected.is_graph_input():
                self._pair_values(found, expected)
            elif one is None or one not in self._strangers:
                self.differences.append(self._name_stranger(found, expected, reader))

    def _name_stranger(self, found: ir.Value, expected: ir.Value, reader: str) -> str:
        node, wanted = found.producer(), self.back.get(expected)
        origin = expected.producer() if wanted is None else None
        other = repr((wanted or expected).name) if origin is None else f"{op_name(origin)} {node_name(origin)!r}"
        if found in self.values or (node is not None and (node.name, node.op_identifier()) in self._known):
            return f"{reader} is {found.name!r}, and should be {other}"
        self._strangers.add(node)
        what = f"value {found.name!r}" if node is None else _label(node)
        return f"{what} is neither the original's nor an inserted piece: {reader} should come from {other}"

    def _pair_nodes(self, found: ir.Node, expected: ir.Node, one: ir.Value, other: ir.Value) -> bool:
        """Pair two nodes, and record their differences; return False for completely different nodes."""
        if found.op_identifier() != expected.op_identifier() or found in self.nodes or one.index() != other.index():
            return False
        self.nodes[found] = expected
        self.matched.add(expected)
        name = _label(found)
        outputs = _trimmed(found.outputs), _trimmed(expected.outputs)
        if [v is not None for v in outputs[0]] != [v is not None for v in outputs[1]]:
            self.differences.append(f"{name} gives other outputs than it should")
        # Further empty outputs may crash ONNX Runtime, like operands.
        elif len(found.outputs) > len(expected.outputs):
            given = len(found.outputs)
            self.differences.append(f"{name} gives {given} values, and should give {len(expected.outputs)}")
        for mine, theirs in zip(*outputs, strict=False):
            if mine is not None and theirs is not None:
                self._pair_values(mine, theirs)
        self._compare_marks(found, expected, name)
        self._compare_attributes(found, expected, name)
        inputs = _trimmed(found.inputs), _trimmed(expected.inputs)
        if len(inputs[0]) != len(inputs[1]) or len(found.inputs) > len(expected.inputs):
            self.differences.append(f"{name} reads {len(found.inputs)} values, and should read {len(expected.inputs)}")
        for i, operands in enumerate(zip(*inputs, strict=False)):
            self._pending.append((*operands, f"input {i} of {node_name(found)!r}"))
        return True

    def _compare_marks(self, found: ir.Node, expected: ir.Node, name: str) -> None:
        """Compare the passes' marks of a node; a tool may have dropped the marks of all nodes."""
        mine, theirs = ({k: m for k, m in n.metadata_props.items() if k.startswith(MARKS)} for n in (found, expected))
        for key in [key for key, mark in mine.items() if theirs.get(key) != mark]:
            wanted = f"marked {theirs[key]!r}" if key in theirs else "without that mark"
            self.differences.append(f"{name} is marked {mine[key]!r} as {key!r}, and should be {wanted}")
        self._is_marked |= bool(mine)
        self._unmarked += [f"{name} lacks the mark {key!r}, which others have" for key in theirs.keys() - mine.keys()]

    def _compare_attributes(self, found: ir.Node, expected: ir.Node, name: str) -> None:
        for key in dict.fromkeys((*found.attributes, *expected.attributes)):
            one, other = found.attributes.get(key), expected.attributes.get(key)
            if one is None or other is None:
                self.differences.append(f"{name} {'lacks the' if one is None else 'has a further'} attribute {key!r}")
            elif one.type == other.type and one.type in _BODIES and not one.is_ref() and not other.is_ref():
                bodies = [(a.value,) if a.type is ir.AttributeType.GRAPH else tuple(a.value) for a in (one, other)]
                if len(bodies[0]) != len(bodies[1]):
                    self.differences.append(f"{name} has {len(bodies[0])} graphs in {key!r}, not {len(bodies[1])}")
                for body, wanted in zip(*bodies, strict=False):
                    self._enter(body, wanted, f"the {key} of {name}", False)
            else:
                problem = attribute_difference(one, other)
                if problem is not None:
                    self.differences.append(f"the attribute {key!r} of {name} {problem}")

    def _pair_leftovers(self, found: Graph, expected: Graph, where: str) -> None:
        """Pair nodes without effect on outputs, such as writes in place, by their signatures; report the others."""
        if self.differences:
            return
        mine, wanted = {}, defaultdict[bytes, list[ir.Node]](list)
        if any(node not in self.nodes for node in found):
            mine = sign_nodes(found)
            for node, signature in sign_nodes(expected).items():
                if node not in self.matched:
                    wanted[signature].append(node)
        for node in reversed([node for node in mine if node not in self.nodes]):  # readers first
            same = wanted[mine[node]]
            while same and node not in self.nodes:
                other = same.pop()
                if other not in self.matched:
                    self._pair_nodes(node, other, node.outputs[0], other.outputs[0])
                    self._walk()
        strangers = [node for node in found if node not in self.nodes and node not in self._strangers]
        missing = [node for node in expected if node not in self.matched]
        for node in strangers[:_MOST]:
            self.differences.append(f"{_label(node)} is neither the original's nor an inserted piece")
        self.differences += [f"{_label(node)} is missing" for node in missing[:_MOST]]
        ours, theirs = (getattr(graph, "initializers", {}) for graph in (found, expected))
        own = [name for name, value in ours.items() if value not in self.values and name not in theirs]
        text = f"of {where} is neither the original's nor an inserted one"
        self.differences += [f"the constant {name!r} {text}" for name in own]


def _label(node: ir.Node) -> str:
    return f"node {node_name(node)!r} ({op_name(node)})"


def _trimmed(values: Sequence[ir.Value | None]) -> list[ir.Value | None]:
    """Return the values without omitted ones at the end; None for other omitted ones."""
    kept = [value if value is not None and value.name else None for value in values]
    while kept and kept[-1] is None:
        kept.pop()
    return kept


def _list_differences(found: Iterable[ir.Value], expected: Iterable[ir.Value], what: str) -> list[str]:
    mine, theirs = [value.name for value in found], [value.name for value in expected]
    more, less = [name for name in mine if name not in theirs], [name for name in theirs if name not in mine]
    notes = [f"{name!r} is none of {what}" for name in more] + [f"{name!r} is missing among {what}" for name in less]
    return notes or [f"{what} are in another order"]


Size = int | str | None


def type_difference(
    found: ir.Value, expected: ir.Value, fits: Callable[[Size, Size], bool] | None = None
) -> str | None:
    """Return the contradiction between the declared types and shapes of two values.

    Args:
        found: the value.
        expected: its counterpart.
        fits: returns whether a size, a number, a name or None, fits that of the counterpart. Then the value may declare
            nothing else beyond the counterpart's declarations; without `fits`, it may.
    """
    if found.type != expected.type and found.type is not None and (fits is not None or expected.type is not None):
        return f"is declared {found.type}, and should be {expected.type}"
    mine, theirs = _sizes(found), _sizes(expected)
    if mine is None or (theirs is None and fits is None):
        return None
    fits = fits or (lambda found, expected: found == expected or None in (found, expected))
    if theirs is not None and len(mine) == len(theirs) and all(map(fits, mine, theirs)):
        return None
    return f"is declared of shape {found.shape}, and should be of {expected.shape}"


def _sizes(value: ir.Value) -> list[Size] | None:
    return None if value.shape is None else [axis if isinstance(axis, int) else axis.value for axis in value.shape]


def _is_inferred(value: ir.Value) -> bool:
    """Return whether runtimes infer the type of a value, except that of ONNX Runtime's own operators."""
    node = value.producer()
    return node is None or node.domain != "" or onnx.defs.has(node.op_type)


def attribute_difference(found: ir.Attr, expected: ir.Attr) -> str | None:
    """Return the difference between two attributes without graphs, in the words of a predicate."""
    if found.type != expected.type or found.is_ref() != expected.is_ref():
        return "has another type than it should"
    if found.is_ref():
        same = found.ref_attr_name == expected.ref_attr_name
        return None if same else f"refers to {found.ref_attr_name!r}, and should to {expected.ref_attr_name!r}"
    if found.type in (ir.AttributeType.TENSOR, ir.AttributeType.TENSORS):
        tensors = [(a.value,) if a.type is ir.AttributeType.TENSOR else tuple(a.value) for a in (found, expected)]
        if len(tensors[0]) != len(tensors[1]):
            return "has another number of tensors than it should"
        return next(filter(None, map(tensor_difference, *tensors)), None)
    # NaN does not equal itself, and has several bit patterns; -0.0 differs from 0.0.
    is_float = found.type in (ir.AttributeType.FLOAT, ir.AttributeType.FLOATS)
    one, other = (np.asarray(a.value, np.float32).tobytes() if is_float else repr(a.value) for a in (found, expected))
    if one != other:
        return f"is {found.value!r}, and should be {expected.value!r}"
    return None
