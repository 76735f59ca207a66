"""The step of an original graph."""

from __future__ import annotations

import dataclasses

import onnx
import onnx_ir as ir
import pytest

import graphscale as gs
from graphscale.analysis.hints import Hints
from graphscale.errors import PassOrderError
from graphscale.passes import ScaleLoss, UnscaleGradients
from graphscale.step.understanding import understand
from tests.build import linear_step
from tests.passes.cases import sgd

pytestmark = pytest.mark.static


def momentum() -> onnx.ModelProto:
    """SGD with a moment that the file stores, all zeros."""
    zeros = ", ".join(["0"] * 12)
    return linear_step(
        "held = Mul(m, decay)\n m_next = Add(held, dw)\n u = Mul(m_next, rate)\n w_next = Sub(w, u)",
        inputs="float[4,3] w",
        outputs="float[4,3] w_next, float[4,3] m_next",
        constants=f"float rate = {{0.1}}, float decay = {{0.9}}, float[4,3] m = {{{zeros}}}",
    )


@pytest.mark.parametrize("hints", [Hints(), Hints(updates={"m_next": "m"})], ids=["found", "named"])
def test_the_graph_is_not_changed(hints: Hints) -> None:
    """A stored state of zeros is a constant of the graph, and a state of the step."""
    model = ir.from_proto(momentum())
    before = ir.to_proto(model).SerializeToString(deterministic=True)
    step = understand(model, hints)
    assert {(state.output.name, state.input.name) for state in step.states} == {("w_next", "w"), ("m_next", "m")}
    assert ir.to_proto(model).SerializeToString(deterministic=True) == before
    assert not any(value.meta for value in model.graph.initializers.values())


def test_a_stored_state_of_zeros_becomes_an_input_before_the_scale() -> None:
    inputs = [value.name for value in gs.scale(momentum()).model.graph.input]
    assert inputs[-3:] == ["m", "current_loss_scale", "good_steps"]


def test_a_step_is_a_value() -> None:
    step = understand(ir.from_proto(sgd()))
    with pytest.raises(dataclasses.FrozenInstanceError):
        step.guard = None  # type: ignore[misc]
    assert [value.name for value in step.losses] == ["loss"]
    assert [value.name for value in step.batches] == ["x", "t"]
    assert (step.metrics, step.hyperparameters, step.scales, step.done) == ((), (), (), frozenset())


def test_passes_return_the_next_step() -> None:
    first = ScaleLoss(8).begin(ir.from_proto(sgd()))
    second = UnscaleGradients().run(first)
    assert (len(first.quotients), len(second.quotients)) == (0, 1)
    assert (first.done, second.done) == ({"scale-loss"}, {"scale-loss", "unscale-gradients"})
    assert "graphscale.step" not in first.model.meta
    with pytest.raises(PassOrderError):
        UnscaleGradients().run(second)


def test_the_step_of_a_model_is_not_that_of_its_copy() -> None:
    """The pass after would change the original's graph."""
    model = ir.from_proto(sgd())
    ScaleLoss()(model)
    copy = model.clone()
    copy.meta.update(model.meta)
    with pytest.raises(PassOrderError):
        UnscaleGradients()(copy)
