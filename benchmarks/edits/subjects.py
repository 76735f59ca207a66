"""The scaled graphs to be edited: all graphs of models/, with targets and options varied."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx

import graphscale as gs
from graphscale.passes import Autocast
from models.zoo import pack

__all__ = ["SETTINGS", "Subject", "subjects"]

ROOT = Path(__file__).resolve().parents[2]
_ZOO = "models/zoo/"
# Steps of the zoo that have bodies.
_WITH_BODIES = (
    *("optimizer-in-if.sgd-flag", "two-optimizers-in-if.regression", "backward-in-if.gradients"),
    *("steps-in-loop.shuffled", "steps-in-scan.momentum-names", "optax-novograd.square", "wrap-skip-large.square"),
    *("optax-backtracking.square", "wrap-conditionally-mask.square", "wrap-multi-steps-skipping.square"),
)

# The arguments of `scale`; "held" is for state that lives in the session.
SETTINGS: dict[str, Callable[[], dict[str, Any]]] = {
    "telemetry": lambda: {"telemetry": True},
    "plain": dict,
    "ort-training": lambda: {"target": "ort-training", "telemetry": True},
    "ort-training, held": lambda: {"target": "ort-training"},
    "megatron": lambda: {"loss_scale": gs.presets.megatron(), "telemetry": True},
    "hysteresis, flag": lambda: {"loss_scale": _stuck("flag"), "target": "ort-training"},
    "hysteresis, accept": lambda: {"loss_scale": _stuck("accept"), "telemetry": True},
    "deepspeed": lambda: {"loss_scale": gs.presets.deepspeed()},
    "fixed, checked": lambda: {"loss_scale": 1024, "skip_nonfinite": True, "telemetry": True},
    "fixed": lambda: {"loss_scale": 3},
    "autocast": lambda: {"autocast": Autocast("float16", emulate=True)},
    "exposed": lambda: {"expose_scaled_loss": True, "telemetry": True},
}


def _stuck(reaction: str) -> gs.DynamicLossScale:
    return gs.DynamicLossScale(
        2.0**10,
        3,
        2.0,
        min_loss_scale=2.0**-3,
        max_loss_scale=2.0**40,
        growth_delay="first",
        hysteresis=2,
        hysteresis_refill="good",
        max_consecutive_skips=4,
        on_stuck=reaction,
        arithmetic="float64",
    )


@dataclasses.dataclass(frozen=True)
class Subject:
    """A graph with the settings of its scaling.

    Attributes:
        name: the graph's path in the repository, without the suffix.
        setting: one of `SETTINGS`.
    """

    name: str
    setting: str

    def __str__(self) -> str:
        return f"{self.name} ({self.setting})"

    @functools.cached_property
    def original(self) -> onnx.ModelProto:
        model = onnx.ModelProto.FromString(self._content)
        if self.setting == "ort-training, held":
            state = {s.input for s in gs.inspect(model).state if s.output is not None}
            for value in model.graph.input:
                if value.name in state and value.name in self.sample:
                    model.graph.initializer.append(onnx.numpy_helper.from_array(self.sample[value.name], value.name))
        return model

    @functools.cached_property
    def scaled(self) -> onnx.ModelProto:
        result = gs.scale(self.original, **SETTINGS[self.setting]()).model
        assert isinstance(result, onnx.ModelProto)
        return result

    @functools.cached_property
    def _content(self) -> bytes:
        if self.name.startswith(_ZOO):
            return pack.read(self.name.removeprefix(_ZOO))[0]
        return (ROOT / f"{self.name}.onnx").read_bytes()

    @functools.cached_property
    def sample(self) -> dict[str, np.ndarray]:
        """A value for each input of the original: that beside it, or a random one."""
        path, found, rng = ROOT / f"{self.name}.npz", {}, np.random.default_rng(0)
        if path.exists():
            with np.load(path) as arrays:
                found = {name: arrays[name] for name in arrays.files}
        for value in onnx.ModelProto.FromString(self._content).graph.input:
            if value.name not in found:
                tensor = value.type.tensor_type
                array = rng.standard_normal([dim.dim_value or 4 for dim in tensor.shape.dim])
                dtype = onnx.helper.tensor_dtype_to_np_dtype(tensor.elem_type)
                found[value.name] = np.asarray(array if dtype.kind == "f" else np.abs(array)).astype(dtype)
        return found

    @functools.cached_property
    def weight(self) -> float:
        """Weight of this graph in the choice of subjects: small ones have more."""
        return 1 / max(3_000, len(self._content)) ** 0.7

    @functools.cached_property
    def is_possible(self) -> bool:
        """The settings suit the graph."""
        try:
            return bool(self.scaled.graph.node)
        except gs.GraphscaleError:
            return False

    def verified(self, model: onnx.ModelProto) -> bool:
        """A model is verified against the original, by proof alone."""
        return gs.verify(self.original, model, runs=0).ok


def subjects() -> list[Subject]:
    """All of them, in a fixed order."""
    paths = [*(ROOT / "models").glob("*/*.onnx"), *(ROOT / "graphscale" / "demo").glob("*.onnx")]
    names = sorted(path.relative_to(ROOT).with_suffix("").as_posix() for path in paths)
    names += [f"{_ZOO}{name}" for name in _WITH_BODIES]
    return [Subject(name, setting) for name in names for setting in SETTINGS]
