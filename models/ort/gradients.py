"""From a forward network to its gradient graph, with the two front doors of onnxruntime-training."""

import tempfile
from pathlib import Path

import onnx
from builder import Network
from onnx import TensorProto, helper
from onnxruntime.capi._pybind_state import GradientGraphBuilder
from onnxruntime.training import artifacts
from onnxruntime.training.onnxblock import _graph_utils


def training_model(network: Network) -> onnx.ModelProto:
    """Return the training model of `generate_artifacts`: loss, backward pass, gradient accumulation."""
    # Generated names count up over the whole process: start again, so that each export is reproducible.
    _graph_utils._GRAPH_TOKEN = 0
    with tempfile.TemporaryDirectory() as folder:
        artifacts.generate_artifacts(
            network.model(),
            requires_grad=list(network.parameters),
            frozen_params=list(network.frozen),
            loss=artifacts.LossType[network.loss],
            artifact_directory=folder,
        )
        return onnx.load(Path(folder) / "training_model.onnx")


def gradient_graph(network: Network) -> onnx.ModelProto:
    """Return the raw gradient graph: weights stay initializers, the gradients are outputs, nothing accumulates."""
    model = network.model()
    labels = helper.make_tensor_value_info("labels", TensorProto.INT64, ["batch"])
    model.graph.input.append(labels)
    model.graph.node.append(
        helper.make_node("SoftmaxCrossEntropyLoss", ["output", "labels"], ["loss", "log_prob"], name="loss")
    )
    model.graph.output.pop()
    model.graph.output.append(helper.make_tensor_value_info("loss", TensorProto.FLOAT, []))
    builder = GradientGraphBuilder(model.SerializeToString(), {"loss"}, set(network.parameters), "loss")
    builder.build()
    return onnx.load_from_string(builder.get_model())
