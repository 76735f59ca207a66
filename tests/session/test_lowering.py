"""What a session makes of a step on a CPU: the same steps, bit for bit, as of the graph as it was scaled."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import onnxruntime as ort
import pytest

import graphscale as gs
from graphscale.graph.builder import Editor
from graphscale.graph.marks import PASS_KEY
from graphscale.passes.nodes.finite import all_finite
from graphscale.session import probes
from graphscale.session.thresholds import Thresholds
from graphscale.targets import get_target
from tests.build import feeds_for, linear_step
from tests.conftest import MODEL_NAMES, Arrays, Level, assert_all_same_bits, load_example
from tests.session.plain import ALWAYS, lowered_graph, options

Array = np.ndarray[Any, Any]

# Where the fusions of ONNX Runtime are the same for both.
EXACT = Level.ORT_DISABLE_ALL
F32_MAX = float(np.finfo(np.float32).max)


def is_updated(name: str) -> bool:
    return bool(gs.inspect(load_example(name).path).state)


UPDATED = [name for name in MODEL_NAMES if is_updated(name)]


def sessions(result: gs.ScaledModel, state: Arrays, lowering: Thresholds = ALWAYS) -> tuple[gs.Session, gs.Session]:
    """A session on the graph as it was scaled, and one that lowers every gradient and state, however small."""
    plain = gs.Session(result, session_options=options(EXACT), state=state, lowering=None)
    return plain, gs.Session(result, session_options=options(EXACT), state=state, lowering=lowering)


def assert_same_steps(plain: gs.Session, lowered: gs.Session, batches: list[Arrays]) -> list[bool]:
    applied = []
    for batch in batches:
        expected, actual = plain.step(batch), lowered.step(batch)
        assert actual.applied == expected.applied
        assert_all_same_bits(dict(actual), dict(expected))
        assert_all_same_bits(lowered.state_dict(), plain.state_dict())
        applied.append(actual.applied)
    return applied


def poisoned(batch: Arrays, value: float) -> Arrays:
    """A batch with one element of every floating-point array replaced."""
    found = {name: np.array(array) for name, array in batch.items()}
    for array in found.values():
        if array.dtype.kind == "f" and array.size:
            array.reshape(-1)[array.size // 2] = value
    return found


@pytest.mark.parametrize("scale", [1024.0, 2.0**126], ids=["usual", "enormous"])
@pytest.mark.parametrize("name", UPDATED)
def test_the_same_steps(name: str, scale: float) -> None:
    example = load_example(name)
    result = gs.scale(example.model(), gs.DynamicLossScale(scale, 3))
    state = {s.input: example.feeds[s.input] for s in result.report.state if s.input in example.feeds}
    plain, lowered = sessions(result, state)
    batch = {name: example.feeds[name] for name in plain.inputs}
    bad = [poisoned(batch, value) for value in (np.nan, np.inf, F32_MAX)]
    assert_same_steps(plain, lowered, [batch, batch, bad[0], batch, bad[1], bad[2], batch, batch])


@pytest.mark.parametrize("name", UPDATED)
def test_no_constant_is_left_behind(name: str) -> None:
    """ONNX Runtime would warn of each."""
    example = load_example(name)
    result = gs.scale(example.model())
    unread = {
        value.name
        for value in lowered_graph(result).initializers.values()
        if not (value.uses() or value.is_graph_output() or value.is_graph_input())
    }
    assert unread <= {tensor.name for tensor in example.model().graph.initializer}


def linear_sessions(scale: float, **policy: float) -> tuple[gs.Session, gs.Session, Arrays]:
    """Sessions on `w.next = w - dw / 8`, and a batch."""
    model = linear_step(
        "u = Mul(rate, dw) w_next = Sub(w, u)", outputs="float[4,3] w_next", constants="float rate = {0.125}"
    )
    model = onnx.shape_inference.infer_shapes(model, strict_mode=True)
    result = gs.scale(model, gs.DynamicLossScale(scale, 2, **policy), updates={"w_next": "w"})
    feeds = feeds_for(model)
    state = {"w": feeds.pop("w")}
    assert policy or ("session-bounds", "If") in lowered_nodes(result)
    plain, lowered = sessions(result, state)
    return plain, lowered, feeds


def lowered_nodes(result: gs.ScaledModel) -> list[tuple[str | None, str]]:
    """Of the main graph that a session runs: which pass has put each node there, and its operator."""
    return [(node.metadata_props.get(PASS_KEY), node.op_type) for node in lowered_graph(result)]


def test_only_the_optimizer_reads_the_gradients_of_contractions() -> None:
    example = load_example("pytorch/mlp_momentum")
    result = gs.scale(example.model(), gs.DynamicLossScale(1024.0))
    nodes = lowered_nodes(result)
    assert ("session-bounds", "If") in nodes
    assert nodes.count(("unscale-gradients", "Div")) == 2  # the biases
    assert not {("session-probes", "MatMul"), ("check-finite", "ReduceSum")} & {*nodes}


@pytest.mark.parametrize(
    ("policy", "divides"), [({"multiplier": 3.0}, True), ({"min_loss_scale": 0.5}, False)], ids=str
)
def test_a_scale_that_is_no_power_of_two_divides(policy: dict[str, float], divides: bool) -> None:
    example = load_example("pytorch/mlp_momentum")
    result = gs.scale(example.model(), gs.DynamicLossScale(1024.0, 2, **policy))
    nodes = lowered_nodes(result)
    assert nodes.count(("unscale-gradients", "Div")) == (4 if divides else 2)
    assert ("session-bounds", "If") in nodes
    assert not {("session-probes", "MatMul"), ("check-finite", "ReduceSum")} & {*nodes}  # no gradient is probed
    assert_same_steps(*linear_sessions(1024.0, **policy)[:2], [linear_sessions(1024.0)[2]] * 5)


@pytest.mark.parametrize(("size", "overflows"), [(1.0, False), (1e15, False), (1e18, False), (1e25, True)], ids=str)
def test_large_batches_are_skipped_where_the_scaled_gradient_overflows(size: float, overflows: bool) -> None:
    """The bound is exceeded long before the gradient overflows: in between, the gradient itself is looked at."""
    skipped = []
    for scale in (1.0, 1024.0, 2.0**60, 2.0**127):
        plain, lowered, batch = linear_sessions(scale)
        large = {name: array * np.float32(size) for name, array in batch.items()}
        applied = assert_same_steps(plain, lowered, [large, large, batch, large])
        skipped.append(not applied[0])
    assert skipped == sorted(skipped)
    assert skipped[0] == overflows and skipped[-1] == (size > 1)


GRADIENTS = {
    "finite": lambda a, i: a,
    "NaN in the middle": lambda a, i: replaced(a, i, np.nan),
    "infinite in the middle": lambda a, i: replaced(a, i, -np.inf),
    "a sum that overflows": lambda a, i: np.full_like(a, F32_MAX),
    "sums that overflow both ways": lambda a, i: np.where(np.arange(a.size).reshape(a.shape) % 2, F32_MAX, -F32_MAX),
    "subnormal": lambda a, i: np.full_like(a, 1e-42),
    "a NaN among the largest": lambda a, i: replaced(np.full_like(a, F32_MAX), i, np.nan),
}
SHAPES = [(2048, 9), (9, 2048), (1, 5000), (5000, 1), (8192,), (8209,), (3,), (1,), (4, 5, 6), (2, 3, 40, 50), (3, 0)]


def replaced(array: Array, place: int, value: float) -> Array:
    found = array.copy()
    if found.size:
        found.reshape(-1)[place % found.size] = value
    return found


@pytest.mark.parametrize("kind", GRADIENTS)
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16], ids=["float32", "float64", "float16"])
def test_probes_are_exact(kind: str, dtype: type) -> None:
    random = np.random.default_rng(0)
    good = [random.standard_normal(shape).astype(dtype) for shape in SHAPES]
    values = [
        ir.Value(name=f"g{i}", type=ir.TensorType(ir.DataType.from_numpy(array.dtype)), shape=ir.Shape(array.shape))
        for i, array in enumerate(good)
    ]
    graph = ir.Graph(values, [], nodes=[], opset_imports={"": 20}, name="check")
    graph.outputs.append(all_finite(Editor(graph).builder("check-finite"), values, get_target("onnx")))
    probes.simplify_probes(graph, Thresholds().probe_elements)
    assert "MatMul" in [node.op_type for node in graph]
    model = ir.to_proto(ir.Model(graph, ir_version=10)).SerializeToString()
    session = ort.InferenceSession(model, options(Level.ORT_ENABLE_ALL), providers=["CPUExecutionProvider"])
    for place in range(len(SHAPES)):
        with np.errstate(over="ignore"):
            bad = GRADIENTS[kind](good[place].astype(np.float32), 4321).astype(dtype)
        feeds = {f"g{i}": bad if i == place else array for i, array in enumerate(good)}
        (finite,) = session.run(None, feeds)
        assert finite == np.isfinite(bad).all(), SHAPES[place]


TIED = """
    h = MatMul(x, w) y = MatMul(h, w) d = Sub(y, t) sq = Mul(d, d) loss = ReduceMean <keepdims: int = 0> (sq)
    dy = Mul(d, two_over_n) wt = Transpose <perm = [1, 0]> (w) dh = MatMul(dy, wt)
    ht = Transpose <perm = [1, 0]> (h) xt = Transpose <perm = [1, 0]> (x)
    a = MatMul(ht, dy) b = MatMul(xt, dh) dw = Add(a, b) w_next = Sub(w, dw)
"""
TABLE = """
    h = Gather(w, ids) y = MatMul(h, v) d = Sub(y, t) sq = Mul(d, d) loss = ReduceMean <keepdims: int = 0> (sq)
    dy = Mul(d, two_over_n) vt = Transpose <perm = [1, 0]> (v) dh = MatMul(dy, vt)
    i = Unsqueeze(ids, last) dw = ScatterND <reduction = "add"> (zeros, i, dh) w_next = Sub(w, dw)
"""
HEAD = '<ir_version: 10, opset_import: ["": 20]> step ({}) => (float loss, float[4,4] w_next) <{}> {{ {} }}'
NUMBERS = "float two_over_n = {0.0078125}, float zero = {0}, int64[1] last = {-1}"
NOTHING = ", float[4,4] nothing = {" + ", ".join(16 * ["0"]) + "}"


def run_both(model: onnx.ModelProto, bad: dict[str, float]) -> tuple[list[bool], list[tuple[str | None, str]]]:
    """Train both sessions on good batches and one with bad numbers; what was applied, and what the session runs."""
    model = onnx.shape_inference.infer_shapes(model, strict_mode=True)
    result = gs.scale(model, gs.DynamicLossScale(1024.0, 3), updates={"w_next": "w"})
    feeds = feeds_for(model, **({"ids": np.arange(8) % 3} if "ids" in str(model.graph.input) else {}))
    state = {"w": feeds.pop("w")}
    wrong = {name: np.array(array) for name, array in feeds.items()}
    for name, value in bad.items():
        wrong[name].reshape(-1)[-1] = value
    return assert_same_steps(*sessions(result, state), [feeds, feeds, wrong, feeds]), lowered_nodes(result)


@pytest.mark.parametrize("bad", [{}, {"x": np.inf}, {"t": np.nan}, {"x": 1e20}, {"t": F32_MAX}], ids=str)
def test_a_gradient_that_is_a_sum_of_contractions(bad: dict[str, float]) -> None:
    model = onnx.parser.parse_model(HEAD.format("float[8,4] x, float[8,4] t, float[4,4] w", NUMBERS, TIED))
    applied, nodes = run_both(model, bad)
    assert nodes.count(("session-bounds", "ReduceL1")) == 4
    assert applied == [True, True, not bad, True]


@pytest.mark.parametrize(
    ("zeros", "is_bounded"),
    [
        ("zeros = Identity(nothing)", True),
        ("zeros = Mul(z, zero)", False),
        ("zeros = Mul(w, zero)", False),
    ],
    ids=str,
)
@pytest.mark.parametrize("bad", [{}, {"z": np.inf}, {"v": np.nan}], ids=str)
def test_the_gradient_of_a_table(zeros: str, is_bounded: bool, bad: dict[str, float]) -> None:
    """0 * inf is NaN: zeros that are a product may be none."""
    inputs = "int64[8] ids, float[4,4] v, float[4,4] z, float[8,4] t, float[4,4] w"
    model = onnx.parser.parse_model(HEAD.format(inputs, NUMBERS + NOTHING, zeros + TABLE))
    applied, nodes = run_both(model, bad)
    assert (("unscale-gradients", "Div") not in nodes) == is_bounded  # else the gradient itself is read
    assert (("session-bounds", "ReduceL1") in nodes, ("session-bounds", "ReduceSum") in nodes) == (
        is_bounded,
        not is_bounded,
    )
    assert applied == [True, True, not bad or ("z" in bad and "(z," not in zeros), True]
