"""One rank ends in some way at its third step, and the others go on: HOW WAY, HOW one of `with`, `bare` and `train`.

`with` and `bare` train a ReplicatedSession in a `with` block, and without one; `train` is the command, in the present
folder. VICTIM is the rank, 1 by default.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Callable
from typing import NoReturn

import numpy as np

STEPS = 40
VICTIM = int(os.environ.get("VICTIM", "1"))


def fail() -> NoReturn:
    raise LookupError("the data of this rank is gone")


def end_by(number: int) -> None:
    os.kill(os.getpid(), number)


WAYS: dict[str, Callable[[], object]] = {
    "exception": fail,
    "no memory": lambda: np.empty(1 << 60, np.uint8),
    "sys.exit(3)": lambda: sys.exit(3),
    "sys.exit(0)": lambda: sys.exit(0),
    "sys.exit(text)": lambda: sys.exit("no more data here"),
    "os._exit(3)": lambda: os._exit(3),
    "os._exit(0)": lambda: os._exit(0),
    "SIGSEGV": lambda: ctypes.string_at(0),
    "SIGKILL": lambda: end_by(signal.SIGKILL),
    "SIGTERM": lambda: end_by(signal.SIGTERM),
    "SIGABRT": os.abort,
    "KeyboardInterrupt": lambda: end_by(signal.SIGINT),
}


def train_session(way: Callable[[], object], closes: bool) -> None:
    from mpi4py import MPI

    import graphscale as gs
    from tests.replicas.steps import DIGITS, digits_batches, digits_state, scaled

    def train(session: gs.ReplicatedSession) -> None:
        for number in range(STEPS):
            if number == 2 and MPI.COMM_WORLD.rank == VICTIM:
                way()
            session.step(batch)

    step, (batch,) = scaled(DIGITS), digits_batches(1, 8)
    session = gs.ReplicatedSession(step, MPI.COMM_WORLD, state=digits_state(step), timeout=20)
    if closes:
        with session:
            train(session)
    else:
        train(session)


def train_command(way: Callable[[], object]) -> None:
    from graphscale.cli import main
    from graphscale.training.loop import Trainer

    step = Trainer._step

    def ending(trainer: Trainer) -> object:
        from mpi4py import MPI

        if trainer.steps == 2 and MPI.COMM_WORLD.rank == VICTIM:
            way()
        return step(trainer)

    Trainer._step = ending  # type: ignore[assignment, method-assign]
    sys.argv = ["graphscale", "train", "step.onnx", "--data", "data.npz", "--state", "state.npz", "--timeout", "20"]
    sys.argv += ["--learning-rate", "0.05", "--batch-size", "24", "--max-steps", str(STEPS), "--checkpoint-dir", "kept"]
    main()


if __name__ == "__main__":
    how, chosen = sys.argv[1], WAYS[sys.argv[2]]
    if how == "train":
        train_command(chosen)
    else:
        train_session(chosen, closes=how == "with")
