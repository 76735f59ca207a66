"""Trains the digits step on replicas, and writes the results: FOLDER OPTIONS(json).

Options: steps, first, batch, overflow_at, target, session (keywords of ReplicatedSession), save_at, load.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
from mpi4py import MPI

import graphscale as gs
from tests.replicas.steps import DIGITS, digits_batches, digits_state, scaled


def main(folder: Path, options: dict[str, Any]) -> None:
    comm = MPI.COMM_WORLD
    policy = gs.DynamicLossScale(2.0**15, increment_period=20)
    step = scaled(DIGITS, policy, target=options.get("target", "onnx"))
    batches = digits_batches(options["steps"], options["batch"], options.get("overflow_at", ()))
    state = digits_state(step) if comm.rank == 0 else None
    share = options["batch"] // comm.size
    own = slice(comm.rank * share, (comm.rank + 1) * share)
    rows = []
    with gs.ReplicatedSession(step, comm, state=state, timeout=60, **options.get("session", {})) as session:
        if "load" in options:
            assert session.load_state(folder / options["load"]) == {"note": "kept"}
        begin = session.traffic.messages, session.traffic.bytes
        for number, batch in enumerate(batches[options.get("first", 0) :]):
            feeds = {**batch, "images": batch["images"][own], "labels": batch["labels"][own]}
            result = session.step(feeds)
            rows.append([session.loss_scale, session.good_steps, result.applied, float(result["loss"])])
            assert result["logits"].shape == (share, 10)
            if number == options.get("save_at"):
                session.save_state(folder / "state.safetensors", {"note": "kept"})
        final = session.state_dict()
        traffic = {"messages": session.traffic.messages - begin[0], "bytes": session.traffic.bytes - begin[1]}
        session.export(folder / "trained.onnx")
    digests = comm.gather({name: array.tobytes() for name, array in final.items()})
    if comm.rank == 0:
        assert all(digest == digests[0] for digest in digests), "the replicas have different state"
        np.savez(folder / f"final-{comm.size}.npz", **final)
        (folder / f"rows-{comm.size}.json").write_text(json.dumps({"rows": rows, "traffic": traffic}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
