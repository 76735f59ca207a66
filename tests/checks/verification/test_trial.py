"""The trial of `scale`: each check of it, on damaged files and wrong steps; limits, and reasons for no trial."""

from __future__ import annotations

import importlib.util
import json
import os
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
from graphscale.files.limits import Limits, limiting
from graphscale.process.child import ChildError, call_in_child
from graphscale.step import step_trial
from graphscale.step.step_trial import try_scaled
from graphscale.targets import TARGETS
from tests.build import parse
from tests.conftest import MODELS

Damage = Callable[[onnx.ModelProto], object]

# A momentum step with a penalty towards fed weights, whose gradient is added to the update.
BEGIN = """<ir_version: 8, opset_import: ["" : 17]>
g (float[4,3] x, float[4,2] t, float[3,2] w, float[3,2] anchor{inputs}) => (float loss, float[3,2] w_next{outputs})
<float half = {{0.5}}, float n = {{0.25}}, float rate = {{0.1}}, int64[1] first = {{0}}>
{{
  y = MatMul(x, w)
  d = Sub(y, t)
  dd = Mul(d, d)
  fit = ReduceMean<keepdims=0>(dd)
  dy = Mul(d, n)
  xt = Transpose(x)
  gw = MatMul(xt, dy)
  u = Mul(gw, rate)
"""
PENALTY = """
  off = Sub(w, anchor)
  oo = Mul(off, off)
  far = ReduceSum<keepdims=0>(oo)
  pull = Mul(far, half)
  loss = Add(fit, pull)
"""
FREE = "  loss = Identity(fit)\n  w_next = Sub(w, u)\n"


def write(rest: str, inputs: str = "", outputs: str = "") -> onnx.ModelProto:
    return parse(BEGIN.format(inputs=inputs, outputs=outputs) + rest + "}")


def free() -> onnx.ModelProto:
    """A right step."""
    return write(FREE)


def tried(model: onnx.ModelProto, **options: Any) -> str:
    trial = gs.scale(model, trial=True, **options).report.trial
    assert trial is not None
    return trial


def try_damaged(damage: Damage, model: onnx.ModelProto | None = None, **options: Any) -> str:
    """Try a scaled file after a change; return the report, or raise the fault."""
    original = model or free()
    result = gs.scale(original, **options)
    assert isinstance(result.model, onnx.ModelProto)
    damage(result.model)
    trial = try_scaled(original, ir.from_proto(original), ir.from_proto(result.model), result.report).trial
    assert trial is not None
    return trial


def node_of(model: onnx.ModelProto, output: str) -> onnx.NodeProto:
    return next(node for node in model.graph.node if output in node.output)


def give(model: onnx.ModelProto, output: str, op_type: str, *inputs: str, **attributes: Any) -> None:
    """Compute an output by another node."""
    node_of(model, output).CopyFrom(helper.make_node(op_type, inputs, [output], **attributes))


# --- what it finds ----------------------------------------------------------------------------------------------------


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


def keep_on_good_steps(model: onnx.ModelProto) -> None:
    give(model, "w_next", "Identity", "w")


INTERFACE: dict[Damage, str] = {
    lose_input: "input 'anchor' is missing",
    rename_input: "input 'anchor' is missing",
    widen_input: "input 'anchor' is DOUBLE, and FLOAT in the original",
    exchange_outputs: "output 'loss' is missing, or at another place",
    ask_for_an_operator: "cannot load the scaled step",
}
VALUES: dict[Damage, str] = {
    keep_the_scale: r"at scale 1024, w_next\[0, 0\] is .* \(as in the original\)",
    scale_an_output: "at scale 1024, loss is .* \\(as in the original\\)",
    keep_on_good_steps: r"at scale 1, w_next\[0, 0\] is .* \(as in the original\)",
    always_true: "with x = inf at element 6, the step is applied, and state 'w' is not finite",
    open_guard: "with x = inf at element 6, the step is applied, and state 'w' is not finite",
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


BEHIND = {
    "behind the update": "  w1 = Sub(w, u)\n  p = Mul(off, rate)\n  w_next = Sub(w1, p)\n",
    "before the update": "  p = Mul(off, rate)\n  w1 = Sub(w, p)\n  w_next = Sub(w1, u)\n",
}


@pytest.mark.parametrize("update", BEHIND.values(), ids=BEHIND)
def test_a_penalty_whose_gradient_is_added_behind_the_check(update: str) -> None:
    with pytest.raises(TrialError, match="with anchor = inf at element 3, the step is applied, and state 'w' is not"):
        tried(write(PENALTY + update))


def test_a_moment_that_joins_a_penalty_behind_the_check() -> None:
    """The moment is no parameter, and its next value depends on a gradient."""
    update = "  w_next = Sub(w, u)\n  p = Mul(off, rate)\n  up = Add(m, u)\n  m_next = Add(up, p)\n"
    model = write(PENALTY + update, ", float[3,2] m", ", float[3,2] m_next")
    with pytest.raises(TrialError, match="with anchor = inf at element 3, the step is applied, and state 'm' is not"):
        tried(model, roles={"states": {"w_next": "w", "m_next": "m"}})


def test_a_parameter_whose_gradient_is_no_gradient() -> None:
    """By wrong answers, a linear head beside a network has a metric, and its update depends on no gradient."""
    text = (Path(__file__).parents[2] / "cases" / "linear_head_beside_network.onnxtxt").read_text(encoding="utf-8")
    states = {f"{name}_next": name for name in ("w0", "a0", "w1")}
    answers = {"losses": ["loss0"], "metrics": ["loss1"], "states": states, "gradients": []}
    with pytest.raises(TrialError, match=r"with t1 = inf at element 12, the step is applied, and state 'w1' is not"):
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
    assert text.endswith(
        "state that only stores its batch, or is no parameter, is not finite next: 'last' with t = inf at element 4"
    )


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


def test_mixed_precision_compares_no_values() -> None:
    text = tried(free(), autocast="float16")
    assert ": the interface, scale 1, 1024, 8192" in text
    with pytest.raises(TrialError, match="the step is applied, and state 'w' is not finite"):
        try_damaged(always_true, autocast="float16")


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

    with pytest.raises(TrialError, match="the step is applied, and state 'w' is not finite"):
        try_damaged(write_unguarded, model, target=target)


# --- no trial ---------------------------------------------------------------------------------------------------------


def test_without_a_runtime(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert tried(free()) == "not tried: no onnxruntime is installed"


def test_without_the_runtime_of_the_target(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_trial, "installed_runtime", lambda target: None)
    assert tried(free(), target="ort-training").startswith("not tried: onnxruntime-training 1.19.2 is not installed")
    assert tried(free()).startswith("tried")


def test_a_large_model() -> None:
    with limiting(Limits(max_memory=2**8)):
        assert "bytes of weights are more than an eighth of 256 (--max-memory)" in tried(free())


def test_an_original_that_does_not_run() -> None:
    model = write(FREE)
    give(model, "dd", "Unheard", "d", "d")
    node_of(model, "dd").domain = "strange"
    model.opset_import.append(helper.make_opsetid("strange", 1))
    assert "not tried: ONNX Runtime" in tried(model) and "cannot load the original" in tried(model)


def test_an_original_without_finite_values() -> None:
    model = write(FREE.replace("Identity(fit)", "Div(fit, far)") + "  gone = Sub(rate, rate)\n", "", "")
    node = node_of(model, "gone")
    node.output[0] = "far"
    copy = onnx.NodeProto()
    copy.CopyFrom(node)
    model.graph.node.remove(node)
    model.graph.node.insert(0, copy)
    assert tried(model) == "not tried: it computes no finite loss and states on random feeds"


def slow(rounds: int) -> onnx.ModelProto:
    from fuzz.hostile.growth import _loop

    model = free()
    model.graph.initializer.append(numpy_helper.from_array(np.int64(rounds), "rounds"))
    model.graph.initializer.append(numpy_helper.from_array(np.asarray(True), "yes"))
    model.graph.initializer.append(numpy_helper.from_array(np.zeros((), np.float32), "zero"))
    model.graph.node.insert(8, _loop("slow", [helper.make_node("Neg", ["k"], ["k2"])], ["zero"], ["k"], ["k2"]))
    give(model, "loss", "Add", "fit", "slow0")
    return model


def test_limits() -> None:
    assert tried(slow(3)).startswith("tried")
    with limiting(Limits(max_seconds=1)):
        assert tried(slow(2**50)) == "not tried: it takes more than 1 s of CPU time (--max-seconds)"
    large = free()
    large.graph.initializer.append(numpy_helper.from_array(np.int64([2**30]), "many"))
    large.graph.node.insert(8, helper.make_node("Expand", ["fit", "many"], ["wide"]))
    large.graph.node.insert(9, helper.make_node("ReduceMean", ["wide"], ["mean"], keepdims=0))
    give(large, "loss", "Identity", "mean")
    assert tried(large) == f"not tried: it takes more than {2**31} bytes of memory (--max-memory)"


def refuse_in_child(read: Callable[..., Any]) -> Callable[..., Any]:
    """Let the compiler alone read a tensor, and the trial none; the analysis reads constants."""
    parent = os.getpid()
    return lambda self, *more, **options: read(self, *more, **options) if os.getpid() == parent else pytest.fail("read")


def test_weights_in_other_files_are_mapped_by_the_runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, weight = free(), numpy_helper.from_array(np.full((3, 2), 0.5, np.float32), "w")
    onnx.external_data_helper.set_external_data(weight, "weights.bin")
    model.graph.initializer.append(weight)
    onnx.save(model, tmp_path / "model.onnx")
    for name in ("numpy", "tobytes", "__array__"):
        monkeypatch.setattr(ir.ExternalTensor, name, refuse_in_child(getattr(ir.ExternalTensor, name)))
    trial = gs.scale(tmp_path / "model.onnx", trial=True).report.trial
    assert trial is not None and "values, scale 1, 1024, 8192; 4 runs" in trial


# --- the child --------------------------------------------------------------------------------------------------------


def echo(value: Any) -> Any:
    return value


def fail() -> None:
    raise ValueError("a\nb")


def end() -> None:
    os._exit(3)


def fill() -> int:
    return len(bytearray(2**31))


HERE = "tests.checks.verification.test_trial"


def test_a_call_in_a_child() -> None:
    limits: dict[str, int] = {"seconds": 5, "memory": 2**28}
    value = {"text": "é\n" * 100_000}
    assert call_in_child(f"{HERE}:echo", value, **limits) == json.loads(json.dumps(value))
    for name, text in {"fail": "ValueError: a b", "end": "code 3", "fill": "268435456 bytes of memory"}.items():
        with pytest.raises(ChildError, match=text):
            call_in_child(f"{HERE}:{name}", **limits)
