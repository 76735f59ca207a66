"""The likeliest of several scalar outputs, and what is no loss, under names that say nothing."""

from __future__ import annotations

import onnx
import pytest

import graphscale as gs
from tests.analysis.roles.steps import roles_of, states, update_step
from tests.build import linear_step
from tests.expressions import nodes

pytestmark = pytest.mark.static


def renamed(model: onnx.ModelProto, **names: str) -> onnx.ModelProto:
    """Rename outputs, so that no word of a name ranks them."""
    for value in model.graph.output:
        value.name = names.get(value.name, value.name)
    for node in model.graph.node:
        for values in (node.input, node.output):
            values[:] = [names.get(name, name) for name in values]
    return model


def losses_of(model: onnx.ModelProto) -> list[str]:
    entries = [entry for entry in gs.roles(model) if entry.role == "loss"]
    assert all(entry.certain for entry in entries)
    return [entry.name for entry in entries]


OTHERS = {
    "the largest of all examples": "m = ReduceMax(d * d, keepdims=0)",
    "the mean of absolute errors": "m = ReduceMean(Abs(d), keepdims=0)",
    "the root of the loss": "m = Sqrt(loss)",
    "a share of the variance": "m = ReduceMean(d * d, keepdims=0) / ReduceMean(t * t, keepdims=0)",
}


@pytest.mark.parametrize("kind", OTHERS)
@pytest.mark.parametrize("names", [{"loss": "v0", "m": "v1"}, {"loss": "v1", "m": "v0"}], ids=str)
def test_the_loss_has_its_derivative_among_the_gradients(kind: str, names: dict[str, str]) -> None:
    model = renamed(linear_step(nodes(OTHERS[kind]), outputs="float[4,3] dw, float m"), **names)
    outputs = sorted(model.graph.output, key=lambda value: value.name)
    del model.graph.output[:]
    model.graph.output.extend(outputs)
    assert losses_of(model) == [names["loss"]]


def test_a_word_ranks_losses_with_the_same_edits() -> None:
    text = nodes("worst = ReduceMean(d * d * two_over_n, keepdims=0)")
    assert losses_of(linear_step(text, outputs="float[4,3] dw, float worst")) == ["loss"]


LEARNT = {
    "forward": nodes("y = x @ w; d = y - t; fit = ReduceMean(d * d, keepdims=0); k = Exp(s); loss = fit / k + s"),
    "backward": nodes("dy = d * two_over_n / k; dw = x.T @ dy"),
}


@pytest.mark.parametrize("shown", ["", "float fit"])
def test_a_loss_that_contains_a_learnt_number(shown: str) -> None:
    model = update_step("s_next = s - (whole - fit / k) * rate", "float s", shown, "float whole = {1}", **LEARNT)
    assert roles_of(model) == {
        **states("w", "s"),
        "loss": "loss?",
        **dict.fromkeys(("fit",) if shown else (), "metric"),
    }


def test_a_number_of_counts_is_no_loss() -> None:
    counted = "near = Where(Less(d, rate), rate, nought); counts_next = counts + near.T @ near"
    model = update_step(
        f"{counted}; share = ReduceMean(counts_next, keepdims=0)",
        "float[3,3] counts",
        "float share",
        "float nought = {0}",
    )
    assert losses_of(model) == ["loss"]
    assert roles_of(model) == {**states("w", "counts"), "share": "metric"}


def test_the_running_mean_of_targets_is_state() -> None:
    model = update_step(
        "",
        "float[3] m",
        "float[3] m_next",
        "float share = {0.9}, float rest = {0.1}, int64[1] first = {0}",
        forward=nodes(
            "m_next = m * share + ReduceMean(t, first, keepdims=0) * rest; y = x @ w; d = y - m_next\n"
            "loss = ReduceMean(d * d, keepdims=0)"
        ),
    )
    assert roles_of(model)["m_next"] == "next m"
