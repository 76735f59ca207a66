"""An interrupt in the middle of a step, such as Ctrl-C: the state is that of a whole number of steps."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Iterator
from types import FrameType
from typing import Any

import numpy as np
import pytest

import graphscale as gs
from graphscale.errors import SessionError
from tests.conftest import Arrays, assert_all_same_bits, with_initializers
from tests.session.plain import options
from tests.session.test_close import LARGE

pytestmark = pytest.mark.skipif(
    not hasattr(signal, "setitimer") or threading.current_thread() is not threading.main_thread(),
    reason="takes a signal for Ctrl-C, in the main thread",
)
FEEDS = {"x": np.ones((8, 4), np.float32), "t": np.ones((8, 3), np.float32)}
WEIGHT = np.ones([dim.dim_value for dim in LARGE.graph.input[2].type.tensor_type.shape.dim], np.float32)
TARGETS = ["onnx", pytest.param("ort-training", marks=pytest.mark.training)]
Steps = tuple[str, list[Arrays], float]


class Interrupt(BaseException):
    """As KeyboardInterrupt, without an effect on pytest."""


@contextlib.contextmanager
def interrupt_after(seconds: float) -> Iterator[None]:
    """Interrupt this thread, as Ctrl-C would."""

    def handler(number: int, frame: FrameType | None) -> None:
        raise Interrupt

    before = signal.signal(signal.SIGALRM, handler)
    try:
        signal.setitimer(signal.ITIMER_REAL, seconds)
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def make(target: str) -> gs.Session:
    """A step on 100 MB, on one thread."""
    model = LARGE if target == "onnx" else with_initializers(LARGE, {"w": WEIGHT})
    result = gs.scale(model, target=target, updates={"w_next": "w"}, gradients=["dw"])
    return gs.Session(result, session_options=options(), state={"w": WEIGHT} if target == "onnx" else {})


@pytest.fixture(scope="module", params=TARGETS)
def steps(request: pytest.FixtureRequest) -> Steps:
    """A target, the state after each of some steps, and the seconds that a step takes."""
    with make(request.param) as session:
        states, durations = [session.state_dict()], []
        for _ in range(6):
            begin = time.perf_counter()
            session.step(FEEDS)
            durations.append(time.perf_counter() - begin)
            states.append(session.state_dict())
    return request.param, states, min(durations)


@pytest.mark.sample(1)
@pytest.mark.parametrize("fetch", [None, []], ids=["all outputs", "no outputs"])
@pytest.mark.parametrize("part", [0.4, 1.3])
def test_the_state_is_that_of_whole_steps(part: float, fetch: Any, steps: Steps) -> None:
    target, states, duration = steps
    session = make(target)

    def train() -> None:
        with interrupt_after(part * duration):
            while True:
                session.step(FEEDS, fetch=fetch)

    with pytest.raises(Interrupt):
        train()
    done = session.good_steps
    assert done + 1 < len(states)
    assert_all_same_bits(session.state_dict(), states[done])
    session.step(FEEDS)
    assert_all_same_bits(session.state_dict(), states[done + 1])


@pytest.mark.full
def test_a_fixed_scale_and_no_outputs(steps: Steps) -> None:
    """Nothing is told of the step but its state, which is in two buffers, or in place without a check."""
    target, states, duration = steps
    model = LARGE if target == "onnx" else with_initializers(LARGE, {"w": WEIGHT})
    result = gs.scale(model, 1024, target=target, updates={"w_next": "w"}, gradients=["dw"])
    session = gs.Session(result, session_options=options(), state={"w": WEIGHT} if target == "onnx" else {})

    def train() -> None:
        with interrupt_after(1.3 * duration):
            while True:
                session.step(FEEDS, fetch=[])

    with pytest.raises(Interrupt):
        train()
    with contextlib.suppress(SessionError):
        state = session.state_dict()
        assert any((state["w"] == whole["w"]).all() for whole in states)
    session.load_state_dict({"w": WEIGHT})
    session.step(FEEDS, fetch=[])
    assert_all_same_bits(session.state_dict(), {"w": states[1]["w"]})


@pytest.mark.full
@pytest.mark.parametrize("seconds", [0.005, 0.03])
def test_loading_is_all_or_nothing(seconds: float, steps: Steps) -> None:
    """Or the session knows that it was not, and wants to be loaded again."""
    target, states, _ = steps
    session = make(target)

    def load() -> None:
        with interrupt_after(seconds):
            for number in range(10_000):
                session.load_state_dict(states[number % 2])

    with pytest.raises(Interrupt):
        load()
    with contextlib.suppress(SessionError):
        state = session.state_dict()
        assert any(all((state[name] == value).all() for name, value in whole.items()) for whole in states[:2])
    session.load_state_dict(states[0])
    assert_all_same_bits(session.state_dict(), states[0])
    session.step(FEEDS)
    assert_all_same_bits(session.state_dict(), states[1])
