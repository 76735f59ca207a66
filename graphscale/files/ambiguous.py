"""Content of a model that two readers read in two ways: onnx_ir ignores it, and a runtime does not."""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable, Iterable, Iterator

import onnx

from graphscale.errors import ModelFileError, UnsupportedModelError

__all__ = ["refuse_ambiguous"]

_WITH_BODIES = ("If", "Loop", "Scan", "SequenceMap")
# Operators without optional outputs: onnx_ir drops nameless ones at the end.
_COMPLETE = (*_WITH_BODIES, "BatchNormalization", "Split", "TopK")
_BUILT_IN = ("", "ai.onnx", "ai.onnx.ml", "com.microsoft")  # domains of operators
_CONSTANTS = ("Constant", "ConstantOfShape")
_NUMBERS = ("float_data", "int32_data", "int64_data", "double_data", "uint64_data", "string_data")
# Ranges of int32_data by type; beyond a range, some readers keep only the lowest bits.
_INT32: dict[int, range] = {
    onnx.TensorProto.BOOL: range(2),
    onnx.TensorProto.INT8: range(-(2**7), 2**7),
    onnx.TensorProto.INT16: range(-(2**15), 2**15),
    onnx.TensorProto.INT32: range(-(2**31), 2**31),
    **dict.fromkeys((onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16, onnx.TensorProto.UINT16), range(2**16)),
}
_HALF_BYTES = (onnx.TensorProto.INT4, onnx.TensorProto.UINT4, onnx.TensorProto.FLOAT4E2M1)
_BYTES = range(-(2**7), 2**8)  # of all other types
_KEYS = {"location", "offset", "length", "checksum"}  # keys of external data in ONNX Runtime
_VALUES = ("f", "i", "s", "t", "g", "tp", "sparse_tensor")
_LISTS = ("floats", "ints", "strings", "tensors", "graphs", "type_protos", "sparse_tensors")


def refuse_ambiguous(proto: onnx.ModelProto, name: str) -> None:
    """Refuse a model that two readers may read in two ways.

    Raises:
        ModelFileError: a name is defined twice; a tensor or an attribute has two values, or none; a result or a type is
            missing.
        UnsupportedModelError: it has sparse initializers, a segment of a tensor, nodes for several devices, or a
            function with the name of an operator.
    """
    for function in proto.functions:
        if function.domain in _BUILT_IN or onnx.defs.has(function.name, function.domain):
            raise UnsupportedModelError(
                f"{name} has a function {function.domain or 'ai.onnx'}::{function.name}, and runtimes may run a kernel "
                "of this name instead; give its domain another name"
            )
    graphs, scopes = [proto.graph], [proto.graph.node, *(function.node for function in proto.functions)]
    constants, cut = list[onnx.TensorProto](), list[onnx.NodeProto]()
    for node in itertools.chain.from_iterable(scopes):  # which grow
        kind = node.op_type
        if node.device_configurations:
            raise UnsupportedModelError(f"{name} spreads node {node.name!r} over devices; export it for a single one")
        if kind in _CONSTANTS:
            constants += [attribute.t for attribute in node.attribute if attribute.HasField("t")]
        elif kind in _COMPLETE and node.output and not node.output[-1]:
            cut.append(node)
        if kind in _WITH_BODIES:
            bodies = [attribute.g for attribute in node.attribute if attribute.HasField("g")]
            graphs += bodies
            scopes += [body.node for body in bodies]
    for graph in graphs:
        if graph.sparse_initializer:
            sparse = graph.sparse_initializer[0].values.name
            raise UnsupportedModelError(
                f"{name} has the sparse initializer {sparse!r}; write its content as a dense one"
            )
    tensors = [tensor for graph in graphs for tensor in graph.initializer] + constants
    for tensor in tensors:
        if tensor.HasField("segment"):
            raise UnsupportedModelError(f"{name} has a segment of the tensor {tensor.name!r} alone; write it whole")
    damage = next(itertools.chain(_find_damage(proto, graphs), _find_faults(tensors, cut)), None)
    if damage is not None:
        raise ModelFileError(f"{name} is damaged: {damage}")


def _find_damage(proto: onnx.ModelProto, graphs: Iterable[onnx.GraphProto]) -> Iterator[str]:
    keys = ("::".join(filter(None, (f.domain, f.name, f.overload))) for f in proto.functions)
    yield from _find_twice("function", ((key, i) for i, key in enumerate(keys)))
    yield from _find_twice("metadata property", ((entry.key, entry.value) for entry in proto.metadata_props))
    for holder in (proto, *proto.functions):
        opsets = ((opset.domain or "ai.onnx", opset.version) for opset in holder.opset_import)
        yield from _find_twice("opset", opsets)
    for function in proto.functions:
        for attribute in function.attribute_proto:
            if attribute.name in function.attribute:
                yield f"the function {function.name!r} has the attribute {attribute.name!r} twice"
        for node in function.node:
            for attribute in node.attribute:
                if attribute.ref_attr_name and _has_value(attribute):
                    yield f"the attribute {attribute.name!r} of node {node.name!r} has a value, and refers to another"
    for graph in graphs:
        yield from _find_twice("initializer", ((tensor.name, i) for i, tensor in enumerate(graph.initializer)))
        if len({value.name for value in graph.value_info}) < len(graph.value_info):
            declared = ((value.name, value.type.SerializeToString()) for value in graph.value_info)
            yield from _find_twice("type of value", declared)
        dtypes: dict[str, int] = {}
        for value in itertools.chain(graph.input, graph.output, graph.value_info):
            name, dtype = value.name, value.type.tensor_type.elem_type  # 0 for a sequence, too
            if dtype and dtypes.setdefault(name, dtype) != dtype:
                yield f"it has the type of value {name!r} twice"
            if not dtype and value.type.HasField("tensor_type"):
                yield f"the value {name!r} is declared without a type of its elements"


def _find_faults(tensors: Iterable[onnx.TensorProto], cut: Iterable[onnx.NodeProto]) -> Iterator[str]:
    """Find faults in the storage of tensors; `cut` are nodes without the name of their last output."""
    for node in cut:
        yield f"the last output of {node.op_type} {node.name!r} has no name, which it needs"
    for tensor in tensors:
        if (problem := _find_fault(tensor)) is not None:
            yield f"the content of tensor {tensor.name!r} {problem}"


def _find_twice(kind: str, entries: Iterable[tuple[str, Hashable]]) -> Iterator[str]:
    held: dict[str, Hashable] = {}
    for key, content in entries:
        if held.setdefault(key, content) != content:
            yield f"it has the {kind} {key!r} twice"


def _has_value(attribute: onnx.AttributeProto) -> bool:
    return any(map(attribute.HasField, _VALUES)) or any(getattr(attribute, field) for field in _LISTS)


def _find_fault(tensor: onnx.TensorProto) -> str | None:
    """Return the fault in the storage of a tensor; large raw bytes are not read."""
    fields = [field for field in _NUMBERS if getattr(tensor, field)] + ["raw_data"] * tensor.HasField("raw_data")
    if tensor.external_data:
        fields.append("external_data")
    count = math.prod(tensor.dims)
    if not fields and count > 0:
        return "is not there"
    if tensor.data_type in _HALF_BYTES and "raw_data" in fields and len(tensor.raw_data) != (count + 1) // 2:
        return f"has {len(tensor.raw_data)} bytes for {count} numbers of half a byte"
    if len(fields) > 1:
        return f"is there twice, as {fields[0]} and as {fields[1]}"
    keys = [entry.key for entry in tensor.external_data]
    if tensor.data_location == onnx.TensorProto.EXTERNAL and (len(keys) > len({*keys}) or not {*keys} <= _KEYS):
        return f"is described in another file by {', '.join(map(repr, keys))}"
    wide = _find_wide(tensor)
    if wide is not None:
        return f"has the number {wide}, which its type does not hold"
    for entry in tensor.external_data:
        if entry.key in ("offset", "length") and not _is_number(entry.value):
            return f"has the {entry.key} {entry.value!r} in another file"
    return None


def _find_wide(tensor: onnx.TensorProto) -> int | None:
    """Return a number beyond the type of its tensor, None if there is none."""
    if tensor.int32_data:
        held = _INT32.get(tensor.data_type, _BYTES)
        return next((n for n in (min(tensor.int32_data), max(tensor.int32_data)) if n not in held), None)
    is_short = tensor.uint64_data and tensor.data_type == onnx.TensorProto.UINT32
    return max(tensor.uint64_data) if is_short and max(tensor.uint64_data) >= 2**32 else None


def _is_number(text: str) -> bool:
    return text.isascii() and text.removeprefix("-").isdigit()
