"""Small networks with their losses: weights by name, a batch by name, and a pure function of both."""

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.zoo.steps import Arrays, Outputs

# (weights, all inputs) -> loss, or (loss, further outputs by role)
Loss = Callable[[Arrays, Arrays], Tensor | tuple[Tensor, Outputs]]


@dataclass(frozen=True)
class Problem:
    """Something to train: the inputs of a step by role, and its loss."""

    weights: Arrays
    batch: Arrays
    loss: Loss
    states: Arrays = field(default_factory=dict)
    """Carried besides weights: the loss returns their next values."""
    hyperparameters: Arrays = field(default_factory=dict)
    constants: Arrays = field(default_factory=dict)


def matrix(rows: int, columns: int) -> Tensor:
    """Return a random matrix that keeps the variance of what it is multiplied with."""
    return torch.randn(rows, columns) / rows**0.5


def layers(*sizes: int, bias: bool = True, prefix: str = "") -> Arrays:
    """Return the weights of dense layers: w1, b1, w2, ..."""
    weights = {}
    for index, (rows, columns) in enumerate(pairwise(sizes), start=1):
        weights[f"{prefix}w{index}"] = matrix(rows, columns)
        if bias:
            weights[f"{prefix}b{index}"] = 0.1 * torch.randn(columns)
    return weights


def dense(weights: Arrays, x: Tensor, activation: Callable[[Tensor], Tensor] = torch.tanh, prefix: str = "") -> Tensor:
    """Apply the dense layers of `layers`, with an activation between them."""
    index = 1
    while f"{prefix}w{index}" in weights:
        if index > 1:
            x = activation(x)
        x = x @ weights[f"{prefix}w{index}"]
        if f"{prefix}b{index}" in weights:
            x = x + weights[f"{prefix}b{index}"]
        index += 1
    return x


def regression(*sizes: int, batch: int = 4, bias: bool = True) -> Problem:
    """Return a tanh network with the mean squared error; all dimensions differ by default."""
    sizes = sizes or (5, 7, 3)

    def loss(weights: Arrays, values: Arrays) -> Tensor:
        return F.mse_loss(dense(weights, values["x"]), values["y"])

    data = {"x": torch.randn(batch, sizes[0]), "y": torch.randn(batch, sizes[-1])}
    return Problem(layers(*sizes, bias=bias), data, loss)


def square(size: int = 6, count: int = 3) -> Problem:
    """Return a network whose weights and batch all have one shape: shapes tell nothing."""
    sizes = [size] * (count + 1)
    return regression(*sizes, batch=size, bias=False)


def classification(*sizes: int, batch: int = 6) -> Problem:
    """Return a ReLU network with the cross-entropy of integer labels."""
    sizes = sizes or (8, 9, 5)

    def loss(weights: Arrays, values: Arrays) -> Tensor:
        return F.cross_entropy(dense(weights, values["x"], torch.relu), values["label"])

    data = {"x": torch.randn(batch, sizes[0]), "label": torch.randint(sizes[-1], (batch,))}
    return Problem(layers(*sizes), data, loss)


def one_hot(index: Tensor, count: int) -> Tensor:
    """Return the index as ones among zeros; torch's own cannot be traced."""
    return (index[..., None] == torch.arange(count)).to(torch.float32)


def normalise(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """Apply layer normalization."""
    centred = x - x.mean(-1, keepdim=True)
    return centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + 1e-5) * scale + shift


def attend(weights: Arrays, x: Tensor, *, causal: bool = True, prefix: str = "") -> Tensor:
    """Apply single-head self-attention with weights q, k, v and o."""
    q, k, v = (x @ weights[f"{prefix}{name}"] for name in "qkv")
    scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
    if causal:
        allowed = torch.ones(x.shape[-2], x.shape[-2]).tril()
        scores = scores * allowed - 1e4 * (1 - allowed)
    return torch.softmax(scores, -1) @ v @ weights[f"{prefix}o"]


def advance(cell: str, x: Tensor, h: Tensor, c: Tensor | None, weight: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return the next hidden state, and the next cell of an LSTM."""
    if cell == "rnn":
        return torch.tanh(x + h @ weight), None
    if cell == "gru":
        xr, xz, xn = x.chunk(3, -1)
        hr, hz, hn = (h @ weight).chunk(3, -1)
        new, keep = torch.tanh(xn + torch.sigmoid(xr + hr) * hn), torch.sigmoid(xz + hz)
        return (1 - keep) * new + keep * h, None
    i, f, g, o = (x + h @ weight).chunk(4, -1)
    c = torch.sigmoid(f + 1) * c + torch.sigmoid(i) * torch.tanh(g)
    return torch.sigmoid(o) * torch.tanh(c), c


def language(width: int = 6, vocabulary: int = 11, length: int = 4, batch: int = 3) -> Problem:
    """Return a causal attention block between an embedding and a head, next-token cross-entropy."""

    def loss(weights: Arrays, values: Arrays) -> Tensor:
        x = weights["embedding"][values["tokens"]]
        x = x + attend(weights, normalise(x, weights["scale"], weights["shift"]))
        return F.cross_entropy((x @ weights["head"]).flatten(0, 1), values["target"].flatten())

    weights = {"embedding": torch.randn(vocabulary, width), "scale": torch.ones(width), "shift": torch.zeros(width)}
    weights |= {name: matrix(width, width) for name in "qkvo"} | {"head": matrix(width, vocabulary)}
    text = torch.randint(vocabulary, (batch, length + 1))
    return Problem(weights, {"tokens": text[:, :-1].contiguous(), "target": text[:, 1:].contiguous()}, loss)


def images(channels: int = 3, classes: int = 4, batch: int = 5, size: int = 7) -> Problem:
    """Return two convolutions, a mean over the image, and a dense layer with cross-entropy."""

    def loss(weights: Arrays, values: Arrays) -> Tensor:
        x = F.relu(F.conv2d(values["image"], weights["conv1"], weights["bias1"]))
        x = F.relu(F.conv2d(x, weights["conv2"], padding=1)).mean((2, 3))
        return F.cross_entropy(x @ weights["head"] + weights["bias"], values["label"])

    weights = {"conv1": 0.3 * torch.randn(6, channels, 3, 3), "bias1": torch.zeros(6)}
    weights |= {"conv2": 0.2 * torch.randn(8, 6, 3, 3), "head": matrix(8, classes), "bias": torch.zeros(classes)}
    data = {"image": torch.randn(batch, channels, size, size), "label": torch.randint(classes, (batch,))}
    return Problem(weights, data, loss)


def module(net: nn.Module, batch: Arrays, loss: Callable[[Callable, Arrays], Tensor]) -> Problem:
    """Return the problem of a network of `models/pytorch`; dots in the names of its weights become underscores."""
    names = {name.replace(".", "_"): name for name, _ in net.named_parameters()}

    def objective(weights: Arrays, values: Arrays) -> Tensor:
        own = {names[name]: weight for name, weight in weights.items()}
        return loss(lambda *args: torch.func.functional_call(net, own, args), values)

    parameters = dict(net.named_parameters())
    weights = {name: parameters[own].detach().clone() for name, own in names.items()}
    return Problem(weights, batch, objective)
