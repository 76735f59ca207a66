"""Trainings of 200 steps: of the folders of models/ort, and of its graphs, with a host that applies the gradients."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np
import onnx_ir as ir

import graphscale as gs
from graphscale.ort.fusing import fuse
from tests.conftest import MODELS, Arrays, make_session

__all__ = ["FOLDERS", "GRAPHS", "POLICY", "RATE", "Training", "folder_batches", "train_folder", "train_graph"]

STEPS = 200
POLICY = gs.DynamicLossScale(2.0**10, 30)
RATE = np.asarray(0.01, dtype=np.float32)
ORT = MODELS / "ort"
GRAPHS = tuple(sorted(path.stem for path in ORT.glob("*.onnx")))
# The runtime refuses the optimizer model of the other one, which is the same but for its versions.
FOLDERS = tuple(sorted(path.name for path in (ORT / "artifacts").iterdir() if path.name != "digits_adamw_ir14"))
# Steps with an infinite input, at either end of a window of two, and one behind the other.
_POISONED = (3, 40, 41, 120)
_BUFFER = "_grad.accumulation.buffer"


@dataclasses.dataclass
class Training:
    """The record of a training.

    Attributes:
        losses: the loss of each step.
        scales: the loss scale after each step.
        applied: the flag `all_finite` of each step.
        arrays: the trained values; of a graph also the last gradients.
    """

    losses: list[float] = dataclasses.field(default_factory=list)
    scales: list[float] = dataclasses.field(default_factory=list)
    applied: list[bool] = dataclasses.field(default_factory=list)
    arrays: Arrays = dataclasses.field(default_factory=dict)


def folder_batches(name: str, count: int = STEPS) -> Iterator[Arrays]:
    """Yield the two batches of a folder in turn, some with an infinite number."""
    stored = np.load(ORT / "artifacts" / name / "sample.npz")
    for i in range(count):
        prefix = f"{('first', 'second')[i % 2]}/"
        yield _poison({key.removeprefix(prefix): stored[key] for key in stored.files if key.startswith(prefix)}, i)


def train_folder(name: str, target: str, steps: int = STEPS, **options: Any) -> Training:
    """Train the fused step of a folder in a plain session; the options are those of `scale`."""
    step = fuse(ORT / "artifacts" / name)
    scaled = gs.scale(step.model, POLICY, loss=step.loss, updates=step.updates, target=target, **options)
    run = _Run(scaled, {})
    for batch in folder_batches(name, steps):
        run.step({**batch, "learning_rate": RATE})
    run.training.arrays = {state: run.held[state] for state in step.updates.values() if "momentum" not in state}
    return run.training


def train_graph(name: str, target: str) -> Training:
    """Train a graph in a plain session, by gradient descent in the host on sums of two batches."""
    stored = np.load(ORT / f"{name}.npz")
    values = {key: stored[key] for key in stored.files if "/" not in key}
    weights = [key.removesuffix(_BUFFER) for key in values if key.endswith(_BUFFER)]
    trained = {weight: values.pop(weight) for weight in weights}
    sums = {f"{weight}{_BUFFER}": np.zeros_like(array) for weight, array in trained.items()}
    running = {key: values[key].copy() for key in values if "running" in key}
    batch = {key: value for key, value in values.items() if key not in {*sums, *running, "lazy_reset_grad"}}
    run = _Run(gs.scale(ORT / f"{name}.onnx", POLICY, target=target), {**sums, **running})
    outputs: Arrays = {}
    for i in range(STEPS):
        reset = {"lazy_reset_grad": np.asarray([i % 2 == 0])} if weights else {}
        feeds = {**batch, **trained}
        if "input" in feeds:
            feeds["input"] = feeds["input"] * np.float32(1 + i / STEPS)
        outputs = run.step({**_poison(feeds, i), **reset})
        if i % 2:
            trained = {key: value - RATE * run.held[f"{key}{_BUFFER}"] for key, value in trained.items()}
    gradients = {key: value for key, value in outputs.items() if key.endswith("_grad")}
    run.training.arrays = {**trained, **run.held, **gradients}
    return run.training


def _poison(batch: Arrays, step: int) -> Arrays:
    # Of token numbers none is infinite.
    name = next((name for name in ("input", "head.bias") if name in batch), None)
    if step in _POISONED and name is not None:
        batch[name] = batch[name].copy()
        batch[name].reshape(-1)[5] = np.inf
    return batch


class _Run:
    """A plain session with the state that a host holds: fed back, or written in place by the session."""

    def __init__(self, scaled: gs.ScaledModel, held: Arrays) -> None:
        self.held, self.training = held, Training()
        self._loss, self._pairs = scaled.report.loss, [s for s in scaled.report.state if s.output is not None]
        self._session = make_session(ir.to_proto(scaled.model))
        self._names = [value.name for value in self._session.get_outputs()]

    def step(self, feeds: Arrays) -> Arrays:
        """Run a step, and return its outputs."""
        values = dict(zip(self._names, self._session.run(self._names, {**feeds, **self.held}), strict=True))
        self.held.update({state.input: values[state.output] for state in self._pairs})
        self.training.losses.append(float(values[self._loss]))
        self.training.scales.append(float(values["current_loss_scale.next"]))
        self.training.applied.append(bool(values["all_finite"]))
        return values
