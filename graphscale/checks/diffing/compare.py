"""The differences between models, from matched nodes: `graphscale.diff`."""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter, defaultdict
from collections.abc import Container, Iterable, Iterator, Mapping

import onnx_ir as ir

from graphscale.checks.diffing.diff_report import Change, DiffReport, NodeEntry, OpCount, Rewiring, ValueEntry
from graphscale.checks.diffing.texts import attribute_text, tensor_text
from graphscale.checks.pairing import Graph, Pairs, Scope, pair_models
from graphscale.collector import paused_collector
from graphscale.files.training_info import read_bindings, training_info_of
from graphscale.graph.builder import PASS_KEY
from graphscale.graph.damage import name_damage
from graphscale.graph.values import node_name, op_name, subgraphs
from graphscale.pipeline import Model, open_copy
from graphscale.process.stages import report_stage

__all__ = ["Comparison", "compare", "diff"]


@dataclasses.dataclass(frozen=True)
class Comparison:
    """A report on two models, with the second of them.

    Attributes:
        report: the differences.
        after: the second model.
        added: the nodes of its main graph that the first model lacks.
    """

    report: DiffReport
    after: ir.Model
    added: frozenset[ir.Node]


@name_damage
def diff(before: Model, after: Model) -> DiffReport:
    """Compare two models. Neither is changed, and no weight is read.

    Any two models can be compared: a training graph and the scaled one, two scaled ones, or two unrelated ones, which
    the report notes.

    Args:
        before: a path, an onnx_ir model or a ModelProto.
        after: another one.

    Raises:
        ModelFileError: a file cannot be read, or is no model.
        UnsupportedModelError: a model carries `training_info` that is more than bindings of its graph.
    """
    return compare(before, after).report


@paused_collector()
def compare(before: Model, after: Model) -> Comparison:
    """Compare two models; see `diff`."""
    one, other = (open_copy(model)[0] for model in (before, after))
    report_stage("comparing both models")
    pairs = pair_models(one, other)
    added = frozenset(node for node in other.graph if node not in pairs.back)
    return Comparison(_report(one, other, pairs), other, added)


def _report(before: ir.Model, after: ir.Model, pairs: Pairs) -> DiffReport:
    removed = [pair for scope in pairs.scopes for pair in _inside(scope.name, scope.before, pairs.nodes)]
    new = [pair for scope in pairs.scopes for pair in _inside(scope.name, scope.after, pairs.back)]
    inserted: dict[str | None, list[NodeEntry]] = defaultdict(list)
    for scope, node in new:
        inserted[node.metadata_props.get(PASS_KEY)].append(_entry(scope, node))
    added = inserted.pop(None, [])
    matched = sum(node in pairs.nodes for node in before.graph)
    values = list(pairs.values.items())
    graphs: list[tuple[Graph, ...]] = [(model.graph, *model.functions.values()) for model in (before, after)]
    ops = [Counter(op_name(node) for graph in each for node in graph.all_nodes()) for each in graphs]
    functions = [{"::".join(filter(None, key)) for key in model.functions} for model in (before, after)]
    return DiffReport(
        nodes_before=len(before.graph),
        nodes_after=len(after.graph),
        matched=matched,
        related=2 * matched >= min(len(before.graph), len(after.graph)),
        ops=tuple(OpCount(op, ops[0][op], ops[1][op]) for op in sorted({*ops[0], *ops[1]})),
        inserted={name: tuple(entries) for name, entries in inserted.items() if name is not None},
        added=tuple(added),
        removed=tuple(_entry(*found) for found in removed),
        attributes=tuple(_attributes(pairs)),
        rewired=tuple(_rewired(pairs)),
        renamed=tuple(
            Change(node_name(producer), one.name or "", other.name or "")
            for one, other in values
            if one.name != other.name and (producer := other.producer()) is not None
        ),
        retyped=tuple(_retyped(values)),
        reordered=_is_reordered(pairs, after),
        **_only("inputs", _by_name(before.graph.inputs), _by_name(after.graph.inputs)),
        **_only("outputs", _by_name(before.graph.outputs), _by_name(after.graph.outputs)),
        **_only("initializers", before.graph.initializers, after.graph.initializers),
        initializers_changed=tuple(_changed_initializers(before.graph, after.graph)),
        functions_added=tuple(sorted(functions[1] - functions[0])),
        functions_removed=tuple(sorted(functions[0] - functions[1])),
        metadata=tuple(_changes(_metadata(before), _metadata(after))),
        versions=tuple(_changes(_versions(before), _versions(after))),
    )


# --- nodes ----------------------------------------------------------------------------------------------------------


def _inside(scope: str, nodes: Iterable[ir.Node], known: Container[ir.Node] = ()) -> Iterator[tuple[str, ir.Node]]:
    """Yield unknown nodes with their scope, each followed by all nodes of its bodies."""
    for node in (node for node in nodes if node not in known):
        yield scope, node
        for body in subgraphs(node):
            yield from _inside(f"{scope}/{node.name}" if scope else str(node.name), body)


def _entry(scope: str, node: ir.Node) -> NodeEntry:
    return NodeEntry(
        node_name(node), op_name(node), tuple(map(_name, node.inputs)), tuple(map(_name, node.outputs)), scope
    )


def _is_reordered(pairs: Pairs, after: ir.Model) -> bool:
    place = {node: i for i, node in enumerate(after.graph)}
    places = [place[pairs.nodes[node]] for node in pairs.scopes[0].before if node in pairs.nodes]
    return any(a > b for a, b in itertools.pairwise(places))


# --- edges, values and attributes of common nodes -------------------------------------------------------------------


def _attributes(pairs: Pairs) -> Iterator[Change]:
    for one, other in pairs.nodes.items():
        for name in dict.fromkeys((*one.attributes, *other.attributes)):
            pair = [attributes.get(name) for attributes in (one.attributes, other.attributes)]
            before, after = ((None, "") if a is None else (a.type, attribute_text(a)) for a in pair)
            if before != after:
                yield Change(f"{node_name(other)}.{name}", before[1], after[1])


def _rewired(pairs: Pairs) -> Iterator[Rewiring]:
    for scope in pairs.scopes:
        for one in scope.before:
            other = pairs.nodes.get(one)
            if other is None:
                continue
            for i, (before, after) in enumerate(itertools.zip_longest(one.inputs, other.inputs)):
                if not _is_same(pairs, before, after):
                    yield Rewiring(node_name(other), i, _name(before), _name(after), scope.name)
        yield from _rewired_outputs(pairs, scope)


def _rewired_outputs(pairs: Pairs, scope: Scope) -> Iterator[Rewiring]:
    theirs = _by_name(scope.after.outputs)
    for i, value in enumerate(scope.before.outputs):
        # Outputs of the main graph are matched by name; those of bodies and functions by position.
        by_place = scope.after.outputs[i] if i < len(scope.after.outputs) else None
        other = by_place if scope.name else theirs.get(value.name or "")
        if other is not None and not _is_same(pairs, value, other):
            yield Rewiring(other.name or "", None, _giver(value), _giver(other), scope.name)


def _giver(value: ir.Value) -> str:
    node = value.producer()
    return _name(value) if node is None else node_name(node)


def _is_same(pairs: Pairs, one: ir.Value | None, other: ir.Value | None) -> bool:
    if one is None or other is None:
        return one is other or not (one or other) or not _name(one or other)
    if one.producer() is None and other.producer() is None:
        # Of two sources with one name, the content is compared elsewhere.
        return one.name == other.name or pairs.are_equal(one, other)
    return pairs.values.get(one) is other


def _name(value: ir.Value | None) -> str:
    return "" if value is None else value.name or ""


def _retyped(pairs: Iterable[tuple[ir.Value, ir.Value]]) -> Iterator[Change]:
    for one, other in pairs:
        if other.is_initializer():
            continue
        known = ((one.dtype, other.dtype), (one.shape, other.shape))
        if any(a is not None and b is not None and a != b for a, b in known):
            yield Change(other.name or "", _value(one).type, _value(other).type)


# --- values of one model only ---------------------------------------------------------------------------------------


def _by_name(values: Iterable[ir.Value]) -> dict[str, ir.Value]:
    return {value.name: value for value in values if value.name}


def _only(
    kind: str, before: Mapping[str, ir.Value], after: Mapping[str, ir.Value]
) -> dict[str, tuple[ValueEntry, ...]]:
    """Return the values of the second model only, and those of the first only, by their fields in a report."""
    return {
        f"{kind}_added": tuple(_value(value) for name, value in after.items() if name not in before),
        f"{kind}_removed": tuple(_value(value) for name, value in before.items() if name not in after),
    }


def _value(value: ir.Value | ir.TensorProtocol) -> ValueEntry:
    shape = "?" if value.shape is None else "[" + ",".join(str(d) for d in value.shape) + "]"
    return ValueEntry(value.name or "", "?" if value.dtype is None else value.dtype.name, shape)


def _changed_initializers(before: ir.Graph, after: ir.Graph) -> Iterator[Change]:
    for name, one in before.initializers.items():
        other = after.initializers.get(name)
        if other is None or one.const_value is None or other.const_value is None:
            continue
        tensors = (one.const_value, other.const_value)
        types, contents = [_value(tensor).type for tensor in tensors], [tensor_text(tensor) for tensor in tensors]
        if types[0] != types[1]:
            yield Change(name, *types)
        elif None not in contents and contents[0] != contents[1]:
            yield Change(name, *map(str, contents))


# --- the model ------------------------------------------------------------------------------------------------------


def _changes(before: Mapping[str, str], after: Mapping[str, str]) -> Iterator[Change]:
    for key in dict.fromkeys((*before, *after)):
        if before.get(key) != after.get(key):
            yield Change(key, before.get(key, ""), after.get(key, ""))


def _metadata(model: ir.Model) -> dict[str, str]:
    bindings = ", ".join(f"{output}={value}" for output, value in read_bindings(model))
    return {**model.metadata_props, **({"training_info": bindings} if training_info_of(model) else {})}


def _versions(model: ir.Model) -> dict[str, str]:
    opsets = model.graph.opset_imports.items()
    return {
        "IR version": str(model.ir_version),
        "producer": f"{model.producer_name or ''} {model.producer_version or ''}",
        **{f"opset {domain or 'ai.onnx'}": str(number) for domain, number in opsets},
        "graph name": model.graph.name or "",
    }
