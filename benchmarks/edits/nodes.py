"""Edits of nodes: operators, inputs, outputs, and nodes as a whole."""

from __future__ import annotations

from onnx import NodeProto, TensorProto, helper

from benchmarks.edits.draw import SCHEMAS, Draw, Scope, exchange, fill, kind, move, rename
from benchmarks.edits.operators import PAIRS, SYNONYMS

__all__: list[str] = []


def _where(scope: Scope, i: int, node: NodeProto) -> str:
    return f"{scope.name} node {i} {node.domain or 'ai.onnx'}::{node.op_type} {node.name!r}"


@kind("node: another operator of its arity")
def _(draw: Draw) -> str | None:
    found = draw.node(lambda node: node.op_type != "Constant")
    if found is None:
        return None
    node = found[2]
    before, inputs, outputs = _where(*found), len(node.input), len(node.output)
    fitting = [
        schema.name
        for schema in SCHEMAS
        if schema.name != node.op_type
        and schema.min_input <= inputs <= schema.max_input
        and schema.min_output <= outputs <= schema.max_output
    ]
    if not fitting:
        return None
    node.op_type = draw.pick(fitting)
    if draw.chance(0.5):
        node.domain = ""
    if draw.chance(0.3):
        del node.attribute[:]
    return f"{before} -> {node.op_type}"


@kind("node: a synonym")
def _(draw: Draw) -> str | None:
    known = {name for group in SYNONYMS for name in group}
    found = draw.node(lambda node: node.op_type in known)
    if found is None:
        return None
    node, before = found[2], _where(*found)
    group = draw.pick([group for group in SYNONYMS if node.op_type in group])
    node.op_type = draw.pick([name for name in group if name != node.op_type])
    return f"{before} -> {node.op_type}"


@kind("node: domain")
def _(draw: Draw) -> str | None:
    found = draw.node()
    if found is None:
        return None
    node, before = found[2], _where(*found)
    domains = ("", "ai.onnx", "com.microsoft", "ai.onnx.ml", "ai.onnx.training", "graphscale", "custom")
    node.domain = draw.pick([domain for domain in domains if domain != node.domain])
    return f"{before} -> {node.domain!r}"


@kind("node: overload")
def _(draw: Draw) -> str | None:
    found = draw.node()
    if found is None:
        return None
    found[2].overload = draw.text(found[2].overload)
    return f"{_where(*found)} overload {found[2].overload!r}"


@kind("node: another input")
def _(draw: Draw) -> str | None:
    found = draw.node(lambda node: node.input)
    if found is None:
        return None
    scope, _, node = found
    k = draw.below(len(node.input))
    before, node.input[k] = node.input[k], draw.name(scope)
    return f"{_where(*found)} input {k} {before!r} -> {node.input[k]!r}"


@kind("node: input removed")
def _(draw: Draw) -> str | None:
    found = draw.node(lambda node: node.input)
    if found is None:
        return None
    node = found[2]
    k = draw.below(len(node.input))
    name = node.input[k]
    if draw.chance(0.5):
        del node.input[k]
    else:
        node.input[k] = ""
    return f"{_where(*found)} input {k} {name!r} removed: {list(node.input)}"


@kind("node: input added")
def _(draw: Draw) -> str | None:
    found = draw.node()
    if found is None:
        return None
    scope, _, node = found
    names = list(node.input)
    names.insert(draw.pick([len(names), draw.below(len(names) + 1)]), "" if draw.chance(0.3) else draw.name(scope))
    fill(node.input, names)
    return f"{_where(*found)} inputs {names}"


@kind("node: inputs exchanged")
def _(draw: Draw) -> str | None:
    found = draw.node(lambda node: len(node.input) > 1)
    if found is None:
        return None
    node = found[2]
    exchange(node.input, *draw.two(len(node.input)))
    return f"{_where(*found)} inputs {list(node.input)}"


@kind("node: outputs exchanged")
def _(draw: Draw) -> str | None:
    found = draw.node(lambda node: len(node.output) > 1)
    if found is None:
        return None
    exchange(found[2].output, *draw.two(len(found[2].output)))
    return f"{_where(*found)} outputs {list(found[2].output)}"


@kind("node: output renamed")
def _(draw: Draw) -> str | None:
    found = draw.node(lambda node: node.output)
    if found is None:
        return None
    scope, _, node = found
    k = draw.below(len(node.output))
    old, new = node.output[k], draw.name(scope) if draw.chance(0.3) else draw.text(node.output[k])
    node.output[k] = new
    with_uses = draw.chance(0.5)
    if with_uses:
        rename(scope, old, new)
        if scope.is_graph:
            for value in (*scope.holder.output, *scope.holder.value_info):
                value.name = new if value.name == old else value.name
    return f"{_where(*found)} output {old!r} -> {new!r}{' with its uses' if with_uses else ''}"


@kind("node: output removed")
def _(draw: Draw) -> str | None:
    found = draw.node(lambda node: node.output)
    if found is None:
        return None
    node = found[2]
    k = draw.below(len(node.output))
    if draw.chance(0.5):
        del node.output[k]
    else:
        node.output[k] = ""
    return f"{_where(*found)} output {k} removed"


@kind("node: output added")
def _(draw: Draw) -> str | None:
    found = draw.node()
    if found is None:
        return None
    found[2].output.append(draw.pick(["", "one more", draw.name(found[0])]))
    return f"{_where(*found)} outputs {list(found[2].output)}"


@kind("nodes: outputs of two exchanged")
def _(draw: Draw) -> str | None:
    scope = draw.scope(lambda scope: sum(bool(node.output) for node in scope.holder.node) > 1)
    if scope is None:
        return None
    nodes = [node for node in scope.holder.node if node.output]
    first, second = (nodes[i] for i in draw.two(len(nodes)))
    i, j = draw.below(len(first.output)), draw.below(len(second.output))
    first.output[i], second.output[j] = second.output[j], first.output[i]
    return f"{scope.name} outputs {first.output[i]!r} and {second.output[j]!r}"


@kind("node: removed")
def _(draw: Draw) -> str | None:
    found = draw.node()
    if found is None:
        return None
    scope, i, node = found
    where, names, sources = _where(*found), list(node.output), [name for name in node.input if name]
    bypass = bool(names and sources) and draw.chance(0.6)
    del scope.holder.node[i]
    if bypass:
        source = draw.pick(sources)
        rename(scope, names[0], source)
        if draw.chance(0.5) and scope.is_graph:
            for value in scope.holder.output:
                value.name = source if value.name == names[0] else value.name
        where += f", its readers read {source!r}"
    return where


@kind("node: duplicated")
def _(draw: Draw) -> str | None:
    found = draw.node(lambda node: node.output)
    if found is None:
        return None
    scope, i, node = found
    copy = NodeProto.FromString(node.SerializeToString())
    manner = draw.pick(["the same names", "unread", "read by some"])
    if manner != "the same names":
        fill(copy.output, [f"{name}.copy" if name else "" for name in node.output])
        copy.name = f"{node.name}.copy"
    readers = [n for n in scope.holder.node if node.output[0] in n.input]
    if manner == "read by some" and readers:
        reader = draw.pick(readers)
        fill(reader.input, [copy.output[0] if name == node.output[0] else name for name in reader.input])
    nodes = list(scope.holder.node)
    nodes.insert(i + 1 if draw.chance(0.7) else draw.below(len(nodes) + 1), copy)
    fill(scope.holder.node, nodes)
    return f"{_where(scope, i, node)}: {manner}"


@kind("node: inserted in an edge")
def _(draw: Draw) -> str | None:
    found = draw.node(lambda node: any(node.input))
    if found is None:
        return None
    scope, i, node = found
    k = draw.pick([k for k, name in enumerate(node.input) if name])
    current, made, names = node.input[k], [], []
    for step, (op_type, operand) in enumerate(draw.pick(PAIRS)):
        attributes = operand if isinstance(operand, dict) else {}
        inputs = [current]
        if isinstance(operand, float):
            constant = helper.make_tensor("", TensorProto.FLOAT, [], [operand])
            made.append(helper.make_node("Constant", [], [f"edge.{step}.operand"], value=constant))
            inputs.append(f"edge.{step}.operand")
        current = f"edge.{step}"
        made.append(helper.make_node(op_type, inputs, [current], name=current, **attributes))
        names.append(f"{op_type}({operand})")
    where = f"{_where(*found)} input {k}: {', '.join(names)}"
    node.input[k] = current
    nodes = list(scope.holder.node)
    fill(scope.holder.node, [*nodes[:i], *made, *nodes[i:]])
    return where


@kind("node: inserted behind a value")
def _(draw: Draw) -> str | None:
    found = draw.node(lambda node: any(node.output))
    if found is None:
        return None
    scope, i, node = found
    k = draw.pick([k for k, name in enumerate(node.output) if name])
    name, op_type = node.output[k], draw.pick(["Identity", "Neg", "Abs", "Relu", "Clip", "Ceil", "Squeeze", "Not"])
    where = f"{_where(*found)} output {k}: {op_type}"
    node.output[k] = f"{name}.before"
    nodes = list(scope.holder.node)
    fill(scope.holder.node, [*nodes[: i + 1], helper.make_node(op_type, [f"{name}.before"], [name]), *nodes[i + 1 :]])
    return where


@kind("node: added, unread")
def _(draw: Draw) -> str | None:
    scope = draw.scope()
    if scope is None:
        return None
    op_type = draw.pick(
        ["Identity", "Shape", "Neg", "Not", "IsNaN", "Cast", "InPlaceAccumulatorV2", "Assert", "Optional"]
    )
    inputs = [draw.name(scope)]
    domain = ""
    if op_type == "InPlaceAccumulatorV2":
        inputs, domain = [draw.name(scope), draw.name(scope)], "com.microsoft"
    node = helper.make_node(op_type, inputs, ["unread"], domain=domain, **({"to": 1} if op_type == "Cast" else {}))
    nodes = list(scope.holder.node)
    nodes.insert(draw.pick([len(nodes), draw.below(len(nodes) + 1)]), node)
    fill(scope.holder.node, nodes)
    return f"{scope.name}: {op_type}({', '.join(inputs)})"


@kind("node: moved")
def _(draw: Draw) -> str | None:
    scope = draw.scope(lambda scope: len(scope.holder.node) > 1)
    if scope is None:
        return None
    i, j = draw.two(len(scope.holder.node))
    where = _where(scope, i, scope.holder.node[i])
    move(scope.holder.node, i, j)
    return f"{where} -> {j}"


@kind("nodes: order reversed or shuffled")
def _(draw: Draw) -> str | None:
    scope = draw.scope(lambda scope: len(scope.holder.node) > 1)
    if scope is None:
        return None
    nodes = list(scope.holder.node)
    order = draw.rng.permutation(len(nodes)) if draw.chance(0.5) else range(len(nodes) - 1, -1, -1)
    fill(scope.holder.node, [nodes[int(i)] for i in order])
    return scope.name


@kind("node: name")
def _(draw: Draw) -> str | None:
    found = draw.node()
    if found is None:
        return None
    others = [node.name for node in found[0].holder.node]
    found[2].name = draw.pick(["", draw.text(found[2].name), draw.pick(others)])
    return _where(*found)


@kind("node: doc string")
def _(draw: Draw) -> str | None:
    found = draw.node()
    if found is None:
        return None
    found[2].doc_string = draw.text(found[2].doc_string)
    return _where(*found)


@kind("node: metadata")
def _(draw: Draw) -> str | None:
    found = draw.node()
    if found is None:
        return None
    scope, _, node = found
    keys = {(p.key, p.value) for n in scope.holder.node for p in n.metadata_props} | {("custom", "1")}
    manner = draw.pick(["added", "removed", "value", "key"]) if node.metadata_props else "added"
    if manner == "added":
        key, value = draw.pick(sorted(keys))
        node.metadata_props.add(key=key, value=value)
    elif manner == "removed":
        del node.metadata_props[draw.below(len(node.metadata_props))]
    else:
        entry = draw.pick(node.metadata_props)
        others = sorted(value for key, value in keys if key == entry.key)
        new = draw.pick(others) if draw.chance(0.5) else draw.text(entry.value)
        entry.value, entry.key = (new, entry.key) if manner == "value" else (entry.value, draw.text(entry.key))
    return f"{_where(*found)} {manner}: {[(p.key, p.value) for p in node.metadata_props]}"


@kind("bodies: two of a node exchanged")
def _(draw: Draw) -> str | None:
    found = draw.node(lambda node: sum(a.HasField("g") for a in node.attribute) > 1)
    if found is None:
        return None
    attributes = [a for a in found[2].attribute if a.HasField("g")]
    i, j = draw.two(len(attributes))
    first, second = attributes[i].g.SerializeToString(), attributes[j].g.SerializeToString()
    attributes[i].g.ParseFromString(second)
    if draw.chance(0.7):
        attributes[j].g.ParseFromString(first)
    return _where(*found)
