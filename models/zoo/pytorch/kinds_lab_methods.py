"""Kinds from laboratories, methods: consistency models, returns, clients, agreement of two networks."""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.zoo.steps import PLAIN, Arrays, Inputs, Outputs, Step, Style, kind


class Denoiser(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.time = nn.Linear(6, 10)
        self.enter, self.middle, self.leave = nn.Linear(8, 18), nn.Linear(18, 18), nn.Linear(18, 8)
        self.shift = nn.Linear(10, 18)
        self.norm = nn.LayerNorm(18)

    def forward(self, x: Tensor, sigma: Tensor) -> Tensor:
        """Return the sample at the smallest noise, for a sample at any: the skip is all of it there."""
        phase = 0.25 * torch.log(sigma)[:, None] * torch.tensor([1.0, 2.0, 4.0])
        time = torch.tanh(self.time(torch.cat([torch.sin(phase), torch.cos(phase)], 1)))
        scale = torch.rsqrt(sigma.square() + 0.25)[:, None]
        y = F.gelu(self.enter(x * scale) + self.shift(time))
        y = y + F.gelu(self.middle(self.norm(y)))
        apart = (sigma - 0.002)[:, None]
        return x * 0.25 / (apart.square() + 0.25) + self.leave(y) * apart * 0.5 * scale


@kind("lab-consistency-model")
def consistency_model() -> Iterator[Step]:
    """Samples in one pass: a network agrees with its average at the next smaller noise; averages by schedules."""

    def step(variant: str, style: Style, itself: bool) -> Step:
        net = Denoiser()
        weights = {name: weight.detach().clone() for name, weight in net.named_parameters()}
        target = {} if itself else {f"target.{name}": weight.clone() for name, weight in weights.items()}
        smooth = {f"ema.{name}": weight.clone() for name, weight in weights.items()}
        slots = {f"opt.{slot}.{name}": torch.zeros_like(x) for slot in ("m", "v") for name, x in weights.items()}
        batch = {"x": torch.randn(6, 8), "noise": torch.randn(6, 8), "level": torch.randint(9, (6,))}

        def objective(w: Arrays, values: Arrays) -> tuple[Tensor, Tensor]:
            ladder = (torch.linspace(0.002 ** (1 / 7), 10.0 ** (1 / 7), 10)) ** 7
            low, high = ladder[values["level"]], ladder[values["level"] + 1]
            guess = torch.func.functional_call(net, w, (values["x"] + high[:, None] * values["noise"], high))
            with torch.no_grad():
                teacher = {name: (w[name].detach() if itself else values[f"target.{name}"]) for name in w}
                wanted = torch.func.functional_call(net, teacher, (values["x"] + low[:, None] * values["noise"], low))
            distance = ((guess - wanted.detach()).square().sum(1) + 0.015**2).sqrt() - 0.015
            return (distance / (high - low)).mean(), distance.detach().mean()

        def run(values: Arrays) -> Outputs:
            present = {name: values[name] for name in weights}
            grads, (loss, distance) = torch.func.grad_and_value(objective, has_aux=True)(present, values)
            step = values["step"] + 1
            t, following = step.float(), {"step": step}
            rate = 1e-3 * torch.clamp(t / 50, max=1.0)
            mu = torch.exp(-0.05 * torch.rsqrt(t))
            for name, grad in grads.items():
                m = following[f"opt.m.{name}"] = torch.lerp(values[f"opt.m.{name}"], grad, 0.1)
                v = following[f"opt.v.{name}"] = torch.lerp(values[f"opt.v.{name}"], grad * grad, 0.005)
                move = m / (1 - 0.9**t) / ((v / (1 - 0.995**t)).sqrt() + 1e-6)
                new = following[name] = present[name] - rate * move
                following[f"ema.{name}"] = 0.9995 * values[f"ema.{name}"] + 0.0005 * new
                if not itself:
                    following[f"target.{name}"] = mu * values[f"target.{name}"] + (1 - mu) * new
            metrics = {"distance": distance, "lr": rate} | ({} if itself else {"target_decay": mu})
            return Outputs({"consistency_loss": loss}, metrics, states=following)

        states = weights | target | smooth | slots | {"step": torch.tensor(0)}
        return Step(variant, Inputs(batch, states), run, style)

    yield step("target-average", PLAIN, False)
    yield step("own-target", Style(names="exporter", order="shuffled"), True)


class Quantiles(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(7, 16), nn.ReLU(), nn.Linear(16, 12), nn.ReLU())
        self.out = nn.Linear(12, 3 * 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.body(x)).view(-1, 3, 5)


@kind("lab-quantile-returns")
def quantile_returns() -> Iterator[Step]:
    """Quantiles of returns of actions: errors as priorities, a target copied each few steps, or softly."""

    def step(variant: str, style: Style, copied: bool) -> Step:
        net = Quantiles()
        weights = {name: weight.detach().clone() for name, weight in net.named_parameters()}
        target = {f"target_net.{name}": weight + 0.01 * torch.randn_like(weight) for name, weight in weights.items()}
        labels = ("exp_avg", "exp_avg_sq") if copied else ("square_avg", "grad_avg")
        slots = {f"{name}.{slot}": torch.zeros_like(x) for name, x in weights.items() for slot in labels}
        batch = {"obs": torch.randn(8, 7), "action": torch.randint(3, (8,)), "reward": torch.randn(8)}
        batch |= {"next_obs": torch.randn(8, 7), "done": (torch.rand(8) > 0.8).float()}
        batch["importance"] = 0.5 + 0.5 * torch.rand(8)
        count = {"updates": torch.tensor(0)} if copied else {}

        def objective(w: Arrays, values: Arrays) -> tuple[Tensor, tuple[Tensor, Tensor]]:
            row = torch.arange(8)
            guess = torch.func.functional_call(net, w, (values["obs"],))[row, values["action"]]
            aim = {name: values[f"target_net.{name}"] for name in w}
            after = torch.func.functional_call(net, aim, (values["next_obs"],))
            chooser = w if copied else aim
            best = torch.func.functional_call(net, chooser, (values["next_obs"],)).mean(2).argmax(1)
            goal = values["reward"][:, None] + values["gamma"] * (1 - values["done"])[:, None] * after[row, best]
            error = goal.detach()[:, None, :] - guess[:, :, None]
            middle = (torch.arange(5) + 0.5) / 5
            huber = torch.where(error.abs() <= 1.0, 0.5 * error.square(), error.abs() - 0.5)
            each = ((middle[:, None] - (error < 0).float()).abs() * huber).mean(2).sum(1)
            return (values["importance"] * each).mean(), (error.abs().mean((1, 2)), guess.mean())

        def run(values: Arrays) -> Outputs:
            present = {name: values[name] for name in weights}
            grads, (loss, (priority, mean)) = torch.func.grad_and_value(objective, has_aux=True)(present, values)
            following = {}
            if copied:
                updates = following["updates"] = values["updates"] + 1
                t, due = updates.float(), updates % 4 == 0
            for name, grad in grads.items():
                first, second = (values[f"{name}.{slot}"] for slot in labels)
                if copied:
                    first, second = 0.9 * first + 0.1 * grad, 0.999 * second + 0.001 * grad**2
                    size = 5e-4 * (1 - 0.999**t).sqrt() / (1 - 0.9**t)
                    new = present[name] - size * first / (second.sqrt() + 1e-5)
                    old = torch.where(due, new, values[f"target_net.{name}"])
                else:
                    first, second = 0.95 * first + 0.05 * grad**2, 0.95 * second + 0.05 * grad
                    new = present[name] - values["lr"] * grad / (first - second**2 + 0.01).sqrt()
                    old = values[f"target_net.{name}"] + 0.005 * (new - values[f"target_net.{name}"])
                following |= {name: new, f"target_net.{name}": old}
                following |= {f"{name}.{labels[0]}": first, f"{name}.{labels[1]}": second}
            return Outputs({"loss": loss}, {"priority": priority, "mean_q": mean}, states=following)

        fed = {"gamma": torch.tensor(0.97)} | ({} if copied else {"lr": torch.tensor(1e-3)})
        return Step(variant, Inputs(batch, weights | target | slots | count, fed), run, style, warm=5)

    yield step("copied-target", Style(names="exporter"), True)
    yield step("soft-target", Style(names="scrambled", order="shuffled"), False)


@kind("lab-house-price-client")
def house_price_client() -> Iterator[Step]:
    """Gradients of a client for a server that has the optimizer: clipped, with their norm; or summed over batches."""
    net = nn.Sequential(nn.Linear(13, 18), nn.SiLU(), nn.Linear(18, 9), nn.Sigmoid(), nn.Linear(9, 1))
    weights = {f"net.{name}": weight.detach().clone() for name, weight in net.named_parameters()}
    batch = {"features": torch.randn(7, 13), "log_price": torch.randn(7)}
    scaling = {"feature_mean": 0.1 * torch.randn(13), "feature_std": 0.5 + torch.rand(13)}

    def forward(w: Arrays, values: Arrays) -> Tensor:
        x = (values["features"] - values["feature_mean"]) / values["feature_std"]
        x = F.linear(x, w["net.0.weight"], w["net.0.bias"])
        x = F.linear(x * torch.sigmoid(x), w["net.2.weight"], w["net.2.bias"])
        return F.linear(torch.sigmoid(x), w["net.4.weight"], w["net.4.bias"])[:, 0]

    def objective(w: Arrays, values: Arrays) -> tuple[Tensor, Tensor]:
        guess = forward(w, values)
        return F.smooth_l1_loss(guess, values["log_price"]), guess

    def clipped(values: Arrays) -> Outputs:
        w = {name: values[name] for name in weights}
        grads, (loss, guess) = torch.func.grad_and_value(objective, has_aux=True)(w, values)
        norm = torch.sqrt(sum(grad.square().sum() for grad in grads.values()))
        factor = torch.clamp(values["max_norm"] / (norm + 1e-6), max=1.0)
        shown = {f"grad/{name}": grad * factor for name, grad in grads.items()}
        return Outputs({"loss": loss}, {"prediction": guess, "grad_norm": norm}, shown)

    fed = {"max_norm": torch.tensor(0.5)}
    yield Step("clipped", Inputs(batch, {}, fed, weights | scaling), clipped, Style(embedded_constants=True))

    def summed(values: Arrays) -> Outputs:
        w = {name: values[name] for name in weights}
        grads, (loss, guess) = torch.func.grad_and_value(objective, has_aux=True)(w, values)
        following = {f"{name}.accumulated": values[f"{name}.accumulated"] + grad for name, grad in grads.items()}
        following["examples"] = values["examples"] + 7
        error = (guess - values["log_price"]).square().mean().sqrt()
        return Outputs({"loss": loss}, {"rmse": error}, states=following)

    sums = {f"{name}.accumulated": torch.zeros_like(weight) for name, weight in weights.items()}
    states = sums | {"examples": torch.tensor(0)}
    yield Step("summed", Inputs(batch, states, {}, weights | scaling), summed, Style(names="exporter"))


@kind("lab-noisy-label-pair")
def noisy_label_pair() -> Iterator[Step]:
    """Labels by a crowd: two networks that agree, both trained by one loss; or one with the confusion of each rater."""

    def make(name: str, *sizes: int) -> Arrays:
        weights = {}
        for index in range(len(sizes) - 1):
            weights[f"{name}.{index}.weight"] = torch.randn(sizes[index + 1], sizes[index]) / sizes[index] ** 0.5
            weights[f"{name}.{index}.bias"] = torch.zeros(sizes[index + 1])
        return weights

    def logits(w: Arrays, name: str, x: Tensor) -> Tensor:
        x = torch.relu(F.linear(x, w[f"{name}.0.weight"], w[f"{name}.0.bias"]))
        return F.linear(x, w[f"{name}.1.weight"], w[f"{name}.1.bias"])

    def momentum(w: Arrays, grads: Arrays, values: Arrays) -> Arrays:
        following = {}
        for name, weight in w.items():
            buf = following[f"{name}.momentum_buffer"] = values[f"{name}.momentum_buffer"] * 0.9 + grads[name]
            following[name] = weight - values["learning_rate"] * (grads[name] + 0.9 * buf)
        return following

    fed = {"learning_rate": torch.tensor(0.05)}
    both = make("first", 10, 15, 4) | make("second", 10, 11, 4)

    def agreeing(values: Arrays) -> Outputs:
        def objective(w: Arrays) -> tuple[Tensor, Arrays]:
            a, b = (F.log_softmax(logits(w, name, values["x"]), 1) for name in ("first", "second"))
            target = (values["label"][:, None] == torch.arange(4)).float()
            supervised = -(target * (a + b)).sum(1)
            apart = ((a.exp() - b.exp()) * (a - b)).sum(1)
            each = 0.4 * supervised + 0.6 * apart
            small = (each <= torch.topk(each.detach(), 6, largest=False).values[-1]).float()
            loss = (each * small).sum() / small.sum()
            return loss, {"agreement": (a.argmax(1) == b.argmax(1)).float().mean(), "loss_of_example": each.detach()}

        w = {name: values[name] for name in both}
        grads, (loss, metrics) = torch.func.grad_and_value(objective, has_aux=True)(w)
        return Outputs({"joint_loss": loss}, metrics, states=momentum(w, grads, values))

    batch = {"x": torch.randn(9, 10), "label": torch.randint(4, (9,))}
    buffers = {f"{name}.momentum_buffer": torch.zeros_like(weight) for name, weight in both.items()}
    yield Step("agreeing", Inputs(batch, both | buffers, fed), agreeing, Style(names="exporter"))

    single = make("net", 10, 15, 4) | {"confusion": 3 * torch.eye(4).repeat(3, 1, 1)}

    def raters(values: Arrays) -> Outputs:
        def objective(w: Arrays) -> tuple[Tensor, Arrays]:
            p = torch.softmax(logits(w, "net", values["x"]), 1)
            mixing = torch.softmax(w["confusion"], 2)
            seen = torch.einsum("bi,rij->brj", p, mixing)
            target = (values["labels"][..., None] == torch.arange(4)).float()
            likelihood = -((seen + 1e-5).log() * target).sum(2)
            fit = (likelihood * values["rated"]).sum() / values["rated"].sum()
            trace = (mixing * torch.eye(4)).sum((1, 2)).mean()
            return fit + 0.01 * trace, {"nll": fit, "trace": trace}

        w = {name: values[name] for name in single}
        grads, (loss, metrics) = torch.func.grad_and_value(objective, has_aux=True)(w)
        return Outputs({"loss": loss}, metrics, states=momentum(w, grads, values))

    batch = {"x": torch.randn(9, 10), "labels": torch.randint(4, (9, 3)), "rated": (torch.rand(9, 3) > 0.3).float()}
    buffers = {f"{name}.momentum_buffer": torch.zeros_like(weight) for name, weight in single.items()}
    yield Step("raters", Inputs(batch, single | buffers, fed), raters, Style(states="overridable"))
