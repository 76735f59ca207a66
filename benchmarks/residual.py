"""A residual network's training step: MatMul, bias, ReLU, skip connection; 17 nodes a layer with backward and SGD."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
from graphs import Builder, constant, variable

__all__ = ["NODES_PER_LAYER", "training_graph"]

BATCH, WIDTH = 8, 16
NODES_PER_LAYER = 17


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
