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
    """Return the raw gradient graph: weights are initializers, gradients are outputs, nothing accumulates."""
    model = network.model()
    if network.loss == "CrossEntropyLoss":
        add_cross_entropy(model.graph)
    loss = model.graph.output[0].name
    builder = GradientGraphBuilder(model.SerializeToString(), {loss}, set(network.parameters), loss)
    builder.build()
    model = onnx.load_from_string(builder.get_model())
    # The builder leaves the gradients in the order of a hash table.
    order = [loss, *(f"{name}_grad" for name in network.parameters)]
    outputs = sorted(model.graph.output, key=lambda output: order.index(output.name))
    del model.graph.output[:]
    model.graph.output.extend(outputs)
    return model


def add_cross_entropy(graph: onnx.GraphProto) -> None:
    """Make the mean cross-entropy of the graph's output, against new labels, its only output."""
    graph.input.append(helper.make_tensor_value_info("labels", TensorProto.INT64, ["batch"]))
    scores = graph.output.pop().name
    graph.node.append(
        helper.make_node("SoftmaxCrossEntropyLoss", [scores, "labels"], ["loss", "log_prob"], name="loss")
    )
    graph.output.append(helper.make_tensor_value_info("loss", TensorProto.FLOAT, []))
