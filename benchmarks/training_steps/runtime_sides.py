"""The sides of one ONNX Runtime: steps of its gradient builder with the training build's kernels, and lowered."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
from loops import ByBinding, options
from onnxruntime.capi import _pybind_state as runtime

from training_steps.onnx_sides import Loop
from training_steps.sides import PLAIN, Side, Sides
from training_steps.workloads import RATES, Arrays, Workload

__all__ = ["LOWERED", "maker", "version"]

LOWERED = "lowered"


def version() -> str:
    """The release of ONNX Runtime."""
    return f"onnxruntime{'-training' if hasattr(runtime, 'Module') else ''} {ort.__version__}"


def maker(threads: int, folder: Path, lowered: bool) -> Callable[[Workload], Sides]:
    """Return the function that makes the sides of a workload from the steps of `gradient_steps.py` in a folder.

    The plain side is the step with the kernels, or the lowered one if it is to be alone.
    """
    parts = {PLAIN: "lowered"} if lowered else {PLAIN: "kernels", LOWERED: "lowered"}

    def make(workload: Workload) -> Sides:
        sides: dict[str, Side] = {}
        for side, part in parts.items():
            model = onnx.load(folder / f"{workload.name}.{part}.onnx")
            carried, first = _states(model, workload.weights())
            sides[side] = Loop(ByBinding(model, carried, first, options(threads, spinning=False)))
        rate = np.array(RATES[workload.optimizer], np.float32)
        return Sides(sides, [_named(batch) | {"learning_rate": rate} for batch in workload.batches()])

    return make


def _states(model: onnx.ModelProto, weights: Mapping[str, np.ndarray]) -> tuple[dict[str, str], Arrays]:
    """Return `{input name: output name}` of the states of a step, and the first value of each."""
    outputs = {value.name for value in model.graph.output}
    carried, first = {}, {}
    for value in model.graph.input:
        if (output := f"{value.name}.next") in outputs:
            kind = value.type.tensor_type
            shape = [dim.dim_value for dim in kind.shape.dim]
            dtype = onnx.helper.tensor_dtype_to_np_dtype(kind.elem_type)
            carried[value.name] = output
            first[value.name] = weights.get(value.name, np.full(shape, value.name.endswith("running_var"), dtype))
    return carried, first


def _named(batch: Arrays) -> Arrays:
    """A batch with a class for each row of scores."""
    return {**batch, "target": batch["target"].reshape(-1)}
