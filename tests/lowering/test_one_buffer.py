"""The loop of docs/how-to/own-loop.md: one buffer for a state where the file allows it gives the bits of two."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import graphscale as gs
from graphscale.graph.failures import cannot_fail
from graphscale.graph.values import inner_nodes
from graphscale.lowering.lower_model import find_states_in_place, lower_step
from graphscale.lowering.lowering_pass import is_inserted
from graphscale.session.loading import open_model
from tests.conftest import ROOT, Arrays, assert_all_same_bits, load_example
from tests.lowering.test_products import KINDS, Kind, model_of
from tests.lowering.test_same_steps import F32_MAX, UPDATED, poisoned
from tests.session.plain import ALWAYS

pytestmark = pytest.mark.sample(1)

Loop: Any = runpy.run_path(str(ROOT / "docs" / "examples" / "one_buffer.py"))["Loop"]


def first_values(name: str) -> tuple[Arrays, Arrays]:
    """The carried inputs of a graph of models/ that its file gives no value, and a batch."""
    example = load_example(name)
    carried = {s.input for s in gs.inspect(example.path).state}
    initialized = {tensor.name for tensor in example.model().graph.initializer}
    state = {key: example.feeds[key] for key in carried - initialized}
    return state, {key: value for key, value in example.feeds.items() if key not in carried}


def with_movement(model: onnx.ModelProto, state: str, following: str) -> onnx.ModelProto:
    """A step with another output, `moved`: the distance of a state's next value from the present one."""
    nodes = [("Sub", [following, state], "movement"), ("ReduceL1", ["movement"], "moved")]
    model.graph.node.extend(
        onnx.helper.make_node(kind, read, [made], **({"keepdims": 0} if kind == "ReduceL1" else {}))
        for kind, read, made in nodes
    )
    model.graph.output.append(onnx.helper.make_tensor_value_info("moved", onnx.TensorProto.FLOAT, []))
    return model


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", UPDATED)
def test_one_buffer_gives_the_states_of_two(name: str, tmp_path: Path) -> None:
    path = str(tmp_path / "step.onnx")
    gs.scale(load_example(name).model(), gs.DynamicLossScale(1024.0, 3), target="ort-cpu").save(path)
    state, batch = first_values(name)
    one, two = Loop(path, state), Loop(path, state, shared=())
    bad = [poisoned(batch, value) for value in (np.nan, np.inf, F32_MAX)]
    for feeds in (batch, batch, bad[0], batch, bad[1], bad[2], batch, batch):
        assert_all_same_bits(one.step(feeds), two.step(feeds))
        assert_all_same_bits(one.state(), two.state())
    assert one.spare.keys() == one.now.keys() - one.shared and two.spare.keys() == two.now.keys()


def test_a_buffer_that_the_file_does_not_allow_gives_another_result(tmp_path: Path) -> None:
    path = str(tmp_path / "step.onnx")
    model = with_movement(load_example("pytorch/mlp_momentum").model(), "fc1.weight", "fc1.weight.next")
    gs.scale(model, target="ort-cpu").save(path)
    state, batch = first_values("pytorch/mlp_momentum")
    allowed, plain = Loop(path, state), Loop(path, state, shared=())
    assert allowed.shared and "fc1.weight" not in allowed.shared
    forced = Loop(path, state, shared={*allowed.shared, "fc1.weight"})
    moved = plain.step(batch)["moved"]
    assert allowed.step(batch)["moved"] == moved > 0
    assert forced.step(batch)["moved"] == 0


@pytest.mark.parametrize("name", [*KINDS, "a product"])
def test_a_step_that_may_still_fail_overwrites_nothing(name: str) -> None:
    """Fallible nodes, such as those with indices of a table, stay outside of the branch of the next weight."""
    model = model_of(KINDS.get(name, Kind("dw = MatMul(xt, dy)")), is_rate_fed=True)
    scaled = open_model(gs.scale(model, gs.DynamicLossScale(1024.0, 3), updates={"w_next": "w"}))[0].clone()
    lower_step(scaled, "cpu", ALWAYS)
    assert "w" in find_states_in_place(scaled)
    inside = [inner for node in scaled.graph if node.op_type == "If" for inner in inner_nodes(node)]
    assert inside
    assert all(is_inserted(inner) or cannot_fail(inner) for inner in inside)
