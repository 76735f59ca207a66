"""Fused steps in float16, with float32 masters, on the CPU; and for CUDA, by structure alone."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

import graphscale as gs
from graphscale.operators.stock_kernels import STOCK_OPERATORS
from graphscale.passes import Autocast
from graphscale.passes.lower_training_ops import FORMULAS
from tests.ort.long_runs.recorded import read_training
from tests.ort.long_runs.trainings import FOLDERS, GRAPHS, ORT, train_folder

STEPS = 40


@pytest.mark.sample(1)
@pytest.mark.parametrize("emulate", [False, True], ids=["typed", "emulated"])
@pytest.mark.parametrize("name", FOLDERS)
def test_training(name: str, emulate: bool) -> None:
    """It learns what float32 does, skips the same steps, and keeps weights and moments in float32."""
    mixed, recorded = Autocast(emulate=emulate), read_training(f"folders/{name}")
    own = train_folder(name, "onnx", STEPS, autocast=mixed)
    assert mixed.report is not None and mixed.report.low_nodes >= 8
    assert own.scales[:-1] == recorded.scales[1:STEPS]
    np.testing.assert_allclose(own.losses, recorded.losses[:STEPS], rtol=0.02)
    assert own.losses != recorded.losses[:STEPS] or not emulate
    assert {array.dtype for array in own.arrays.values()} == {np.dtype(np.float32)}


@pytest.mark.sample(2)
@pytest.mark.static
@pytest.mark.parametrize("name", GRAPHS)
def test_casts_alone(name: str) -> None:
    """`autocast` replaces training operators as `scale` does; a training build keeps them."""
    found = {}
    for target in ("onnx", "ort-training"):
        nodes = gs.autocast(ORT / f"{name}.onnx", target=target).model.graph.all_nodes()
        found[target] = [node for node in nodes if (node.domain, node.op_type) in FORMULAS]
    assert not found["onnx"]
    assert bool(found["ort-training"]) == (name != "gradbuilder_regression")


@pytest.mark.static
@pytest.mark.parametrize("name", [*GRAPHS, *(f"artifacts/{name}" for name in FOLDERS)])
def test_for_cuda(name: str) -> None:
    """Nothing but operators that stock builds have, products in float16, and no carried state in it."""
    model = gs.fuse(ORT / name).model if "/" in name else ir.load(ORT / f"{name}.onnx")
    scaled = gs.scale(model, target="ort-cuda", autocast="float16")
    nodes = list(scaled.model.graph.all_nodes())
    assert {node.domain for node in nodes} <= {"", "com.microsoft", "graphscale"}
    assert {(node.domain, node.op_type) for node in nodes if node.domain == "com.microsoft"} <= STOCK_OPERATORS
    products = [node for node in nodes if node.op_type in ("Conv", "FusedMatMul", "Gemm", "MatMul")]
    assert any(node.outputs[0].dtype is ir.DataType.FLOAT16 for node in products)
    states = {state.input for state in scaled.report.state}
    carried = [value for value in scaled.model.graph.inputs if value.name in states]
    assert ir.DataType.FLOAT16 not in {value.dtype for value in carried}
