"""Edits of attributes, and of tensors wherever they are."""

from __future__ import annotations

import ml_dtypes
import numpy as np
from onnx import AttributeProto, TensorProto, helper, numpy_helper

from benchmarks.edits.draw import DTYPES, SCHEMAS, Draw, kind, tensors_of

__all__: list[str] = []

_SCHEMAS = {schema.name: schema for schema in SCHEMAS}


def _change(draw: Draw, attribute: AttributeProto) -> bool:
    """Change the value of an attribute; return whether it is of a type that can be changed here."""
    if attribute.type == AttributeProto.INT:
        attribute.i = draw.integer(attribute.i)
    elif attribute.type == AttributeProto.FLOAT:
        attribute.f = draw.number(attribute.f)
    elif attribute.type == AttributeProto.STRING:
        attribute.s = draw.text(attribute.s.decode()).encode()
    elif attribute.type in (AttributeProto.INTS, AttributeProto.FLOATS):
        values = attribute.ints if attribute.type == AttributeProto.INTS else attribute.floats
        other = draw.integer if attribute.type == AttributeProto.INTS else draw.number
        manner = draw.pick(["one", "removed", "reversed"]) if values else "added"
        if manner == "one":
            k = draw.below(len(values))
            values[k] = other(values[k])  # type: ignore[operator]
        elif manner == "removed":
            del values[draw.below(len(values))]
        elif manner == "reversed":
            content = list(values)[::-1]
            del values[:]
            values.extend(content)
        else:
            values.append(1)
    else:
        return False
    return True


@kind("attribute: value")
def _(draw: Draw) -> str | None:
    found = draw.node(lambda node: node.attribute)
    if found is None:
        return None
    attribute = draw.pick(found[2].attribute)
    before = helper.printable_attribute(attribute) if attribute.type != AttributeProto.GRAPH else "a graph"
    if not _change(draw, attribute):
        return None
    return f"{found[0].name} {found[2].op_type} {found[2].name!r} {before} -> {helper.printable_attribute(attribute)}"


@kind("attribute: removed")
def _(draw: Draw) -> str | None:
    found = draw.node(lambda node: node.attribute)
    if found is None:
        return None
    k = draw.below(len(found[2].attribute))
    name = found[2].attribute[k].name
    del found[2].attribute[k]
    return f"{found[0].name} {found[2].op_type} {found[2].name!r} {name}"


@kind("attribute: added")
def _(draw: Draw) -> str | None:
    found = draw.node()
    if found is None:
        return None
    node = found[2]
    schema, present = _SCHEMAS.get(node.op_type), {a.name for a in node.attribute}
    known = [a for name, a in schema.attributes.items() if name not in present] if schema is not None else []
    if known and draw.chance(0.8):
        chosen = draw.pick(known)
        attribute = AttributeProto(name=chosen.name, type=int(chosen.type.value))  # type: ignore[arg-type]
        if chosen.default_value.name:
            attribute.CopyFrom(chosen.default_value)
        if draw.chance(0.6):
            _change(draw, attribute)
    else:
        attribute = helper.make_attribute(draw.pick(["custom", "to", "axis", "keepdims", "axes"]), draw.below(3))
    if present and draw.chance(0.1):
        attribute.name = draw.pick(sorted(present))  # twice
    node.attribute.append(attribute)
    return f"{found[0].name} {node.op_type} {node.name!r} {helper.printable_attribute(attribute)}"


@kind("attribute: renamed, or of another type")
def _(draw: Draw) -> str | None:
    found = draw.node(lambda node: node.attribute)
    if found is None:
        return None
    attribute = draw.pick(found[2].attribute)
    manner = draw.pick(["name", "type field", "type", "reference"])
    if manner == "name":
        attribute.name = draw.text(attribute.name)
    elif manner == "type field":
        attribute.type = draw.pick([t for t in range(15) if t != attribute.type])  # type: ignore[assignment]
    elif manner == "reference":
        attribute.ref_attr_name = draw.pick(["alpha", "multiplier", attribute.name])
    elif attribute.type == AttributeProto.INT:
        attribute.CopyFrom(helper.make_attribute(attribute.name, float(attribute.i)))
    elif attribute.type == AttributeProto.FLOAT:
        whole = int(attribute.f) if np.isfinite(attribute.f) else 0
        attribute.CopyFrom(helper.make_attribute(attribute.name, whole))
    else:
        return None
    return f"{found[0].name} {found[2].op_type} {found[2].name!r} {attribute.name}: {manner}"


@kind("attribute: doc string, or a second value")
def _(draw: Draw) -> str | None:
    found = draw.node(lambda node: node.attribute)
    if found is None:
        return None
    attribute = draw.pick(found[2].attribute)
    manner = draw.pick(["doc", "i", "f", "s", "ints", "floats", "t"])
    if manner == "doc":
        attribute.doc_string = draw.text(attribute.doc_string)
    elif manner == "i":
        attribute.i = draw.integer(attribute.i)
    elif manner == "f":
        attribute.f = draw.number(attribute.f)
    elif manner == "s":
        attribute.s = b"x"
    elif manner == "t":
        attribute.t.CopyFrom(helper.make_tensor("", TensorProto.FLOAT, [], [1.0]))
    else:
        getattr(attribute, manner).append(1)
    return f"{found[0].name} {found[2].op_type} {found[2].name!r} {attribute.name}: {manner}"


def _tensor(draw: Draw) -> tuple[str, TensorProto] | None:
    found = tensors_of(draw.model)
    return draw.pick(found) if found else None


def _put(tensor: TensorProto, array: np.ndarray) -> None:
    name, doc = tensor.name, tensor.doc_string
    tensor.CopyFrom(numpy_helper.from_array(array, name))
    if doc:
        tensor.doc_string = doc


@kind("constant: one element")
def _(draw: Draw) -> str | None:
    found = _tensor(draw)
    array = None if found is None else np.array(numpy_helper.to_array(found[1]))
    if found is None or array is None or not array.size or array.dtype == object:
        return None
    k, flat = draw.below(array.size), array.reshape(-1)
    before = flat[k]
    if array.dtype == bool:
        flat[k] = not before
    elif array.dtype.kind in "iu":
        with np.errstate(all="ignore"):
            flat[k] = np.asarray(draw.integer(int(before))).astype(array.dtype)
    else:
        flat[k] = np.asarray(draw.number(float(before))).astype(array.dtype)
    _put(found[1], flat.reshape(array.shape))
    return f"{found[0]} element {k} {before} -> {flat[k]}"


@kind("constant: one bit")
def _(draw: Draw) -> str | None:
    found = _tensor(draw)
    array = None if found is None else np.array(numpy_helper.to_array(found[1]))
    if found is None or array is None or not array.size or array.dtype == object:
        return None
    data = bytearray(array.tobytes())
    bit = draw.below(8 * len(data))
    data[bit // 8] ^= 1 << bit % 8
    _put(found[1], np.frombuffer(bytes(data), array.dtype).reshape(array.shape))
    return f"{found[0]} bit {bit}"


@kind("constant: whole")
def _(draw: Draw) -> str | None:
    found = _tensor(draw)
    array = None if found is None else np.array(numpy_helper.to_array(found[1]))
    if found is None or array is None or array.dtype == object:
        return None
    manner = draw.pick(["zeros", "ones", "negative", "reversed", "nan", "of another"])
    others = [t for name, t in tensors_of(draw.model) if list(t.dims) == list(found[1].dims) and name != found[0]]
    if manner == "of another" and others:
        name = found[1].name
        found[1].CopyFrom(draw.pick(others))
        found[1].name = name
    elif manner == "negative" and array.dtype != bool:
        _put(found[1], np.asarray(-array.astype(np.float64)).astype(array.dtype))
    elif manner == "reversed":
        _put(found[1], np.ascontiguousarray(array.reshape(-1)[::-1]).reshape(array.shape))
    elif manner == "nan" and array.dtype.kind == "f":
        _put(found[1], np.full_like(array, np.nan))
    else:
        _put(found[1], np.zeros_like(array) if manner == "zeros" else np.ones_like(array))
    return f"{found[0]}: {manner}"


@kind("constant: type")
def _(draw: Draw) -> str | None:
    found = _tensor(draw)
    if found is None:
        return None
    if draw.chance(0.3):
        found[1].data_type = draw.pick([t for t in DTYPES if t != found[1].data_type])
        return f"{found[0]}: the field alone, {found[1].data_type}"
    array = np.asarray(numpy_helper.to_array(found[1]))
    if array.dtype == object:
        return None
    kinds = [np.float32, np.float64, np.float16, ml_dtypes.bfloat16, np.int32, np.int64, np.bool_, np.uint8]
    chosen = np.dtype(draw.pick([k for k in kinds if np.dtype(k) != array.dtype]))
    with np.errstate(all="ignore"):
        _put(found[1], array.astype(chosen))
    return f"{found[0]}: {chosen}"


@kind("constant: shape")
def _(draw: Draw) -> str | None:
    found = _tensor(draw)
    if found is None:
        return None
    dims, tensor = list(found[1].dims), found[1]
    others = [[1, *dims], [*dims, 1], [int(np.prod(dims))], dims[::-1], dims[1:], [*dims[:-1], 0], [*dims, 2]]
    chosen = draw.pick([other for other in others if other != dims])
    del tensor.dims[:]
    tensor.dims.extend(chosen)
    return f"{found[0]}: {dims} -> {chosen}"


@kind("constant: encoding")
def _(draw: Draw) -> str | None:
    found = _tensor(draw)
    if found is None:
        return None
    tensor, manner = (
        found[1],
        draw.pick(["fields", "raw", "both", "trailing", "external", "segment", "doc", "metadata"]),
    )
    array = np.array(numpy_helper.to_array(tensor))
    if array.dtype == object:
        return None
    if manner == "fields":
        tensor.CopyFrom(helper.make_tensor(tensor.name, tensor.data_type, tensor.dims, array.reshape(-1).tolist()))
    elif manner == "raw":
        _put(tensor, array)
    elif manner == "both":
        draw.pick([tensor.float_data, tensor.int64_data, tensor.int32_data]).append(1)
    elif manner == "trailing":
        tensor.raw_data = tensor.raw_data + b"\0" * array.dtype.itemsize
    elif manner == "external":
        tensor.data_location = TensorProto.EXTERNAL
        if draw.chance(0.5):
            tensor.external_data.add(key="location", value=draw.pick(["nowhere", "../nowhere", "/dev/zero"]))
    elif manner == "segment":
        tensor.segment.begin, tensor.segment.end = 0, draw.below(3)
    elif manner == "doc":
        tensor.doc_string = draw.text(tensor.doc_string)
    else:
        tensor.metadata_props.add(key="custom", value="1")
    return f"{found[0]}: {manner}"


@kind("constant: name")
def _(draw: Draw) -> str | None:
    found = _tensor(draw)
    if found is None:
        return None
    found[1].name = draw.pick([draw.text(found[1].name), draw.pick(tensors_of(draw.model))[1].name])
    return f"{found[0]} -> {found[1].name!r}"


@kind("constant: initializer removed, added or moved")
def _(draw: Draw) -> str | None:
    scope = draw.scope(lambda scope: scope.is_graph)
    if scope is None:
        return None
    tensors, manner = scope.holder.initializer, draw.pick(["removed", "added", "twice", "moved", "sparse", "as a node"])
    if manner == "added":
        name = draw.name(scope) if draw.chance(0.7) else "unused"
        tensors.append(helper.make_tensor(name, TensorProto.FLOAT, [], [draw.number(1.0)]))
        return f"{scope.name}: {name!r} added"
    if not tensors:
        return None
    k = draw.below(len(tensors))
    name = tensors[k].name
    if manner == "removed":
        del tensors[k]
    elif manner == "twice":
        tensors.add().CopyFrom(tensors[k])
        if tensors[-1].raw_data and draw.chance(0.7):
            tensors[-1].raw_data = tensors[-1].raw_data[::-1]
    elif manner == "moved":
        other = tensors[draw.below(len(tensors))]
        kept = TensorProto.FromString(other.SerializeToString())
        other.CopyFrom(tensors[k])
        tensors[k].CopyFrom(kept)
    elif manner == "sparse":
        sparse = scope.holder.sparse_initializer.add(dims=[1])
        sparse.values.CopyFrom(helper.make_tensor(name, TensorProto.FLOAT, [1], [1.0]))
        sparse.indices.CopyFrom(helper.make_tensor("", TensorProto.INT64, [1], [0]))
    else:
        node = helper.make_node("Constant", [], [name], value=tensors[k])
        nodes = [node, *scope.holder.node]
        copies = [type(n).FromString(n.SerializeToString()) for n in nodes]
        del scope.holder.node[:]
        scope.holder.node.extend(copies)
        del tensors[k]
    return f"{scope.name}: {name!r} {manner}"
