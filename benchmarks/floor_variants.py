"""Other ways to test a gradient for finiteness, and to unscale it: one kernel after the other on one tensor."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import onnxruntime as ort
from kernel_times import profile_in, profiled, runs_of

__all__ = ["CHECKS", "UNSCALES", "variant_times"]

# Nodes that are timed are named so. A gradient that is no input of the graph, its producer's kernel not counted, may be
# written over by its only reader.
CHECKS = {
    "IsNaN, IsInf": """
        [timed1] nans = IsNaN (g) [timed2] infinities = IsInf (g) [timed3] bad = Or (nans, infinities)
        [timed4] numbers = Cast <to = 1> (bad) [timed5] out = ReduceMax <keepdims = 0> (numbers)""",
    "Mul by 0, ReduceSum": "[timed1] zeroed = Mul (g, zero) [timed2] out = ReduceSum <keepdims = 0> (zeroed)",
    "MatMul(zeros, g), ReduceSum": "[timed1] sums = MatMul (row, g) [timed2] out = ReduceSum <keepdims = 0> (sums)",
    "MatMul(g, zeros), ReduceSum": "[timed1] sums = MatMul (g, column) [timed2] out = ReduceSum <keepdims = 0> (sums)",
    "ReduceSum": "[timed1] out = ReduceSum <keepdims = 0> (g)",
    "ReduceSum of rows, ReduceSum": """
        [timed1] sums = ReduceSum <keepdims = 0> (g, last) [timed2] out = ReduceSum <keepdims = 0> (sums)""",
    "ReduceSumSquare": "[timed1] out = ReduceSumSquare <keepdims = 0> (g)",
    "ReduceL1": "[timed1] out = ReduceL1 <keepdims = 0> (g)",
}
UNSCALES = {
    "Div, in place": "h = Neg (g) [timed1] u = Div (h, scale) out = ReduceSum <keepdims = 0> (u)",
    "Div, to other memory": "[timed1] u = Div (g, scale) out = ReduceSum <keepdims = 0> (u)",
    "Mul by the reciprocal, in place": "h = Neg (g) [timed1] u = Mul (h, inverse) out = ReduceSum <keepdims = 0> (u)",
    "Mul by the reciprocal, to other memory": "[timed1] u = Mul (g, inverse) out = ReduceSum <keepdims = 0> (u)",
}


def variant_times(
    text: str, size: int, rounds: int, options: ort.SessionOptions, copy: Callable[[], float]
) -> Iterator[tuple[float, float]]:
    """Time the kernels of a variant on a float32 tensor [size, size], and a copy, in turns.

    Yields:
        seconds of both, in each round.
    """
    model = onnx.parser.parse_model(
        f"""<ir_version: 10, opset_import: ["": 20]>
        variant (float[{size}, {size}] g, float scale, float inverse) => (float out)
        <float zero = {{0}}, int64[1] last = {{-1}}> {{ {text} }}"""
    )
    for name, shape in (("row", (1, size)), ("column", (size, 1))):
        model.graph.initializer.append(onnx.numpy_helper.from_array(np.zeros(shape, np.float32), name))
    g = np.random.default_rng(0).standard_normal((size, size), np.float32)
    feeds = {"g": g, "scale": np.array(2.0**15, np.float32), "inverse": np.array(2.0**-15, np.float32)}
    floor = []
    with tempfile.TemporaryDirectory() as temporary:
        session = ort.InferenceSession(model.SerializeToString(), profiled(options, Path(temporary), "variant"))
        for _ in range(rounds):
            [out] = session.run(None, feeds)
            assert np.isfinite(out)
            copy()
            floor.append(copy())
        del session
        runs = runs_of(profile_in(Path(temporary), "variant"))
    for run, seconds in zip(runs, floor, strict=True):
        yield sum(kernel.seconds for kernel in run if kernel.name.startswith("timed")), seconds
