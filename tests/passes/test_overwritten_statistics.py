"""Batch normalization in training mode: ONNX Runtime writes the running statistics into its operands' buffers."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

import graphscale as gs
from tests.build import LINEAR, LINEAR_BACKWARD, assert_same_step, assert_skips, feeds_for, linear_step
from tests.conftest import Arrays, with_initializers

NORMALIZE = "n, mean_next, variance_next = BatchNormalization<training_mode = 1>(x, ones, zeros, mean, variance)"


@pytest.fixture
def model() -> onnx.ModelProto:
    return normalized_step()


def normalized_step(normalize: str = NORMALIZE) -> onnx.ModelProto:
    """Return a step on a normalized batch that carries the statistics."""
    return linear_step(
        forward=normalize + LINEAR.replace("MatMul(x", "MatMul(n"),
        backward=LINEAR_BACKWARD.replace("(x)", "(n)"),
        inputs="float[4,3] w, float[4] mean, float[4] variance",
        outputs="float[4,3] dw, float[4] mean_next, float[4] variance_next",
        constants="float[4] ones = {1, 1, 1, 1}, float[4] zeros = {0, 0, 0, 0}",
    )


@pytest.fixture
def feeds(model: onnx.ModelProto) -> Arrays:
    return feeds_for(model, variance=np.ones(4, np.float32))


def test_a_skipped_step_keeps_fed_statistics(model: onnx.ModelProto, feeds: Arrays) -> None:
    report = assert_same_step(model, feeds)
    assert {"mean", "variance"} <= {state.input for state in report.state}


def test_a_skipped_step_keeps_statistics_with_initial_values(model: onnx.ModelProto, feeds: Arrays) -> None:
    held = {name: feeds.pop(name) for name in ("mean", "variance")}
    assert_skips(gs.scale(with_initializers(model, held), "dynamic"), feeds)


def test_only_statistics_without_a_buffer_of_their_own_are_copied() -> None:
    model = normalized_step("fresh = Abs(mean)" + NORMALIZE.replace("mean, variance)", "fresh, variance)"))
    outputs = {name for node in gs.scale(model).model.graph.node for name in node.output}
    assert {name for name in outputs if name.endswith(".copy")} == {"variance.copy"}
