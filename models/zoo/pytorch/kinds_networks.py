"""Kinds by the network: what the forward and the backward pass are made of."""

from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from models.pytorch.networks import GeluNorm, Perceptron, Transformer, TwoHeads
from models.zoo.pytorch.problems import (
    Problem,
    advance,
    attend,
    dense,
    images,
    language,
    layers,
    matrix,
    module,
    normalise,
    one_hot,
)
from models.zoo.pytorch.rules import RULES
from models.zoo.pytorch.training import gradients_only, train
from models.zoo.steps import Arrays, Step, Style, kind

ACTIVATIONS = {
    "relu": F.relu, "gelu": F.gelu, "gelu-tanh": partial(F.gelu, approximate="tanh"), "silu": F.silu,
    "elu": F.elu, "leaky-relu": F.leaky_relu, "softplus": F.softplus, "mish": F.mish, "hardswish": F.hardswish,
    "selu": F.selu, "sine": torch.sin, "swish-by-hand": lambda x: x * torch.sigmoid(x), "hardtanh": F.hardtanh,
    "softsign": F.softsign, "logsigmoid": F.logsigmoid, "squared-relu": lambda x: F.relu(x).square(),
}  # fmt: skip


@kind("activations")
def activations() -> Iterator[Step]:
    for name, function in ACTIVATIONS.items():

        def loss(weights: Arrays, values: Arrays, function: Callable = function) -> Tensor:
            return F.mse_loss(dense(weights, values["x"], function), values["y"])

        data = {"x": torch.randn(4, 5), "y": torch.randn(4, 3)}
        yield train(Problem(layers(5, 6, 3), data, loss), RULES["sgd"], name)


@kind("torch-modules")
def torch_modules() -> Iterator[Step]:
    classes = {"x": torch.randn(4, 6), "label": torch.randint(5, (4,))}
    text = {"tokens": torch.randint(9, (2, 4)), "label": torch.randint(9, (2, 4))}

    def classify(net: Callable, values: Arrays) -> Tensor:
        return F.cross_entropy(net(values["x"]), values["label"])

    def heads(net: Callable, values: Arrays) -> Tensor:
        logits, numbers = net(values["x"])
        return F.cross_entropy(logits, values["label"]) + numbers.square().mean()

    def speak(net: Callable, values: Arrays) -> Tensor:
        return F.cross_entropy(net(values["tokens"]).flatten(0, 1), values["label"].flatten())

    yield train(module(Perceptron(6, 8, 5), classes, classify), RULES["adamw"], "perceptron")
    yield train(module(GeluNorm(6, 8, 5), classes, classify), RULES["momentum"], "gelu-norm")
    yield train(module(TwoHeads(6, 8, 5, 3), classes, heads), RULES["adam"], "two-heads")
    yield train(module(Transformer(9, 4, 6, 2, causal=True), text, speak), RULES["adam"], "transformer")
    yield gradients_only(module(Transformer(9, 4, 6, 2, tied=True), text, speak), "transformer-tied")


@kind("convnet")
def convnet() -> Iterator[Step]:
    yield train(images(), RULES["sgd"], "sgd")
    yield train(images(), RULES["adam"], "adam", Style(names="exporter"))
    yield gradients_only(images(), "gradients")


@kind("convnet-one-dimension")
def convnet_one_dimension() -> Iterator[Step]:
    def loss(weights: Arrays, values: Arrays) -> Tensor:
        x = F.gelu(F.conv1d(values["x"], weights["conv1"], weights["bias"], padding=1))
        return F.mse_loss(F.conv1d(x, weights["conv2"]), values["y"])

    weights = {"conv1": 0.3 * torch.randn(5, 2, 3), "bias": torch.zeros(5), "conv2": 0.3 * torch.randn(3, 5, 2)}
    problem = Problem(weights, {"x": torch.randn(2, 2, 8), "y": torch.randn(2, 3, 7)}, loss)
    yield train(problem, RULES["momentum"], "momentum")
    yield gradients_only(problem, "gradients")


@kind("patches")
def patches() -> Iterator[Step]:
    """A vision transformer: patches by reshaping, a class token, position embeddings, attention."""

    def loss(weights: Arrays, values: Arrays) -> Tensor:
        x = values["image"].unfold(2, 3, 3).unfold(3, 3, 3).permute(0, 2, 3, 1, 4, 5).reshape(3, 4, 18)
        x = torch.cat([weights["token"].expand(3, -1, -1), x @ weights["patch"]], 1) + weights["position"]
        x = x + attend(weights, normalise(x, weights["scale"], weights["shift"]), causal=False)
        return F.cross_entropy(x[:, 0] @ weights["head"], values["label"])

    weights = {"token": torch.randn(1, 1, 6), "position": torch.randn(5, 6), "patch": matrix(18, 6)}
    weights |= {name: matrix(6, 6) for name in "qkvo"} | {"head": matrix(6, 4)}
    weights |= {"scale": torch.ones(6), "shift": torch.zeros(6)}
    problem = Problem(weights, {"image": torch.randn(3, 2, 6, 6), "label": torch.randint(4, (3,))}, loss)
    yield train(problem, RULES["adamw"], "adamw")
    yield gradients_only(problem, "gradients")


@kind("pooling-convnet")
def pooling_convnet() -> Iterator[Step]:
    """Maximum by reshaping, mean by pooling."""

    def loss(weights: Arrays, values: Arrays) -> Tensor:
        x = F.relu(F.conv2d(values["image"], weights["conv1"], padding=1))
        x = x.reshape(3, 4, 3, 2, 3, 2).amax((3, 5))
        x = F.conv2d(x, weights["conv2"])
        return F.cross_entropy(x.flatten(1) @ weights["head"], values["label"])

    weights = {"conv1": 0.3 * torch.randn(4, 2, 3, 3), "conv2": 0.3 * torch.randn(5, 4, 2, 2), "head": matrix(20, 3)}
    problem = Problem(weights, {"image": torch.randn(3, 2, 6, 6), "label": torch.randint(3, (3,))}, loss)
    yield train(problem, RULES["momentum"], "momentum")
    yield train(problem, RULES["sgd"], "unoptimized", Style(optimize=False))


@kind("attention")
def attention() -> Iterator[Step]:
    yield train(language(), RULES["adam"], "language-adam")
    yield train(language(), RULES["sgd"], "language-sgd", Style(names="scrambled", order="shuffled"))
    yield gradients_only(language(), "gradients")


@kind("recurrent-cells")
def recurrent_cells() -> Iterator[Step]:
    """Cells by hand, unrolled over the sequence, from a hidden state of zeros."""
    for cell, gates in (("rnn", 1), ("gru", 3), ("lstm", 4)):

        def loss(weights: Arrays, values: Arrays, cell: str = cell) -> Tensor:
            h = c = torch.zeros(2, 5)
            for time in range(4):
                h, c = advance(cell, values["x"][:, time] @ weights["input"], h, c, weights["hidden"])
            return F.cross_entropy(h @ weights["head"], values["label"])

        weights = {"input": matrix(3, 5 * gates), "hidden": matrix(5, 5 * gates), "head": matrix(5, 4)}
        problem = Problem(weights, {"x": torch.randn(2, 4, 3), "label": torch.randint(4, (2,))}, loss)
        yield train(problem, RULES["adam"], cell)
        yield gradients_only(problem, f"{cell}-gradients")


@kind("state-space")
def state_space() -> Iterator[Step]:
    """A diagonal linear recurrence as a loop, and as one convolution by its kernel."""

    def loss(weights: Arrays, values: Arrays, parallel: bool = False) -> Tensor:
        decay = torch.exp(-F.softplus(weights["decay"]))
        u = values["x"] @ weights["input"]
        if parallel:
            lag = (torch.arange(5)[:, None] - torch.arange(5)[None]).float()
            kernel = torch.where(lag[..., None] >= 0, decay ** lag.clamp(min=0.0)[..., None], 0.0)
            states = torch.einsum("tsd,bsd->btd", kernel, u)
        else:
            h, rows = torch.zeros(2, 4), []
            for time in range(5):
                h = decay * h + u[:, time]
                rows.append(h)
            states = torch.stack(rows, 1)
        return F.mse_loss(states @ weights["output"], values["y"])

    weights = {"decay": torch.randn(4), "input": matrix(3, 4), "output": matrix(4, 2)}
    data = {"x": torch.randn(2, 5, 3), "y": torch.randn(2, 5, 2)}
    yield train(Problem(weights, data, loss), RULES["adam"], "loop")
    yield train(Problem(weights, data, partial(loss, parallel=True)), RULES["sgd"], "parallel")


@kind("graph-network")
def graph_network() -> Iterator[Step]:
    """Messages along edges: a dense adjacency, and gather with scatter."""

    def loss(weights: Arrays, values: Arrays, sparse: bool = False) -> Tensor:
        x = values["nodes"]
        for name in ("w1", "w2"):
            x = torch.relu(x @ weights[name])
            if sparse:
                x = torch.zeros_like(x).index_add(0, values["target"], x[values["source"]])
            else:
                x = values["adjacency"] @ x
        return F.cross_entropy(x @ weights["head"], values["label"])

    weights = layers(4, 6, 6, bias=False) | {"head": matrix(6, 3)}
    data = {"nodes": torch.randn(7, 4), "label": torch.randint(3, (7,))}
    edges = {"source": torch.randint(7, (12,)), "target": torch.randint(7, (12,))}
    adjacency = {"adjacency": torch.softmax(torch.randn(7, 7), -1)}
    yield train(Problem(weights, data | adjacency, loss), RULES["momentum"], "dense")
    yield train(Problem(weights, data | edges, partial(loss, sparse=True)), RULES["momentum"], "sparse")


@kind("mixture-of-experts")
def mixture_of_experts() -> Iterator[Step]:
    """Experts stacked in one tensor, a soft gate, and a gate that keeps the best with a balance term."""

    def loss(weights: Arrays, values: Arrays, hard: bool = False) -> Tensor:
        gate = torch.softmax(values["x"] @ weights["gate"], -1)
        outputs = torch.einsum("bi,eio->beo", values["x"], weights["experts"])
        penalty = 0.0
        if hard:
            chosen = one_hot(gate.argmax(-1), 3)
            penalty = (chosen.mean(0) * gate.mean(0)).sum() * 3
            gate = gate * chosen
        return F.mse_loss((gate[..., None] * outputs).sum(1), values["y"]) + 0.01 * penalty

    weights = {"gate": matrix(5, 3), "experts": torch.randn(3, 5, 4) / 5**0.5}
    data = {"x": torch.randn(6, 5), "y": torch.randn(6, 4)}
    yield train(Problem(weights, data, loss), RULES["adam"], "soft")
    yield train(Problem(weights, data, partial(loss, hard=True)), RULES["sgd"], "hard")


@kind("hypernetwork")
def hypernetwork() -> Iterator[Step]:
    """The weights of the network are the output of another one."""

    def loss(weights: Arrays, values: Arrays) -> Tensor:
        made = dense(weights, values["task"])
        w, b = made[:12].reshape(4, 3), made[12:]
        return F.mse_loss(values["x"] @ w + b, values["y"])

    data = {"task": torch.randn(5), "x": torch.randn(6, 4), "y": torch.randn(6, 3)}
    problem = Problem(layers(5, 6, 15), data, loss)
    yield train(problem, RULES["adam"], "adam")
    yield gradients_only(problem, "gradients")


@kind("factorisation-machine")
def factorisation_machine() -> Iterator[Step]:
    def loss(weights: Arrays, values: Arrays) -> Tensor:
        x = values["x"]
        pairs = (x @ weights["factors"]).square() - x.square() @ weights["factors"].square()
        return F.binary_cross_entropy_with_logits(x @ weights["w"] + 0.5 * pairs.sum(-1) + weights["b"], values["y"])

    weights = {"factors": 0.3 * torch.randn(7, 3), "w": torch.randn(7), "b": torch.zeros(())}
    problem = Problem(weights, {"x": torch.randn(5, 7), "y": torch.tensor([1.0, 0, 1, 1, 0])}, loss)
    yield train(problem, RULES["ftrl"], "ftrl")
    yield train(problem, RULES["adagrad"], "adagrad")


@kind("normalisation-layers")
def normalisation_layers() -> Iterator[Step]:
    """Root mean square, group, and instance normalization, and torch's own layer and group normalization."""
    norms = {
        "rms": lambda x, w: x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * w,
        "group": lambda x, w: normalise(x.reshape(-1, 2, 3), torch.ones(3), torch.zeros(3)).reshape(-1, 6) * w,
        "layer": lambda x, w: F.layer_norm(x, (6,), w),
        "torch-group": lambda x, w: F.group_norm(x, 2, w),
    }
    for name, norm in norms.items():

        def loss(weights: Arrays, values: Arrays, norm: Callable = norm) -> Tensor:
            x = norm(values["x"] @ weights["w1"], weights["scale"])
            return F.mse_loss(torch.relu(x) @ weights["w2"], values["y"])

        weights = {"w1": matrix(5, 6), "scale": torch.ones(6), "w2": matrix(6, 3)}
        data = {"x": torch.randn(4, 5), "y": torch.randn(4, 3)}
        yield train(Problem(weights, data, loss), RULES["momentum"], name)
