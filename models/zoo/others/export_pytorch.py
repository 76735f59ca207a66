"""Export PyTorch training steps to ONNX, without a loss scale and with the arithmetic of GradScaler.

    pip install torch==2.13.0 onnx==1.23.2 onnxscript onnx-ir
    python -m models.zoo.others.export_pytorch

pytorch_grad_scaler.onnx is the scaled step, and pytorch_step.onnx its original: make_fx traces forward pass, backward
pass and optimizer, and torch.onnx.export translates the trace. GradScaler's two kernels are written as formulas: the
exporter has no translation for them.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import onnx
import torch
from torch.fx.experimental.proxy_tensor import make_fx

HERE = Path(__file__).resolve().parent
RATE, MOMENTUM, INTERVAL = 0.1, 0.9, 2000
NAMES = ("w1", "b1", "w2")
Tensors = list[torch.Tensor]


def loss_of(x: torch.Tensor, y: torch.Tensor, weights: Tensors) -> torch.Tensor:
    """The loss of a network with one hidden layer."""
    w1, b1, w2 = weights
    return torch.nn.functional.mse_loss(torch.tanh(x @ w1 + b1) @ w2, y)


def apply(weights: Tensors, momenta: Tensors, grads: Tensors) -> Tensors:
    """A step of gradient descent with momentum."""
    new = [MOMENTUM * m + g for m, g in zip(momenta, grads, strict=True)]
    return [w - RATE * m for w, m in zip(weights, new, strict=True)] + new


def gradients(factor: torch.Tensor | float, x: torch.Tensor, y: torch.Tensor, weights: Tensors) -> tuple:
    """The loss, and the gradients of its product with a factor."""
    weights = [w.detach().requires_grad_() for w in weights]
    loss = loss_of(x, y, weights)
    return loss.detach(), torch.autograd.grad(loss * factor, weights)


def plain(x: torch.Tensor, y: torch.Tensor, *state: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The step without a loss scale."""
    loss, grads = gradients(1.0, x, y, list(state[:3]))
    return loss, *apply(state[:3], state[3:], grads)


def grad_scaler(x: torch.Tensor, y: torch.Tensor, *state: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The step with GradScaler's scale, unscale_, step and update."""
    scale, growth_tracker = state[6:]
    loss, grads = gradients(scale, x, y, list(state[:3]))
    # _amp_foreach_non_finite_check_and_unscale_
    inverse = scale.double().reciprocal().float()
    found = torch.stack([(~torch.isfinite(g)).any().float() for g in grads]).sum()
    new = apply(state[:3], state[3:6], [g * inverse for g in grads])
    # step
    kept = [torch.where(found == 0, n, o) for n, o in zip(new, state[:6], strict=True)]
    # _amp_update_scale_
    successful = growth_tracker + 1
    grown = (scale.double() * 2.0).float()
    grows = successful == INTERVAL
    larger = torch.where(grows & torch.isfinite(grown), grown, scale)
    tracker = torch.where(grows | (found != 0), torch.zeros_like(successful), successful)
    return loss, *kept, torch.where(found != 0, (scale.double() * 0.5).float(), larger), tracker


def export(step: Callable[..., tuple], state: dict[str, torch.Tensor], name: str) -> None:
    """Write a step as NAME.onnx, with its state as initial values."""
    batch = {"x": torch.randn(4, 3), "y": torch.randn(4, 1)}
    arguments = (*batch.values(), *state.values())
    program = torch.export.export(make_fx(step)(*arguments), arguments)
    outputs = ["loss", *(f"{key}.next" for key in state)]
    exported = torch.onnx.export(
        program, (), dynamo=True, input_names=[*batch, *state], output_names=outputs, verbose=False
    )
    model = exported.model_proto
    model.graph.initializer.extend(onnx.numpy_helper.from_array(v.numpy(), key) for key, v in state.items())
    for node in model.graph.node:
        del node.metadata_props[:]
    del model.graph.metadata_props[:], model.metadata_props[:]
    for value in (*model.graph.input, *model.graph.output, *model.graph.value_info):
        del value.metadata_props[:]
    path = HERE / f"{name}.onnx"
    onnx.save(model, path)
    print(f"{name}: {len(model.graph.node)} nodes, {path.stat().st_size / 1000:.1f} kB")


if __name__ == "__main__":
    torch.manual_seed(0)
    weights = dict(zip(NAMES, (torch.randn(3, 5), torch.randn(5), torch.randn(5, 1)), strict=True))
    state = weights | {f"{key}.momentum": torch.zeros_like(value) for key, value in weights.items()}
    export(plain, state, "pytorch_step")
    own = {"scale": torch.tensor(2.0**16), "growth_tracker": torch.tensor(0, dtype=torch.int32)}
    export(grad_scaler, state | own, "pytorch_grad_scaler")
