"""The damage of a model, searched only after a failure, so that sound models cost nothing.

An unexpected error on a sound model is a defect of graphscale, and is raised unchanged. On a damaged model it becomes
one line that names the damage.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import re
from collections.abc import Iterable, Iterator, MutableSequence
from pathlib import Path
from typing import Any, TypeVar

import onnx
import onnx_ir as ir
from google.protobuf.message import DecodeError, Message
from onnx_ir.passes.common import InlinePass

from graphscale.errors import GraphscaleError, ModelFileError, one_line
from graphscale.files.model_files import from_proto
from graphscale.files.model_size import parse_model
from graphscale.files.reading import read_file
from graphscale.graph.original import ORIGINAL_KEY
from graphscale.graph.restored import restore_original
from graphscale.graph.stamp_reading import read_stamp
from graphscale.operators import OPERATORS
from graphscale.policy.names import COUNTERS, ScaledValue

__all__ = ["find_damage", "find_model_damage", "find_rejection"]

_M = TypeVar("_M", bound=Message)

# Half a character of UTF-16, which Python never decodes from UTF-8, and cannot encode to it.
_SURROGATE = re.compile("[\ud800-\udfff]")

# Beginnings of messages of ONNX's checker on unknown operators and versions. These are no damage: ONNX Runtime has more
# of them. The rest of a message may be a name in the file.
_UNKNOWN = ("No Op registered", "No opset import", "No schema registered", "Your model ir_version ")

_FOREIGN = "graphscale.foreign"  # a domain without schemas: the checker ignores its operators

# The values of every step with telemetry.
_COUNTED = (*COUNTERS, ScaledValue.CAUSE, ScaledValue.OFFENDER, ScaledValue.ZERO_FRACTION)


def find_damage(arguments: Iterable[Any]) -> str | None:
    """Find the damage of models among some arguments, including paths to models and folders."""
    for name, model in _models(arguments):
        if (damage := find_model_damage(model)) is not None:
            return f"{name} is damaged: {damage}"
        recorded = _find_recorded(model)
        if recorded is not None and (damage := find_damage([recorded])) is not None:
            return f"{name} has damaged graphscale metadata: in its original, {damage}"
    return None


def _find_recorded(model: onnx.ModelProto) -> ir.Model | None:
    """Return the original of a model in its metadata; None for missing or unreadable metadata."""
    if not any(entry.key == ORIGINAL_KEY for entry in model.metadata_props):
        return None
    with contextlib.suppress(GraphscaleError):
        return restore_original(from_proto(model))
    return None


def _models(arguments: Iterable[Any]) -> Iterator[tuple[str, onnx.ModelProto]]:
    """Yield the models among some arguments, with their names for messages."""
    for argument in arguments:
        if isinstance(argument, onnx.ModelProto):
            yield "the model", argument
        elif isinstance(argument, ir.Model):
            with contextlib.suppress(Exception):  # a model that cannot be serialized is not examined
                yield "the model", ir.to_proto(argument)
        elif isinstance(argument, str | os.PathLike):
            path = Path(os.fspath(argument))
            with contextlib.suppress(OSError, ValueError, DecodeError, ModelFileError):
                for file in sorted(path.glob("*.onnx")) if path.is_dir() else [path] if path.is_file() else []:
                    yield str(file), parse_model(read_file(file), str(file))
        elif hasattr(argument, "model"):
            yield from _models((argument.model,))


def find_model_damage(model: onnx.ModelProto) -> str | None:
    """Return the damage of a model in one line, or None.

    The search covers, in this order, texts, tensors, operands and results, subgraphs, functions, and the checks of
    ONNX.
    """
    looks = (_texts, _tensors, _nodes, _references, _checker, _functions, _stamp, _ends)
    return next((damage for look in looks for damage in look(model)), None)


def find_rejection(model: onnx.ModelProto) -> str | None:
    """Return the objection of ONNX's checker to a readable model, in one line, or None."""
    return next(itertools.chain(_checker(model), _inner_names(model)), None)


def _inner_names(model: onnx.ModelProto) -> Iterator[str]:
    """Yield invalid names in bodies that the checker ignores: shadowed values, `ai.onnx`, unknown described values."""
    pending: list[tuple[onnx.GraphProto, frozenset[str]]] = [(model.graph, frozenset())]
    while pending:
        graph, outer = pending.pop()
        own = {name for node in graph.node for name in node.output if name}
        own |= {each.name for each in (*graph.input, *graph.initializer)}
        for name in sorted(own & outer):
            yield f"{graph.name!r} has a value {name!r}, as the graph around it has"
        for node in graph.node:
            if graph is not model.graph and node.domain == "ai.onnx":
                yield f"{node.op_type} node {node.name!r} in {graph.name!r} names its domain ai.onnx, not nothing"
            for attribute in node.attribute:
                bodies = [*attribute.graphs, *([attribute.g] if attribute.HasField("g") else [])]
                pending += [(body, outer | own) for body in bodies]
        for value in graph.value_info:
            if graph is not model.graph and value.name not in own:
                yield f"{graph.name!r} describes {value.name!r}, which it does not have"


def _messages(message: Message, kind: type[_M], place: str = "the model") -> Iterator[tuple[str, _M]]:
    """Yield the messages of a kind in a message, itself included, with the innermost name around each."""
    place = getattr(message, "name", "") or place
    if isinstance(message, kind):
        yield str(place), message
    for field, value in message.ListFields():
        if field.message_type is not None:
            for item in value if isinstance(value, MutableSequence) else [value]:
                yield from _messages(item, kind, place)


def _texts(model: onnx.ModelProto) -> Iterator[str]:
    for place, message in _messages(model, Message):
        for field, value in message.ListFields():
            if field.type == field.TYPE_STRING:
                for text in value if isinstance(value, MutableSequence) else [value]:
                    if not isinstance(text, str) or _SURROGATE.search(text):
                        yield f"a {field.name} in {place!r} is not UTF-8"


def _tensors(model: onnx.ModelProto) -> Iterator[str]:
    for place, tensor in _messages(model, onnx.TensorProto):
        name = tensor.name or place
        if tensor.data_type not in onnx.TensorProto.DataType.values() or not tensor.data_type:
            yield f"tensor {name!r} has no data type"
        elif any(size < 0 for size in tensor.dims):
            yield f"tensor {name!r} has a negative size"
        elif tensor.data_location == onnx.TensorProto.EXTERNAL:
            keys = {entry.key for entry in tensor.external_data}
            if "location" not in keys or not keys <= {"location", "offset", "length", "checksum", "basepath"}:
                yield f"tensor {name!r} does not say where its external data is"
        else:
            yield from _content(tensor, name)


def _content(tensor: onnx.TensorProto, name: str) -> Iterator[str]:
    try:
        size = onnx.numpy_helper.to_array(tensor).size
    except Exception as error:  # numpy and onnx raise many kinds for contents that do not fit
        yield f"the content of tensor {name!r} does not fit its type and shape: {one_line(error)}"
        return
    if size != math.prod(tensor.dims):
        yield f"tensor {name!r} holds {size} elements, and its shape is {list(tensor.dims)}"


def _nodes(model: onnx.ModelProto) -> Iterator[str]:
    for _, node in _messages(model, onnx.NodeProto):
        name = f"{node.op_type} node {node.name or next(iter(node.output), '?')!r}"
        needed = _needed(node)
        if len(node.input) < needed or not all(node.input[:needed]):
            yield f"{name} lacks an operand"
        if not node.output:
            yield f"{name} has no result"
        if node.op_type == "Constant" and len(node.attribute) != 1:
            yield f"{name} has {len(node.attribute)} attributes; it needs one, its value"
        types = [attribute.i for attribute in node.attribute if (node.op_type, attribute.name) == ("Cast", "to")]
        if not {*types} <= {*onnx.TensorProto.DataType.values()}:
            yield f"{name} casts to {types[0]}, which is no data type"
        yield from _bodies(node, name)


def _ends(model: onnx.ModelProto) -> Iterator[str]:
    """Check the types of the graph's inputs and outputs, and that none is there twice."""
    for kind, ends in (("input", model.graph.input), ("output", model.graph.output)):
        seen: set[str] = set()
        for value in ends:
            if value.name in seen:
                yield f"{kind} {value.name!r} is there twice"
            seen.add(value.name)
            if value.type.HasField("tensor_type") and not value.type.tensor_type.elem_type:
                yield f"{kind} {value.name!r} has no data type"
            elif not value.type.WhichOneof("value"):
                yield f"{kind} {value.name!r} has no type"


def _references(model: onnx.ModelProto) -> Iterator[str]:
    """Find attributes without a type, and references to attributes of a function outside of functions."""
    for place, attribute in _messages(model.graph, onnx.AttributeProto):
        if not attribute.type:
            yield f"attribute {attribute.name!r} near {place!r} has no type"
        if attribute.ref_attr_name:
            yield f"attribute {attribute.name!r} near {place!r} refers to an attribute of a function, and is in none"


def _needed(node: onnx.NodeProto) -> int:
    """Return the least number of operands of a node, by ONNX's definition, else by its degree rule."""
    if onnx.defs.has(node.op_type, node.domain):
        return int(onnx.defs.get_schema(node.op_type, node.domain).min_input)
    return int((node.domain, node.op_type) in OPERATORS)


def _bodies(node: onnx.NodeProto, name: str) -> Iterator[str]:
    bodies = [attribute.g for attribute in node.attribute if attribute.type == onnx.AttributeProto.GRAPH]
    attributes = {attribute.name: attribute for attribute in node.attribute}
    if node.op_type == "If" and not node.domain:
        if not {"then_branch", "else_branch"} <= attributes.keys() or not node.input:
            yield f"{name} lacks a branch or its condition"
        elif any(len(body.output) != len(node.output) for body in bodies):
            yield f"{name} and its branches have not as many results"
    elif node.op_type in ("Loop", "Scan") and not node.domain:
        is_loop, scanned = node.op_type == "Loop", attributes.get("num_scan_inputs")
        has_count = len(node.input) >= 2 if is_loop else scanned is not None and 0 < scanned.i <= len(node.input)
        wanted = (len(node.input), len(node.output) + is_loop)
        if not (has_count and bodies and all((len(body.input), len(body.output)) == wanted for body in bodies)):
            yield f"{name} and its body do not fit"


def _checker(model: onnx.ModelProto) -> Iterator[str]:
    try:
        onnx.checker.check_model(model)
    except Exception as error:  # the checker raises RuntimeError, ValueError and its own errors
        text = one_line(str(error).split("==>", maxsplit=1)[0])
        if not text.startswith(_UNKNOWN):
            yield text
        elif any(node.domain != _FOREIGN for node in _unknown_nodes(model)):
            copy = onnx.ModelProto()
            copy.CopyFrom(model)
            for node in _unknown_nodes(copy):
                node.domain = _FOREIGN
            for holder in (copy, *copy.functions):
                holder.opset_import.add(domain=_FOREIGN, version=1)
            yield from _checker(copy)


def _unknown_nodes(model: onnx.ModelProto) -> list[onnx.NodeProto]:
    """List the nodes of unknown operators, at which ONNX's checker stops."""
    own = {(function.domain, function.name) for function in model.functions}
    nodes = (node for _, node in _messages(model, onnx.NodeProto))
    return [n for n in nodes if not onnx.defs.has(n.op_type, n.domain) and (n.domain, n.op_type) not in own]


def _stamp(model: onnx.ModelProto) -> Iterator[str]:
    """Find graphscale's metadata on values that the graph lacks."""
    metadata = {entry.key: entry.value for entry in model.metadata_props}
    if "graphscale.version" not in metadata:
        return
    stamp = read_stamp(metadata, "it")
    if ScaledValue.WINDOW_FINITE in stamp.names:
        return  # the names of all models of a folder
    graph = model.graph
    known = {value.name for value in (*graph.input, *graph.output, *graph.initializer)}
    known.update(output for node in graph.node for output in node.output)
    roles = (ScaledValue.LOSS, ScaledValue.LOSS_SCALE, *(_COUNTED if stamp.telemetry else ()))
    for role in roles:
        if role not in stamp.names:
            yield f"its metadata does not name the {role.words}"
    for name in stamp.names.values():
        if name not in known:
            yield f"its metadata speaks of {name!r}, which the graph does not have"
    inputs, outputs = ({value.name for value in ends} for ends in (graph.input, graph.output))
    for name, output in stamp.state.items():
        if name not in inputs or output not in outputs:
            yield f"its metadata says that {output!r} is the next {name!r}, and the graph has not both"
    for value in graph.input:
        tensor = value.type.tensor_type
        if value.name in {*stamp.state, *stamp.names.values()} and not (tensor.elem_type and tensor.HasField("shape")):
            yield f"the state {value.name!r} has no type or no shape"


def _functions(model: onnx.ModelProto) -> Iterator[str]:
    wanted = {(function.domain, function.name): set(function.attribute) for function in model.functions}
    for _, node in _messages(model, onnx.NodeProto):
        missing = wanted.get((node.domain, node.op_type), set()) - {attribute.name for attribute in node.attribute}
        if missing:
            yield f"{node.op_type} node {node.name!r} lacks the attribute {min(missing)!r}"
    for function in model.functions:
        for _, attribute in _messages(function, onnx.AttributeProto):
            if attribute.ref_attr_name and attribute.ref_attr_name not in function.attribute:
                yield f"function {function.name!r} has no attribute {attribute.ref_attr_name!r}"
    if model.functions:
        try:
            InlinePass()(ir.from_proto(model))
        except Exception as error:  # onnx_ir raises many kinds for functions that do not fit their calls
            yield f"its model-local functions cannot be inlined: {one_line(error.__cause__ or error)[:200]}"
