"""Kinds that are methods of papers around an optimizer: continual, Bayesian, federated, robust, multi-task learning."""

from collections.abc import Iterator
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from models.zoo.pytorch.problems import Problem, classification, dense, layers, matrix, one_hot, regression
from models.zoo.pytorch.rules import RULES
from models.zoo.pytorch.training import Rule, differentiate, gradients_only, train
from models.zoo.steps import PLAIN, Arrays, Inputs, Outputs, Step, Style, kind

EXPORTER, SCRAMBLED = Style(names="exporter"), Style(names="scrambled", order="shuffled")


@kind("elastic-consolidation")
def elastic_consolidation() -> Iterator[Step]:
    """EWC: weights are held near those of an earlier task by their importance, frozen or carried on."""
    network = classification(6, 7, 4)

    def loss(weights: Arrays, values: Arrays) -> tuple[Tensor, Outputs]:
        fit = network.loss(weights, values)
        pulls = [values[f"{k}_importance"] * (w - values[f"{k}_anchor"]).square() for k, w in weights.items()]
        pull = torch.stack([value.sum() for value in pulls]).sum()
        return fit + 2.0 * pull, Outputs(metrics={"fit": fit, "pull": pull})

    def observe(values: Arrays, grads: Arrays, _: Arrays) -> Outputs:
        return Outputs(states={f"{k}_importance": 0.9 * values[f"{k}_importance"] + g * g for k, g in grads.items()})

    importance = {f"{name}_importance": 0.1 * torch.rand_like(weight) for name, weight in network.weights.items()}
    anchors = {f"{name}_anchor": weight + 0.01 for name, weight in network.weights.items()}
    frozen = replace(network, loss=loss, constants=anchors | importance)
    yield train(frozen, RULES["sgd"], "sgd")
    yield train(frozen, RULES["adam"], "adam", EXPORTER)
    online = replace(network, loss=loss, constants=anchors)
    yield train(online, RULES["momentum"], "online", EXPORTER, observe=observe, carried=importance)


@kind("bayesian-layers")
def bayesian_layers() -> Iterator[Step]:
    """Each weight has a mean and a spread; the noise of each example's sums is fed (local reparametrisation)."""

    def loss(weights: Arrays, values: Arrays) -> tuple[Tensor, Outputs]:
        x, divergence = values["x"], torch.zeros(())
        for layer in ("first", "second"):
            mean, spread = weights[f"{layer}_mean"], F.softplus(weights[f"{layer}_spread"])
            noise = values[f"{layer}_noise"] * (x.square() @ spread.square() + 1e-4).sqrt()
            divergence = divergence + (0.5 * (spread.square() + mean.square() - 1) - torch.log(spread)).sum()
            x = x @ mean + noise
            x = torch.relu(x) if layer == "first" else x
        fit = F.cross_entropy(x, values["label"])
        return fit + 0.01 * divergence, Outputs(metrics={"fit": fit, "divergence": divergence})

    weights = {"first_mean": matrix(5, 7), "first_spread": torch.full((5, 7), -2.0)}
    weights |= {"second_mean": matrix(7, 3), "second_spread": torch.full((7, 3), -2.0)}
    data = {"x": torch.randn(4, 5), "label": torch.randint(3, (4,))}
    data |= {"first_noise": torch.randn(4, 7), "second_noise": torch.randn(4, 3)}
    problem = Problem(weights, data, loss)
    yield train(problem, RULES["adam"], "adam")
    yield train(problem, RULES["momentum"], "names", EXPORTER)
    yield gradients_only(problem, "gradients", EXPORTER)


@kind("learnt-step-size")
def learnt_step_size() -> Iterator[Step]:
    """LSQ: weights and activations are rounded to multiples of step sizes that learn beside the weights."""

    def quantise(x: Tensor, size: Tensor, low: float, high: float) -> Tensor:
        slowed = size / (high * x.numel()) ** 0.5
        size = slowed + (size - slowed).detach()
        x = (x / size).clamp(low, high)
        return (x + (torch.round(x) - x).detach()) * size

    def loss(weights: Arrays, values: Arrays) -> Tensor:
        x = torch.relu(values["x"] @ quantise(weights["w1"], weights["w1_step"], -7.0, 7.0))
        x = quantise(x, weights["x_step"], 0.0, 15.0)
        return F.mse_loss(x @ quantise(weights["w2"], weights["w2_step"], -7.0, 7.0), values["y"])

    network = regression(5, 7, 3, bias=False)
    steps = {name: torch.tensor(size) for name, size in (("w1_step", 0.1), ("w2_step", 0.12), ("x_step", 0.2))}
    problem = replace(network, weights=network.weights | steps, loss=loss)
    yield train(problem, RULES["sgd"].with_rates(rate=0.01), "sgd")
    yield train(problem, RULES["adam"], "adam", EXPORTER)
    yield train(problem, RULES["momentum"].with_rates(rate=0.01), "unoptimized", Style(optimize=False))


@kind("adaptive-divergence")
def adaptive_divergence() -> Iterator[Step]:
    """PPO whose penalty on the divergence from the old policy is carried, doubled and halved towards a target."""

    def loss(weights: Arrays, values: Arrays) -> tuple[Tensor, Outputs]:
        new, old = torch.log_softmax(dense(weights, values["seen"]), -1), values["old"]
        ratio = torch.exp((new - old).gather(1, values["action"][:, None])[:, 0])
        divergence = (old.exp() * (old - new)).sum(-1).mean()
        c = values["penalty"]
        c = torch.where(divergence > 0.015, c * 2, torch.where(divergence < 0.01 / 1.5, c / 2, c)).detach()
        value = values["penalty"] * divergence - (ratio * values["advantage"]).mean()
        return value, Outputs(metrics={"divergence": divergence}, states={"penalty": c})

    weights = layers(4, 6, 3)
    data = {"seen": torch.randn(5, 4), "action": torch.randint(3, (5,)), "advantage": torch.randn(5)}
    data["old"] = torch.log_softmax(dense(weights, data["seen"]) + 0.1 * torch.randn(5, 3), -1)
    problem = Problem(weights, data, loss, {"penalty": torch.tensor(0.2)})
    yield train(problem, RULES["sgd"], "sgd")
    yield train(problem, RULES["adam"], "adam", EXPORTER)
    yield train(problem, RULES["momentum"], "initializers", Style(states="initializers"))


def soft_actor_critic(rule: Rule, variant: str, style: Style = PLAIN) -> Step:
    """Return SAC with discrete actions: three losses, two critics with slow copies, a learnt temperature."""
    policy, critics = layers(4, 6, 3, prefix="policy_"), layers(4, 6, 3, prefix="a_") | layers(4, 6, 3, prefix="b_")
    temperature = {"log_temperature": torch.tensor(-1.0)}

    def lowest(critics: Arrays, seen: Tensor) -> Tensor:
        return torch.minimum(dense(critics, seen, prefix="a_"), dense(critics, seen, prefix="b_"))

    def critic_loss(weights: Arrays, values: Arrays) -> Tensor:
        logits = torch.log_softmax(dense(values, values["after"], prefix="policy_"), -1)
        best = lowest({name: values[f"{name}_slow"] for name in weights}, values["after"])
        ahead = (logits.exp() * (best - values["log_temperature"].exp() * logits)).sum(-1)
        wanted, action = values["reward"] + 0.9 * ahead, values["action"][:, None]
        guesses = [dense(weights, values["seen"], prefix=name).gather(1, action)[:, 0] for name in ("a_", "b_")]
        return F.mse_loss(guesses[0], wanted) + F.mse_loss(guesses[1], wanted)

    def policy_loss(weights: Arrays, values: Arrays) -> Tensor:
        logits = torch.log_softmax(dense(weights, values["seen"], prefix="policy_"), -1)
        gain = lowest(values, values["seen"])
        return (logits.exp() * (values["log_temperature"].exp() * logits - gain)).sum(-1).mean()

    def temperature_loss(weights: Arrays, values: Arrays) -> Tensor:
        logits = torch.log_softmax(dense(values, values["seen"], prefix="policy_"), -1)
        return -(weights["log_temperature"].exp() * ((logits.exp() * logits).sum(-1) + 0.5).mean())

    parts = {"critic": (critics, critic_loss), "policy": (policy, policy_loss)}
    parts["temperature"] = temperature, temperature_loss

    def run(values: Arrays) -> Outputs:
        losses, states = {}, {}
        for name, (weights, loss) in parts.items():
            outputs, grads = differentiate(Problem(weights, {}, loss), values)
            losses[f"{name}_loss"] = outputs.losses["loss"]
            states |= {k.replace("count", f"{name}_count"): v for k, v in stepped(name, weights, grads, values).items()}
        slow = {f"{name}_slow": 0.99 * values[f"{name}_slow"] + 0.01 * states[name] for name in critics}
        return Outputs(losses, states=states | slow)

    def stepped(name: str, weights: Arrays, grads: Arrays, values: Arrays) -> Arrays:
        own = {"count": values[f"{name}_count"]} if rule.counted else {}
        return rule.apply({key: values[key] for key in weights}, grads, values | own)

    states = critics | policy | temperature | {f"{name}_slow": weight.clone() for name, weight in critics.items()}
    for name, (weights, _) in parts.items():
        states |= {key.replace("count", f"{name}_count"): value for key, value in rule.initial(weights).items()}
    batch = {"seen": torch.randn(5, 4), "after": torch.randn(5, 4), "action": torch.randint(3, (5,))}
    return Step(variant, Inputs(batch | {"reward": torch.randn(5)}, states), run, style)


@kind("soft-actor-critic")
def soft_actor_critics() -> Iterator[Step]:
    yield soft_actor_critic(RULES["sgd"], "sgd")
    yield soft_actor_critic(RULES["adam"], "adam", EXPORTER)


def two_tasks() -> tuple[Arrays, Arrays]:
    """Return a trunk with two heads, and a batch with a target for each."""
    weights = {"trunk": matrix(5, 6), "head_1": matrix(6, 2), "head_2": matrix(6, 3)}
    return weights, {"x": torch.randn(4, 5), "y": torch.randn(4, 2), "label": torch.randint(3, (4,))}


def task_losses(weights: Arrays, values: Arrays) -> list[Tensor]:
    """Return the losses of the two tasks."""
    x = torch.tanh(values["x"] @ weights["trunk"])
    return [F.mse_loss(x @ weights["head_1"], values["y"]), F.cross_entropy(x @ weights["head_2"], values["label"])]


@kind("balanced-task-norms")
def balanced_task_norms() -> Iterator[Step]:
    """GradNorm: the tasks' weights are carried, and move to even out the gradient norms of the trunk."""
    weights, data = two_tasks()
    for name, style in (("sgd", PLAIN), ("adam", EXPORTER)):
        rule = RULES[name]

        def run(values: Arrays, rule: Rule = rule) -> Outputs:
            own, shares = {key: values[key] for key in weights}, values["shares"]
            norms = []
            for task in range(2):
                grad = torch.func.grad(lambda trunk, t=task: task_losses(own | {"trunk": trunk}, values)[t])
                norms.append(grad(own["trunk"]).norm())
            parts, size = torch.stack(task_losses(own, values)), torch.stack(norms)
            pace = parts / values["first_losses"]
            excess = shares * size - (shares * size).mean() * (pace / pace.mean()).sqrt()
            moved = (shares - 0.025 * excess.sign() * size).clamp(min=0.1)
            first = torch.where(values["started"] > 0, values["first_losses"], parts)

            def loss(weights: Arrays, values: Arrays) -> tuple[Tensor, Outputs]:
                each = torch.stack(task_losses(weights, values))
                return (values["shares"] * each).sum(), Outputs(metrics={"task_losses": each})

            outputs, grads = differentiate(Problem(weights, {}, loss), values)
            states = rule.apply(own, grads, values) | {"shares": 2 * moved / moved.sum(), "first_losses": first}
            return replace(outputs, states=states | {"started": torch.ones_like(values["started"])})

        carried = {"shares": torch.ones(2), "first_losses": torch.ones(2), "started": torch.tensor(0.0)}
        yield Step(name, Inputs(data, weights | rule.initial(weights) | carried), run, style)


@kind("projected-conflicts")
def projected_conflicts() -> Iterator[Step]:
    """PCGrad: each task's gradient loses its part against the other's before both are added."""
    weights, data = two_tasks()
    for name, style in (("sgd", PLAIN), ("momentum", EXPORTER), ("adam", SCRAMBLED)):
        rule = RULES[name]

        def run(values: Arrays, rule: Rule = rule) -> Outputs:
            own = {key: values[key] for key in weights}
            losses, flats = {}, []
            for task, label in enumerate(("first_loss", "second_loss")):
                grad = torch.func.grad_and_value(lambda weights, t=task: task_losses(weights, values)[t])
                grads, losses[label] = grad(own)
                flats.append(torch.cat([grads[key].flatten() for key in own]))
            a, b = flats
            dot = (a @ b).clamp(max=0.0)
            total = a - dot / (b @ b + 1e-6) * b + b - dot / (a @ a + 1e-6) * a
            parts = total.split([weight.numel() for weight in own.values()])
            summed = {key: part.reshape(own[key].shape) for key, part in zip(own, parts, strict=True)}
            return Outputs(losses, states=rule.apply(own, summed, values))

        yield Step(name, Inputs(data, weights | rule.initial(weights)), run, style)


@kind("bias-balanced-experts")
def bias_balanced_experts() -> Iterator[Step]:
    """Two experts of four are chosen with a bias that is carried, and moves against each expert's load."""

    def loss(weights: Arrays, values: Arrays) -> tuple[Tensor, Outputs]:
        gate = torch.sigmoid(values["x"] @ weights["gate"])
        chosen = one_hot(torch.topk(gate.detach() + values["bias"], 2).indices, 4).sum(1)
        load = chosen.mean(0)
        share = gate * chosen
        share = share / share.sum(-1, keepdim=True)
        outputs = torch.einsum("bi,eio->beo", values["x"], weights["experts"])
        states = {"bias": values["bias"] + 0.01 * torch.sign(load.mean() - load)}
        value = F.mse_loss((share[..., None] * outputs).sum(1), values["y"])
        return value, Outputs(metrics={"load": load}, states=states)

    weights = {"gate": matrix(5, 4), "experts": torch.randn(4, 5, 3) / 5**0.5}
    problem = Problem(weights, {"x": torch.randn(6, 5), "y": torch.randn(6, 3)}, loss, {"bias": torch.zeros(4)})
    yield train(problem, RULES["adam"], "adam")
    yield train(problem, RULES["momentum"], "names", EXPORTER)
    yield gradients_only(problem, "gradients")


@kind("group-robust")
def group_robust() -> Iterator[Step]:
    """Group DRO: weights of groups are carried, and grow exponentially with the groups' losses."""

    def loss(weights: Arrays, values: Arrays) -> tuple[Tensor, Outputs]:
        each = F.cross_entropy(dense(weights, values["x"], torch.relu), values["label"], reduction="none")
        member = one_hot(values["group"], 3)
        groups = (member * each[:, None]).sum(0) / (member.sum(0) + 1e-3)
        raised = values["group_weights"] * torch.exp(0.1 * groups.detach())
        following = raised / raised.sum()
        return (following * groups).sum(), Outputs(metrics={"groups": groups}, states={"group_weights": following})

    network = classification(6, 7, 4)
    data = network.batch | {"group": torch.tensor([0, 1, 2, 0, 1, 0])}
    problem = replace(network, batch=data, loss=loss, states={"group_weights": torch.full((3,), 1 / 3)})
    yield train(problem, RULES["sgd"], "sgd")
    yield train(problem, RULES["adam"], "adam", EXPORTER)
    yield train(problem, RULES["momentum"], "shuffled", SCRAMBLED)
