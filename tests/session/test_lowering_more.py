"""Lowered steps whose gradients are bounded for certain, and what bounds and failures must not get wrong."""

from __future__ import annotations

import collections
from collections.abc import Mapping

import numpy as np
import onnx
import onnx.parser
import pytest

import graphscale as gs
from graphscale.errors import SessionError
from graphscale.graph.marks import PASS_KEY
from graphscale.session.thresholds import Thresholds
from tests.build import feeds_for, linear_step
from tests.conftest import Arrays, Level, assert_all_same_bits, with_initializers
from tests.session.plain import BY_ROWS, lowered_graph, options
from tests.session.test_lowering import assert_same_steps

SGD = "u = Mul(rate, dw)  w_next = Sub(w, u)"
RATE = "float rate = {0.125}"


def plain_and_lowered(
    result: gs.ScaledModel, state: Mapping[str, np.ndarray], lowering: Thresholds = BY_ROWS
) -> tuple[gs.Session, gs.Session, collections.Counter[tuple[str | None, str]]]:
    """A session on the graph as it was scaled, a lowered one; and how many of which operators each pass put there."""
    plain, lowered = (
        gs.Session(result, session_options=options(Level.ORT_DISABLE_ALL), state=state, lowering=thresholds)
        for thresholds in (None, lowering)
    )
    nodes = lowered_graph(result, lowering)
    return plain, lowered, collections.Counter((node.metadata_props.get(PASS_KEY), node.op_type) for node in nodes)


def pair(model: onnx.ModelProto, states: Arrays, updates: dict[str, str]) -> tuple[gs.Session, gs.Session]:
    """A session on the graph as it was scaled, and one whose gradients are tested by bounds."""
    # Shapes must be known: a sum of unknown shapes could fail, and would stay out of the branch.
    result = gs.scale(onnx.shape_inference.infer_shapes(model), gs.DynamicLossScale(1024.0, 2), updates=updates)
    plain, lowered, nodes = plain_and_lowered(result, states)
    assert ("session-bounds", "If") in nodes
    return plain, lowered


def linear_pair(backward: str | None = None, factor: float | None = None) -> tuple[gs.Session, gs.Session, Arrays]:
    """Sessions on a linear step, and a batch."""
    more = {} if backward is None else {"backward": backward}
    model = linear_step(SGD, outputs="float[4,3] w_next", constants=RATE, **more)
    for tensor in model.graph.initializer:
        if factor is not None and tensor.name == "two_over_n":
            tensor.CopyFrom(onnx.numpy_helper.from_array(np.float32(factor), tensor.name))
    feeds = feeds_for(model)
    plain, lowered = pair(model, {"w": feeds.pop("w")}, {"w_next": "w"})
    return plain, lowered, feeds


SHARES = "xt = Transpose<perm = [1, 0]>(x)  a = MatMul(xt, dy)  b = Gemm<transA = 1>(x, dy)"
BACKWARD = {
    "a sum": f"{SHARES}  dw = Add(a, b)",
    "a sum of three": f"{SHARES}  c = Gemm<transA = 1, alpha = 0.5>(x, dy)  dw = Sum(a, b, c)",
    "Gemm": "dw = Gemm<transA = 1>(x, dy)",
    "Gemm with a factor": "dw = Gemm<transA = 1, alpha = -0.3>(x, dy)",
    "Gemm with the factor 0": "dw = Gemm<transA = 1, alpha = 0.0>(x, dy)",
    "both transposed": "xt = Transpose<perm = [1, 0]>(x) dyt = Transpose<perm = [1, 0]>(dy) "
    "dw = Gemm<transB = 1>(xt, dyt)",
}


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("name", BACKWARD)
def test_what_is_not_finite_in_an_operand(name: str, value: float) -> None:
    """An infinite x times a cotangent of 0 is NaN, which the bound must not miss."""
    plain, lowered, batch = linear_pair(backward=f"dy = Mul(d, two_over_n)  {BACKWARD[name]}")
    bad = {key: np.array(array) for key, array in batch.items()}
    bad["x"][2, 1] = value
    zero = {"x": np.array(bad["x"]), "t": np.zeros_like(batch["t"])}
    assert_same_steps(plain, lowered, [batch, bad, batch, zero, batch])


@pytest.mark.parametrize("zeros", ["Mul(w, zero)", "MatMul(z, zero2)"])
def test_a_table_whose_zeros_are_products(zeros: str) -> None:
    model = onnx.parser.parse_model(f"""
        <ir_version: 10, opset_import: ["": 20]>
        table (float[6,2] z, float[8,3] t, int64[8] ids, float[6,3] w, float[3,3] v)
            => (float loss, float[6,3] w_next, float[3,3] v_next)
        <float two_over_n = {{0.083}}, {RATE}, float zero = {{0}}, int64[1] last = {{-1}},
         float[2,3] zero2 = {{0,0,0,0,0,0}}>
        {{
            h = Gather(w, ids)  y = MatMul(h, v)  d = Sub(y, t)  square = Mul(d, d)
            loss = ReduceMean<keepdims = 0>(square)  dy = Mul(d, two_over_n)
            vt = Transpose<perm = [1, 0]>(v)  dh = MatMul(dy, vt)
            ht = Transpose<perm = [1, 0]>(h)  dv = MatMul(ht, dy)
            zeros = {zeros}  rows = Unsqueeze(ids, last)  dw = ScatterND<reduction = "add">(zeros, rows, dh)
            u = Mul(rate, dw)  w_next = Sub(w, u)  u2 = Mul(rate, dv)  v_next = Sub(v, u2)
        }}
    """)
    feeds = feeds_for(model, ids=np.arange(8) % 3)
    for name in ("w", "z"):  # in a row that no index names
        values = np.array(feeds[name])
        values[5, 1] = np.inf
        given = {**feeds, name: values}
        states = {state: given.pop(state) for state in ("w", "v")}
        plain, lowered = pair(model, states, {"w_next": "w", "v_next": "v"})
        (applied,) = assert_same_steps(plain, lowered, [{key: given[key] for key in plain.inputs}])
        assert applied == (f"({name}," not in zeros)


def test_a_scale_below_one_that_was_loaded() -> None:
    plain, lowered, batch = linear_pair(factor=1e3)
    for session in (plain, lowered):
        session.load_state_dict({**session.state_dict(), "current_loss_scale": np.float32(2.0**-30)})
    large = {"x": batch["x"] * np.float32(1e-20), "t": batch["t"] * np.float32(1e37)}
    assert assert_same_steps(plain, lowered, [large]) == [True]


def test_a_weight_beside_many_counters_keeps_its_one_buffer() -> None:
    names = [f"c{i}" for i in range(20)]
    model = linear_step(
        f"{SGD} " + " ".join(f"{name}_next = Add({name}, one)" for name in names),
        inputs="float[4,3] w, " + ", ".join(f"float {name}" for name in names),
        outputs="float[4,3] w_next, " + ", ".join(f"float {name}_next" for name in names),
        constants=f"{RATE}, float one = {{1}}",
    )
    feeds = feeds_for(model)
    states = {name: feeds[name] for name in ("w", *names)}
    plain, lowered = pair(model, states, {f"{name}_next": name for name in states})
    for session in (plain, lowered):
        now, then, _ = session._carried._turn
        assert then["w"] is now["w"]


FAILING = {
    "axes that are fed": ("int64[1] axes", "float[n] metric", "metric = ReduceSum<keepdims = 0>(t, axes)"),
    "axes of one name": ("float[B,3] a, float[B,3] b", "float[B,3] metric", "metric = Mul(a, b)"),
}
FEEDS: dict[str, tuple[Arrays, Arrays]] = {
    "axes that are fed": ({"axes": np.array([0])}, {"axes": np.array([7])}),
    "axes of one name": (
        {"a": np.ones((4, 3), np.float32), "b": np.ones((4, 3), np.float32)},
        {"a": np.ones((4, 3), np.float32), "b": np.ones((5, 3), np.float32)},
    ),
}


@pytest.mark.parametrize("name", FAILING)
def test_metrics_that_fail_leave_the_state(name: str) -> None:
    inputs, outputs, nodes = FAILING[name]
    model = linear_step(
        f"{SGD} {nodes}", inputs=f"float[4,3] w, {inputs}", outputs=f"float[4,3] w_next, {outputs}", constants=RATE
    )
    model = with_initializers(onnx.shape_inference.infer_shapes(model), {"w": np.ones((4, 3), np.float32)})
    _, session, _ = plain_and_lowered(gs.scale(model, updates={"w_next": "w"}), {})
    feeds = {key: array for key, array in feeds_for(model).items() if key in ("x", "t")}
    good, bad = FEEDS[name]
    session.step({**feeds, **good})
    before = session.state_dict()
    with pytest.raises(SessionError):
        session.step({**feeds, **bad})
    assert_all_same_bits(session.state_dict(), before)
