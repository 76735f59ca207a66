"""The whole training of the digits network in float64 numpy: what a scaled artifact folder must do.

Forward pass, cross-entropy, backward pass, accumulation over a window, clipping by the global norm, AdamW or SGD, and
TensorFlow's rule for the loss scale, each written out from its definition. The loss scale cancels out of exact
gradients, so it appears in the rule alone.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from tests.conftest import Arrays

__all__ = ["AdamW", "Clip", "Digits", "Rule", "Sgd", "cross_entropy_gradients"]


def cross_entropy_gradients(weights: Arrays, images: np.ndarray, labels: np.ndarray) -> tuple[float, Arrays]:
    """The mean cross-entropy of `fc2(relu(fc1(images)))`, and its gradients."""
    with np.errstate(invalid="ignore"):
        x = images.astype(np.float64)
        before = x @ weights["fc1.weight"].T + weights["fc1.bias"]
        hidden = np.maximum(before, 0)
        logits = hidden @ weights["fc2.weight"].T + weights["fc2.bias"]
        shifted = logits - logits.max(axis=1, keepdims=True)
        log_probability = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
        rows = np.arange(len(labels))
        d_logits = np.exp(log_probability)
        d_logits[rows, labels] -= 1
        d_logits /= len(labels)
        d_hidden = (d_logits @ weights["fc2.weight"]) * (before > 0)
        gradients = {
            "fc1.weight": d_hidden.T @ x,
            "fc1.bias": d_hidden.sum(axis=0),
            "fc2.weight": d_logits.T @ hidden,
            "fc2.bias": d_logits.sum(axis=0),
        }
    return float(-log_probability[rows, labels].mean()), gradients


@dataclasses.dataclass
class Rule:
    """TensorFlow's dynamic loss scale.

    Attributes:
        scale: the loss scale.
        period: good steps after which it grows.
        multiplier: by how much.
        good_steps: good steps in a row.
    """

    scale: float
    period: int
    multiplier: float = 2.0
    good_steps: int = 0

    def update(self, finite: bool) -> None:
        """Adjust the scale to one step."""
        if not finite:
            self.good_steps = 0
            self.scale = max(self.scale / self.multiplier, 1.0)
        elif self.good_steps + 1 >= self.period:
            self.good_steps = 0
            self.scale *= self.multiplier
        else:
            self.good_steps += 1


@dataclasses.dataclass(frozen=True)
class Clip:
    """Clipping by the global norm of all gradients."""

    max_norm: float

    def __call__(self, gradients: Arrays) -> Arrays:
        norm = np.sqrt(sum(np.sum(np.square(gradient)) for gradient in gradients.values()))
        factor = min(1.0, self.max_norm / (norm + 1e-6))
        return {name: gradient * factor for name, gradient in gradients.items()}


@dataclasses.dataclass
class AdamW:
    """AdamW as in Hugging Face's transformers: weight decay after the step, `epsilon` beside the uncorrected root."""

    learning_rate: float = 1e-3
    alpha: float = 0.9
    beta: float = 0.999
    epsilon: float = 1e-6
    weight_decay: float = 0.0
    step: int = 0
    first: Arrays = dataclasses.field(default_factory=dict)
    second: Arrays = dataclasses.field(default_factory=dict)

    def apply(self, weights: Arrays, gradients: Arrays) -> None:
        """Take one step, in place."""
        self.step += 1
        rate = self.learning_rate * np.sqrt(1 - self.beta**self.step) / (1 - self.alpha**self.step)
        for name, gradient in gradients.items():
            first = self.alpha * self.first.get(name, 0.0) + (1 - self.alpha) * gradient
            second = self.beta * self.second.get(name, 0.0) + (1 - self.beta) * gradient**2
            self.first[name], self.second[name] = first, second
            moved = weights[name] - rate * first / (np.sqrt(second) + self.epsilon)
            weights[name] = moved - self.learning_rate * self.weight_decay * moved


@dataclasses.dataclass
class Sgd:
    """Plain gradient descent."""

    learning_rate: float = 1e-3
    step: int = 0

    def apply(self, weights: Arrays, gradients: Arrays) -> None:
        """Take one step, in place."""
        self.step += 1
        for name, gradient in gradients.items():
            weights[name] = weights[name] - self.learning_rate * gradient


@dataclasses.dataclass
class Digits:
    """The training of one folder.

    Attributes:
        weights: the parameters, float64.
        optimizer: what applies a step.
        rule: the loss scale.
        clip: clips the accumulated gradients, or None.
        gradients: accumulated in the present window.
        finite: whether those are; None before the first window.
        begins: whether the next call begins a window.
    """

    weights: Arrays
    optimizer: AdamW | Sgd
    rule: Rule
    clip: Clip | None = None
    gradients: Arrays = dataclasses.field(default_factory=dict)
    finite: bool | None = None
    begins: bool = True

    def train(self, images: np.ndarray, labels: np.ndarray) -> float:
        """`module(images, labels)`: the loss."""
        if self.begins:
            if self.finite is not None:
                self.rule.update(self.finite)
            self.gradients = {}
        self.begins = False
        loss, gradients = cross_entropy_gradients(self.weights, images, labels)
        self.gradients = {name: self.gradients.get(name, 0.0) + gradient for name, gradient in gradients.items()}
        self.finite = all(np.isfinite(gradient).all() for gradient in self.gradients.values())
        return loss

    def step(self) -> None:
        """`optimizer.step()` and `module.lazy_reset_grad()`."""
        if self.finite:
            self.optimizer.apply(self.weights, self.gradients if self.clip is None else self.clip(self.gradients))
        self.begins = True

    def interrupt(self) -> None:
        """The session is saved and loaded: the window's gradients are gone, and the next call begins another."""
        self.begins = True
