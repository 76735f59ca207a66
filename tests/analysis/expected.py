"""What the analysis shall say of a step, and what steps of these tests have in common."""

from __future__ import annotations

import dataclasses

import numpy as np
import onnx

import graphscale as gs
from tests.analysis.optimizers import SGD
from tests.build import assert_same_step

PLAIN = "g1 = Identity(dw1)\n g2 = Identity(dw2)\n" + SGD
GRADIENTS = "float[4,5] dw1, float[5,3] dw2"
WEIGHTS = "w1=w1_next w2=w2_next"


@dataclasses.dataclass(frozen=True)
class Found:
    """What the report shall say."""

    places: set[str]
    gradients: set[str]
    state: dict[str, str]
    loss: str


def found(report: gs.Report, model: onnx.ModelProto) -> Found:
    return Found(
        {place.value if place.node is None else f"{place.value}:{place.input}" for place in report.places},
        {multiple_of(model, gradient.value) for gradient in report.gradients},
        {state.input: state.output or "" for state in report.state if "loss scale" not in state.how},
        report.loss,
    )


def multiple_of(model: onnx.ModelProto, name: str) -> str:
    """The value that one is only the learning rate times: it does not matter which of them is unscaled."""
    producers = {output: node for node in model.graph.node for output in node.output}
    while producers[name].op_type == "Identity" or "rate" in producers[name].input:
        name = producers[name].input[0]
    return name


def check(
    model: onnx.ModelProto,
    gradients: str,
    state: str = "",
    places: str = "two_over_n:1",
    feeds: dict[str, np.ndarray] | None = None,
) -> gs.Report:
    """The scaled step computes what the unscaled one does, and these are the gradients, the state and the places."""
    report = assert_same_step(model, feeds)
    pairs = dict(pair.split("=") for pair in state.split())
    assert found(report, model) == Found(set(places.split()), set(gradients.split()), pairs, "loss")
    assert report.coverage == 1.0
    assert report.proved
    return report
