"""Products of matrices that are gradients, and exporters' nodes behind them: each kind, with each kind of scale."""

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

pytestmark = pytest.mark.sample(1)

BACKWARD = "dy = Mul(d, two_over_n) xt = Transpose <perm = [1, 0]> (x) "
SGD = "u = Mul(rate, dw) w_next = Sub(w, u)"
NUMBERS = (
    "float zero = {0}, float third = {0.33}, float tiny = {1e-30}, float huge = {1e30}, "
    "float[4,3] kept = {1, 0, 1, 0, -1, 1, 1, 0, 0, 1, 0.5, 1}, "
    "float[4,3] zeros = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0}, "
    "float[4,3] infinite = {1, 0, 1, 0, -1, inf, 1, 0, 0, 1, 0.5, 1}, int64[1] first = {0}, int64[1] second = {1}, "
    "int64[1] three = {3}, int64[3] pairs = {2, 4, 4}, int64[3] pairs3 = {2, 4, 3}, "
    "int64[8,1] places = {0, 1, 3, 0, 2, 1, 1, 0}, int64[4,1] turned = {3, 0, 2, 1}, int64[1] fourth = {4}, "
    "int64[8,3] columns = {0, 1, 3, 0, 2, 1, 1, 0, 3, 2, 1, 0, 0, 1, 3, 0, 2, 1, 1, 0, 3, 2, 1, 0}, "
    "int64[2] matrix = {4, 3}, int64[3] deep = {4, 8, 1}, int64[3] kernel = {3, 8, 1}, int64[2] halves = {2, 2}"
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
        read: number of tensors that its bound reads; 0 if it is read itself. Where it is not, and the scale is a power
            of two, it is unscaled before it is large.
    """

    nodes: str
    inputs: str = ""
    read: int = 0


MASK, CONDITION = "float[4,3] m", "bool[4,3] b"
PRODUCT = "g = MatMul(xt, dy) "
KINDS = {
    "Gemm with a factor": Kind("dw = Gemm <transA = 1, alpha = -0.3> (x, dy)", read=2),
    "Gemm with the factor 0": Kind("dw = Gemm <transA = 1, alpha = 0.0> (x, dy)", read=2),
    "Gemm with a large factor": Kind("dw = Gemm <transA = 1, alpha = -3.0> (x, dy)"),
    "both transposed": Kind("dyt = Transpose <perm = [1, 0]> (dy) dw = Gemm <transB = 1> (xt, dyt)", read=2),
    "transposed": Kind(
        "dyt = Transpose <perm = [1, 0]> (dy) g = MatMul(dyt, x) dw = Transpose <perm = [1, 0]> (g)", read=2
    ),
    "another sign": Kind(PRODUCT + "dw = Neg(g)", read=2),
    "a part of it": Kind(PRODUCT + "dw = Mul(third, g)", read=2),
    "a constant mask": Kind(PRODUCT + "dw = Mul(g, kept)"),
    "a mask that is fed": Kind(PRODUCT + "dw = Mul(m, g)", MASK),
    "a mask that is infinite": Kind(PRODUCT + "dw = Mul(g, infinite)"),
    "where it is kept": Kind(PRODUCT + "dw = Where(b, g, zero)", CONDITION),
    "over a small number": Kind(PRODUCT + "h = Div(g, tiny) dw = Mul(h, m)", MASK),
    "a large factor before a small one": Kind(PRODUCT + "h = Mul(g, huge) dw = Mul(h, m)", MASK),
    "a difference": Kind(PRODUCT + "h = Gemm <transA = 1> (x, dy) k = Mul(h, m) dw = Sub(g, k)", MASK),
    "Einsum": Kind('dw = Einsum <equation = "bi,bo->io"> (x, dy)'),
    "Conv": Kind(
        "x3 = Reshape(xt, deep) dyt = Transpose <perm = [1, 0]> (dy) dy3 = Reshape(dyt, kernel) g = Conv(x3, dy3) "
        "dw = Reshape(g, matrix)"
    ),
    "a sum over a batch": Kind(
        "x3 = Reshape(x, pairs) x3t = Transpose <perm = [0, 2, 1]> (x3) dy3 = Reshape(dy, pairs3) g = MatMul(x3t, dy3) "
        "dw = ReduceSum <keepdims = 0> (g, first)"
    ),
    "parts": Kind(
        "a, b = Split <axis = 0> (xt, halves) g = MatMul(a, dy) h = MatMul(b, dy) dw = Concat <axis = 0> (h, g)"
    ),
    "two readers": Kind(PRODUCT + "h = Mul(g, kept) k = Neg(g) dw = Add(h, k)"),
    "rows of a table": Kind('dw = ScatterND <reduction = "add"> (zeros, places, dy)', read=1),
    "rows of a table, each once": Kind(
        "four = Slice(dy, first, fourth, first) dw = ScatterND(zeros, turned, four)", read=1
    ),
    "elements of a table": Kind('dw = ScatterElements <axis = 0, reduction = "add"> (zeros, columns, dy)', read=1),
    "a table that is not zero": Kind('dw = ScatterND <reduction = "add"> (m, places, dy)', MASK),
    "another sign of a table": Kind('g = ScatterND <reduction = "add"> (zeros, places, dy) dw = Neg(g)', read=1),
    "an operator that is not known": Kind(PRODUCT + "dw = Mean(g)"),
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
    gradients = [value.name for value in model.graph.output if value.name == "dw"]
    result = gs.scale(model, policy, updates={"w_next": "w"}, roles={"gradients": gradients})
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


def assert_read(kind: Kind, nodes: Counter[tuple[str | None, str]]) -> None:
    """Its operands, by their absolute values, or itself: each row, and all rows."""
    assert nodes["bound-gradients", "ReduceL1"] == kind.read
    assert nodes["bound-gradients", "ReduceSum"] == (0 if kind.read else 2)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", KINDS)
def test_the_same_steps(name: str, policy: str) -> None:
    kind = KINDS[name]
    model = model_of(kind, optimizer="w_next = Sub(w, dw)")
    feeds = feeds_of(kind, model)
    plain, lowered, nodes = both(model, POLICIES[policy], feeds.pop("w"))
    early = kind.read > 0 and policy in EXACT
    assert (nodes["unscale-gradients", "Div"], nodes["bound-gradients", "Reciprocal"]) == (not early, early)
    assert_read(kind, nodes)
    applied = assert_same_when_spoiled(plain, lowered, feeds)
    if policy != "2**126":
        assert applied[:3] == 3 * [name != "a mask that is infinite"]
    assert not all(applied)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    "kind",
    [Kind("dw = Gemm <transA = 1> (x, dy, m)", MASK), Kind('dw = ScatterND <reduction = "max"> (zeros, places, dy)')],
    ids=["Gemm with an addend", "the largest rows of a table"],
)
@pytest.mark.parametrize("optimizer", [SGD, "w_next = Sub(w, dw)"], ids=["a rate", "no rate"])
def test_gradients_that_are_split_or_unscaled_first(optimizer: str, kind: Kind, policy: str) -> None:
    model = model_of(kind, optimizer=optimizer)
    feeds = feeds_of(kind, model)
    result = gs.scale(model, POLICIES[policy], updates={"w_next": "w"})
    plain, lowered, _ = plain_and_lowered(result, {"w": feeds.pop("w")})
    assert not all(assert_same_when_spoiled(plain, lowered, feeds))


def assert_same_when_spoiled(plain: gs.Session, lowered: gs.Session, feeds: Arrays) -> list[bool]:
    """Three steps on a good batch, then one on each bad one, with a good one after it; which were applied."""
    return assert_same_runs(plain, lowered, [[feeds] * 3, *([batch, feeds] for batch in spoiled(feeds))])


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", [*KINDS, "a product"])
def test_a_constant_rate(name: str, policy: str) -> None:
    """ONNX Runtime multiplies a product by it as it forms the product; the quotient is a part of the product then."""
    kind = KINDS.get(name, Kind("dw = MatMul(xt, dy)", read=2))
    model = model_of(kind)
    feeds = feeds_of(kind, model)
    plain, lowered, nodes = both(model, POLICIES[policy], feeds.pop("w"))
    # Gradients without a bound are read, and the rate is divided.
    is_exact = policy in EXACT and name != "a table that is not zero"
    assert (nodes["unscale-gradients", "Div"], nodes["bound-gradients", "Reciprocal"]) == (not is_exact, is_exact)
    assert_read(kind, nodes)
    assert not all(assert_same_when_spoiled(plain, lowered, feeds))


RATES = [0.1, 0.125, 1.0, 0.0, -0.3, 3.0, 1e30, F32_MAX, np.inf, np.nan]


@pytest.mark.parametrize("scale", [1.0, 2.0, 2.0**15, 2.0**122, 2.0**126])
@pytest.mark.parametrize("rate", RATES)
def test_a_constant_rate_of_any_size(rate: float, scale: float) -> None:
    kind = Kind("dw = MatMul(xt, dy)", read=2)
    model = model_of(kind)
    for tensor in model.graph.initializer:
        if tensor.name == "rate":
            tensor.CopyFrom(onnx.numpy_helper.from_array(np.float32(rate), "rate"))
    feeds = feeds_of(kind, model)
    # Of a weight of 0, the next one shows all bits of the step.
    plain, lowered, nodes = both(model, gs.DynamicLossScale(scale, 50), np.zeros_like(feeds.pop("w")))
    assert nodes["unscale-gradients", "Div"] == 0
    assert_read(kind, nodes)
    small = {**feeds, "x": feeds["x"] * np.float32(1e-10), "t": feeds["t"] * np.float32(1e-3)}
    assert_same_steps(plain, lowered, [small, feeds])


@pytest.mark.parametrize(("factor", "applied"), [(0.0, True), (np.inf, False), (np.nan, False)])
def test_a_bound_that_is_no_number(factor: float, applied: bool) -> None:
    """Of zeros times what sums up to infinity the gradient is 0; of what is not finite it is not finite, either."""
    kind = Kind("zt = Transpose <perm = [1, 0]> (z) dz = Mul(dy, m) dw = MatMul(zt, dz)", "float[8,4] z, float[8,3] m")
    model = model_of(kind, optimizer="w_next = Sub(w, dw)")
    feeds = feeds_of(kind, model)
    feeds |= {"z": np.full_like(feeds["z"], F32_MAX), "m": np.full_like(feeds["m"], factor)}
    plain, lowered, found = both(model, gs.DynamicLossScale(2.0**100, 5), np.zeros_like(feeds.pop("w")))
    assert found["bound-gradients", "Reciprocal"] == 1
    assert assert_same_steps(plain, lowered, [{name: feeds[name] for name in plain.inputs}]) == [applied]


SCALES = [3.0, 1.5 * 2.0**100, 2.0**126, 2.0**127, 1.0, 0.75, 0.5, 2.0**-30, 2.0**-126, 1e-40, 1e-45, F32_MAX]


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("policy", ["powers of two", "powers of three"])
@pytest.mark.parametrize("name", ["both transposed", "an operator that is not known"])
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
        ("g = MatMul(xt, dy) dw = Mean(g)", 1),
        ("g = MatMul(xt, dy) dw = Mean(g)", 2),
    ],
    ids=["a product", "read in one go", "read by rows"],
)
def test_the_largest_finite_gradients(nodes: str, sums: int, numbers: str, policy: gs.LossScale) -> None:
    """Sums overflow, of gradients that are finite: the gradients themselves are read."""
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
    kind = KINDS["both transposed"]
    model = model_of(kind, outputs="float[4,3] w_next, float[4,3] dw")
    feeds = feeds_of(kind, model)
    plain, lowered, nodes = both(model, POLICIES[policy], feeds.pop("w"))
    assert (nodes["unscale-gradients", "Div"], nodes["bound-gradients", "ReduceL1"]) == (1, 2)
    assert_same_steps(plain, lowered, [feeds, *spoiled(feeds), feeds])


def test_a_product_that_two_gradients_share() -> None:
    """It is unscaled for neither of them: each divides what it reads."""
    model = linear_step(
        "w_next = Sub(w, dw) v_next = Sub(v, dv)",
        inputs="float[4,3] w, float[4,3] v",
        outputs="float[4,3] w_next, float[4,3] v_next",
        backward=BACKWARD + PRODUCT + "dw = Neg(g) dv = Mul(g, kept)",
        constants=NUMBERS,
    )
    model = onnx.shape_inference.infer_shapes(model, strict_mode=True)
    feeds = feeds_for(model)
    state = {name: feeds.pop(name) for name in ("w", "v")}
    updates = {f"{name}_next": name for name in state}
    result = gs.scale(model, POLICIES["powers of two"], updates=updates, gradients=["dw", "dv"])
    plain, lowered, nodes = plain_and_lowered(result, state)
    assert nodes["unscale-gradients", "Div"] == 2
    assert not all(assert_same_when_spoiled(plain, lowered, feeds))
