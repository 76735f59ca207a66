"""Nodes change sides where that saves casts, as if all casts of the graph were counted again each time."""

from __future__ import annotations

import collections
import dataclasses
import random

import onnx
import onnx_ir as ir
import pytest

from graphscale.analysis.training_graph import analyse
from graphscale.operators import Colour
from graphscale.passes.casting import precision_choice as module
from graphscale.passes.casting.precision_choice import plan_precision, takes_cast
from graphscale.passes.casting.precision_plan import PrecisionPlan
from graphscale.passes.casting.settings import make_settings
from graphscale.targets import get_target
from tests.build import FORWARD, step
from tests.conftest import load_example
from tests.random_graphs import random_presentation, random_step

pytestmark = pytest.mark.static

# Graphs of models/ and seeds of random ones. In all of them nodes change sides: to float16 in the first, and to float32
# in the second.
TO_SMALL = ("jax/conv", "pytorch/attention_adamw_clip", 0, 10, 13, 15, 22)
TO_WIDE = ("pytorch/mlp_gelu_layernorm", "ort/transformer", 36)


def graph_of(source: str | int) -> onnx.ModelProto:
    if isinstance(source, str):
        return load_example(source).model()
    choices = random.Random(source)
    made = random_step(choices)
    return made.render(random_presentation(choices, made)).model


def casts(plan: PrecisionPlan) -> set[ir.Value]:
    """The values that take a cast: those that somebody wants in the other type than they are computed in."""
    low, floats = plan.low, plan.floats
    small = {
        value
        for node in low
        for i, value in enumerate(node.outputs)
        if value in floats and i not in plan.rules[node].wide_outputs
    }
    wanted_small = collections.defaultdict[ir.Value, set[bool]](set)
    for node, rule in plan.rules.items():
        for i, value in enumerate(node.inputs):
            if value is not None and value in floats:
                wanted_small[value].add(node in low and i not in rule.wide_inputs)
    for value in floats:
        if value.is_graph_output():
            wanted_small[value].add(False)
    return {value for value, kinds in wanted_small.items() if (value not in small) in kinds}


def saved_plainly(plan: PrecisionPlan) -> set[ir.Node]:
    """The nodes that run in float16 once no change of sides saves a cast; they are tried in the order of the pass."""
    trial, colours = dataclasses.replace(plan, low=set(plan.low)), (Colour.CLEAR, Colour.INFER)

    def count() -> int:
        return len(casts(trial).difference(trial.constants))  # constants are cast offline

    movable = [node for node, rule in trial.rules.items() if rule.colour in colours and node not in trial.reasons]
    least, settled = count(), False
    while not settled:
        settled = True
        for node in (*movable, *reversed(movable)):
            if node not in trial.low and trial.rules[node].colour is Colour.INFER:
                continue
            trial.low ^= {node}
            now = count()
            if now < least:
                least, settled = now, False
            else:
                trial.low ^= {node}
    return trial.low


def assert_saves_as_plainly(
    model: onnx.ModelProto, monkeypatch: pytest.MonkeyPatch
) -> tuple[PrecisionPlan, set[ir.Node]]:
    """Choose the nodes; returns the choice, and which nodes ran in float16 before any changed sides."""
    save_casts, before, expected = module.save_casts, set[ir.Node](), set[ir.Node]()

    def save(plan: PrecisionPlan) -> None:
        before.update(plan.low)
        expected.update(saved_plainly(plan))
        assert {value for value in plan.floats if takes_cast(plan, value)} == casts(plan)
        save_casts(plan)

    monkeypatch.setattr(module, "save_casts", save)
    found, wide_ops = analyse(ir.from_proto(model).graph, asking=False), get_target("onnx").wide_ops
    plan = plan_precision(found, make_settings(), ir.DataType.FLOAT16, wide_ops)
    assert plan.low == expected
    assert {value for value in plan.floats if takes_cast(plan, value)} == casts(plan)
    return plan, before


@pytest.mark.parametrize("source", [*TO_SMALL, *TO_WIDE])
def test_nodes_change_sides_where_that_saves_casts(source: str | int, monkeypatch: pytest.MonkeyPatch) -> None:
    plan, before = assert_saves_as_plainly(graph_of(source), monkeypatch)
    moved = before - plan.low if source in TO_WIDE else plan.low - before
    assert moved, "no node changes to this side, so that this is not tested: choose another graph"


def test_operands_that_stay_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """A normalization in float16 reads scale and bias in float32, which others read in float16.

    So the bias, a row of float16 numbers, is cast back; and the scale would be, if it changed sides.
    """
    layer = """
        scale = Gather(u, first)
        bias = Gather(h, first)
        n = BatchNormalization(h, scale, bias, mean, var)
        a = Add(n, bias)
    """
    forward = FORWARD.replace("a = Tanh(h)", layer).replace(
        "y = MatMul(a, w2)", "y1 = MatMul(a, w2) y2 = MatMul(u, w2) y3 = MatMul(scale, w2) y = Sum(y1, y2, y3)"
    )
    model = step(
        forward=forward,
        inputs="float[8,5] u, float[5] mean, float[5] var",
        outputs="float[4,5] dw1",
        constants="int64 first = {0}",
    )
    plan, _ = assert_saves_as_plainly(onnx.shape_inference.infer_shapes(model), monkeypatch)
    given = {value.name: node in plan.low for node in plan.rules for value in node.outputs}
    assert (given["n"], given["bias"], given["scale"]) == (True, True, False)
    assert {"bias", "scale", "u"} <= {value.name for value in casts(plan)}
