"""Pairs by the order of inputs and outputs, between certain pairs."""

from __future__ import annotations

import onnx
import pytest

from tests.analysis.roles.steps import evidence_of, roles_of, update_step

pytestmark = pytest.mark.static

# The product of the shares so far; a fed rate times a schedule is computed alike.
UPDATE = """
    n_next = n + unit; a_next = a * beta + dw; b_next = b * beta + dw * dw; c_next = c * rate + dw
    shown_next = k * Pow(beta, Cast(n_next, to=1))
    u = a_next * shown_next; w_next = w - u
"""
INPUTS = {
    "w": "float[4,3] w",
    "a": "float[4,3] a",
    "b": "float[4,3] b",
    "c": "float[4,3] c",
    "n": "int64 n",
    "k": "float k",
    "j": "float j",
}


def ordered(inputs: str, outputs: str, more: str = "") -> onnx.ModelProto:
    """The step with its inputs and outputs in an order."""
    model = update_step(more, ", ".join(INPUTS[name] for name in inputs.split() if name != "w"), update=UPDATE)
    del model.graph.output[1:], model.graph.input[2:]
    types = {name: onnx.parser.parse_graph(f"g ({text}) => () {{ }}").input[0] for name, text in INPUTS.items()}
    model.graph.input.extend(types[name] for name in inputs.split())
    for name in outputs.split():
        of = {"shown": "k", "other": "k"}.get(name, name)
        model.graph.output.add(name=f"{name}_next").type.CopyFrom(types[of].type)
    return model


def test_between_pairs_in_one_order() -> None:
    model = ordered("w a k b c n", "w a shown b c n")
    assert roles_of(model)["shown_next"] == "next k"
    assert evidence_of(model, "shown_next") == "stated by its place, between other next values"


@pytest.mark.parametrize(
    ("inputs", "outputs"),
    [
        pytest.param("w a k b c n", "w shown a b c n", id="between others"),
        pytest.param("w a b c n k", "shown w a b c n", id="at the ends"),
        pytest.param("k w a b c n", "shown w a b c n", id="before the first"),
        pytest.param("w a b c n k", "w a b c n shown", id="behind the last"),
        pytest.param("w a k b c n", "b w shown n a c", id="in another order"),
        pytest.param("a w k n b c", "a w shown b n c", id="but for two"),
        pytest.param("w a k j b c n", "w a shown b c n", id="one of two"),
    ],
)
def test_elsewhere(inputs: str, outputs: str) -> None:
    assert roles_of(ordered(inputs, outputs))["shown_next"].endswith("?")


def test_an_output_that_depends_on_another_input() -> None:
    """The graph proposes another input: a place is no evidence against it."""
    model = ordered("w a j b c n k", "w a shown b c n")
    assert roles_of(model)["shown_next"].endswith("?")


def test_too_few_pairs() -> None:
    model = update_step("shown = k * Pow(beta, Cast(n, to=1)); n_next = n + unit", "float k, int64 n", "float shown")
    outputs = {value.name: value for value in model.graph.output}
    order = [outputs[name] for name in ("loss", "w_next", "shown", "n_next")]
    del model.graph.output[:]
    model.graph.output.extend(order)
    assert roles_of(model)["shown"] == "metric?"
