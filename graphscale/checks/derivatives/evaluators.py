"""Evaluators of a graph in one floating-point type: the loss and the gradients at any weights."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx_ir as ir

from graphscale.checks.running.private import Results, Runner
from graphscale.errors import VerifyError, one_line
from graphscale.graph.widening import FLOATS, widen

__all__ = ["Evaluator", "find_dtypes"]

# Beyond these numbers of weights, the reference evaluator, in numpy, takes minutes.
_MANY = 2**22


class Evaluator:
    """An evaluator of a model in one floating-point type.

    Args:
        model: the model; it is not changed.
        dtype: the only floating-point type: DOUBLE runs on ONNX's reference evaluator, FLOAT on ONNX Runtime.
        fresh: True to restart random numbers from their seeds in each run, as the reference evaluator always does.

    Attributes:
        dtype: numpy's dtype of the type.

    Raises:
        VerifyError: the model cannot be loaded.
    """

    def __init__(self, model: ir.Model, dtype: ir.DataType, fresh: bool = False) -> None:
        self.dtype = dtype.numpy()
        wide = model.clone()
        widen(wide.graph, dtype)
        is_double = dtype is ir.DataType.DOUBLE
        self._runner: Any = _Reference(wide) if is_double else Runner(wide, None, "the graph in float32")
        self._runner.fresh = fresh

    def run(self, feeds: Mapping[str, Any]) -> Results:
        """Run once.

        Raises:
            VerifyError: an operator fails, or has no implementation.
        """
        arrays = {name: np.asarray(array) for name, array in feeds.items()}
        wide = {n: a.astype(self.dtype) if ir.DataType.from_numpy(a.dtype) in FLOATS else a for n, a in arrays.items()}
        results: Results = self._runner.run(wide)
        return results

    def close(self) -> None:
        """Free the session."""
        self._runner.close()


def find_dtypes(model: ir.Model) -> list[ir.DataType]:
    """Return the possible types for the evaluation of a model, the more precise one first."""
    size = sum(value.const_value.size for value in model.graph.initializers.values() if value.const_value is not None)
    installed = [ir.DataType.FLOAT] if importlib.util.find_spec("onnxruntime") is not None else []
    return [ir.DataType.DOUBLE, *installed] if size <= _MANY else [*installed, ir.DataType.DOUBLE]


class _Reference:
    """ONNX's reference evaluator, with the methods of `Runner`; random numbers restart from their seeds in each run."""

    def __init__(self, model: ir.Model) -> None:
        from onnx.reference import ReferenceEvaluator

        self._names = [value.name or "" for value in model.graph.outputs]
        self._inputs = {value.name for value in model.graph.inputs}
        self.fresh = True
        try:
            self._evaluator = ReferenceEvaluator(ir.to_proto(model))
        except Exception as error:  # errors of any class, from the implementation of any operator
            raise VerifyError(f"ONNX's reference evaluator cannot load the graph: {one_line(error)}") from error

    def run(self, feeds: Mapping[str, Any]) -> Results:
        """Run once."""
        known = {name: array for name, array in feeds.items() if name in self._inputs}
        try:
            with np.errstate(all="ignore"):
                values = self._evaluator.run(self._names, known)
        except Exception as error:  # errors of any class, from the implementation of any operator
            raise VerifyError(f"ONNX's reference evaluator cannot run the graph: {one_line(error)}") from error
        return Results({n: np.asarray(value) for n, value in zip(self._names, values, strict=True)}, known)

    def close(self) -> None:
        """Do nothing, since there is nothing to free."""
