"""Numbers that are not finite: no state that was finite becomes so, whatever the file's own flag says."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest

import graphscale as gs
from graphscale.checks.verification import verify
from graphscale.checks.verification.counterexample import load_case, save_case
from tests.build import linear_step
from tests.checks.verification.trial_steps import BEHIND, FREE, PENALTY, write

POISON = "an input that is not finite"
BUFFER = {
    "of the batch": ("x", ""),
    "of another batch": ("v", ", float[4,3] v"),
}


@pytest.mark.parametrize("kind", BEHIND)
def test_a_penalty_whose_gradient_is_added_behind_the_check(kind: str, tmp_path: Path) -> None:
    """The proof shares the mistake; the flag says that all is finite, and the weight is not."""
    original = write(PENALTY + BEHIND[kind])
    scaled = gs.scale(original)
    assert verify(original, scaled, runs=0).ok
    report = verify(original, scaled, runs=1)
    (failure,) = report.failures
    assert failure.name == POISON
    assert "with a number that is not finite in 'anchor': w.next[1, 1] is " in failure.detail
    assert "(finite before the step)" in failure.detail
    save_case(report.counterexample, tmp_path / "case.npz")
    again = verify(original, scaled, replay=load_case(tmp_path / "case.npz"))
    assert [str(each) for each in again.differences] == [str(each) for each in report.differences]


@pytest.mark.parametrize("kind", BUFFER)
def test_a_buffer_that_stores_its_batch(kind: str) -> None:
    """The batch of training is behind the check; another one is stored by the original itself, and a note says so."""
    stored, inputs = BUFFER[kind]
    original = write(f"{FREE}  new = Identity({stored})\n", f"{inputs}, float[4,3] old", ", float[4,3] new")
    report = verify(original, gs.scale(original, updates={"new": "old"}), runs=1, updates={"new": "old"})
    assert report.ok, report.failures
    notes = [note for note in report.notes if "the original itself stores" in note]
    assert [note.endswith("'old' with 'v'") for note in notes] == [True] * (stored == "v")


def test_an_average_of_weights_that_are_not_finite_themselves() -> None:
    """A saturated layer hides an infinite weight; the average of the weights is then infinite in the original, too."""
    more = "u = Mul(dw, rate)  w_next = Sub(w, u)  half = Constant<value_float = 0.5>()  s = Add(average, w)"
    original = linear_step(
        f"{more}  average_next = Mul(s, half)",
        inputs="float[4,3] w, float rate, float[4,3] average",
        outputs="float[4,3] w_next, float[4,3] average_next",
    )
    updates = {"w_next": "w", "average_next": "average"}
    report = verify(original, gs.scale(original, updates=updates), runs=1, updates=updates)
    assert report.ok, report.failures


def test_a_flag_that_is_not_believed() -> None:
    """A NaN in a gradient becomes zero before the check: the flag is true, and the step is applied."""
    original = linear_step("w_next = Sub(w, dw)", outputs="float[4,3] w_next")
    updates = {"w_next": "w"}
    scaled = gs.scale(original, updates=updates).model
    assert isinstance(scaled, onnx.ModelProto)
    division = next(node for node in scaled.graph.node if node.op_type == "Div" and "current_loss_scale" in node.input)
    gradient, index = division.input[0], [*scaled.graph.node].index(division)
    division.input[0] = "without"
    nodes = [
        onnx.helper.make_node("IsNaN", [gradient], ["nan"]),
        onnx.helper.make_node("IsInf", [gradient], ["infinite"]),
        onnx.helper.make_node("Or", ["nan", "infinite"], ["bad"]),
        onnx.helper.make_node("Sub", ["current_loss_scale", "current_loss_scale"], ["nothing"]),
        onnx.helper.make_node("Where", ["bad", "nothing", gradient], ["without"]),
    ]
    for i, node in enumerate(nodes):
        scaled.graph.node.insert(index + i, node)
    checks = {check.name: check for check in verify(original, scaled, runs=1, updates=updates, numeric=True).checks}
    assert "all_finite is True, not False (a gradient is not finite)" in checks[POISON].detail
