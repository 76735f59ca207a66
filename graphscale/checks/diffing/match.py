"""The matching of two models' nodes.

Nodes are matched first by name, since transformations keep the names of unchanged nodes; then by operator and the names
of their outputs, for nameless nodes; then by operator, attributes and operands, for renamed nodes. Each step visits
every node once.
"""

from __future__ import annotations

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator

import onnx_ir as ir

from graphscale.checks.patterns import input_at, update_signal
from graphscale.graph.builder import PASS_KEY
from graphscale.graph.values import subgraphs
from graphscale.graph.walks import is_contradiction

__all__ = ["Graph", "Matching", "Scope", "attribute_text", "match_models", "tensor_text"]

Graph = ir.Graph | ir.Function
# Tensors up to this many elements are compared by content.
_TINY = 16


@dataclasses.dataclass(frozen=True)
class Scope:
    """Two corresponding graphs: the main graphs, the bodies of matched nodes, functions of the same name.

    Attributes:
        name: empty for the main graphs.
        before: the graph of the first model.
        after: the graph of the second model.
    """

    name: str
    before: Graph
    after: Graph


@dataclasses.dataclass
class Matching:
    """The corresponding nodes, values and graphs of two models.

    Attributes:
        scopes: the graphs, main graphs first.
        nodes: each matched node of the first model with that of the second.
        back: the inverse of `nodes`.
        values: each matched value of the first model with that of the second.
        values_back: the inverse of `values`.
    """

    scopes: list[Scope] = dataclasses.field(default_factory=list)
    nodes: dict[ir.Node, ir.Node] = dataclasses.field(default_factory=dict)
    back: dict[ir.Node, ir.Node] = dataclasses.field(default_factory=dict)
    values: dict[ir.Value, ir.Value] = dataclasses.field(default_factory=dict)
    values_back: dict[ir.Value, ir.Value] = dataclasses.field(default_factory=dict)

    def pair(self, before: ir.Node, after: ir.Node) -> None:
        """Record that two nodes are the same, and so are their results."""
        self.nodes[before], self.back[after] = after, before
        for one, other in zip(before.outputs, after.outputs, strict=False):
            self.values[one], self.values_back[other] = other, one


def match_models(before: ir.Model, after: ir.Model) -> Matching:
    """Match the graphs, subgraphs and functions of two models."""
    matching = Matching()
    pending = [Scope("", before.graph, after.graph)]
    pending += [
        Scope(f"function {function.name}", function, after.functions[key])
        for key, function in before.functions.items()
        if key in after.functions
    ]
    while pending:
        scope = pending.pop(0)
        matching.scopes.append(scope)
        for one, other in _match_graphs(scope.before, scope.after, matching):
            bodies = zip(subgraphs(one), subgraphs(other), strict=False)
            inside = f"{scope.name}/{other.name}" if scope.name else str(other.name)
            pending += [Scope(inside, body, other_body) for body, other_body in bodies]
    return matching


def _match_graphs(before: Graph, after: Graph, matching: Matching) -> list[tuple[ir.Node, ir.Node]]:
    for mine, theirs in zip(_named_values(before), _named_values(after), strict=True):
        for one, other in ((mine[name], theirs[name]) for name in mine if name in theirs):
            matching.values[one], matching.values_back[other] = other, one
    known = len(matching.nodes)
    _match_by(before, after, matching, _by_name)
    _match_by(before, after, matching, _by_outputs)
    _match_by_inputs(before, after, matching)
    return list(matching.nodes.items())[known:]


def _named_values(graph: Graph) -> Iterator[dict[str, ir.Value]]:
    yield {value.name: value for value in graph.inputs if value.name}
    yield dict(graph.initializers) if isinstance(graph, ir.Graph) else {}


def _unmatched(graph: Graph, matched: dict[ir.Node, ir.Node]) -> Iterator[ir.Node]:
    return (node for node in graph if node not in matched)


def _match_by(before: Graph, after: Graph, matching: Matching, key: Callable[[ir.Node], Hashable | None]) -> None:
    """Match nodes with a key that is unique in both graphs."""
    mine = _alone(_unmatched(before, matching.nodes), key)
    theirs = _alone(_unmatched(after, matching.back), key)
    for found, node in mine.items():
        other = theirs.get(found)
        if other is not None and _same_shapes(node, other):
            matching.pair(node, other)


def _alone(nodes: Iterable[ir.Node], key: Callable[[ir.Node], Hashable | None]) -> dict[Hashable, ir.Node]:
    keys = [(found, node) for node in nodes if (found := key(node)) is not None]
    counts = Counter(found for found, _ in keys)
    return {found: node for found, node in keys if counts[found] == 1}


def _by_name(node: ir.Node) -> Hashable | None:
    return (node.name, node.op_identifier()) if node.name else None


def _by_outputs(node: ir.Node) -> Hashable | None:
    names = tuple((i, value.name) for i, value in enumerate(node.outputs) if value.name)
    # An inserted value may have taken over the name of a value of the original.
    return (names, node.op_identifier(), node.metadata_props.get(PASS_KEY)) if names else None


def _same_shapes(one: ir.Node, other: ir.Node) -> bool:
    """Return whether outputs have the same known shapes: exporters number their nodes afresh in every graph."""
    pairs = zip(one.outputs, other.outputs, strict=False)
    return all(a.shape is None or b.shape is None or a.shape == b.shape for a, b in pairs)


def _match_by_inputs(before: Graph, after: Graph, matching: Matching) -> None:
    """Match nodes by their operands, in the order of the second graph, so that each match can lead to the next."""
    waiting: dict[Hashable, list[ir.Node]] = defaultdict(list)
    for node in _unmatched(before, matching.nodes):
        waiting[_signature(node, lambda value: value)].append(node)
    if not waiting:
        return
    for node in _unmatched(after, matching.back):
        candidates = waiting.get(_signature(node, lambda value: _origin(value, matching)))
        if candidates and PASS_KEY not in node.metadata_props and _same_shapes(candidates[0], node):
            matching.pair(candidates.pop(0), node)


def _origin(value: ir.Value, matching: Matching) -> ir.Value | None:
    """Return the first model's counterpart of a value of the second, past inserted nodes."""
    seen = {value}  # nodes of a damaged model may be a cycle
    while value not in matching.values_back:
        node = value.producer()
        source = None if node is None or PASS_KEY not in node.metadata_props else _passed_on(node)
        if source is None or source in seen:
            return None
        value = source
        seen.add(value)
    return matching.values_back[value]


def _passed_on(node: ir.Node) -> ir.Value | None:
    """Return the operand that an inserted node scales, casts, guards or delays."""
    if node.op_type != "Where":
        return input_at(node, 0)
    return node.inputs[2 if is_contradiction(node.inputs[0]) else 1]


def _signature(node: ir.Node, origin: Callable[[ir.Value], ir.Value | None]) -> Hashable:
    attributes = tuple(sorted((name, attribute_text(attribute)) for name, attribute in node.attributes.items()))
    # A guard adds the signal of an optimizer; inputs and outputs may be omitted at the end.
    reads = [(i, v) for i, v in enumerate(node.inputs) if v is not None and v is not update_signal(node)]
    operands = tuple((i, origin(value)) for i, value in reads)
    # A node without a known operand equals no other.
    known = not reads or any(value is not None for _, value in operands)
    count = sum(bool(value.name) for value in node.outputs)
    return node.op_identifier(), attributes, count, operands, None if known else id(node)


def attribute_text(attribute: ir.Attr) -> str:
    """Return an attribute's value as text, or only the kind of a large tensor or a graph."""
    if attribute.is_ref():
        return f"@{attribute.ref_attr_name}"
    value = attribute.value
    if attribute.type in (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS):
        return "graph"
    if isinstance(value, ir.TensorProtocol):
        elements = tensor_text(value)
        return f"{value.dtype.name.lower()}{list(value.shape)}" + (f" {elements}" if elements is not None else "")
    return str(list(value) if isinstance(value, tuple) else value)


def tensor_text(tensor: ir.TensorProtocol) -> str | None:
    """Return a small tensor's elements as text, None for a large, external or damaged one."""
    if tensor.size > _TINY or isinstance(tensor, ir.ExternalTensor):
        return None
    try:
        return str(tensor.numpy().tolist())
    except (TypeError, ValueError):  # its data do not fit its shape
        return None
