"""Kinds that carry more than weights and moments: perturbations, chains, memories, snapshots, a server's momentum."""

from collections.abc import Iterator
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from models.zoo.pytorch.problems import Problem, classification, dense, layers, matrix, regression
from models.zoo.pytorch.rules import RULES
from models.zoo.pytorch.training import Rule, differentiate, train
from models.zoo.steps import PLAIN, Arrays, Inputs, Outputs, Step, Style, kind

EXPORTER, SCRAMBLED = Style(names="exporter"), Style(names="scrambled", order="shuffled")


@kind("free-adversary")
def free_adversary() -> Iterator[Step]:
    """A perturbation of the batch is carried from replay to replay, uphill by the sign of its own gradient."""
    network = classification(6, 7, 4)

    def loss(weights: Arrays, values: Arrays) -> Tensor:
        return network.loss(weights, values | {"x": values["x"] + weights["perturbation"]})

    for name, style in (("sgd", PLAIN), ("momentum", EXPORTER), ("adam", SCRAMBLED)):
        rule = RULES[name]

        def run(values: Arrays, rule: Rule = rule) -> Outputs:
            weights = {key: values[key] for key in network.weights}
            learning = Problem(weights | {"perturbation": values["perturbation"]}, {}, loss)
            outputs, grads = differentiate(learning, values)
            moved = (values["perturbation"] + 0.05 * grads["perturbation"].sign()).clamp(-0.2, 0.2)
            return replace(outputs, states=rule.apply(weights, grads, values) | {"perturbation": moved})

        states = network.weights | rule.initial(network.weights) | {"perturbation": torch.zeros(6, 6)}
        yield Step(name, Inputs(network.batch, states), run, style)


@kind("persistent-chains")
def persistent_chains() -> Iterator[Step]:
    """An energy-based model whose negative samples are carried, and moved by Langevin steps with noise that is fed."""

    def loss(weights: Arrays, values: Arrays) -> tuple[Tensor, Outputs]:
        slope = torch.func.grad(lambda x: dense({k: w.detach() for k, w in weights.items()}, x, F.silu).sum())
        chains = values["chains"]
        for step in range(2):
            chains = chains - 0.1 * slope(chains) + 0.1 * values["noise"][step]
        real, made = dense(weights, values["x"], F.silu), dense(weights, chains.detach(), F.silu)
        gap = real.mean() - made.mean()
        value = gap + 0.1 * (real.square().mean() + made.square().mean())
        return value, Outputs(metrics={"gap": gap}, states={"chains": chains})

    data = {"x": torch.randn(4, 3), "noise": torch.randn(2, 6, 3)}
    problem = Problem(layers(3, 7, 1), data, loss, {"chains": torch.randn(6, 3)})
    yield train(problem, RULES["sgd"], "sgd")
    yield train(problem, RULES["adam"], "adam", EXPORTER)


@kind("fast-weight-memory")
def fast_weight_memory() -> Iterator[Step]:
    """Linear attention by the delta rule: the memory matrix of each row of the batch is carried between segments."""

    def loss(weights: Arrays, values: Arrays) -> tuple[Tensor, Outputs]:
        x, memory, read = values["x"], values["memory"], []
        q, v = x @ weights["q"], x @ weights["v"]
        k = F.normalize(x @ weights["k"], dim=-1)
        for step in range(x.shape[1]):
            key, rate = k[:, step, :, None], torch.sigmoid(x[:, step] @ weights["gate"])[:, :, None]
            memory = memory + rate * key * (v[:, step, :, None] - memory.transpose(1, 2) @ key).transpose(1, 2)
            read.append((q[:, step, None] @ memory)[:, 0])
        return F.mse_loss(torch.stack(read, 1) @ weights["o"], values["y"]), Outputs(states={"memory": memory.detach()})

    weights = {"q": matrix(5, 4), "k": matrix(5, 4), "v": matrix(5, 4), "gate": matrix(5, 1), "o": matrix(4, 3)}
    data = {"x": torch.randn(2, 3, 5), "y": torch.randn(2, 3, 3)}
    problem = Problem(weights, data, loss, {"memory": torch.zeros(2, 4, 4)})
    yield train(problem, RULES["sgd"], "sgd")
    yield train(problem, RULES["adamw"], "adamw", EXPORTER)
    yield train(problem, RULES["momentum"], "initializers", Style(states="initializers"))


@kind("server-round")
def server_round() -> Iterator[Step]:
    """Three clients take two steps each from the server's weights; the server's optimizer takes their mean move."""
    network = regression()
    data = {"x": torch.randn(3, 4, 5), "y": torch.randn(3, 4, 3)}
    variants = {
        "averaging": ("sgd", 1.0, PLAIN),
        "momentum": ("momentum", 0.7, EXPORTER),
        "adam": ("adam", 0.01, PLAIN),
    }
    for variant, (name, rate, style) in variants.items():
        rule = RULES[name].with_rates(rate=rate)

        def run(values: Arrays, rule: Rule = rule) -> Outputs:
            server, losses, ends = {key: values[key] for key in network.weights}, [], []
            for client in range(3):
                own, batch = server, {key: values[key][client] for key in data}
                for step in range(2):
                    outputs, grads = differentiate(network, batch | own)
                    own = {key: weight - 0.05 * grads[key] for key, weight in own.items()}
                    losses += [outputs.losses["loss"]] if step == 0 else []
                ends.append(own)
            moves = {key: weight - torch.stack([own[key] for own in ends]).mean(0) for key, weight in server.items()}
            return Outputs({"loss": torch.stack(losses).mean()}, states=rule.apply(server, moves, values))

        yield Step(variant, Inputs(data, network.weights | rule.initial(network.weights)), run, style)


@kind("variance-reduction")
def variance_reduction() -> Iterator[Step]:
    """The gradient is corrected by one at earlier weights: a snapshot (SVRG), or the last ones (STORM)."""
    network = regression()

    def snapshot(values: Arrays) -> Outputs:
        weights = {key: values[key] for key in network.weights}
        outputs, grads = differentiate(network, values)
        _, held = differentiate(network, values | {key: values[f"{key}_snapshot"] for key in weights})
        due = torch.remainder(values["age"], 3) == 0
        states = {key: weights[key] - 0.05 * (grads[key] - held[key] + values[f"{key}_anchor"]) for key in weights}
        states |= {f"{key}_snapshot": torch.where(due, weights[key], values[f"{key}_snapshot"]) for key in weights}
        states |= {f"{key}_anchor": torch.where(due, grads[key], values[f"{key}_anchor"]) for key in weights}
        return replace(outputs, states=states | {"age": values["age"] + 1})

    def recursive(values: Arrays) -> Outputs:
        weights = {key: values[key] for key in network.weights}
        outputs, grads = differentiate(network, values)
        _, before = differentiate(network, values | {key: values[f"{key}_last"] for key in weights})
        estimate = {key: grads[key] + 0.8 * (values[f"{key}_estimate"] - before[key]) for key in weights}
        states = {key: weights[key] - 0.05 * estimate[key] for key in weights}
        states |= {f"{key}_estimate": value for key, value in estimate.items()}
        return replace(outputs, states=states | {f"{key}_last": weight for key, weight in weights.items()})

    def with_slots(*slots: str) -> Arrays:
        made = {f"{key}_{slot}": weight.clone() for slot in slots for key, weight in network.weights.items()}
        return network.weights | {
            k: torch.zeros_like(v) if "_anchor" in k or "_est" in k else v for k, v in made.items()
        }

    counted = with_slots("snapshot", "anchor") | {"age": torch.tensor(0)}
    yield Step("snapshot", Inputs(network.batch, counted), snapshot)
    yield Step("snapshot-names", Inputs(network.batch, counted), snapshot, EXPORTER)
    yield Step("recursive", Inputs(network.batch, with_slots("estimate", "last")), recursive, EXPORTER)
