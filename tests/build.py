"""Small training graphs in ONNX's text form, and their runs on ONNX Runtime."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
import onnx.parser
import onnxruntime as ort

import graphscale as gs
from tests.conftest import Arrays, assert_all_same_bits, assert_same_bits, initial_values, run_once

# A two-layer network, tanh, mean squared error over 8 x 3 numbers.
FORWARD = """
    h = MatMul(x, w1)
    a = Tanh(h)
    y = MatMul(a, w2)
    d = Sub(y, t)
    square = Mul(d, d)
    loss = ReduceMean<keepdims = 0>(square)
"""
BACKWARD = """
    dy = Mul(d, two_over_n)
    at = Transpose<perm = [1, 0]>(a)
    dw2 = MatMul(at, dy)
    w2t = Transpose<perm = [1, 0]>(w2)
    da = MatMul(dy, w2t)
    aa = Mul(a, a)
    slope = Sub(one, aa)
    dh = Mul(da, slope)
    xt = Transpose<perm = [1, 0]>(x)
    dw1 = MatMul(xt, dh)
"""
LINEAR = """
    y = MatMul(x, w)
    d = Sub(y, t)
    square = Mul(d, d)
    loss = ReduceMean<keepdims = 0>(square)
"""
LINEAR_BACKWARD = """
    dy = Mul(d, two_over_n)
    xt = Transpose<perm = [1, 0]>(x)
    dw = MatMul(xt, dy)
"""

# From the next level on ONNX Runtime moves constant factors through matrix products, which rounds differently and
# depends on what else the graph multiplies; up to here, equal computations have equal bits.
EXACT = ort.GraphOptimizationLevel.ORT_ENABLE_BASIC


def parse(text: str) -> onnx.ModelProto:
    """Parse a model in ONNX's text form."""
    return onnx.parser.parse_model(text)


def step(
    more: str = "",
    *,
    inputs: str = "",
    outputs: str = "float[4,5] dw1, float[5,3] dw2",
    constants: str = "",
    forward: str = FORWARD,
    backward: str = BACKWARD,
    layer: str = "a = Tanh(h)",
    slope: str = "aa = Mul(a, a) slope = Sub(one, aa)",
    opset: int = 20,
    ir_version: int = 10,
    domains: Sequence[str] = (),
    functions: str = "",
    weights: str = "float[4,5] w1, float[5,3] w2",
    one: str = "float one = {1}",
    name: str = "step",
) -> onnx.ModelProto:
    """A training step of the two-layer network.

    Args:
        more: nodes after the backward pass, such as an optimizer.
        inputs: more graph inputs.
        outputs: the outputs after `float loss`.
        constants: more initializers.
        forward: the nodes of the forward pass.
        backward: the nodes of the backward pass.
        layer: the nodes from `h` to `a`, between the products.
        slope: the nodes from `a` to its derivative, `slope`.
        opset: the version of the ai.onnx opset.
        ir_version: the IR version.
        domains: further operator domains, each in version 1.
        functions: model-local functions.
        weights: the inputs behind the batch.
        one: the constant of the backward pass beside 2/N.
        name: the name of the graph.
    """
    forward = forward.replace("a = Tanh(h)", layer)
    backward = backward.replace("aa = Mul(a, a)\n    slope = Sub(one, aa)", slope)
    imports = listed(f'"" : {opset}', *(f'"{domain}" : 1' for domain in domains))
    return parse(f"""
        <ir_version: {ir_version}, opset_import: [{imports}]>
        {name} ({listed("float[8,4] x, float[8,3] t", weights, inputs)}) => ({listed("float loss", outputs)})
        <{listed("float two_over_n = {0.083333336}", one, constants)}> {{ {forward} {backward} {more} }}
        {functions}
    """)


def linear_step(
    more: str = "", *, inputs: str = "float[4,3] w", outputs: str = "float[4,3] dw", **options: Any
) -> onnx.ModelProto:
    """A training step of a linear map, for short graphs; the arguments are those of `step`."""
    options = {"forward": LINEAR, "backward": LINEAR_BACKWARD, **options}
    return step(more, inputs=inputs, outputs=outputs, weights="", one="", name="linear", **options)


def listed(*parts: str) -> str:
    """The parts that are there, between commas."""
    return ", ".join(filter(None, parts))


def numbers(count: int, of: str = "0") -> str:
    """The text of an initializer with one number throughout."""
    return "{" + ", ".join([of] * count) + "}"


def ramp(count: int) -> str:
    """The text of an initializer of eighths: 0, 1/8, 2/8 and so on."""
    return "{" + ", ".join(str(i / 8) for i in range(count)) + "}"


def feeds_for(model: onnx.ModelProto, seed: int = 0, **given: Any) -> Arrays:
    """Random numbers for every input that has no initializer; `given` ones unchanged."""
    random = np.random.default_rng(seed)
    with_initializer = {tensor.name for tensor in model.graph.initializer}
    feeds = {}
    for value in model.graph.input:
        if value.name in with_initializer:
            continue
        dtype = onnx.helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type)
        shape = [d.dim_value or 1 for d in value.type.tensor_type.shape.dim]
        feeds[value.name] = np.asarray(0.5 * random.standard_normal(shape)).astype(dtype)
    return {**feeds, **{name: np.asarray(array) for name, array in given.items()}}


def assert_same_step(model: onnx.ModelProto, feeds: Arrays | None = None, **options: Any) -> gs.Report:
    """Scale a step in two ways and compare both with the unscaled one; return the report of the dynamic one.

    With the scale fixed at 1024 every output has the bits it had. With a dynamic scale too, and a NaN in the batch
    leaves all carried state unchanged and halves the scale.
    """
    feeds = feeds_for(model) if feeds is None else feeds
    expected, _ = run_once(model, feeds, EXACT)
    for loss_scale in (1024, "dynamic"):
        result = gs.scale(model, loss_scale, **options)
        actual, _ = run_once(result.model, feeds, EXACT)
        assert_all_same_bits(actual, expected)
    assert actual["all_finite"]
    assert_skips(result, feeds)
    return result.report


def assert_skips(result: gs.ScaledModel, feeds: Arrays) -> None:
    """A NaN in the batch leaves all carried state of a dynamically scaled step unchanged, and halves the scale."""
    poisoned = {name: array.copy() for name, array in feeds.items()}
    poisoned["x"].flat[0] = np.nan
    skipped, _ = run_once(result.model, poisoned, EXACT)
    assert not skipped["all_finite"]
    before = {**initial_values(result.model), **poisoned}
    scale, good_steps = before.pop("current_loss_scale"), before.pop("good_steps")
    for state in result.report.state:
        if state.input in before:
            assert_same_bits(skipped[state.output], before[state.input], state.input)
    assert skipped["current_loss_scale.next"] == scale / 2
    assert skipped["good_steps.next"] == good_steps == 0
