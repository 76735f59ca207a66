"""Export a training step of PyTorch: forward, backward and momentum in one ONNX graph."""

import numpy as np
import torch
from torch._decomp import get_decompositions
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import cross_entropy, relu

torch.manual_seed(0)


class Net(torch.nn.Module):
    """Any module will do."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = torch.nn.Linear(16, 32), torch.nn.Linear(32, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Give the logits."""
        return self.fc2(relu(self.fc1(x)))


net = Net()
batch = {"x": torch.randn(8, 16), "target": torch.randint(10, (8,))}
weights = {name: weight.detach().clone() for name, weight in net.named_parameters()}
momenta = {f"{name}.momentum": torch.zeros_like(weight) for name, weight in weights.items()}
# A step is a pure function: weights and moments go in, their next values come out.
inputs = batch | weights | momenta
outputs = ["loss", *(f"{name}.next" for name in weights), *(f"{name}.next" for name in momenta)]


def loss(weights: dict, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy."""
    return cross_entropy(torch.func.functional_call(net, weights, (x,)), target)


def step(*values: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """One training step."""
    given = dict(zip(inputs, values, strict=True))
    current = {name: given[name] for name in weights}
    gradients, value = torch.func.grad_and_value(loss)(current, given["x"], given["target"])
    buffers = [0.9 * given[f"{name}.momentum"] + gradient for name, gradient in gradients.items()]
    stepped = [given[name] - 0.05 * buffer for name, buffer in zip(weights, buffers, strict=True)]
    return value, *stepped, *buffers


# Without it the exporter takes the number of targets for 1: gradients come out too large.
DECOMPOSITIONS = get_decompositions([torch.ops.aten.nll_loss_forward])

values = tuple(inputs.values())
# The fused attention kernels have no ONNX counterpart for their backward pass.
with sdpa_kernel(SDPBackend.MATH):
    traced = make_fx(step, DECOMPOSITIONS, tracing_mode="real")(*values)
    program = torch.export.export(traced, values)
    exported = torch.onnx.export(
        program,
        dynamo=True,
        input_names=list(inputs),
        output_names=outputs,
        opset_version=20,
        verbose=False,
    )
exported.save("step.onnx")
np.savez("step.npz", **{name: value.numpy() for name, value in inputs.items()})
