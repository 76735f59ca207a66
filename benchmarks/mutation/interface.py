"""Damage to inputs, outputs, types, constants, functions and the file."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
from onnx import helper, numpy_helper

from benchmarks.mutation import sites as at
from benchmarks.mutation.damaged import FLOAT, Damaged
from benchmarks.mutation.kinds import kind

# --- inputs and outputs -----------------------------------------------------------------------------------------------


@kind("rename an input", at.batches)
def _rename_input(d: Damaged, site: str) -> None:
    d.values[site].name = f"{site}.renamed"


@kind("rename an output", at.loss)
def _rename_output(d: Damaged, site: str) -> None:
    d.values[site].name = f"{site}.renamed"


@kind("reorder the inputs", at.anywhere)
def _reorder_inputs(d: Damaged, site: str) -> None:
    d.graph.inputs[0], d.graph.inputs[1] = d.graph.inputs[1], d.graph.inputs[0]


@kind("reorder the outputs", at.anywhere)
def _reorder_outputs(d: Damaged, site: str) -> None:
    d.graph.outputs[0], d.graph.outputs[1] = d.graph.outputs[1], d.graph.outputs[0]


@kind("a further input", at.anywhere)
def _more_inputs(d: Damaged, site: str) -> None:
    d.graph.inputs.append(ir.val("further", FLOAT, []))


@kind("a further output", at.gradients)
def _more_outputs(d: Damaged, site: str) -> None:
    d.graph.outputs.append(d.make("Identity", [d.values[site]], None))


@kind("leave out an output", at.loss)
def _no_output(d: Damaged, site: str) -> None:
    d.graph.outputs.remove(d.values[site])


@kind("an output that reports rounded losses", at.loss)
def _other_output(d: Damaged, site: str) -> None:
    d.around(d.values[site], "Round")


@kind("fix a symbolic axis of an input", at.symbolic_batches)
def _fix(d: Damaged, site: str) -> None:
    value = d.values[site]
    assert value.shape is not None
    value.shape = ir.Shape([4, *list(value.shape)[1:]])


@kind("rename a symbolic axis of an input", at.symbolic_batches)
def _rename_axis(d: Damaged, site: str) -> None:
    value = d.values[site]
    assert value.shape is not None
    value.shape = ir.Shape(["renamed", *list(value.shape)[1:]])


@kind("free an axis of an input", at.batches)
def _free(d: Damaged, site: str) -> None:
    value = d.values[site]
    assert value.shape is not None
    value.shape = ir.Shape([*list(value.shape)[:-1], "free"])


@kind("forget the shape of an output", at.loss)
def _no_shape(d: Damaged, site: str) -> None:
    d.values[site].shape = None


@kind("another type of an input", at.batches)
def _other_type(d: Damaged, site: str) -> None:
    d.values[site].type = ir.TensorType(ir.DataType.DOUBLE)


def _inner(d: Damaged) -> Iterator[str]:
    for node in at.originals(d):
        value = node.outputs[0]
        if value.shape is not None and len(value.shape) > 0 and not value.is_graph_output():
            yield value.name or ""


@kind("declare another shape inside", _inner)
def _inner_shape(d: Damaged, site: str) -> None:
    value = d.values[site]
    assert value.shape is not None
    value.shape = ir.Shape([*list(value.shape)[:-1], 7])


@kind("declare another type inside", _inner)
def _inner_type(d: Damaged, site: str) -> None:
    d.values[site].type = ir.TensorType(ir.DataType.INT8)


def _undeclared(d: Damaged) -> Iterator[str]:
    """Operands of Shape and Size whose shape the graph does not declare, on a symbolic axis."""
    if any(at.symbolic_batches(d)):
        for node in at.originals(d, "Shape", "Size"):
            value = node.inputs[0]
            if value is not None and value.shape is None and value.producer() is not None:
                yield value.name or ""


@kind("declare a size where the graph declares none", _undeclared)
def _declared(d: Damaged, site: str) -> None:
    d.values[site].shape = ir.Shape([4, 3])


# --- constants --------------------------------------------------------------------------------------------------------


def _edit_constant(d: Damaged, site: str, edit: Callable[[np.ndarray], np.ndarray]) -> None:
    value = d.values[site]
    assert value.const_value is not None
    value.const_value = ir.tensor(edit(value.const_value.numpy().copy()), name=site)


@kind("a constant off by an ulp", at.constants)
def _ulp(d: Damaged, site: str) -> None:
    def edit(array: np.ndarray) -> np.ndarray:
        flat = array.reshape(-1)
        flat[-1] = np.nextafter(flat[-1], np.float32(np.inf))
        return array

    _edit_constant(d, site, edit)


def _zeros(d: Damaged) -> Iterator[str]:
    for name in at.constants(d):
        tensor = d.values[name].const_value
        if tensor is not None and not tensor.numpy().any():
            yield name


kind("-0.0 in place of 0.0", _zeros)(lambda d, site: _edit_constant(d, site, np.negative))
kind("NaN in a constant", at.constants)(
    lambda d, site: _edit_constant(d, site, lambda array: np.full_like(array, np.nan))
)


@kind("a constant of another type", at.constants)
def _constant_type(d: Damaged, site: str) -> None:
    _edit_constant(d, site, lambda array: array.astype(np.float64))
    d.values[site].type = ir.TensorType(ir.DataType.DOUBLE)


@kind("a constant of another shape", at.constants)
def _constant_shape(d: Damaged, site: str) -> None:
    _edit_constant(d, site, lambda array: array.reshape(1, *array.shape))
    d.values[site].shape = None


@kind("a constant that is an input", at.constants)
def _fed_constant(d: Damaged, site: str) -> None:
    d.graph.inputs.append(d.values[site])


@kind("weights in a file at another offset", at.constants)
def _offset(d: Damaged, site: str) -> None:
    tensor = d.values[site].const_value
    assert tensor is not None
    folder = Path(tempfile.mkdtemp(prefix="graphscale-mutants-"))
    flat = tensor.numpy().reshape(-1)
    content = np.append(flat, flat[-1] + np.float32(1))
    (folder / "weights").write_bytes(content.tobytes())
    d.values[site].const_value = ir.ExternalTensor(
        "weights", 4, tensor.nbytes, FLOAT, shape=ir.Shape(tensor.shape), name=site, base_dir=folder
    )


# --- functions and opsets ---------------------------------------------------------------------------------------------


def _edit_rule(edit: Callable[[ir.Function], object]) -> Callable[[Damaged, str], None]:
    def damage(d: Damaged, site: str) -> None:
        rule = d.rule
        assert rule is not None
        edit(rule)

    return damage


def _swap_where(rule: ir.Function) -> None:
    node = next(node for node in rule if node.op_type == "Where")
    one, other = node.inputs[1], node.inputs[2]
    node.replace_input_with(1, other)
    node.replace_input_with(2, one)


def _other_constant(rule: ir.Function) -> None:
    node = next(node for node in rule if node.op_type == "Constant" and "value" in node.attributes)
    tensor = node.attributes["value"].as_tensor()
    node.attributes["value"] = ir.AttrTensor("value", ir.tensor(tensor.numpy() + tensor.numpy().dtype.type(1)))


kind("a forged body of the rule", at.function)(_edit_rule(_swap_where))
kind("a forged constant of the rule", at.function)(_edit_rule(_other_constant))
kind("a forged operator of the rule", at.function)(
    _edit_rule(lambda rule: setattr(next(n for n in rule if n.op_type == "Less"), "op_type", "LessOrEqual"))
)
kind("another opset of the rule", at.function)(_edit_rule(lambda rule: rule.opset_imports.update({"": 14})))
kind("exchanged inputs of the rule", at.function)(
    _edit_rule(lambda rule: rule.inputs.__setitem__(slice(0, 2), [rule.inputs[1], rule.inputs[0]]))
)
kind("exchanged results of the rule", at.function)(
    _edit_rule(lambda rule: rule.outputs.__setitem__(slice(0, 2), [rule.outputs[1], rule.outputs[0]]))
)


def _called(d: Damaged) -> Iterator[str]:
    for name in at.of("Relu", "Tanh", "Exp", "Neg", "Sqrt")(d):
        yield d.producer(name).op_type


@kind("a function in place of a standard operator", _called)
def _shadow(d: Damaged, site: str) -> None:
    x, y = ir.val("x"), ir.val("y")
    body = ir.Graph([x], [y], nodes=[ir.node("Abs", [x], outputs=[y])], opset_imports=dict(d.model.opset_imports))
    d.model.functions["", site, ""] = ir.Function("", site, graph=body, attributes=[])


@kind("a function that nothing calls", at.anywhere)
def _idle_function(d: Damaged, site: str) -> None:
    x, y = ir.val("x"), ir.val("y")
    body = ir.Graph([x], [y], nodes=[ir.node("Abs", [x], outputs=[y])], opset_imports={"": 17})
    d.model.functions["idle", "Idle", ""] = ir.Function("idle", "Idle", graph=body, attributes=[])


@kind("an earlier opset", at.anywhere)
def _earlier(d: Damaged, site: str) -> None:
    d.model.opset_imports[""] -= 1


@kind("a later opset", at.anywhere)
def _later(d: Damaged, site: str) -> None:
    d.model.opset_imports[""] += 1


# --- the file ---------------------------------------------------------------------------------------------------------


@kind("an IR version without initial values", at.dynamic)
def _ir_version(d: Damaged, site: str) -> None:
    d.edit_file(lambda proto: setattr(proto, "ir_version", 3))


@kind("a sparse initializer over a dense one", at.constants)
def _sparse(d: Damaged, site: str) -> None:
    tensor = d.values[site].const_value
    assert tensor is not None
    sparse = onnx.SparseTensorProto(dims=list(tensor.shape))
    sparse.values.CopyFrom(numpy_helper.from_array(np.full(1, 123, np.float32), site))
    sparse.indices.CopyFrom(numpy_helper.from_array(np.zeros(1, np.int64), f"{site}.indices"))
    d.edit_file(lambda proto: proto.graph.sparse_initializer.append(sparse))


@kind("a second initializer of one name", at.constants)
def _twice(d: Damaged, site: str) -> None:
    tensor = d.values[site].const_value
    assert tensor is not None
    other = numpy_helper.from_array(tensor.numpy() + np.float32(1), site)
    d.edit_file(lambda proto: proto.graph.initializer.insert(0, other))


@kind("a second function of one name", at.function)
def _two_functions(d: Damaged, site: str) -> None:
    def edit(proto: onnx.ModelProto) -> None:
        proto.functions.insert(0, proto.functions[0])
        proto.functions[0].node[0].op_type = "Identity"

    d.edit_file(edit)


@kind("a second version of an opset", at.anywhere)
def _two_opsets(d: Damaged, site: str) -> None:
    d.edit_file(lambda proto: proto.opset_import.append(helper.make_opsetid("", proto.opset_import[0].version - 1)))
