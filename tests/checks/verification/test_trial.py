"""The trial of `scale`: each check of it, on damaged files and wrong steps."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.external_data_helper
import onnx_ir as ir
import pytest
from onnx import helper, numpy_helper

import graphscale as gs
from graphscale.errors import TrialError
from graphscale.step.step_trial import try_scaled
from graphscale.targets import TARGETS
from tests.build import parse
from tests.checks.verification.trial_steps import BEHIND, FREE, PENALTY, free, give, node_of, tried, write
from tests.conftest import MODELS

Damage = Callable[[onnx.ModelProto], object]


def try_damaged(damage: Damage, model: onnx.ModelProto | None = None, **options: Any) -> str:
    """Try a scaled file after a change; return the report, or raise the fault."""
    original = model or free()
    result = gs.scale(original, **options)
    assert isinstance(result.model, onnx.ModelProto)
    damage(result.model)
    trial = try_scaled(original, ir.from_proto(original), ir.from_proto(result.model), result.report).trial
    assert trial is not None
    return trial


def test_a_right_step_is_tried() -> None:
    text = tried(free())
    assert text.startswith("tried on ONNX Runtime ")
    assert "interface and values, scale 1, 1024, 8192" in text
    assert "4 runs with inf or nan in one of 2 inputs keep the state finite" in text
    assert try_damaged(lambda model: None) == text


def test_the_file_is_the_same_and_has_no_trial() -> None:
    plain, result = gs.scale(free()), gs.scale(free(), trial=True)
    assert plain.report.trial is None
    assert plain.model.SerializeToString() == result.model.SerializeToString()
    assert result.report.to_dict()["trial"] == result.report.trial
    assert "trial" not in plain.report.to_dict()


def lose_input(model: onnx.ModelProto) -> None:
    (value,) = (value for value in model.graph.input if value.name == "anchor")
    model.graph.input.remove(value)


def begin_without_a_scale(model: onnx.ModelProto) -> None:
    (value,) = (value for value in model.graph.initializer if value.name == "current_loss_scale")
    model.graph.initializer.remove(value)


def exchange_outputs(model: onnx.ModelProto) -> None:
    loss, following = model.graph.output[0], model.graph.output[1]
    copy = onnx.ValueInfoProto()
    copy.CopyFrom(loss)
    loss.CopyFrom(following)
    following.CopyFrom(copy)


def rename_input(model: onnx.ModelProto) -> None:
    model.graph.input[3].name = "anchor.unguarded"


def widen_input(model: onnx.ModelProto) -> None:
    model.graph.input[3].type.tensor_type.elem_type = onnx.TensorProto.DOUBLE


def ask_for_an_operator(model: onnx.ModelProto) -> None:
    give(model, "u", "Unheard", "gw", "rate")


def keep_the_scale(model: onnx.ModelProto) -> None:
    """Leave a gradient multiplied by the scale."""
    (quotient,) = (node for node in model.graph.node if node.op_type == "Div")
    quotient.CopyFrom(helper.make_node("Identity", [quotient.input[0]], quotient.output))


def scale_an_output(model: onnx.ModelProto) -> None:
    give(model, "loss", "Mul", "fit", "current_loss_scale")


def always_true(model: onnx.ModelProto) -> None:
    model.graph.initializer.append(numpy_helper.from_array(np.asarray(True), "yes"))
    give(model, "all_finite", "Identity", "yes")


def open_guard(model: onnx.ModelProto) -> None:
    """Let a state advance on each step."""
    guard = node_of(model, "w_next")
    (inner,) = (name for name in guard.input if name not in ("w", "all_finite") and "finite" not in name)
    guard.CopyFrom(helper.make_node("Identity", [inner], ["w_next"]))


def stop_counting(model: onnx.ModelProto) -> None:
    """Let the count of good steps stand."""
    rule = node_of(model, "good_steps.next")
    rule.output[[*rule.output].index("good_steps.next")] = "counted"
    model.graph.node.append(helper.make_node("Identity", ["good_steps"], ["good_steps.next"]))


def keep_on_good_steps(model: onnx.ModelProto) -> None:
    give(model, "w_next", "Identity", "w")


INTERFACE: dict[Damage, str] = {
    lose_input: "input 'anchor' is missing",
    rename_input: "input 'anchor' is missing",
    widen_input: "input 'anchor' is DOUBLE, and FLOAT in the original",
    begin_without_a_scale: "input 'current_loss_scale', which scaling adds, has no initial value",
    exchange_outputs: "output 'loss' is missing, or at another place",
    ask_for_an_operator: "cannot load the scaled graph",
}
VALUES: dict[Damage, str] = {
    keep_the_scale: r"at scale 1024, w_next\[0, 0\] is .* \(as in the original\)",
    scale_an_output: "at scale 1024, loss is .* \\(as in the original\\)",
    stop_counting: r"at scale 1, good_steps.next is 0, not 1 \(by the rule of the loss scale\)",
    keep_on_good_steps: r"at scale 1, w_next\[0, 0\] is .* \(as in the original\)",
    always_true: r"with x = inf at element 6, w.next\[0, 0\] is -?inf, not .* \(finite before the step\)",
    open_guard: r"with x = inf at element 6, w.next\[0, 0\] is -?inf, not .* \(finite before the step\)",
}


@pytest.mark.parametrize("damage", {**INTERFACE, **VALUES}, ids=lambda damage: damage.__name__)
def test_damage_is_found(damage: Damage) -> None:
    with pytest.raises(TrialError, match={**INTERFACE, **VALUES}[damage]):
        try_damaged(damage)


@pytest.mark.parametrize(("test", "number"), [("IsNaN", "inf"), ("IsInf", "nan")])
def test_a_check_of_one_kind_of_number(test: str, number: str) -> None:
    """Each kind of number is tried: a check that sees the other kind alone is found."""

    def narrow(model: onnx.ModelProto) -> None:
        made = [
            helper.make_node(test, ["gw"], ["bad"]),
            helper.make_node("Cast", ["bad"], ["bad.number"], to=onnx.TensorProto.FLOAT),
            helper.make_node("ReduceMax", ["bad.number"], ["worst"], keepdims=0),
            helper.make_node("Cast", ["worst"], ["any.bad"], to=onnx.TensorProto.BOOL),
        ]
        at = [*model.graph.node].index(node_of(model, "all_finite"))
        give(model, "all_finite", "Not", "any.bad")
        for node in reversed(made):
            model.graph.node.insert(at, node)

    with pytest.raises(TrialError, match=f"with x = {number} at element 6"):
        try_damaged(narrow)


@pytest.mark.parametrize("update", BEHIND.values(), ids=BEHIND)
def test_a_penalty_whose_gradient_is_added_behind_the_check(update: str) -> None:
    with pytest.raises(TrialError, match=r"with anchor = inf at element 3, w.next\[1, 1\] is -?inf"):
        tried(write(PENALTY + update))


def test_a_moment_that_joins_a_penalty_behind_the_check() -> None:
    """The moment is no parameter, and its next value depends on a gradient."""
    update = "  w_next = Sub(w, u)\n  p = Mul(off, rate)\n  up = Add(m, u)\n  m_next = Add(up, p)\n"
    model = write(PENALTY + update, ", float[3,2] m", ", float[3,2] m_next")
    with pytest.raises(TrialError, match=r"with anchor = inf at element 3, m.next\[1, 1\] is -?inf"):
        tried(model, roles={"states": {"w_next": "w", "m_next": "m"}})


def test_a_parameter_whose_gradient_is_no_gradient() -> None:
    """By wrong answers, a linear head beside a network has a metric, and its update depends on no gradient."""
    text = (Path(__file__).parents[2] / "cases" / "linear_head_beside_network.onnxtxt").read_text(encoding="utf-8")
    states = {f"{name}_next": name for name in ("w0", "a0", "w1")}
    answers = {"losses": ["loss0"], "metrics": ["loss1"], "states": states, "gradients": []}
    with pytest.raises(TrialError, match=r"with t1 = inf at element 12, w1.next\[0, 0\] is -?inf"):
        tried(parse(text), roles=answers, force_roles=True)


def test_state_that_stores_its_batch_is_a_note() -> None:
    seen = ", float[4,2] last"
    model = write(f"{FREE}  last_next = Identity(s)\n", f", float[4,2] s{seen}", ", float[4,2] last_next")
    model.graph.node.insert(0, helper.make_node("Mul", ["t", "half"], ["s.half"]))
    del model.graph.input[4]
    node_of(model, "last_next").input[0] = "t.bounded"
    model.graph.node.insert(1, helper.make_node("Identity", ["t"], ["t.bounded"]))
    # The loss sees one row of the targets alone, so that the others change nothing but the memory.
    model.graph.node.insert(2, helper.make_node("Gather", ["t", "first"], ["t.row"], axis=0))
    node_of(model, "d").input[1] = "t.row"
    text = tried(model, roles={"states": {"w_next": "w", "last_next": "last"}})
    assert text.endswith("state that only stores its batch, or is no parameter, is not finite next: 'last' with 't'")


def test_an_original_that_fails_on_the_number_is_passed_over() -> None:
    """An index computed from the number is out of range."""
    model = write(
        "  at = Cast<to=7>(pick)\n  row = Gather<axis=0>(fit.rows, at)\n  fit2 = ReduceSum<keepdims=0>(row)\n"
        "  loss = Add(fit, fit2)\n  w_next = Sub(w, u)\n".replace("fit.rows", "t"),
        inputs=", float[1] pick",
    )
    assert "4 runs with inf or nan in one of 3 inputs keep the state finite" in tried(model)


def test_random_numbers_are_the_same_in_both() -> None:
    model = write(FREE.replace("fit", "noisy") + "  noise = RandomNormalLike(fit)\n", outputs=", float noise")
    give(model, "loss", "Add", "fit", "noise")
    node = node_of(model, "noise")
    model.graph.node.remove(node)
    model.graph.node.insert(8, helper.make_node("RandomNormalLike", ["fit"], ["noise"]))
    assert "values, scale 1, 1024, 8192" in tried(model)


def test_mixed_precision_rounds_as_the_original_in_it() -> None:
    text = tried(free(), autocast="float16")
    assert ": interface and values, scale 1, 1024, 8192" in text
    with pytest.raises(
        TrialError, match=r"with x = inf at element 6, w.next\[0, 0\] is -?inf, not .* \(finite before the step\)"
    ):
        try_damaged(always_true, autocast="float16")
    with pytest.raises(TrialError, match=r"at scale 1024, .*w_next"):
        try_damaged(keep_the_scale, autocast="float16")


def test_a_fixed_scale_has_no_check() -> None:
    assert tried(free(), loss_scale=1024.0).endswith("its fixed scale is not checked, and no input was made non-finite")
    assert "4 runs" in tried(free(), loss_scale=1024.0, skip_nonfinite=True)


@pytest.mark.parametrize("target", [name for name in TARGETS if not TARGETS[name].in_place])
def test_targets_of_every_runtime(target: str) -> None:
    assert "values, scale 1, 1024, 8192; 4 runs" in tried(free(), target=target)


def test_training_operators() -> None:
    """On a runtime without them, the original runs in its standard form."""
    assert "values, scale 1, 1024, 8192; 12 runs" in tried(onnx.load(MODELS / "ort" / "bce.onnx"))


@pytest.mark.training
@pytest.mark.parametrize("target", [name for name in TARGETS if TARGETS[name].in_place])
def test_targets_with_state_in_the_session(target: str) -> None:
    model = free()
    model.graph.initializer.append(numpy_helper.from_array(np.full((3, 2), 0.5, np.float32), "w"))
    assert "values, scale 1, 1024, 8192; 4 runs" in tried(model, target=target)

    def write_unguarded(model: onnx.ModelProto) -> None:
        (write,) = (n for n in model.graph.node if n.op_type == "InPlaceAccumulatorV2" and n.input[0] == "w")
        model.graph.initializer.append(numpy_helper.from_array(np.asarray(True), "yes"))
        model.graph.node.remove(write)
        model.graph.node.append(helper.make_node("Sub", ["w", "u"], ["w.new"]))
        copy = helper.make_node("InPlaceAccumulatorV2", ["w", "w.new", "yes"], write.output, domain="com.microsoft")
        model.graph.node.append(copy)

    with pytest.raises(
        TrialError, match=r"with x = inf at element 6, w.next\[0, 0\] is -?inf, not .* \(finite before the step\)"
    ):
        try_damaged(write_unguarded, model, target=target)
