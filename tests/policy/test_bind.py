"""Graph mode: a loss scale bound to a training graph that is built with onnx_ir by hand."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import onnxruntime as ort
import pytest

import graphscale as gs
from graphscale.passes.bound import BoundLossScale
from tests.conftest import (
    OPTIMIZATION_LEVELS,
    Arrays,
    Sequence,
    assert_same_bits,
    each_sequence,
    initial_values,
    make_session,
    run_session,
)

FLOAT = ir.DataType.FLOAT
SMALL = {"initial_loss_scale": 4, "increment_period": 2, "multiplier": 2}


def value(name: str, shape: list[int], dtype: ir.DataType = FLOAT) -> ir.Value:
    return ir.Value(name=name, type=ir.TensorType(dtype), shape=ir.Shape(shape))


@dataclasses.dataclass
class Step:
    """A training step of a linear model, built by hand around a bound loss scale."""

    graph: ir.Graph
    bound: BoundLossScale
    update_op: ir.Node | None
    should_apply: ir.Value | bool
    model: ir.Model

    def proto(self) -> onnx.ModelProto:
        proto = ir.to_proto(self.model)
        onnx.checker.check_model(proto)
        return proto


# The bias' gradient is a contraction: ReduceSum takes its axes in another way before opset 13.
FORWARD = """
    <ir_version: {}, opset_import: ["" : {}]>
    linear_step (float[4,3] x, float[4,2] t, float[3,2] w, float[2] b) => (float loss)
    <float rate = {{0.125}}, float two_over_n = {{0.25}}, float[1,4] ones = {{1, 1, 1, 1}}, int64[1] two = {{2}}> {{
        xw = MatMul(x, w)  y = Add(xw, b)  error = Sub(y, t)  square = Mul(error, error)
        loss = ReduceMean <keepdims = 0> (square)
        dy_unscaled = Mul(error, two_over_n)  xt = Transpose <perm = [1, 0]> (x)
    }}
"""


def linear_step(
    loss_scale: gs.LossScale,
    target: str = "onnx",
    *,
    ir_version: int = 10,
    opset: int = 20,
    bare: bool = False,
    before_update: Callable[[ir.Graph, ir.Value], None] | None = None,
) -> Step:
    """Build a step of y = x w + b with squared error and SGD; `bare` binds to the graph, else to the model."""
    model = ir.from_proto(onnx.parser.parse_model(FORWARD.format(ir_version, opset)))
    graph, tape = model.graph, ir.tape.Tape(model.graph)
    values = {value.name: value for value in (*graph.inputs, *graph.initializers.values())}
    values |= {value.name: value for node in graph for value in node.outputs}

    def op(op_type: str, *inputs: str | ir.Value, name: str = "", like: str = "") -> ir.Value:
        output = value(name, [int(n) for n in values[like].shape]) if name else None
        return tape.op(op_type, [values[one] if isinstance(one, str) else one for one in inputs], output=output)

    bound = loss_scale.bind(graph if bare else model, target)
    dy = op("Mul", "dy_unscaled", bound())
    dw = op("Div", op("MatMul", "xt", dy), bound(), name="dw", like="w")
    db = op("Div", op("Reshape", op("MatMul", "ones", dy), "two"), bound(), name="db", like="b")
    if before_update is not None:
        before_update(graph, bound())
    update_op, should_apply = bound.update({"kernel": dw, "more": [None, (db,)], "none": None})

    for weight, gradient in (("w", dw), ("b", db)):
        following = op("Sub", weight, op("Mul", "rate", gradient))
        guarded = isinstance(should_apply, ir.Value)
        words = ("Where", should_apply, following, weight) if guarded else ("Identity", following)
        graph.outputs.append(op(*words, name=f"{weight}.next", like=weight))
    if isinstance(should_apply, ir.Value):
        graph.outputs.append(should_apply)
    return Step(graph, bound, update_op, should_apply, model)


def empty_graph(*inputs: ir.Value) -> ir.Graph:
    return ir.Graph(inputs, [], nodes=[], opset_imports={"": 20}, name="bare")


def open_graph(graph: ir.Graph) -> ort.InferenceSession:
    return make_session(ir.to_proto(ir.Model(graph, ir_version=10)))


def batch(finite: bool = True, seed: int = 0) -> Arrays:
    random = np.random.default_rng(seed)
    x = (0.125 * random.integers(-2, 3, (4, 3))).astype(np.float32)
    if not finite:
        x[1, 2] = np.inf
    t = x @ np.ones((3, 2), np.float32)
    # At the solution: no gradient is so large that float32 could not hold it times the largest loss scale.
    return {"x": x, "t": t, "w": np.ones((3, 2), np.float32), "b": np.zeros(2, np.float32)}


def scale_state(outputs: Arrays) -> Arrays:
    return {name: outputs[f"{name}.next"] for name in ("current_loss_scale", "good_steps")}


# --- what bind and update give back -----------------------------------------------------------------------------------


@pytest.mark.parametrize("bare", [True, False], ids=["graph", "model"])
def test_call_gives_a_scalar_and_update_the_writing_node_and_a_flag(bare: bool) -> None:
    step = linear_step(gs.DynamicLossScale(**SMALL), bare=bare)
    scale = step.bound()
    assert scale is step.bound()
    assert (scale.name, scale.dtype, scale.shape) == ("current_loss_scale", FLOAT, ir.Shape([]))
    assert scale.is_initializer() and scale.is_graph_input()
    assert step.graph.initializers["current_loss_scale"] is scale
    assert [v.name for v in step.graph.inputs] == ["x", "t", "w", "b", "current_loss_scale", "good_steps"]
    assert step.graph.initializers["good_steps"].dtype is ir.DataType.INT64
    assert isinstance(step.update_op, ir.Node)
    assert step.update_op in list(step.graph)
    assert isinstance(step.should_apply, ir.Value)
    assert (step.should_apply.dtype, step.should_apply.shape) == (ir.DataType.BOOL, ir.Shape([]))
    names = [v.name for v in step.graph.outputs]
    assert {"current_loss_scale.next", "good_steps.next"} <= set(names)


def test_in_a_model_the_rule_is_one_node_that_shows_the_policy() -> None:
    step = linear_step(gs.DynamicLossScale(8, 7, 3))
    assert step.update_op is not None
    assert step.update_op.op_identifier() == ("graphscale", "UpdateLossScale", "")
    assert step.update_op.attributes["increment_period"].as_int() == 7
    assert step.update_op.attributes["multiplier"].as_float() == 3
    rule = next(f for f in step.proto().functions if f.name == "UpdateLossScale")
    assert rule.doc_string


@pytest.mark.parametrize(
    "options", [{"bare": True}, {"ir_version": 7}, {"opset": 11}], ids=["bare graph", "IR version 7", "opset 11"]
)
def test_the_rule_is_spelled_out_where_there_are_no_functions(options: dict[str, Any]) -> None:
    step = linear_step(gs.DynamicLossScale(**SMALL), **options)
    proto = step.proto()
    assert not proto.functions
    assert {node.domain for node in proto.graph.node} == {""}
    assert (proto.ir_version, proto.opset_import[0].version) == (
        options.get("ir_version", 10),
        options.get("opset", 20),
    )


@pytest.mark.parametrize("target", ["onnx", "ort-training"])
def test_fixed_has_nothing_to_update(target: str) -> None:
    step = linear_step(gs.FixedLossScale(1024), target)
    assert (step.update_op, step.should_apply) == (None, True)
    assert [v.name for v in step.graph.inputs] == ["x", "t", "w", "b"]
    session = make_session(step.proto())
    outputs, _ = run_session(session, batch(finite=False))
    assert np.isnan(outputs["w.next"]).any()
    random = batch()
    random["t"] = np.zeros_like(random["t"])
    outputs, _ = run_session(session, random)
    plain, _ = run_session(make_session(linear_step(gs.FixedLossScale(1)).proto()), random)
    assert (outputs["w.next"] != random["w"]).any()
    for name, array in plain.items():
        assert_same_bits(outputs[name], array, name)


@pytest.mark.parametrize("grads", [[], None, {"w": None, "b": [None]}], ids=repr)
@pytest.mark.parametrize("target", ["onnx", "ort-cuda"])
def test_no_gradients_are_finite(grads: Any, target: str) -> None:
    graph = empty_graph()
    _, should_apply = gs.DynamicLossScale(**SMALL).bind(graph, target).update(grads)
    graph.outputs.append(should_apply)
    session = open_graph(graph)
    state: Arrays = {}
    for scale, good_steps in ((4, 1), (8, 0), (8, 1)):
        outputs, _ = run_session(session, state)
        state = scale_state(outputs)
        assert outputs[should_apply.name]
        assert (state["current_loss_scale"], state["good_steps"]) == (scale, good_steps)


def test_the_state_of_the_instance_becomes_the_initial_state() -> None:
    loss_scale = gs.DynamicLossScale(**SMALL)
    for _ in range(3):
        loss_scale.update([np.ones(3)])
    proto = linear_step(loss_scale).proto()
    initial = initial_values(proto)
    assert (initial["current_loss_scale"], initial["good_steps"]) == (8, 1)
    outputs, _ = run_session(make_session(proto), batch())
    assert (outputs["current_loss_scale.next"], outputs["good_steps.next"]) == (16, 0)
    assert (loss_scale(), loss_scale.num_good_steps) == (8, 1)


def test_two_loss_scales_live_in_one_graph() -> None:
    first, second = value("first", [2]), value("second", [3])
    model = ir.Model(empty_graph(first, second), ir_version=10)
    bounds = [gs.DynamicLossScale(8, 1, m).bind(model) for m in (2, 4)]
    for bound, gradient in zip(bounds, (first, second), strict=True):
        bound.update([gradient])
    assert [bound().name for bound in bounds] == ["current_loss_scale", "current_loss_scale_1"]
    feeds = {"first": np.ones(2, np.float32), "second": np.array([0, 1, np.nan], np.float32)}
    outputs, _ = run_session(make_session(ir.to_proto(model)), feeds)
    assert [outputs[bound.next_state[bound()].name] for bound in bounds] == [16, 2]


def test_names_made_after_bind_are_respected() -> None:
    gradient = value("gradient", [2])
    graph = empty_graph(gradient)
    bound = gs.DynamicLossScale(**SMALL).bind(graph)
    for name in ("all_finite", "current_loss_scale.next", "any_nonfinite"):
        graph.outputs.append(ir.tape.Tape(graph).op("Neg", [gradient], output=value(name, [2])))
    _, finite = bound.update(gradient)
    graph.outputs.append(finite)
    outputs, _ = run_session(open_graph(graph), {"gradient": np.zeros(2, "f4")})
    assert len(outputs) == 6
    assert outputs[finite.name] == np.True_
    assert outputs["all_finite"].shape == (2,)


# --- gradients --------------------------------------------------------------------------------------------------------

DTYPES = {
    "float16": (ir.DataType.FLOAT16, np.float16),
    "float32": (FLOAT, np.float32),
    "float64": (ir.DataType.DOUBLE, np.float64),
    "bfloat16": (FLOAT, np.float32),  # it cannot be fed, and is cast from float32
}


def checked(dtypes: list[str]) -> ort.InferenceSession:
    """A model that has gradients of these dtypes as inputs, and tells whether they are finite."""
    graph = empty_graph(*(value(name, [2, 3], DTYPES[name][0]) for name in dtypes))
    grads = list(graph.inputs)
    if "bfloat16" in dtypes:
        to = ir.DataType.BFLOAT16
        grads = [ir.tape.Tape(graph).op("Cast", grads, attributes={"to": to}, output=value("narrow", [2, 3], to))]
    _, finite = gs.DynamicLossScale(**SMALL).bind(graph).update(grads)
    graph.outputs.append(finite)
    finite.name = "finite"
    return open_graph(graph)


@pytest.mark.parametrize("dtypes", [*([name] for name in DTYPES), ["float16", "float32", "float64"]], ids="-".join)
def test_gradients_of_each_dtype(dtypes: list[str]) -> None:
    session = checked(dtypes)
    good = {name: np.zeros((2, 3), DTYPES[name][1]) for name in dtypes}
    for name in dtypes:
        largest = float(ml_dtypes.finfo(name).max)
        for last, finite in ((1, True), (largest, True), (-largest, True), (np.nan, False), (np.inf, False)):
            feeds = {**good, name: good[name].copy()}
            feeds[name][1] = last
            assert run_session(session, feeds)[0]["finite"] == finite, (name, last)


def test_a_gradient_without_a_declared_dtype() -> None:
    """`ir.tape` leaves the dtype of what it makes open."""
    a = value("a", [2])
    graph = empty_graph(a)
    gradient = ir.tape.Tape(graph).op("Neg", [a])
    _, finite = gs.DynamicLossScale(**SMALL).bind(graph).update([gradient])
    graph.outputs.append(finite)
    session = open_graph(graph)
    for number, expected in ((1, True), (np.nan, False)):
        outputs, _ = run_session(session, {"a": np.array([0, number], np.float32)})
        assert outputs[finite.name] == expected


@pytest.mark.parametrize("grads", [[np.ones(3)], {"w": 1.0}, ["dw"]], ids=repr)
def test_gradients_that_are_no_values_of_a_graph_are_refused(grads: Any) -> None:
    with pytest.raises(TypeError, match="onnx_ir values; got"):
        gs.DynamicLossScale().bind(empty_graph()).update(grads)


def test_an_unknown_target_is_refused() -> None:
    with pytest.raises(gs.GraphscaleError, match="no target 'tpu'; choose one of onnx, "):
        gs.DynamicLossScale().bind(empty_graph(), "tpu")


# --- running it -------------------------------------------------------------------------------------------------------

VERSIONS = {
    "model": {},
    "graph": {"bare": True},
    "ir7": {"ir_version": 7, "opset": 14},
    "opset11": {"ir_version": 6, "opset": 11},
    "opset12": {"ir_version": 8, "opset": 12},
}


@pytest.mark.sample(8)
@each_sequence
@pytest.mark.parametrize("versions", VERSIONS)
def test_each_sequence_with_the_state_fed_back(sequence: Sequence, versions: str) -> None:
    step = linear_step(gs.DynamicLossScale(**sequence.config), **VERSIONS[versions])
    session = make_session(step.proto())
    state: Arrays = {}
    for finite, scale, good_steps in sequence:
        feeds = batch(finite)
        outputs, _ = run_session(session, {**feeds, **state})
        state = scale_state(outputs)
        assert outputs[step.should_apply.name] == finite
        assert_same_bits(state["current_loss_scale"], np.float32(scale), "scale")
        assert_same_bits(state["good_steps"], np.int64(good_steps), "good steps")
        if not finite:
            assert_same_bits(outputs["w.next"], feeds["w"], "w")
            assert_same_bits(outputs["b.next"], feeds["b"], "b")


@pytest.mark.training
@each_sequence
@pytest.mark.parametrize("bare", [True, False], ids=["graph", "model"])
def test_each_sequence_with_the_state_in_place(sequence: Sequence, bare: bool) -> None:
    step = linear_step(gs.DynamicLossScale(**sequence.config), "ort-training", bare=bare)
    proto = step.proto()
    for level in OPTIMIZATION_LEVELS:
        session = make_session(proto, level)
        for finite, scale, good_steps in sequence:
            outputs, _ = run_session(session, batch(finite))
            assert outputs[step.should_apply.name] == finite
            assert_same_bits(outputs["current_loss_scale.next"], np.float32(scale), "scale")
            assert_same_bits(outputs["good_steps.next"], np.float32(good_steps), "good steps")


@pytest.mark.training
@pytest.mark.parametrize("when", ["before update", "after update"])
def test_in_place_state_may_be_read_outside_of_the_gradients(when: str) -> None:
    """The scale in a metric: no ancestor of what is written to it, and yet it shows the scale of this step."""

    def add_metric(graph: ir.Graph, scale: ir.Value) -> None:
        metric = ir.tape.Tape(graph).op("Mul", [scale, graph.outputs[0]], output=value("metric", []))
        graph.outputs.append(metric)

    step = linear_step(
        gs.DynamicLossScale(**SMALL), "ort-training", before_update=add_metric if when == "before update" else None
    )
    if when == "after update":
        add_metric(step.graph, step.bound())
        assert step.bound.order_writes()
    assert not step.bound.order_writes()
    feeds = batch()
    feeds["t"] += 1
    for level in OPTIMIZATION_LEVELS:
        session = make_session(step.proto(), level)
        for scale in (4, 4, 8, 8, 16, 16):
            outputs, _ = run_session(session, feeds)
            assert outputs["metric"] == scale * outputs["loss"]


@pytest.mark.parametrize("target", ["onnx", "ort-training"])
def test_nothing_is_ordered_without_need(target: str) -> None:
    step = linear_step(gs.DynamicLossScale(**SMALL), target)
    count = len(step.graph)
    assert not step.bound.order_writes()
    assert len(step.graph) == count
    assert "order-writes" not in {node.metadata_props.get("graphscale.pass") for node in step.graph}
