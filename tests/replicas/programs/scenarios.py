"""Failures among replicas: FOLDER SCENARIO. Each rank writes the message that it gets to FOLDER/said-RANK."""

from __future__ import annotations

import copy
import os
import pickle
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from mpi4py import MPI

import graphscale as gs
from tests.replicas.steps import DIGITS, digits_batches, digits_state, scaled

COMM = MPI.COMM_WORLD
LAST = COMM.rank == COMM.size - 1


def batch() -> dict[str, Any]:
    return digits_batches(1, 8)[0]


def opened(policy: Any = None, name: str = DIGITS, **options: Any) -> gs.ReplicatedSession:
    step = scaled(name, policy)
    state = digits_state(step) if name == DIGITS else None
    return gs.ReplicatedSession(step, COMM, state=state, timeout=60, **options)


def then_trains(session: gs.ReplicatedSession, spoil: Callable[[dict[str, Any]], Any]) -> None:
    """A step that is spoilt on the last rank, after which the others go on as if it had not been."""
    before = session.state_dict()
    feeds = batch()
    try:
        session.step(spoil(feeds) if LAST else feeds)
    except gs.GraphscaleError as error:
        text = str(error)
    for name, array in session.state_dict().items():
        assert array.tobytes() == before[name].tobytes(), name
    assert session.step(batch()).applied
    session.close()
    raise gs.GraphscaleError(text)


def other_outputs() -> None:
    with opened() as session:
        session.step(batch(), fetch=["los" if LAST else "loss"])


def unreadable_state() -> None:
    with opened() as session:
        session.load_state("missing.safetensors")


def state_of_another() -> None:
    with opened() as session:
        session.load_state_dict({"w": np.zeros(3)})


def scale_that_is_none(**options: Any) -> None:
    with opened(**options) as session:
        session.load_state_dict({**session.state_dict(), "current_loss_scale": np.float32(np.nan)})


def exception_on_one() -> None:
    with opened() as session:
        if LAST:
            raise LookupError("the data of this rank is gone")
        session.step(batch())


def hang_on_one() -> None:
    session = gs.ReplicatedSession(scaled(DIGITS), COMM, state=digits_state(scaled(DIGITS)), timeout=3)
    if LAST:
        time.sleep(60)
    session.step(batch())


def died_on_one() -> None:
    session = opened()
    session.step(batch())
    if LAST:
        os.kill(os.getpid(), signal.SIGKILL)
    session.step(batch())


def one_after_the_other() -> None:
    """Sessions that one rank closes early: its notices are no news to the next session, nor to a slow rank."""
    for _ in range(3):
        with opened() as session:
            session.step(batch())
            if not LAST:
                time.sleep(1.5)
    kept = [opened(), opened()]
    for session in kept * 2:
        session.step(batch())
    raise gs.GraphscaleError(f"{len(kept)} sessions side by side, never closed")


def late_start() -> None:
    """The others look around for a rank that comes late, while the communicator is still being made."""
    if LAST:
        time.sleep(2.5)
    with opened() as session:
        session.step(batch())
    raise gs.GraphscaleError("all have come")


def duplicated() -> None:
    """Copies, pickles and a fork; the session goes on."""
    texts = []
    with opened() as session:
        for duplicate in (copy.copy, copy.deepcopy, pickle.dumps):
            try:
                duplicate(session)
            except gs.GraphscaleError as error:
                texts.append(str(error))
        receive, send = os.pipe()
        if (child := os.fork()) == 0:
            try:
                session.step(batch())
            except gs.GraphscaleError as error:
                os.write(send, str(error).encode())
            session.close()
            os._exit(0)
        os.waitpid(child, 0)
        texts.append(os.read(receive, 4096).decode().replace(str(os.getpid()), "PID"))
        assert session.step(batch()).applied
    raise gs.GraphscaleError(" ".join(dict.fromkeys(texts)))


def second_thread() -> None:
    """While one thread is in, another one is refused, and has touched nothing."""
    texts: list[str] = []

    def step() -> None:
        try:
            session.step(batch())
        except gs.GraphscaleError as error:
            texts.append(str(error))

    with opened() as session:
        with session._access:
            thread = threading.Thread(target=step)
            thread.start()
            thread.join()
        assert session.step(batch()).applied
    raise gs.GraphscaleError(*texts)


SCENARIOS: dict[str, Callable[[], object]] = {
    "policies": lambda: opened(gs.DynamicLossScale(2.0**10 if LAST else 2.0**12)),
    "kinds_of_policy": lambda: opened(1024.0 if LAST else None),
    "graphs": lambda: opened(name="pytorch/mlp_momentum" if LAST else DIGITS),
    "bucket_sizes": lambda: opened(bucket_bytes=1000 if LAST else 2000),
    "stages": lambda: opened(stages=2 if LAST else 1),
    "world_sizes": lambda: opened(replicas=5 if LAST else COMM.size),
    "too_few": lambda: opened(replicas=COMM.size + 1),
    "bad_argument_on_one": lambda: opened(bucket_bytes="none" if LAST else "1MiB"),
    "missing_file_on_one": lambda: gs.ReplicatedSession("missing.onnx" if LAST else scaled(DIGITS), COMM),
    "unscaled": lambda: gs.ReplicatedSession("models/pytorch/mlp_momentum.onnx", COMM),
    "telemetry_in_shares": lambda: gs.ReplicatedSession(
        scaled(DIGITS, telemetry=True), COMM, state=digits_state(scaled(DIGITS)), sharded=True
    ),
    "no_state_in_shares": lambda: gs.ReplicatedSession(scaled(DIGITS), COMM, sharded=True),
    "no_state": lambda: gs.ReplicatedSession(scaled(DIGITS), COMM, state={}),
    "missing_feed": lambda: then_trains(opened(), lambda feeds: {key: feeds[key] for key in feeds if key != "images"}),
    "misshapen_feed": lambda: then_trains(opened(), lambda feeds: {**feeds, "images": feeds["images"][:, :63]}),
    "failing_step": lambda: then_trains(opened(), lambda feeds: {**feeds, "labels": feeds["labels"][:3]}),
    "failing_stage": lambda: then_trains(opened(stages=3), lambda feeds: {**feeds, "labels": feeds["labels"][:3]}),
    "other_learning_rate": lambda: then_trains(opened(), lambda feeds: {**feeds, "learning_rate": np.float32(0.1)}),
    **{f.__name__: f for f in (other_outputs, unreadable_state, state_of_another, scale_that_is_none)},
    "scale_that_is_none_in_shares": lambda: scale_that_is_none(sharded=True),
    **{f.__name__: f for f in (one_after_the_other, late_start, duplicated, second_thread)},
    **{f.__name__: f for f in (exception_on_one, hang_on_one, died_on_one)},
}


def main(folder: Path, scenario: str) -> None:
    try:
        SCENARIOS[scenario]()
    except gs.GraphscaleError as error:
        (folder / f"said-{COMM.rank}").write_text(f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
