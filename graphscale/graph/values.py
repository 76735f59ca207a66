"""Small properties of single values and nodes, for all parts of the analysis."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx_ir as ir

from graphscale.operators import OPERATORS, Kind, constant_tensor, rule_of

__all__ = [
    "Use",
    "all_nodes",
    "captured_values",
    "constant_number",
    "constant_tensor",
    "contains_contraction",
    "has_bodies",
    "inner_nodes",
    "inputs_of",
    "is_float",
    "is_known_zero",
    "is_scalar",
    "is_source",
    "is_tensor",
    "main_node",
    "main_nodes",
    "node_name",
    "op_name",
    "operand_at",
    "operands_of",
    "own_dtype",
    "reads_shape",
    "rename",
    "subgraphs",
    "uses_of",
    "value_label",
    "values_by_name",
]

# A search for zeros reads only constants in sums with gradients. A weight has a nonzero number among the first few, so
# that no weight is ever read completely.
_PROBE = 1024


class Use(NamedTuple):
    """A reader of a value: a node, and the index of its input; equal to an item of `ir.Value.uses()`."""

    node: ir.Node
    idx: int


def uses_of(value: ir.Value) -> list[Use]:
    """Return all readers of a value, in subgraphs too."""
    return list(value.uses())  # type: ignore[arg-type]


def operand_at(use: Use) -> ir.Value:
    """Return the value that a node reads at an input."""
    value = use.node.inputs[use.idx]
    assert value is not None
    return value


def reads_shape(node: ir.Node) -> bool:
    """Return whether a node reads only the shape of its operands."""
    rule = rule_of(node)
    return rule is not None and rule.kind is Kind.SHAPE


def op_name(node: ir.Node) -> str:
    """Return the operator with its domain, as in `com.microsoft::ReluGrad`."""
    return f"{node.domain}::{node.op_type}" if node.domain else node.op_type


def node_name(node: ir.Node) -> str:
    """Return the name of a node for messages: its name, else its operator and first output."""
    if node.name:
        return node.name
    output = next((value.name for value in node.outputs if value.name), "?")
    return f"{op_name(node)} -> {output}"


def value_label(value: ir.Value) -> str:
    """Return a value's name, dtype and shape for messages, as in `fc1.weight FLOAT[10,64]`."""
    if value.dtype is None and value.shape is None:
        return f"{value.name} of unknown type"
    shape = "[?]" if value.shape is None else "[" + ",".join(str(d) for d in value.shape) + "]"
    return f"{value.name} {value.dtype.name if value.dtype else '?'}{shape}"


_FLOATING = frozenset(dtype for dtype in ir.DataType if dtype.is_floating_point())


def is_float(value: ir.Value) -> bool:
    """Return whether the value's dtype is a floating-point type; an unknown dtype counts as one."""
    dtype = own_dtype(value)
    return dtype is None or dtype in _FLOATING


def own_dtype(value: ir.Value) -> ir.DataType | None:
    """Return the declared dtype of a value, from the value, its tensor or the attributes of its node."""
    dtype = value.dtype
    if dtype is not None:
        return dtype
    if value.const_value is not None:
        return value.const_value.dtype
    node = value.producer()
    if node is None:
        return None
    operator = OPERATORS.get((node.domain, node.op_type))
    if node.domain or operator is None or operator.dtype is not None:
        return None if operator is None else operator.dtype
    if node.op_type == "Cast":
        to = node.attributes.get_int("to")
        return ir.DataType(to) if to in set(ir.DataType) else None
    if node.op_type == "Constant":
        tensor = constant_tensor(value)
        return None if tensor is None else tensor.dtype
    if node.op_type == "ConstantOfShape":
        fill = node.attributes.get_tensor("value")
        return ir.DataType.FLOAT if fill is None else fill.dtype
    return None


_ONE = frozenset({1})


def is_scalar(value: ir.Value) -> bool:
    """Return whether the value is known to hold exactly one element (shape [] or all ones)."""
    shape = value.shape
    if shape is None:
        tensor = constant_tensor(value)
        return tensor is not None and tensor.size == 1
    return _ONE.issuperset(shape.dims)


# The operators with a sequence or an optional value as result.
_CONTAINERS = ("SplitToSequence", "SequenceConstruct", "SequenceInsert", "SequenceErase", "SequenceEmpty", "Optional")


def is_tensor(value: ir.Value) -> bool:
    """Return whether a value is a tensor, by its type or its operator: no sequence and no optional value."""
    while value.type is None and (node := value.producer()) is not None:
        if node.op_type != "Identity" or node.inputs[0] is None:
            return node.op_type not in _CONTAINERS
        value = node.inputs[0]
    return value.type is None or isinstance(value.type, ir.TensorType)


def is_source(value: ir.Value) -> bool:
    """Return whether a value is an input or an initializer of any graph."""
    return value.producer() is None and (value.is_graph_input() or value.is_initializer())


def rename(value: ir.Value, name: str) -> None:
    """Rename a value, with a copy of its tensor, since the caller's model shares the tensor and its name."""
    tensor = value.const_value
    if isinstance(tensor, ir.ExternalTensor):
        from graphscale.files.external_data import relocate

        value.const_value = relocate(tensor, Path(tensor.base_dir), os.fspath(tensor.location))
    elif tensor is not None:
        value.const_value = ir.serde.deserialize_tensor(ir.serde.serialize_tensor(tensor))
    value.name = name


def values_by_name(graph: ir.Graph) -> dict[str, ir.Value]:
    """Return all values of a main graph by name."""
    return ir.convenience.create_value_mapping(graph, include_subgraphs=False)


_GRAPH, _GRAPHS = ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS


def subgraphs(node: ir.Node) -> Sequence[ir.Graph]:
    """Return the graphs in a node's attributes: the branches of If, the bodies of Loop and Scan."""
    attributes = node.attributes.data  # the dict itself: this is the most frequent call of all
    if not attributes:
        return ()
    found: list[ir.Graph] = []
    for attribute in attributes.values():
        kind = attribute.type
        if kind is _GRAPH or kind is _GRAPHS:
            found.extend([attribute.as_graph()] if kind is _GRAPH else attribute.as_graphs())
    return found


def captured_values(node: ir.Node) -> tuple[ir.Value, ...]:
    """Return the values of outer scopes that a node's subgraphs read, each once, in order.

    `onnx_ir.analysis.analyze_implicit_usage` returns sets, whose order differs from run to run.
    """
    bodies = subgraphs(node)
    if not bodies:
        return ()
    graphs = [graph for body in bodies for graph in (body, *body.subgraphs())]
    found = dict.fromkeys(value for inner in inner_nodes(node) for value in inputs_of(inner))
    found.update(dict.fromkeys(value for graph in graphs for value in graph.outputs))
    return tuple(value for value in found if value.graph not in graphs)


def all_nodes(graph: Iterable[ir.Node]) -> Iterator[ir.Node]:
    """Yield the nodes of a graph, bodies included; for graphs of few bodies, in half the time of onnx_ir."""
    for node in graph:
        yield node
        if node.attributes.data and subgraphs(node):
            yield from inner_nodes(node)


def inner_nodes(node: ir.Node) -> Iterator[ir.Node]:
    """Yield the nodes in a node's subgraphs, nested ones included."""
    for body in subgraphs(node):
        yield from body.all_nodes()


def contains_contraction(node: ir.Node) -> bool:
    """Return whether a node is a contraction, or has one in its subgraphs."""
    rules = (rule_of(inner) for inner in (node, *inner_nodes(node)))
    return any(rule is not None and rule.contraction for rule in rules)


def inputs_of(node: ir.Node) -> tuple[ir.Value, ...]:
    """Return a node's inputs without omitted ones."""
    inputs: Sequence[Any] = node.inputs
    return tuple(value for value in inputs if value is not None) if None in inputs else tuple(inputs)


def operands_of(node: ir.Node) -> tuple[ir.Value, ...]:
    """Return the operands of a node: its inputs, and the captures of its subgraphs."""
    return (*inputs_of(node), *captured_values(node)) if subgraphs(node) else inputs_of(node)


def main_nodes(nodes: Iterable[ir.Node]) -> dict[ir.Graph, ir.Node]:
    """Map each graph nested in the nodes of a main graph to the node around it."""
    holders = ((node, body) for node in nodes if node.attributes.data for body in subgraphs(node))
    return {graph: node for node, body in holders for graph in (body, *body.subgraphs())}


def main_node(owners: Mapping[ir.Graph, ir.Node], node: ir.Node) -> ir.Node:
    """Return the node of the main graph around a node, or the node itself; see `main_nodes`."""
    return owners.get(node.graph, node) if isinstance(node.graph, ir.Graph) else node


def constant_number(value: ir.Value | None, *, initial: bool = False) -> float | None:
    """Return the number in a constant of one element, or with `initial` in an initial value; else None."""
    tensor = value.const_value if initial and value is not None else constant_tensor(value)
    is_number = tensor is not None and tensor.size == 1 and tensor.dtype is not ir.DataType.STRING
    return float(tensor.numpy().flat[0]) if tensor is not None and is_number else None


def has_bodies(node: ir.Node) -> bool:
    """Return whether a node has bodies that the interpreter knows."""
    return not node.domain and node.op_type in ("If", "Loop", "Scan") and bool(subgraphs(node))


def is_known_zero(
    value: ir.Value | None,
    depth: int = 16,
    *,
    of_finite: bool = True,
    largest: int | None = None,
    known: dict[tuple[ir.Value, int], bool] | None = None,
) -> bool:
    """Return whether a value is known to be all zeros: a zero constant, reshaped, expanded or multiplied by anything.

    Args:
        value: the value.
        depth: number of nodes to go up.
        of_finite: True to treat all numbers as finite; else a product with zero may be NaN.
        largest: the most elements of a constant to read; None for all.
        known: the answers for the values above, by the remaining depth; filled in.
    """
    if value is None:
        return False
    known = {} if known is None else known
    if (value, depth) not in known:
        known[value, depth] = _gives_zeros(value, depth, of_finite, largest, known)
    return known[value, depth]


def _gives_zeros(
    value: ir.Value, depth: int, of_finite: bool, largest: int | None, known: dict[tuple[ir.Value, int], bool]
) -> bool:
    tensor = constant_tensor(value)
    if tensor is not None:
        return (largest is None or tensor.size <= largest) and _is_zero_tensor(tensor)
    node = value.producer()
    if node is None or depth == 0:
        return False
    if node.op_type == "ConstantOfShape":
        fill = node.attributes.get_tensor("value")
        return fill is None or _is_zero_tensor(fill)
    rule = rule_of(node)
    if rule is None or not rule.has_degree(value.index() or 0):
        return False
    data = [node.inputs[i] for i in rule.operands(len(node.inputs)) if node.inputs[i] is not None]
    is_zero = functools.partial(is_known_zero, depth=depth - 1, of_finite=of_finite, largest=largest, known=known)
    if rule.kind is Kind.LINEAR:
        return bool(data) and all(is_zero(operand) for operand in data)
    if rule.kind is Kind.PRODUCT and not rule.addends and of_finite:
        return any(is_zero(operand) for operand in data)
    return False


def _is_zero_tensor(tensor: ir.TensorProtocol) -> bool:
    if tensor.dtype is ir.DataType.STRING:
        return False
    flat = np.ravel(tensor.numpy())
    return not flat[:_PROBE].any() and not flat.any()
