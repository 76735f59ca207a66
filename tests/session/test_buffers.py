"""State written over itself: right numbers despite late readers, and the states with shared buffers."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from onnx.parser import parse_model as parse
from onnx.shape_inference import infer_shapes

import graphscale as gs
from graphscale.analysis.hazards import find_writable_states
from graphscale.graph.marks import PASS_KEY
from graphscale.lowering import lower_model
from graphscale.lowering.delay_update import DelayUpdate
from graphscale.lowering.thresholds import PRODUCTION, Thresholds
from tests.conftest import OPTIMIZATION_LEVELS, TARGETS, Level, load_example
from tests.session.dangerous import CASES, Case, batches
from tests.session.plain import PlainLoop, buffers, first_state, options, shared_states

pytestmark = pytest.mark.sample(1)

STEPS = 6


def differences(
    case: Case, loss_scale: str | float, target: str, level: Level, lowering: Thresholds = PRODUCTION
) -> list[str]:
    """List differences between a session and the loop by hand, whose state never is where the next one is written."""
    result, reference = (case.scaled(loss_scale, t) for t in (target, "onnx"))
    session = gs.Session(result, session_options=options(level), lowering=lowering)
    plain = PlainLoop(reference, {}, level)
    found = []
    for number, feeds in enumerate(batches(STEPS, bad=[2])):
        with np.errstate(invalid="ignore"):
            expected, actual, state = plain.step(feeds), session.step(feeds), session.state_dict()
        assert set(actual) == set(expected)
        pairs = {name: (actual[name], value) for name, value in expected.items()}
        pairs |= {name: (state[name], plain.state[name]) for name in case.updates.values()}
        found += [f"{name} of step {number}" for name, pair in pairs.items() if not agree(*pair, level)]
    return found


def agree(actual: np.ndarray, expected: np.ndarray, level: Level) -> bool:
    """Equal bits; where ONNX Runtime may fuse two graphs in two ways, equal but for rounding."""
    if level is Level.ORT_DISABLE_ALL:
        return actual.tobytes() == expected.tobytes()
    return np.allclose(actual, expected, rtol=1e-4, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("loss_scale", ["dynamic", 1024])
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", CASES)
def test_every_reader_sees_the_state_from_before_the_step(name: str, target: str, loss_scale: str | float) -> None:
    for level in OPTIMIZATION_LEVELS:
        assert differences(CASES[name], loss_scale, target, level) == [], level


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", CASES)
def test_every_reader_does_where_one_node_selects_all_states(name: str, target: str) -> None:
    """As sessions have it for larger states."""
    for level in (Level.ORT_DISABLE_ALL, Level.ORT_ENABLE_ALL):
        assert differences(CASES[name], "dynamic", target, level, Thresholds(branch_elements=0)) == [], level


def test_no_mark_of_a_file_says_who_may_share() -> None:
    text = """<ir_version: 10, opset_import: ["" : 17]> g (float[8,4] x, float[8,4] w, float[64,64] table)
    => (float loss, float[8,4] w_next, float[64,64] table_next)
    <float c = {0.25}, float rate = {0.1}> {
        y = Mul(x, w) squared = Mul(y, y) loss = ReduceMean<keepdims = 0>(squared) dy = Mul(y, c) dw = Mul(x, dy)
        u = Mul(rate, dw) w_next = Sub(w, u) table_next = Transpose<perm = [1, 0]>(table) }"""
    step = gs.scale(infer_shapes(parse(text)), 1024.0, updates={"w_next": "w", "table_next": "table"}).model
    next(node for node in step.graph.node if node.op_type == "Transpose").metadata_props.add(
        key=PASS_KEY, value="select-update"
    )
    state = {"w": np.ones((8, 4), np.float32), "table": np.ones((64, 64), np.float32)}
    with gs.Session(step, state=state) as session:
        assert shared_states(session) == set()


# --- who shares -------------------------------------------------------------------------------------------------------


def free_of_hazards(result: gs.ScaledModel, updates: dict[str, str]) -> set[str]:
    """The states that may share as far as reading too late goes: no node is taken for one that can fail."""
    graph = ir.from_proto(result.model).graph
    inputs, outputs = ({value.name: value for value in values} for values in (graph.inputs, graph.outputs))
    following = {state.input: state.output for state in result.report.state}
    pairs = {inputs[state]: outputs[following[state]] for state in updates.values()}
    return {value.name or "" for value in find_writable_states(graph, pairs, None, lambda node: True)}


@pytest.mark.parametrize("name", CASES)
def test_which_guarded_steps_share(name: str) -> None:
    case = CASES[name]
    assert ("w" in free_of_hazards(case.scaled("dynamic", "onnx"), case.updates)) == case.shares


@pytest.mark.parametrize("name", ["MatMul last", "MatMul then Add", "Gemm last", "swapped", "metric"])
def test_an_unguarded_update_that_reads_what_it_has_written_does_not_share(name: str) -> None:
    """ONNX Runtime makes one Gemm of a MatMul and the Add behind it, which reads rows of the weight again and again."""
    case = CASES[name]
    assert "w" not in free_of_hazards(case.scaled(1024, "onnx"), case.updates)


@pytest.mark.full
@pytest.mark.parametrize("name", ["pytorch/mlp_momentum", "pytorch/attention_adamw_clip", "jax/mlp_adamw_clip"])
def test_the_weights_of_real_steps_share(name: str) -> None:
    """All weights and moments of a guarded step: its state takes its size in memory once."""
    example = load_example(name)
    result = gs.scale(example.model())
    session = gs.Session(result, state=first_state(result, example.feeds))
    arrays = {name for name, value in session.state_dict().items() if value.ndim}
    assert len(arrays) >= 8
    assert arrays <= shared_states(session)


# Whichever other buffers ONNX Runtime shares, with one buffer for all state, these steps are wrong.
WRONG_IF_SHARED = [
    "metric",
    "metric transposed",
    "metric reshaped",
    "metric in If",
    "metric in Loop",
    "through Shape alone",
    "swapped",
    "seen through Cast",
    "seen through float64",
    "seen through times one",
    "seen through Optional",
    "seen through transposed product",
]


@pytest.mark.parametrize("name", WRONG_IF_SHARED)
def test_sharing_everywhere_would_be_wrong(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests above can fail."""
    monkeypatch.setattr(lower_model, "find_writable_states", lambda graph, pairs, *rest: set(pairs))
    # It puts some late readers before the writes, by the way.
    monkeypatch.setattr(DelayUpdate, "lower", lambda self, step: False)
    found = [differences(CASES[name], "dynamic", "onnx", level) for level in OPTIMIZATION_LEVELS]
    assert any(found)


# --- where the state is -----------------------------------------------------------------------------------------------


def addresses(session: gs.Session) -> dict[str, int]:
    return {name: buffer.data_ptr() for name, buffer in buffers(session)[0].items()}


@pytest.mark.full
@pytest.mark.parametrize("target", TARGETS)
def test_state_stays_in_its_one_or_two_buffers(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And a step neither reads nor writes it from Python."""
    import onnxruntime as ort

    example = load_example("pytorch/attention_adamw_clip")
    result = gs.scale(example.model(), target=target)
    session = gs.Session(result, state=first_state(result, example.feeds))
    feeds = {name: example.feeds[name] for name in session.inputs}
    seen: dict[str, set[int]] = {name: set() for name in session.state_dict()}
    shared = shared_states(session)

    def forbidden(*arguments: Any, **keywords: Any) -> None:
        raise AssertionError("state crosses to the host")

    for name in ("numpy", "ortvalue_from_numpy", "update_inplace"):
        monkeypatch.setattr(ort.OrtValue, name, forbidden)
    for _ in range(5):
        session.step(feeds)
        for name, address in addresses(session).items():
            seen[name].add(address)
    monkeypatch.undo()
    in_place = {state.input for state in result.report.state if state.output is None}
    for name, found in seen.items():
        assert len(found) == (1 if name in shared | in_place else 2), name
    assert session.good_steps == 5
