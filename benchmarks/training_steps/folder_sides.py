"""The sides of a training session of ONNX Runtime: an artifact folder, plain and scaled by graphscale.

A session is driven as `onnxruntime.training.api` does it, on the same runtime, without PyTorch.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import onnxruntime as ort
from loops import options
from onnxruntime.capi import _pybind_state as runtime

import graphscale as gs
from training_steps.device_bench import next_state
from training_steps.sides import PLAIN, Side, Sides
from training_steps.workloads import INCREMENT_PERIOD, INITIAL_LOSS_SCALE, RATES, Arrays, Workload

__all__ = ["SCALED", "maker"]

SCALED = "scaled"

Batch = Mapping[str, np.ndarray]


class Folder:
    """Module and Optimizer on a folder: a step is `module(...)`, `optimizer.step()` and `module.lazy_reset_grad()`."""

    def __init__(self, folder: Path, rate: float, made: ort.SessionOptions) -> None:
        device = runtime.OrtDevice(runtime.OrtDevice.cpu(), runtime.OrtDevice.default_memory(), 0)
        self._state = runtime.load_checkpoint(str(folder / "checkpoint"))
        self._module = runtime.Module(str(folder / "training_model.onnx"), self._state, None, device, made)
        self._optimizer = runtime.Optimizer(str(folder / "optimizer_model.onnx"), self._state, device, made)
        self._optimizer.set_learning_rate(rate)
        self._inputs = list(self._module.input_names(True))
        self._names = set(self._state.parameter_names())

    def step(self, batch: Batch) -> float:
        fetches = runtime.OrtValueVector()
        self._module.train_step([batch[name] for name in self._inputs], fetches)
        self._optimizer.optimizer_step()
        self._module.lazy_reset_grad()
        return float(fetches[0].numpy())

    def _value(self, name: str) -> np.ndarray:
        return np.array(self._state.get_parameter(name).data.numpy())

    def weights(self) -> Arrays:
        return {name: self._value(name) for name in self._names}

    def loss_scale(self) -> tuple[float, int] | None:
        """The state by the rule after the last window: the folder itself updates it where the next one begins."""
        if "current_loss_scale" not in self._names:
            return None
        before = float(self._value("current_loss_scale")), int(self._value("good_steps"))
        return next_state(before, finite=bool(self._value("window_finite")))


def maker(folder: Path, threads: int, *, spinning: bool) -> Callable[[Workload], Sides]:
    """Return the function that makes the sides of a workload from the folders of `make_artifacts.py` in a folder."""

    def make(workload: Workload) -> Sides:
        plain = folder / f"{workload.name}.artifacts"
        with tempfile.TemporaryDirectory() as temporary:
            scaled = Path(temporary, "scaled")
            result = gs.scale_artifacts(plain, scaled, gs.DynamicLossScale(INITIAL_LOSS_SCALE, INCREMENT_PERIOD))
            if result.report.coverage != 1.0:
                raise ValueError(f"{workload.name}: coverage is {result.report.coverage}")
            sides: dict[str, Side] = {
                side: Folder(path, RATES[workload.optimizer], options(threads, spinning=spinning))
                for side, path in ((PLAIN, plain), (SCALED, scaled))
            }
        return Sides(sides, [_named(batch) for batch in workload.batches()])

    return make


def _named(batch: Arrays) -> Arrays:
    """A batch under the names of the folder: `generate_artifacts` calls the classes `labels`."""
    return {**batch, "labels": batch["target"].reshape(-1)}
