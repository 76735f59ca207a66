"""Artifact folders, and a training session on them, driven as `onnxruntime.training.api` does it, without PyTorch."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnxruntime.capi import _pybind_state as runtime

from graphscale.lowering.lower_model import lower_step
from graphscale.ort.artifacts import ScaledArtifacts, scale_artifacts
from tests.conftest import MODELS, Arrays
from tests.session.plain import ALWAYS

FOLDERS = MODELS / "ort" / "artifacts"
# As written by generate_artifacts, the optimizer model of the other one has an IR version that the runtime refuses.
LOADABLE = tuple(sorted(path.name for path in FOLDERS.iterdir() if path.name != "digits_adamw_ir14"))

STATES = ("current_loss_scale", "good_steps", "window_finite")
RATE = {"learning_rate": np.asarray(0.01, dtype=np.float32)}


def sample(name: str, batch: str = "first") -> Arrays:
    """A batch for a folder of models/: a value for each user input of the training model."""
    stored = np.load(FOLDERS / name / "sample.npz")
    return {key.removeprefix(f"{batch}/"): stored[key] for key in stored.files if key.startswith(f"{batch}/")}


def batches(name: str, count: int) -> list[Arrays]:
    """The two batches of a folder of models/ in turn."""
    both = [sample(name, which) for which in ("first", "second")]
    return [both[i % 2] for i in range(count)]


def edited(name: str, path: Path, **changes: Callable[[onnx.ModelProto], object]) -> Path:
    """A copy of a folder of models/ in `path`, under the same name, with its models changed: `training_model=...`."""
    folder = path / name
    shutil.copytree(FOLDERS / name, folder)
    for file, change in changes.items():
        model = onnx.load(folder / f"{file}.onnx")
        change(model)
        onnx.save(model, folder / f"{file}.onnx")
    return folder


# A scaled folder plain, lowered, and lowered with bounds and early unscaling for gradients of any size.
FORMS = ("plain", "lowered", "bounded")


def scale_as(form: str, folder: Path, out: Path, loss_scale: Any = "dynamic", **options: Any) -> ScaledArtifacts:
    """`scale_artifacts` in one of the forms."""
    with pytest.MonkeyPatch.context() as patch:
        if form == "bounded":
            patch.setattr(lower_step, "__defaults__", (ALWAYS,))
        return scale_artifacts(folder, out, loss_scale, lower=form != "plain", **options)


class TrainingSession:
    """Module, Optimizer and CheckpointState of one folder.

    Args:
        folder: the artifacts.
        checkpoint: the checkpoint to start from; None for the folder's own.
        evaluates: whether to load the eval model.
    """

    def __init__(self, folder: Path, checkpoint: Path | None = None, evaluates: bool = True) -> None:
        device = runtime.OrtDevice(runtime.OrtDevice.cpu(), runtime.OrtDevice.default_memory(), 0)
        options = ort.SessionOptions()
        options.log_severity_level = 3
        options.intra_op_num_threads = 1
        self.state = runtime.load_checkpoint(str(checkpoint or folder / "checkpoint"))
        evaluation = str(folder / "eval_model.onnx") if evaluates else None
        self.module = runtime.Module(str(folder / "training_model.onnx"), self.state, evaluation, device, options)
        self.optimizer = runtime.Optimizer(str(folder / "optimizer_model.onnx"), self.state, device, options)

    def train(self, feeds: Mapping[str, np.ndarray]) -> list[np.ndarray]:
        """One forward and backward pass: what `module(...)` returns in training mode."""
        fetches = runtime.OrtValueVector()
        self.module.train_step([feeds[name] for name in self.module.input_names(True)], fetches)
        return [np.array(value.numpy()) for value in fetches]

    def evaluate(self, feeds: Mapping[str, np.ndarray]) -> list[np.ndarray]:
        """Return the results of `module(...)` in evaluation mode."""
        fetches = runtime.OrtValueVector()
        self.module.eval_step([feeds[name] for name in self.module.input_names(False)], fetches)
        return [np.array(value.numpy()) for value in fetches]

    def step(self) -> None:
        """`optimizer.step()` and `module.lazy_reset_grad()`: the end of a window."""
        self.optimizer.optimizer_step()
        self.module.lazy_reset_grad()

    def parameters(self) -> Arrays:
        """All parameters, trainable and frozen."""
        return {name: np.array(self.state.get_parameter(name).data.numpy()) for name in self.state.parameter_names()}

    def set(self, name: str, value: np.ndarray) -> None:
        """Give a parameter a value."""
        self.state.get_parameter(name).copy_from(self.state, ort.OrtValue.ortvalue_from_numpy(value)._ortvalue)

    def weights(self) -> Arrays:
        """All parameters but the state of a loss scale."""
        return {name: value for name, value in self.parameters().items() if name not in STATES}

    def gradients(self) -> Arrays:
        """The accumulated gradients of the trainable parameters."""
        found = {name: self.state.get_parameter(name) for name in self.state.parameter_names()}
        return {name: np.array(p.grad.numpy()) for name, p in found.items() if p.requires_grad}

    def loss_scale(self) -> tuple[float, float, float]:
        """`current_loss_scale`, `good_steps` and `window_finite`."""
        scale, count, finite = (float(self.state.get_parameter(name).data.numpy()) for name in STATES)
        return scale, count, finite

    def save(self, path: Path, optimizer: bool = True) -> Path:
        """`CheckpointState.save_checkpoint`, with or without the optimizer's state."""
        runtime.save_checkpoint(self.state, str(path), optimizer)
        return path


def start(folder: Path) -> TrainingSession:
    """A training session with the learning rate of `RATE`."""
    session = TrainingSession(folder, evaluates=False)
    session.optimizer.set_learning_rate(float(RATE["learning_rate"]))
    return session


def train(session: TrainingSession, feeds: Sequence[Arrays]) -> list[float]:
    """An optimizer step for each batch; returns the losses."""
    losses = []
    for batch in feeds:
        losses.append(float(session.train(batch)[0]))
        session.step()
    return losses
