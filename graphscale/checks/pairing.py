"""Pairs of nodes of two models: equal terms first, then names.

The nodes of the second model are visited in execution order. A node whose operator, attributes and operands' terms are
those of nodes of the first model is paired with the one of its name among them, else with the first one; any other node
changed, and is paired by its name or those of its outputs. The results of a pair have equal terms. An inserted node
without a pair passes on the term of the operand that it scales, casts, guards or delays.
"""

from __future__ import annotations

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Iterator

import onnx_ir as ir

from graphscale.checks.patterns import input_at, update_signal
from graphscale.flow.term import computation, content_key
from graphscale.graph.marks import MARKS, PASS_KEY
from graphscale.graph.values import subgraphs
from graphscale.graph.walks import is_contradiction
from graphscale.operators import Trait, has_trait

__all__ = ["Graph", "Pairs", "Scope", "pair_models"]

Graph = ir.Graph | ir.Function
_BODIES = (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS)


@dataclasses.dataclass(frozen=True)
class Scope:
    """Two corresponding graphs: the main graphs, the bodies of paired nodes, functions of the same name.

    Attributes:
        name: empty for the main graphs.
        before: the graph of the first model.
        after: the graph of the second model.
        is_named: True for graphs whose inputs correspond by name, not by place.
    """

    name: str
    before: Graph
    after: Graph
    is_named: bool = False


class Pairs:
    """The corresponding nodes, values and graphs of two models.

    Attributes:
        scopes: the graphs, main graphs first.
        nodes: each paired node of the first model with that of the second.
        back: the inverse of `nodes`.
        values: each result of a paired node, and each input and initializer, with that of the second model.
    """

    def __init__(self, with_marks: bool) -> None:
        self.scopes: list[Scope] = []
        self.nodes: dict[ir.Node, ir.Node] = {}
        self.back: dict[ir.Node, ir.Node] = {}
        self.values: dict[ir.Value, ir.Value] = {}
        self._with_marks = with_marks
        self._numbers: dict[Hashable, int] = {}
        self._terms: dict[ir.Value, int] = {}

    def are_equal(self, before: ir.Value, after: ir.Value) -> bool:
        """Return whether two values have one term."""
        return self._terms.get(before, before) == self._terms.get(after, after)

    def add(self, scope: Scope) -> Iterator[Scope]:
        """Pair the nodes of two graphs; yield those of the bodies of pairs."""
        self.scopes.append(scope)
        self._add_sources(scope)
        left = defaultdict[Hashable, list[ir.Node]](list)
        for node in scope.before:
            key = self._key(node)
            self._number_results(node, key)
            left[key].append(node)
        named, counts = _alone(scope.before), Counter(map(_name_of, scope.after))
        for node in scope.after:
            key = self._key(node)
            same = [other for other in left[key] if other not in self.nodes]
            same = [other for other in same if other.name == node.name] or same
            if not same and counts[_name_of(node)] == 1:
                changed = named.get(_name_of(node))
                same = [changed] if changed and changed not in self.nodes and _same_shapes(changed, node) else []
            if same:
                yield from self._pair(scope, same[0], node)
            elif (source := _passed_on(node)) is not None and source in self._terms:
                self._terms.update((value, self._terms[source]) for value in node.outputs)
            else:
                self._number_results(node, key)

    def _pair(self, scope: Scope, before: ir.Node, after: ir.Node) -> Iterator[Scope]:
        self.nodes[before], self.back[after] = after, before
        self.values.update(zip(before.outputs, after.outputs, strict=False))
        for value in after.outputs[len(before.outputs) :]:
            self._terms[value] = self._number(value)
        for one, other in zip(before.outputs, after.outputs, strict=False):
            self._terms[other] = self._terms[one]
        inside = f"{scope.name}/{after.name}" if scope.name else str(after.name)
        mine, theirs = _bodies(before), _bodies(after)
        yield from (Scope(inside, mine[place], theirs[place]) for place in mine if place in theirs)

    def _add_sources(self, scope: Scope) -> None:
        """Pair inputs and initializers by name, except for constants that have the content of another one."""
        mine, theirs = ({v.name: v for v in _sources(graph)} for graph in (scope.before, scope.after))
        if not scope.is_named:
            for place, pair in enumerate(zip(scope.before.inputs, scope.after.inputs, strict=False)):
                self.values[pair[0]] = pair[1]
                self._terms.update(dict.fromkeys(pair, self._number((scope.name, place))))
        renamed = defaultdict[Hashable, list[int]](list)
        for name, value in mine.items():
            # Two states may begin with one content: in a graph, each source is another value.
            term, content = self._terms.setdefault(value, self._number(value)), _content(value)
            if content is not None and _content(theirs.get(name)) != content:
                renamed[content].append(term)
        for name, value in theirs.items():
            other, content = mine.get(name), _content(value)
            if other is not None and value not in self._terms:
                self.values[other] = value
            same = [] if other is None else [self._terms[other]]
            if content is not None and content != _content(other):
                same = renamed[content] or same
            self._terms.setdefault(value, same.pop(0) if same else self._number(value))

    def _number_results(self, node: ir.Node, key: Hashable) -> None:
        """Give numbers to the results of a node by its computation, new ones to draws and results of bodies."""
        is_new = has_trait(node, Trait.RANDOM) or bool(subgraphs(node))
        for place, value in enumerate(node.outputs):
            self._terms[value] = self._number((value if is_new else key, place))

    def _number(self, key: Hashable) -> int:
        return self._numbers.setdefault(key, len(self._numbers))

    def _key(self, node: ir.Node) -> Hashable:
        """Return the computation of a node, the number of its results, its bodies' operators, and its marks."""
        signal = update_signal(node)  # a guard adds it
        read = [v if v is not None and v.name else None for v in node.inputs if v is None or v is not signal]
        while read and read[-1] is None:
            read.pop()
        marks = [pair for pair in node.metadata_props.items() if pair[0].startswith(MARKS)] if self._with_marks else ()
        count = sum(bool(value.name) for value in node.outputs)
        inside = [inner.op_type for body in subgraphs(node) for inner in body]
        terms = [None if value is None else self._term(value) for value in read]
        return computation(node, terms), count, tuple(inside), tuple(sorted(marks))

    def _term(self, value: ir.Value) -> int:
        """Return the term of a value; in a damaged graph it may have no source, or stand above its node."""
        term = self._terms.get(value)
        return self._number(value.name if value.producer() is None else value) if term is None else term


def pair_models(before: ir.Model, after: ir.Model) -> Pairs:
    """Pair the nodes of the graphs, subgraphs and functions of two models."""
    # Another tool may have dropped the marks of all nodes.
    pairs = Pairs(any(name.startswith(MARKS) for node in after.graph for name in node.metadata_props))
    pending = [Scope("", before.graph, after.graph, True)]
    pending += [
        Scope(f"function {function.name}", function, after.functions[key])
        for key, function in before.functions.items()
        if key in after.functions
    ]
    for scope in pending:  # grows
        pending += pairs.add(scope)
    return pairs


def _bodies(node: ir.Node) -> dict[tuple[str, int], ir.Graph]:
    """Return the bodies of a node by attribute and place: files may have attributes in any order."""
    if not subgraphs(node):
        return {}
    held = sorted((a for a in node.attributes.values() if a.type in _BODIES and not a.is_ref()), key=lambda a: a.name)
    graphs = ((a.name, [a.as_graph()] if a.type is ir.AttributeType.GRAPH else a.as_graphs()) for a in held)
    return {(name, i): graph for name, each in graphs for i, graph in enumerate(each)}


def _sources(graph: Graph) -> list[ir.Value]:
    return [*graph.inputs, *(graph.initializers.values() if isinstance(graph, ir.Graph) else ())]


def _content(value: ir.Value | None) -> Hashable | None:
    """Return the content of a constant, of a large one only its type and shape; None for other sources."""
    tensor = None if value is None or value.is_graph_input() else value.const_value
    return None if tensor is None else content_key(tensor) or (tensor.dtype, tuple(tensor.shape))


def _alone(nodes: Iterable[ir.Node]) -> dict[Hashable, ir.Node]:
    named = [(_name_of(node), node) for node in nodes]
    counts = Counter(name for name, _ in named)
    return {name: node for name, node in named if counts[name] == 1}


def _name_of(node: ir.Node) -> Hashable:
    """Return the operator with the name of a node, or with those of its outputs."""
    if node.name:
        return node.op_identifier(), node.name
    # An inserted value may have taken over the name of a value of the original.
    return node.op_identifier(), node.metadata_props.get(PASS_KEY), tuple(value.name for value in node.outputs)


def _same_shapes(one: ir.Node, other: ir.Node) -> bool:
    """Return whether outputs have the same known shapes: exporters number their nodes afresh in every graph."""
    pairs = zip(one.outputs, other.outputs, strict=False)
    return all(a.shape is None or b.shape is None or a.shape == b.shape for a, b in pairs)


def _passed_on(node: ir.Node) -> ir.Value | None:
    """Return the operand that an inserted node scales, casts, guards or delays; None for other nodes."""
    if PASS_KEY not in node.metadata_props:
        return None
    place = 0 if node.op_type != "Where" else 2 if is_contradiction(node.inputs[0]) else 1
    return input_at(node, place)
