"""Scalars beside the loss: which one is the loss, and what is no gradient."""

from __future__ import annotations

from pathlib import Path

import onnx.parser
import pytest

import graphscale as gs
from tests.analysis.expected import GRADIENTS, PLAIN, WEIGHTS, Found, check, found
from tests.analysis.optimizers import NEXT, NUMBERS
from tests.build import assert_same_step, step

METRICS = {
    "accuracy": """
        chosen = ArgMax<axis = 1>(y)
        right = ArgMax<axis = 1>(t)
        hit = Equal(chosen, right)
        hits = Cast<to = 1>(hit)
        metric = ReduceMean<keepdims = 0>(hits)
    """,
    "mean-error": "size = Abs(d)\n metric = ReduceMean<keepdims = 0>(size)",
    "largest-activation": "metric = ReduceMax<keepdims = 0>(a)",
    "norm-of-a-weight": "metric = ReduceL2<keepdims = 0>(w1)",
    "sum-of-a-weight": "metric = ReduceSum<keepdims = 0>(w1)",
    "norm-of-a-gradient": "metric = ReduceL2<keepdims = 0>(dw1)",
    "global-norm": "squares = Mul(dw1, dw1)\n total = ReduceSum<keepdims = 0>(squares)\n metric = Sqrt(total)",
    "learning-rate": "metric = Mul(rate, one)",
}


@pytest.mark.parametrize("name", METRICS)
class TestMetrics:
    """A scalar output beside the loss is neither the loss nor a gradient, wherever it stands."""

    def test_beside_gradients(self, name: str) -> None:
        check(step(METRICS[name], outputs=f"{GRADIENTS}, float metric", constants=NUMBERS), "dw1 dw2")

    def test_before_the_loss(self, name: str) -> None:
        model = step(METRICS[name], outputs=f"{GRADIENTS}, float metric", constants=NUMBERS)
        outputs = list(model.graph.output)
        del model.graph.output[:]
        model.graph.output.extend(reversed(outputs))
        report = assert_same_step(model)
        # The mean error depends on all that the backward pass reads, just as the loss does: either may be meant.
        loss = report.loss if name == "mean-error" else "loss"
        assert found(report, model) == Found({"two_over_n:1"}, {"dw1", "dw2"}, {}, loss)

    def test_beside_updates(self, name: str) -> None:
        check(step(PLAIN + METRICS[name], outputs=f"{NEXT}, float metric", constants=NUMBERS), "dw1 dw2", WEIGHTS)


def test_the_loss_as_two_outputs() -> None:
    model = step("copy = Identity(loss)", outputs=f"float copy, {GRADIENTS}")
    report = assert_same_step(model)
    assert report.loss in ("loss", "copy")
    assert {gradient.value for gradient in report.gradients} == {"dw1", "dw2"}


def test_a_linear_loss_beside_a_metric_of_its_gradients() -> None:
    """Seen from the metric, the loss's weights are constants, and its forward pass a backward pass."""
    model = onnx.parser.parse_model(Path(__file__).with_name("linear_loss.onnxtxt").read_text(encoding="utf-8"))
    report = gs.scale(model).report
    assert (report.loss, report.coverage) == ("v25", 1.0)
    assert [place.value for place in report.places] == ["c1"]


@pytest.mark.parametrize("copies", [False, True], ids=["shared constants", "copies"])
def test_the_norm_of_a_gradient_that_weight_decay_alone_gives(copies: bool) -> None:
    """Its backward pass would read nothing that it is computed from: constants are read by everything."""
    path = Path(__file__).with_name("weight_decay_metric.onnxtxt")
    model = onnx.parser.parse_model(path.read_text(encoding="utf-8"))
    if copies:
        constants = {tensor.name: tensor for tensor in model.graph.initializer}
        for node in model.graph.node:
            for index, name in enumerate(node.input):
                if name in constants:
                    node.input[index] = f"{name}.{len(model.graph.initializer)}"
                    copy = model.graph.initializer.add()
                    copy.CopyFrom(constants[name])
                    copy.name = node.input[index]
    report = gs.scale(model).report
    assert (report.loss, report.coverage) == ("v41", 1.0)
    assert {gradient.value for gradient in report.gradients} == {"v95", "v93", "v55"}
