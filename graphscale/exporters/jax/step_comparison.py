"""Comparison of an exported step, run by ONNX Runtime, with JAX's own steps."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
import onnx_ir as ir
from jax.extend.core import jaxpr_as_fun

from graphscale.errors import ExportError, one_line
from graphscale.exporters.export_report import TOLERANCE, compare_steps
from graphscale.exporters.jax.step_function import FlatStep
from graphscale.exporters.jax.wide_jaxpr import widen_jaxpr
from graphscale.exporters.rounding import DRAWS, disturb
from graphscale.files.tensor_files import Arrays
from graphscale.graph.widening import widen

__all__ = ["compare"]

_Step = Callable[..., Any]


@dataclasses.dataclass
class _Errors:
    """The largest errors of all comparisons of a step.

    Attributes:
        outputs: those of each output.
        far: outputs that were beyond the tolerance in one of the comparisons.
        in_float32: the largest error with float32 in place of float16.
    """

    outputs: dict[str, float] = dataclasses.field(default_factory=dict)
    far: list[str] = dataclasses.field(default_factory=list)
    in_float32: float | None = None

    def add(self, errors: dict[str, float], narrowest: str) -> None:
        """Add a comparison."""
        self._add_far(errors, TOLERANCE[narrowest or "float32"])
        self.outputs = {name: max(error, self.outputs.get(name, 0.0)) for name, error in errors.items()}

    def add_in_float32(self, errors: dict[str, float]) -> None:
        """Add a comparison with float32 in place of float16."""
        self._add_far(errors, TOLERANCE["float32"])
        self.in_float32 = max([self.in_float32 or 0.0, *(errors[name] for name in errors if name not in self.far)])

    def _add_far(self, errors: dict[str, float], tolerance: float) -> None:
        self.far += [name for name, error in errors.items() if error > tolerance and name not in self.far]

    @property
    def close(self) -> dict[str, float]:
        """The errors of outputs that are within the tolerance in all comparisons."""
        return {name: error for name, error in self.outputs.items() if name not in self.far}

    @property
    def notes(self) -> list[str]:
        """Facts that a user should know."""
        found = [f"decided by rounding, in JAX as well: {', '.join(self.far)}"] if self.far else []
        if self.in_float32 is not None:
            found.append(
                f"with float32 in place of float16, ONNX Runtime and JAX are within {self.in_float32:.1e} of each other"
            )
        return found


def compare(
    step: FlatStep, model: ir.Model, batches: Sequence[tuple[Arrays, int]]
) -> tuple[dict[str, float], list[str]]:
    """Compare an exported step with JAX.

    An optimizer such as Adam divides a gradient by its own size: the rounding of a gradient near zero decides the
    direction of its weight. Where a number differs by more than the tolerance, JAX therefore computes the step again
    from numbers that differ by their rounding, and the number may be off by a multiple of that change.

    Weights from float16 gradients prove nothing. So a step with float16 is compared twice, once with float32 in place
    of float16, in the file and in JAX, and with the tolerance and the rounding of float32.

    Args:
        step: the step.
        model: the export.
        batches: a value for each input that is no state, and the number of steps to make with it.

    Returns:
        The largest error of each output within the tolerance, relative to the largest number of the tensor, and notes
        for the user.

    Raises:
        ExportError: ONNX Runtime refuses the export, or computes something else, or no output is within the tolerance;
            JAX cannot run the step, or its own results are not finite.
    """
    run, errors = jax.jit(step.run), _Errors()
    for fed, count in batches:
        _compare_batch(step, model, run, fed, count, errors)
    state = step.state.arrays
    if not any(name in step.results or state[step.pairs[name]].dtype.kind == "f" for name in errors.close):
        raise ExportError(
            "rounding decides all numbers that the step computes from the example batch, in JAX as well, so that "
            "nothing is proven; pass another batch"
        )
    return errors.close, errors.notes


def _compare_batch(step: FlatStep, model: ir.Model, run: _Step, fed: Arrays, count: int, errors: _Errors) -> None:
    first = step.state.arrays
    with _explained(f"JAX cannot run the step on {jax.default_backend()}", "export it where it runs, or "):
        expected = _run(step, run, fed, first, count)
    _refuse_infinite(step, first, expected)
    if not _uses_float16(model):
        errors.add(_compare(step, model, run, fed, first, expected, ""), "")
        return
    twin = model.clone()
    widen(twin.graph, ir.DataType.FLOAT, [ir.DataType.FLOAT16])
    wide_fed, wide_first = _convert(fed), _convert(first)
    with _explained("JAX cannot run the step with float32 in place of float16, for a comparison"):
        traced = jax.make_jaxpr(step.run)(*fed.values(), *first.values())
        wide = jax.jit(jaxpr_as_fun(widen_jaxpr(traced, np.float32, [np.float16])))
        precise = _run(step, wide, wide_fed, wide_first, count)
    errors.add_in_float32(_compare(step, twin, wide, wide_fed, wide_first, precise, ""))
    errors.add(_compare(step, model, run, fed, first, expected, "float16"), "float16")


def _compare(
    step: FlatStep, model: ir.Model, run: _Step, fed: Arrays, first: Arrays, expected: list[Arrays], narrowest: str
) -> dict[str, float]:
    least = float(np.finfo(narrowest).eps) if narrowest else 0.0

    def draw() -> Iterator[list[Arrays]]:
        for seed in range(DRAWS):
            rng = np.random.default_rng(seed)
            batch, state = (disturb(values, rng, least) for values in (fed, first))
            yield _run(step, run, batch, state, len(expected))

    return compare_steps(model, fed, first, step.pairs, expected, step.losses, draw(), narrowest)


def _refuse_infinite(step: FlatStep, first: Arrays, expected: list[Arrays]) -> None:
    """Refuse steps of JAX whose losses or next values become infinite or NaN."""
    before = {output: first[name] for output, name in step.pairs.items()}
    for number, outputs in enumerate(expected):
        for name in (*step.losses, *step.pairs):
            value = outputs[name]
            if not jax.numpy.issubdtype(value.dtype, np.floating):
                continue
            # A state may be infinite from the start, as the best loss so far; its next value is compared exactly.
            old = before[name] if name in step.pairs else np.zeros_like(value)
            kept = (np.isinf(value) & ~np.isfinite(old)) | (np.isnan(value) & np.isnan(old))
            if not (np.isfinite(value) | kept).all():
                raise ExportError(
                    f"JAX's own step {number + 1} makes {name} infinite or NaN on the example batch; pass another batch"
                )
        before = outputs


@contextlib.contextmanager
def _explained(problem: str, otherwise: str = "") -> Iterator[None]:
    """Turn an error of JAX into one line."""
    try:
        yield
    except Exception as error:  # of JAX's compiler, or of a primitive
        reason = one_line(next(iter(str(error).splitlines()), ""))
        raise ExportError(
            f"{problem}: {type(error).__name__}: {reason}; {otherwise}write this part of the step with other operations"
        ) from error


def _uses_float16(model: ir.Model) -> bool:
    values = [*model.graph.inputs, *(value for node in model.graph.all_nodes() for value in node.outputs)]
    return any(value.dtype == ir.DataType.FLOAT16 for value in values)


def _run(step: FlatStep, run: _Step, fed: Arrays, state: Arrays, count: int) -> list[Arrays]:
    """Run a function from inputs to outputs in JAX, count times; return its outputs."""
    found = []
    for _ in range(count):
        outputs = dict(zip(step.outputs, map(np.asarray, run(*fed.values(), *state.values())), strict=True))
        state = {name: outputs[output] for output, name in step.pairs.items()}
        found.append(outputs)
    return found


def _convert(values: Arrays) -> Arrays:
    return {name: value.astype(np.float32) if value.dtype == np.float16 else value for name, value in values.items()}
