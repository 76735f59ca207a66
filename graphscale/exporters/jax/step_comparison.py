"""Comparison of an exported step, run by ONNX Runtime, with JAX's own steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import onnx_ir as ir
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

from graphscale.errors import ExportError, one_line
from graphscale.exporters.export_report import TOLERANCE, compare_steps
from graphscale.exporters.jax.step_function import FlatStep
from graphscale.exporters.jax.wide_jaxpr import widen_jaxpr
from graphscale.files.tensor_files import Arrays
from graphscale.graph.widening import widen

__all__ = ["compare"]


def compare(step: FlatStep, model: ir.Model, fed: Arrays, count: int) -> tuple[dict[str, float], list[str]]:
    """Compare an exported step with JAX.

    An optimizer such as Adam divides a gradient by its own size: the rounding of a gradient near zero decides the
    direction of its weight, and weights from float16 gradients prove nothing. So a step with float16 is compared twice.
    With float32 in place of float16, in the file and in JAX, the tolerance is that of float32. Without the replacement,
    an output may be as far from JAX's as a multiple of the distance between both steps of JAX.

    Args:
        step: the step.
        model: the export.
        fed: a value for each input that is no state.
        count: number of steps.

    Returns:
        The largest error of each output within the tolerance, relative to the largest number of the tensor, and notes
        for the user.

    Raises:
        ExportError: ONNX Runtime refuses the export, or computes something else.
    """
    first = step.state.arrays

    def trace() -> ClosedJaxpr:
        return jax.make_jaxpr(step.run)(*fed.values(), *first.values())

    try:
        expected = _run(step, step.run, fed, first, count)
    except Exception as error:  # of JAX's compiler
        reason = one_line(next(iter(str(error).splitlines()), ""))
        raise ExportError(
            f"JAX cannot run the step on {jax.default_backend()}: {type(error).__name__}: {reason}; export it where it "
            "runs, or write this part of the step with others"
        ) from error
    if not _uses_float16(model):
        errors = _compare_precisely(step, model, fed, first, expected, trace)
        return _split(errors, TOLERANCE["float32"], "the gradient of these is zero but for rounding")
    traced = trace()
    wide, twin = widen_jaxpr(traced, np.float32, [np.float16]), model.clone()
    widen(twin.graph, ir.DataType.FLOAT, [ir.DataType.FLOAT16])
    wide_fed, wide_first = _convert(fed, np.float16, np.float32), _convert(first, np.float16, np.float32)
    precise = _run(step, jaxpr_as_fun(wide), wide_fed, wide_first, count)
    in_float32 = _compare_precisely(step, twin, wide_fed, wide_first, precise, lambda: wide)
    errors = compare_steps(model, fed, first, step.pairs, expected, precise, "float16")
    largest = max(in_float32.values(), default=0.0)
    close, notes = _split(errors, TOLERANCE["float16"], "the rounding of float16 decides these")
    notes.append(f"with float32 in place of float16, ONNX Runtime and JAX are within {largest:.1e} of each other")
    return close, notes


def _compare_precisely(
    step: FlatStep,
    model: ir.Model,
    fed: Arrays,
    first: Arrays,
    expected: list[Arrays],
    trace: Callable[[], ClosedJaxpr],
) -> dict[str, float]:
    """Compare an export; where it differs, by more than the difference between JAX's steps and those in float64."""
    try:
        return compare_steps(model, fed, first, step.pairs, expected)
    except ExportError as error:
        refusal = error
    exact = _run_exactly(step, trace(), fed, first, len(expected))
    if exact is None:
        raise refusal
    return compare_steps(model, fed, first, step.pairs, expected, exact)


def _split(errors: dict[str, float], tolerance: float, reason: str) -> tuple[dict[str, float], list[str]]:
    """Return the errors within a tolerance, and a note with the outputs of the others."""
    far = [name for name, error in errors.items() if error > tolerance]
    close = {name: error for name, error in errors.items() if name not in far}
    return close, [f"{reason}, in JAX as well: {', '.join(far)}"] if far else []


def _uses_float16(model: ir.Model) -> bool:
    values = [*model.graph.inputs, *(value for node in model.graph.all_nodes() for value in node.outputs)]
    return any(value.dtype == ir.DataType.FLOAT16 for value in values)


def _run(step: FlatStep, function: Callable[..., Any], fed: Arrays, state: Arrays, count: int) -> list[Arrays]:
    """Run a function from inputs to outputs in JAX, count times; return its outputs."""
    run, found = jax.jit(function), []
    for _ in range(count):
        outputs = dict(zip(step.outputs, map(np.asarray, run(*fed.values(), *state.values())), strict=True))
        state = {name: outputs[output] for output, name in step.pairs.items()}
        found.append(outputs)
    return found


def _run_exactly(step: FlatStep, traced: ClosedJaxpr, fed: Arrays, state: Arrays, count: int) -> list[Arrays] | None:
    """Run the step in float64; None where it cannot."""
    narrow, wide = np.float32, np.float64
    try:
        with jax.enable_x64(True):
            function = jaxpr_as_fun(widen_jaxpr(traced, wide, [narrow]))
            return _run(step, function, _convert(fed, narrow, wide), _convert(state, narrow, wide), count)
    except Exception:  # a primitive that has no float64
        return None


def _convert(values: Arrays, narrow: Any, wide: Any) -> Arrays:
    return {name: value.astype(wide) if value.dtype == narrow else value for name, value in values.items()}
