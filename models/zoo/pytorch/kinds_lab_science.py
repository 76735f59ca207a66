"""Kinds from laboratories: atoms, patients, proteins, roads, rain."""

import math
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.zoo.pytorch.kinds_torch_optim import tensors
from models.zoo.steps import PLAIN, Arrays, Inputs, Outputs, Step, Style, kind

Make = Callable[[Arrays, Arrays, Tensor | None], torch.optim.Optimizer]


def by_torch_optim(
    variant: str,
    net: nn.Module,
    batch: Arrays,
    objective: Callable[[Callable, Arrays], tuple[Tensor, Arrays]],
    make: Make,
    style: Style = PLAIN,
    *,
    fed: Arrays | None = None,
    constants: Arrays | None = None,
    clip: float = 0.0,
    ema: float = 0.0,
    counter: str = "",
) -> Step:
    """Return a step whose optimizer is one of torch.optim; `make` builds it for parameters, inputs and a step."""
    weights = {name: weight.detach().clone() for name, weight in net.named_parameters()}
    fed = fed or {}

    def moved(present: Arrays, grads: Arrays, values: Arrays, t: Tensor | None, slots: dict) -> tuple[Arrays, dict]:
        params = {name: weight.detach().clone() for name, weight in present.items()}
        optimizer = make(params, values, t)
        for name, param in params.items():
            param.grad = grads[name].detach().clone()
            if slots:
                optimizer.state[param] = {key: value.clone() for key, value in slots[name].items()}
        optimizer.step()
        return params, {name: tensors(optimizer.state[param]) for name, param in params.items()}

    tiny = {name: torch.full_like(weight, 1e-3) for name, weight in weights.items()}
    one = torch.ones(()) if counter else None
    _, initial = moved(weights, tiny, fed, one, {})
    flat = {f"{name}.{key}": value.clone() for name, own in initial.items() for key, value in own.items()}
    averages = {f"ema_model.{name}": weight.clone() for name, weight in weights.items()} if ema else {}
    number = {counter: torch.tensor(3)} if counter else {}

    def run(values: Arrays) -> Outputs:
        leaves = {name: values[name].detach().clone().requires_grad_() for name in weights}
        loss, metrics = objective(lambda *x: torch.func.functional_call(net, leaves, x), values)
        grads = dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))
        metrics = {name: value.detach() for name, value in metrics.items()}
        if clip:
            norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(g) for g in grads.values()]))
            factor = (clip / (norm + 1e-6)).clamp(max=1.0)
            grads = {name: grad * factor for name, grad in grads.items()}
            metrics["grad_norm"] = norm
        following = {counter: values[counter] + 1} if counter else {}
        t = following[counter].float() if counter else None
        slots = {name: {key: values[f"{name}.{key}"] for key in own} for name, own in initial.items()}
        params, after = moved({name: values[name] for name in weights}, grads, values, t, slots)
        following |= params
        following |= {f"{name}.{key}": value for name, own in after.items() for key, value in own.items()}
        for name in averages:
            following[name] = values[name] * ema + params[name.removeprefix("ema_model.")] * (1 - ema)
        return Outputs({"loss": loss.detach()}, metrics, states=following)

    return Step(variant, Inputs(batch, weights | flat | averages | number, fed, constants or {}), run, style)


class Potential(nn.Module):
    """The energy of atoms by their species and radial functions of their distances."""

    def __init__(self) -> None:
        super().__init__()
        self.species = nn.Embedding(3, 4)
        self.hidden = nn.Linear(4 * 7, 15)
        self.hidden2 = nn.Linear(15, 10)
        self.energy = nn.Linear(10, 1)

    def forward(self, positions: Tensor, species: Tensor) -> Tensor:
        kinds = self.species(species)
        count = positions.shape[1]
        apart = positions[:, :, None] - positions[:, None]
        distance = (apart.square().sum(-1) + torch.eye(count)).sqrt()
        centres = torch.linspace(0.5, 3.5, 7)
        radial = torch.exp(-2.0 * (distance[..., None] - centres).square())
        cutoff = torch.exp(-0.3 * distance) * (1 - torch.eye(count))
        density = torch.einsum("bijr,bij,bjk->birk", radial, cutoff, kinds).flatten(2)
        x = self.hidden(density)
        return self.energy(torch.tanh(self.hidden2(x * torch.sigmoid(x)))).sum((1, 2))


@kind("lab-force-matching")
def force_matching() -> Iterator[Step]:
    """A potential of atoms fitted to energies and forces, which are its own derivative: AMSGrad, averaged weights."""

    def objective(net: Callable, values: Arrays) -> tuple[Tensor, Arrays]:
        positions = values["positions"].detach().clone().requires_grad_()
        energy = net(positions, values["species"])
        forces = -torch.autograd.grad(energy.sum(), positions, create_graph=True)[0]
        of_energy = ((energy - values["energies"]) / positions.shape[1]).square().mean()
        of_forces = (forces - values["forces"]).square().mean()
        loss = values["energy_weight"] * of_energy + values["force_weight"] * of_forces
        return loss, {
            "energy_mae": (energy - values["energies"]).abs().mean(),
            "force_mae": (forces - values["forces"]).abs().mean(),
            "force_rmse": of_forces.sqrt(),
        }

    batch = {"positions": 1.5 * torch.randn(4, 5, 3), "species": torch.randint(3, (4, 5))}
    batch |= {"energies": torch.randn(4), "forces": 0.3 * torch.randn(4, 5, 3)}
    fed = {"energy_weight": torch.tensor(1.0), "force_weight": torch.tensor(20.0)}

    def amsgrad(params: Arrays, values: Arrays, t: Tensor | None) -> torch.optim.Optimizer:
        return torch.optim.Adam(list(params.values()), 2e-3, amsgrad=True, eps=1e-6, capturable=True, foreach=False)

    yield by_torch_optim("amsgrad", Potential(), batch, objective, amsgrad, fed=fed, ema=0.99, clip=10.0)

    def decaying(params: Arrays, values: Arrays, t: Tensor) -> torch.optim.Optimizer:
        rate = 5e-3 * torch.pow(0.999, t)
        every = [{"params": list(params.values()), "lr": rate}]
        return torch.optim.AdamW(every, eps=1e-6, capturable=True, foreach=False)

    style = Style(names="scrambled", order="shuffled")
    yield by_torch_optim("decaying", Potential(), batch, objective, decaying, style, fed=fed, counter="epoch")


class Risk(nn.Module):
    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(9, 16), nn.LayerNorm(16), nn.SELU(), nn.Linear(16, outputs))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


@kind("lab-survival-analysis")
def survival_analysis() -> Iterator[Step]:
    """Survival of patients: Cox's partial likelihood with the concordance, and hazards of discrete times."""
    batch = {"covariates": torch.randn(11, 9), "duration": torch.rand(11) * 10, "event": (torch.rand(11) > 0.4).float()}
    batch["event"][:3] = 1.0

    def cox(net: Callable, values: Arrays) -> tuple[Tensor, Arrays]:
        risk = net(values["covariates"])[:, 0]
        time, event = values["duration"], values["event"]
        later = time[None, :] >= time[:, None]
        among = torch.logsumexp(risk[None, :].masked_fill(~later, -1e4), 1)
        loss = ((among - risk) * event).sum() / event.sum().clamp(min=1.0)
        comparable = (time[None, :] > time[:, None]).float() * event[:, None]
        right = (risk[:, None] > risk[None, :]).float() * comparable
        return loss, {"concordance": right.sum() / comparable.sum().clamp(min=1.0), "log_risk": risk}

    def nadam(params: Arrays, values: Arrays, t: Tensor | None) -> torch.optim.Optimizer:
        return torch.optim.NAdam(
            list(params.values()),
            3e-3,
            weight_decay=1e-3,
            decoupled_weight_decay=True,
            eps=1e-6,
            capturable=True,
            foreach=False,
        )

    yield by_torch_optim("cox", Risk(1), batch, cox, nadam, Style(names="exporter"), clip=1.0)

    def hazards(net: Callable, values: Arrays) -> tuple[Tensor, Arrays]:
        logits = net(values["covariates"])
        edges = torch.arange(6) * 2.0
        alive = (values["duration"][:, None] > edges + 2.0).float()
        within = ((values["duration"][:, None] > edges) & (values["duration"][:, None] <= edges + 2.0)).float()
        died = within * values["event"][:, None]
        each = F.binary_cross_entropy_with_logits(logits, died, reduction="none") * (alive + died)
        survival = torch.exp(F.logsigmoid(-logits).sum(1))
        return each.sum(1).mean(), {"mean_survival": survival.mean()}

    def sgd(params: Arrays, values: Arrays, t: Tensor | None) -> torch.optim.Optimizer:
        return torch.optim.SGD(list(params.values()), 0.02, 0.9, weight_decay=1e-3, nesterov=True, foreach=False)

    style = Style(states="initializers", shapes="interface")
    yield by_torch_optim("hazards", Risk(6), batch, hazards, sgd, style)


class Affinity(nn.Module):
    """A protein by convolutions over its residues, a ligand by messages along its bonds."""

    def __init__(self) -> None:
        super().__init__()
        self.residue_emb = nn.Embedding(22, 8)
        self.conv1, self.conv2 = nn.Conv1d(8, 12, 5, padding=2), nn.Conv1d(12, 10, 3, padding=1)
        self.atom_in = nn.Linear(6, 13)
        self.message = nn.ModuleList([nn.Linear(13, 13), nn.Linear(13, 13)])
        self.self_weight = nn.Parameter(torch.tensor(0.5))
        self.head = nn.Sequential(nn.Linear(23, 17), nn.GELU(), nn.Linear(17, 1))

    def forward(self, residues: Tensor, atoms: Tensor, bonds: Tensor, present: Tensor) -> Tensor:
        protein = F.relu(self.conv2(F.relu(self.conv1(self.residue_emb(residues).transpose(1, 2))))).mean(2)
        x = F.relu(self.atom_in(atoms))
        for layer in self.message:
            x = self.self_weight * x + F.relu(layer(bonds @ x))
        ligand = (x * present[..., None]).sum(1) / present.sum(1, keepdim=True)
        return self.head(torch.cat([protein, ligand], 1))[:, 0]


@kind("lab-drug-affinity")
def drug_affinity() -> Iterator[Step]:
    """The affinity of drugs for proteins: groups of encoders, head and norms with rates of their own; RAdam."""
    atoms = torch.randn(5, 7, 6)
    bonds = (torch.rand(5, 7, 7) > 0.7).float()
    present = (torch.arange(7) < torch.tensor([[7], [5], [6], [4], [7]])).float()
    batch = {"residues": torch.randint(22, (5, 19)), "atoms": atoms, "bonds": bonds, "atom_mask": present}
    batch["affinity"] = torch.randn(5) + 6

    def objective(net: Callable, values: Arrays) -> tuple[Tensor, Arrays]:
        guess = net(values["residues"], values["atoms"], values["bonds"], values["atom_mask"])
        error = guess - (values["affinity"] - 6.0)
        a, b = guess - guess.mean(), values["affinity"] - values["affinity"].mean()
        pearson = (a * b).sum() / (a.square().sum() * b.square().sum() + 1e-5).sqrt()
        return error.square().mean(), {"pearson": pearson, "mae": error.abs().mean()}

    def groups(params: Arrays, values: Arrays, t: Tensor | None) -> torch.optim.Optimizer:
        head = [weight for name, weight in params.items() if name.startswith("head")]
        rest = [weight for name, weight in params.items() if not name.startswith("head")]
        both = [{"params": head, "lr": values["head_lr"], "weight_decay": 0.0}]
        both += [{"params": rest, "lr": values["encoder_lr"], "weight_decay": 0.05}]
        return torch.optim.AdamW(both, eps=1e-6, capturable=True, foreach=False)

    fed = {"encoder_lr": torch.tensor(5e-4), "head_lr": torch.tensor(2e-3)}
    yield by_torch_optim("groups", Affinity(), batch, objective, groups, fed=fed)

    def radam(params: Arrays, values: Arrays, t: Tensor | None) -> torch.optim.Optimizer:
        return torch.optim.RAdam(list(params.values()), 2e-3, eps=1e-6, capturable=True, foreach=False)

    style = Style(names="exporter", optimize=False)
    yield by_torch_optim("radam", Affinity(), batch, objective, radam, style, clip=2.0)


class Roads(nn.Module):
    """Sensors on roads, joined by the given graph and by one that is learnt."""

    def __init__(self, ahead: int) -> None:
        super().__init__()
        self.sender, self.receiver = nn.Parameter(torch.randn(8, 4)), nn.Parameter(torch.randn(4, 8))
        self.start = nn.Linear(12, 14)
        self.near, self.far, self.learnt = (nn.Linear(14, 14, bias=False) for _ in range(3))
        self.skip = nn.Linear(14, 14)
        self.end = nn.Linear(14, ahead)

    def forward(self, past: Tensor, graph: Tensor) -> Tensor:
        adaptive = torch.softmax(F.relu(self.sender @ self.receiver), 1)
        x = F.leaky_relu(self.start(past))
        mixed = self.near(graph @ x) + self.far(graph @ (graph @ x)) + self.learnt(adaptive @ x)
        return self.end(F.leaky_relu(mixed + self.skip(x)))


@kind("lab-road-traffic")
def road_traffic() -> Iterator[Step]:
    """Speeds on a graph of roads: missing readings masked, a horizon that grows with the steps, rates by milestones."""

    def step(variant: str, style: Style, growing: bool) -> Step:
        net = Roads(3)
        weights = {name: weight.detach().clone() for name, weight in net.named_parameters()}
        graph = torch.softmax(torch.randn(8, 8), 1)
        batch = {"past_speed": torch.randn(5, 8, 12), "future_speed": torch.randn(5, 8, 3)}
        batch["observed"] = (torch.rand(5, 8, 3) > 0.15).float()
        slots = {f"{slot}/{name}": torch.zeros_like(weight) for slot in "mv" for name, weight in weights.items()}

        def objective(weights: Arrays, values: Arrays) -> tuple[Tensor, Arrays]:
            guess = torch.func.functional_call(net, weights, (values["past_speed"], values["graph"]))
            mask = values["observed"]
            if growing:
                mask = mask * (torch.arange(3) <= values["global_step"] // 2).float()
            mask = mask / mask.mean().clamp(min=1e-3)
            error = (guess - values["future_speed"]).abs() * mask
            later = {f"mae_{minutes}min": error[..., i].mean() for i, minutes in enumerate((5, 10, 15))}
            squared = ((guess - values["future_speed"]).square() * mask).mean()
            return error.mean(), later | {"rmse": squared.sqrt()}

        def run(values: Arrays) -> Outputs:
            present = {name: values[name] for name in weights}
            grads, (loss, metrics) = torch.func.grad_and_value(objective, has_aux=True)(present, values)
            step = values["global_step"] + 1
            rate = 1e-2 * 0.3 ** ((step > 100).float() + (step > 200).float() + (step > 400).float())
            total = torch.sqrt(sum((grad**2).sum() for grad in grads.values()))
            following, t = {"global_step": step}, step.float()
            for name, grad in grads.items():
                grad = grad * torch.clamp(5.0 / total, max=1.0) + 1e-4 * present[name]
                m = following[f"m/{name}"] = 0.9 * values[f"m/{name}"] + 0.1 * grad
                v = following[f"v/{name}"] = 0.99 * values[f"v/{name}"] + 0.01 * grad * grad
                unbiased = m / (1 - 0.9**t), v / (1 - 0.99**t)
                following[name] = present[name] - rate * unbiased[0] / (unbiased[1].sqrt() + 1e-5)
            return Outputs({"masked_mae": loss}, metrics | {"lr": rate}, states=following)

        states = weights | slots | {"global_step": torch.tensor(0)}
        return Step(variant, Inputs(batch, states, constants={"graph": graph}), run, style)

    yield step("milestones", PLAIN, False)
    yield step("growing-horizon", Style(names="exporter", embedded_constants=True), True)


class Nowcaster(nn.Module):
    """Radar frames of the past as channels; frames ahead as channels."""

    def __init__(self) -> None:
        super().__init__()
        self.down1, self.down2 = nn.Conv2d(4, 8, 3, padding=1), nn.Conv2d(8, 12, 3, stride=2, padding=1)
        self.middle = nn.Conv2d(12, 12, 3, padding=1)
        self.norm = nn.GroupNorm(3, 12)
        self.up = nn.Conv2d(12, 4 * 6, 1)
        self.out = nn.Conv2d(14, 2, 3, padding=1)

    def forward(self, frames: Tensor) -> Tensor:
        first = F.leaky_relu(self.down1(frames), 0.2)
        x = F.leaky_relu(self.down2(first), 0.2)
        x = x + F.leaky_relu(self.norm(self.middle(x)), 0.2)
        b, _, h, w = x.shape
        x = self.up(x).view(b, 6, 2, 2, h, w).permute(0, 1, 4, 2, 5, 3).reshape(b, 6, 2 * h, 2 * w)
        return self.out(torch.cat([first, x], 1))


@kind("lab-rain-nowcast")
def rain_nowcast() -> Iterator[Step]:
    """Rain of the next frames: errors weighted by intensity, skill scores; one cycle of rates, Adan."""

    def step(variant: str, style: Style, adan: bool) -> Step:
        net = Nowcaster()
        weights = {name: weight.detach().clone() for name, weight in net.named_parameters()}
        batch = {"radar": torch.rand(2, 4, 8, 10), "target": torch.rand(2, 2, 8, 10)}
        labels = ("exp_avg", "exp_avg_diff", "exp_avg_sq", "previous_grad") if adan else ("velocity",)
        slots = {f"{name}.{slot}": torch.zeros_like(weight) for slot in labels for name, weight in weights.items()}

        def run(values: Arrays) -> Outputs:
            leaves = {name: values[name].detach().clone().requires_grad_() for name in weights}
            guess = torch.func.functional_call(net, leaves, (values["radar"],))
            error, rain = guess - values["target"], values["target"]
            weight = torch.where(rain > 0.8, 5.0, torch.where(rain > 0.5, 2.0, 1.0))
            mse, mae = (weight * error.square()).mean(), (weight * error.abs()).mean()
            loss = mse + mae
            grads = torch.autograd.grad(loss, list(leaves.values()))
            hit = ((guess > 0.5) & (rain > 0.5)).sum()
            either = ((guess > 0.5) | (rain > 0.5)).sum()
            metrics = {"balanced_mse": mse.detach(), "balanced_mae": mae.detach()}
            metrics["critical_success_index"] = hit.float() / either.float().clamp(min=1.0)
            following = {}
            for (name, old), grad in zip(leaves.items(), grads, strict=True):
                old = old.detach()
                if adan:
                    m, n, v, before = (values[f"{name}.{slot}"] for slot in labels)
                    change = grad - before
                    m = torch.lerp(m, grad, 0.02)
                    n = torch.lerp(n, change, 0.08)
                    v = torch.lerp(v, (grad + 0.92 * change).square(), 0.01)
                    move = (m + 0.92 * n) / (v.sqrt() + 1e-5)
                    following[name] = (old - values["lr"] * move) / (1 + values["lr"] * 0.02)
                    following |= {f"{name}.{slot}": x for slot, x in zip(labels, (m, n, v, grad), strict=True)}
                else:
                    part = (values["iteration"].float() + 1) / 500
                    rate = torch.where(part < 0.3, part / 0.3, 0.5 + 0.5 * torch.cos(math.pi * (part - 0.3) / 0.7))
                    beta = 0.95 - 0.1 * rate
                    velocity = following[f"{name}.velocity"] = beta * values[f"{name}.velocity"] + grad
                    following[name] = old - 0.05 * rate * velocity
            if not adan:
                following["iteration"] = values["iteration"] + 1
            return Outputs({"loss": loss.detach()}, metrics, states=following)

        states = weights | slots | ({} if adan else {"iteration": torch.tensor(0, dtype=torch.int32)})
        return Step(variant, Inputs(batch, states, {"lr": torch.tensor(2e-3)} if adan else {}), run, style)

    yield step("one-cycle", Style(names="exporter"), False)
    yield step("adan", Style(order="shuffled"), True)
