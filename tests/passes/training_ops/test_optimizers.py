"""Optimizers and accumulators in graphs: sequences made in the graph, and states that are only written in place."""

from __future__ import annotations

import json

import numpy as np
import onnx
import onnx.checker
import pytest

import graphscale as gs
from graphscale.errors import UnsupportedModelError
from tests.build import parse
from tests.conftest import run_once

HEADER = '<ir_version: 8, opset_import: ["" : 17, "com.microsoft" : 1]>'
MOMENTS = "float[2] m0, float m1, float[2] v0, float v1"
STEP = f"""{HEADER} step (float[1] rate, int64[1] count, float[2] w0, float w1, float[2] g0, float g1, {MOMENTS},
    bool[1] signal) => (bool[1] done, float[2] next0, float next1, float[2] moment0) {{
    weights = SequenceConstruct(w0, w1)
    gradients = SequenceConstruct(g0, g1)
    first = SequenceConstruct(m0, m1)
    second = SequenceConstruct(v0, v1)
    clipped = com.microsoft.InplaceClipGradNorm<max_norm = 1.0>(gradients)
    done, moved, moments = com.microsoft.AdamWOptimizer<weight_decay = 0.5>(
        rate, count, weights, clipped, first, second, signal)
    zero = Constant<value = int64 {{0}}>()
    one = Constant<value = int64 {{1}}>()
    next0 = SequenceAt(moved, zero)
    next1 = SequenceAt(moved, one)
    moment0 = SequenceAt(moments, zero)
}}"""
FEEDS = {
    "rate": np.float32([0.1]),
    "count": np.int64([1]),
    "w0": np.float32([1, 2]),
    "w1": np.float32(-4),
    "g0": np.float32([0, 3]),
    "g1": np.float32(-4),
    **{name: np.zeros((2,) if name.endswith("0") else (), np.float32) for name in ("m0", "m1", "v0", "v1")},
}


@pytest.mark.parametrize("is_active", [True, False])
def test_sequences_that_the_graph_makes(is_active: bool) -> None:
    model = gs.lower_training_ops(parse(STEP)).model
    onnx.checker.check_model(model, full_check=True)
    assert not {"Loop", "If"} & {node.op_type for node in model.graph.node}
    outputs, _ = run_once(model, {**FEEDS, "signal": np.asarray([is_active])})
    # The first step of Adam is the rate, against the sign of the gradient. The norm of the gradients is 5.
    decayed = 0.95 * FEEDS["w0"] - 0.1 * np.float32([0, 1])
    np.testing.assert_array_equal(outputs["done"], [is_active])
    np.testing.assert_allclose(outputs["next0"], decayed if is_active else FEEDS["w0"], rtol=1e-6)
    np.testing.assert_allclose(outputs["next1"], -0.95 * 4 + 0.1 if is_active else -4, rtol=1e-6)
    np.testing.assert_allclose(outputs["moment0"], [0, 0.06 if is_active else 0], rtol=1e-5)


def accumulate(inputs: str, outputs: str, initializers: str = "", results: str = "done, sum") -> str:
    node = f"[accumulate] {results} = com.microsoft.InPlaceAccumulatorV2(buffer, value)"
    return f"{HEADER} sums ({inputs}) => ({outputs}) {initializers} {{ {node} }}"


ADAMW = "ok = com.microsoft.AdamWOptimizer"
BOTH, DONE = "bool[1] done, float[2] sum", "bool[1] done"
FED = "float[2] buffer, float[2] value"
START = "<float[2] buffer = {1, 2}>"


@pytest.mark.parametrize("initializer", ["", START])
def test_a_state_that_leaves_the_graph(initializer: str) -> None:
    model = gs.lower_training_ops(parse(accumulate(FED, BOTH, initializer))).model
    outputs, _ = run_once(model, {"buffer": np.float32([1, 2]), "value": np.float32([3, 5])})
    np.testing.assert_array_equal(outputs["sum"], [4, 7])


@pytest.mark.parametrize(
    ("text", "output"),
    [
        (accumulate(FED, DONE, results="done"), "buffer.next"),
        (accumulate(FED, DONE), "buffer.next"),
        (accumulate("float[2] value", BOTH, START), "sum"),
    ],
    ids=["left-out", "not-given", "private"],
)
def test_a_state_that_stays_in_the_graph(text: str, output: str) -> None:
    lowered = gs.lower_training_ops(parse(text))
    assert lowered.report.states == {output: "buffer"}
    assert {"buffer", "value"} == {value.name for value in lowered.model.graph.input}
    outputs, _ = run_once(lowered.model, {"buffer": np.float32([1, 2]), "value": np.float32([3, 5])})
    np.testing.assert_array_equal(outputs[output], [4, 7])
    roles = json.loads(next(entry.value for entry in lowered.model.metadata_props if entry.key == "graphscale.roles"))
    assert (roles["states"], roles["metrics"]) == ({output: "buffer"}, ["done"])


def test_states_of_an_optimizer() -> None:
    """The sequences that it writes are outputs, whatever it returns itself."""
    graph = (
        "(float[1] a, int64[1] n, seq(float[2]) w, seq(float[2]) g, seq(float[2]) m, seq(float[2]) v) => (bool[1] ok)"
    )
    report = gs.lower_training_ops(parse(f"{HEADER} one {graph} {{ {ADAMW}(a, n, w, g, m, v) }}")).report
    assert report.states == {f"{name}.next": name for name in "wmv"}


@pytest.mark.parametrize(
    ("node", "reason"),
    [
        ("done = com.microsoft.AdamWOptimizer(a, n, s, s, s, s)", "writes 's' in place a second time"),
        ("i, m, v, w = com.microsoft.AdamOptimizer(a, n, w0, a, m0, v0, , a)", "ignores the inputs 6 to 9"),
    ],
    ids=["one-state", "loss-scale"],
)
def test_refusals(node: str, reason: str) -> None:
    inputs = "float[1] a, int64[1] n, float[1] w0, float[1] m0, float[1] v0, seq(float[2]) s"
    graph = f"({inputs}) => (bool[1] done, int64[1] i, float[1] m, float[1] v, float[1] w)"
    model = parse(f"{HEADER} one {graph} {{ {node} }}")
    del model.graph.output[:]
    results = [name for name in model.graph.node[0].output if name != "t"]
    model.graph.output.extend(
        onnx.helper.make_tensor_value_info(name, onnx.TensorProto.INT64 if name == "i" else onnx.TensorProto.FLOAT, [1])
        for name in results
    )
    with pytest.raises(UnsupportedModelError, match=reason):
        gs.lower_training_ops(model)
