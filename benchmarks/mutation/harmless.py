"""Changes without an effect, as other tools may make in a scaled file, and verify's verdict on them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from tempfile import mkdtemp

import numpy as np
import onnx
import onnx_ir as ir
from onnx import helper, inliner, shape_inference

from benchmarks.mutation import sites as at
from benchmarks.mutation.damaged import FLOAT, Damaged
from benchmarks.mutation.kinds import same
from graphscale.graph.builder import PASS_KEY

_NAMES = "names of values and nodes inside of a graph mean nothing"
_EQUAL = "the same values by other nodes"

# --- names, order, texts ----------------------------------------------------------------------------------------------


def _inner_values(d: Damaged) -> list[ir.Value]:
    named = {*d.stamp.names.values()}
    values = (value for node in d.graph for value in node.outputs)
    return [v for v in values if v.name and not v.is_graph_output() and v.name not in named]


@same("rename inner values", at.anywhere, _NAMES)
def _rename_values(d: Damaged, site: str) -> None:
    for i, value in enumerate(_inner_values(d)):
        value.name = f"v{i}"


@same("rename nodes", at.anywhere, _NAMES)
def _rename_nodes(d: Damaged, site: str) -> None:
    for i, node in enumerate(d.graph):
        node.name = f"n{i}"


@same("leave nodes without names", at.anywhere, _NAMES)
def _no_names(d: Damaged, site: str) -> None:
    def edit(proto: onnx.ModelProto) -> None:
        for node in proto.graph.node:
            node.name = ""

    d.edit_file(edit)


@same("rename constants", at.constants, _NAMES)
def _rename_constants(d: Damaged, site: str) -> None:
    for i, name in enumerate([*at.constants(d)]):
        value = d.graph.initializers.pop(name)
        value.name = f"c{i}"
        d.graph.initializers[f"c{i}"] = value


@same("another topological order", at.anywhere, "each node follows the nodes that it reads")
def _reorder(d: Damaged, site: str) -> None:
    def edit(proto: onnx.ModelProto) -> None:
        nodes, pending = [], [*proto.graph.node]
        known = {value.name for value in (*proto.graph.input, *proto.graph.initializer)} | {""}
        while pending:  # the last node that can run
            ready = next(node for node in reversed(pending) if known >= {*_read(node)})
            pending.remove(ready)
            nodes.append(ready)
            known |= {*ready.output}
        del proto.graph.node[:]
        proto.graph.node.extend(nodes)

    d.edit_file(edit)


def _read(node: onnx.NodeProto) -> Iterator[str]:
    """The values that a node and its bodies read from outside."""
    yield from node.input
    for attribute in node.attribute:
        inside = {name for inner in attribute.g.node for name in inner.output}
        inside |= {value.name for value in (*attribute.g.input, *attribute.g.initializer)}
        yield from (name for inner in attribute.g.node for name in _read(inner) if name not in inside)


@same("reorder the initializers", at.anywhere, "initializers have no order")
def _reorder_constants(d: Damaged, site: str) -> None:
    def edit(proto: onnx.ModelProto) -> None:
        tensors = [*proto.graph.initializer][::-1]
        del proto.graph.initializer[:]
        proto.graph.initializer.extend(tensors)

    d.edit_file(edit)


@same("doc strings", at.anywhere, "texts for people")
def _texts(d: Damaged, site: str) -> None:
    d.model.doc_string = d.graph.doc_string = "text"
    for node in d.graph:
        node.doc_string = "text"


@same("another producer", at.anywhere, "texts for people")
def _producer(d: Damaged, site: str) -> None:
    d.model.producer_name, d.model.producer_version, d.graph.name = "tool", "1", "main"


@same("metadata of another tool", at.anywhere, "no tool of graphscale reads them")
def _other_metadata(d: Damaged, site: str) -> None:
    d.model.metadata_props["tool"] = "1"
    for node in d.graph:
        node.metadata_props["tool"] = "1"


@same("no marks of passes", at.anywhere, "marks are for drawings and diffs")
def _no_marks(d: Damaged, site: str) -> None:
    d.finish()
    for node in d.graph:
        node.metadata_props.pop(PASS_KEY, None)


@same("no record of the original", at.anywhere, "a step does not read it; strip needs it", accepted=False)
def _no_record(d: Damaged, site: str) -> None:
    d.model.metadata_props.pop("graphscale.original")


# --- types ------------------------------------------------------------------------------------------------------------


@same("no types inside", at.anywhere, "types inside can be inferred")
def _no_types(d: Damaged, site: str) -> None:
    d.edit_file(lambda proto: proto.graph.ClearField("value_info"))


@same("types by shape inference", at.anywhere, "types inside can be inferred")
def _inferred(d: Damaged, site: str) -> None:
    d.edit_file(lambda proto: proto.CopyFrom(shape_inference.infer_shapes(proto)))


def _early(d: Damaged) -> Iterator[str]:
    yield from ["graph"] if d.model.ir_version < 10 else []


@same("a later IR version", _early, "all that the file has means the same in the later version")
def _ir_version(d: Damaged, site: str) -> None:
    d.edit_file(lambda proto: setattr(proto, "ir_version", 10))


@same("an opset of a domain that no node is of", at.anywhere, "no node is of the domain", accepted=False)
def _opset(d: Damaged, site: str) -> None:
    d.edit_file(lambda proto: proto.opset_import.append(helper.make_opsetid("idle", 1)))


# --- constants --------------------------------------------------------------------------------------------------------


@same("weights in a file", at.constants, "the same bits")
def _external(d: Damaged, site: str) -> None:
    tensor = d.values[site].const_value
    assert tensor is not None
    folder = Path(mkdtemp(prefix="graphscale-mutants-"))
    (folder / "weights").write_bytes(tensor.tobytes())
    d.values[site].const_value = ir.ExternalTensor(
        "weights", 0, tensor.nbytes, FLOAT, shape=ir.Shape(tensor.shape), name=site, base_dir=folder
    )


@same("a constant as a node", at.constants, _EQUAL, accepted=False)
def _constant_node(d: Damaged, site: str) -> None:
    d.replace(d.values[site], d.make("Constant", [], None, value=d.values[site].const_value))


def _shared(d: Damaged) -> Iterator[str]:
    yield from (name for name in at.constants(d) if len(d.values[name].uses()) > 1)


@same("a constant twice", _shared, "the same bits", accepted=False)
def _two_constants(d: Damaged, site: str) -> None:
    value = d.values[site]
    assert value.const_value is not None
    use = value.uses()[0]
    use.node.replace_input_with(use.idx, d.constant(value.const_value.numpy().copy()))


@same("a constant that nothing reads", at.anywhere, "nothing reads it", accepted=False)
def _idle_constant(d: Damaged, site: str) -> None:
    d.constant(np.zeros(2, np.float32))


# --- nodes ------------------------------------------------------------------------------------------------------------


@same("an Identity more", at.gradients, _EQUAL, accepted=False)
def _identity(d: Damaged, site: str) -> None:
    d.around(d.values[site], "Identity")


@same("exchanged summands", at.of("Add"), "addition is commutative, bit for bit", accepted=False)
def _commute(d: Damaged, site: str) -> None:
    node = d.producer(site)
    one, other = node.inputs
    node.replace_input_with(0, other)
    node.replace_input_with(1, one)


def _brief(d: Damaged) -> Iterator[str]:
    yield from (n.outputs[0].name or "" for n in at.originals(d, "Gemm") if "transA" not in n.attributes)


@same("a default attribute in full", _brief, "the operator's default", accepted=False)
def _default(d: Damaged, site: str) -> None:
    d.producer(site).attributes["transA"] = ir.AttrInt64("transA", 0)


def _axes(d: Damaged) -> Iterator[str]:
    if d.model.opset_imports[""] >= 13:
        yield from (node.name or "" for node in d.graph if node.op_type == "ReduceSum" and len(node.inputs) == 1)


@same("an operand that is left out by name", _axes, "an operand without a name is left out", accepted=False)
def _left_out(d: Damaged, site: str) -> None:
    d.edit_file(lambda proto: next(node for node in proto.graph.node if node.name == site).input.append(""))


@same("the domain of ONNX in full", at.of("Mul"), "ai.onnx is the domain without a name")
def _domain(d: Damaged, site: str) -> None:
    def edit(proto: onnx.ModelProto) -> None:
        for node in proto.graph.node:
            if not node.domain:
                node.domain = "ai.onnx"

    d.edit_file(edit)


@same("an inlined rule", at.function, _EQUAL, accepted=False)
def _inline(d: Damaged, site: str) -> None:
    d.edit_file(lambda proto: proto.CopyFrom(inliner.inline_local_functions(proto)))


@same("other names inside of the rule", at.function, _NAMES)
def _rule_names(d: Damaged, site: str) -> None:
    assert d.rule is not None
    for i, node in enumerate(d.rule):
        node.name = f"r{i}"
        for value in node.outputs:
            value.name = f"r.{value.name}"
