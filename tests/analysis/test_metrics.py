"""Scalars beside the loss: the choice of the loss, and values that are no gradients."""

from __future__ import annotations

from pathlib import Path

import pytest

import graphscale as gs
from tests.analysis.expected import GRADIENTS, PLAIN, WEIGHTS, check
from tests.analysis.optimizers import ADAM, MOMENTS, NEXT, NEXT_MOMENTS, NUMBERS
from tests.build import parse, step
from tests.expressions import nodes

pytestmark = pytest.mark.static

METRICS = {
    "accuracy": nodes("metric = ReduceMean(Cast(Equal(ArgMax(y, axis=1), ArgMax(t, axis=1)), to=1), keepdims=0)"),
    "mean-error": nodes("metric = ReduceMean(Abs(d), keepdims=0)"),
    "largest-activation": nodes("metric = ReduceMax(a, keepdims=0)"),
    "norm-of-a-weight": nodes("metric = ReduceL2(w1, keepdims=0)"),
    "sum-of-a-weight": nodes("metric = ReduceSum(w1, keepdims=0)"),
    "norm-of-a-gradient": nodes("metric = ReduceL2(dw1, keepdims=0)"),
    "global-norm": nodes("metric = Sqrt(ReduceSum(dw1 * dw1, keepdims=0))"),
    "learning-rate": nodes("metric = rate * one"),
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
        # The mean error depends on all that the backward pass reads, just as the loss does: either may be meant.
        check(model, "dw1 dw2", losses=("loss", "metric") if name == "mean-error" else ("loss",))

    def test_beside_updates(self, name: str) -> None:
        check(step(PLAIN + METRICS[name], outputs=f"{NEXT}, float metric", constants=NUMBERS), "dw1 dw2", WEIGHTS)


def test_the_norm_of_the_next_weight() -> None:
    """Taken for the loss, the norm has one gradient where the loss has two: no reason to take it."""
    model = step(
        ADAM + nodes("metric = ReduceL2(w1_next, keepdims=0)"),
        inputs=MOMENTS,
        outputs=f"{NEXT_MOMENTS}, float[5,3] dw2, float metric",
        constants=NUMBERS,
    )
    report = gs.inspect(model)
    assert report.loss == "loss"
    assert {gradient.value for gradient in report.gradients} == {"dw1", "dw2"}


def test_the_loss_as_two_outputs() -> None:
    model = step("copy = Identity(loss)", outputs=f"float copy, {GRADIENTS}")
    check(model, "dw1 dw2", losses=("loss", "copy"))


def test_a_linear_loss_beside_a_metric_of_its_gradients() -> None:
    """Seen from the metric, the loss's weights are constants, and its forward pass a backward pass."""
    report = gs.scale(parse(Path(__file__).with_name("linear_loss.onnxtxt").read_text(encoding="utf-8"))).report
    assert (report.loss, report.coverage) == ("v25", 1.0)
    assert [place.value for place in report.places] == ["c1"]


@pytest.mark.parametrize("copies", [False, True], ids=["shared constants", "copies"])
def test_the_norm_of_a_gradient_that_weight_decay_alone_gives(copies: bool) -> None:
    """Its backward pass would read nothing that it is computed from: constants are read by everything."""
    model = parse(Path(__file__).with_name("weight_decay_metric.onnxtxt").read_text(encoding="utf-8"))
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
