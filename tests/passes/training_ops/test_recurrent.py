"""Recurrences: nodes for each step, a Scan, and the forms that are refused."""

from __future__ import annotations

from typing import Any

import onnx
import pytest

import graphscale as gs
from graphscale.errors import UnsupportedModelError
from graphscale.passes.lower_training_ops.time_steps import LONGEST
from tests.build import parse

SIZES = "float[{steps},2,3] x, float[1,{rows},3] w, float[1,{rows},4] r"
HEADER = '<ir_version: 8, opset_import: ["" : 17, "com.microsoft" : 1]>'


def recurrent(op_type: str, steps: int | str, *, operands: str = "x, w, r", attributes: str = "") -> onnx.ModelProto:
    """Return a model of one operator of 4 hidden numbers."""
    rows, names = (16, "h, last, cell, cells, gates") if op_type == "LSTMTraining" else (12, "h, last, gates")
    inputs = SIZES.format(steps=steps, rows=rows)
    node = f"[unit] {names} = com.microsoft.{op_type}<hidden_size = 4{attributes}>({operands})"
    inputs += ", int32[2] lengths" if "lengths" in operands else ""
    return parse(f"{HEADER} unit ({inputs}) => (float[{steps},1,2,4] h) {{ {node} }}")


@pytest.mark.parametrize("op_type", ["LSTMTraining", "GRUTraining"])
@pytest.mark.parametrize("steps", [1, LONGEST, LONGEST + 1, "steps"])
def test_steps(op_type: str, steps: int | str) -> None:
    model = gs.lower_training_ops(recurrent(op_type, steps)).model
    is_short = isinstance(steps, int) and steps <= LONGEST
    assert ("Scan" in {node.op_type for node in model.graph.node}) is not is_short
    assert sum(node.op_type == "Tanh" for node in model.graph.node) == (
        (steps * (2 if op_type == "LSTMTraining" else 1)) if is_short else 0
    )


@pytest.mark.parametrize("op_type", ["LSTMTraining", "GRUTraining"])
@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"operands": "x, w, r, , lengths"}, "its sequences have lengths of their own"),
        ({"attributes": ', direction = "reverse"'}, "its direction is 'reverse'"),
        ({"attributes": ', activations = ["relu", "tanh", "tanh"]'}, "its activations are not sigmoid, tanh"),
        ({"attributes": ", clip = 3.0"}, "it clips"),
    ],
    ids=["lengths", "direction", "activations", "clip"],
)
def test_refusals(op_type: str, changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(UnsupportedModelError, match=rf"node 'unit' has no standard form: {reason}[^\n]*$"):
        gs.lower_training_ops(recurrent(op_type, 2, **changes))


@pytest.mark.parametrize("op_type", ["LSTMTraining", "GRUTraining"])
def test_no_steps(op_type: str) -> None:
    with pytest.raises(UnsupportedModelError, match=r"it has no time steps$"):
        gs.lower_training_ops(recurrent(op_type, 0))


def test_joined_gates() -> None:
    with pytest.raises(UnsupportedModelError, match=r"its input and forget gates are one$"):
        gs.lower_training_ops(recurrent("LSTMTraining", 2, attributes=", input_forget = 1"))
