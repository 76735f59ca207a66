"""Nodes that exporters put behind a gradient's contraction: each kind, with each kind of loss scale."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

import numpy as np
import onnx
import pytest

import graphscale as gs
from tests.build import feeds_for, linear_step
from tests.conftest import Arrays
from tests.lowering.test_same_steps import F32_MAX, assert_same_runs, assert_same_steps, plain_and_lowered
from tests.session.plain import ALWAYS, BY_ROWS

pytestmark = pytest.mark.sample(3)

BACKWARD = "dy = Mul(d, two_over_n) xt = Transpose <perm = [1, 0]> (x) "
SGD = "u = Mul(rate, dw) w_next = Sub(w, u)"
NUMBERS = (
    "float zero = {0}, float tiny = {1e-30}, float huge = {1e30}, "
    "float[4,3] kept = {1, 0, 1, 0, -1, 1, 1, 0, 0, 1, 0.5, 1}, "
    "float[4,3] zeros = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0}, "
    "float[4,3] infinite = {1, 0, 1, 0, -1, inf, 1, 0, 0, 1, 0.5, 1}, int64[1] first = {0}, int64[1] second = {1}, "
    "int64[1] three = {3}, int64[3] pairs = {2, 4, 4}, int64[3] pairs3 = {2, 4, 3}, int64[2] matrix = {4, 3}, "
    "int64[3] deep = {4, 8, 1}, int64[3] kernel = {3, 8, 1}, int64[2] halves = {2, 2}"
)
EXACT = ("powers of two", "2**126", "powers of two below 1")
POLICIES: dict[str, gs.DynamicLossScale] = {
    "powers of two": gs.DynamicLossScale(1024.0, 2),
    "2**126": gs.DynamicLossScale(2.0**126, 3),
    "powers of three": gs.DynamicLossScale(3.0**9, 2, 3.0),
    "powers of two below 1": gs.DynamicLossScale(0.5, 2, min_loss_scale=0.0),
    "others below 1": gs.DynamicLossScale(0.75, 2, 1.5, min_loss_scale=0.25),
}


class Kind(NamedTuple):
    """A computation of a gradient.

    Attributes:
        nodes: from x and dy to dw [4, 3].
        inputs: more inputs of the graph.
        early: whether it is unscaled before it is large, where the scale is a power of two.
        read: how many tensors are read for its bound; 0 if it is read itself.
    """

    nodes: str
    inputs: str = ""
    early: bool = True
    read: int = 2


MASK, CONDITION = "float[4,3] m", "bool[4,3] b"
PRODUCT = "g = MatMul(xt, dy) "
DOUBLED = "".join(f"g{i + 1} = Add(g{i}, g{i}) " for i in range(7))
CHAIN = "".join(f"g{i + 1} = Add(g{i}, g) " for i in range(1000))
KINDS = {
    "a constant mask": Kind(PRODUCT + "dw = Mul(g, kept)"),
    "a mask that is fed": Kind(PRODUCT + "dw = Mul(m, g)", MASK, read=3),
    "a mask of a row": Kind(PRODUCT + "dw = Mul(g, m)", "float[3] m", read=3),
    "two masks": Kind(PRODUCT + "h = Mul(g, kept) dw = Mul(m, h)", MASK, read=3),
    "a mask that is cast": Kind(PRODUCT + "c = Cast <to = 1> (b) dw = Mul(g, c)", CONDITION),
    "a mask that is infinite": Kind(PRODUCT + "dw = Mul(g, infinite)", early=False, read=0),
    "what is squared": Kind(PRODUCT + "mm = Mul(m, m) dw = Mul(g, mm)", MASK, read=3),
    "where it is kept": Kind(PRODUCT + "dw = Where(b, g, zero)", CONDITION),
    "where it is not dropped": Kind(PRODUCT + "dw = Where(b, zeros, g)", CONDITION),
    "where zeros are a product": Kind(
        PRODUCT + "z = Mul(m, zero) dw = Where(b, z, g)", f"{MASK}, {CONDITION}", False, 0
    ),
    "one or the other": Kind(
        PRODUCT + "h = Gemm <transA = 1, alpha = -3.0> (x, dy) dw = Where(b, g, h)", CONDITION, read=2
    ),
    "over a small number": Kind(PRODUCT + "h = Div(g, tiny) dw = Mul(h, m)", MASK, read=3),
    "over a tensor": Kind(PRODUCT + "dw = Div(g, m)", MASK, early=False, read=0),
    "negative": Kind(PRODUCT + "h = Neg(g) dw = Mul(h, kept)"),
    "a large factor before a small one": Kind(PRODUCT + "h = Mul(g, huge) dw = Mul(h, m)", MASK, read=3),
    "a difference": Kind(PRODUCT + "h = Gemm <transA = 1> (x, dy) k = Mul(h, m) dw = Sub(g, k)", MASK, read=3),
    "transposed": Kind(
        "dyt = Transpose <perm = [1, 0]> (dy) g = MatMul(dyt, x) h = Transpose <perm = [1, 0]> (g) dw = Mul(h, kept)"
    ),
    "a sum of three": Kind(
        PRODUCT + "h = Gemm <transA = 1> (x, dy) k = Gemm <transA = 1, alpha = 0.5> (x, dy) dw = Sum(g, h, k)"
    ),
    "Gemm with a factor": Kind("dw = Gemm <transA = 1, alpha = -0.3> (x, dy)"),
    "Gemm with the factor 0": Kind("dw = Gemm <transA = 1, alpha = 0.0> (x, dy)"),
    "both transposed": Kind("dyt = Transpose <perm = [1, 0]> (dy) dw = Gemm <transB = 1> (xt, dyt)"),
    "Einsum": Kind('dw = Einsum <equation = "bi,bo->io"> (x, dy)'),
    "Einsum, transposed": Kind(
        'g = Einsum <equation = "bi,bo->oi"> (x, dy) h = Transpose <perm = [1, 0]> (g) dw = Mul(h, kept)'
    ),
    "Einsum of three": Kind('dw = Einsum <equation = "bi,bo,io->io"> (x, dy, m)', MASK, False, 0),
    "Conv": Kind(
        "x3 = Reshape(xt, deep) dyt = Transpose <perm = [1, 0]> (dy) dy3 = Reshape(dyt, kernel) g = Conv(x3, dy3) "
        "h = Reshape(g, matrix) dw = Mul(h, kept)"
    ),
    "a sum over a batch": Kind(
        "x3 = Reshape(x, pairs) x3t = Transpose <perm = [0, 2, 1]> (x3) dy3 = Reshape(dy, pairs3) g = MatMul(x3t, dy3) "
        "h = ReduceSum <keepdims = 0> (g, first) dw = Mul(h, kept)"
    ),
    "a part": Kind(
        "two = Concat <axis = 1> (dy, dy) g = MatMul(xt, two) h = Slice(g, first, three, second) dw = Mul(h, kept)"
    ),
    "parts": Kind(
        "a, b = Split <axis = 0> (xt, halves) g = MatMul(a, dy) h = MatMul(b, dy) dw = Concat <axis = 0> (h, g)", read=3
    ),
    "a row for all": Kind(
        "g = MatMul(xt, dy) row = ReduceSum <keepdims = 1> (g, first) dw = Mul(row, m)", MASK, read=2
    ),
    "a row added to all": Kind(
        PRODUCT + "h = Gemm <transA = 1> (x, dy) row = ReduceSum <keepdims = 1> (h, first) dw = Add(g, row)",
        early=False,
        read=0,
    ),
    "two readers": Kind(PRODUCT + "h = Mul(g, kept) k = Neg(g) dw = Add(h, k)"),
    "two readers that multiply": Kind(PRODUCT + "h = Mul(g, kept) k = Mul(g, m) dw = Add(h, k)", MASK, read=3),
    "a product that a product reads": Kind(
        PRODUCT + "h = MatMul(g, matrix3) dw = Add(g, h)", "float[3,3] matrix3", early=False, read=4
    ),
    "the same twice": Kind(PRODUCT + "dw = Add(g, g)"),
    "the same 128 times": Kind(PRODUCT + "g0 = Neg(g) " + DOUBLED + "dw = Mul(g7, kept)", early=False, read=0),
    "a long chain": Kind(PRODUCT + "g0 = Neg(g) " + CHAIN + "dw = Mul(g1000, kept)", early=False, read=0),
    "a triangle": Kind(PRODUCT + "h = Trilu(g) dw = Mul(h, kept)"),
    "an operator that is not known": Kind(PRODUCT + "dw = Max(g, g)", early=False, read=0),
}


def model_of(
    kind: Kind, *, optimizer: str = SGD, outputs: str = "float[4,3] w_next", is_rate_fed: bool = False
) -> onnx.ModelProto:
    model = linear_step(
        optimizer,
        inputs=", ".join(filter(None, ["float[4,3] w", kind.inputs, "float rate" if is_rate_fed else ""])),
        outputs=outputs,
        backward=BACKWARD + kind.nodes,
        constants=NUMBERS if is_rate_fed else f"{NUMBERS}, float rate = {{0.125}}",
    )
    return onnx.shape_inference.infer_shapes(model, strict_mode=True)


def feeds_of(kind: Kind, model: onnx.ModelProto) -> Arrays:
    given = {"b": np.arange(12).reshape(4, 3) % 3 != 1} if CONDITION in kind.inputs else {}
    feeds = feeds_for(model, **given)
    if "huge" in kind.nodes or "tiny" in kind.nodes:
        feeds["m"] = feeds["m"] * np.float32(1e-30)
    return feeds


def both(
    model: onnx.ModelProto, policy: gs.LossScale, weight: np.ndarray
) -> tuple[gs.Session, gs.Session, Counter[tuple[str | None, str]]]:
    """A plain session, one that bounds every gradient, and the nodes that lowering added."""
    result = gs.scale(model, policy, updates={"w_next": "w"})
    plain, lowered, nodes = plain_and_lowered(result, {"w": weight})
    assert nodes["bound-gradients", "If"] == 1
    return plain, lowered, nodes


def spoiled(feeds: Arrays) -> list[Arrays]:
    """Batches with something wrong in the middle of one array, or all of it large or small."""
    found = []
    for name, array in feeds.items():
        if array.dtype.kind != "f":
            continue
        for value in (np.nan, np.inf, -np.inf, F32_MAX, 1e20, 1e-20):
            wrong = np.array(array)
            wrong.reshape(-1)[array.size // 2] = value
            found.append({**feeds, name: wrong})
        found += [{**feeds, name: np.full_like(array, value)} for value in (F32_MAX, 1e15, 1e-30, 0.0)]
    for batch in list(found):  # 0 times what is infinite, and large times small
        for other in ("x", "m"):
            if other in batch:
                found += [{**batch, other: feeds[other] * np.float32(size)} for size in (0.0, 1e-30, 1e25)]
    return found


def assert_read(kind: Kind, nodes: Counter[tuple[str | None, str]], more: int = 0) -> None:
    """Its operands, by their absolute values, or itself: each row, and all rows."""
    assert nodes["bound-gradients", "ReduceL1"] == kind.read + more
    assert nodes["bound-gradients", "ReduceSum"] == (0 if kind.read else 2)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", KINDS)
def test_the_same_steps(name: str, policy: str) -> None:
    kind = KINDS[name]
    model = model_of(kind, optimizer="w_next = Sub(w, dw)")
    feeds = feeds_of(kind, model)
    plain, lowered, nodes = both(model, POLICIES[policy], feeds.pop("w"))
    early = kind.early and policy in EXACT
    assert (nodes["unscale-gradients", "Div"], nodes["bound-gradients", "Reciprocal"]) == (not early, early)
    assert_read(kind, nodes)
    applied = assert_same_when_spoiled(plain, lowered, feeds)
    if policy != "2**126":
        assert applied[:3] == 3 * [name != "a mask that is infinite"]
    assert not all(applied)


def assert_same_when_spoiled(plain: gs.Session, lowered: gs.Session, feeds: Arrays) -> list[bool]:
    """Three steps on a good batch, then one on each bad one, with a good one after it; which were applied."""
    return assert_same_runs(plain, lowered, [[feeds] * 3, *([batch, feeds] for batch in spoiled(feeds))])


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", [*KINDS, "a product"])
def test_a_constant_rate(name: str, policy: str) -> None:
    """It is divided in place of the gradient, but that of a product, which ONNX Runtime multiplies as it forms it."""
    kind = KINDS.get(name, Kind("dw = MatMul(xt, dy)"))
    model = model_of(kind)
    feeds = feeds_of(kind, model)
    plain, lowered, nodes = both(model, POLICIES[policy], feeds.pop("w"))
    early = policy in EXACT and policy != "powers of two below 1" and name == "a product"
    assert nodes["unscale-gradients", "Div"] == (policy not in EXACT)
    assert nodes["bound-gradients", "Clip"] == early
    assert_read(kind, nodes)
    assert not all(assert_same_when_spoiled(plain, lowered, feeds))


RATES = [0.1, 0.125, 1e-30, 1e-35, 2.0**-125, 1.1 * 2.0**-126, 1e-40, 1e-45, 0.0, -0.3, 1e30, F32_MAX, np.inf, np.nan]


@pytest.mark.parametrize("scale", [1.0, 2.0, 2.0**15, 2.0**122, 2.0**123, 2.0**126])
@pytest.mark.parametrize("rate", RATES)
def test_a_constant_rate_of_any_size(rate: float, scale: float) -> None:
    """Divided by the scale it must not be subnormal, unless it is exact."""
    kind = KINDS["an operator that is not known"]
    model = model_of(kind)
    for tensor in model.graph.initializer:
        if tensor.name == "rate":
            tensor.CopyFrom(onnx.numpy_helper.from_array(np.float32(rate), "rate"))
    feeds = feeds_of(kind, model)
    # Of a weight of 0, the next one shows all bits of the step.
    plain, lowered, nodes = both(model, gs.DynamicLossScale(scale, 50), np.zeros_like(feeds.pop("w")))
    assert nodes["unscale-gradients", "Div"] == 0
    is_looked_up = 2.0**-126 <= abs(rate) < np.inf  # the largest scale that it allows
    assert_read(kind, nodes, more=not is_looked_up)
    small = {**feeds, "x": feeds["x"] * np.float32(1e-30), "t": feeds["t"] * np.float32(1e-3)}
    assert_same_steps(plain, lowered, [small, feeds])


@pytest.mark.parametrize(("size", "applied"), [(1.0, True), (1e10, False)])
def test_a_bound_that_is_no_number(size: float, applied: bool) -> None:
    """Of zeros times what sums up to infinity, which is 0; the other product is what decides."""
    nodes = "g = MatMul(xt, dy) zt = Transpose <perm = [1, 0]> (z) dz = Mul(dy, m) h = MatMul(zt, dz) dw = Add(g, h)"
    kind = Kind(nodes, "float[8,4] z, float[8,3] m")
    model = model_of(kind, optimizer="w_next = Sub(w, dw)")
    feeds = feeds_of(kind, model)
    feeds |= {
        "x": feeds["x"] * np.float32(size),
        "z": np.full_like(feeds["z"], F32_MAX),
        "m": np.zeros_like(feeds["m"]),
    }
    plain, lowered, found = both(model, gs.DynamicLossScale(2.0**100, 5), np.zeros_like(feeds.pop("w")))
    assert (found["bound-gradients", "ThresholdedRelu"], found["bound-gradients", "Clip"]) == (2, 1)
    assert assert_same_steps(plain, lowered, [feeds]) == [applied]


@pytest.mark.parametrize("shape", ["", "[1]", "[1,1]"])
@pytest.mark.parametrize("scale", [1.0, 2.0**15, 2.0**126])
def test_a_gradient_that_a_fed_rate_multiplies(scale: float, shape: str) -> None:
    """The rate is divided by the scale, unless the quotient is subnormal."""
    model = model_of(KINDS["an operator that is not known"], is_rate_fed=True)
    rate = next(value for value in model.graph.input if value.name == "rate")
    for size in shape.strip("[]").split(",") if shape else []:
        rate.type.tensor_type.shape.dim.add().dim_value = int(size)
    feeds = feeds_of(KINDS["an operator that is not known"], model)
    # Of a weight of 0, the next one shows all bits of the step.
    plain, lowered, nodes = both(model, gs.DynamicLossScale(scale, 50), np.zeros_like(feeds.pop("w")))
    assert nodes["unscale-gradients", "Div"] == 0
    assert_read(KINDS["an operator that is not known"], nodes, more=1)
    sizes = [0.1, 1e-30, 1e-35, 1.1 * 2.0**-126, 1e-40, 1e-45, 0.0, -0.0, -0.3, 1e30, F32_MAX, np.inf, np.nan]
    small = {**feeds, "x": feeds["x"] * np.float32(1e-30)}
    rates = [np.full_like(feeds["rate"], size) for size in sizes]
    runs = ([{**batch, "rate": rate}] for batch in (feeds, small) for rate in rates)
    applied = assert_same_runs(plain, lowered, runs)
    assert all(applied) or scale == 2.0**126
    assert any(applied)


@pytest.mark.parametrize(
    "optimizer",
    [
        "decayed = Mul(rate, two_over_n) u = Mul(decayed, dw) w_next = Sub(w, u)",  # a rate that the branch computes
        "rates = Expand(rate, matrix) u = Mul(rates, dw) w_next = Sub(w, u)",
        "a = Mul(rate, dw) e = Exp(dw) u = Add(a, e) w_next = Sub(w, u)",
        "dw2 = Mul(dw, dw) u = Mul(rate, dw2) w_next = Sub(w, u)",
        "u = Div(dw, rate) w_next = Sub(w, u)",
    ],
)
def test_steps_that_do_not_only_multiply_by_a_number(optimizer: str) -> None:
    kind = KINDS["an operator that is not known"]
    model = model_of(kind, optimizer=optimizer, is_rate_fed=True)
    feeds = feeds_of(kind, model)
    plain, lowered, nodes = both(model, gs.DynamicLossScale(1024.0, 2), feeds.pop("w"))
    assert nodes["unscale-gradients", "Div"] == 1
    assert_same_steps(plain, lowered, [feeds, *spoiled(feeds), feeds])


SCALES = [3.0, 1.5 * 2.0**100, 2.0**126, 2.0**127, 1.0, 0.75, 0.5, 2.0**-30, 2.0**-126, 1e-40, 1e-45, F32_MAX]


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("policy", ["powers of two", "powers of three"])
@pytest.mark.parametrize("name", ["a mask that is fed", "an operator that is not known", "a row for all"])
def test_a_scale_that_was_loaded(name: str, policy: str, scale: float) -> None:
    kind = KINDS[name]
    model = model_of(kind, is_rate_fed=True)
    feeds = feeds_of(kind, model)
    plain, lowered, _ = both(model, POLICIES[policy], feeds.pop("w"))
    state = {**plain.state_dict(), "current_loss_scale": np.float32(scale)}
    sizes = map(np.float32, (1.0, 1e-10, 1e10, 1e18, 1e20))
    batches = ({**feeds, "x": feeds["x"] * size, "t": feeds["t"] * size} for size in sizes)
    assert any(assert_same_runs(plain, lowered, ([batch, batch, feeds] for batch in batches), state))


ALL_LARGEST = {
    "all maximal": ([1, 1, 1], None, True),
    "both ways": ([1, -1, 1], None, True),
    "a NaN among them": ([1, np.nan, 1], None, False),
    "an infinite one among them": ([1, -np.inf, 1], None, False),
    "too large together": ([1, 1, 1], 2.0, False),
}


@pytest.mark.parametrize("policy", [gs.DynamicLossScale(1.0, 5), gs.DynamicLossScale(1.0, 5, 3.0)], ids=["2", "3"])
@pytest.mark.parametrize("numbers", ALL_LARGEST)
@pytest.mark.parametrize(
    ("nodes", "sums"),
    [
        ("dw = MatMul(xt, dy)", 0),
        ("g = MatMul(xt, dy) dw = Mul(g, ones)", 0),
        ("g = MatMul(xt, dy) dw = Max(g, g)", 1),
        ("g = MatMul(xt, dy) dw = Max(g, g)", 2),
    ],
    ids=["a product", "a multiple", "read in one go", "read by rows"],
)
def test_the_largest_finite_gradients(nodes: str, sums: int, numbers: str, policy: gs.LossScale) -> None:
    """Sums overflow, of gradients that are finite: the gradients themselves are looked at."""
    signs, size, finite = ALL_LARGEST[numbers]
    model = model_of(Kind(nodes.replace("dw = ", "dw0 = ") + " dw = Identity(dw0)", "float[4,3] ones"))
    for tensor in model.graph.initializer:
        if tensor.name == "two_over_n":
            tensor.CopyFrom(onnx.numpy_helper.from_array(np.float32(1), tensor.name))
    x, t = np.zeros((8, 4), np.float32), np.zeros((8, 3), np.float32)
    x[3], t[3] = size or 1.0, np.array(signs, np.float32) * F32_MAX
    batch = {"x": x, "t": t, "ones": np.ones((4, 3), np.float32)}
    result = gs.scale(model, policy, updates={"w_next": "w"})
    lowering = ALWAYS if sums == 1 else BY_ROWS
    plain, lowered, found = plain_and_lowered(result, {"w": np.zeros((4, 3), np.float32)}, lowering)
    assert found["bound-gradients", "ReduceSum"] == sums
    batch = {name: batch[name] for name in plain.inputs}
    assert assert_same_steps(plain, lowered, [batch]) == [finite]
    if finite:
        assert (np.abs(lowered.state_dict()["w"]) == np.float32(F32_MAX / 8)).all()


@pytest.mark.parametrize("policy", ["powers of two", "powers of three"])
def test_a_gradient_that_others_read(policy: str) -> None:
    """It is unscaled where it was, and tested by its bound."""
    kind = KINDS["a constant mask"]
    model = model_of(kind, outputs="float[4,3] w_next, float[4,3] dw")
    feeds = feeds_of(kind, model)
    plain, lowered, nodes = both(model, POLICIES[policy], feeds.pop("w"))
    assert (nodes["unscale-gradients", "Div"], nodes["bound-gradients", "ReduceL1"]) == (1, 2)
    assert_same_steps(plain, lowered, [feeds, *spoiled(feeds), feeds])
