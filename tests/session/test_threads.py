"""A session in several threads: every result is one of some serial order. Copies and forks, too."""

from __future__ import annotations

import copy
import functools
import multiprocessing
import os
import pickle
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import graphscale as gs
from graphscale.errors import SessionError
from tests.conftest import Arrays, assert_all_same_bits
from tests.session.dangerous import CASES
from tests.session.dangerous import batches as linear_batches
from tests.session.digits import DIGITS, batch, first_state, make, refused

pytestmark = pytest.mark.sample(1)

THREADS, STEPS = 4, 12
POLICY = gs.DynamicLossScale(2.0**15, increment_period=2)  # the scale moves in each order differently

Make = Callable[[], gs.Session]


def of_digits(target: str, **options: Any) -> Make:
    result = gs.scale(DIGITS, POLICY, target=target, telemetry=True)
    return lambda: gs.Session(result, state=first_state(), **options)


def digits_batches(count: int) -> Iterator[Arrays]:
    for seed in range(count):
        feeds = batch(seed=seed)
        feeds["images"][0, 0] = np.inf if seed % 7 == 3 else 1
        yield feeds


# The steps that are lowered for a CPU, as they are scaled, written in place, and with two buffers that take turns.
KINDS: dict[str, tuple[Callable[[], Make], Callable[[int], Any]]] = {
    "lowered": (lambda: of_digits("onnx"), digits_batches),
    "plain": (lambda: of_digits("onnx", lowering=None), digits_batches),
    "in place": (lambda: of_digits("ort-training"), digits_batches),
    "two buffers": (
        lambda: lambda: gs.Session(CASES["metric"].scaled(POLICY, "onnx")),
        lambda count: linear_batches(count, bad=[3, 10]),
    ),
}
each_kind = pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=pytest.mark.training if kind == "in place" else ()) for kind in KINDS]
)


def in_threads(*functions: Callable[[], None]) -> None:
    """Run functions in threads of their own, all at once; raise what one of them raises."""
    errors: list[BaseException] = []
    begin = threading.Barrier(len(functions))

    def run(function: Callable[[], None]) -> None:
        begin.wait()
        try:
            function()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(function,)) for function in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads), "a thread hangs"
    if errors:
        raise errors[0]


class Numbered(dict[str, Any]):
    """Feeds that know their number, which is no feed."""

    def __init__(self, feeds: Arrays, number: int) -> None:
        super().__init__(feeds)
        self.number = number


def bits(result: Any) -> bytes:
    return b"".join(np.asarray(value).tobytes() for _, value in sorted(result.items()))


@each_kind
def test_steps_of_several_threads_are_those_of_some_order(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    opened, many = KINDS[kind]
    make_session = opened()
    all_batches = list(many(THREADS * STEPS))
    session, found, order, states = make_session(), dict[int, bytes](), list[int](), list[Arrays]()
    run = session._run

    def noting(plan: Any, feeds: Any) -> Any:
        result = run(plan, feeds)
        order.append(feeds.number)
        return result

    def train(first: int) -> None:
        for number in range(first, len(all_batches), THREADS):
            result = session.step(Numbered(all_batches[number], number=number))
            found[number] = bits(result)

    def watch() -> None:
        for _ in range(STEPS):
            states.append(session.state_dict())
            assert session.loss_scale > 0

    monkeypatch.setattr(session, "_run", noting)
    in_threads(*(functools.partial(train, first) for first in range(THREADS)), watch)
    assert sorted(order) == list(range(len(all_batches)))
    replay = make_session()
    seen = {bits(replay.state_dict())}
    for number in order:
        assert bits(replay.step(all_batches[number])) == found[number], f"step {number} in the order {order}"
        seen.add(bits(replay.state_dict()))
    assert_all_same_bits(session.state_dict(), replay.state_dict())
    assert all(bits(state) in seen for state in states), "a state was read in the middle of a step"


@pytest.mark.parametrize("kind", ["lowered", "two buffers"])
def test_state_that_is_loaded_while_others_train_is_never_torn(kind: str, tmp_path: Path) -> None:
    """A state that is read is all of one time, and the files of both are whole."""
    opened, many = KINDS[kind]
    session = opened()()
    before = {name: np.full_like(array, 1) for name, array in session.state_dict().items()}
    session.load_state_dict(before)
    session.save_state(tmp_path / "loaded.safetensors")
    all_batches = list(many(STEPS))

    def train() -> None:
        for feeds in all_batches:
            session.step(feeds)

    def load() -> None:
        for _ in range(STEPS):
            session.load_state(tmp_path / "loaded.safetensors")

    def save() -> None:
        for i in range(STEPS):
            session.save_state(tmp_path / f"{i}.safetensors")

    in_threads(train, load, save)
    # Each file is the loaded state after some batches that follow each other.
    replay, possible = opened()(), set[bytes]()
    for first in range(STEPS):
        replay.load_state_dict(before)
        possible.add(bits(replay.state_dict()))
        for feeds in all_batches[first:]:
            replay.step(feeds)
            possible.add(bits(replay.state_dict()))
    for i in range(STEPS):
        replay.load_state(tmp_path / f"{i}.safetensors")
        assert bits(replay.state_dict()) in possible


def test_a_session_that_is_closed_while_others_train() -> None:
    session = make()

    def train() -> None:
        for seed in range(10_000):
            try:
                session.step(batch(seed=seed % 3))
            except SessionError as error:
                if str(error) == "the session is closed":
                    return
                raise
        raise AssertionError("it is not closed")

    in_threads(train, train, session.close)


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_session_cannot_be_copied(duplicate: Callable[[gs.Session], Any]) -> None:
    session = make()
    words = ("a Session cannot be copied or pickled", "state_dict and load_state_dict, or save_state and load_state")
    with refused(SessionError, words):
        duplicate(session)
    with refused(SessionError, words):
        copy.deepcopy({"of": [session]})
    # The hint is right.
    session.step(batch())
    other = make()
    other.load_state_dict(session.state_dict())
    assert bits(other.step(batch(seed=2))) == bits(session.step(batch(seed=2)))


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, lambda value: pickle.loads(pickle.dumps(value))])
def test_results_and_scaled_models_can_be_copied(duplicate: Callable[[Any], Any]) -> None:
    session, scaled = make(), gs.scale(DIGITS, POLICY)
    result = session.step(batch())
    twin = duplicate(result)
    assert (bits(twin), twin.applied, twin.stuck) == (bits(result), result.applied, result.stuck)
    again = gs.Session(duplicate(scaled), state=first_state())
    assert bits(again.step(batch())) == bits(gs.Session(scaled, state=first_state()).step(batch()))
    assert duplicate(scaled.report).to_dict() == scaled.report.to_dict()


@pytest.mark.full
@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_a_forked_process_is_refused_and_the_first_one_goes_on() -> None:
    """Even where a thread was in the middle of a step as the process forked."""
    session, twin = make(), make()
    receive, send = multiprocessing.Pipe(duplex=False)
    calls: dict[str, Callable[[], Any]] = {
        "step": lambda: session.step(batch()),
        "state_dict": session.state_dict,
        "load_state_dict": lambda: session.load_state_dict({}),
        "loss_scale": lambda: session.loss_scale,
    }
    with session._access:
        child = os.fork()
        if child == 0:
            signal.alarm(20)
            said = {}
            for name, call in calls.items():
                try:
                    call()
                except SessionError as error:
                    said[name] = str(error)
            session.close()
            send.send(said)
            os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    said = receive.recv()
    assert set(said) == set(calls)
    for text in said.values():
        assert f"was made in the process {os.getpid()}, and a fork of it cannot use it" in text
    assert bits(session.step(batch())) == bits(twin.step(batch()))
