"""Export a training step of PyTorch: forward and backward pass, gradient clipping and AdamW in one ONNX file."""

import numpy as np
import torch
from torch.nn.functional import cross_entropy, relu

from graphscale.exporters.pytorch import export_step


class Net(torch.nn.Module):
    """Any module will do."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = torch.nn.Linear(16, 32), torch.nn.Linear(32, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Give the logits."""
        return self.fc2(relu(self.fc1(x)))


if __name__ == "__main__":
    torch.manual_seed(0)
    batch = {"x": torch.randn(8, 16), "target": torch.randint(10, (8,))}
    adamw = (torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.01})
    print(export_step(Net(), batch, cross_entropy, adamw, "step.onnx", clip_norm=1.0))
    np.savez("batch.npz", **{name: tensor.numpy() for name, tensor in batch.items()})
