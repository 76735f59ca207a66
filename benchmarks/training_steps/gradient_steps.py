"""Make the training steps of lowered_training.py: run by an interpreter that has onnxruntime-training and graphscale.

    python benchmarks/training_steps/gradient_steps.py FOLDER [--quick] [--known-batch] NAME ...

NAME.kernels.onnx is a workload's step with the operators of ONNX Runtime's gradient builder, and with an optimizer node
for each weight. NAME.lowered.onnx is that step lowered by `gs.lower_training_ops`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnx.shape_inference
from onnx import TensorProto, helper
from onnxruntime import SessionOptions
from onnxruntime.capi._pybind_state import GradientGraphBuilder, get_optimized_model

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT / "models" / "ort"), str(ROOT)]

from builder import Network  # noqa: E402

import graphscale as gs  # noqa: E402
from training_steps import workloads as models  # noqa: E402
from training_steps.workloads import BETAS, EPSILON, WEIGHT_DECAY, Workload, workloads  # noqa: E402

Batch = str | int


def perceptron(net: Network, model: models.Mlp, batch: Batch) -> str:
    """Linear layers with ReLU in between."""
    x = net.input("x", [batch, model.sizes[0]], np.zeros([1, model.sizes[0]], np.float32))
    count = len(model.sizes) - 1
    for index in range(1, count + 1):
        x = net.op("Gemm", x, f"fc{index}.weight", f"fc{index}.bias", transB=1)
        x = net.op("Relu", x) if index < count else x
    return x


def convnet(net: Network, model: models.Convnet, batch: Batch) -> str:
    """3 x 3 convolutions, each with batch normalization in training mode, and ReLU."""
    shape = [3, model.size, model.size]
    x = net.input("x", [batch, *shape], np.zeros([1, *shape], np.float32))
    for index, channels in enumerate(model.channels, start=1):
        stride = 1 if index == 1 else 2
        x = net.op("Conv", x, f"conv{index}.weight", kernel_shape=[3, 3], pads=[1] * 4, strides=[stride] * 2)
        statistics = (
            net.buffer(f"norm{index}.running_mean", np.zeros(channels)),
            net.buffer(f"norm{index}.running_var", np.ones(channels)),
        )
        operands = (x, f"norm{index}.weight", f"norm{index}.bias", *statistics)
        x = net.op("Relu", net.op("BatchNormalization", *operands, outputs=3, training_mode=1)[0])
    x = net.op("Flatten", net.op("GlobalAveragePool", x))
    return net.op("Gemm", x, "head.weight", "head.bias", transB=1)


def lstm(net: Network, model: models.Lstm, batch: Batch) -> str:
    """ONNX's LSTM, and a linear layer on its last hidden state."""
    shape = [batch, model.length, model.features]
    x = net.input("x", shape, np.zeros([1, *shape[1:]], np.float32))
    x = net.op("Transpose", x, perm=[1, 0, 2])
    size = net.op("Shape", x, start=1, end=2) if isinstance(batch, str) else net.ints(batch)
    start = net.op("Expand", net.constant(0), net.op("Concat", net.ints(1), size, net.ints(model.width), axis=0))
    bias = net.op("Concat", "input.bias", net.constant(np.zeros(4 * model.width)), axis=0)
    weights = [net.op("Unsqueeze", value, net.ints(0)) for value in ("input.weight", "hidden.weight", bias)]
    # The gradient builder needs all operands.
    _, last, _ = net.op("LSTM", x, *weights, "", start, start, outputs=3, hidden_size=model.width)
    return net.op("Gemm", net.op("Squeeze", last, net.ints(0)), "head.weight", "head.bias", transB=1)


def decoder(net: Network, model: models.Decoder, batch: Batch) -> str:
    """Blocks of causal attention and of two linear layers with GELU, each on what is normalized before, and added."""
    tokens = net.input("tokens", [batch, model.length], np.zeros([1, model.length], np.int64))
    size, heads = model.width // model.heads, [0, model.length, model.heads, model.width // model.heads]
    mask = net.constant(np.triu(np.full([model.length, model.length], -1e9), 1)[None, None])

    def linear(x: str, name: str) -> str:
        x = net.op("MatMul", x, net.op("Transpose", f"{name}.weight", perm=[1, 0]))
        return net.op("Add", x, f"{name}.bias") if f"{name}.bias" in model.shapes() else x

    def norm(x: str, name: str) -> str:
        # The gradient needs the mean and the inverse standard deviation, too.
        return net.op("LayerNormalization", x, f"{name}.weight", f"{name}.bias", outputs=3, axis=-1)[0]

    x = net.op("Add", net.op("Gather", "tokens.weight", tokens), "positions")
    for index in range(model.layers):
        block = f"blocks.{index}"
        parts = net.op("Split", linear(norm(x, f"{block}.norm1"), f"{block}.attention.qkv"), outputs=3, axis=-1)
        query, key, value = (net.op("Reshape", part, net.ints(*heads)) for part in parts)
        query, value = (net.op("Transpose", part, perm=[0, 2, 1, 3]) for part in (query, value))
        scores = net.op("MatMul", query, net.op("Transpose", key, perm=[0, 2, 3, 1]))
        scores = net.op("Add", net.op("Mul", scores, net.constant(size**-0.5)), mask)
        y = net.op("Transpose", net.op("MatMul", net.op("Softmax", scores, axis=-1), value), perm=[0, 2, 1, 3])
        y = net.op("Reshape", y, net.ints(0, model.length, model.width))
        x = net.op("Add", x, linear(y, f"{block}.attention.out"))
        y = linear(norm(x, f"{block}.norm2"), f"{block}.up")
        erf = net.op("Erf", net.op("Div", y, net.constant(np.sqrt(2))))
        y = net.op("Mul", net.op("Mul", y, net.op("Add", erf, net.constant(1))), net.constant(0.5))
        x = net.op("Add", x, linear(y, f"{block}.down"))
    return net.op("Reshape", linear(norm(x, "norm"), "head"), net.ints(-1, model.vocabulary))


NETWORKS: dict[type, Callable[..., str]] = {
    models.Mlp: perceptron,
    models.Convnet: convnet,
    models.Lstm: lstm,
    models.Decoder: decoder,
}


def make(workload: Workload, *, known_batch: bool) -> onnx.ModelProto:
    """Return the step of a workload; the batch has a name for its size if it is not known."""
    net = Network(workload.name)
    net.parameters = workload.weights()
    batch = workload.batch if known_batch else "batch"
    scores = NETWORKS[type(workload.model)](net, workload.model, batch)
    rows = workload.batches()[0]["target"].size if known_batch else "rows"
    net.inputs.append(helper.make_tensor_value_info("target", TensorProto.INT64, [rows]))
    net.op("SoftmaxCrossEntropyLoss", scores, "target", outputs=2)
    net.nodes[-1].output[0] = "loss"
    net.output = helper.make_tensor_value_info("loss", TensorProto.FLOAT, [])
    forward = onnx.shape_inference.infer_shapes(net.model())
    states = net.parameters | net.frozen
    constants = [value for value in forward.graph.initializer if value.name not in states]
    del forward.graph.initializer[:]
    forward.graph.initializer.extend(constants)
    kinds = {name: (TensorProto.FLOAT, value.shape) for name, value in states.items()}
    forward.graph.input.extend(helper.make_tensor_value_info(name, *kind) for name, kind in kinds.items())
    model = onnx.load_from_string(differentiated(forward, set(net.parameters)))
    graph = model.graph
    [loss] = [output for output in graph.output if output.name == "loss"]
    assert {output.name for output in graph.output} - {"loss"} == {f"{name}_grad" for name in net.parameters}
    del graph.output[:]
    graph.output.append(loss)
    add_optimizers(graph, net.parameters, workload.optimizer)
    expose_statistics(graph, net.frozen)
    if "com.microsoft" not in {opset.domain for opset in model.opset_import}:
        model.opset_import.append(helper.make_opsetid("com.microsoft", 1))
    return model


def differentiated(forward: onnx.ModelProto, weights: set[str]) -> bytes:
    """Add the backward pass as `generate_artifacts` does: behind the runtime's changes to a model that is trained."""
    optimized = get_optimized_model(forward.SerializeToString(), weights, SessionOptions())
    builder = GradientGraphBuilder(optimized, {"loss"}, weights, "loss")
    builder.build()
    made: bytes = builder.get_model()
    return made


def add_optimizers(graph: onnx.GraphProto, weights: models.Arrays, optimizer: str) -> None:
    """Add an optimizer of each weight, states as inputs and outputs of the graph."""
    float32 = TensorProto.FLOAT
    known = {value.name for value in graph.input}

    def carry(name: str, kind: int, shape: tuple[int, ...]) -> tuple[str, str]:
        if name not in known:
            graph.input.append(helper.make_tensor_value_info(name, kind, shape))
        graph.output.append(helper.make_tensor_value_info(f"{name}.next", kind, shape))
        return name, f"{name}.next"

    graph.input.append(helper.make_tensor_value_info("learning_rate", float32, []))
    for name, value in weights.items():
        if optimizer == "sgd":
            weight, moved = carry(name, float32, value.shape)
            operands, results = ["learning_rate", weight, f"{name}_grad"], [moved]
            node = helper.make_node("SGDOptimizer", operands, results, domain="com.microsoft")
        else:
            states = [carry(f"{name}.step", TensorProto.INT64, ())]
            states += [carry(f"{name}.{moment}", float32, value.shape) for moment in ("exp_avg", "exp_avg_sq")]
            states.append(carry(name, float32, value.shape))
            [count, first, second, weight], results = zip(*states, strict=True)
            operands = ["learning_rate", count, weight, f"{name}_grad", first, second]
            options = {"alpha": BETAS[0], "beta": BETAS[1], "epsilon": EPSILON, "lambda": WEIGHT_DECAY}
            node = helper.make_node("AdamOptimizer", operands, results, domain="com.microsoft", **options)
        graph.node.append(node)


def expose_statistics(graph: onnx.GraphProto, statistics: models.Arrays) -> None:
    """Make the next values of running statistics outputs."""
    readers = {name: node for node in graph.node for name in node.input}
    for name, value in statistics.items():
        node = readers[name]
        output = list(node.input).index(name) - 2
        node.output[output] = f"{name}.next"
        graph.output.append(helper.make_tensor_value_info(f"{name}.next", TensorProto.FLOAT, value.shape))


def main() -> None:
    """Make the steps of the workloads that are named."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", nargs="+")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--known-batch", action="store_true")
    options = parser.parse_args()
    known = workloads(options.quick)
    for name in options.names:
        model = make(known[name], known_batch=options.known_batch)
        onnx.save(model, options.folder / f"{name}.kernels.onnx")
        onnx.save(gs.lower_training_ops(model).model, options.folder / f"{name}.lowered.onnx")


if __name__ == "__main__":
    main()
