"""Graphs that graphscale scaled, damaged in one place: lint says in which way, with and without their metadata."""

from __future__ import annotations

import json
from collections.abc import Callable

import numpy as np
import onnx_ir as ir
import pytest

import graphscale as gs
from tests.checks.linting.test_models import forget, scaled
from tests.ort.artifacts.training_session import FOLDERS

pytestmark = pytest.mark.static

NAMES = ("pytorch/attention_adamw_clip", "pytorch/clip_by_value", "jax/mlp_adam", "jax/conv", "ort/transformer")


def inserted(model: ir.Model, name: str, *operators: str) -> list[ir.Node]:
    """The nodes of these operators that a pass put in."""
    return [n for n in model.graph if n.metadata_props.get("graphscale.pass") == name and n.op_type in operators]


def unscaling(model: ir.Model) -> ir.Node:
    return inserted(model, "unscale-gradients", "Div")[-1]


def guard(model: ir.Model) -> ir.Node:
    return (
        next((n for n in inserted(model, "guard-updates", "Where") if n.inputs[2] is not n.inputs[1]), None) or skip()
    )


def skip() -> ir.Node:
    pytest.skip("the graph carries no state")


def between(model: ir.Model, node: ir.Node, op_type: str, *others: ir.Value | None) -> None:
    """Put an operator between a node and the value that it reads first."""
    value = node.inputs[0]
    assert value is not None
    more = ir.node(op_type, [value, *others], name=f"more_{op_type}")
    more.outputs[0].name, more.outputs[0].type, more.outputs[0].shape = "more", value.type, value.shape
    model.graph.insert_before(node, more)
    node.replace_input_with(0, more.outputs[0])


def drop_unscaling(model: ir.Model) -> None:
    node = unscaling(model)
    one = ir.Value(name="unit", const_value=ir.tensor(np.float32(1)), type=ir.TensorType(ir.DataType.FLOAT))
    one.shape = ir.Shape([])
    model.graph.register_initializer(one)
    node.replace_input_with(1, one)


def unscale_twice(model: ir.Model) -> None:
    between(model, unscaling(model), "Div", unscaling(model).inputs[1])


def scale_twice(model: ir.Model) -> None:
    between(model, unscaling(model), "Mul", unscaling(model).inputs[1])


def clip_before_unscaling(model: ir.Model) -> None:
    between(model, unscaling(model), "Tanh")


def unscale_by_the_next_scale(model: ir.Model) -> None:
    # The gradient that the check reads stays as it is; its other readers come later.
    node = unscaling(model)
    rule = next(n for n in model.graph if n.op_type == "UpdateLossScale")
    late = ir.node("Div", [node.inputs[0], rule.outputs[0]], name="late")
    late.outputs[0].name, late.outputs[0].type, late.outputs[0].shape = (
        "late",
        node.outputs[0].type,
        node.outputs[0].shape,
    )
    model.graph.append(late)
    old = node.outputs[0]
    for use in tuple(old.uses()):
        if use.node.metadata_props.get("graphscale.pass") != "check-finite":
            use.node.replace_input_with(use.idx, late.outputs[0])
    if old.is_graph_output():
        model.graph.outputs[list(model.graph.outputs).index(old)] = late.outputs[0]
    model.graph.sort()


def drop_from_check(model: ir.Model) -> None:
    total = next(n for n in inserted(model, "check-finite", "Sum"))
    total.resize_inputs(len(total.inputs) - 1)


def check_the_largest(model: ir.Model) -> None:
    probe = inserted(model, "check-finite", "ReduceSum")[0]
    probe.op_type = "ReduceMax"


def check_without_zero(model: ir.Model) -> None:
    probe = inserted(model, "check-finite", "ReduceSum")[0]
    product = probe.inputs[0].producer() if probe.inputs[0] is not None else None
    assert product is not None and product.op_type == "Mul"
    probe.replace_input_with(0, product.inputs[0])


def swap(model: ir.Model) -> None:
    node = guard(model)
    new, old = node.inputs[1], node.inputs[2]
    node.replace_input_with(1, old)
    node.replace_input_with(2, new)


def unguard(model: ir.Model) -> None:
    node = guard(model)
    node.replace_input_with(2, node.inputs[1])


def constant_guard(model: ir.Model) -> None:
    always = ir.Value(name="always", const_value=ir.tensor(np.asarray(True)), type=ir.TensorType(ir.DataType.BOOL))
    always.shape = ir.Shape([])
    model.graph.register_initializer(always)
    guard(model).replace_input_with(0, always)


def ignore_the_check(model: ir.Model) -> None:
    rule = next(n for n in model.graph if n.op_type == "UpdateLossScale")
    always = ir.Value(name="always", const_value=ir.tensor(np.asarray(True)), type=ir.TensorType(ir.DataType.BOOL))
    always.shape = ir.Shape([])
    model.graph.register_initializer(always)
    rule.replace_input_with(len(rule.inputs) - 1, always)


def scale_is_a_constant(model: ir.Model) -> None:
    model.graph.inputs.remove(next(v for v in model.graph.inputs if v.name == "current_loss_scale"))


DAMAGE: dict[str, tuple[Callable[[ir.Model], None], set[str]]] = {
    "an unscaling is dropped": (drop_unscaling, {"GS201"}),
    "unscaled twice": (unscale_twice, {"GS202"}),
    "scaled twice": (scale_twice, {"GS103"}),
    "bent before unscaling": (clip_before_unscaling, {"GS205"}),
    "unscaled by the next scale": (unscale_by_the_next_scale, {"GS204"}),
    "a gradient is dropped from the check": (drop_from_check, {"GS301"}),
    "the check takes the largest": (check_the_largest, {"GS302"}),
    "the check without the zero": (check_without_zero, {"GS303"}),
    "swapped branches": (swap, {"GS403", "GS401"}),
    "no guard": (unguard, {"GS401", "GS404"}),
    "a constant condition": (constant_guard, {"GS402", "GS401"}),
    "the rule ignores the check": (ignore_the_check, {"GS305"}),
    "the scale is no input": (scale_is_a_constant, {"GS501"}),
}


@pytest.mark.sample(20)
@pytest.mark.parametrize("kind", DAMAGE)
@pytest.mark.parametrize("name", NAMES)
def test_damage_is_named(name: str, kind: str) -> None:
    damage, expected = DAMAGE[kind]
    model = scaled(name, "dynamic", {})
    assert gs.lint(model).clean
    damage(model)
    for _ in range(2):
        found = gs.lint(model)
        assert expected & {finding.code for finding in found.findings}, found.findings
        assert found.loss_scale == "current_loss_scale" and found.check is not None
        # The second time by what the graph does alone.
        forget(model)


def test_damage_in_place() -> None:
    model = scaled("ort/transformer", "dynamic", {"target": "ort-training"})
    node = inserted(model, "guard-updates", "Where")[0]
    node.replace_input_with(2, node.inputs[1])
    assert "GS401" in {finding.code for finding in gs.lint(model).findings}


def test_an_unordered_write() -> None:
    step = gs.fuse(FOLDERS / "conv_adamw")
    model = gs.scale(step.model, updates=step.updates, target="ort-training").model
    assert isinstance(model, ir.Model)
    (wait,) = inserted(model, "order-writes", "Where")
    written = wait.inputs[2]
    assert written is not None
    wait.outputs[0].replace_all_uses_with(written)
    assert {finding.code for finding in gs.lint(model).findings} == {"GS502"}


def test_a_lost_output() -> None:
    model = scaled("pytorch/mlp_momentum", "dynamic", {})
    gone = model.graph.outputs.pop(1)
    found = gs.lint(model).findings
    assert [(finding.code, gone.name in finding.message) for finding in found] == [("GS503", True)]


@pytest.mark.parametrize("gone", ["current_loss_scale", "good_steps", 2])
def test_a_forgotten_state(gone: str | int) -> None:
    model = scaled("pytorch/mlp_momentum", "dynamic", {})
    state = json.loads(model.metadata_props["graphscale.state"])
    name = gone if isinstance(gone, str) else list(state)[gone]
    del state[name]
    model.metadata_props["graphscale.state"] = json.dumps(state)
    assert ("GS503", name) in [(finding.code, finding.value) for finding in gs.lint(model).findings]
