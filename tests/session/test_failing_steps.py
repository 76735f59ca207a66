"""Steps that ONNX Runtime cannot finish, or that are interrupted: the state is unchanged, and the session continues."""

from __future__ import annotations

import contextlib
import itertools
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

import numpy as np
import onnx
import pytest

import graphscale as gs
from graphscale.errors import SessionError
from graphscale.lowering.thresholds import PRODUCTION, Thresholds
from tests.build import linear_step
from tests.conftest import TARGETS, Arrays, assert_all_same_bits, with_initializers
from tests.session.dangerous import ONES, SGD, batches
from tests.session.digits import refused
from tests.session.plain import BY_ROWS, options
from tests.session.test_close import LARGE

pytestmark = pytest.mark.sample(1)

# Each looks something up at `index`, which can be out of range: the forward pass or a metric, of the weight or not.
FAILING = {
    "a metric": ("metric = Gather(table, index)", "float[2] metric"),
    "a metric of the weight": ("metric = Gather(w, index)", "float[2,3] metric"),
    "a metric of the next weight": ("metric = Gather(w_next, index)", "float[2,3] metric"),
    "a metric of the loss": ("a = Gather(table, index)  metric = Mul(a, loss)", "float[2] metric"),
    "a metric of nothing else": ("metric = Gather(table, index)  more = Exp(w)", "float[2] metric, float[4,3] more"),
    "whole numbers": ("metric = Gather(numbers, index)", "int64[2] metric"),
    "flags": ("metric = Gather(flags, index)", "bool[2] metric"),
    "a metric in a branch": (
        """c = Less(loss, large)
        metric = If(c) <then_branch = y() => (float[2] a) {a = Gather(table, index)},
                        else_branch = n() => (float[2] b) {b = Gather(table, index)}>""",
        "float[2] metric",
    ),
    "two metrics": ("metric = Gather(table, index)  m2 = Gather(w, index)", "float[2] metric, float[2,3] m2"),
}
CONSTANTS = """float rate = {0.1}, float large = {100000}, float[5] table = {1, 2, 3, 4, 5},
    int64[5] numbers = {1, 2, 3, 4, 5}, bool[5] flags = {1, 0, 1, 0, 1}"""


def failing_step(name: str) -> onnx.ModelProto:
    more, outputs = FAILING[name]
    model = linear_step(
        f"{SGD}  {more}",
        inputs="float[4,3] w, int64[2] index",
        outputs=f"float[4,3] w_next, {outputs}",
        constants=CONSTANTS,
    )
    return with_initializers(model, {"w": np.arange(12, dtype=np.float32).reshape(4, 3)})


def scaled(name: str, target: str, loss_scale: str | float = "dynamic") -> gs.ScaledModel:
    model = failing_step(name)
    metrics = [entry.name for entry in gs.roles(model).open]
    assert "w_next" not in metrics
    return gs.scale(model, loss_scale, target=target, roles={"metrics": metrics})


def feeds(index: tuple[int, int] = (0, 1), seed: int = 0) -> dict[str, Any]:
    return {**next(batches(1, seed=seed)), "index": np.array(index)}


@pytest.mark.parametrize("loss_scale", ["dynamic", 1024])
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", FAILING)
def test_a_step_that_fails_halfway_leaves_the_state_or_says_that_it_did_not(
    name: str, target: str, loss_scale: str | float
) -> None:
    """With a dynamic scale the state is as before. Without a check, one that is written in place may be torn."""
    session, twin = (gs.Session(scaled(name, target, loss_scale)) for _ in range(2))
    for number in range(3):
        session.step(feeds(seed=number))
        twin.step(feeds(seed=number))
    before = session.state_dict()
    with refused(SessionError, ("could not run", "Gather", "out of data bounds")) as caught:
        session.step(feeds((0, 100)))
    if loss_scale != "dynamic" and target == "ort-training":
        assert "load a state" in str(caught.value)
        for call in (lambda: session.step(feeds()), session.state_dict, lambda: session.save_state("torn")):
            with pytest.raises(SessionError, match="load a state"):
                call()
        session.load_state_dict(before)
    assert_all_same_bits(session.state_dict(), before)
    for number in range(3, 6):
        ours, theirs = session.step(feeds(seed=number)), twin.step(feeds(seed=number))
        assert list(ours) == list(theirs)
        assert_all_same_bits(ours, theirs)
    assert_all_same_bits(session.state_dict(), twin.state_dict())


A = np.ones((4, 3), np.float32)
MISFITS: dict[str, tuple[str, str, str, dict[str, Any], dict[str, Any]]] = {
    "axes": (
        "metric = ReduceSum <keepdims: int = 0> (t, axes)",
        "int64[1] axes",
        "float[n]",
        {"axes": np.array([0])},
        {"axes": np.array([7])},
    ),
    "axes of one name": (
        "metric = Mul(a, b)",
        "float[N,3] a, float[N,3] b",
        "float[N,3]",
        {"a": A, "b": A},
        {"a": A, "b": np.ones((5, 3), np.float32)},
    ),
}


@pytest.mark.parametrize("lowering", [PRODUCTION, BY_ROWS], ids=["as it was", "lowered"])
@pytest.mark.parametrize("name", MISFITS)
def test_a_metric_of_shapes_that_do_not_fit(name: str, lowering: Thresholds) -> None:
    """Only ONNX Runtime sees that; by then no state may have been overwritten."""
    metric, inputs, kind, good, bad = MISFITS[name]
    model = linear_step(
        f"{SGD}  {metric}",
        inputs=f"float[4,3] w, {inputs}",
        outputs=f"float[4,3] w_next, {kind} metric",
        constants="float rate = {0.1}",
    )
    model = with_initializers(onnx.shape_inference.infer_shapes(model), {"w": A})
    session = gs.Session(gs.scale(model, updates={"w_next": "w"}, roles={"metrics": ["metric"]}), lowering=lowering)
    session.step({**ONES, **good})
    before = session.state_dict()
    with pytest.raises(SessionError):
        session.step({**ONES, **bad})
    assert_all_same_bits(session.state_dict(), before)


@pytest.mark.parametrize("target", TARGETS)
def test_nothing_of_onnx_runtime_on_the_terminal(target: str, capfd: pytest.CaptureFixture[str]) -> None:
    """It warns of each initializer that is also an input, and logs the error of a step that fails."""
    session = gs.Session(scaled("a metric", target))
    with pytest.raises(SessionError):
        session.step(feeds((0, 100)))
    session.step(feeds())
    session.close()
    assert capfd.readouterr() == ("", "")


# --- an interrupt, such as Ctrl-C: the state is that of a whole number of steps ---------------------------------------

interrupts = pytest.mark.skipif(
    not hasattr(signal, "setitimer") or threading.current_thread() is not threading.main_thread(),
    reason="takes a signal for Ctrl-C, in the main thread",
)
WEIGHT = np.ones([dim.dim_value for dim in LARGE.graph.input[2].type.tensor_type.shape.dim], np.float32)
Steps = tuple[str, list[Arrays], float]


class Interrupt(BaseException):
    """As KeyboardInterrupt, without an effect on pytest."""


def until_interrupted(seconds: float, act: Callable[[], object]) -> None:
    """Act again and again, until an interrupt comes to this thread, as Ctrl-C would."""

    def handler(number: int, frame: FrameType | None) -> None:
        raise Interrupt

    before = signal.signal(signal.SIGALRM, handler)
    try:
        signal.setitimer(signal.ITIMER_REAL, seconds)
        while True:
            act()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def make(target: str, loss_scale: Any = "dynamic") -> gs.Session:
    """A step on 100 MB, on one thread."""
    model = LARGE if target == "onnx" else with_initializers(LARGE, {"w": WEIGHT})
    result = gs.scale(model, loss_scale, target=target, updates={"w_next": "w"}, gradients=["dw"])
    return gs.Session(result, session_options=options(), state={"w": WEIGHT} if target == "onnx" else {})


@pytest.fixture(scope="module", params=TARGETS)
def steps(request: pytest.FixtureRequest) -> Steps:
    """A target, the state after each of some steps, and the seconds that a step takes."""
    with make(request.param) as session:
        states, durations = [session.state_dict()], []
        for _ in range(6):
            begin = time.perf_counter()
            session.step(ONES)
            durations.append(time.perf_counter() - begin)
            states.append(session.state_dict())
    return request.param, states, min(durations)


@interrupts
@pytest.mark.full
@pytest.mark.parametrize("fetch", [None, []], ids=["all outputs", "no outputs"])
@pytest.mark.parametrize("part", [0.4, 1.3])
def test_the_state_is_that_of_whole_steps(part: float, fetch: Any, steps: Steps) -> None:
    target, states, duration = steps
    session = make(target)

    with pytest.raises(Interrupt):
        until_interrupted(part * duration, lambda: session.step(ONES, fetch=fetch))
    done = session.good_steps
    assert done + 1 < len(states)
    assert_all_same_bits(session.state_dict(), states[done])
    session.step(ONES)
    assert_all_same_bits(session.state_dict(), states[done + 1])


@interrupts
@pytest.mark.full
def test_a_fixed_scale_and_no_outputs(steps: Steps) -> None:
    """A step with its state as its only output, in two buffers, or in place without a check."""
    target, states, duration = steps
    session = make(target, 1024)
    with pytest.raises(Interrupt):
        until_interrupted(1.3 * duration, lambda: session.step(ONES, fetch=[]))
    with contextlib.suppress(SessionError):
        state = session.state_dict()
        assert any((state["w"] == whole["w"]).all() for whole in states)
    session.load_state_dict({"w": WEIGHT})
    session.step(ONES, fetch=[])
    assert_all_same_bits(session.state_dict(), {"w": states[1]["w"]})


@interrupts
@pytest.mark.full
@pytest.mark.parametrize("seconds", [0.005, 0.03])
def test_loading_is_all_or_nothing(seconds: float, steps: Steps) -> None:
    """Or the session knows that it was not, and wants to be loaded again."""
    target, states, _ = steps
    session, turns = make(target), itertools.cycle(states[:2])
    with pytest.raises(Interrupt):
        until_interrupted(seconds, lambda: session.load_state_dict(next(turns)))
    with contextlib.suppress(SessionError):
        state = session.state_dict()
        assert any(all((state[name] == value).all() for name, value in whole.items()) for whole in states[:2])
    session.load_state_dict(states[0])
    assert_all_same_bits(session.state_dict(), states[0])
    session.step(ONES)
    assert_all_same_bits(session.state_dict(), states[1])
