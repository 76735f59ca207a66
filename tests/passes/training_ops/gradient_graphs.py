"""Gradient graphs of forward operators, as onnxruntime-training builds them. Needs onnxruntime-training."""

from __future__ import annotations

import numpy as np
import onnx
from onnx import TensorProto, helper
from onnxruntime import SessionOptions
from onnxruntime.capi._pybind_state import GradientGraphBuilder, get_optimized_model

from tests.passes.training_ops.cases import IR_VERSION
from tests.passes.training_ops.forward.node import KNOWN, UNKNOWN, Forward

LOSS = "loss"


def forward_model(case: Forward) -> onnx.ModelProto:
    """Build the model of one operator, with the sum of the sines of its first result as the loss."""
    names = ["" if value is None else f"x{i}" for i, value in enumerate(case.operands)]
    results = [f"y{i}" for i in range(case.outputs)]
    nodes = [
        helper.make_node(case.op_type, names, results, domain=case.domain, **case.attributes),
        helper.make_node("Sin", ["y0"], ["sine"]),
        helper.make_node("ReduceSum", ["sine"], [LOSS], keepdims=0),
    ]
    inputs = [_describe(name, value, case.shapes) for name, value in case.feeds().items()]
    constants = [onnx.numpy_helper.from_array(np.asarray(case.operands[i]), f"x{i}") for i in case.constants]
    loss = helper.make_tensor_value_info(LOSS, TensorProto.FLOAT, [])
    graph = helper.make_graph(nodes, "forward", inputs, [loss], constants)
    domains = [helper.make_opsetid("", case.opset), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=domains, ir_version=IR_VERSION)


def gradient_graph(model: onnx.ModelProto, weights: set[str], *, optimized: bool) -> onnx.ModelProto:
    """Return the gradient graph of a loss, of the model itself, or optimized first as `generate_artifacts` does."""
    options = SessionOptions()
    options.log_severity_level = 4
    serialized = model.SerializeToString()
    if optimized:
        serialized = get_optimized_model(serialized, weights, options)
    builder = GradientGraphBuilder(serialized, {LOSS}, weights, LOSS, options)
    builder.build()
    return onnx.load_from_string(builder.get_model())


def _describe(name: str, value: np.ndarray, shapes: str) -> onnx.ValueInfoProto:
    element = helper.np_dtype_to_tensor_dtype(value.dtype)
    if shapes == UNKNOWN:
        return helper.make_tensor_value_info(name, element, None)
    return helper.make_tensor_value_info(
        name, element, value.shape if shapes == KNOWN else [f"{name}_{axis}" for axis in range(value.ndim)]
    )
