"""Small gradients beside large ones, gradients that lose a part, and read ones beside bounded ones."""

from __future__ import annotations

import dataclasses
from collections import Counter

import numpy as np
import onnx
import onnx_ir as ir
import pytest

import graphscale as gs
from graphscale.lowering.bound_gradients import BoundGradients
from tests.build import feeds_for, linear_step, step
from tests.conftest import Arrays
from tests.lowering import test_products as products
from tests.lowering.test_products import EXACT, POLICIES, Kind, spoiled
from tests.lowering.test_same_steps import (
    F32_MAX,
    assert_same_runs,
    assert_same_steps,
    nodes_at_once,
    plain_and_lowered,
)
from tests.session.plain import BY_ROWS, lowered_graph

pytestmark = pytest.mark.sample(1)

LARGE = 10  # elements: w [4, 3] is large, b [3] and c [1, 3] are small
BACKWARD = """
    dy = Mul(d, two_over_n) xt = Transpose <perm = [1, 0]> (x) dw = MatMul(xt, dy)
    db = ReduceSum <keepdims = 0> (dy, first) g = Mul(dy, c) dc = ReduceSum <keepdims = 1> (g, first)
"""
SGD = (
    "u = Mul(rate, dw) w_next = Sub(w, u) v = Mul({rate}, db) b_next = Sub(b, v) s = Mul(dc, {rate}) c_next = Sub(c, s)"
)
STATE = ("w", "b", "c")


def model_of(optimizer: str, rate: str, outputs: str = "") -> onnx.ModelProto:
    """A step with one large gradient and two small ones; the rate is "fed" or "constant"."""
    is_fed = rate == "fed"
    model = linear_step(
        optimizer,
        inputs="float[4,3] w, float[3] b, float[1,3] c" + (", float rate" if is_fed else ""),
        outputs=f"float[4,3] w_next, float[3] b_next, float[1,3] c_next{outputs}",
        backward=BACKWARD,
        constants="int64[1] first = {0}" + ("" if is_fed else ", float rate = {0.125}"),
    )
    return onnx.shape_inference.infer_shapes(model, strict_mode=True)


def both(
    model: onnx.ModelProto, policy: gs.LossScale, state: Arrays, small: int = LARGE
) -> tuple[gs.Session, gs.Session, Counter[tuple[str | None, str]]]:
    """A plain session, a lowered one, and the nodes that lowering added.

    Args:
        model: the step.
        policy: its loss scale.
        state: its carried state.
        small: elements: gradients of fewer are probed together.
    """
    result = gs.scale(model, policy, updates={f"{name}_next": name for name in STATE})
    lowering = dataclasses.replace(BY_ROWS, bound_elements=LARGE, probe_elements=small)
    return plain_and_lowered(result, state, lowering)


def prepared(model: onnx.ModelProto) -> tuple[Arrays, Arrays]:
    """The state, and a batch."""
    feeds = feeds_for(model)
    return {name: feeds.pop(name) for name in STATE}, feeds


@pytest.mark.parametrize("small", [LARGE, 100], ids=["small ones", "all"])
def test_a_small_gradient_alone_is_not_finite(small: int) -> None:
    """A large one that is probed with small ones leaves their probe unchanged."""
    model = model_of(SGD.format(rate="rate"), "fed")
    state, batch = prepared(model)
    state["c"] = np.array([[1.0, np.inf, 1.0]], np.float32)
    plain, lowered, nodes = both(model, gs.DynamicLossScale(1024.0, 3), state, small)
    assert nodes["merge-probes", "Concat"] == 1
    assert assert_same_steps(plain, lowered, [batch]) == [False]


@pytest.mark.parametrize("rate", ["fed", "constant"])
@pytest.mark.parametrize("scale", [1.0, 1024.0, 2.0**100, 2.0**126])
def test_the_same_steps(scale: float, rate: str) -> None:
    model = model_of(SGD.format(rate="rate"), rate)
    state, batch = prepared(model)
    plain, lowered, nodes = both(model, gs.DynamicLossScale(scale, 3), state)
    assert nodes["unscale-gradients", "Div"] == 2
    assert nodes["merge-probes", "Concat"] == 1
    # Of 1 and 1 / scale, for the cotangent of the product.
    assert nodes["bound-gradients", "Where"] == 1
    assert_same_steps(plain, lowered, [batch] * 4)
    applied = assert_same_runs(plain, lowered, ([wrong, batch] for wrong in spoiled(batch)))
    assert not all(applied) and any(applied)


SCALES = [3.0, 1.5 * 2.0**100, 2.0**126, 2.0**127, 0.75, 0.5, 2.0**-30, 2.0**-126, 1e-40, F32_MAX]


# A large gradient that is subnormal is rounded twice where it is multiplied by a constant before it is divided.
@pytest.mark.parametrize(
    ("scale", "rate"), [*((s, "fed") for s in SCALES), *((s, "constant") for s in SCALES if s > 2.0**-100)]
)
def test_a_scale_that_was_loaded(scale: float, rate: str) -> None:
    """Of a scale below 1 the quotient may overflow, where the gradient does not."""
    model = model_of(SGD.format(rate="rate"), rate)
    state, batch = prepared(model)
    plain, lowered, _ = both(model, gs.DynamicLossScale(1024.0, 3), state)
    loaded = {**plain.state_dict(), "current_loss_scale": np.float32(scale)}
    batches = ({**batch, "t": batch["t"] * np.float32(size)} for size in (1.0, 1e-10, 1e10, 1e18, 1e30))
    assert_same_runs(plain, lowered, ([large, large, batch] for large in batches), loaded)


@pytest.mark.parametrize(("multiplier", "divided"), [(2.0, 2), (3.0, 3)], ids=["a power of two", "another scale"])
def test_what_is_divided(multiplier: float, divided: int) -> None:
    model = model_of(SGD.format(rate="rate"), "fed")
    state, batch = prepared(model)
    plain, lowered, nodes = both(model, gs.DynamicLossScale(multiplier**9, 3, multiplier), state)
    assert nodes["unscale-gradients", "Div"] == divided
    assert_same_steps(plain, lowered, [batch, *spoiled(batch), batch])


def test_an_opset_whose_sums_take_their_axes_as_an_attribute() -> None:
    """Of opset 12 no gradient is bounded; all are divided, and tested."""
    model = model_of(SGD.format(rate="rate"), "fed")
    for node in model.graph.node:
        if node.op_type == "ReduceSum":
            del node.input[1:]
            node.attribute.append(onnx.helper.make_attribute("axes", [0]))
    model.opset_import[0].version = 12
    state, batch = prepared(model)
    plain, lowered, nodes = both(model, gs.DynamicLossScale(1024.0, 3), state)
    assert nodes["unscale-gradients", "Div"] == 3
    assert_same_steps(plain, lowered, [batch, *spoiled(batch), batch])


# --- non-finite parts of an operand that the gradient drops: it is read itself ----------------------------------------

# Drops the last row of MatMul(zt, dy), at least, but not the second one.
DROPPING = {
    "Where": "g = MatMul(zt, dy) dw = Where(b, g, zero)",
    "Where before a mask": "g = MatMul(zt, dy) n = Neg(g) h = Where(b, n, zero) dw = Mul(h, kept)",
    "Trilu": "g = MatMul(zt, dy) dw = Trilu <upper = 1> (g)",
    "Slice": "g = MatMul(zt, dy) h = Slice(g, second, three, first) dw = Concat <axis = 0> (h, h)",
}


def dropped_feeds(model: onnx.ModelProto, value: float) -> Arrays:
    """The second row overflows, scaled by 2**100; `value` is an element of what gives the last row."""
    given = {"b": np.array([[1] * 3, [1] * 3, [1] * 3, [0] * 3], bool)}
    feeds = feeds_for(model, **{name: value for name, value in given.items() if name in str(model.graph.input)})
    feeds["z"] = np.zeros((8, 4), np.float32)
    feeds["z"][:, 1] = 1e12
    feeds["z"][0, 3] = value
    return feeds


@pytest.mark.parametrize("value", [0.0, np.nan, np.inf])
@pytest.mark.parametrize("name", DROPPING)
def test_what_is_dropped(name: str, value: float) -> None:
    nodes = "zt = Transpose <perm = [1, 0]> (z) " + DROPPING[name]
    inputs = "float[8,4] z" + (", bool[4,3] b" if "b, " in nodes else "")
    model = products.model_of(Kind(nodes, inputs), optimizer="w_next = Sub(w, dw)")
    feeds = dropped_feeds(model, value)
    plain, lowered, found = products.both(model, gs.DynamicLossScale(2.0**100, 5), np.zeros_like(feeds.pop("w")))
    assert (found["unscale-gradients", "Div"], found["bound-gradients", "ReduceSum"]) == (1, 2)
    assert assert_same_steps(plain, lowered, [{key: feeds[key] for key in plain.inputs}]) == [False]


def test_gradients_that_are_multiplied_with_each_other() -> None:
    """Neither is the number that the other one's step is divided with."""
    backward = """
        dy = Mul(d, two_over_n) xt = Transpose <perm = [1, 0]> (x) dw = MatMul(xt, dy)
        ye = Mul(dy, e) de = ReduceSum <keepdims = 0> (ye) yf = Mul(dy, f) df = ReduceSum <keepdims = 0> (yf)
    """
    model = linear_step(
        "u = Mul(rate, dw) w_next = Sub(w, u) p = Mul(de, df) e_next = Sub(e, p) f_next = Sub(f, p)",
        inputs="float[4,3] w, float e, float f, float rate",
        outputs="float[4,3] w_next, float e_next, float f_next",
        backward=backward,
    )
    model = onnx.shape_inference.infer_shapes(model, strict_mode=True)
    feeds = feeds_for(model)
    state = {name: feeds.pop(name) for name in ("w", "e", "f")}
    updates = {f"{name}_next": name for name in state}
    result = gs.scale(model, gs.DynamicLossScale(1024.0, 3), updates=updates, gradients=["dw", "de", "df"])
    plain, lowered, _ = plain_and_lowered(
        result, state, dataclasses.replace(BY_ROWS, bound_elements=LARGE, probe_elements=LARGE)
    )
    assert assert_same_steps(plain, lowered, [feeds, feeds]) == [True, True]


# --- cotangents of a hidden layer -------------------------------------------------------------------------------------

HIDDEN_SGD = "u = Mul(rate, dw1) w1_next = Sub(w1, u)"
HIDDEN_BACKWARD = """
    dy = Mul(d, two_over_n) w2t = Transpose <perm = [1, 0]> (w2) xt = Transpose <perm = [1, 0]> (x)
    {nodes} dw1 = MatMul(xt, dh)
"""


COTANGENTS = {
    "a product": "dh = MatMul(dy, w2t)",
    "a part of a product": "g = MatMul(dy, w2t) dh = Where(b, g, zero)",
    "something else": "g = MatMul(dy, w2t) dh = Mean(g, g)",
}


def hidden_model(nodes: str, optimizer: str = HIDDEN_SGD, outputs: str = "float[4,5] w1_next") -> onnx.ModelProto:
    """A step of two layers; `nodes` compute dh [8, 5] from dy and w2."""
    model = step(
        optimizer,
        inputs="bool[8,5] b" if "b," in nodes else "",
        outputs=outputs,
        constants="float rate = {0.125}, float zero = {0}",
        backward=HIDDEN_BACKWARD.format(nodes=nodes),
    )
    return onnx.shape_inference.infer_shapes(model, strict_mode=True)


def hidden_feeds(model: onnx.ModelProto) -> Arrays:
    is_masked = any(value.name == "b" for value in model.graph.input)
    return feeds_for(model, **({"b": np.arange(40).reshape(8, 5) % 3 != 1} if is_masked else {}))


def inserted(graph: ir.Graph, op_type: str) -> list[ir.Node]:
    return [node for node in nodes_at_once(graph) if node.op_type == op_type and BoundGradients.inserted(node)]


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_part_of_a_cotangent_must_not_hide_what_overflows(value: float) -> None:
    model = hidden_model(COTANGENTS["a part of a product"], "w1_next = Sub(w1, dw1)")
    feeds = hidden_feeds(model)
    feeds["b"][7] = False
    feeds["t"][7, 1] = value
    feeds["x"][0] = 1e12  # too much for a cotangent that is scaled
    result = gs.scale(model, gs.DynamicLossScale(2.0**100, 5), updates={"w1_next": "w1"}, gradients=["dw1"])
    plain, lowered, nodes = plain_and_lowered(result, {"w1": feeds.pop("w1")})
    assert nodes["unscale-gradients", "Div"] == 0
    assert assert_same_steps(plain, lowered, [feeds]) == [False]


BOTH = HIDDEN_SGD + " u2 = Mul(rate, dw2) w2_next = Sub(w2, u2)"
LAST = "at = Transpose <perm = [1, 0]> (a) g2 = MatMul(at, dy) dw2 = Mean(g2, g2) "


@pytest.mark.sample(1)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", COTANGENTS)
def test_a_gradient_that_is_bounded_beside_one_that_is_read(name: str, policy: str) -> None:
    model = hidden_model(LAST + COTANGENTS[name], BOTH, "float[4,5] w1_next, float[5,3] w2_next")
    feeds = hidden_feeds(model)
    state = {name: feeds.pop(name) for name in ("w1", "w2")}
    result = gs.scale(
        model, POLICIES[policy], updates={f"{name}_next": name for name in state}, gradients=["dw1", "dw2"]
    )
    plain, lowered, _ = plain_and_lowered(result, state)
    graph = lowered_graph(result, BY_ROWS)
    cotangents = [node for node in inserted(graph, "Mul") if node.outputs[0].shape == ir.Shape([8, 5])]
    # Below 1, the rate comes after the quotient, and is divided instead.
    assert len(cotangents) == (policy in {"powers of two", "2**126"})
    assert len(inserted(graph, "Equal")) == (policy in EXACT)
    assert inserted(graph, "ReduceSum")
    applied = assert_same_runs(plain, lowered, ([batch, feeds] for batch in (feeds, *spoiled(feeds))))
    assert any(applied) and not all(applied)
