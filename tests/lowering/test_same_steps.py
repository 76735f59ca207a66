"""Steps lowered for a CPU by a session: bit for bit those of the scaled graph."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
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
from graphscale.lowering.bound_gradients import BoundGradients
from graphscale.lowering.merge_probes import MergeProbes
from graphscale.lowering.nodes.bounds import ScalarBuilder, add_sum
from graphscale.lowering.thresholds import Thresholds
from graphscale.passes.nodes.finite import all_finite
from graphscale.step.training_step import Step
from graphscale.targets import get_target
from tests.build import feeds_for, linear_step
from tests.conftest import MODEL_NAMES, Arrays, Level, assert_all_same_bits, load_example
from tests.session.dangerous import CASES
from tests.session.plain import ALWAYS, BY_ROWS, buffers, lowered_graph, options

pytestmark = pytest.mark.sample(1)

Array = np.ndarray[Any, Any]

# Cases in which the fusions of ONNX Runtime are the same for both.
EXACT = Level.ORT_DISABLE_ALL
F32_MAX = float(np.finfo(np.float32).max)


UPDATED = [name for name in MODEL_NAMES if gs.inspect(load_example(name).path).state]


def plain_and_lowered(
    result: gs.ScaledModel, state: Mapping[str, np.ndarray], lowering: Thresholds = BY_ROWS
) -> tuple[gs.Session, gs.Session, Counter[tuple[str | None, str]]]:
    """A plain session, a lowered one, and the operators that each lowering pass added, counted."""
    plain, lowered = (
        gs.Session(result, session_options=options(EXACT), state=state, lowering=thresholds)
        for thresholds in (None, lowering)
    )
    return plain, lowered, lowered_nodes(result, lowering)


def lowered_nodes(result: gs.ScaledModel, lowering: Thresholds = ALWAYS) -> Counter[tuple[str | None, str]]:
    """Count the operators of each pass in the graph of a session, as a step runs them whose gradients are bounded."""
    nodes = nodes_at_once(lowered_graph(result, lowering))
    return Counter((node.metadata_props.get(PASS_KEY), node.op_type) for node in nodes)


def nodes_at_once(graph: ir.Graph) -> list[ir.Node]:
    """The nodes of the main graph, and of its branch for bounded gradients."""
    branches = [node for node in graph if node.op_type == "If" and BoundGradients.inserted(node)]
    return [*graph, *(inner for node in branches for inner in node.attributes["then_branch"].as_graph())]


def assert_same_steps(plain: gs.Session, lowered: gs.Session, batches: list[Arrays]) -> list[bool]:
    applied = []
    for batch in batches:
        expected, actual = plain.step(batch), lowered.step(batch)
        assert actual.applied == expected.applied
        assert_all_same_bits(dict(actual), dict(expected))
        assert_all_same_bits(lowered.state_dict(), plain.state_dict())
        applied.append(actual.applied)
    return applied


def assert_same_runs(
    plain: gs.Session, lowered: gs.Session, runs: Iterable[list[Arrays]], state: Arrays | None = None
) -> list[bool]:
    """Compare the steps of several runs, each from this state, or from that of now; return which were applied."""
    state = plain.state_dict() if state is None else state
    applied = []
    for run in runs:
        for session in (plain, lowered):
            session.load_state_dict(state)
        applied += assert_same_steps(plain, lowered, run)
    return applied


def poisoned(batch: Arrays, value: float) -> Arrays:
    """A batch with one element of every floating-point array replaced."""
    found = {name: np.array(array) for name, array in batch.items()}
    for array in found.values():
        if array.dtype.kind == "f" and array.size:
            array.reshape(-1)[array.size // 2] = value
    return found


@pytest.mark.full
@pytest.mark.parametrize("scale", [1024.0, 2.0**126], ids=["usual", "enormous"])
@pytest.mark.parametrize("name", UPDATED)
def test_the_same_steps(name: str, scale: float) -> None:
    example = load_example(name)
    result = gs.scale(example.model(), gs.DynamicLossScale(scale, 3))
    state = {s.input: example.feeds[s.input] for s in result.report.state if s.input in example.feeds}
    plain, lowered, _ = plain_and_lowered(result, state, ALWAYS)
    batch = {name: example.feeds[name] for name in plain.inputs}
    bad = [poisoned(batch, value) for value in (np.nan, np.inf, F32_MAX)]
    assert_same_steps(plain, lowered, [batch, batch, bad[0], batch, bad[1], bad[2], batch, batch])


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", UPDATED)
def test_the_same_steps_of_a_file_for_a_gpu(name: str) -> None:
    """Plain and lowered for a CPU, as those of target onnx: its finite check has other nodes."""
    example = load_example(name)
    policy = gs.DynamicLossScale(1024.0, 3)
    result = gs.scale(example.model(), policy, target="ort-cuda")
    state = {s.input: example.feeds[s.input] for s in result.report.state if s.input in example.feeds}
    plain, lowered, _ = plain_and_lowered(result, state, ALWAYS)
    portable = gs.Session(gs.scale(example.model(), policy), None, options(EXACT), state, lowering=None)
    batch = {name: example.feeds[name] for name in plain.inputs}
    bad = [poisoned(batch, value) for value in (np.nan, np.inf, -np.inf, F32_MAX)]
    batches = [batch, batch, bad[0], batch, bad[1], batch, bad[2], bad[3], batch, batch]
    first = plain.state_dict()
    applied = assert_same_steps(plain, lowered, batches)
    plain.load_state_dict(first)
    assert assert_same_steps(portable, plain, batches) == applied
    assert True in applied


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


def linear_sessions(scale: float, factor: float = 1 / 12, **policy: float) -> tuple[gs.Session, gs.Session, Arrays]:
    """Sessions on `w.next = w - dw / 8`, where the first cotangent is `factor` times the error, and a batch."""
    model = linear_step(
        "u = Mul(rate, dw) w_next = Sub(w, u)", outputs="float[4,3] w_next", constants="float rate = {0.125}"
    )
    model.graph.initializer[0].CopyFrom(onnx.numpy_helper.from_array(np.float32(factor), "two_over_n"))
    model = onnx.shape_inference.infer_shapes(model, strict_mode=True)
    result = gs.scale(model, gs.DynamicLossScale(scale, 2, **policy), updates={"w_next": "w"})
    feeds = feeds_for(model)
    state = {"w": feeds.pop("w")}
    plain, lowered, nodes = plain_and_lowered(result, state, ALWAYS)
    assert policy or ("bound-gradients", "If") in nodes
    return plain, lowered, feeds


@pytest.mark.parametrize(
    ("policy", "divided"), [({}, 2), ({"multiplier": 3.0}, 4), ({"min_loss_scale": 0.5}, 2)], ids=str
)
def test_gradients_that_only_the_optimizer_reads(policy: dict[str, float], divided: int) -> None:
    """Gradients of biases are divided; gradients of contractions too, where the scale is no power of two."""
    example = load_example("pytorch/mlp_momentum")
    result = gs.scale(example.model(), gs.DynamicLossScale(1024.0, 2, **policy))
    nodes = lowered_nodes(result)
    assert nodes["unscale-gradients", "Div"] == divided
    assert ("bound-gradients", "If") in nodes
    assert not {("merge-probes", "MatMul"), ("check-finite", "ReduceSum")} & {*nodes}  # no gradient is probed
    # Without bounds, too, one branch has the whole update of the state.
    nodes = lowered_nodes(result, Thresholds(branch_elements=0))
    assert nodes["select-update", "If"] == 1 and ("guard-updates", "Where") not in nodes
    plain, lowered, batch = linear_sessions(1024.0, **policy)
    assert_same_steps(plain, lowered, [batch] * 5)


@pytest.mark.parametrize("name", ["swapped", "swapped by products"])
def test_states_that_are_swapped_keep_their_guards(name: str) -> None:
    """The branches would read what they write."""
    nodes = lowered_nodes(CASES[name].scaled("dynamic", "onnx"), Thresholds(branch_elements=0))
    assert nodes["guard-updates", "Where"] == 2


@pytest.mark.parametrize(("size", "overflows"), [(1.0, False), (1e15, False), (1e18, False), (1e25, True)], ids=str)
def test_large_batches_are_skipped_where_the_scaled_gradient_overflows(size: float, overflows: bool) -> None:
    """The bound is exceeded long before the gradient overflows: in between, the gradient itself is read."""
    skipped = []
    for scale in (1.0, 1024.0, 2.0**60, 2.0**127):
        plain, lowered, batch = linear_sessions(scale)
        large = {name: array * np.float32(size) for name, array in batch.items()}
        applied = assert_same_steps(plain, lowered, [large, large, batch, large])
        skipped.append(not applied[0])
    assert skipped == sorted(skipped)
    assert skipped[0] == overflows and skipped[-1] == (size > 1)


def test_a_scale_below_one_that_was_loaded() -> None:
    """Without it the first cotangent would overflow."""
    plain, lowered, batch = linear_sessions(1024.0, factor=1e3)
    for session in (plain, lowered):
        session.load_state_dict({**session.state_dict(), "current_loss_scale": np.float32(2.0**-30)})
    large = {"x": batch["x"] * np.float32(1e-20), "t": batch["t"] * np.float32(1e37)}
    assert assert_same_steps(plain, lowered, [large]) == [True]


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
    assert MergeProbes().lower(Step(graph=graph, loss=values[0], model=ir.Model(graph, ir_version=10)))
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
NOTHING = "".join(f", float[4,4] {name} = {{{', '.join(16 * '0')}}}" for name in ("nothing", "zero44"))


def run_both(model: onnx.ModelProto, bad: dict[str, float]) -> tuple[list[bool], Counter[tuple[str | None, str]]]:
    """Train both sessions on good batches and one with bad numbers; what was applied, and what the session runs."""
    model = onnx.shape_inference.infer_shapes(model, strict_mode=True)
    result = gs.scale(model, gs.DynamicLossScale(1024.0, 3), updates={"w_next": "w"})
    feeds = feeds_for(model, **({"ids": np.arange(8) % 3} if "ids" in str(model.graph.input) else {}))
    state = {"w": feeds.pop("w")}
    wrong = {name: np.array(array) for name, array in feeds.items()}
    for name, value in bad.items():
        wrong[name].reshape(-1)[-1] = value
    plain, lowered, nodes = plain_and_lowered(result, state, ALWAYS)
    return assert_same_steps(plain, lowered, [feeds, feeds, wrong, feeds]), nodes


@pytest.mark.parametrize("bad", [{}, {"x": np.inf}, {"t": np.nan}, {"x": 1e20}, {"t": F32_MAX}], ids=str)
def test_a_gradient_that_is_a_sum_of_contractions(bad: dict[str, float]) -> None:
    model = onnx.parser.parse_model(HEAD.format("float[8,4] x, float[8,4] t, float[4,4] w", NUMBERS, TIED))
    applied, nodes = run_both(model, bad)
    assert (nodes["bound-gradients", "ReduceL1"], nodes["unscale-gradients", "Div"]) == (0, 1)  # it is read itself
    assert applied == [True, True, not bad, True]


@pytest.mark.parametrize(
    "zeros", ["zeros = Identity(nothing)", "zeros = Mul(z, zero)", "zeros = Mul(w, zero)", "zeros = MatMul(z, zero44)"]
)
@pytest.mark.parametrize("bad", [{}, {"z": np.inf}, {"v": np.nan}], ids=str)
def test_the_gradient_of_a_table(zeros: str, bad: dict[str, float]) -> None:
    """0 * inf is NaN: zeros that are a product may be none."""
    inputs = "int64[8] ids, float[4,4] v, float[4,4] z, float[8,4] t, float[4,4] w"
    model = onnx.parser.parse_model(HEAD.format(inputs, NUMBERS + NOTHING, zeros + TABLE))
    applied, nodes = run_both(model, bad)
    is_bounded = "Identity" in zeros
    assert (nodes["bound-gradients", "ReduceL1"], nodes["unscale-gradients", "Div"]) == (is_bounded, not is_bounded)
    assert (("bound-gradients", "ReduceSum") in nodes) is not is_bounded
    assert applied == [True, True, not bad or ("z" in bad and "(z," not in zeros), True]


@pytest.mark.parametrize(
    ("shape", "sums"), [((700, 800), 2), ((70, 80), 1), ((20000, 32), 1), ((800, 10, 70), 2)], ids=str
)
def test_large_gradients_are_summed_up_by_rows(shape: tuple[int, ...], sums: int) -> None:
    graph = ir.Graph([], [], nodes=[], opset_imports={"": 20})
    value = ir.Value(name="dw", shape=ir.Shape(shape), type=ir.TensorType(ir.DataType.FLOAT))
    build = ScalarBuilder(Editor(graph), BoundGradients.name, dtype=ir.DataType.FLOAT, shape=())
    add_sum(build, value, Thresholds())
    assert [node.op_type for node in graph] == [*sums * ["ReduceSum"], "Abs"]


def test_a_weight_beside_many_counters_keeps_its_one_buffer() -> None:
    names = [f"c{i}" for i in range(20)]
    model = linear_step(
        "u = Mul(rate, dw)  w_next = Sub(w, u) " + " ".join(f"{name}_next = Add({name}, one)" for name in names),
        inputs="float[4,3] w, " + ", ".join(f"float {name}" for name in names),
        outputs="float[4,3] w_next, " + ", ".join(f"float {name}_next" for name in names),
        constants="float rate = {0.125}, float one = {1}",
    )
    feeds = feeds_for(model)
    states = {name: feeds[name] for name in ("w", *names)}
    # Shapes must be known: a sum of unknown shapes could fail, and would stay out of the branch.
    model = onnx.shape_inference.infer_shapes(model)
    result = gs.scale(model, gs.DynamicLossScale(1024.0, 2), updates={f"{name}_next": name for name in states})
    plain, lowered, nodes = plain_and_lowered(result, states)
    assert ("bound-gradients", "If") in nodes
    for session in (plain, lowered):
        now, then = buffers(session)
        assert then["w"] is now["w"]
