"""One training step of JAX as an ONNX file: forward, backward and optimizer."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from graphscale.errors import ExportError
from graphscale.exporters.export_report import ExportReport, compare_steps
from graphscale.exporters.requirements import require
from graphscale.exporters.step_file import complete_step, unique_names
from graphscale.files import model_files
from graphscale.files.writing import check_output

__all__ = ["export_step"]

_STEPS = 2  # compared ones: moments take part from the second on


def export_step(
    step_function: Callable[..., Any],
    state: Any,
    batch: Any,
    path: str | os.PathLike[str] = "step.onnx",
    *,
    hyperparameters: Mapping[str, Any] | None = None,
    losses: Sequence[str] = ("loss",),
    dynamic_batch: bool | None = None,
) -> ExportReport:
    """Write a training step of JAX as one ONNX file, if ONNX Runtime computes the same from it as JAX."""
    require("jax", ("jax", "jax"), ("jax2onnx", "jax2onnx"))
    import jax

    from graphscale.exporters.jax.step_function import FlatStep
    from graphscale.exporters.jax.tracing_steps import dynamic_inputs, to_onnx

    target = check_output(path)
    step = FlatStep.make(step_function, state, batch, hyperparameters or {}, losses)
    unique_names([*step.arrays, *step.outputs])
    dynamic = [] if dynamic_batch is False else dynamic_inputs(step)
    notes = []
    try:
        model, errors = _export(step, dynamic)
    except ExportError as error:
        if dynamic_batch or not dynamic:
            raise
        model, errors = _export(step, [])
        notes.append(f"the length of the batch is fixed: {error}")
    model_files.save(model, target)
    return ExportReport(
        path=os.fspath(path),
        framework=f"JAX {jax.__version__}",
        nodes=len(model.graph),
        inputs=tuple(step.fed),
        states=len(step.pairs),
        steps=_STEPS,
        errors=errors,
        notes=tuple(notes),
    )


def _export(step: Any, dynamic: Sequence[str]) -> tuple[ir.Model, dict[str, float]]:
    import jax

    from graphscale.exporters.jax.tracing_steps import to_onnx

    model = to_onnx(step, dynamic)
    complete_step(
        model,
        step.state.arrays,
        step.pairs,
        losses=step.losses,
        metrics=[name for name in step.results if name not in step.losses],
        documentation=f"Training step exported from JAX {jax.__version__}.",
    )
    run = jax.jit(step.run)
    errors = compare_steps(model, step.fed, step.state.arrays, step.pairs, _reference(step, run, step.fed, _STEPS))
    if dynamic:
        longer = {
            name: np.concatenate([value, value[:1]]) if name in dynamic else value for name, value in step.fed.items()
        }
        compare_steps(model, longer, step.state.arrays, step.pairs, _reference(step, run, longer, 1))
    return model, errors


def _reference(step: Any, run: Callable[..., Any], fed: Mapping[str, Any], count: int) -> list[dict[str, Any]]:
    """Run the step in JAX; return its outputs."""
    state, found = step.state.arrays, []
    for _ in range(count):
        values = run(*fed.values(), *state.values())
        outputs = dict(zip(step.outputs, map(np.asarray, values), strict=True))
        found.append(outputs)
        state = {name: outputs[output] for output, name in step.pairs.items()}
    return found
