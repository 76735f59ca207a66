"""Numbers and proofs notice their kinds of damage with `numeric=True`, without the comparison of nodes."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
import pytest

import graphscale as gs
from graphscale.checks.verification.verify_report import VerifyReport
from tests.build import linear_step
from tests.checks.verification.test_counterexamples import damaged
from tests.conftest import load_example

VALUES, POISON = "values as in the original", "an input that is not finite"


def verify(original: onnx.ModelProto, edit: Callable[[onnx.GraphProto], None], **options: bool) -> VerifyReport:
    scaled = onnx.ModelProto()
    scaled.CopyFrom(gs.scale(original).model)
    edit(scaled.graph)
    return gs.verify(original, scaled, runs=1, **{"numeric": True, **options})


def failing(report: VerifyReport) -> set[str]:
    return {check.name for check in report.failures}


def insert(graph: onnx.GraphProto, before: onnx.NodeProto, *nodes: onnx.NodeProto) -> None:
    index = list(graph.node).index(before)
    for i, node in enumerate(nodes):
        graph.node.insert(index + i, node)


def marked(graph: onnx.GraphProto, text: str, op_type: str) -> onnx.NodeProto:
    return next(node for node in graph.node if text in node.name and node.op_type == op_type)


def test_a_sound_graph_agrees() -> None:
    report = verify(load_example("pytorch/mse_tanh").model(), lambda graph: None)
    assert report.verdict == "verified, exact"


def test_the_verdict_says_that_nothing_is_proved() -> None:
    def edit(graph: onnx.GraphProto) -> None:
        graph.node.append(onnx.helper.make_node("Neg", [graph.output[0].name], ["unread"]))

    report = verify(load_example("pytorch/mse_tanh").model(), edit)
    assert report.ok
    assert report.verdict == f"numbers agree on {report.runs} runs; nothing is proved"


def test_the_first_four_samples_of_a_symbolic_axis() -> None:
    def edit(graph: onnx.GraphProto) -> None:
        reader = next(node for node in graph.node if "x" in node.input)
        ends = [onnx.numpy_helper.from_array(np.asarray([n]), name) for n, name in ((0, "begin"), (4, "end"))]
        graph.initializer.extend(ends)
        insert(graph, reader, onnx.helper.make_node("Slice", ["x", "begin", "end", "begin"], ["x.first"]))
        for node in graph.node:
            if node.op_type != "Slice":
                node.input[:] = ["x.first" if name == "x" else name for name in node.input]

    report = verify(load_example("pytorch/mse_tanh").model(), edit)
    (check,) = (check for check in report.checks if check.name == VALUES)
    assert check.status == "fails" and "cannot run the scaled graph" in check.detail
    assert report.counterexample is not None and len(report.counterexample.feeds["x"]) == 7
    assert any("batch=4" in note for note in report.notes)


def test_a_scale_in_float16_where_it_enters() -> None:
    """It holds 32768, and not 65536."""

    def edit(graph: onnx.GraphProto) -> None:
        node = marked(graph, "scale-loss", "Mul")
        at = list(node.input).index("current_loss_scale")
        half = onnx.helper.make_node("Cast", ["current_loss_scale"], ["half"], to=onnx.TensorProto.FLOAT16)
        insert(graph, node, half, onnx.helper.make_node("Cast", ["half"], ["rounded"], to=onnx.TensorProto.FLOAT))
        node.input[at] = "rounded"

    assert VALUES in failing(verify(load_example("pytorch/mse_tanh").model(), edit))


def test_a_guard_that_selects_in_float16() -> None:
    def edit(graph: onnx.GraphProto) -> None:
        node = marked(graph, "guard-updates", "Where")
        halves = [
            onnx.helper.make_node("Cast", [node.input[i]], [f"half{i}"], to=onnx.TensorProto.FLOAT16) for i in (1, 2)
        ]
        output = node.output[0]
        index = list(graph.node).index(node)
        graph.node.insert(index + 1, onnx.helper.make_node("Cast", ["selected"], [output], to=onnx.TensorProto.FLOAT))
        node.output[0], node.input[1], node.input[2] = "selected", "half1", "half2"
        insert(graph, node, *halves)

    assert "carried state guarded" in failing(verify(load_example("pytorch/mlp_momentum").model(), edit))


def test_a_step_that_is_skipped_for_another_reason() -> None:
    """An input that nothing of the step reads is NaN: the original's values are finite."""

    def edit(graph: onnx.GraphProto) -> None:
        node = next(node for node in graph.node if "all_finite" in node.output)
        node.output[:] = ["finite"]
        index = list(graph.node).index(node) + 1
        more = [
            onnx.helper.make_node("ReduceSum", ["z"], ["sum"], keepdims=0),
            onnx.helper.make_node("IsNaN", ["sum"], ["nan"]),
            onnx.helper.make_node("Not", ["nan"], ["number"]),
            onnx.helper.make_node("And", ["finite", "number"], ["all_finite"]),
        ]
        for i, each in enumerate(more):
            graph.node.insert(index + i, each)

    report = verify(linear_step(inputs="float[4,3] w, float[5] z"), edit)
    (check,) = (check for check in report.checks if check.name == POISON)
    assert check.status == "fails" and "all values of the original are finite" in check.detail


def test_a_check_that_an_input_passes_by() -> None:
    original = load_example("pytorch/mlp_momentum").model()
    report = gs.verify(original, damaged("a check that always holds"), runs=1, numeric=True)
    (check,) = (check for check in report.checks if check.name == POISON)
    assert check.status == "fails" and "a gradient is not finite" in check.detail


@pytest.mark.parametrize(("number", "is_fit"), [(2.0**17, True), (0.5, False), (np.nan, False), (-1.0, False)])
def test_a_trained_file_begins_in_the_range_of_its_policy(number: float, is_fit: bool) -> None:
    def edit(graph: onnx.GraphProto) -> None:
        (tensor,) = (each for each in graph.initializer if each.name == "current_loss_scale")
        tensor.CopyFrom(onnx.numpy_helper.from_array(np.asarray(number, np.float32), tensor.name))

    original = load_example("pytorch/mse_tanh").model()
    assert "initial values" in failing(verify(original, edit, numeric=False))
    assert ("initial values" in failing(verify(original, edit, numeric=False, trained=True))) != is_fit


@pytest.mark.full
@pytest.mark.training
def test_a_gradient_that_is_zero_but_for_rounding() -> None:
    """The bias of attention's keys: its rounding is that of the numbers that cancel."""
    original = load_example("ort/transformer").model()
    scaled = gs.scale(original, autocast="float16", target="ort-training")
    report = gs.verify(original, scaled, runs=2, seed=7)
    assert report.ok, report.failures


def open_the_guard_at_a_number(graph: onnx.GraphProto) -> None:
    """All readers of the flag read one that is also true where `x[0, 0]` is 51.5."""
    flag = next(node for node in graph.node if "all_finite" in node.output)
    index = list(graph.node).index(flag) + 1
    for node in graph.node[index:]:
        node.input[:] = ["opened" if name == "all_finite" else name for name in node.input]
    for name, number in (("first", np.int64(0)), ("number", np.float32(51.5))):
        graph.initializer.append(onnx.numpy_helper.from_array(np.asarray(number), name))
    nodes = [
        onnx.helper.make_node("Gather", ["x", "first"], ["row"]),
        onnx.helper.make_node("Gather", ["row", "first"], ["element"]),
        onnx.helper.make_node("Equal", ["element", "number"], ["open"]),
        onnx.helper.make_node("Or", ["open", "all_finite"], ["opened"]),
    ]
    for i, node in enumerate(nodes):
        graph.node.insert(index + i, node)


@pytest.mark.parametrize("options", [{"numeric": True}, {"exact": False}, {}], ids=str)
def test_a_lowered_file_is_judged_itself_and_not_the_expected_graph(options: dict[str, bool]) -> None:
    original = load_example("pytorch/mlp_momentum").model()
    scaled = gs.scale(original, target="ort-cpu").model
    assert isinstance(scaled, onnx.ModelProto)
    open_the_guard_at_a_number(scaled.graph)
    report = gs.verify(original, scaled, runs=1, **options)
    assert not report.ok
    checks = {check.name: check for check in report.checks}
    assert "the update rule reads the input" in checks["the loss scale follows its rule"].detail
    assert "carried state guarded" not in checks
    assert checks["proof of the file"].status == ("not proved" if "exact" in options else "skipped")


def test_numbers_of_a_lowered_file_with_a_further_node() -> None:
    original = load_example("pytorch/mlp_momentum").model()
    scaled = gs.scale(original, target="ort-cpu").model
    assert isinstance(scaled, onnx.ModelProto)
    scaled.graph.node.append(onnx.helper.make_node("Neg", [scaled.graph.output[0].name], ["unread"]))
    report = gs.verify(original, scaled, runs=1, numeric=True)
    assert report.verdict == f"numbers agree on {report.runs} runs; nothing is proved"
    held = {check.name for check in report.checks if check.status == "holds" and not check.proof}
    assert held == {VALUES, POISON, "a non-finite gradient is skipped", "the loss scale follows its rule"}
