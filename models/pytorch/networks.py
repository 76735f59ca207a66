"""The networks of the exported training graphs: small, with PyTorch's own layers and initialization."""

from collections.abc import Callable
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class GeluNorm(nn.Module):
    """Linear, GELU (the exact one, with erf), layer normalization, linear.

    The normalization computes in its own dtype, as under autocast: float32 in a float16 network.
    """

    def __init__(self, features: int = 16, hidden: int = 32, classes: int = 10) -> None:
        super().__init__()
        self.fc1 = nn.Linear(features, hidden)
        self.norm = nn.LayerNorm(hidden)
        self.fc2 = nn.Linear(hidden, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = F.gelu(self.fc1(x))
        return self.fc2(self.norm(x.to(self.norm.weight.dtype)).to(x.dtype))


class Perceptron(nn.Module):
    """Linear layers of the given sizes with an activation in between; the layers are fc1, fc2, ..."""

    def __init__(self, *sizes: int, activation: Callable[[Tensor], Tensor] = F.relu) -> None:
        super().__init__()
        for index, (fan_in, fan_out) in enumerate(pairwise(sizes), start=1):
            self.add_module(f"fc{index}", nn.Linear(fan_in, fan_out))
        self.activation = activation

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Apply the layers; `mask`, already scaled, is the dropout of the first hidden layer."""
        first, *rest = self.children()
        x = first(x)
        for layer in rest:
            x = self.activation(x)
            if mask is not None:
                x, mask = x * mask, None
            x = layer(x)
        return x


class TwoHeads(nn.Module):
    """A shared layer with a classification head and a regression head."""

    def __init__(self, features: int = 16, hidden: int = 32, classes: int = 10, targets: int = 3) -> None:
        super().__init__()
        self.trunk = nn.Linear(features, hidden)
        self.classify = nn.Linear(hidden, classes)
        self.regress = nn.Linear(hidden, targets)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = F.silu(self.trunk(x))
        return self.classify(x), self.regress(x)


class Attention(nn.Module):
    """Multi-head self-attention."""

    def __init__(self, width: int, heads: int, causal: bool) -> None:
        super().__init__()
        # No bias: the gradient of the keys' bias is zero but for rounding, which Adam turns into steps.
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width)
        self.heads = heads
        self.causal = causal

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        split = self.qkv(x).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = split.permute(2, 0, 3, 1, 4)
        x = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.out(x.transpose(1, 2).reshape(batch, length, width))


class Transformer(nn.Module):
    """One pre-norm transformer block between an embedding and a head that gives logits for each token.

    Causal, or bidirectional; the head is a layer of its own, or the embedding's weight again (`tied`).
    """

    def __init__(
        self,
        vocabulary: int = 32,
        length: int = 6,
        width: int = 16,
        heads: int = 2,
        *,
        tied: bool = False,
        causal: bool = False,
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Parameter(torch.empty(length, width))
        for embedding in (self.tokens.weight, self.positions):
            nn.init.normal_(embedding, std=width**-0.5)
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width, heads, causal)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)
        self.head = None if tied else nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions
        x = x + self.attention(self.norm1(x))
        x = x + self.down(F.gelu(self.up(self.norm2(x))))
        return F.linear(x, self.tokens.weight) if self.head is None else self.head(x)
