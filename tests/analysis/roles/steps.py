"""Steps around a linear map, and short forms of their tables of roles."""

from __future__ import annotations

import re
from typing import Any

import onnx

import graphscale as gs
from graphscale.analysis.roles.role_table import RoleTable
from tests.build import LINEAR, linear_step, listed, ramp
from tests.expressions import nodes

SGD = "u = dw * rate; w_next = w - u\n"
MOMENTUM = "m_next = m * beta + dw; u = m_next * rate; w_next = w - u\n"
WEIGHT_DECAY = LINEAR.replace("loss =", "error =") + nodes("loss = error + ReduceSum(b * b, keepdims=0) * share")
CONSTANTS = {
    "rate": "float rate = {0.1}",
    "beta": "float beta = {0.9}",
    "one": "float one = {1}",
    "unit": "int64 unit = {1}",
    "axes": "int64[1] axes = {0}",
}


def update_step(
    text: str = "",
    inputs: str = "",
    outputs: str = "",
    constants: str = "",
    *,
    update: str = SGD,
    control: str = "",
    stored: bool = False,
    **more: Any,
) -> onnx.ModelProto:
    """A step of a linear map with its weight `w` updated; `name_next`, where it is computed, is an output.

    Args:
        text: behind the update, as `tests.expressions` reads it.
        inputs: the inputs beside the batch and the weight.
        outputs: the outputs beside `loss` and the next values.
        constants: initializers beside those of `CONSTANTS`; one without a value declares the type of a value.
        update: the update, as `text`.
        control: nodes behind `text`, in ONNX's text form.
        stored: make the weight an initializer, and no input.
        more: other arguments of `linear_step`.
    """
    written = nodes(update + text) + control
    weight = "float[4,3] w"
    if stored:
        constants = listed(f"{weight} = {ramp(12)}", constants)
    else:
        inputs = listed(weight, inputs)
    states = re.findall(r"(\w+(?:\[[\d,]+\])?) (\w+)", f"{inputs}, {constants}")
    following = [f"{dtype} {name}_next" for dtype, name in states if re.search(rf"\b{name}_next\b.* = ", written)]
    # An initializer that nothing reads may be state that an output replaces.
    read = [constant for name, constant in CONSTANTS.items() if re.search(rf"\b{name}\b", written)]
    return linear_step(
        written, inputs=inputs, outputs=listed(*following, outputs), constants=listed(*read, constants), **more
    )


def hidden_state_step() -> onnx.ModelProto:
    """A recurrent step that hands its hidden state `h` on, as it would a prediction; its names have no one pattern."""
    return linear_step(
        nodes("w_next = w - dw * rate; moved = r - (h.T @ dc) * rate"),
        inputs="float[4,3] w, float[3,3] r, float[8,3] h",
        outputs="float[4,3] w_next, float[3,3] moved, float[8,3] h_next",
        constants="float rate = {0.1}, float one = {1}",
        forward=nodes("h_next = Tanh(x @ w + h @ r); d = h_next - t; loss = ReduceMean(d * d, keepdims=0)"),
        backward=nodes("dc = (d * two_over_n) * (one - h_next * h_next); dw = x.T @ dc"),
    )


def recurrent_step(forward: str, inputs: str, outputs: str) -> onnx.ModelProto:
    """A step with weights `w` and `u`, and a head `v` that does not learn; `h_out` is its last hidden state."""
    return linear_step(
        nodes("w_next = w - dw * rate; u_next = u - du * rate"),
        inputs=listed("float[4,5] w, float[5,5] u, float[5,3] v, float[8,5] h", inputs),
        outputs=listed("float[4,5] w_next, float[5,5] u_next, float[8,5] h_out", outputs),
        constants="float rate = {0.1}, float one = {1}",
        forward=nodes(f"{forward}; y = h_out @ v; d = y - t; loss = ReduceMean(d * d, keepdims=0)"),
        backward=nodes("g = ((d * two_over_n) @ v.T) * (one - h_out * h_out); du = h1.T @ g; dw = x.T @ g"),
    )


def swappable_step() -> onnx.ModelProto:
    """A moment of a moment, with betas as inputs: `b_next` depends on `a` as well as on `b`."""
    return update_step("a_next = a * p + dw; b_next = b * p + a * q", "float[4,3] a, float[4,3] b, float p, float q")


def exchanged_step() -> onnx.ModelProto:
    """Two averages of each other, under names that say nothing."""
    text = "p = a * high + b * low + dw; q = b * high + a * low - dw"
    values = "float low = {0.2}, float high = {0.8}"
    return update_step(text, "float[4,3] a, float[4,3] b", "float[4,3] p, float[4,3] q", values)


def computed_average_step() -> onnx.ModelProto:
    """The moved average of the weight, with a decay as an input: the weight has the share `1 - decay`."""
    return update_step("ema_next = ema * decay + w_next * (one - decay)", "float[4,3] ema, float decay")


def look_ahead_step() -> onnx.ModelProto:
    """Two outputs that hold the one weight: its next value, and one step more."""
    return update_step("w_ahead = w_next - u", outputs="float[4,3] w_ahead")


def square_step() -> onnx.ModelProto:
    """A second moment with a beta of zero: a squared gradient, which does not depend on `v`."""
    return update_step("v_next = dw * dw", "float[4,3] v")


def gradients_step() -> onnx.ModelProto:
    """Gradients that are masked, clipped, and of weight decay alone: the scale comes out above all three."""
    return linear_step(
        nodes("clipped = Clip(dw * mask, low, high); db = b * twice"),
        inputs="float[4,3] w, float[4,3] mask, float[5] b",
        outputs="float[4,3] clipped, float[5] db",
        constants="float share = {0.01}, float twice = {0.02}, float low = {-0.01}, float high = {0.01}",
        forward=WEIGHT_DECAY,
    )


def momentum_step() -> onnx.ModelProto:
    """Gradient descent with momentum and a counter."""
    return update_step("n_next = n + unit", "float[4,3] m, int64 n", update=MOMENTUM)


def previous_gradient_step() -> onnx.ModelProto:
    """The change of the gradient from step to step."""
    return update_step("length = ReduceL2(dw - before, keepdims=0)", "float[4,3] before", "float[4,3] dw, float length")


def states(*names: str) -> dict[str, str]:
    """The roles of next values in short: `states("w", "a?")` for `w_next`, and for `a_next`, which is asked about."""
    return {f"{name.rstrip('?')}_next": f"next {name}" for name in names}


def roles_of(model: onnx.ModelProto, answers: Any = None) -> dict[str, str]:
    """The role of each output but a certain loss: `next w` for carried state; a question mark, if it is asked about.

    Every input and every output has one role, and both halves of a pair know each other.
    """
    table = gs.roles(model, answers)
    _assert_whole(model, table)
    found = {entry.name: entry for entry in table if entry.kind == "output"}
    assert found["loss"].role == "loss"
    if found["loss"].certain:
        del found["loss"]
    return {
        name: ("next " + entry.pair if entry.pair else entry.role) + ("" if entry.certain else "?")
        for name, entry in found.items()
    }


def evidence_of(model: onnx.ModelProto, name: str) -> str:
    """The reason for the role of an output."""
    return next(entry.evidence for entry in gs.roles(model) if (entry.kind, entry.name) == ("output", name))


def _assert_whole(model: onnx.ModelProto, table: RoleTable) -> None:
    names = {kind: [entry.name for entry in table if entry.kind == kind] for kind in ("input", "output")}
    inputs = [value.name for value in model.graph.input]
    assert names["input"][: len(inputs)] == inputs
    assert names["output"] == [value.name for value in model.graph.output]
    assert set(names["input"][len(inputs) :]) <= {tensor.name for tensor in model.graph.initializer}
    pairs = {kind: {(e.name, e.pair) for e in table if e.kind == kind and e.role == "state"} for kind in names}
    assert pairs["input"] == {(source, output) for output, source in pairs["output"]}
