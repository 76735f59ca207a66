"""Edits of inputs, outputs and types of graphs, of functions, and of what a model declares."""

from __future__ import annotations

from typing import Any

from onnx import AttributeProto, FunctionProto, TensorProto, ValueInfoProto, helper

from benchmarks.edits.draw import DTYPES, KINDS, Draw, Scope, exchange, fill, kind, move, rename

__all__: list[str] = []


def _value(draw: Draw, fields: tuple[str, ...] = ("input", "output")) -> tuple[Scope, str, Any, ValueInfoProto] | None:
    """An input, output or described value of a graph, with the list that it is in."""
    scope = draw.scope(lambda scope: scope.is_graph and any(getattr(scope.holder, field) for field in fields))
    if scope is None:
        return None
    field = draw.pick([field for field in fields if getattr(scope.holder, field)])
    values = getattr(scope.holder, field)
    return scope, f"{scope.name} {field}", values, draw.pick(values)


@kind("interface: two exchanged")
def _(draw: Draw) -> str | None:
    found = _value(draw)
    if found is None or len(found[2]) < 2:
        return None
    _, where, values, _ = found
    same = [(i, j) for i in range(len(values)) for j in range(i) if values[i].type == values[j].type]
    i, j = draw.pick(same) if same and draw.chance(0.7) else draw.two(len(values))
    first, second = values[i].name, values[j].name
    values[i].name, values[j].name = second, first
    if draw.chance(0.5):
        kept = ValueInfoProto.FromString(values[i].SerializeToString())
        values[i].CopyFrom(values[j])
        values[j].CopyFrom(kept)
        values[i].name, values[j].name = second, first
    return f"{where} {first!r} and {second!r}"


@kind("interface: order")
def _(draw: Draw) -> str | None:
    found = _value(draw)
    if found is None or len(found[2]) < 2:
        return None
    i, j = draw.two(len(found[2]))
    (exchange if draw.chance(0.5) else move)(found[2], i, j)
    return f"{found[1]} {i}, {j}"


@kind("interface: type")
def _(draw: Draw) -> str | None:
    found = _value(draw)
    if found is None:
        return None
    value = found[3]
    tensor = value.type.tensor_type
    manner = draw.pick(["element", "element", "sequence", "none", "denotation"])
    if manner == "element":
        tensor.elem_type = draw.pick([t for t in DTYPES if t != tensor.elem_type])
    elif manner == "sequence":
        value.type.CopyFrom(helper.make_sequence_type_proto(value.type))
    elif manner == "none":
        value.ClearField("type")
    else:
        value.type.denotation = "IMAGE"
    return f"{found[1]} {value.name!r} {manner} {tensor.elem_type if manner == 'element' else ''}"


@kind("interface: shape")
def _(draw: Draw) -> str | None:
    found = _value(draw)
    if found is None:
        return None
    value = found[3]
    shape, manner = value.type.tensor_type.shape, draw.pick(["size", "name", "unknown", "longer", "shorter", "none"])
    if manner == "longer":
        shape.dim.add(dim_value=1)
    elif manner == "none":
        value.type.tensor_type.ClearField("shape")
    elif not shape.dim:
        return None
    elif manner == "shorter":
        del shape.dim[draw.below(len(shape.dim))]
    else:
        dim = draw.pick(shape.dim)
        if manner == "size":
            dim.dim_value = draw.integer(dim.dim_value)
        elif manner == "name":
            dim.dim_param = draw.text(dim.dim_param or "n")
        else:
            dim.Clear()
    return f"{found[1]} {value.name!r} {manner}: {_shape(value)}"


def _shape(value: ValueInfoProto) -> list[int | str]:
    return [dim.dim_param or dim.dim_value for dim in value.type.tensor_type.shape.dim]


@kind("interface: removed")
def _(draw: Draw) -> str | None:
    found = _value(draw)
    if found is None:
        return None
    values, name = found[2], found[3].name
    fill(values, [value for value in values if value.name != name])
    return f"{found[1]} {name!r}"


@kind("interface: added")
def _(draw: Draw) -> str | None:
    found = _value(draw)
    if found is None:
        return None
    scope, where, values, value = found
    name = draw.pick([draw.name(scope), "one more", value.name])
    values.add().CopyFrom(value)
    values[-1].name = name
    if draw.chance(0.3):
        move(values, len(values) - 1, draw.below(len(values)))
    return f"{where} {name!r} of the type of {value.name!r}"


@kind("interface: renamed")
def _(draw: Draw) -> str | None:
    found = _value(draw)
    if found is None:
        return None
    scope, where, _, value = found
    old, new = value.name, draw.name(scope) if draw.chance(0.3) else draw.text(value.name)
    value.name = new
    if with_uses := draw.chance(0.5):
        rename(scope, old, new)
        for node in scope.holder.node:
            fill(node.output, [new if name == old else name for name in node.output])
        for tensor in scope.holder.initializer:
            tensor.name = new if tensor.name == old else tensor.name
    return f"{where} {old!r} -> {new!r}{' with its uses' if with_uses else ''}"


@kind("interface: initializer as an input, or not")
def _(draw: Draw) -> str | None:
    graph = draw.model.graph
    inputs, tensors = {value.name for value in graph.input}, {t.name: t for t in graph.initializer}
    if inputs & set(tensors) and draw.chance(0.5):
        name = draw.pick(sorted(inputs & set(tensors)))
        fill(graph.input, [value for value in graph.input if value.name != name])
        return f"{name!r} is no input"
    if draw.chance(0.5) and set(tensors) - inputs:
        name = draw.pick(sorted(set(tensors) - inputs))
        graph.input.append(helper.make_tensor_value_info(name, tensors[name].data_type, list(tensors[name].dims)))
        return f"{name!r} is an input"
    bare = [value for value in graph.input if value.name not in tensors and value.type.tensor_type.elem_type == 1]
    if not bare:
        return None
    value = draw.pick(bare)
    sizes = [dim.dim_value or 1 for dim in value.type.tensor_type.shape.dim]
    graph.initializer.append(
        helper.make_tensor(value.name, TensorProto.FLOAT, sizes, bytes(4 * _size(sizes)), raw=True)
    )
    if draw.chance(0.3):
        fill(graph.input, [other for other in graph.input if other.name != value.name])
    return f"the input {value.name!r} has an initializer"


def _size(sizes: list[int]) -> int:
    total = 1
    for size in sizes:
        total *= size
    return total


@kind("interface: doc string or metadata")
def _(draw: Draw) -> str | None:
    found = _value(draw, ("input", "output", "value_info"))
    if found is None:
        return None
    if draw.chance(0.5):
        found[3].doc_string = draw.text(found[3].doc_string)
    else:
        found[3].metadata_props.add(key="custom", value="1")
    return f"{found[1]} {found[3].name!r}"


@kind("described value: type or shape")
def _(draw: Draw) -> str | None:
    found = _value(draw, ("value_info",))
    if found is None:
        return None
    value = found[3]
    tensor = value.type.tensor_type
    if not tensor.shape.dim or draw.chance(0.4):
        tensor.elem_type = draw.pick([t for t in DTYPES if t != tensor.elem_type])
    elif draw.chance(0.5):
        dim = draw.pick(tensor.shape.dim)
        dim.dim_value = draw.integer(dim.dim_value)
    else:
        tensor.shape.dim.add(dim_value=1)
    return f"{found[1]} {value.name!r}: {tensor.elem_type} {_shape(value)}"


@kind("described value: removed, added, renamed")
def _(draw: Draw) -> str | None:
    found = _value(draw, ("value_info",))
    if found is None:
        return None
    scope, where, values, value = found
    name, manner = value.name, draw.pick(["removed", "added", "renamed", "all removed", "exchanged"])
    if manner == "removed":
        fill(values, [other for other in values if other.name != name])
    elif manner == "all removed":
        del values[:]
    elif manner == "added":
        values.add().CopyFrom(value)
        values[-1].name = draw.name(scope)
    elif manner == "renamed":
        value.name = draw.name(scope)
    else:
        other = draw.pick(values)
        value.name, other.name = other.name, value.name
    return f"{where} {name!r} {manner}"


@kind("graph: name, doc string, metadata, quantization")
def _(draw: Draw) -> str | None:
    scope = draw.scope(lambda scope: scope.is_graph)
    if scope is None:
        return None
    graph, manner = scope.holder, draw.pick(["name", "doc", "metadata", "quantization"])
    if manner == "name":
        graph.name = draw.text(graph.name)
    elif manner == "doc":
        graph.doc_string = draw.text(graph.doc_string)
    elif manner == "metadata":
        graph.metadata_props.add(key=draw.pick(["custom", "graphscale.version", "graphscale.roles"]), value="1")
    else:
        graph.quantization_annotation.add(tensor_name=draw.name(scope))
    return f"{scope.name} {manner}"


@kind("model: opset")
def _(draw: Draw) -> str | None:
    holders = [("the model", draw.model.opset_import), *((f.name, f.opset_import) for f in draw.model.functions)]
    where, imports = draw.pick(holders)
    manner = draw.pick(["version", "version", "removed", "added", "twice", "domain", "order"]) if imports else "added"
    entry = draw.pick(imports) if imports else None
    if manner == "added" or entry is None:
        imports.add(
            domain=draw.pick(["custom", "com.microsoft", "ai.onnx.ml", "ai.onnx", "ai.onnx.training"]), version=1
        )
    elif manner == "version":
        entry.version = draw.pick([entry.version + 1, entry.version - 1, draw.integer(entry.version)])
    elif manner == "removed":
        fill(imports, [other for other in imports if other.domain != entry.domain])
    elif manner == "twice":
        imports.add(domain=entry.domain, version=draw.pick([entry.version, entry.version + 1, entry.version - 1]))
    elif manner == "order":
        fill(imports, list(imports)[::-1])
    else:
        entry.domain = "ai.onnx" if entry.domain == "" and draw.chance(0.7) else draw.text(entry.domain)
    return f"{where} {manner}: {[(e.domain, e.version) for e in imports]}"


@kind("model: IR version")
def _(draw: Draw) -> str | None:
    before = draw.model.ir_version
    draw.model.ir_version = draw.pick([v for v in (3, 4, 7, 8, 9, 10, 11, 12, 13, before + 1, 99) if v != before])
    return f"{before} -> {draw.model.ir_version}"


@kind("model: producer, domain, version, doc string")
def _(draw: Draw) -> str | None:
    model, field = draw.model, draw.pick(["producer_name", "producer_version", "domain", "doc_string", "model_version"])
    if field == "model_version":
        model.model_version = draw.integer(model.model_version)
    else:
        setattr(model, field, draw.text(getattr(model, field)))
    return f"{field} {getattr(model, field)!r}"


@kind("model: training_info, configuration")
def _(draw: Draw) -> str | None:
    manner = draw.pick(["empty", "binding", "algorithm", "configuration"])
    if manner == "configuration":
        if not hasattr(draw.model, "configuration"):
            return None
        draw.model.configuration.add(name="devices", num_devices=2)
        return manner
    info = draw.model.training_info.add()
    if manner == "binding":
        inputs, outputs = list(draw.model.graph.input), list(draw.model.graph.output)
        info.update_binding.add(key=draw.pick(inputs).name, value=draw.pick(outputs).name)
    elif manner == "algorithm":
        info.algorithm.node.add(op_type="Identity", input=[draw.name(Scope(draw.model.graph, ""))], output=["x"])
    return manner


def _function(draw: Draw) -> FunctionProto | None:
    return draw.pick(draw.model.functions) if draw.model.functions else None


@kind("function: attribute's default")
def _(draw: Draw) -> str | None:
    function = _function(draw)
    if function is None:
        return None
    if function.attribute_proto and draw.chance(0.6):
        attribute, manner = draw.pick(function.attribute_proto), draw.pick(["value", "removed"])
        if manner == "value" and attribute.type in (AttributeProto.FLOAT, AttributeProto.INT):
            attribute.f, attribute.i = draw.number(attribute.f), draw.integer(attribute.i)
        else:
            fill(function.attribute_proto, [a for a in function.attribute_proto if a.name != attribute.name])
        return f"{function.name} {attribute.name} {manner}"
    if function.attribute and draw.chance(0.7):
        name = draw.pick(function.attribute)
        fill(function.attribute, [other for other in function.attribute if other != name])
        if draw.chance(0.6):
            function.attribute_proto.append(helper.make_attribute(name, draw.pick([2.0, 1.0, 2000, 0.5])))
        return f"{function.name} {name} has a default"
    function.attribute.append("custom")
    return f"{function.name} has one more attribute"


@kind("function: removed, renamed, duplicated")
def _(draw: Draw) -> str | None:
    function = _function(draw)
    if function is None:
        return None
    name, manner = function.name, draw.pick(["removed", "name", "domain", "overload", "twice", "doc", "metadata"])
    if manner == "removed":
        fill(draw.model.functions, [f for f in draw.model.functions if f.name != name])
    elif manner == "twice":
        draw.model.functions.add().CopyFrom(function)
        second = draw.model.functions[-1]
        if draw.chance(0.7):
            inner = Draw(draw.model, draw.rng)
            second.node[0].op_type = "Identity"
            second.overload = inner.pick(["", "second"])
    elif manner == "metadata":
        function.metadata_props.add(key="custom", value="1")
    else:
        field = "doc_string" if manner == "doc" else manner
        setattr(function, field, draw.text(getattr(function, field)))
    return f"{name} {manner}"


@kind("function: inputs and outputs")
def _(draw: Draw) -> str | None:
    function = _function(draw)
    if function is None:
        return None
    field = draw.pick(["input", "output"])
    names = getattr(function, field)
    manner = draw.pick(["exchanged", "renamed", "removed", "added"])
    if manner == "exchanged":
        if len(names) < 2:
            return None
        exchange(names, *draw.two(len(names)))
    elif manner == "added":
        names.append(draw.name(Scope(function, "")))
    elif manner == "removed":
        del names[draw.below(len(names))]
    else:
        names[draw.below(len(names))] = draw.name(Scope(function, ""))
    return f"{function.name} {field} {manner}: {list(names)}"


@kind("function: one that shadows an operator")
def _(draw: Draw) -> str | None:
    found = draw.node(lambda node: node.output)
    if found is None:
        return None
    node, model = found[2], draw.model
    function = model.functions.add(domain=node.domain, name=node.op_type)
    function.input.extend(f"i{k}" for k in range(len(node.input)))
    function.output.extend(f"o{k}" for k in range(len(node.output)))
    function.attribute.extend(a.name for a in node.attribute)
    for name in function.output:
        source = function.input[0] if function.input else "none"
        function.node.append(helper.make_node(draw.pick(["Identity", "Neg", "Not"]), [source], [name]))
    fill(function.opset_import, model.opset_import)
    if draw.chance(0.3):
        move(model.functions, len(model.functions) - 1, 0)
    if draw.chance(0.3):
        function.domain = "ai.onnx" if function.domain == "" else "custom"
    if function.domain not in {entry.domain for entry in model.opset_import} and draw.chance(0.7):
        model.opset_import.add(domain=function.domain, version=1)
    return f"{function.domain or 'ai.onnx'}::{function.name} of {len(function.input)} inputs"


def edit_record(draw: Draw) -> str | None:
    """Make an edit of a graph that is packed up somewhere."""
    kinds = [name for name in KINDS if name.startswith(("node", "constant", "attribute", "interface"))]
    name = draw.pick(kinds)
    where = KINDS[name](draw)
    return None if where is None else f"{name} at {where}"
