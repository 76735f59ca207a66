"""ONNX's own optimizers in standard operators: the results of ONNX's reference implementation, also when scaled."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx.reference import ReferenceEvaluator

from graphscale.errors import ModelFileError
from graphscale.passes import LowerOptimizers
from tests.build import EXACT, feeds_for, linear_step
from tests.conftest import run_once

DOMAIN = "ai.onnx.preview.training"
# The operator with its attributes, and its tensors beside the weight and the gradient.
OPTIMIZERS = {
    "momentum": ('Momentum<alpha = 0.9, beta = 1.0, mode = "standard", norm_coefficient = 0.0>', "v"),
    "momentum-decay": ('Momentum<alpha = 0.9, beta = 0.5, mode = "standard", norm_coefficient = 0.01>', "v"),
    "nesterov": ('Momentum<alpha = 0.9, beta = 1.0, mode = "nesterov", norm_coefficient = 0.001>', "v"),
    "adagrad": ("Adagrad<decay_factor = 0.1, epsilon = 1e-5, norm_coefficient = 0.001>", "v"),
    "adam": (
        "Adam<alpha = 0.9, beta = 0.99, epsilon = 1e-4, norm_coefficient = 0.001, norm_coefficient_post = 0.01>",
        "v h",
    ),
    "adam-defaults": ("Adam", "v h"),
}


def model_of(name: str) -> onnx.ModelProto:
    operator, states = OPTIMIZERS[name]
    names = states.split()
    return linear_step(
        f"w_next, {', '.join(f'{s}_next' for s in names)} = {DOMAIN}.{operator}(rate, step, w, dw, {', '.join(names)})",
        inputs="float rate, int64 step, float[4,3] w" + "".join(f", float[4,3] {s}" for s in names),
        outputs="float[4,3] w_next" + "".join(f", float[4,3] {s}_next" for s in names),
        domains=[DOMAIN],
    )


def feeds_of(model: onnx.ModelProto, step: int) -> dict[str, np.ndarray]:
    feeds = feeds_for(model, rate=np.float32(0.1), step=np.int64(step))
    # Accumulated squares.
    return {name: np.abs(array) if name in ("v", "h") else array for name, array in feeds.items()}


@pytest.mark.parametrize("step", [0, 1, 7])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_against_the_reference(name: str, step: int) -> None:
    model = model_of(name)
    feeds = feeds_of(model, step)
    expected = dict(zip([o.name for o in model.graph.output], ReferenceEvaluator(model).run(None, feeds), strict=True))
    lowered = ir.serde.deserialize_model(model)
    LowerOptimizers()(lowered)
    assert DOMAIN not in lowered.opset_imports
    assert all(node.domain == "" for node in lowered.graph)
    actual, _ = run_once(ir.serde.serialize_model(lowered), feeds, EXACT)
    for key, value in expected.items():
        np.testing.assert_allclose(actual[key], value, rtol=2e-6, atol=1e-7, err_msg=key)


@pytest.mark.parametrize(
    ("tensors", "results", "counts"),
    [
        ("w, dw, v, h, v", "w_next, v_next, h_next", "5 tensors and 3"),
        ("w, dw, v, h", "w_next, v_next", "4 tensors and 2"),
    ],
    ids=["tensors", "results"],
)
def test_another_number_of_tensors(tensors: str, results: str, counts: str) -> None:
    model = model_of("adam")
    node = next(node for node in model.graph.node if node.domain == DOMAIN)
    node.input[:], node.output[:] = ["rate", "step", *tensors.split(", ")], results.split(", ")
    with pytest.raises(ModelFileError, match=f"{counts} results; for each weight it needs 4 and 3"):
        LowerOptimizers()(ir.serde.deserialize_model(model))
