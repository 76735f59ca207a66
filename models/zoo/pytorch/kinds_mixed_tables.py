"""Kinds as people export them, of tables and graphs: clicks, mixed columns with the best weights kept, molecules."""

from collections.abc import Iterator
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from models.zoo.pytorch.kinds_mixed_sequences import prefixed, zeros
from models.zoo.pytorch.kinds_mixed_vision import clipped, global_norm
from models.zoo.pytorch.problems import Problem, dense, layers, matrix
from models.zoo.pytorch.training import differentiate
from models.zoo.steps import Arrays, Inputs, Outputs, Step, Style, kind

EXPORTER = Style(names="exporter")
TABLES = {"user": (23, 6), "item": (31, 8), "context": (7, 4)}


def wide_and_deep() -> Problem:
    """Return a linear part of identities and a network of their embeddings, for clicks."""

    def loss(w: Arrays, values: Arrays) -> tuple[Tensor, Outputs]:
        wide, parts = w["wide_bias"], [values["features"]]
        for name in TABLES:
            wide = wide + w[f"wide_{name}"][values[f"{name}_id"]][:, 0]
            parts.append(w[f"deep_{name}"][values[f"{name}_id"]])
        logit = wide + dense(w, torch.cat(parts, -1), torch.relu, prefix="deep_")[:, 0]
        value = F.binary_cross_entropy_with_logits(logit, values["clicked"])
        rate = torch.lerp(values["click_rate"], values["clicked"].mean(), 0.05)
        background = -(rate * torch.log(rate) + (1 - rate) * torch.log(1 - rate))
        metrics = {"mean_prediction": torch.sigmoid(logit).mean(), "normalised_entropy": value / background}
        return value, Outputs(metrics=metrics, states={"click_rate": rate})

    weights: Arrays = {"wide_bias": torch.zeros(1)}
    weights |= {f"wide_{name}": 0.1 * torch.randn(count, 1) for name, (count, _) in TABLES.items()}
    weights |= {f"deep_{name}": 0.3 * torch.randn(count, size) for name, (count, size) in TABLES.items()}
    weights |= layers(5 + sum(size for _, size in TABLES.values()), 16, 12, 1, prefix="deep_")
    data = {f"{name}_id": torch.randint(count, (8,)) for name, (count, _) in TABLES.items()}
    data |= {"features": torch.randn(8, 5), "clicked": (torch.rand(8) < 0.4).float()}
    return Problem(weights, data, loss, {"click_rate": torch.tensor(0.3)})


@kind("wide-and-deep-clicks")
def wide_and_deep_clicks() -> Iterator[Step]:
    """Clicks: the wide part by FTRL and the deep one by Adagrad, or all by LAMB with a fed rate."""
    net = wide_and_deep()
    wide = [name for name in net.weights if name.startswith("wide")]

    def two(values: Arrays) -> Outputs:
        outputs, grads = differentiate(net, values)
        states: Arrays = {}
        for name, grad in grads.items():
            weight = values[name]
            if name in wide:
                total = values[f"{name}_n"] + grad * grad
                change = (total.sqrt() - values[f"{name}_n"].sqrt()) / 0.1
                z = values[f"{name}_z"] + grad - change * weight
                shrunk = torch.sign(z) * (z.abs() - 0.001).clamp(min=0.0)
                states |= {name: -shrunk / ((1.0 + total.sqrt()) / 0.1 + 0.002), f"{name}_n": total, f"{name}_z": z}
            else:
                total = values[f"{name}_sum"] + grad.square()
                states |= {name: torch.addcdiv(weight, grad, total.sqrt() + 1e-5, value=-0.05), f"{name}_sum": total}
        return replace(outputs, states=states | outputs.states)

    def lamb(values: Arrays) -> Outputs:
        outputs, grads = differentiate(net, values)
        norm = global_norm(grads)
        step, states = values["step"] + 1, {}
        for name, grad in grads.items():
            grad = grad / torch.maximum(torch.tensor(1.0), norm)
            m = 0.9 * values[f"{name}_m"] + 0.1 * grad
            v = 0.999 * values[f"{name}_v"] + 0.001 * grad * grad
            move = m / (1 - 0.9**step) / ((v / (1 - 0.999**step)).sqrt() + 1e-5) + 0.01 * values[name]
            size, length = values[name].norm(), move.norm()
            trust = torch.where((size > 0) & (length > 0), size / (length + 1e-9), 1.0)
            states |= {name: values[name] - values["lr"] * trust * move, f"{name}_m": m, f"{name}_v": v}
        metrics = outputs.metrics | {"grad_norm": norm}
        return replace(outputs, metrics=metrics, states=states | outputs.states | {"step": step})

    states: Arrays = {}
    for name, weight in net.weights.items():
        if name in wide:
            total = torch.full_like(weight, 0.1)
            states |= {name: weight, f"{name}_n": total}
            states[f"{name}_z"] = -weight * ((1 + total.sqrt()) / 0.1 + 0.002) - 0.001 * weight.sign()
        else:
            states |= {name: weight, f"{name}_sum": torch.full_like(weight, 0.1)}
    yield Step("ftrl-adagrad", Inputs(net.batch, states | net.states), two)
    moments = {f"{name}_{slot}": torch.zeros_like(w) for slot in "mv" for name, w in net.weights.items()}
    states = net.weights | moments | net.states | {"step": torch.tensor(0.0)}
    yield Step("lamb", Inputs(net.batch, states, {"lr": torch.tensor(0.01)}), lamb, EXPORTER)


def table() -> Problem:
    """Return a residual perceptron of numbers and categories, with the loss of further rows as a metric."""

    def error(w: Arrays, values: Arrays, prefix: str = "") -> Tensor:
        category = values[f"{prefix}category"]
        embedded = [w[f"embed{n}"][category[:, n]] for n in range(2)]
        x = torch.cat([values[f"{prefix}numeric"], *embedded], -1) @ w["stem"] + w["stem_bias"]
        for n in range(2):
            y = F.layer_norm(x, (20,), w[f"norm{n}_scale"], w[f"norm{n}_shift"])
            x = x + F.relu(y @ w[f"up{n}"] + w[f"up{n}_bias"]) @ w[f"down{n}"]
        return F.huber_loss((x @ w["out"])[:, 0] + w["out_bias"], values[f"{prefix}target"])

    weights = {"embed0": torch.randn(9, 4), "embed1": torch.randn(5, 3), "stem": matrix(13, 20)}
    weights["stem_bias"] = torch.zeros(20)
    for n in range(2):
        weights |= {f"norm{n}_scale": torch.ones(20), f"norm{n}_shift": torch.zeros(20)}
        weights |= {f"up{n}": matrix(20, 32), f"up{n}_bias": torch.zeros(32), f"down{n}": 0.3 * matrix(32, 20)}
    weights |= {"out": matrix(20, 1), "out_bias": torch.zeros(1)}
    data: Arrays = {}
    for prefix, rows in (("", 10), ("val_", 6)):
        categories = torch.stack([torch.randint(9, (rows,)), torch.randint(5, (rows,))], 1)
        data |= {f"{prefix}numeric": torch.randn(rows, 6), f"{prefix}category": categories}
        data |= {f"{prefix}target": torch.randn(rows)}

    def loss(w: Arrays, values: Arrays) -> tuple[Tensor, Outputs]:
        return error(w, values), Outputs()

    return Problem(weights, data, loss)


@kind("tabular-best-so-far")
def tabular_best_so_far() -> Iterator[Step]:
    """The weights of the best validation loss so far are carried: Adadelta; or SGD whose rate falls."""
    net = table()

    def validate(moved: Arrays, values: Arrays) -> Tensor:
        held = {name.removeprefix("val_"): value for name, value in values.items() if name.startswith("val_")}
        return net.loss(moved, held)[0]

    def adadelta(values: Arrays) -> Outputs:
        outputs, grads = differentiate(net, values)
        moved, states = {}, {}
        for name, grad in grads.items():
            square = 0.9 * values[f"{name}_square_avg"] + 0.1 * grad * grad
            delta = (values[f"{name}_acc_delta"] + 1e-5).sqrt() / (square + 1e-5).sqrt() * grad
            moved[name] = values[name] - delta
            states[f"{name}_square_avg"] = square
            states[f"{name}_acc_delta"] = 0.9 * values[f"{name}_acc_delta"] + 0.1 * delta * delta
        val_loss = validate(moved, values)
        better = val_loss < values["best_loss"]
        best = {f"best_{name}": torch.where(better, new, values[f"best_{name}"]) for name, new in moved.items()}
        best |= {"best_loss": torch.minimum(val_loss, values["best_loss"])}
        best["patience"] = torch.where(better, 0, values["patience"] + 1)
        return replace(outputs, metrics={"val_loss": val_loss}, states=moved | states | best)

    def plateau(values: Arrays) -> Outputs:
        outputs, grads = differentiate(net, values)
        moved, states = {}, {}
        for name, grad in grads.items():
            states[f"{name}_momentum"] = 0.9 * values[f"{name}_momentum"] + grad + 1e-4 * values[name]
            moved[name] = values[name] - values["lr"] * states[f"{name}_momentum"]
        val_loss = validate(moved, values)
        better = val_loss < values["best_loss"] * 0.999
        waited = torch.where(better, 0, values["bad_epochs"] + 1)
        states["lr"] = torch.where(waited > 5, (values["lr"] * 0.5).clamp(min=1e-5), values["lr"])
        states["bad_epochs"] = torch.where(waited > 5, 0, waited)
        states["best_loss"] = torch.where(better, val_loss, values["best_loss"])
        metrics = {"val_loss": val_loss, "grad_norm": global_norm(grads)}
        return replace(outputs, metrics=metrics, gradients={"stem_grad": grads["stem"]}, states=moved | states)

    slots: Arrays = {}
    for name, weight in net.weights.items():
        slots |= {f"{name}_{slot}": torch.zeros_like(weight) for slot in ("square_avg", "acc_delta")}
    carried = {"best_loss": torch.tensor(100.0), "patience": torch.tensor(0)}
    states = net.weights | slots | prefixed("best_", net.weights) | carried
    yield Step("adadelta", Inputs(net.batch, states), adadelta, EXPORTER)
    slots = {f"{name}_momentum": torch.zeros_like(weight) for name, weight in net.weights.items()}
    carried = {"lr": torch.tensor(0.02), "bad_epochs": torch.tensor(0), "best_loss": torch.tensor(100.0)}
    style = Style(order="shuffled", optimize=False)
    yield Step("plateau", Inputs(net.batch, net.weights | slots | carried), plateau, style)


def molecules() -> Problem:
    """Return a graph network with sums along edges, batch statistics of nodes, and targets with running statistics."""

    def loss(w: Arrays, values: Arrays) -> tuple[Tensor, Outputs]:
        source, target = values["edge_index"].unbind(0)
        x, states = F.relu(values["atoms"] @ w["embed"]), {}
        for n in ("conv0", "conv1"):
            sent = F.relu(x[source] + values["bonds"] @ w[f"{n}_bond"])
            heard = torch.zeros_like(x).index_add(0, target, sent)
            y = ((1 + w[f"{n}_eps"]) * x + heard) @ w[f"{n}_w1"]
            mean, variance = y.mean(0), y.var(0, correction=0)
            states[f"{n}_mean"] = torch.lerp(values[f"{n}_mean"], mean.detach(), 0.1)
            states[f"{n}_var"] = torch.lerp(values[f"{n}_var"], variance.detach(), 0.1)
            y = (y - mean) * torch.rsqrt(variance + 1e-5) * w[f"{n}_scale"] + w[f"{n}_shift"]
            x = x + F.relu(y) @ w[f"{n}_w2"]
        pooled = torch.zeros(4, x.shape[1]).index_add(0, values["graph"], x)
        guess = dense(w, pooled, F.relu, prefix="head_")[:, 0]
        energy = values["energy"]
        mean = 0.95 * values["energy_mean"] + 0.05 * energy.mean()
        spread = (0.95 * values["energy_var"] + 0.05 * (energy - mean).square().mean()).clamp(min=1e-3)
        metrics = {"mae": (guess * spread.sqrt() + mean - energy).abs().mean(), "mean_prediction": guess.mean()}
        value = F.smooth_l1_loss(guess, (energy - mean) / spread.sqrt())
        return value, Outputs(metrics=metrics, states=states | {"energy_mean": mean, "energy_var": spread})

    width, weights, states = 16, {"embed": matrix(7, 16)}, {}
    for n in ("conv0", "conv1"):
        weights |= {f"{n}_eps": torch.zeros(()), f"{n}_bond": matrix(3, width), f"{n}_w1": matrix(width, 22)}
        weights |= {f"{n}_scale": torch.ones(22), f"{n}_shift": torch.zeros(22), f"{n}_w2": 0.5 * matrix(22, width)}
        states |= {f"{n}_mean": torch.zeros(22), f"{n}_var": torch.ones(22)}
    weights |= layers(width, 12, 1, prefix="head_")
    data = {"atoms": torch.randn(15, 7), "bonds": torch.randn(26, 3), "edge_index": torch.randint(15, (2, 26))}
    data |= {"graph": torch.arange(15) // 4, "energy": 3 + torch.randn(4)}
    states |= {"energy_mean": torch.tensor(2.5), "energy_var": torch.tensor(1.0)}
    return Problem(weights, data, loss, states)


@kind("molecule-regressor")
def molecule_regressor() -> Iterator[Step]:
    """Energies of molecules: Adam with a rate that decays by a counter, or AdaMax with a fed rate and clipping."""
    net = molecules()

    def adam(values: Arrays) -> Outputs:
        outputs, grads = differentiate(net, values)
        time = values["iterations"] + 1
        rate, states = 5e-3 * 0.98 ** (time / 10), {}
        for name, grad in grads.items():
            m = values[f"exp_avg_{name}"] + 0.1 * (grad - values[f"exp_avg_{name}"])
            v = values[f"exp_avg_sq_{name}"] + 0.01 * (grad * grad - values[f"exp_avg_sq_{name}"])
            states |= {name: values[name] - rate * (m / (1 - 0.9**time)) / ((v / (1 - 0.99**time)).sqrt() + 1e-6)}
            states |= {f"exp_avg_{name}": m, f"exp_avg_sq_{name}": v}
        metrics = outputs.metrics | {"learning_rate": rate}
        return replace(outputs, metrics=metrics, states=states | outputs.states | {"iterations": time})

    def adamax(values: Arrays) -> Outputs:
        outputs, grads = differentiate(net, values)
        grads, norm = clipped(grads, 1.0)
        time, states = values["iterations"] + 1, {}
        for name, grad in grads.items():
            m = torch.lerp(values[f"m_{name}"], grad, 0.1)
            u = torch.maximum(0.99 * values[f"u_{name}"], grad.abs() + 1e-6)
            states |= {name: values[name] - values["learning_rate"] / (1 - 0.9**time) * m / u}
            states |= {f"m_{name}": m, f"u_{name}": u}
        metrics = outputs.metrics | {"grad_norm": norm}
        return replace(outputs, metrics=metrics, states=states | outputs.states | {"iterations": time})

    counter = {"iterations": torch.tensor(0.0)}
    moments = zeros("exp_avg_", net.weights) | zeros("exp_avg_sq_", net.weights)
    yield Step("adam", Inputs(net.batch, net.weights | moments | net.states | counter), adam)
    moments = zeros("m_", net.weights) | zeros("u_", net.weights)
    states = net.weights | moments | net.states | counter
    yield Step("adamax", Inputs(net.batch, states, {"learning_rate": torch.tensor(2e-3)}), adamax, EXPORTER)
