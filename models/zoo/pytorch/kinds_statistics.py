"""Kinds by statistics that are carried: of batches, observations, losses, classes."""

from collections.abc import Iterator
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from models.zoo.pytorch.problems import Problem, classification, dense, matrix, regression
from models.zoo.pytorch.rules import RULES
from models.zoo.pytorch.training import gradients_only, train
from models.zoo.steps import Arrays, Outputs, Step, Style, kind

INITIALIZERS = Style(states="initializers")


def batch_norm(x: Tensor, values: Arrays, name: str, momentum: float | Tensor = 0.1) -> tuple[Tensor, Arrays]:
    """Return the normalized batch, channels last or second of four, and the next running statistics."""
    axes, shape = ((0, 2, 3), (1, -1, 1, 1)) if x.dim() == 4 else ((0,), (1, -1))
    mean, variance = x.mean(axes), x.var(axes, correction=0)
    count = x.numel() / mean.numel()
    old_mean, old_variance = values[f"{name}_mean"], values[f"{name}_variance"]
    states = {
        f"{name}_mean": (1 - momentum) * old_mean + momentum * mean.detach(),
        f"{name}_variance": (1 - momentum) * old_variance + momentum * variance.detach() * count / (count - 1),
    }
    return (x - mean.reshape(shape)) * torch.rsqrt(variance.reshape(shape) + 1e-5), states


def normalised_images(counted: bool) -> Problem:
    """Return a convnet with two batch normalizations; with a count of batches if asked for."""

    def loss(weights: Arrays, values: Arrays) -> tuple[Tensor, Outputs]:
        x, states = values["image"], {}
        for name in ("conv1", "conv2"):
            x, following = batch_norm(F.conv2d(x, weights[name]), values, name)
            x = F.relu(x * weights[f"{name}_scale"][:, None, None] + weights[f"{name}_shift"][:, None, None])
            states |= following
            if counted:
                states[f"{name}_batches"] = values[f"{name}_batches"] + 1
        return F.cross_entropy(x.mean((2, 3)) @ weights["head"], values["label"]), Outputs(states=states)

    weights, states = {}, {}
    for name, channels, features in (("conv1", 2, 5), ("conv2", 5, 6)):
        weights[name] = 0.3 * torch.randn(features, channels, 3, 3)
        weights |= {f"{name}_scale": torch.ones(features), f"{name}_shift": torch.zeros(features)}
        states |= {f"{name}_mean": torch.zeros(features), f"{name}_variance": torch.ones(features)}
        states |= {f"{name}_batches": torch.tensor(0)} if counted else {}
    data = {"image": torch.randn(4, 2, 7, 7), "label": torch.randint(3, (4,))}
    return Problem(weights | {"head": matrix(6, 3)}, data, loss, states)


@kind("batch-norm-convnet")
def batch_norm_convnet() -> Iterator[Step]:
    yield train(normalised_images(False), RULES["sgd"], "sgd")
    yield train(normalised_images(True), RULES["momentum"], "counted")
    yield gradients_only(normalised_images(True), "gradients")
    yield gradients_only(normalised_images(False), "gradients-unoptimized", Style(optimize=False))
    yield train(normalised_images(False), RULES["momentum"], "initializers", INITIALIZERS)


@kind("batch-norm-perceptron")
def batch_norm_perceptron() -> Iterator[Step]:
    """All features have one number, so that scale, shift, mean and variance of all layers have one shape."""

    def problem(fed: bool) -> Problem:
        def loss(weights: Arrays, values: Arrays) -> tuple[Tensor, Outputs]:
            x, states = values["x"], {}
            for name in ("w1", "w2"):
                x, following = batch_norm(x @ weights[name], values, name, values["momentum"] if fed else 0.1)
                x = torch.tanh(x * weights[f"{name}_scale"] + weights[f"{name}_shift"])
                states |= following
            return F.mse_loss(x, values["y"]), Outputs(states=states)

        weights, states = {}, {}
        for name in ("w1", "w2"):
            weights |= {name: matrix(6, 6), f"{name}_scale": torch.ones(6), f"{name}_shift": torch.zeros(6)}
            states |= {f"{name}_mean": torch.zeros(6), f"{name}_variance": torch.ones(6)}
        data = {"x": torch.randn(5, 6), "y": torch.randn(5, 6)}
        rates = {"momentum": torch.tensor(0.1)} if fed else {}
        return Problem(weights, data, loss, states, rates)

    yield train(problem(False), RULES["sgd"], "sgd")
    yield train(problem(True), RULES["adam"], "momentum-as-input")
    yield train(problem(False), RULES["momentum"], "shuffled", Style(names="scrambled", order="shuffled"))


def observed(problem: Problem) -> Problem:
    """Return the problem with its input normalized by running statistics (Welford, Chan's merge of batches)."""

    def loss(weights: Arrays, values: Arrays) -> tuple[Tensor, Outputs]:
        x, count = values["x"], values["seen"]
        n = float(x.shape[0])
        delta, total = x.mean(0) - values["x_mean"], count + n
        mean = values["x_mean"] + delta * n / total
        squares = values["x_squares"] + (x - x.mean(0)).square().sum(0) + delta.square() * count * n / total
        normal = ((x - mean) * torch.rsqrt(squares / total + 1e-4)).clamp(-5.0, 5.0)
        states = {"x_mean": mean, "x_squares": squares, "seen": total}
        return problem.loss(weights, values | {"x": normal}), Outputs(states=states)

    width = problem.batch["x"].shape[1]
    states = {"x_mean": torch.zeros(width), "x_squares": torch.ones(width), "seen": torch.tensor(1.0)}
    return replace(problem, loss=loss, states=states)


@kind("running-observations")
def running_observations() -> Iterator[Step]:
    yield train(observed(regression()), RULES["sgd"], "sgd")
    yield train(observed(classification()), RULES["adam"], "adam")
    yield train(observed(regression()), RULES["momentum"], "initializers", INITIALIZERS)


@kind("running-loss")
def running_loss() -> Iterator[Step]:
    """A moving average of the loss is carried, once only reported, once the loss is divided by it."""
    network = regression()

    def problem(divides: bool) -> Problem:
        def loss(weights: Arrays, values: Arrays) -> tuple[Tensor, Outputs]:
            value = network.loss(weights, values)
            average = 0.9 * values["average"] + 0.1 * value.detach()
            return value / average if divides else value, Outputs(states={"average": average})

        return replace(network, loss=loss, states={"average": torch.tensor(1.0)})

    yield train(problem(False), RULES["sgd"], "reported")
    yield train(problem(True), RULES["sgd"], "divided")
    yield train(problem(False), RULES["momentum"], "initializers", INITIALIZERS)


@kind("quantisation-observer")
def quantisation_observer() -> Iterator[Step]:
    """Quantisation-aware training: the range of the activations is carried, rounding is straight-through."""

    def loss(weights: Arrays, values: Arrays) -> tuple[Tensor, Outputs]:
        x = torch.tanh(values["x"] @ weights["w1"])
        low = torch.minimum(values["low"], x.detach().min())
        high = 0.9 * values["high"] + 0.1 * x.detach().max()
        size = (high - low) / 255 + 1e-4
        x = x + ((torch.round((x - low) / size).clamp(0.0, 255.0) * size + low) - x).detach()
        return F.mse_loss(x @ weights["w2"], values["y"]), Outputs(states={"low": low, "high": high})

    network = regression(5, 7, 3, bias=False)
    problem = replace(network, loss=loss, states={"low": torch.tensor(-0.1), "high": torch.tensor(1.0)})
    yield train(problem, RULES["sgd"], "sgd")
    yield train(problem, RULES["momentum"], "initializers", INITIALIZERS)


@kind("running-class-counts")
def running_class_counts() -> Iterator[Step]:
    """Integer counts of the labels seen weigh the classes of the loss."""
    network = classification()

    def loss(weights: Arrays, values: Arrays) -> tuple[Tensor, Outputs]:
        counts = values["counts"].index_add(0, values["label"], torch.ones_like(values["label"]))
        balance = counts.sum() / (5.0 * counts.to(torch.float32))
        logits = dense(weights, values["x"], torch.relu)
        return F.cross_entropy(logits, values["label"], weight=balance), Outputs(states={"counts": counts})

    problem = replace(network, loss=loss, states={"counts": torch.ones(5, dtype=torch.int64)})
    yield train(problem, RULES["sgd"], "sgd")
    yield train(problem, RULES["adam"], "adam")


@kind("class-centres")
def class_centres() -> Iterator[Step]:
    """Centre loss: the mean feature of each class is carried, and moved towards the batch."""
    network = classification(6, 4, 4)

    def loss(weights: Arrays, values: Arrays) -> tuple[Tensor, Outputs]:
        feature = torch.relu(values["x"] @ weights["w1"] + weights["b1"])
        logits = feature @ weights["w2"] + weights["b2"]
        centres, label = values["centres"], values["label"]
        pull = centres[label] - feature
        moved = centres.index_add(0, label, -0.1 * pull.detach())
        value = F.cross_entropy(logits, label) + 0.1 * pull.square().mean()
        return value, Outputs(states={"centres": moved})

    problem = replace(network, loss=loss, states={"centres": torch.zeros(4, 4)})
    yield train(problem, RULES["sgd"], "sgd")
    yield train(problem, RULES["momentum"], "momentum", Style(names="exporter"))
