"""What scaling a training graph costs, against reading and writing the same file.

    python benchmarks/pass_cost.py [--nodes 1000 10000 100000] [--repeats 5]

The graph is a deep residual network (MatMul, bias, ReLU, skip connection), its backward pass and SGD, 17 nodes a layer,
written with onnx_ir. Both jobs start from the file and end with a file, alternate within one process, and are counted
by the medians of their CPU times: both are single-threaded, and other processes disturb CPU time less than wall time.

    bare        onnx_ir.load, onnx_ir.save
    graphscale  graphscale.scale (load, analyse, rewrite, prove, stamp), save
"""

from __future__ import annotations

import argparse
import gc
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import onnx_ir as ir

import graphscale as gs

BATCH, WIDTH = 8, 16
NODES_PER_LAYER = 17


class Builder:
    """Collects the nodes of a float32 graph."""

    def __init__(self) -> None:
        self.nodes: list[ir.Node] = []

    def op(self, op_type: str, *inputs: ir.Value, shape: Sequence[int], **attributes: int | list[int]) -> ir.Value:
        dtype = ir.DataType.BOOL if op_type == "Greater" else ir.DataType.FLOAT
        name = f"{op_type.lower()}_{len(self.nodes)}"
        output = ir.Value(name=name, type=ir.TensorType(dtype), shape=ir.Shape(shape))
        self.nodes.append(
            ir.node(op_type, inputs, attributes=attributes, outputs=[output], name=f"node_{len(self.nodes)}")
        )
        return output


def constant(name: str, array: np.ndarray) -> ir.Value:
    tensor = ir.tensor(array, name=name)
    return ir.Value(name=name, type=ir.TensorType(tensor.dtype), shape=ir.Shape(tensor.shape), const_value=tensor)


def variable(name: str, shape: Sequence[int]) -> ir.Value:
    return ir.Value(name=name, type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape(shape))


def training_graph(layers: int) -> ir.Model:
    """A residual network of this many layers: mean squared error, backward pass, SGD."""
    build, rows, square = Builder(), (BATCH, WIDTH), (WIDTH, WIDTH)
    random = np.random.default_rng(0)
    inputs, target, rate = variable("x", rows), variable("target", rows), variable("learning_rate", ())
    zero = constant("zero", np.float32(0).reshape(()))
    axis = constant("batch_axis", np.asarray([0]))
    seed = constant("two_over_n", np.asarray(2 / (BATCH * WIDTH), dtype=np.float32))
    weights, biases = [], []
    for i in range(layers):
        initial = (random.standard_normal(square) / WIDTH).astype(np.float32)
        weights.append(constant(f"layer{i}.weight", initial))
        biases.append(constant(f"layer{i}.bias", np.zeros(WIDTH, dtype=np.float32)))

    x, saved = inputs, []
    for weight, bias in zip(weights, biases, strict=True):
        z = build.op("Add", build.op("MatMul", x, weight, shape=rows), bias, shape=rows)
        saved.append((x, z))
        x = build.op("Add", x, build.op("Relu", z, shape=rows), shape=rows)
    difference = build.op("Sub", x, target, shape=rows)
    loss = build.op("ReduceMean", build.op("Mul", difference, difference, shape=rows), shape=(), keepdims=0)
    loss.name = "loss"

    dx, outputs = build.op("Mul", difference, seed, shape=rows), []
    for i in reversed(range(layers)):
        x, z = saved[i]
        mask = build.op("Cast", build.op("Greater", z, zero, shape=rows), shape=rows, to=ir.DataType.FLOAT)
        dz = build.op("Mul", dx, mask, shape=rows)
        xt = build.op("Transpose", x, shape=rows[::-1], perm=[1, 0])
        dweight = build.op("MatMul", xt, dz, shape=square)
        dbias = build.op("ReduceSum", dz, axis, shape=(WIDTH,), keepdims=0)
        wt = build.op("Transpose", weights[i], shape=square, perm=[1, 0])
        dx = build.op("Add", dx, build.op("MatMul", dz, wt, shape=rows), shape=rows)
        for state, gradient in ((weights[i], dweight), (biases[i], dbias)):
            shape = tuple(state.shape)
            step = build.op("Mul", rate, gradient, shape=shape)
            output = build.op("Sub", state, step, shape=shape)
            output.name = f"{state.name}.next"
            outputs.append(output)
    graph = ir.Graph(
        [inputs, target, rate, *weights, *biases],
        [loss, *outputs],
        nodes=build.nodes,
        initializers=[zero, axis, seed, *weights, *biases],
        opset_imports={"": 20},
        name="residual_network",
    )
    return ir.Model(graph, ir_version=10, producer_name="pass_cost")


def seconds(job: Callable[[], object]) -> float:
    gc.collect()
    begin = time.process_time()
    job()
    return time.process_time() - begin


def measure(nodes: int, repeats: int, folder: Path) -> tuple[int, float, list[float], list[float]]:
    """Return the number of nodes, the file's size in MB, and the seconds of each bare and each graphscale run."""
    source, target = folder / "step.onnx", folder / "out.onnx"
    model = training_graph(max(1, round(nodes / NODES_PER_LAYER)))
    count = len(model.graph)
    ir.save(model, source)
    del model

    def bare() -> None:
        ir.save(ir.load(source), target)

    def scale() -> None:
        result = gs.scale(source, "dynamic")
        assert result.report.proved
        assert result.report.coverage == 1.0
        result.save(target)

    bare_times, scale_times = [], []
    for _ in range(repeats):
        bare_times.append(seconds(bare))
        scale_times.append(seconds(scale))
    return count, source.stat().st_size / 1e6, bare_times, scale_times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, nargs="+", default=[1_000, 10_000, 100_000])
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    print("| nodes | file | bare load + save | graphscale | ratio | graphscale, a node |")
    print("|---:|---:|---:|---:|---:|---:|")
    for nodes in options.nodes:
        with tempfile.TemporaryDirectory() as folder:
            count, size, bare, scale = measure(nodes, options.repeats, Path(folder))
        plain, whole = statistics.median(bare), statistics.median(scale)
        each = 1e6 * whole / count
        print(f"| {count:,} | {size:.1f} MB | {plain:.3f} s | {whole:.3f} s | {whole / plain:.1f} | {each:.0f} µs |")


if __name__ == "__main__":
    main()
