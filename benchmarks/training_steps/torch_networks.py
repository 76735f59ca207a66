"""The models of `workloads` in PyTorch."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from training_steps import workloads
from training_steps.workloads import Workload


class Perceptron(nn.Module):
    """Linear layers with ReLU in between: fc1, fc2, ..."""

    def __init__(self, model: workloads.Mlp) -> None:
        super().__init__()
        for index in range(1, len(model.sizes)):
            self.add_module(f"fc{index}", nn.Linear(model.sizes[index - 1], model.sizes[index]))

    def forward(self, x: Tensor) -> Tensor:
        first, *rest = self.children()
        x = first(x)
        for layer in rest:
            x = layer(functional.relu(x))
        return x


class Attention(nn.Module):
    """Causal multi-head self-attention."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width)
        self.heads = heads

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        split = self.qkv(x).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = split.permute(2, 0, 3, 1, 4)
        x = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(x.transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    """Attention, then two linear layers, each on what is normalized before, and added."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class Decoder(nn.Module):
    """Blocks between an embedding with positions and a head that gives logits for each token."""

    def __init__(self, model: workloads.Decoder) -> None:
        super().__init__()
        self.tokens = nn.Embedding(model.vocabulary, model.width)
        self.positions = nn.Parameter(torch.zeros(model.length, model.width))
        self.blocks = nn.Sequential(*(Block(model.width, model.heads) for _ in range(model.layers)))
        self.norm = nn.LayerNorm(model.width)
        self.head = nn.Linear(model.width, model.vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.tokens(tokens) + self.positions)))


class Convnet(nn.Module):
    """Convolutions with batch norm: conv1, norm1, conv2, ..."""

    def __init__(self, model: workloads.Convnet) -> None:
        super().__init__()
        before = 3
        for index, channels in enumerate(model.channels, start=1):
            stride = 1 if index == 1 else 2
            self.add_module(f"conv{index}", nn.Conv2d(before, channels, 3, stride, padding=1, bias=False))
            self.add_module(f"norm{index}", nn.BatchNorm2d(channels, track_running_stats=False))
            before = channels
        self.head = nn.Linear(before, model.classes)

    def forward(self, x: Tensor) -> Tensor:
        layers = dict(self.named_children())
        for index in range(1, len(layers) // 2 + 1):
            x = functional.relu(layers[f"norm{index}"](layers[f"conv{index}"](x)))
        return self.head(x.mean((2, 3)))


class Lstm(nn.Module):
    """An LSTM of two linear layers, one for the elements of the sequence and one for the hidden state."""

    def __init__(self, model: workloads.Lstm) -> None:
        super().__init__()
        self.input = nn.Linear(model.features, 4 * model.width)
        self.hidden = nn.Linear(model.width, 4 * model.width, bias=False)
        self.head = nn.Linear(model.width, model.classes)

    def forward(self, x: Tensor) -> Tensor:
        hidden = cell = x.new_zeros(len(x), self.hidden.in_features)
        for element in x.unbind(1):
            enter, keep, new, show = (self.input(element) + self.hidden(hidden)).chunk(4, 1)
            cell = keep.sigmoid() * cell + enter.sigmoid() * new.tanh()
            hidden = show.sigmoid() * cell.tanh()
        return self.head(hidden)


_NETWORKS: dict[type, Callable[..., nn.Module]] = {
    workloads.Mlp: Perceptron,
    workloads.Decoder: Decoder,
    workloads.Convnet: Convnet,
    workloads.Lstm: Lstm,
}


def network(workload: Workload) -> nn.Module:
    """The network, with the first weights of the workload."""
    made = _NETWORKS[type(workload.model)](workload.model)
    made.load_state_dict({name: torch.from_numpy(array) for name, array in workload.weights().items()})
    return made


def optimizer(workload: Workload, net: nn.Module, *, fused: bool | None = None) -> torch.optim.Optimizer:
    """A workload's optimizer of a network's weights; `fused` is AdamW's, None for PyTorch's choice."""
    if workload.optimizer == "sgd":
        return torch.optim.SGD(net.parameters(), lr=workloads.SGD_RATE)
    return torch.optim.AdamW(
        net.parameters(),
        lr=workloads.ADAMW_RATE,
        betas=workloads.BETAS,
        eps=workloads.EPSILON,
        weight_decay=workloads.WEIGHT_DECAY,
        fused=fused,
    )


def loss_of(apply: Callable[..., Tensor], batch: dict[str, Tensor]) -> Tensor:
    """The mean cross-entropy of a batch."""
    logits = apply(batch["tokens"] if "tokens" in batch else batch["x"])
    return functional.cross_entropy(logits.flatten(0, -2), batch["target"].flatten())
