"""Make a gradient graph: weights are inputs with initial values, gradients are outputs."""

import numpy as np
import onnx
import onnx.parser
from onnx import helper, numpy_helper
from onnxruntime.capi._pybind_state import GradientGraphBuilder

forward = onnx.parser.parse_model("""
<ir_version: 8, opset_import: ["" : 17]>
net (float["batch", 64] images, int64["batch"] labels) => (float loss)
<float[32,64] w1, float[32] b1, float[10,32] w2, float[10] b2>
{
    hidden = Gemm<transB = 1>(images, w1, b1)
    active = Relu(hidden)
    logits = Gemm<transB = 1>(active, w2, b2)
    loss, log_prob = SoftmaxCrossEntropyLoss(logits, labels)
}
""")
rng = np.random.default_rng(0)
weights = {"w1": (32, 64), "b1": (32,), "w2": (10, 32), "b2": (10,)}
del forward.graph.initializer[:]
for name, shape in weights.items():
    value = 0.1 * rng.standard_normal(shape, dtype=np.float32)
    forward.graph.initializer.append(numpy_helper.from_array(value, name))

builder = GradientGraphBuilder(forward.SerializeToString(), {"loss"}, set(weights), "loss")
builder.build()
model = onnx.load_from_string(builder.get_model())
# Weights that are inputs as well can be fed; else they would be constants.
for tensor in forward.graph.initializer:
    info = helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims)
    model.graph.input.append(info)
# The builder leaves the gradients in the order of a hash table.
order = ["loss", *(f"{name}_grad" for name in weights)]
outputs = sorted(model.graph.output, key=lambda output: order.index(output.name))
del model.graph.output[:]
model.graph.output.extend(outputs)
onnx.save(model, "gradients.onnx")
