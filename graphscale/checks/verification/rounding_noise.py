"""The changes of an original's values by the rounding of a type smaller than float32."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Mapping
from typing import Any

import ml_dtypes
import numpy as np
import onnx_ir as ir

from graphscale.checks.derivatives.evaluators import Evaluator
from graphscale.checks.running.private import Results, Runner
from graphscale.checks.verification.verify_report import Case
from graphscale.errors import VerifyError
from graphscale.graph.values import own_dtype

__all__ = ["RoundingNoise", "allow_rounding", "find_small_types"]

_SHAKES, _FACTOR = 3, 4.0  # number of runs on feeds with a rounding error, and the factor for their changes

# Below its normal numbers, a small type rounds to multiples of its smallest one, and a gradient is a sum of many such
# numbers: without a scale, the original loses differences up to so many times it.
_LOST = 2.0**6


def find_small_types(graph: ir.Graph) -> frozenset[ir.DataType]:
    """Find the floating-point types below float32 in a graph, declared or not."""
    results = (value for node in graph.all_nodes() for value in node.outputs)
    found = {own_dtype(value) for value in (*graph.inputs, *graph.initializers.values(), *results)}
    return frozenset(each for each in found if each and each.is_floating_point() and each.bitwidth < 32)


def allow_rounding(types: Collection[ir.DataType], tolerance: float) -> tuple[float, float]:
    """Return the errors that small types allow, relative to the largest element and absolute.

    bfloat16 has the exponents of float32, and loses no more than it.

    Args:
        types: the types.
        tolerance: the least relative error.
    """
    limits = [ml_dtypes.finfo(each.numpy()) for each in types]  # type: ignore[no-untyped-call]
    smallest = max((float(each.smallest_subnormal) for each in limits), default=0.0)
    lost = _LOST * smallest if smallest > np.finfo(np.float32).smallest_normal else 0.0
    return max([tolerance, *(float(each.eps) for each in limits)]), lost


class RoundingNoise:
    """A measure of the rounding in an original that computes in a small type.

    Args:
        model: the original, with every compared value among its outputs.
        runner: a runner of it.
        states: `{input: output}` of its carried state, None for state written in place.
    """

    def __init__(self, model: ir.Model, runner: Runner, states: Mapping[str, str | None]) -> None:
        self._runner, self._states = runner, states
        self._found: dict[tuple[int, ...], tuple[Any, dict[str, float]]] = {}
        self._wide: Evaluator | None = None
        with contextlib.suppress(VerifyError):  # float32 may lack a kernel
            self._wide = Evaluator(model, ir.DataType.FLOAT)

    def close(self) -> None:
        """Free the session."""
        if self._wide is not None:
            self._wide.close()

    def measure(self, case: Case, expected: Results) -> dict[str, float]:
        """Measure the changes of the original's values in float32, or with feeds rounded to float16, by name."""
        feeds = [case.feeds[name] for name in sorted(self._runner.inputs & case.feeds.keys())]
        key = tuple(map(id, feeds))
        if key in self._found:
            return self._found[key][1]
        random, moved, others = np.random.default_rng(0), dict[str, float](), list[Results]()
        with contextlib.suppress(VerifyError):
            others += [] if self._wide is None else [self._wide.run(case.feeds)]
        for _ in range(_SHAKES):
            shaken = dict(case.feeds)
            for name, array in case.feeds.items():
                if array.dtype.kind == "f":
                    shaken[name] = (array * (1 + 2.0**-11 * random.uniform(-1, 1, array.shape))).astype(array.dtype)
            others.append(self._runner.run(shaken))
        for results in others:
            for name, array in (*results.outputs.items(), *((n, results.left[n]) for n in self._states)):
                before = expected.outputs[name] if name in expected.outputs else expected.left[name]
                with np.errstate(invalid="ignore", over="ignore"):
                    off = np.abs(np.asarray(array, np.float64) - np.asarray(before, np.float64))
                largest = float(np.max(off, initial=0.0, where=np.isfinite(off)))
                moved[name] = max(moved.get(name, 0.0), _FACTOR * largest)
        self._found[key] = feeds, moved  # held arrays keep their identity
        return moved
