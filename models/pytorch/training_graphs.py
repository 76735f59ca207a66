"""The exported training graphs: one function each, registered under the name of its file."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from networks import GeluNorm, Perceptron, Transformer, TwoHeads
from steps import Step, Tensors, adam, adamw_with_clipping, gradients, momentum, sgd

GRAPHS: dict[str, Callable[[], Step]] = {}
BATCH = 8


def graph(function: Callable[[], Step]) -> Callable[[], Step]:
    """Register a training graph."""
    GRAPHS[function.__name__] = function
    return function


def classification(features: int = 16, classes: int = 10) -> Tensors:
    """Return a batch of features with integer targets."""
    return {"x": torch.randn(BATCH, features), "target": torch.randint(classes, (BATCH,))}


def language(length: int = 6, vocabulary: int = 32) -> Tensors:
    """Return a batch of token sequences, and the sequences one token later as targets."""
    text = torch.randint(vocabulary, (BATCH, length + 1))
    return {"tokens": text[:, :-1].contiguous(), "target": text[:, 1:].contiguous()}


def cross_entropy(model: Callable, data: Tensors, _: Tensors) -> torch.Tensor:
    """Cross-entropy of a classifier."""
    return F.cross_entropy(model(data["x"]), data["target"])


def next_token(model: Callable, data: Tensors, _: Tensors) -> torch.Tensor:
    """Cross-entropy of a language model."""
    return F.cross_entropy(model(data["tokens"]).flatten(0, 1), data["target"].flatten())


@graph
def mlp_gelu_layernorm() -> Step:
    """MLP with GELU (erf) and layer normalization, cross-entropy; gradients."""
    return gradients(GeluNorm(), cross_entropy, classification())


@graph
def attention_embedding() -> Step:
    """Transformer block with its own head, cross-entropy; gradients."""
    return gradients(Transformer(), next_token, language())


@graph
def attention_tied() -> Step:
    """Causal transformer block whose head is the embedding's weight, cross-entropy; gradients."""
    return gradients(Transformer(tied=True, causal=True), next_token, language())


@graph
def mse_tanh() -> Step:
    """Tanh network, mean squared error, dynamic batch; gradients."""

    def loss(model: Callable, data: Tensors, _: Tensors) -> torch.Tensor:
        return F.mse_loss(model(data["x"]), data["target"])

    data = {"x": torch.randn(BATCH, 12), "target": torch.randn(BATCH, 3)}
    return gradients(Perceptron(12, 24, 3, activation=torch.tanh), loss, data, dynamic=("x", "target"))


@graph
def label_smoothing() -> Step:
    """MLP, cross-entropy with label smoothing; gradients."""

    def loss(model: Callable, data: Tensors, _: Tensors) -> torch.Tensor:
        return F.cross_entropy(model(data["x"]), data["target"], label_smoothing=0.1)

    return gradients(Perceptron(16, 32, 10), loss, classification())


@graph
def bce() -> Step:
    """MLP, binary cross-entropy with logits; gradients."""

    def loss(model: Callable, data: Tensors, _: Tensors) -> torch.Tensor:
        return F.binary_cross_entropy_with_logits(model(data["x"]), data["target"])

    data = {"x": torch.randn(BATCH, 16), "target": torch.randint(2, (BATCH, 5)).float()}
    return gradients(Perceptron(16, 32, 5), loss, data)


@graph
def two_losses() -> Step:
    """Two heads, cross-entropy + 0.5 * mean squared error; gradients."""

    def loss(model: Callable, data: Tensors, _: Tensors) -> torch.Tensor:
        logits, values = model(data["x"])
        return F.cross_entropy(logits, data["target"]) + 0.5 * F.mse_loss(values, data["values"])

    return gradients(TwoHeads(), loss, classification() | {"values": torch.randn(BATCH, 3)})


@graph
def weight_decay_in_loss() -> Step:
    """MLP, cross-entropy + 1e-3 * the sum of all squared weights; gradients."""

    def loss(model: Callable, data: Tensors, weights: Tensors) -> torch.Tensor:
        return cross_entropy(model, data, weights) + 1e-3 * sum(w.square().sum() for w in weights.values())

    return gradients(Perceptron(16, 32, 10), loss, classification())


@graph
def kl_div() -> Step:
    """MLP, Kullback-Leibler divergence from a teacher's probabilities; gradients."""

    def loss(model: Callable, data: Tensors, _: Tensors) -> torch.Tensor:
        return F.kl_div(F.log_softmax(model(data["x"]), -1), data["teacher"], reduction="batchmean")

    data = {"x": torch.randn(BATCH, 16), "teacher": torch.randn(BATCH, 10).softmax(-1)}
    return gradients(Perceptron(16, 32, 10), loss, data)


@graph
def dropout_mlp() -> Step:
    """MLP with dropout whose mask, already divided by the keep probability, is an input; gradients."""

    def loss(model: Callable, data: Tensors, _: Tensors) -> torch.Tensor:
        return F.cross_entropy(model(data["x"], data["mask"]), data["target"])

    mask = (torch.rand(BATCH, 32) < 0.75).float() / 0.75
    return gradients(Perceptron(16, 32, 10), loss, classification() | {"mask": mask})


@graph
def mlp_float16() -> Step:
    """MLP with GELU in float16, layer normalization and cross-entropy in float32; gradients in both."""

    def loss(model: Callable, data: Tensors, _: Tensors) -> torch.Tensor:
        return F.cross_entropy(model(data["x"]).float(), data["target"])

    data = classification()
    net = GeluNorm().half()
    net.norm.float()
    return gradients(net, loss, data | {"x": data["x"].half()})


@graph
def attention_sgd() -> Step:
    """Transformer block, cross-entropy, SGD inside; next weights."""
    return sgd(Transformer(), next_token, language(), rate=0.1)


@graph
def attention_adamw_clip() -> Step:
    """Causal tied transformer block, global-norm clipping and AdamW inside; next weights, moments, step."""
    return adamw_with_clipping(Transformer(tied=True, causal=True), next_token, language())


@graph
def mlp_momentum() -> Step:
    """MLP, cross-entropy, SGD with momentum inside; next weights and momentum buffers."""
    return momentum(Perceptron(16, 32, 10), cross_entropy, classification(), rate=0.05)


@graph
def clip_by_value() -> Step:
    """MLP, summed cross-entropy, gradients clamped to [-1, 1], SGD inside; next weights."""

    def loss(model: Callable, data: Tensors, _: Tensors) -> torch.Tensor:
        return F.cross_entropy(model(data["x"]), data["target"], reduction="sum")

    return sgd(Perceptron(16, 32, 10), loss, classification(), rate=0.05, clip_value=1.0)


@graph
def digits_step() -> Step:
    """The demo: MLP 64-128-64-10 on 8x8 digits, momentum inside, learning rate as input, dynamic batch."""

    def loss(model: Callable, data: Tensors, _: Tensors) -> tuple[torch.Tensor, Tensors]:
        logits = model(data["images"])
        return F.cross_entropy(logits, data["labels"]), {"logits": logits}

    data = {
        "images": torch.rand(BATCH, 64),
        "labels": torch.randint(10, (BATCH,)),
        "learning_rate": torch.tensor(0.05),
    }
    net = Perceptron(64, 128, 64, 10)
    return momentum(net, loss, data, rate="learning_rate", dynamic=("images", "labels"))


@graph
def reversal_step() -> Step:
    """The demo of underflow: a transformer block that learns to reverse sequences, Adam inside, a loss of small weight.

    The loss is the mean over a batch of 2**24 tokens, and this step computes 2**9 of them: gradients of the logits are
    below 2**-24, the smallest number of float16, and those of the layers under them are far smaller.
    """
    batch, length, vocabulary, tokens = 32, 16, 16, 2**24

    def loss(model: Callable, data: Tensors, _: Tensors) -> tuple[torch.Tensor, Tensors]:
        logits, target = model(data["tokens"]), data["target"]
        mean = F.cross_entropy(logits.flatten(0, 1), target.flatten())
        accuracy = (logits.argmax(-1) == target).float().mean()
        return mean * (batch * length / tokens), {"cross_entropy": mean, "accuracy": accuracy}

    text = torch.randint(vocabulary, (batch, length))
    data = {"tokens": text, "target": text.flip(1)}
    rates = {"learning_rate": torch.tensor(2e-3), "epsilon": torch.tensor(1e-12)}
    return adam(Transformer(vocabulary, length, width=32), loss, data | rates)
