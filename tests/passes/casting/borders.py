"""Properties of every graph in mixed precision, checked on the graph itself."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

import numpy as np
import onnx

import graphscale as gs
from graphscale.passes.casting.settings import default_rules

FLOAT, FLOAT16, BFLOAT16 = onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16
SMALL = {"float16": FLOAT16, "bfloat16": BFLOAT16}
_RULES = default_rules()


def properties(node: onnx.NodeProto) -> dict[str, str]:
    return {entry.key: entry.value for entry in node.metadata_props}


def is_ours(node: onnx.NodeProto) -> bool:
    """Return whether autocast inserted a node."""
    return properties(node).get("graphscale.pass") == "autocast"


def target_of(node: onnx.NodeProto) -> int:
    return int(next(attribute.i for attribute in node.attribute if attribute.name == "to"))


def bodies(node: onnx.NodeProto) -> list[onnx.GraphProto]:
    """The graphs in the attributes of a node."""
    return [graph for a in node.attribute for graph in ([a.g] if a.HasField("g") else a.graphs)]


def graphs_in(graph: onnx.GraphProto) -> Iterator[onnx.GraphProto]:
    """A graph and all graphs nested in it, in order."""
    yield graph
    for node in graph.node:
        for body in bodies(node):
            yield from graphs_in(body)


def nodes_in(graph: onnx.GraphProto) -> Iterator[onnx.NodeProto]:
    for each in graphs_in(graph):
        yield from each.node


def dtypes_in(model: onnx.ModelProto) -> dict[str, int]:
    """The dtypes that a model declares, and those that ONNX infers."""
    inferred = onnx.shape_inference.infer_shapes(model)
    found: dict[str, int] = {}
    for graph in graphs_in(inferred.graph):
        found |= {tensor.name: tensor.data_type for tensor in graph.initializer}
        for value in (*graph.input, *graph.value_info, *graph.output):
            found[value.name] = value.type.tensor_type.elem_type
    return found


def low_nodes(model: onnx.ModelProto, dtype: str) -> list[onnx.NodeProto]:
    """The nodes of a graph that read or give the small type, casts left out."""
    dtypes, small = dtypes_in(model), SMALL[dtype]
    return [
        node
        for node in nodes_in(model.graph)
        if node.op_type != "Cast" and any(dtypes.get(name) == small for name in (*node.input, *node.output))
        if node.op_type not in ("Constant", "Shape", "Size") and not bodies(node)
    ]


def constants_in(graph: onnx.GraphProto) -> dict[str, tuple[int, bytes]]:
    """The dtype and the bytes of every initializer, and of every tensor in a Constant node."""
    tensors = [(tensor.name, tensor) for each in graphs_in(graph) for tensor in each.initializer]
    for node in nodes_in(graph):
        if node.op_type == "Constant" and node.attribute[0].name == "value":
            tensors.append((node.output[0], node.attribute[0].t))
    return {name: (tensor.data_type, onnx.numpy_helper.to_array(tensor).tobytes()) for name, tensor in tensors}


def assert_well_cast(original: onnx.ModelProto, result: gs.AutocastModel) -> None:
    """Without the inserted casts it is the original; casts stand at borders alone; the report counts right.

    Constants in the small type have lost bits: `strip` gives back their float32 tensors.
    """
    graph, report = result.model.graph, result.report
    assert_same_interface(original, result.model)
    assert_only_casts_were_inserted(original.graph, graph)
    assert constants_in(gs.strip(result.model).graph) == constants_in(original.graph)
    casts = [node for node in nodes_in(graph) if is_ours(node)]
    assert {node.op_type for node in casts} <= {"Cast"}
    assert len(casts) == report.casts
    makers = {name: node for node in nodes_in(graph) for name in node.output}
    small = SMALL[report.dtype]
    assert {target_of(node) for node in casts} <= {small, FLOAT}
    sources = Counter((node.input[0], target_of(node)) for node in casts)
    assert set(sources.values()) <= {1}, "a value is cast twice to one type"
    for node in casts:
        maker = makers.get(node.input[0])
        if target_of(node) == FLOAT and report.emulate:
            assert maker is not None and is_ours(maker) and target_of(maker) == small
            assert not is_ours(makers.get(maker.input[0], maker.__class__())), "a cast of a rounded value"
        else:
            assert maker is None or not is_ours(maker), f"{node.output[0]} is a cast of a cast"
    assert sum(op.low for op in report.ops) == report.low_nodes
    assert sum(op.kept for op in report.ops) == report.kept_nodes
    assert all(sum(op.reasons.values()) == op.kept for op in report.ops)
    if report.emulate:
        assert len(low_nodes(result.model, report.dtype)) == len(low_nodes(original, report.dtype))
    else:
        assert_typed(original, result)


def assert_typed(original: onnx.ModelProto, result: gs.AutocastModel) -> None:
    """The nodes of the small type are those that the report counts; a cast to float32 is for one that is not."""
    report, small = result.report, SMALL[result.report.dtype]
    low = low_nodes(result.model, report.dtype)
    names, already = (
        Counter("::".join(filter(None, (node.domain, node.op_type))) for node in nodes)
        for nodes in (low, low_nodes(original, report.dtype))
    )
    assert {op.op: op.low for op in report.ops if op.low} == dict(names - already)
    low_ids = {id(node) for node in low}
    graph, makers = result.model.graph, {}
    for node in nodes_in(graph):
        makers |= dict.fromkeys(node.output, node)
    outputs = {output.name for each in graphs_in(graph) for output in each.output}
    for cast in filter(is_ours, nodes_in(graph)):
        readers = [node for node in nodes_in(graph) if cast.output[0] in node.input]
        assert readers or cast.output[0] in outputs, f"nothing reads {cast.output[0]}"
        if target_of(cast) == small:
            assert all(id(node) in low_ids for node in readers)
        else:
            assert id(makers[cast.input[0]]) in low_ids
            wide = [(n, i) for n in readers for i, name in enumerate(n.input) if name == cast.output[0]]
            assert all(id(node) not in low_ids or i in rule_of(node) for node, i in wide)


def rule_of(node: onnx.NodeProto) -> tuple[int, ...]:
    """The operands of a node that stay float32."""
    return _RULES[node.domain, node.op_type].wide_inputs


def assert_same_interface(original: onnx.ModelProto, model: onnx.ModelProto) -> None:
    for side in ("input", "output"):
        for before, after in zip(getattr(original.graph, side), getattr(model.graph, side), strict=True):
            declared = onnx.TypeProto.FromString(after.type.SerializeToString())
            if not before.type.tensor_type.HasField("shape"):  # inferred
                declared.tensor_type.ClearField("shape")
            assert (before.name, before.type) == (after.name, declared)
    for before, after in zip(original.graph.initializer, model.graph.initializer, strict=True):
        assert before.name == after.name
        assert_same_or_rounded(before, after, after.name, model.graph)
    assert model.ir_version == original.ir_version
    assert [(o.domain, o.version) for o in model.opset_import] == [(o.domain, o.version) for o in original.opset_import]


def assert_same_or_rounded(
    before: onnx.TensorProto, after: onnx.TensorProto, name: str, graph: onnx.GraphProto
) -> None:
    """A constant is unchanged, or in the small type."""
    was, became = (onnx.numpy_helper.to_array(tensor) for tensor in (before, after))
    if before.data_type != after.data_type:
        assert (before.data_type, after.data_type) in ((FLOAT, FLOAT16), (FLOAT, BFLOAT16))
        assert name not in {value.name for value in (*graph.input, *graph.output)}
        with np.errstate(all="ignore"):
            was = was.astype(became.dtype)
    assert (was.shape, was.tobytes()) == (became.shape, became.tobytes())


def trimmed(names: Iterable[str]) -> list[str]:
    """Without what is left out at the end."""
    found = list(names)
    while found and not found[-1]:
        found.pop()
    return found


def assert_only_casts_were_inserted(
    before: onnx.GraphProto,
    after: onnx.GraphProto,
    outer: Mapping[str, str] | None = None,
    whole: onnx.GraphProto | None = None,
) -> None:
    """Left the inserted casts out, two graphs have the same nodes, between the same values."""
    whole = whole or after
    names = dict(outer or {}) | {v.name: v.name for v in (*after.input, *after.initializer)}
    kept = []
    for node in after.node:
        if is_ours(node):
            names[node.output[0]] = names.get(node.input[0], "")
        else:
            kept.append(node)
            if len(kept) <= len(before.node):
                names |= dict(zip(trimmed(node.output), trimmed(before.node[len(kept) - 1].output), strict=True))
    # Casts of graph inputs stand first, others behind what they cast: every name is known after one pass.
    assert len(kept) == len(before.node)
    for node, was in zip(kept, before.node, strict=True):
        assert (node.op_type, node.domain, node.name) == (was.op_type, was.domain, was.name)
        assert [names[name] if name else "" for name in trimmed(node.input)] == trimmed(was.input)
        inner = list(zip(bodies(was), bodies(node), strict=True))
        for body_before, body_after in inner:
            assert_only_casts_were_inserted(body_before, body_after, names, whole)
        if node.op_type == "Constant" and node.attribute[0].name == "value":
            assert_same_or_rounded(was.attribute[0].t, node.attribute[0].t, node.output[0], whole)
        elif not inner and "graphscale.was_float" not in properties(node):
            assert [a.SerializeToString(deterministic=True) for a in node.attribute] == [
                a.SerializeToString(deterministic=True) for a in was.attribute
            ]
    assert [names[output.name] for output in after.output] == [output.name for output in before.output]
