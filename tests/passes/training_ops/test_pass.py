"""The pass on whole graphs: names, bodies, shared constants, and what it refuses."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest

import graphscale as gs
from graphscale.errors import AlreadyScaledError, UnsupportedModelError
from graphscale.operators import OPERATORS
from graphscale.operators.stock_kernels import STOCK_OPERATORS
from graphscale.passes import LowerTrainingOps
from graphscale.targets import IN_ONNX_DOMAIN
from tests.build import parse
from tests.cli.command import refuse, succeed
from tests.conftest import HAS_TRAINING, run_once

HEADER = '<ir_version: 8, opset_import: ["" : 17, "com.microsoft" : 1]>'
TWO = f"""{HEADER} two (float[2,3] dy, float[2,3] y) => (float[2,3] a, float[2,3] b) {{
    inner = com.microsoft.TanhGrad(dy, y)
    a = com.microsoft.SigmoidGrad(inner, y)
    b = com.microsoft.TanhGrad(a, y)
}}"""
BODY = f"""{HEADER} body (bool chosen, float[3] dy, float[3] y) => (float[3] dx) {{
    dx = If (chosen) <
        then_branch = one () => (float[3] then_dx) {{ then_dx = com.microsoft.ReluGrad(dy, y) }},
        else_branch = other () => (float[3] else_dx) {{
            slope = com.microsoft.TanhGrad(dy, y)
            else_dx = Neg(slope)
        }}
    >
}}"""
UNKNOWN = f"""{HEADER} unknown (float[3] dy) => (float[3] dx) {{
    [odd] dx = com.microsoft.NoSuchGrad(dy)
}}"""
DY, Y = np.float32([[1, -2, 3], [4, 5, -6]]), np.float32([[0.5, 0.25, -0.5], [0.1, 0.9, 0]])


def tanh_slope(dy: np.ndarray, y: np.ndarray) -> np.ndarray:
    return dy * (1 - y * y)


def sigmoid_slope(dy: np.ndarray, y: np.ndarray) -> np.ndarray:
    return dy * y * (1 - y)


def operators(model: onnx.ModelProto) -> set[tuple[str, str]]:
    return {(node.domain, node.op_type) for node in ir.from_proto(model).graph.all_nodes()}


def test_names_and_numbers() -> None:
    result = gs.lower_training_ops(parse(TWO))
    model = result.model
    onnx.checker.check_model(model, full_check=True)
    assert [value.name for value in model.graph.output] == ["a", "b"]
    assert {entry.domain for entry in model.opset_import} == {""}
    assert "inner" in {name for node in model.graph.node for name in node.output}
    assert result.report.to_dict()["replaced"] == {"SigmoidGrad": 1, "TanhGrad": 2}
    assert (result.report.nodes_before, result.report.nodes_after) == (3, len(model.graph.node))
    outputs, _ = run_once(model, {"dy": DY, "y": Y})
    a = sigmoid_slope(tanh_slope(DY, Y), Y)
    np.testing.assert_allclose(outputs["a"], a, rtol=1e-6)
    np.testing.assert_allclose(outputs["b"], tanh_slope(a, Y), rtol=1e-6)


def test_equal_numbers_share_one_constant() -> None:
    assert len(gs.lower_training_ops(parse(TWO)).model.graph.initializer) == 1


@pytest.mark.parametrize("chosen", [True, False])
def test_bodies(chosen: bool) -> None:
    model = gs.lower_training_ops(parse(BODY)).model
    onnx.checker.check_model(model, full_check=True)
    assert {domain for domain, _ in operators(model)} == {""}
    outputs, _ = run_once(model, {"chosen": np.bool_(chosen), "dy": DY[0], "y": Y[0]})
    expected = np.where(Y[0] > 0, DY[0], 0) if chosen else -tanh_slope(DY[0], Y[0])
    np.testing.assert_allclose(outputs["dx"], expected, rtol=1e-6)


def test_an_unknown_operator() -> None:
    with pytest.raises(UnsupportedModelError, match=r"^node 'odd' is a com\.microsoft::NoSuchGrad, which [^\n]+$"):
        gs.lower_training_ops(parse(UNKNOWN))


def test_operators_of_stock_builds_stay() -> None:
    model = parse(TWO.replace("com.microsoft.SigmoidGrad(inner, y)", "com.microsoft.FusedMatMul<transB = 1>(inner, y)"))
    lowered = gs.lower_training_ops(model).model
    assert ("com.microsoft", "FusedMatMul") in operators(lowered)
    assert {entry.domain for entry in lowered.opset_import} == {"", "com.microsoft"}


@pytest.mark.skipif(HAS_TRAINING, reason="a training build does not list its kernels")
def test_the_operators_of_the_installed_build() -> None:
    from onnxruntime.capi.onnxruntime_pybind11_state import get_all_opkernel_def

    kernels = {
        (each.domain, each.op_name)
        for each in get_all_opkernel_def()
        if each.domain == "com.microsoft" or (each.domain == "" and not onnx.defs.has(each.op_name))
    }
    assert ("com.microsoft", "FusedMatMul") in kernels
    release = tuple(map(int, ort.__version__.split(".")[:2]))
    if release == (1, 32):
        assert kernels == STOCK_OPERATORS
    elif release < (1, 32):
        assert kernels <= STOCK_OPERATORS
    else:
        assert kernels >= STOCK_OPERATORS


def test_all_other_operators_of_the_table_in_the_domain_of_onnx_are_defined_there() -> None:
    undefined = {name for domain, name in OPERATORS if not domain and not onnx.defs.has(name)}
    assert undefined - {name for domain, name in STOCK_OPERATORS if not domain} == IN_ONNX_DOMAIN


def test_a_model_without_them_is_not_modified() -> None:
    model = ir.from_proto(
        parse(TWO.replace("com.microsoft.TanhGrad", "Mul").replace("com.microsoft.SigmoidGrad", "Mul"))
    )
    assert not LowerTrainingOps()(model).modified


def test_a_scaled_model_is_refused() -> None:
    scaled = gs.scale(Path(gs.__file__).parent / "demo" / "digits_step.onnx").model
    with pytest.raises(AlreadyScaledError):
        gs.lower_training_ops(scaled)


def test_the_command(tmp_path: Path) -> None:
    onnx.save(parse(TWO), tmp_path / "step.onnx")
    printed = succeed(tmp_path, "lower-training", "step.onnx", "-o", "out.onnx")
    assert "2 TanhGrad" in printed
    assert ("", "Mul") in operators(onnx.load(tmp_path / "out.onnx"))
    onnx.save(parse(UNKNOWN), tmp_path / "unknown.onnx")
    refuse(tmp_path, "lower-training", "unknown.onnx", "-o", "other.onnx", words=("'odd'", "NoSuchGrad"))
    assert not (tmp_path / "other.onnx").exists()


@pytest.mark.static
def test_a_shape_with_its_default_start_is_known() -> None:
    """ONNX Runtime's gradient builder writes the default, and no type of the result."""
    text = f"""{HEADER} table (float[7,2] table, int64[n,3] rows, float[n,3,2] dy) => (float[7,2] dx) {{
        sizes = Shape<start = 0>(table)
        dx = com.microsoft.GatherGrad<axis = 0>(sizes, rows, dy)
    }}"""
    model = gs.lower_training_ops(parse(text)).model
    onnx.checker.check_model(model, full_check=True)
    assert ("com.microsoft", "GatherGrad") not in operators(model)
