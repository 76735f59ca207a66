"""Record the trainings anew, with the kernels and training sessions of onnxruntime-training.

python -m tests.ort.long_runs.record
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np

import graphscale as gs
from tests.ort.artifacts.training_session import start
from tests.ort.long_runs.recorded import write_trainings
from tests.ort.long_runs.trainings import FOLDERS, GRAPHS, ORT, POLICY, Training, folder_batches, train_graph


def train_session(name: str) -> Training:
    """Train a scaled folder in a training session, `Module` and `Optimizer`."""
    training = Training()
    with tempfile.TemporaryDirectory() as out:
        gs.scale_artifacts(ORT / "artifacts" / name, Path(out) / name, POLICY)
        session = start(Path(out) / name)
        for batch in folder_batches(name):
            training.losses.append(float(session.train(batch)[0]))
            session.step()
            scale, _, finite = session.loss_scale()
            training.scales.append(scale)
            training.applied.append(bool(finite))
        training.arrays = {key: value for key, value in session.weights().items() if np.size(value)}
    return training


if __name__ == "__main__":
    graphs = {f"graphs/{name}": train_graph(name, "ort-training") for name in GRAPHS}
    write_trainings({**graphs, **{f"folders/{name}": train_session(name) for name in FOLDERS}})
