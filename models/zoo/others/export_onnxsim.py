"""Export the training steps that onnxsim makes of an inference file, without a loss scale and with its static one.

    pip install "onnxsim==0.8.1" "onnx==1.23.2" "onnxruntime==1.31.1" numpy
    python -m models.zoo.others.export_onnxsim

onnxsim_static_scale.onnx is the scaled step, and onnxsim_step.onnx its original. onnxsim numbers its values; states and
next values get the same names in both.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import onnxsim

HERE = Path(__file__).resolve().parent
FORWARD = """
<ir_version: 8, opset_import: ["" : 17]>
net (float[4,3] x, float[4,1] y) => (float loss) {
    h = MatMul(x, w1)
    a = Tanh(h)
    z = MatMul(a, w2)
    d = Sub(z, y)
    square = Mul(d, d)
    loss = ReduceMean<keepdims = 0>(square)
}
"""


def export(name: str, scale: float) -> None:
    """Write the step with a static loss scale as NAME.onnx."""
    forward, random = onnx.parser.parse_model(FORWARD), np.random.default_rng(0)
    shapes = {"w1": (3, 5), "w2": (5, 1)}
    weights = {key: random.normal(size=shape).astype(np.float32) for key, shape in shapes.items()}
    forward.graph.initializer.extend(onnx.numpy_helper.from_array(value, key) for key, value in weights.items())
    loop = onnxsim.compile_training_loop(forward, "loss", [*shapes], "sgd_momentum", loss_scale=scale)
    loop({"x": np.zeros((4, 3), np.float32), "y": np.zeros((4, 1), np.float32)}, lr=0.0)
    step = loop.step_graph
    graph = step.model.graph
    moments = iter(shapes)
    names = {state: state if state in shapes else f"{next(moments)}.momentum" for state in step.state}
    names |= {following: f"{names[state]}.next" for state, following in step.state.items()}
    for value in (*graph.input, *graph.output, *graph.value_info):
        value.name = names.get(value.name, value.name)
    for node in graph.node:
        node.input[:] = [names.get(each, each) for each in node.input]
        node.output[:] = [names.get(each, each) for each in node.output]
    values = weights | {f"{key}.momentum": np.zeros_like(value) for key, value in weights.items()}
    graph.initializer.extend(onnx.numpy_helper.from_array(value, key) for key, value in values.items())
    path = HERE / f"{name}.onnx"
    onnx.save(step.model, path)
    print(f"{name}: {len(graph.node)} nodes, {path.stat().st_size / 1000:.1f} kB")


if __name__ == "__main__":
    export("onnxsim_step", 1.0)
    export("onnxsim_static_scale", 1024.0)
