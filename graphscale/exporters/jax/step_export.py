"""One training step of JAX as an ONNX file: forward pass, backward pass and optimizer."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx_ir as ir

from graphscale.errors import ExportError
from graphscale.exporters.export_report import ExportReport
from graphscale.exporters.python_state import Values, notes_on, read_values
from graphscale.exporters.requirements import require
from graphscale.exporters.step_file import complete_step, unique_names
from graphscale.files import saving
from graphscale.files.writing import check_output

if TYPE_CHECKING:
    from graphscale.exporters.jax.step_function import FlatStep

__all__ = ["export_step"]

_HINTS = re.compile("[;:] (pass dynamic_batch=False|nothing is written)")
_STEPS = 2  # compared ones: moments take part from the second on


def export_step(
    step_function: Callable[..., Any],
    state: Any,
    batch: Any,
    path: str | os.PathLike[str] = "step.onnx",
    *,
    hyperparameters: Mapping[str, Any] | None = None,
    losses: Sequence[str] = ("loss",),
    dynamic_batch: bool | Sequence[str] | None = None,
) -> ExportReport:
    """Write a training step of JAX as one ONNX file, if ONNX Runtime computes the same from it as JAX.

    Each array of the state is an input with its value in the file, and its next value is an output, both named by the
    path in the tree: `params.dense.kernel` and `params.dense.kernel.next`. Positions in tuples are left out of a name
    where it is unique without them. Each array of the batch is an input of its name; an array without a name is
    `batch`, or `batch.0`. The roles are in the metadata, so that `gs.scale(path)` needs no hint. Types are JAX's:
    without jax_enable_x64, integers are int32 and floating-point numbers float32. A random key is its uint32 words.

    Args:
        step_function: `step(state, batch)`, with or without jax.jit. It returns (new state, loss), (new state, loss,
            metrics), (new state, (loss, metrics)), or (new state, results) with a mapping of the losses and metrics.
        state: nested containers of arrays: weights, the state of optax, counters, statistics, random keys. Dicts,
            tuples, named tuples, and classes that are registered with JAX, as those of flax and equinox. Leaves that
            are no arrays stay as they are.
        batch: containers of arrays in the same way.
        path: the file. A state above 1 GB goes to `NAME.data` beside it.
        hyperparameters: keyword arguments of the function, numbers by name, as `{"learning_rate": 1e-3}`: inputs of the
            step, one number each.
        losses: names of the losses, if the step returns a mapping.
        dynamic_batch: True for a batch of any length, False for one of this length, None for any length if JAX and
            jax2onnx can: else the report says why not. The first axis of each array of the batch with the most frequent
            length has any length; a list of names chooses other arrays.

    Returns:
        The report of the comparison: two steps of ONNX Runtime against two of JAX, and one with a longer batch. Print
        it.

    Raises:
        ExportError: jax2onnx has no translation for a primitive of the step, ONNX Runtime computes something else, or
            an argument does not fit. Nothing is written.
    """
    require("jax", ("jax", "jax"), ("jax2onnx", "jax2onnx"))
    import jax

    from graphscale.exporters.jax.step_function import FlatStep
    from graphscale.exporters.jax.tracing_steps import choose_dynamic

    target = check_output(path)
    before = _read_state(step_function)
    step = FlatStep.make(step_function, state, batch, hyperparameters or {}, losses)
    python_notes = notes_on(before, _read_state(step_function))
    unique_names([*step.arrays, *step.outputs])
    dynamic, notes = choose_dynamic(step, dynamic_batch), [*step.notes, *python_notes]
    refusal = None
    try:
        model, errors, found = _export(step, dynamic)
    except ExportError as error:
        if dynamic_batch is not None or not dynamic:
            raise
        refusal = _HINTS.sub("", str(error))
    if refusal is not None:
        model, errors, found = _export(step, [])
        notes.append(f"the length of the batch is fixed, as by dynamic_batch=False: {refusal}")
    saving.save(model, target)
    return ExportReport(
        path=os.fspath(path),
        framework=f"JAX {jax.__version__}",
        nodes=len(model.graph),
        inputs=tuple(step.fed),
        states=len(step.pairs),
        steps=_STEPS,
        errors=errors,
        notes=(*notes, *found),
    )


def _read_state(step_function: Callable[..., Any]) -> Values:
    """Read the Python values of a step function, through jax.jit."""
    return read_values({"": getattr(step_function, "__wrapped__", step_function)}, lambda _: None)


def _export(step: FlatStep, dynamic: Sequence[str]) -> tuple[ir.Model, dict[str, float], list[str]]:
    """Return the file's model, the largest error of each output, and notes for the user."""
    import jax

    from graphscale.exporters.jax.step_comparison import compare
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
    fed = step.fed
    batches = [(fed, _STEPS)]
    if dynamic:
        longer = {name: np.concatenate([fed[name], fed[name][:1]]) for name in dynamic}
        batches.append((fed | longer, 1))
    return model, *compare(step, model, batches)
