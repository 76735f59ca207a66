"""Comparison of an exported step, run by ONNX Runtime, with JAX's own steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import onnx_ir as ir
from jax.extend.core import jaxpr_as_fun

from graphscale.errors import ExportError, one_line
from graphscale.exporters.comparison import Comparison, OwnStep
from graphscale.exporters.jax.step_function import FlatStep
from graphscale.exporters.jax.wide_jaxpr import widen_jaxpr
from graphscale.files.tensor_files import Arrays
from graphscale.graph.widening import widen

__all__ = ["compare"]

_Step = Callable[..., Any]


def compare(
    step: FlatStep, model: ir.Model, batches: Sequence[tuple[Arrays, int]]
) -> tuple[dict[str, float], list[str]]:
    """Compare an exported step with JAX.

    The gradients are inside the step: rounding that an optimizer magnifies looks like that of a gradient, and
    weights from float16 gradients prove little. So a step with float16 is compared twice, once with float32 in
    place of float16, in the file and in JAX.

    Args:
        step: the step.
        model: the export.
        batches: a value for each input that is no state, and the number of steps to make with it.

    Returns:
        The largest error of each output without numbers that rounding decides, relative to the largest number of the
        tensor, and notes for the user.

    Raises:
        ExportError: ONNX Runtime refuses the export, or computes something else, or rounding decides all numbers; JAX
            cannot run the step, or its own results are not finite.
    """
    names = step.outputs if _uses_float16(model) else ()
    comparison = Comparison(model, _own(step, jax.jit(step.run), dict.fromkeys(names, "float16")))
    notes = []
    if names:
        twin = model.clone()
        widen(twin.graph, ir.DataType.FLOAT, [ir.DataType.FLOAT16])
        precise = Comparison(
            twin, _own(step, jax.jit(_widened(step)), {}, "with float32 in place of float16, for a comparison")
        )
        for fed, count in batches:
            precise.compare([_convert(fed)] * count, _convert(step.state.arrays))
        comparison.excused |= precise.excused
        notes.append(
            f"with float32 in place of float16, ONNX Runtime and JAX are within {max(precise.errors.values()):.1e} of "
            "each other"
        )
    for fed, count in batches:
        comparison.compare([fed] * count, step.state.arrays)
    return comparison.errors, [*comparison.notes, *notes]


def _own(step: FlatStep, run: _Step, precision: Mapping[str, str], form: str = "") -> OwnStep:
    def call(number: int, batch: Arrays, state: Arrays, _: Arrays) -> Arrays:
        try:
            found = run(*batch.values(), *state.values())
        except Exception as error:  # of JAX's compiler, or of a primitive
            reason = one_line(next(iter(str(error).splitlines()), ""))
            raise ExportError(
                f"JAX cannot run the step {form or f'on {jax.default_backend()}'}: {type(error).__name__}: {reason}; "
                f"{'' if form else 'export it where it runs, or '}write this part of the step with other operations"
            ) from error
        return dict(zip(step.outputs, map(np.asarray, found), strict=True))

    return OwnStep("JAX", call, step.pairs, step.losses, precision=precision)


def _widened(step: FlatStep) -> _Step:
    """Return a step with float32 in place of float16."""

    def run(*values: Any) -> Any:
        own = step.arrays.values()
        specs = [jax.ShapeDtypeStruct(x.shape, array.dtype) for x, array in zip(values, own, strict=True)]
        return jaxpr_as_fun(widen_jaxpr(jax.make_jaxpr(step.run)(*specs), np.float32, [np.float16]))(*values)

    return run


def _uses_float16(model: ir.Model) -> bool:
    values = [*model.graph.inputs, *(value for node in model.graph.all_nodes() for value in node.outputs)]
    return any(value.dtype == ir.DataType.FLOAT16 for value in values)


def _convert(values: Arrays) -> Arrays:
    return {name: value.astype(np.float32) if value.dtype == np.float16 else value for name, value in values.items()}
