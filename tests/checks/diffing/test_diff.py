"""`graphscale.diff`: the differences between two models."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest

import graphscale as gs
from graphscale.checks.diffing.compare import compare
from tests.build import step
from tests.checks.drawing.graphs import deep_network, scaled_model
from tests.conftest import MODEL_NAMES, MODELS, load_example

pytestmark = pytest.mark.static

MOMENTUM = "pytorch/mlp_momentum"


def momentum() -> onnx.ModelProto:
    return load_example(MOMENTUM).model()


def rename_values(model: onnx.ModelProto) -> None:
    """Give every computed value another name, but for the outputs of the graph."""
    kept = {value.name for value in model.graph.output}
    names = {name: f"v{i}" for i, node in enumerate(model.graph.node) for name in node.output if name not in kept}
    for node in model.graph.node:
        for side in (node.input, node.output):
            side[:] = [names.get(name, name) for name in side]
    for value in model.graph.value_info:
        value.name = names.get(value.name, value.name)


def drop_node_names(model: onnx.ModelProto) -> None:
    for node in model.graph.node:
        node.name = ""


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", MODEL_NAMES)
def test_scaling_inserts_and_removes_nothing(name: str) -> None:
    original, scaled = MODELS / f"{name}.onnx", scaled_model(name)
    found = gs.diff(original, scaled)
    report = gs.inspect(scaled)
    assert found.different and found.related
    assert found.matched == found.nodes_before == report.nodes_before
    assert found.nodes_after == report.nodes_after
    assert (found.removed, found.added, found.attributes, found.retyped) == ((), (), (), ())
    assert {p: len(entries) for p, entries in found.inserted.items()} == {
        p: sum(counts.values()) for p, counts in report.inserted.items()
    }
    assert not found.reordered
    assert {value.name for value in found.initializers_added} >= {"current_loss_scale", "good_steps"}
    assert found.initializers_changed == found.initializers_removed == found.inputs_removed == ()
    for place in report.places:
        if place.node is not None:
            edge = next(e for e in found.rewired if (e.reader, e.input) == (place.node, place.input))
            assert edge.before == place.value != edge.after
    assert {change.name for change in found.metadata} >= {"graphscale.version", "graphscale.report"}
    for op in found.ops:
        assert op.difference >= 0


def test_outputs_that_another_node_computes_are_told() -> None:
    scaled = scaled_model(MOMENTUM)
    state = {s.output for s in gs.inspect(scaled).state} - {"current_loss_scale.next", "good_steps.next"}
    edges = {edge.reader: edge for edge in gs.diff(momentum(), scaled).rewired if edge.input is None}
    assert edges.keys() == state and len(state) == 8
    edge = edges["fc1.weight.next"]
    assert (edge.before, edge.after) == ("node_sub_1", "graphscale/guard-updates/fc1.weight.next.guarded")


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", MODEL_NAMES)
def test_a_model_does_not_differ_from_itself(name: str) -> None:
    path = MODELS / f"{name}.onnx"
    found = gs.diff(path, path)
    assert not found.different
    assert found.matched == found.nodes_before == found.nodes_after
    assert found.to_dict()["different"] is False


class TestMatching:
    """Nodes are recognized by names, by what they give, and by what they read."""

    @pytest.mark.parametrize(
        "change", [drop_node_names, rename_values, lambda model: (drop_node_names(model), rename_values(model))]
    )
    def test_without_names(self, change: Callable[[onnx.ModelProto], object]) -> None:
        renamed = momentum()
        change(renamed)
        found = gs.diff(momentum(), renamed)
        assert (found.matched, found.added, found.removed, found.rewired) == (60, (), (), ())
        scaled = gs.scale(renamed).model
        found = gs.diff(momentum(), scaled)
        assert (found.matched, found.added, found.removed) == (60, (), ())
        assert sum(map(len, found.inserted.values())) == 25

    def test_by_what_they_give_alone(self) -> None:
        """No names, and other operands: what is left are the names of the outputs."""
        one, other = momentum(), momentum()
        swap_inputs(other)
        for model in (one, other):
            drop_node_names(model)
        found = gs.diff(one, other)
        assert (found.matched, found.added, found.removed) == (60, (), ())
        assert [(edge.reader, edge.input) for edge in found.rewired] == [("MatMul -> mm", 0), ("MatMul -> mm", 1)]

    def test_renamed_values_are_told(self) -> None:
        renamed = momentum()
        rename_values(renamed)
        found = gs.diff(momentum(), renamed)
        assert len(found.renamed) == 60 - 9  # the loss, four weights and four moments keep theirs
        assert ("node_addmm", "addmm", "v1") in [(c.name, c.before, c.after) for c in found.renamed]

    def test_what_was_inlined_is_recognised(self) -> None:
        text = '<opset_import: ["" : 20]> local.twice (a) => (b) { b = Add(a, a) }'
        call = "twice = local.twice(dw1)"
        model = step(
            call,
            outputs="float[4,5] twice",
            domains=["local"],
            functions=text.replace("<", '<domain: "local", ').replace("local.twice", "twice"),
        )
        found = gs.diff(model, gs.scale(model).model)
        assert found.removed and found.removed[0].op == "local::twice"
        assert [entry.op for entry in found.added] == ["Add"]
        assert "local::twice" in found.functions_removed

    def test_two_scaled_models(self) -> None:
        dynamic, fixed = gs.scale(momentum()).model, gs.scale(momentum(), 1024, skip_nonfinite=True).model
        found = gs.diff(dynamic, fixed)
        assert found.related
        assert found.matched >= 60 + 4 + 11 + 8
        assert [entry.op for entry in found.removed] == ["graphscale::UpdateLossScale"]
        assert {change.name for change in found.metadata} >= {"graphscale.policy"}

    def test_two_unrelated_models(self) -> None:
        found = gs.diff(momentum(), MODELS / "ort" / "conv.onnx")
        assert not found.related
        assert found.matched < 10
        assert found.different

    def test_two_exports_with_numbered_names_are_not_taken_for_each_other(self) -> None:
        found = gs.diff(MODELS / "pytorch" / "two_losses.onnx", MODELS / "pytorch" / "attention_sgd.onnx")
        assert not found.related


def node_of(model: onnx.ModelProto, name: str) -> onnx.NodeProto:
    return next(node for node in model.graph.node if node.name == name)


def swap_inputs(model: onnx.ModelProto) -> None:
    node = node_of(model, "node_mm")
    node.input[:] = node.input[::-1]


def change_constant(model: onnx.ModelProto) -> None:
    tensor = next(t for t in model.graph.initializer if t.name == "val_25")
    tensor.CopyFrom(onnx.numpy_helper.from_array(np.float32(0.5).reshape(()), "val_25"))


def reorder(model: onnx.ModelProto) -> None:
    nodes = list(model.graph.node)
    del model.graph.node[:]
    model.graph.node.extend([nodes[3], *nodes[:3], *nodes[4:]])


@pytest.mark.parametrize(
    ("change", "field", "told"),
    [
        (
            lambda model: node_of(model, "node_t").attribute[0].ints.reverse(),
            "attributes",
            [{"name": "node_t.perm", "before": "[1, 0]", "after": "[0, 1]"}],
        ),
        (
            swap_inputs,
            "rewired",
            [
                {"reader": "node_mm", "input": 0, "before": "sub", "after": "t_2", "scope": ""},
                {"reader": "node_mm", "input": 1, "before": "t_2", "after": "sub", "scope": ""},
            ],
        ),
        (change_constant, "initializers_changed", [{"name": "val_25", "before": "0.8999999761581421", "after": "0.5"}]),
        (
            lambda model: model.graph.output.pop(),
            "outputs_removed",
            [{"name": "fc2.bias.momentum.next", "dtype": "FLOAT", "shape": "[10]"}],
        ),
        (
            lambda model: model.graph.node.add(op_type="Neg", input=["loss"], output=["negative"], name="extra"),
            "added",
            [{"name": "extra", "op": "Neg", "inputs": ("loss",), "outputs": ("negative",), "scope": ""}],
        ),
        (
            lambda model: model.metadata_props.add(key="owner", value="me"),
            "metadata",
            [{"name": "owner", "before": "", "after": "me"}],
        ),
        (
            lambda model: setattr(model.opset_import[0], "version", 21),
            "versions",
            [{"name": "opset ai.onnx", "before": "20", "after": "21"}],
        ),
        (reorder, "reordered", True),
    ],
)
def test_one_change_is_told_and_nothing_else(
    change: Callable[[onnx.ModelProto], object], field: str, told: Any
) -> None:
    model = momentum()
    change(model)
    found = gs.diff(momentum(), model).to_dict()
    value = found.pop(field)
    assert (list(value) if isinstance(value, tuple) else value) == told
    assert found.pop("different") is True
    empty = gs.diff(momentum(), momentum()).to_dict()
    numbers = ("nodes_before", "nodes_after", "matched", "related", "ops")
    assert {k: v for k, v in found.items() if k not in numbers} == {k: empty[k] for k in found if k not in numbers}


def test_changes_inside_of_subgraphs_are_told() -> None:
    branches = (
        "twice = If(flag) <then_branch = a () => (float[4,5] p) {{ [inner] p = {op}(dw1, dw1) }}, "
        "else_branch = b () => (float[4,5] q) {{ [other] q = Identity(dw1) }}>"
    )
    one, other = (
        step(f"[choice] {branches.format(op=op)}", inputs="bool flag", outputs="float[4,5] twice")
        for op in ("Add", "Mul")
    )
    assert not gs.diff(one, one).different
    found = gs.diff(one, other)
    assert [(entry.op, entry.scope) for entry in found.removed] == [("Add", "choice")]
    assert [(entry.op, entry.scope) for entry in found.added] == [("Mul", "choice")]
    assert {(op.op, op.difference) for op in found.ops if op.difference} == {("Add", -1), ("Mul", 1)}
    assert found.ops[[op.op for op in found.ops].index("Identity")].before == 1


def test_no_weight_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights of 8 GB in another file, all holes: reading them would take long, and is forbidden here."""
    path = tmp_path / "step.onnx"
    model = momentum()
    tensor = onnx.TensorProto(name="huge", data_type=onnx.TensorProto.FLOAT, dims=[2**31])
    tensor.data_location = onnx.TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value="huge.bin")
    tensor.external_data.add(key="length", value=str(2**33))
    model.graph.initializer.append(tensor)
    onnx.save(model, path)
    with (tmp_path / "huge.bin").open("wb") as file:
        file.truncate(2**33)

    def forbidden(self: ir.ExternalTensor) -> np.ndarray[Any, Any]:
        raise AssertionError(f"{self.name} was read")

    monkeypatch.setattr(ir.ExternalTensor, "numpy", forbidden)
    monkeypatch.setattr(ir.ExternalTensor, "tobytes", forbidden)
    found = gs.diff(momentum(), path)
    assert found.initializers_added == (found.initializers_added[0],)
    assert found.initializers_added[0].shape == "[2147483648]"
    assert not gs.diff(path, path).different


@pytest.mark.full
def test_neither_model_is_changed() -> None:
    before, after = momentum(), gs.scale(momentum()).model
    assert isinstance(after, onnx.ModelProto)
    bytes_before, bytes_after = before.SerializeToString(), after.SerializeToString()
    gs.diff(before, after)
    assert (before.SerializeToString(), after.SerializeToString()) == (bytes_before, bytes_after)
    scaled = scaled_model(MOMENTUM)
    text = str(ir.serde.serialize_model(scaled))
    compare(before, scaled)
    assert str(ir.serde.serialize_model(scaled)) == text


@pytest.mark.full
def test_large_graphs_take_time_in_proportion() -> None:
    """Every value renamed and no node named: the structural step has to find them all."""
    model = deep_network(300)
    renamed = onnx.ModelProto.FromString(model.SerializeToString())
    rename_values(renamed)
    drop_node_names(renamed)
    found = gs.diff(model, renamed)
    assert found.matched == len(model.graph.node) > 3000
    assert found.added == found.removed == found.rewired == ()


@pytest.mark.full
@pytest.mark.parametrize("name", ["jax/mlp_adam", "ort/recurrent"])
def test_nodes_without_names_are_found_behind_what_was_inserted(name: str) -> None:
    """Guards take over the names of outputs, and an output that nothing reads may be left out or have no name."""
    before = load_example(name).model()
    for node in before.graph.node:
        node.name = ""
    after = gs.scale(before, target="ort-training").model
    report = gs.diff(before, after)
    assert report.matched == len(before.graph.node)
    assert not report.removed
    assert not report.added
    assert gs.verify(before, after, runs=0).ok
