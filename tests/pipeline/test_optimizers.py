"""Optimizer operators inside a graph, scaled, on each target that runs them.

A finite step has the bits of the unscaled graph's; a step with a non-finite gradient leaves weights, moments and step
counter unchanged, bit for bit, and the next step goes on as if it had not been.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest

import graphscale as gs
from graphscale.errors import UnsupportedModelError
from graphscale.passes import LowerOptimizers, replace_training_ops
from graphscale.targets import get_target
from tests.build import EXACT, feeds_for, linear_step, step
from tests.conftest import (
    Arrays,
    assert_all_same_bits,
    assert_same_bits,
    make_session,
    run_once,
    with_initializers,
)
from tests.passes.test_lower_optimizers import OPTIMIZERS, model_of
from tests.session.plain import PlainLoop

MICROSOFT = "com.microsoft"
MOMENTS = "float[4,3] m, float[4,3] v"
NEXT_MOMENTS = "float[4,3] m_next, float[4,3] v_next"


@dataclasses.dataclass(frozen=True)
class Case:
    """A training step with an optimizer operator inside.

    Attributes:
        model: the step.
        updates: `{output: state}`: everything that it carries.
        named: those pairs that have to be named, for they cannot be seen through a sequence.
    """

    model: onnx.ModelProto
    updates: dict[str, str]
    named: bool = False


def _one(operator: str, states: str, inputs: str, outputs: str) -> Case:
    """An operator on the weight of a linear map; `states` are the names of what it carries."""
    model = linear_step(operator, inputs=inputs, outputs=outputs, domains=[MICROSOFT])
    return Case(model, {f"{name}_next": name for name in states.split()})


def _adam(attributes: str) -> Case:
    return _one(
        f"count_next, m_next, v_next, w_next = {MICROSOFT}.AdamOptimizer<{attributes}>(rate, count, w, dw, m, v)",
        "count m v w",
        f"float rate, int64 count, float[4,3] w, {MOMENTS}",
        f"int64 count_next, {NEXT_MOMENTS}, float[4,3] w_next",
    )


def _adamw(attributes: str) -> Case:
    call = f"{MICROSOFT}.AdamWOptimizer<{attributes}>(rate, count, ws, dws, ms, vs)"
    return _sequences(f"done, ws_next, ms_next, vs_next = {call}", "float[1] rate, int64[1] count", "w m v")


def _sequences(operator: str, inputs: str, lists: str) -> Case:
    """An operator on sequences, of two weights, and the elements of the sequences that it returns."""
    names = [f"{name}{i}" for name in lists.split() for i in (1, 2)]
    shape = {1: "float[4,5]", 2: "float[5,3]"}
    more = "".join(f"{n}s = SequenceConstruct({n}1, {n}2)\n" for n in [*lists.split(), "dw"]) + operator
    more += "".join(
        f"\n{n}{i}_next = SequenceAt({n}s_next, {'zero' if i == 1 else 'one_index'})"
        for n in lists.split()
        for i in (1, 2)
    )
    more_inputs = ", ".join([inputs, *(f"{shape[int(n[-1])]} {n}" for n in names if not n.startswith("w"))])
    model = step(
        more,
        inputs=more_inputs,
        outputs=", ".join(f"{shape[int(n[-1])]} {n}_next" for n in names),
        constants="int64 zero = {0}, int64 one_index = {1}",
        domains=[MICROSOFT],
    )
    return Case(model, {f"{name}_next": name for name in names}, named=True)


CASES = {
    "SGDOptimizer": _one(
        f"w_next = {MICROSOFT}.SGDOptimizer(rate, w, dw)", "w", "float rate, float[4,3] w", "float[4,3] w_next"
    ),
    "SGDOptimizerV2": _sequences(f"done, ws_next = {MICROSOFT}.SGDOptimizerV2(rate, ws, dws)", "float[1] rate", "w"),
    "AdamOptimizer": _adam("alpha = 0.9, beta = 0.99, epsilon = 1e-6, lambda = 0.0, do_bias_correction = 1"),
    "AdamOptimizer-decay": _adam(
        "alpha = 0.9, beta = 0.99, lambda = 0.01, do_bias_correction = 0, weight_decay_mode = 1"
    ),
    "AdamWOptimizer": _adamw("adam_mode = 1, correct_bias = 1"),
    "AdamWOptimizer-torch": _adamw("adam_mode = 0, weight_decay = 0.01"),
    **{
        name: Case(model_of(name), {f"{state}_next": state for state in ["w", *states.split()]})
        for name, (_, states) in OPTIMIZERS.items()
    },
}


def _feeds(case: Case) -> Arrays:
    feeds = feeds_for(case.model)
    positive = {name: np.abs(feeds[name]) for name in feeds if name.startswith(("v", "h"))}
    numbers = {"rate": np.float32(0.1), "count": np.int64(3), "step": np.int64(3)}
    return {
        **feeds,
        **positive,
        **{name: np.full(feeds[name].shape, numbers[name]) for name in numbers if name in feeds},
    }


def _batches(feeds: Arrays) -> list[Arrays]:
    """A finite batch, one with a NaN, one with an Inf, and another finite one."""
    others = [{"x": feeds["x"].copy(), "t": feeds["t"]} for _ in range(4)]
    others[1]["x"][2, 1] = np.nan
    others[2]["x"][5, 3] = np.inf
    others[3]["x"] = 2 * others[3]["x"]
    return others


def _unscaled(case: Case, feeds: Arrays, target: str) -> Iterator[Arrays]:
    """The state after each finite batch, without a loss scale; operators that the runtime lacks are spelled out."""
    lowered = ir.serde.deserialize_model(case.model)
    LowerOptimizers()(lowered)
    replace_training_ops(lowered, get_target(target))
    for batch in _batches(feeds)[::3]:
        outputs, _ = run_once(ir.serde.serialize_model(lowered), {**feeds, **batch}, EXACT)
        feeds = {**feeds, **{state: outputs[output] for output, state in case.updates.items()}}
        yield feeds


@pytest.mark.parametrize("target", ["onnx", pytest.param("ort-training", marks=pytest.mark.training)])
@pytest.mark.parametrize("name", CASES)
def test_each_operator(name: str, target: str) -> None:
    """On ort-training float32 state is written in place; a counter of whole numbers goes from output to input."""
    case = CASES[name]
    feeds, states = _feeds(case), [*case.updates.values()]
    held = {name: feeds[name] for name in states if target == "ort-training" and feeds[name].dtype == np.float32}
    policy, updates = gs.DynamicLossScale(2.0**10, increment_period=2), case.updates if case.named else None
    result = gs.scale(with_initializers(case.model, held), policy, target=target, updates=updates)
    assert result.report.coverage == 1.0
    in_place = {state.input for state in result.report.state if state.output is None}
    assert in_place & {*states} == {*held}
    loop, scaled = PlainLoop(result, feeds, EXACT), []
    for batch in _batches(feeds):
        loop.step({name: value for name, value in {**feeds, **batch}.items() if name not in loop.state})
        scaled.append({name: np.array(loop.state[name]) for name in states})
    first, last = _unscaled(case, feeds, target)
    for found, expected in zip(scaled, (first, first, first, last), strict=True):
        assert_all_same_bits(expected, found)
    assert [name for name in states if np.array_equal(scaled[0][name], feeds[name])] == [], "these do not move"


def scaled_for_training(model: onnx.ModelProto) -> onnx.ModelProto:
    return gs.scale(model, 1024, skip_nonfinite=True, target="ort-training").model


ACCUMULATORS = {
    "InPlaceAccumulator": (f"sum_next = {MICROSOFT}.InPlaceAccumulator(sum, dw)", "float[4,3] sum_next"),
    "InPlaceAccumulatorV2": (f"done = {MICROSOFT}.InPlaceAccumulatorV2(sum, dw)", "bool[1] done"),
}


@pytest.mark.training
@pytest.mark.parametrize("name", ACCUMULATORS)
def test_accumulators(name: str) -> None:
    """The buffer of the caller gets the gradient added in a finite step, and nothing in another one."""
    operator, output = ACCUMULATORS[name]
    model = linear_step(operator, inputs="float[4,3] w, float[4,3] sum", outputs=output, domains=[MICROSOFT])
    feeds = feeds_for(model)
    feeds["sum"][0] = [0.0, -0.0, 1.0]
    batches = _batches(feeds)
    plain, scaled = make_session(model, EXACT), make_session(scaled_for_training(model), EXACT)

    def run(session: ort.InferenceSession, *which: int) -> np.ndarray:
        buffer = feeds["sum"].copy()
        for i in which:
            session.run(None, {**feeds, **batches[i], "sum": buffer})
        return buffer

    assert_same_bits(run(scaled, 0), run(plain, 0), "one finite step")
    assert_same_bits(run(scaled, 1, 2), feeds["sum"], "non-finite steps")
    assert_same_bits(run(scaled, 0, 1, 2, 3), run(plain, 0, 3), "all")


def test_lamb() -> None:
    """It has a kernel for CUDA only; looked at, not run: the signal and the guards are where they belong."""
    model = linear_step(
        f"count_next, w_next, g_next, m_next, v_next = {MICROSOFT}.LambOptimizer<alpha = [0.9], beta = [0.99]>"
        "(, , , rate, count, w, dw, m, v)",
        inputs=f"float rate, int64 count, float[4,3] w, {MOMENTS}",
        outputs=f"int64 count_next, float[4,3] w_next, {NEXT_MOMENTS}",
        domains=[MICROSOFT],
    )
    with pytest.raises(UnsupportedModelError, match="LambOptimizer, which stock ONNX Runtime lacks"):
        gs.scale(model, target="ort-cuda")
    result = gs.scale(model, target="ort-training-cuda")
    assert {s.input for s in result.report.state} >= {"w", "m", "v", "count"}
    nodes = {node.output[0]: node for node in result.model.graph.node}
    (lamb,) = (node for node in result.model.graph.node if node.op_type == "LambOptimizer")
    assert lamb.input[0] == "all_finite"
    (gradient,) = (g.value for g in result.report.gradients)
    assert gradient == "dw"
    assert nodes[lamb.input[6]].op_type in ("Mul", "Div")
    guards = {node.input[2]: node for node in nodes.values() if node.op_type == "Where"}
    assert {"w", "m", "v", "count"} <= set(guards)
    for name in ("w", "m", "v", "count"):
        assert guards[name].input[0] == "all_finite"
        assert guards[name].input[1] in lamb.output
