"""A small builder for forward ONNX graphs, the base models that the gradient graphs are made from."""

from dataclasses import dataclass, field

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

IR_VERSION = 8  # onnxruntime-training 1.19.2 loads IR versions up to 10


@dataclass
class Network:
    """A forward graph under construction, and a sample value for each of its inputs."""

    name: str
    seed: int = 0
    opset: int = 17
    nodes: list = field(default_factory=list)
    inputs: list = field(default_factory=list)
    output: onnx.ValueInfoProto | None = None
    constants: dict[str, np.ndarray] = field(default_factory=dict)
    parameters: dict[str, np.ndarray] = field(default_factory=dict)
    frozen: dict[str, np.ndarray] = field(default_factory=dict)
    sample: dict[str, np.ndarray] = field(default_factory=dict)
    loss: str = "CrossEntropyLoss"

    def __post_init__(self) -> None:
        """Start the random numbers."""
        self.rng = np.random.default_rng(self.seed)

    def input(self, name: str, shape: list, value: np.ndarray) -> str:
        """Add a graph input; `shape` may hold symbolic dimensions, `value` is a sample batch."""
        dtype = helper.np_dtype_to_tensor_dtype(value.dtype)
        self.inputs.append(helper.make_tensor_value_info(name, dtype, shape))
        self.sample[name] = value
        return name

    def target(self, name: str, value: np.ndarray) -> None:
        """Give the sample value of the input that the loss adds (`labels` or `target`)."""
        self.sample[name] = value

    def parameter(self, name: str, *shape: int, around: float = 0.0, spread: float | None = None) -> str:
        """Add a trainable parameter, random around a value; the default spread suits a weight (out, in)."""
        if spread is None:
            spread = float(1 / np.sqrt(np.prod(shape[1:]))) if len(shape) > 1 else 0.1
        self.parameters[name] = (around + spread * self.rng.standard_normal(shape)).astype(np.float32)
        return name

    def buffer(self, name: str, value: np.ndarray) -> str:
        """Add a parameter that is not trained, such as a running mean."""
        self.frozen[name] = value.astype(np.float32)
        return name

    def constant(self, value, dtype=np.float32) -> str:
        """Add a constant and return its name; equal constants are stored once, as exporters do."""
        array = np.asarray(value, dtype)
        for name, known in self.constants.items():
            if known.dtype == array.dtype and known.shape == array.shape and np.array_equal(known, array):
                return name
        name = f"constant_{len(self.constants)}"
        self.constants[name] = array
        return name

    def ints(self, *values: int) -> str:
        """Add a constant int64 vector: axes, a shape, indices."""
        return self.constant(values, np.int64)

    def op(self, op_type: str, *inputs: str, outputs: int = 1, domain: str = "", **attributes):
        """Add a node and return the name of its output, or the tuple of names when it has several."""
        stem = f"{op_type.lower()}_{len(self.nodes)}"
        names = [stem] if outputs == 1 else [f"{stem}_{index}" for index in range(outputs)]
        self.nodes.append(helper.make_node(op_type, inputs, names, name=stem, domain=domain, **attributes))
        return names[0] if outputs == 1 else tuple(names)

    def linear(self, x: str, name: str, fan_in: int, fan_out: int) -> str:
        """Apply a fully connected layer to a matrix."""
        weight = self.parameter(f"{name}.weight", fan_out, fan_in)
        bias = self.parameter(f"{name}.bias", fan_out)
        return self.op("Gemm", x, weight, bias, transB=1)

    def result(self, value: str, shape: list) -> None:
        """Make the value of the last node the output of the graph, under the name `output`."""
        assert list(self.nodes[-1].output) == [value]
        self.nodes[-1].output[0] = "output"
        self.output = helper.make_tensor_value_info("output", TensorProto.FLOAT, shape)

    def model(self) -> onnx.ModelProto:
        """Return the finished forward model, its parameters as initializers."""
        values = self.parameters | self.frozen | self.constants
        initializers = [numpy_helper.from_array(array, name) for name, array in values.items()]
        graph = helper.make_graph(self.nodes, self.name, self.inputs, [self.output], initializers)
        domains = {node.domain for node in self.nodes} | {""}
        opsets = [helper.make_opsetid(domain, 1 if domain else self.opset) for domain in sorted(domains)]
        return helper.make_model(graph, opset_imports=opsets, ir_version=IR_VERSION)
