"""Random feeds depend on the uses of inputs in a graph; the user must give unknown properties."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest

import graphscale as gs
from graphscale.checks.running.random_feeds import find_index_limit
from graphscale.errors import VerifyError
from tests.build import LINEAR, LINEAR_BACKWARD, linear_step, parse, ramp
from tests.conftest import load_example

# An integer input, what the graph does with it, and the number it must be below.
INDEXED = {
    "gather": ("int64[6] i", "y = Gather(table, i)", 7),
    "gather-along-an-axis": ("int64[6] i", "y = Gather<axis = 1>(table, i)", 5),
    "cast-before": ("int32[6] i", "j = Cast<to = 7>(i) y = Gather(table, j)", 7),
    "float-cast-to-an-index": ("float[6] i", "j = Cast<to = 7>(i) y = Gather(table, j)", 7),
    "moved-about": ("int64[2,3] i", "j = Reshape(i, flat) k = Unsqueeze(j, zero) y = Gather(table, k)", 7),
    "two-uses": ("int64[6] i", "y = Gather(table, i) z = Gather<axis = 1>(table, i)", 5),
    "gather-elements": ("int64[7,2] i", "y = GatherElements<axis = 1>(table, i)", 5),
    "gather-nd": ("int64[6,2] i", "y = GatherND(table, i)", 5),
    "scatter-elements": (
        "int64[7,2] i",
        "u = Slice(table, zero, two, zero) y = ScatterElements<axis = 1>(table, i, i)",
        5,
    ),
    "one-hot": ("int64[6] i", "y = OneHot(i, nine, ends)", 9),
    "compared-with-a-range": ("int64[6,1] i", "y = Equal(i, range)", 4),
    "ignored-numbers": ("int64[6] i", "keep = Equal(i, hundred) j = Where(keep, hundred, i) y = Gather(table, j)", 7),
    "class-numbers": ("int64[7] i", "y = SoftmaxCrossEntropyLoss(table, i)", 5),
    "no-index": ("int64[6] i", "y = Add(i, hundred)", None),
}
CONSTANTS = (
    "float[7,5] table, int64[1] flat = {-1}, int64[1] zero = {0}, int64[1] two = {2}, int64 nine = {9}, "
    "float[2] ends = {0, 1}, int64[4] range = {0, 1, 2, 3}, int64 hundred = {-100}"
)


@pytest.mark.parametrize("case", INDEXED)
def test_limits_of_indices(case: str) -> None:
    declared, nodes, limit = INDEXED[case]
    inputs, constants = CONSTANTS.split(", ", 1)
    model = parse(
        f'<ir_version: 10, opset_import: ["" : 17]> g ({declared}, {inputs}) => (y) <{constants}> {{ {nodes} }}'
    )
    graph = ir.from_proto(model).graph
    assert find_index_limit(graph.inputs[0], {}) == limit


def test_symbolic_axes_limit_too() -> None:
    model = parse('<ir_version: 10, opset_import: ["" : 17]> g (int64[n] i, float[v,5] t) => (y) { y = Gather(t, i) }')
    graph = ir.from_proto(model).graph
    assert find_index_limit(graph.inputs[0], {"v": 11}) == 11


def behind(before: str, **options: str) -> onnx.ModelProto:
    """A linear map of `z`, which these nodes compute of the batch."""
    forward = before + LINEAR.replace("MatMul(x,", "MatMul(z,")
    return linear_step(forward=forward, backward=LINEAR_BACKWARD.replace("(x)", "(z)"), **options)


def classifier() -> onnx.ModelProto:
    return behind("z = Gather(x, i)", inputs="float[4,3] w, int64[8] i", constants="float[1] unused = {0}")


def test_indices_stay_in_range() -> None:
    model = classifier()
    assert gs.verify(model, gs.scale(model), runs=8).ok


def test_given_feeds_are_used() -> None:
    """With all-zero data the gradient is zero, and the report says that nothing can be seen of it."""
    model = classifier()
    zeros = {"x": np.zeros((8, 4), np.float32)}
    notes = gs.verify(model, gs.scale(model), runs=1, feeds=zeros).notes
    assert any("'dw' is zero" in note for note in notes)
    assert not any("zero" in note for note in gs.verify(model, gs.scale(model), runs=1).notes)


@pytest.mark.parametrize(
    ("feeds", "words"),
    [
        ({"x": np.zeros((8, 5), np.float32)}, ["'x'", "[8, 5]", "[8, 4]"]),
        ({"x": np.zeros((8, 4))}, ["'x'", "float64", "float32"]),
        ({"i": np.full(8, 99)}, ["could not be tried", "--feeds"]),
        ({"x": np.full((8, 4), np.nan, np.float32)}, ["not finite", "--feeds"]),
    ],
    ids=["shape", "dtype", "out-of-range", "nan"],
)
def test_feeds_that_do_not_fit(feeds: dict[str, Any], words: list[str]) -> None:
    model = classifier()
    with pytest.raises(VerifyError) as error:
        gs.verify(model, gs.scale(model), feeds=feeds)
    assert all(word in str(error.value) for word in words), str(error.value)
    assert "\n" not in str(error.value)


def test_names_that_are_no_inputs_are_told() -> None:
    model = classifier()
    notes = gs.verify(model, gs.scale(model), runs=1, feeds={"batch": np.zeros(3), "expected/loss": np.zeros(1)}).notes
    assert any("'batch'" in note and "expected" not in note for note in notes)


@pytest.mark.full
def test_symbolic_axes_get_one_size() -> None:
    example = load_example("pytorch/mse_tanh")
    model = example.model()
    scaled = gs.scale(model)
    assert any("batch=4" in note for note in gs.verify(model, scaled, runs=1).notes)
    assert not any("batch=" in note for note in gs.verify(model, scaled, runs=1, dims={"batch": 9}).notes)
    assert not any("batch=" in note for note in gs.verify(model, scaled, runs=1, feeds=example.feeds).notes)
    with pytest.raises(VerifyError, match="no input has an axis of this name"):
        gs.verify(model, scaled, dims={"rows": 9})
    other = {**example.feeds, "x": example.feeds["x"][:2]}
    with pytest.raises(VerifyError, match="'batch'"):
        gs.verify(model, scaled, feeds=other)


@pytest.mark.full
@pytest.mark.training
def test_labels_with_an_axis_of_their_own() -> None:
    """batch * tokens: the scores are measured."""
    model = load_example("ort/transformer").model()
    notes = gs.verify(model, gs.scale(model, 1024), runs=1, dims={"batch": 3}).notes
    assert any("tokens=24" in note for note in notes)


def test_random_numbers_without_a_seed_get_one() -> None:
    """ONNX Runtime takes a seed from the node's place, which is another one in the scaled graph."""
    model = behind("noise = RandomNormalLike(x) z = Add(x, noise)")
    report = gs.verify(model, _moved(gs.scale(model)), runs=2, numeric=True)
    assert report.ok, report.failures
    assert any("were given one" in note for note in report.notes)
    skipped = [check.name for check in report.checks if check.status == "skipped"]
    assert skipped == ["translation", "equal to the original"]
    assert all(check.status == "holds" for check in report.checks if check.name not in skipped)


def _moved(scaled: gs.ScaledModel) -> Any:
    """The same graph with a node before all others."""
    model = scaled.model
    model.graph.node.insert(0, onnx.helper.make_node("Identity", ["x"], ["unread"]))
    return model


@pytest.mark.full
def test_values_that_change_from_run_to_run_are_not_compared() -> None:
    """The other checks run, and the report names those that do not."""
    branch = "<then_branch = a () => (float[8,4] n1) { n1 = RandomNormalLike(x) }, "
    branch += "else_branch = b () => (float[8,4] n2) { n2 = Identity(x) }>"
    model = behind(f"yes = Constant<value = bool {{1}}>() noise = If {branch}(yes) z = Add(x, noise)")
    report = gs.verify(model, gs.scale(model), runs=2)
    assert report.ok, report.failures
    status = {check.name: check.status for check in report.checks}
    assert status["values as in the original"] == "skipped"
    assert status["a non-finite gradient is skipped"] == "holds"
    assert any("cannot be compared" in note for note in report.notes)


def test_numbers_that_stop_the_original_are_noted() -> None:
    original = linear_step(
        "rows = Cast<to = 7>(place) found = Gather(table, rows) metric = ReduceMean<keepdims = 0>(found)",
        inputs="float[4,3] w, float[4] place",
        outputs="float[4,3] dw, float metric",
        constants=f"float[21] table = {ramp(21)}",
    )
    report = gs.verify(original, gs.scale(original, gs.DynamicLossScale(1024)).model)
    assert report.ok, report.failures
    (note,) = (note for note in report.notes if "cannot run with 'place' = nan" in note)
    assert note.endswith("and is not skipped")
