"""Make the artifact folder of an ONNX Runtime training session from a forward model."""

from pathlib import Path

import numpy as np
import onnx
import onnx.parser
from onnx import numpy_helper
from onnxruntime.training import artifacts

forward = onnx.parser.parse_model("""
<ir_version: 8, opset_import: ["" : 17]>
net (float["batch", 64] images) => (float["batch", 10] logits)
<float[32,64] w1, float[32] b1, float[10,32] w2, float[10] b2>
{
    hidden = Gemm<transB = 1>(images, w1, b1)
    active = Relu(hidden)
    logits = Gemm<transB = 1>(active, w2, b2)
}
""")
rng = np.random.default_rng(0)
weights = {"w1": (32, 64), "b1": (32,), "w2": (10, 32), "b2": (10,)}
del forward.graph.initializer[:]
for name, shape in weights.items():
    value = 0.1 * rng.standard_normal(shape, dtype=np.float32)
    forward.graph.initializer.append(numpy_helper.from_array(value, name))

Path("artifacts").mkdir(exist_ok=True)
artifacts.generate_artifacts(
    forward,
    requires_grad=list(weights),
    frozen_params=[],
    loss=artifacts.LossType.CrossEntropyLoss,
    optimizer=artifacts.OptimType.AdamW,
    artifact_directory="artifacts",
)
# The onnx package chooses an IR version that onnxruntime-training 1.19.2 does not load.
optimizer = onnx.load("artifacts/optimizer_model.onnx")
optimizer.ir_version = 10
onnx.save(optimizer, "artifacts/optimizer_model.onnx")
