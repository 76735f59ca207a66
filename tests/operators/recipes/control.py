"""Operators with subgraphs."""

from __future__ import annotations

import numpy as np
import onnx

from tests.operators.recipes.draw import Call, Draw, recipe

# A step of a carried value c and a number x, by how it treats degrees.
_STEPS = (
    "n = Add(c, x)",
    "n = Mul(c, half)",
    "n = Sub(x, c)",
    "n = Max(c, x)",
    "n = Mul(c, x)",
    "t = Tanh(x) n = Mul(c, t)",
    "t = Sub(c, c) n = Add(t, x)",
    "n = Identity(x)",
    "n = Abs(c)",
)


def _parse(draw: Draw, text: str) -> onnx.GraphProto:
    return onnx.parser.parse_graph(text.replace("TYPE", "double" if draw.dtype == np.float64 else "float"))


def _floats(draw: Draw, *shape: int) -> np.ndarray:
    """Draw numbers of a type that the parser of constants knows."""
    return draw.floats(shape, dtype=np.float64 if draw.dtype == np.float64 else np.float32)


@recipe("If")
def draw_if(draw: Draw) -> Call:
    bodies = ("Neg(a)", "Mul(a, b)", "Add(a, b)", "Sub(b, b)", "Exp(b)", "Identity(zero)", "Max(a, a)", "Div(a, b)")
    branches = {
        name: _parse(draw, f"{name} () => (TYPE[2] y) <TYPE[2] zero = {{0, 0}}> {{ y = {draw.pick(*bodies)} }}")
        for name in ("then_branch", "else_branch")
    }
    return Call([np.asarray(draw.chance())], branches, captured={"a": _floats(draw, 2), "b": _floats(draw, 2)})


@recipe("Loop")
def draw_loop(draw: Draw) -> Call:
    step = draw.pick(*_STEPS)
    text = (
        "body (int64 i, bool go, TYPE[2] c) => (bool on, TYPE[2] n, TYPE[2] s) <TYPE half = {0.5}> "
        f"{{ on = Identity(go) {step} s = Neg(n) }}"
    )
    trips = np.asarray(draw.size(0 if draw.chance(15) else 1, 3), np.int64)
    operands = [trips, np.asarray(draw.chance(90)), _floats(draw, 2)]
    return Call(operands, {"body": _parse(draw, text)}, 2, {"x": _floats(draw, 2)})


@recipe("Scan")
def draw_scan(draw: Draw) -> Call:
    step = draw.pick(*_STEPS)
    text = f"body (TYPE[2] c, TYPE[2] x) => (TYPE[2] n, TYPE[2] s) <TYPE half = {{0.5}}> {{ {step} s = Neg(x) }}"
    attributes = {"body": _parse(draw, text), "num_scan_inputs": 1}
    attributes |= draw.options(scan_input_directions=([0], [1]), scan_output_directions=([0], [1]))
    return Call([_floats(draw, 2), _floats(draw, draw.size(1, 3), 2)], attributes, 2)
