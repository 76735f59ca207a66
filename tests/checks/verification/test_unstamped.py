"""Steps that somebody else scaled, against their originals: other projects' and by hand, right and wrong."""

from __future__ import annotations

import onnx
import onnx.inliner
import pytest

import graphscale as gs
from graphscale.checks.verification.verify_report import VerifyReport
from graphscale.errors import ModelFileError, VerifyError
from tests.build import parse
from tests.cases import test_scaled_files
from tests.checks.verification import hand_scaled
from tests.conftest import MODELS

# The scaled file, its original, the verdict, and sentences of the report.
_UNBOUNDED = "it grows without a bound: from 3.4e+38 to {}, where no step is applied any more; below that it is Dynamic"
OTHERS = [
    ("flax_dynamic_scale", "jax_step", "verified", ("growth_delay='always'), the rule of flax",)),
    ("jmp_dynamic_loss_scale", "jax_step", "verified", ("multiplier=2.0), TensorFlow's rule",)),
    ("keras_loss_scale", "keras_step", "1 check failed", (_UNBOUNDED.format("inf"),)),
    ("pytorch_grad_scaler", "pytorch_step", "verified", ("min_loss_scale=0.0), the rule of keras and torch",)),
    ("tensorflow_cond", "tensorflow_step", "verified", ("multiplier=2.0), TensorFlow's rule",)),
    ("tensorflow_where", "tensorflow_step", "1 check failed", (_UNBOUNDED.format("nan"),)),
    (
        "onnxsim_static_scale",
        "onnxsim_step",
        "verified; applies non-finite gradients: FixedLossScale(1024.0)",
        ("a fixed loss scale is not checked: every step is applied",),
    ),
]


def _details(report: VerifyReport) -> str:
    return "\n".join([*(check.detail for check in report.checks), *report.notes])


@pytest.mark.parametrize(("scaled", "original", "verdict", "sentences"), OTHERS, ids=[row[0] for row in OTHERS])
def test_step_of_another_project(scaled: str, original: str, verdict: str, sentences: tuple[str, ...]) -> None:
    folder = MODELS / "zoo" / "others"
    report = gs.verify(folder / f"{original}.onnx", folder / f"{scaled}.onnx")
    assert report.verdict == verdict
    for sentence in sentences:
        assert sentence in _details(report)


def test_right_step_by_hand() -> None:
    report = gs.verify(parse(hand_scaled.ORIGINAL), parse(hand_scaled.RIGHT), expect_policy="dynamic")
    assert report.verdict == "verified"
    assert "increment_period=500, multiplier=2.0, max_loss_scale=16777216.0)" in _details(report)
    assert "'scale' is its loss scale, 'finite' its finite flag" in _details(report)


@pytest.mark.parametrize("name", hand_scaled.WRONG)
def test_wrong_step_by_hand(name: str) -> None:
    text, check, sentence = hand_scaled.WRONG[name]
    report = gs.verify(parse(hand_scaled.ORIGINAL), parse(text), runs=0)
    (found,) = (each for each in report.checks if each.name == check)
    assert found.status in ("fails", "not proved")
    assert sentence in found.detail
    assert not report.ok
    # Numbers alone say so, too, where a value differs.
    assert found.status == "fails" or "fail" in gs.verify(parse(hand_scaled.ORIGINAL), parse(text), runs=1).verdict


def test_check_before_a_narrowing_cast() -> None:
    """A test of the multiple before its cast to float16 sees no overflow of the cast."""
    right, wrong = (
        gs.verify(parse(hand_scaled.NARROW), parse(text), runs=0)
        for text in (hand_scaled.NARROW_RIGHT, hand_scaled.NARROW_WRONG)
    )
    assert right.ok
    (failure,) = wrong.failures
    assert "the multiple 'dw1_back' of the scale reaches 'm1_next', and no finite check tests it" in failure.detail


def test_rule_that_reads_the_old_count() -> None:
    """It grows one step later: a policy, and another one than expected."""
    text = hand_scaled.changed(
        hand_scaled.RIGHT, few="few = Less(good, period)", count="count = Where(few, counted, none)"
    )
    expected = gs.DynamicLossScale(4096, 500, max_loss_scale=2.0**24)
    assert gs.verify(parse(hand_scaled.ORIGINAL), parse(hand_scaled.RIGHT), runs=0, expect_policy=expected).ok
    report = gs.verify(parse(hand_scaled.ORIGINAL), parse(text), runs=0, expect_policy=expected)
    (failure,) = report.failures
    assert failure.name == "policy as expected"
    assert "the file has DynamicLossScale" in failure.detail
    assert "increment_period=501" in failure.detail


def test_rule_that_keeps_its_count() -> None:
    text = hand_scaled.changed(hand_scaled.RIGHT, count="count = Identity(counted)")
    report = gs.verify(parse(hand_scaled.ORIGINAL), parse(text), runs=0)
    (failure,) = report.failures
    assert "from count 499 on it grows at every step: a growth does not start the count again" in failure.detail


def test_rule_of_its_own() -> None:
    """The scale falls by the square root of two where the count is high: no policy's rule, and its values are named."""
    text = hand_scaled.changed(
        hand_scaled.RIGHT,
        constants="float less = {0.75}",
        halved="half = Div(scale, two)\n    most_of_it = Mul(scale, less)\n    halved = Where(few, half, most_of_it)",
    )
    report = gs.verify(parse(hand_scaled.ORIGINAL), parse(text), runs=0)
    assert report.verdict == "verified"
    assert "a rule of its own" in _details(report)
    assert "scale 1024, count 499, not finite: scale 768, count 0" in _details(report)
    assert not gs.verify(parse(hand_scaled.ORIGINAL), parse(text), runs=0, expect_policy="dynamic").ok


def test_flag_that_is_true_for_overflow() -> None:
    """The flag is read by its effect: true may mean that a gradient is not finite."""
    text = hand_scaled.RIGHT
    for old, new in (("finite, m1_new, m1", "bad, m1, m1_new"), ("finite, w1_new, w1", "bad, w1, w1_new")):
        text = text.replace(old, new)
    text = text.replace("    finite = Not(bad)\n", "")
    text = text.replace("finite, grown_or_not, lowered", "bad, lowered, grown_or_not")
    text = text.replace("finite, count, none", "bad, none, count")
    report = gs.verify(parse(hand_scaled.ORIGINAL), parse(text))
    assert report.verdict == "verified"


def test_static_scale_by_hand() -> None:
    """A constant scale is one that cancels; one that does not is no scale."""
    original, constants = hand_scaled.ORIGINAL, "float scale = {1024}"
    text = hand_scaled.changed(
        original,
        constants=constants,
        dy="dy_plain = Mul(d, two_over_n)\n    dy = Mul(dy_plain, scale)",
        dw1="dw1_scaled = MatMul(xt, dh)\n    dw1 = Div(dw1_scaled, scale)",
        dw2="dw2_scaled = MatMul(at, dy)\n    dw2 = Div(dw2_scaled, scale)",
    )
    report = gs.verify(parse(original), parse(text))
    assert report.verdict == "verified; applies non-finite gradients: FixedLossScale(1024.0)"
    wrong = text.replace("dw2 = Div(dw2_scaled, scale)", "dw2 = Identity(dw2_scaled)")
    with pytest.raises(ModelFileError, match="carries no loss scale"):
        gs.verify(parse(original), parse(wrong))


def test_original_is_needed() -> None:
    """Another network has other inputs."""
    with pytest.raises(ModelFileError, match="has no output 'm1_next', which the original has"):
        gs.verify(parse(hand_scaled.ORIGINAL), parse(hand_scaled.RIGHT.replace("m1_next", "m1_after")))


def test_options_for_own_files() -> None:
    with pytest.raises(VerifyError, match="tolerance is for files that graphscale scaled"):
        gs.verify(parse(hand_scaled.ORIGINAL), parse(hand_scaled.RIGHT), tolerance=0.1)


@pytest.mark.parametrize("name", [row[0] for row in OTHERS])
def test_fixtures_are_no_files_of_ours(name: str) -> None:
    model = onnx.load(MODELS / "zoo" / "others" / f"{name}.onnx")
    assert not [prop.key for prop in model.metadata_props if "graphscale" in prop.key]
    assert not [node.name for node in model.graph.node if node.domain == "graphscale"]


def _without_metadata(model: onnx.ModelProto) -> onnx.ModelProto:
    """A scaled model as a tool leaves it that inlines functions and drops metadata and names of nodes."""
    model = onnx.inliner.inline_local_functions(model)
    del model.metadata_props[:]
    graphs = [model.graph]
    for graph in graphs:
        for number, node in enumerate(graph.node):
            del node.metadata_props[:]
            node.name = f"node_{number}"
            graphs += [each.g for each in node.attribute if each.type == onnx.AttributeProto.GRAPH]
    return model


@pytest.mark.parametrize(
    "name",
    [
        "jax/mlp",  # only gradients leave it
        "jax/mlp_adamw_clip",
        "ort/conv",
        "pytorch/mlp_momentum",
        "pytorch/two_losses",
        "tensorflow/keras_dense_adam",
    ],
)
def test_own_file_without_metadata(name: str) -> None:
    model = onnx.load(MODELS / f"{name}.onnx")
    scaled = _without_metadata(gs.scale(model, gs.presets.flax(increment_period=7)).model)
    report = gs.verify(model, scaled, runs=0)
    assert report.verdict == "verified"
    assert "the rule of flax" in _details(report)


@pytest.mark.parametrize("name", ["clip_one_bound", "relu_on_a_gradient"])
def test_overflow_that_becomes_finite_above_a_tested_value(name: str) -> None:
    """The flag tests what follows from the bound of a gradient, and sees no overflow above it."""
    scaled = _without_metadata(test_scaled_files.scaled(name))
    report = gs.verify(test_scaled_files.original(name), scaled, runs=0)
    (check,) = (each for each in report.checks if each.name == "every gradient checked")
    assert check.status == "fails"
    assert "an overflow would not reach the finite check of 'da2'" in check.detail


def test_gradients_without_a_flag() -> None:
    """Without the flag the caller cannot know of a step to skip."""
    model = onnx.load(MODELS / "jax" / "mlp.onnx")
    scaled = _without_metadata(gs.scale(model).model)
    scaled.graph.output.remove(next(value for value in scaled.graph.output if value.name == "all_finite"))
    report = gs.verify(model, scaled, runs=0)
    assert "no further output is a flag by which the caller can skip the step" in _details(report)
    assert not report.ok
