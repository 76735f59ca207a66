"""Files that another tool rewrote are verified without `exact`, by the relation, and wrong ones are not."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest

import graphscale as gs
from graphscale.checks.verification.verify_report import RELATION, TRANSLATION
from graphscale.operators import Trait
from graphscale.operators.table import operators_with
from tests.conftest import load_example

MODELS = ("pytorch/mlp_momentum", "jax/mlp_adam", "tensorflow/dense_momentum", "pytorch/bce")


def scaled(name: str, **options: object) -> tuple[onnx.ModelProto, onnx.ModelProto]:
    original, model = load_example(name).model(), onnx.ModelProto()
    model.CopyFrom(gs.scale(original, **options).model)
    return original, model


def swap_operands(model: onnx.ModelProto) -> None:
    """Swap the operands of each commutative operator."""
    commutative = operators_with(Trait.COMMUTATIVE)
    for node in model.graph.node:
        if (node.domain, node.op_type) in commutative and len(node.input) == 2:
            node.input[:] = reversed(node.input)


def multiply_by_the_inverse(model: onnx.ModelProto) -> None:
    """Write each quotient by the scale as a product with its reciprocal."""
    nodes = list(model.graph.node)
    del model.graph.node[:]
    for node in nodes:
        if node.op_type == "Div" and node.input[1] == "current_loss_scale":
            inverse = f"{node.output[0]}.inverse"
            model.graph.node.append(onnx.helper.make_node("Reciprocal", [node.input[1]], [inverse]))
            node.op_type, node.input[1] = "Mul", inverse
        model.graph.node.append(node)


def copy_each_value(model: onnx.ModelProto) -> None:
    """Put an Identity behind each input of the original."""
    nodes = list(model.graph.node)
    del model.graph.node[:]
    for value in model.graph.input:
        model.graph.node.append(onnx.helper.make_node("Identity", [value.name], [f"{value.name}.copy"]))
    names = {value.name for value in model.graph.input} - {"current_loss_scale", "good_steps"}
    for node in nodes:
        node.input[:] = [f"{name}.copy" if name in names else name for name in node.input]
    model.graph.node.extend(nodes)


REWRITES = (swap_operands, multiply_by_the_inverse, copy_each_value)


@pytest.mark.sample(4)
@pytest.mark.parametrize(("name", "rewrite"), itertools.product(MODELS, REWRITES))
def test_a_rewritten_file(name: str, rewrite: Callable[[onnx.ModelProto], None]) -> None:
    original, model = scaled(name)
    before = model.SerializeToString()
    rewrite(model)
    assert model.SerializeToString() != before
    report = gs.verify(original, model, exact=False, runs=1)
    assert report.verdict == "verified", report.checks
    assert {check.name: check.status for check in report.checks}[TRANSLATION] == "skipped"
    strict = gs.verify(original, model, runs=0)
    assert not strict.ok and {check.name: check.status for check in strict.checks}[RELATION] == "holds"


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", ["pytorch/mlp_momentum", "pytorch/mse_tanh", "pytorch/kl_div", "jax/mlp_sgd"])
def test_a_file_behind_the_basic_level_of_onnx_runtime(name: str, tmp_path: Path) -> None:
    original, model = scaled(name)
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_BASIC
    options.optimized_model_filepath, options.log_severity_level = str(tmp_path / "optimized.onnx"), 3
    ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    optimized = onnx.load(tmp_path / "optimized.onnx")
    del optimized.metadata_props[:]
    optimized.metadata_props.extend(model.metadata_props)
    report = gs.verify(original, optimized, exact=False, runs=1, tolerance=1e-5)
    assert {check.name: check.status for check in report.checks}[RELATION] == "holds", report.checks


def _replace(node: onnx.NodeProto, old: str, new: str) -> None:
    node.input[:] = [new if name == old else name for name in node.input]


def leave_a_state_unguarded(model: onnx.ModelProto) -> None:
    node = next(n for n in model.graph.node if n.op_type == "Where" and n.output[0].endswith(".next"))
    node.input[2] = node.input[1]


def apply_another_rate(model: onnx.ModelProto) -> None:
    constants = [t for t in model.graph.initializer if t.data_type == 1 and not t.dims and "graphscale" not in t.name]
    inputs = {value.name for value in model.graph.input}
    tensor = next(t for t in constants if t.name not in inputs and 0 < onnx.numpy_helper.to_array(t) < 1)
    tensor.CopyFrom(onnx.numpy_helper.from_array(onnx.numpy_helper.to_array(tensor) * np.float32(1.5), tensor.name))


def drop_an_unscaling(model: onnx.ModelProto) -> None:
    node = next(n for n in model.graph.node if n.op_type == "Div" and n.input[1] == "current_loss_scale")
    node.op_type, node.input[:] = "Identity", [node.input[0]]


def count_by_two(model: onnx.ModelProto) -> None:
    """Let the rule count two good steps for one."""
    bodies = [f.node for f in model.functions] or [model.graph.node]
    node = next(n for nodes in bodies for n in nodes if n.op_type == "Add")
    node.input[1] = node.input[0]


@pytest.mark.parametrize(
    "damage", [leave_a_state_unguarded, apply_another_rate, drop_an_unscaling, count_by_two], ids=lambda f: f.__name__
)
def test_a_wrong_file(damage: Callable[[onnx.ModelProto], None]) -> None:
    original, model = scaled("pytorch/mlp_momentum")
    swap_operands(model)
    damage(model)
    report = gs.verify(original, model, exact=False, runs=0)
    assert not report.ok and report.verdict != "verified"


def test_a_rewritten_lowered_file_is_not_proved() -> None:
    """Its step is proved in the plain form, which the file only claims to be."""
    original, model = scaled("pytorch/mlp_momentum", target="ort-cpu")
    swap_operands(model)
    report = gs.verify(original, model, exact=False, runs=0)
    assert [check.name for check in report.checks if check.status == "not proved"] == ["proof of the file"]


def test_another_order_of_inputs() -> None:
    original, model = scaled("pytorch/mlp_momentum")
    names = [value.name for value in model.graph.input]
    model.graph.input.insert(0, model.graph.input.pop(names.index("y") if "y" in names else 1))
    report = gs.verify(original, model, exact=False, runs=0)
    assert "is not in its place among the inputs" in str(report.checks)
