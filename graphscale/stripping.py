"""strip: the graph as it was before graphscale put a loss scale or mixed precision into it."""

from __future__ import annotations

import base64
import zlib
from collections.abc import Mapping

import onnx
import onnx_ir as ir

from graphscale.collector import paused_collector
from graphscale.errors import ModelFileError
from graphscale.graph.diagnosis import explains_damage
from graphscale.graph.marks import PASS_KEY, WAS_FLOAT
from graphscale.graph.undo import UNDO_KEY, Record, own_nodes, stands_for, unpack
from graphscale.graph.values import subgraphs
from graphscale.pipeline import Model, open_copy

__all__ = ["is_rewritten", "strip", "strip_in_place"]


@explains_damage
@paused_collector()
def strip(model: Model) -> ir.Model | onnx.ModelProto:
    """Take the loss scale, or mixed precision, out of a model again. The model given is not changed.

    Nodes, their order, names, types, metadata, opset and IR version are those of the original: serialized, both are the
    same bytes. Initializers keep the content that they have: of a model that was exported from a session, those are the
    trained weights. Where a model was put into mixed precision first and scaled later, the loss scale alone is taken
    out; strip once more for the rest.

    Args:
        model: a path, an onnx_ir model or a ModelProto that `scale` or `autocast` gave.

    Returns:
        A ModelProto if one was given, else an onnx_ir model.

    Raises:
        ModelFileError: graphscale has not rewritten the model, or it was changed since in a way that cannot be undone.
    """
    work, name = open_copy(model)
    stripped = strip_in_place(work, name)
    return ir.to_proto(stripped) if isinstance(model, onnx.ModelProto) else stripped


def is_rewritten(model: ir.Model) -> bool:
    """Whether a model holds what it takes to strip it."""
    return UNDO_KEY in model.metadata_props


def strip_in_place(model: ir.Model, name: str) -> ir.Model:
    """Strip a model that may be changed; see `strip`.

    Args:
        model: the model.
        name: what to call it in messages.
    """
    if not is_rewritten(model):
        raise ModelFileError(f"{name} has nothing to strip: graphscale put neither a loss scale nor casts into it")
    try:
        record = Record.read(model.metadata_props)
        if record.whole is not None:
            return _rebuild(model, record.whole)
        _strip(model, record)
    except (KeyError, IndexError, ValueError, TypeError, AttributeError, zlib.error) as error:
        raise ModelFileError(
            f"{name} cannot be stripped: it was changed after graphscale had rewritten it ({error})"
        ) from error
    return model


def _rebuild(model: ir.Model, packed: str) -> ir.Model:
    """The original out of its packed form, with the content that its initializers have now."""
    original = unpack(packed)
    for name, value in original.graph.initializers.items():
        held = model.graph.initializers[name]
        restore_constant(held)
        value.const_value = held.const_value
    return original


def _strip(model: ir.Model, record: Record) -> None:
    graph, kept = model.graph, frozenset(record.marked)
    nodes = list(own_nodes(graph, kept))
    if record.order is not None:
        places = dict(zip(nodes, record.order, strict=True))
        nodes.sort(key=places.__getitem__)
    if record.small is not None:
        _restore_constants(graph, nodes)
    values = _values(graph, nodes)
    by_name = {record.renames.get(value.name or "", value.name or ""): value for value in values}
    _restore_reads(nodes, record, by_name, kept)
    for index, count in record.results.items():
        for value in nodes[int(index)].outputs[count:]:
            del by_name[value.name or ""]
    outputs = [by_name[name] for name in record.outputs]
    inputs = [by_name[name] for name in record.inputs]
    _remove_inserted(graph, kept)
    for index, count in record.results.items():
        nodes[int(index)].resize_outputs(count)
    graph.outputs.clear()
    graph.inputs.clear()
    for name in record.added:
        del graph.initializers[name]
    for name, value in by_name.items():
        value.name = name
    graph.inputs.extend(inputs)
    graph.outputs.extend(outputs)
    if record.order is not None:
        _restore_order(nodes)
    _restore_types(by_name, record)
    _restore_model(model, record)


def _values(graph: ir.Graph, nodes: list[ir.Node]) -> list[ir.Value]:
    """The values of the original that have a name in the graph, inputs and initializers first."""
    found = dict.fromkeys((*graph.inputs, *graph.initializers.values()))
    for node in nodes:
        found.update(dict.fromkeys(node.outputs))
        for body in subgraphs(node):
            found.update(dict.fromkeys(body.inputs))
    return [value for value in found if value.name]


def _restore_reads(nodes: list[ir.Node], record: Record, by_name: Mapping[str, ir.Value], kept: frozenset[str]) -> None:
    """Let nodes and bodies of the original give and read what they gave and read before."""
    for i, node in enumerate(nodes):
        names = record.edges.get(str(i))
        if names is None:
            wanted = [stands_for(value, kept) for value in node.inputs]
        else:
            wanted = [None if name is None else by_name[name] for name in names]
            node.resize_inputs(len(wanted))
        for j, value in enumerate(wanted):
            if node.inputs[j] is not value:
                node.replace_input_with(j, value)
        for body in subgraphs(node):
            for j, output in enumerate(body.outputs):
                original = stands_for(output, kept)
                if original is not None and original is not output:
                    body.outputs[j] = original


def _remove_inserted(graph: ir.Graph, kept: frozenset[str]) -> None:
    own = [node for node in graph if PASS_KEY in node.metadata_props and node.name not in kept]
    for node in graph:
        for body in subgraphs(node):
            _remove_inserted(body, kept)
    for node in own:
        for i in range(len(node.inputs)):
            node.replace_input_with(i, None)
    graph.remove(own)


def _restore_order(nodes: list[ir.Node]) -> None:
    by_graph: dict[ir.Graph, list[ir.Node]] = {}
    for node in nodes:
        assert isinstance(node.graph, ir.Graph)
        by_graph.setdefault(node.graph, []).append(node)
    for graph, members in by_graph.items():
        graph.remove(members)
        graph.extend(members)


def _restore_constants(graph: ir.Graph, nodes: list[ir.Node]) -> None:
    """Give constants that were rounded their float32 numbers, and casts that were redirected their type."""
    for value in graph.initializers.values():
        restore_constant(value)
    for node in nodes:
        for value in node.outputs:
            restore_constant(value)
        if node.metadata_props.pop(WAS_FLOAT, None) is not None:
            node.attributes["to"] = ir.AttrInt64("to", ir.DataType.FLOAT)


def restore_constant(value: ir.Value) -> None:
    """Give a constant that was rounded to a small type the tensor that it had, an initializer or a Constant's."""
    text = value.metadata_props.pop(WAS_FLOAT, None)
    if text is None:
        return
    tensor = ir.from_proto(onnx.TensorProto.FromString(base64.b64decode(text, validate=True)))
    node = value.producer()
    if node is None:
        value.const_value = tensor
    else:
        node.attributes["value"] = ir.AttrTensor("value", tensor)


def _restore_types(by_name: Mapping[str, ir.Value], record: Record) -> None:
    small = None if record.small is None else ir.DataType[record.small]
    was_small = set(record.was_small)
    for name, value in by_name.items():
        if small is not None and value.dtype is small and name not in was_small:
            value.type = ir.TensorType(ir.DataType.FLOAT)
    for name in record.untyped:
        by_name[name].type = None
    for name in record.shapeless:
        by_name[name].shape = None


def _restore_model(model: ir.Model, record: Record) -> None:
    for identifier in list(model.functions)[record.functions :]:
        del model.functions[identifier]
    model.opset_imports.clear()
    model.opset_imports.update(record.opsets)
    model.ir_version = record.ir_version
    for key in [key for key in model.metadata_props if key.startswith("graphscale.")]:
        del model.metadata_props[key]
    model.metadata_props.update(record.metadata)
