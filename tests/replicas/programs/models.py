"""Trains a step of models/ for some steps, whole and sharded, each replica on a batch of its own: FOLDER NAME."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
from mpi4py import MPI

import graphscale as gs
from tests.conftest import Arrays, load_example
from tests.replicas.steps import scaled, state_of

COMM = MPI.COMM_WORLD
STEPS = 6


def train(name: str, sharded: bool) -> tuple[Arrays, gs.ReplicatedSession]:
    step = scaled(name)
    state = state_of(step, name)
    session = gs.ReplicatedSession(step, COMM, state=state, sharded=sharded, timeout=60)
    sample = {key: value for key, value in load_example(name).feeds.items() if key in session.inputs}
    rng = np.random.default_rng(COMM.rank)
    for number in range(STEPS):
        order = rng.permutation(len(next(iter(sample.values()))))
        feeds = {key: value[order] if value.ndim else value for key, value in sample.items()}
        if number == 3 and COMM.rank == 1:
            feeds = {k: np.full_like(v, np.inf) if v.dtype.kind == "f" else v for k, v in feeds.items()}
        session.step(feeds)
    return session.state_dict(), session


def main(folder: Path, name: str) -> None:
    whole, _ = train(name, sharded=False)
    found, session = train(name, sharded=True)
    held = sum(array.nbytes for array in session._update.session.state_dict().values())
    shares = COMM.gather(held / sum(array.nbytes for array in found.values()))
    if COMM.rank == 0:
        np.savez(folder / "whole.npz", **whole)
        np.savez(folder / "sharded.npz", **found)
        told = {"owners": sum(share > 0.01 for share in shares), "largest_share": max(shares)}
        (folder / "told.json").write_text(json.dumps(told))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
