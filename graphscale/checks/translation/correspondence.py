"""The differences between two graphs, except for inner names and the order of nodes.

Nodes are paired by their terms (`checks/pairing.py`). Of a pair, the attributes, marks and declared types are to be
equal, the operands have equal terms, and constants equal bits; no node, input or output is without a pair.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import onnx
import onnx_ir as ir

from graphscale.checks.pairing import Scope, pair_models
from graphscale.checks.translation.tensor_bits import tensor_difference
from graphscale.graph.marks import MARKS
from graphscale.graph.values import node_name, op_name, subgraphs

__all__ = ["Correspondence", "Size", "attribute_difference", "type_difference"]

_STRANGER = "is neither the original's nor an inserted piece"


class Correspondence:
    """The values and nodes of a found model, each with its counterpart in the expected one.

    Args:
        found: the model to check.
        expected: its expected form.
        where: its graph, for messages.

    Attributes:
        values: the values.
        back: the inverse of `values`.
        nodes: the nodes.
        differences: the differences, a sentence each, nodes without a counterpart first.
        starts: the differences between the initial values of inputs, a sentence each, by the input's name.
        declared: the values with a type or shape declared in the found graph, but not in the expected one. A runtime
            uses declarations: it replaces the shape of a value by a constant.
    """

    def __init__(self, found: ir.Model, expected: ir.Model, where: str = "the graph") -> None:
        self._pairs = pair_models(expected, found)
        self.nodes = self._pairs.back
        self.values: dict[ir.Value, ir.Value] = {}
        self.back: dict[ir.Value, ir.Value] = {}
        self.starts: dict[str, str] = {}
        self.declared: list[tuple[ir.Value, ir.Value]] = []
        self._unmarked: list[str] = []
        self.differences = [*self._strangers()]
        for scope in self._pairs.scopes:
            self.differences += self._compare_graphs(scope, f"the {scope.name}" if scope.name else where)
        for scope in self._pairs.scopes:
            ours, theirs = (getattr(graph, "initializers", {}) for graph in (scope.after, scope.before))
            own = (name for name, value in ours.items() if value not in self.values and name not in theirs)
            self.differences += [f"the constant {name!r} is neither the original's nor an inserted one" for name in own]
        if any(key.startswith(MARKS) for node in self.nodes for key in node.metadata_props):
            self.differences += self._unmarked[:1]

    def _strangers(self) -> Iterator[str]:
        """Yield the nodes without a pair, readers first."""
        scopes, pairs = self._pairs.scopes, self._pairs
        further = (node for scope in scopes for node in reversed(scope.after) if node not in pairs.back)
        yield from (f"{_label(node)} {_STRANGER}" for node in further)
        yield from (f"{_label(n)} is missing" for scope in scopes for n in scope.before if n not in pairs.nodes)

    def _compare_graphs(self, scope: Scope, where: str) -> Iterator[str]:
        found, expected = scope.after, scope.before
        counts = [Counter(node.name for node in graph) for graph in (found, expected)]
        twice = [{name for name, n in each.items() if name and n > 1} for each in counts]
        yield from (f"{where} has two nodes named {name!r}" for name in sorted(twice[0] - twice[1]))
        for kind in ("inputs", "outputs"):
            yield from self._compare_ends(scope, kind, where)
        for node in (node for node in found if node in self.nodes):
            yield from self._compare_nodes(node, self.nodes[node])

    def _compare_ends(self, scope: Scope, kind: str, where: str) -> Iterator[str]:
        """Compare inputs or outputs: of a main graph by name, of others by place."""
        found, expected, what = getattr(scope.after, kind), getattr(scope.before, kind), f"the {kind} of {where}"
        mine, theirs = ([value.name for value in values] for values in (found, expected))
        if scope.is_named and mine != theirs:
            yield from _list_differences(mine, theirs, what)
            wanted = {value.name: value for value in expected}
            pairs = [(value, wanted[value.name]) for value in found if value.name in wanted]
        else:
            if len(found) != len(expected):
                yield f"{where} has {len(found)} {kind}, and should have {len(expected)}"
            pairs = list(zip(found, expected, strict=False))
        is_typed = isinstance(scope.after, ir.Graph)  # a file has no type for a function's input
        for one, other in pairs:
            if kind == "inputs":
                yield from self._pair_values(one, other, is_typed)
            else:
                yield from self._compare_operands(one, other, f"the output {one.name!r} of {where}")
            if is_typed and one.type is None and other.type is not None:
                yield f"the {kind[:-1]} {one.name!r} of {where} has no type"
            if scope.is_named and (one.type, one.shape) != (other.type, other.shape):
                labels = [f"{value.type}, shape {value.shape}" for value in (one, other)]
                yield f"{one.name!r} is {labels[0]}, and should be {labels[1]}"

    def _compare_nodes(self, found: ir.Node, expected: ir.Node) -> Iterator[str]:
        name = _label(found)
        outputs = _trimmed(found.outputs), _trimmed(expected.outputs)
        if [v is not None for v in outputs[0]] != [v is not None for v in outputs[1]]:
            yield f"{name} gives other outputs than it should"
        # Further empty outputs may crash ONNX Runtime, like operands.
        elif len(found.outputs) > len(expected.outputs):
            yield f"{name} gives {len(found.outputs)} values, and should give {len(expected.outputs)}"
        for mine, theirs in zip(*outputs, strict=False):
            if mine is not None and theirs is not None:
                yield from self._pair_values(mine, theirs)
        marks = [{k: m for k, m in n.metadata_props.items() if k.startswith(MARKS)} for n in (found, expected)]
        for key in [key for key, mark in marks[0].items() if marks[1].get(key) != mark]:
            wanted = f"marked {marks[1][key]!r}" if key in marks[1] else "without that mark"
            yield f"{name} is marked {marks[0][key]!r} as {key!r}, and should be {wanted}"
        self._unmarked += [f"{name} lacks the mark {key!r}, which others have" for key in marks[1].keys() - marks[0]]
        if len(subgraphs(found)) != len(subgraphs(expected)):
            yield f"{name} has {len(subgraphs(found))} graphs, and should have {len(subgraphs(expected))}"
        for key in dict.fromkeys((*found.attributes, *expected.attributes)):
            one, other = found.attributes.get(key), expected.attributes.get(key)
            if one is None or other is None:
                yield f"{name} {'lacks the' if one is None else 'has a further'} attribute {key!r}"
            elif (problem := attribute_difference(one, other)) is not None:
                yield f"the attribute {key!r} of {name} {problem}"
        inputs = _trimmed(found.inputs), _trimmed(expected.inputs)
        if len(inputs[0]) != len(inputs[1]) or len(found.inputs) > len(expected.inputs):
            yield f"{name} reads {len(found.inputs)} values, and should read {len(expected.inputs)}"
        for i, operands in enumerate(zip(*inputs, strict=False)):
            yield from self._compare_operands(*operands, f"input {i} of {node_name(found)!r}")

    def _compare_operands(self, found: ir.Value | None, expected: ir.Value | None, reader: str) -> Iterator[str]:
        if found is None or expected is None:
            if found is not expected:
                yield f"{reader} is {'missing' if found is None else f'given, {found.name!r}'}"
            return
        node, origin = found.producer(), expected.producer()
        if node is not None and origin is not None:
            # Equal nodes have equal results: a tool may exchange them. One without a pair is named already.
            is_same = self._pairs.are_equal(expected, found) or node not in self.nodes
        else:
            is_same = self.values.get(found) is expected
            is_free = node is origin and not found.is_graph_input() | expected.is_graph_input()
            if is_free and found not in self.values and expected not in self.back:
                is_same = True
                yield from self._pair_values(found, expected)
        if not is_same:
            other = repr(expected.name) if origin is None else f"{op_name(origin)} {node_name(origin)!r}"
            own = (
                repr(found.name) if node is None or found.name != expected.name else _label(self.nodes.get(node, node))
            )
            yield f"{reader} is {own}, and should be {other}"

    def _pair_values(self, found: ir.Value, expected: ir.Value, is_typed: bool = True) -> Iterator[str]:
        self.values[found], self.back[expected] = expected, found
        if is_typed:
            if (problem := type_difference(found, expected)) is not None:
                yield f"{found.name!r} {problem}"
            elif type_difference(found, expected, lambda size, wanted: size in (None, wanted)) is not None:
                self.declared.append((found, expected))
            if found.type is None and expected.type is not None and not _is_inferred(found):
                yield f"{found.name!r} lacks its type, {expected.type}: no runtime infers it"
        one, other = found.const_value, expected.const_value
        problem = None
        if one is not None and other is not None:
            problem = tensor_difference(one, other)
        elif one is not other:
            problem = "has no initial value" if one is None else "has an initial value, and should have none"
        if problem is not None and expected.is_graph_input():
            self.starts[found.name or ""] = f"the initial value of {found.name!r} {problem}"
        elif problem is not None:
            yield f"the constant {found.name!r} {problem}"


def _label(node: ir.Node) -> str:
    return f"node {node_name(node)!r} ({op_name(node)})"


def _trimmed(values: Sequence[ir.Value | None]) -> list[ir.Value | None]:
    """Return the values without omitted ones at the end; None for other omitted ones."""
    kept = [value if value is not None and value.name else None for value in values]
    while kept and kept[-1] is None:
        kept.pop()
    return kept


def _list_differences(mine: Sequence[str | None], theirs: Sequence[str | None], what: str) -> list[str]:
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
    """Return the difference between two attributes, but for that of their graphs, in the words of a predicate."""
    if found.type != expected.type or found.is_ref() != expected.is_ref():
        return "has another type than it should"
    if found.is_ref():
        same = found.ref_attr_name == expected.ref_attr_name
        return None if same else f"refers to {found.ref_attr_name!r}, and should to {expected.ref_attr_name!r}"
    if found.type in (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS):
        return None
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
