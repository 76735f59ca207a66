"""The graphs of models/, and wide ones, scaled in all ways that kinds of damage need."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

import graphscale as gs
from benchmarks.mutation.wide_step import wide_step
from graphscale.passes import AddTelemetry, Autocast
from graphscale.policy import presets

__all__ = ["INSIDE", "MODELS", "SCALINGS", "TARGETS", "WIDE", "Scaled"]

_FOLDER = Path(__file__).resolve().parents[2] / "models"
WIDE = {"a wide step": 512, "a narrow step": 96}  # by the width of their hidden layer
MODELS = (*sorted(p.relative_to(_FOLDER).with_suffix("").as_posix() for p in _FOLDER.glob("*/*.onnx")), *WIDE)
INSIDE = "ort-training, state inside"
TARGETS = ("onnx", "ort-cuda", "ort-training", "ort-training-cuda", INSIDE, "ort-cpu")

SCALINGS: dict[str, Mapping[str, Any]] = {
    "plain": {},
    "telemetry": {"telemetry": True},
    "measured": {"telemetry": AddTelemetry(ranges=True, every=3, activations=True)},
    "scaled loss": {"expose_scaled_loss": True},
    "fixed": {"loss_scale": gs.FixedLossScale(1024.0), "skip_nonfinite": True},
    "megatron": {"loss_scale": presets.megatron()},
    "deepspeed": {"loss_scale": presets.deepspeed()},
    "torch": {"loss_scale": presets.torch()},
    "float16": {"autocast": "float16"},
    "emulated": {"autocast": Autocast(emulate=True)},
    "kept": {},
}


class Scaled:
    """A graph of models/, scaled as it is asked for.

    Args:
        name: its name.
    """

    def __init__(self, name: str) -> None:
        self._originals = {inside: _original(name, inside) for inside in (False, True)}
        self._made: dict[tuple[str, str], ir.Model | None] = {}
        original = self._originals[False]
        assert original is not None
        self._kept = [s.output for s in gs.inspect(original).state if s.output is not None][:1]

    def original(self, target: str) -> ir.Model:
        """The graph that is scaled for a target."""
        original = self._originals[target == INSIDE]
        assert original is not None
        return original

    def hints(self, scaling: str) -> dict[str, Any]:
        """The options of a scaling that verify needs."""
        return {"keep": self._kept} if scaling == "kept" else {}

    def model(self, target: str, scaling: str) -> ir.Model | None:
        """The scaled graph; None if there is none."""
        if self._originals[target == INSIDE] is None or (scaling == "kept" and not self._kept):
            return None
        if (target, scaling) not in self._made:
            options = {**SCALINGS[scaling], **self.hints(scaling)}
            name = "ort-training" if target == INSIDE else target
            try:
                model = gs.scale(self.original(target), target=name, **options).model
            except gs.GraphscaleError:  # such as a graph that is in float16 already
                model = None
            assert model is None or isinstance(model, ir.Model)
            self._made[target, scaling] = model
        return self._made[target, scaling]


def _original(name: str, inside: bool) -> ir.Model | None:
    """A graph of models/; with its state inside, and a metric that reads a weight late, or None if it carries none."""
    if name in WIDE:
        return None if inside else wide_step(WIDE[name])
    model = ir.load(_FOLDER / f"{name}.onnx")
    if not inside:
        return model
    state = {s.input for s in gs.inspect(model).state if s.output is not None}
    values = np.load(_FOLDER / f"{name}.npz")
    held = [v for v in model.graph.inputs if v.name in state and v.dtype is ir.DataType.FLOAT and v.name in values]
    for value in held:
        value.const_value = ir.tensor(values[value.name], name=value.name)
        model.graph.register_initializer(value)
    if not held:
        return None
    # All of the weight, twice: a reader that nothing else of the step depends on.
    outputs = [ir.Value(name="metric", type=ir.TensorType(ir.DataType.FLOAT))]
    model.graph.append(ir.node("Mul", [held[0], held[0]], outputs=outputs, name="metric"))
    model.graph.outputs.extend(outputs)
    return model
