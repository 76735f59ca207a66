"""Kinds by the form of the export: the same few steps, with everything that an exporter or a tool may change."""

from collections.abc import Iterator
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from models.zoo.pytorch.problems import Problem, classification, dense, images, language, regression, square
from models.zoo.pytorch.rules import RULES
from models.zoo.pytorch.training import gradients_only, train
from models.zoo.steps import Arrays, Inputs, Outputs, Step, Style, kind


def gallery(style: Style, warm: int = 2) -> Iterator[Step]:
    """Yield four steps in one style: gradients, SGD, Adam on equal shapes, attention with momentum."""
    yield gradients_only(classification(), "gradients", style)
    yield train(regression(), RULES["sgd"], "sgd", style, warm=warm)
    yield train(square(), RULES["adam"], "adam-square", style, warm=warm)
    yield train(language(), RULES["momentum"], "language", style, warm=warm)


GALLERIES = {
    "gradients-and-optimizers": Style(),
    "exporter-names": Style(names="exporter"),
    "scrambled-names": Style(names="scrambled"),
    "shuffled-interface": Style(order="shuffled"),
    "reversed-interface": Style(order="reversed"),
    "scrambled-and-shuffled": Style(names="scrambled", order="shuffled", shapes="interface"),
    "no-value-info": Style(shapes="interface"),
    "no-output-shapes": Style(shapes="inputs"),
    "unoptimized-export": Style(optimize=False),
    "unoptimized-without-shapes": Style(optimize=False, shapes="inputs", names="exporter"),
    "states-as-initializers": Style(states="initializers"),
    "states-as-overridable-initializers": Style(states="overridable"),
    "initializers-scrambled": Style(states="initializers", names="scrambled", order="shuffled"),
    "initializers-unoptimized": Style(states="initializers", optimize=False),
    "runtime-optimized": Style(runtime="basic"),
    "runtime-optimized-extended": Style(runtime="extended"),
    "runtime-optimized-overridable": Style(runtime="basic", states="overridable", names="exporter"),
    "simplified": Style(simplified=True),
    "simplified-unoptimized": Style(simplified=True, optimize=False, names="exporter"),
    "opset-18-export": Style(opset=18),
    "opset-21-export": Style(opset=21),
    "opset-23-export": Style(opset=23),
}
for name, entry in GALLERIES.items():
    kind(name)(lambda style=entry: gallery(style, warm=0 if style.states != "inputs" else 2))


@kind("dynamic-batch")
def dynamic_batch() -> Iterator[Step]:
    dynamic = Style(dynamic=True)
    yield gradients_only(regression(), "gradients", dynamic)
    yield train(regression(), RULES["momentum"], "momentum", dynamic)
    yield train(classification(), RULES["adam"], "adam", dynamic)
    yield train(square(), RULES["sgd"], "square", Style(dynamic=True, optimize=False))


@kind("weights-as-constants")
def weights_as_constants() -> Iterator[Step]:
    """Gradients of weights that are initializers, as a converted inference model with a gradient builder has them."""
    for name, problem in (("classification", classification()), ("square", square()), ("images", images())):
        step = gradients_only(problem, name)
        inputs = Inputs(problem.batch, constants=problem.weights)
        yield replace(step, inputs=inputs, style=Style(embedded_constants=True))
    yield gradients_only(language(), "language-names", Style(embedded_constants=True, names="exporter"))


@kind("scalar-initializers")
def scalar_initializers() -> Iterator[Step]:
    """Counters, a rate that decays and a running loss are initializers of one element."""
    network = regression()

    def loss(weights: Arrays, values: Arrays) -> tuple[Tensor, Outputs]:
        value = network.loss(weights, values)
        states = {
            "steps": values["steps"] + 1,
            "rate": values["rate"] * 0.999,
            "average": values["average"] + 0.1 * (value.detach() - values["average"]),
        }
        return value, Outputs(states=states)

    states = {"steps": torch.tensor(0), "rate": torch.tensor([0.05]), "average": torch.tensor(0.0)}
    problem = replace(network, loss=loss, states=states)

    def apply(weights: Arrays, grads: Arrays, values: Arrays) -> Arrays:
        return RULES["sgd"].apply(weights, grads, values, rate=values["rate"])

    yield train(problem, RULES["sgd"], "initializers", Style(states="initializers"), apply=apply, warm=0)
    yield train(problem, RULES["sgd"], "overridable", Style(states="overridable"), apply=apply, warm=0)
    yield train(problem, RULES["sgd"], "inputs", apply=apply)
    scrambled = Style(states="initializers", names="scrambled", order="shuffled", shapes="inputs")
    yield train(problem, RULES["sgd"], "scrambled", scrambled, apply=apply, warm=0)


@kind("zero-momentum-initializers")
def zero_momentum_initializers() -> Iterator[Step]:
    """Buffers that are all zeros, and equal to one another."""
    style = Style(states="initializers")
    for name in ("momentum", "nesterov", "rmsprop-momentum", "lion"):
        yield train(square(), RULES[name], name, style, warm=0)
    yield train(classification(), RULES["adam"], "adam-unoptimized", replace(style, optimize=False), warm=0)


@kind("handed-through")
def handed_through() -> Iterator[Step]:
    """Weights that do not move are outputs, too: identities, or copies of frozen ones."""
    problem = regression()
    frozen = {"embedding": torch.randn(5, 5), "temperature": torch.tensor(2.0)}

    def loss(weights: Arrays, values: Arrays) -> tuple[Tensor, Outputs]:
        x = values["x"] @ values["embedding"] / values["temperature"]
        value = F.mse_loss(dense(weights, x), values["y"])
        return value, Outputs(states={name: values[name].clone() for name in frozen})

    handed = Problem(problem.weights, problem.batch, loss, frozen)
    yield train(handed, RULES["sgd"], "sgd")
    yield train(handed, RULES["adam"], "unoptimized", Style(optimize=False))
    yield train(handed, RULES["momentum"], "scrambled", Style(names="scrambled", order="shuffled"))


@kind("batch-like-weights")
def batch_like_weights() -> Iterator[Step]:
    """Batch, targets, masks and noise have the shape and type of the weights, and all are shuffled."""
    network = square()

    def loss(weights: Arrays, values: Arrays) -> Tensor:
        x = values["x"] * values["mask"] + 0.1 * values["noise"]
        return F.mse_loss(dense(weights, x), values["y"])

    extra = {"mask": (torch.rand(6, 6) > 0.2).float(), "noise": torch.randn(6, 6)}
    problem = replace(network, loss=loss, batch=network.batch | extra)
    for name in ("sgd", "momentum", "adam"):
        yield train(problem, RULES[name], name, Style(names="scrambled", order="shuffled"))
    yield gradients_only(problem, "gradients", Style(names="exporter", order="shuffled"))


@kind("normalised-batch-output")
def normalised_batch_output() -> Iterator[Step]:
    """An output has the shape and type of the batch, and is no state: the prediction, the augmented batch."""

    def loss(weights: Arrays, values: Arrays) -> tuple[Tensor, Outputs]:
        x = (values["x"] - values["x"].mean(0)) / (values["x"].std(0) + 1e-3)
        prediction = dense(weights, x)
        return F.mse_loss(prediction, values["y"]), Outputs(metrics={"x_used": x, "prediction": prediction})

    yield train(replace(square(), loss=loss), RULES["sgd"], "sgd")
    yield train(replace(regression(4, 6, 4), loss=loss), RULES["adam"], "adam")
    yield gradients_only(replace(square(), loss=loss), "gradients")


@kind("float16-gradients")
def float16_gradients() -> Iterator[Step]:
    """Mixed precision as autocast does it: float32 weights, float16 products, float32 loss; gradients in float32."""
    for name, make, style in (("classification", classification, Style()), ("square", square, Style(names="exporter"))):
        network = make()

        def loss(weights: Arrays, values: Arrays, network: Problem = network) -> Tensor:
            half = {key: weight.half() for key, weight in weights.items()}
            output = dense(half, values["x"].half(), torch.relu).float()
            if "label" in values:
                return F.cross_entropy(output, values["label"])
            return F.mse_loss(output, values["y"])

        problem = replace(network, loss=loss)
        yield gradients_only(problem, f"{name}-gradients", style)
        yield train(problem, RULES["adam"], f"{name}-adam", style)
