"""Kinds from laboratories, images and boards: land, leaves, chess, masked patches, two views."""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.zoo.steps import PLAIN, Arrays, Inputs, Outputs, Step, Style, kind


def norm2d(values: Arrays, weights: Arrays, name: str, x: Tensor, following: Arrays, rate: float = 0.1) -> Tensor:
    """Normalize a batch of images; put the next running statistics, unbiased as nn.BatchNorm2d's, into `following`."""
    var, mean = torch.var_mean(x, (0, 2, 3), correction=0)
    count = x.numel() // x.shape[1]
    following[f"{name}.running_mean"] = (1 - rate) * values[f"{name}.running_mean"] + rate * mean.detach()
    unbiased = var.detach() * (count / (count - 1))
    following[f"{name}.running_var"] = (1 - rate) * values[f"{name}.running_var"] + rate * unbiased
    following[f"{name}.num_batches_tracked"] = values[f"{name}.num_batches_tracked"] + 1
    y = (x - mean[:, None, None]) * torch.rsqrt(var[:, None, None] + 1e-5)
    return y * weights[f"{name}.weight"][:, None, None] + weights[f"{name}.bias"][:, None, None]


def norm2d_states(name: str, channels: int) -> Arrays:
    states = {f"{name}.running_mean": torch.zeros(channels), f"{name}.running_var": torch.ones(channels)}
    return states | {f"{name}.num_batches_tracked": torch.tensor(0)}


def kernel(out: int, into: int, size: int) -> Tensor:
    return torch.randn(out, into, size, size) * (2 / (into * size * size)) ** 0.5


def norms(names: dict[str, int]) -> tuple[Arrays, Arrays]:
    """Return weights and running statistics of normalizations."""
    weights, states = {}, {}
    for name, channels in names.items():
        weights |= {f"{name}.weight": torch.ones(channels), f"{name}.bias": torch.zeros(channels)}
        states |= norm2d_states(name, channels)
    return weights, states


@kind("lab-land-cover")
def land_cover() -> Iterator[Step]:
    """Classes of land from satellite bands: cross-entropy with pixels ignored and Dice, a confusion matrix carried."""

    def step(variant: str, style: Style, adam: bool) -> Step:
        scales, running = norms({"bn1": 9, "bn2": 11})
        weights = {"conv1.weight": kernel(9, 6, 3), "conv2.weight": kernel(11, 9, 3), "conv3.weight": kernel(11, 11, 3)}
        weights |= scales | {"classifier.weight": kernel(5, 11, 1), "classifier.bias": torch.zeros(5)}
        batch = {"bands": torch.randn(3, 6, 7, 8), "label": torch.randint(5, (3, 7, 8))}
        batch["label"][:, 0, :3] = -1
        labels = ("exp_avg", "exp_avg_sq") if adam else ("momentum",)
        slots = {f"optimizer.{name}.{slot}": torch.zeros_like(x) for name, x in weights.items() for slot in labels}
        carried = running | {"confusion": torch.zeros(5, 5), "iteration": torch.tensor(0)}

        def objective(weights: Arrays, values: Arrays) -> tuple[Tensor, tuple]:
            following = {}
            x = F.conv2d(values["bands"], weights["conv1.weight"], padding=1)
            x = F.relu(norm2d(values, weights, "bn1", x, following))
            y = F.conv2d(x, weights["conv2.weight"], padding=2, dilation=2)
            y = F.relu(norm2d(values, weights, "bn2", y, following))
            y = y + F.conv2d(y, weights["conv3.weight"], padding=1)
            logits = F.conv2d(y, weights["classifier.weight"], weights["classifier.bias"])
            valid = (values["label"] >= 0).float()
            target = (values["label"][:, None] == torch.arange(5)[:, None, None]).float()
            log_p = F.log_softmax(logits, 1)
            entropy = -((log_p * target).sum(1) * valid).sum() / valid.sum()
            p = log_p.exp() * valid[:, None]
            overlap = 2 * (p * target).sum((0, 2, 3)) + 1
            dice = 1 - (overlap / (p.sum((0, 2, 3)) + target.sum((0, 2, 3)) + 1)).mean()
            best = (logits.argmax(1)[:, None] == torch.arange(5)[:, None, None]).float() * valid[:, None]
            counts = torch.einsum("bihw,bjhw->ij", target, best)
            following["confusion"] = values["confusion"] + counts.detach()
            return entropy + 0.5 * dice, ({"ce_loss": entropy, "dice_loss": dice}, following)

        def run(values: Arrays) -> Outputs:
            present = {name: values[name] for name in weights}
            grads, (loss, (metrics, following)) = torch.func.grad_and_value(objective, has_aux=True)(present, values)
            matrix = following["confusion"]
            union = matrix.sum(0) + matrix.sum(1) - matrix.diagonal()
            metrics["mean_iou"] = (matrix.diagonal() / union.clamp(min=1.0)).mean()
            step = following["iteration"] = values["iteration"] + 1
            rate = (1 - step.float() / 2000).clamp(min=0.0) ** 0.9
            for name, grad in grads.items():
                decay = 1e-2 if present[name].dim() > 1 else 0.0
                slot = f"optimizer.{name}"
                if adam:
                    m = following[f"{slot}.exp_avg"] = torch.lerp(values[f"{slot}.exp_avg"], grad, 0.1)
                    v = 0.999 * values[f"{slot}.exp_avg_sq"] + 0.001 * grad.square()
                    following[f"{slot}.exp_avg_sq"] = v
                    move = m / (v.sqrt() / (1 - 0.999 ** step.float()).sqrt() + 1e-6) / (1 - 0.9 ** step.float())
                    following[name] = present[name] * (1 - 1e-3 * rate * decay) - 1e-3 * rate * move
                else:
                    m = 0.9 * values[f"{slot}.momentum"] + (grad + 0.01 * decay * present[name])
                    following[f"{slot}.momentum"] = m
                    following[name] = present[name] - 0.05 * rate * m
            return Outputs({"loss": loss}, metrics, states=following)

        return Step(variant, Inputs(batch, weights | slots | carried), run, style)

    yield step("poly-sgd", PLAIN, False)
    yield step("poly-adamw", Style(states="initializers"), True)


@kind("lab-chess-policy-value")
def chess_policy_value() -> Iterator[Step]:
    """Moves and outcome of board positions from search counts: a residual tower, three terms; SGD, averages."""

    def step(variant: str, style: Style, averaged: bool) -> Step:
        names = {"stem.bn": 10, "block.bn1": 10, "block.bn2": 10}
        scales, running = norms(names)
        weights = {"stem.conv": kernel(10, 7, 3), "block.conv1": kernel(10, 10, 3), "block.conv2": kernel(10, 10, 3)}
        weights |= scales
        weights |= {"policy.conv": kernel(2, 10, 1), "policy.fc.weight": torch.randn(21, 2 * 25) / 7}
        weights |= {"policy.fc.bias": torch.zeros(21), "value.conv": kernel(1, 10, 1)}
        weights |= {"value.fc1.weight": torch.randn(12, 25) / 5, "value.fc1.bias": torch.zeros(12)}
        weights |= {"value.fc2.weight": torch.randn(1, 12) / 4, "value.fc2.bias": torch.zeros(1)}
        batch = {"planes": (torch.rand(6, 7, 5, 5) > 0.7).float()}
        batch |= {"visits": torch.softmax(2 * torch.randn(6, 21), 1), "outcome": torch.randint(-1, 2, (6,)).float()}
        slots = {f"{name}.buf": torch.zeros_like(weight) for name, weight in weights.items()}
        mean = {f"swa.{name}": weight.clone() for name, weight in weights.items()} if averaged else {}
        counters = {"steps": torch.tensor(0)} | ({"n_averaged": torch.tensor(0)} if averaged else {})

        def run(values: Arrays) -> Outputs:
            w = {name: values[name].detach().clone().requires_grad_() for name in weights}
            following: Arrays = {}
            x = F.relu(norm2d(values, w, "stem.bn", F.conv2d(values["planes"], w["stem.conv"], padding=1), following))
            y = F.relu(norm2d(values, w, "block.bn1", F.conv2d(x, w["block.conv1"], padding=1), following))
            y = norm2d(values, w, "block.bn2", F.conv2d(y, w["block.conv2"], padding=1), following)
            x = F.relu(x + y)
            policy = F.relu(F.conv2d(x, w["policy.conv"])).flatten(1)
            log_p = F.log_softmax(F.linear(policy, w["policy.fc.weight"], w["policy.fc.bias"]), 1)
            value = F.relu(F.conv2d(x, w["value.conv"])).flatten(1)
            value = F.relu(F.linear(value, w["value.fc1.weight"], w["value.fc1.bias"]))
            value = torch.tanh(F.linear(value, w["value.fc2.weight"], w["value.fc2.bias"]))[:, 0]
            policy_loss = -(values["visits"] * log_p).sum(1).mean()
            value_loss = F.mse_loss(value, values["outcome"])
            l2 = 1e-4 * sum(x.square().sum() for x in w.values())
            loss = policy_loss + value_loss + l2
            grads = torch.autograd.grad(loss, list(w.values()))
            step = following["steps"] = values["steps"] + 1
            rate = torch.where(step < 100, 0.05, torch.where(step < 300, 0.005, 0.0005))
            if averaged:
                count = following["n_averaged"] = values["n_averaged"] + 1
            for (name, weight), grad in zip(w.items(), grads, strict=True):
                buf = following[f"{name}.buf"] = 0.9 * values[f"{name}.buf"] + grad
                new = following[name] = weight.detach() - rate * (grad + 0.9 * buf)
                if averaged:
                    old = values[f"swa.{name}"]
                    following[f"swa.{name}"] = old + (new - old) / (count + 1)
            metrics = {"policy_loss": policy_loss.detach(), "value_loss": value_loss.detach(), "l2_term": l2.detach()}
            entropy = -(log_p.exp() * log_p).sum(1).mean()
            metrics |= {"policy_entropy": entropy.detach()}
            return Outputs({"total_loss": loss.detach()}, metrics, states=following)

        return Step(variant, Inputs(batch, weights | running | slots | mean | counters), run, style)

    yield step("nesterov", Style(names="exporter"), False)
    yield step("averaged", Style(names="scrambled", order="shuffled", shapes="interface"), True)


class Leaves(nn.Module):
    """A small mobile network: depthwise and pointwise convolutions, with group normalization."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, stride=2, padding=1)
        self.depth = nn.Conv2d(8, 8, 3, padding=1, groups=8)
        self.norm = nn.GroupNorm(2, 8)
        self.point = nn.Conv2d(8, 14, 1)
        self.classify = nn.Linear(14, 6)

    def forward(self, x: Tensor) -> Tensor:
        x = F.hardswish(self.stem(x))
        x = F.relu6(self.point(F.hardswish(self.norm(self.depth(x)))))
        return self.classify(x.mean((2, 3)))


@kind("lab-leaf-disease")
def leaf_disease() -> Iterator[Step]:
    """Diseases of leaves with mixed images and smoothed labels: Lookahead around RAdam, sharpness-aware SGD."""
    batch = {"image": torch.rand(4, 3, 10, 10), "label": torch.randint(6, (4,)), "partner": torch.randperm(4)}
    fed = {"mix": torch.tensor(0.7)}

    def objective(net: nn.Module, weights: Arrays, values: Arrays) -> tuple[Tensor, Tensor]:
        x, mix = values["image"], values["mix"]
        mixed = mix * x + (1 - mix) * x[values["partner"]]
        logits = torch.func.functional_call(net, weights, (mixed,))
        log_p = F.log_softmax(logits, 1)

        def smooth(label: Tensor) -> Tensor:
            target = (label[:, None] == torch.arange(6)).float() * 0.9 + 0.1 / 6
            return -(target * log_p).sum(1).mean()

        loss = mix * smooth(values["label"]) + (1 - mix) * smooth(values["label"][values["partner"]])
        return loss, (logits.argmax(1) == values["label"]).float().mean()

    net = Leaves()
    weights = {name: weight.detach().clone() for name, weight in net.named_parameters()}

    def ranger(values: Arrays) -> Outputs:
        present = {name: values[name] for name in weights}
        found = torch.func.grad_and_value(lambda w: objective(net, w, values), has_aux=True)(present)
        grads, (loss, accuracy) = found
        step = values["step"] + 1
        t, following = step.float(), {"step": step}
        limit = 2 / (1 - 0.95) - 1
        length = limit - 2 * t * 0.95**t / (1 - 0.95**t)
        inner = ((length - 4) * (length - 2) * limit / ((limit - 4) * (limit - 2) * length)).clamp(min=1e-4)
        sync = step % 5 == 0
        for name, grad in grads.items():
            grad = grad - grad.mean(list(range(1, grad.dim())), keepdim=True) if grad.dim() > 1 else grad
            m = following[f"exp_avg.{name}"] = 0.95 * values[f"exp_avg.{name}"] + 0.05 * grad
            v = following[f"exp_avg_sq.{name}"] = 0.95 * values[f"exp_avg_sq.{name}"] + 0.05 * grad * grad
            m = m / (1 - 0.95**t)
            adaptive = inner.sqrt() * m * (1 - 0.95**t).sqrt() / (v.sqrt() + 1e-5)
            fast = present[name] - 3e-3 * torch.where(length > 4.0, adaptive, m)
            slow = values[f"slow.{name}"]
            slow = torch.where(sync, slow + 0.5 * (fast - slow), slow)
            following[f"slow.{name}"], following[name] = slow, torch.where(sync, slow, fast)
        return Outputs({"loss": loss}, {"accuracy": accuracy}, states=following)

    slots = {f"{slot}.{name}": torch.zeros_like(x) for slot in ("exp_avg", "exp_avg_sq") for name, x in weights.items()}
    slow = {f"slow.{name}": weight.clone() for name, weight in weights.items()}
    states = weights | slots | slow | {"step": torch.tensor(0)}
    yield Step("ranger", Inputs(batch, states, fed), ranger, Style(optimize=False), warm=6)

    def sharp(values: Arrays) -> Outputs:
        present = {name: values[name] for name in weights}
        first = torch.func.grad_and_value(lambda w: objective(net, w, values), has_aux=True)
        grads, (loss, accuracy) = first(present)
        norm = torch.sqrt(sum(grad.square().sum() for grad in grads.values()) + 1e-6)
        moved = {name: weight + values["rho"] * grads[name] / norm for name, weight in present.items()}
        grads = torch.func.grad(lambda w: objective(net, w, values)[0])(moved)
        following = {}
        for name, weight in present.items():
            buf = following[f"velocity.{name}"] = 0.9 * values[f"velocity.{name}"] + grads[name] + 5e-4 * weight
            following[name] = weight - values["lr"] * buf
        return Outputs({"loss": loss}, {"accuracy": accuracy, "grad_norm": norm}, states=following)

    velocity = {f"velocity.{name}": torch.zeros_like(weight) for name, weight in weights.items()}
    rates = fed | {"rho": torch.tensor(0.05), "lr": torch.tensor(0.02)}
    yield Step("sharpness-aware", Inputs(batch, weights | velocity, rates), sharp, Style(names="exporter"))


class MaskedPatches(nn.Module):
    """An encoder of the visible patches, and a small decoder with a learnt token for the others."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.position = nn.Linear(18, 12), nn.Parameter(0.1 * torch.randn(9, 12))
        self.norm1, self.qkv, self.proj = nn.LayerNorm(12), nn.Linear(12, 36), nn.Linear(12, 12)
        self.norm2, self.fc1, self.fc2 = nn.LayerNorm(12), nn.Linear(12, 20), nn.Linear(20, 12)
        self.bridge, self.mask_token = nn.Linear(12, 10), nn.Parameter(0.02 * torch.randn(10))
        self.decoder_position = nn.Parameter(0.1 * torch.randn(9, 10))
        self.decoder = nn.Sequential(nn.Linear(10, 16), nn.GELU(), nn.Linear(16, 10))
        self.mixer = nn.Linear(9, 9)
        self.pixels = nn.Linear(10, 18)

    def forward(self, patches: Tensor, kept: Tensor, restore: Tensor) -> Tensor:
        b = patches.shape[0]
        x = self.embed(patches) + self.position
        x = torch.gather(x, 1, kept[..., None].expand(-1, -1, 12))
        q, k, v = self.qkv(self.norm1(x)).view(b, -1, 3, 2, 6).permute(2, 0, 3, 1, 4).unbind(0)
        mixed = torch.softmax(q @ k.transpose(2, 3) / 6**0.5, -1) @ v
        x = x + self.proj(mixed.transpose(1, 2).flatten(2))
        x = self.bridge(x + self.fc2(F.gelu(self.fc1(self.norm2(x)))))
        tokens = torch.cat([x, self.mask_token.expand(b, 9 - x.shape[1], 10)], 1)
        x = torch.gather(tokens, 1, restore[..., None].expand(-1, -1, 10)) + self.decoder_position
        x = x + self.mixer(x.transpose(1, 2)).transpose(1, 2)
        return self.pixels(x + self.decoder(x))


@kind("lab-masked-patches")
def masked_patches() -> Iterator[Step]:
    """Hidden patches of images rebuilt: rates by depth, gradients of two batches accumulated or averages."""
    depth = {"embed": 0, "position": 0, "norm1": 1, "qkv": 1, "proj": 1, "norm2": 1, "fc1": 1, "fc2": 1}
    order = torch.stack([torch.randperm(9) for _ in range(3)])
    restore = order.argsort(1)
    batch = {"patches": torch.randn(3, 9, 18), "ids_keep": order[:, :4].clone(), "ids_restore": restore}

    def step(variant: str, style: Style, accumulated: bool) -> Step:
        net = MaskedPatches()
        weights = {name: weight.detach().clone() for name, weight in net.named_parameters()}
        slots = {f"{name}/{slot}": torch.zeros_like(x) for name, x in weights.items() for slot in ("m", "v")}
        if accumulated:
            more = {f"{name}/sum": torch.zeros_like(x) for name, x in weights.items()}
            more |= {"micro_step": torch.tensor(0)}
        else:
            more = {f"{name}/ema": x.clone() for name, x in weights.items()}
        states = weights | slots | more | {"step": torch.tensor(0)}

        def run(values: Arrays) -> Outputs:
            w = {name: values[name].detach().clone().requires_grad_() for name in weights}
            guess = torch.func.functional_call(net, w, (values["patches"], values["ids_keep"], values["ids_restore"]))
            target = values["patches"]
            target = (target - target.mean(-1, keepdim=True)) / (target.var(-1, keepdim=True) + 1e-6).sqrt()
            hidden = (values["ids_restore"] >= 4).float()
            each = (guess - target).square().mean(-1)
            loss = (each * hidden).sum() / hidden.sum()
            visible = (each * (1 - hidden)).sum() / (1 - hidden).sum()
            grads = dict(zip(w, torch.autograd.grad(loss, list(w.values())), strict=True))
            following, due = {}, None
            if accumulated:
                grads = {name: values[f"{name}/sum"] + grad for name, grad in grads.items()}
                micro = values["micro_step"] + 1
                due = micro == 2
                following["micro_step"] = torch.where(due, 0, micro)
                following |= {f"{n}/sum": torch.where(due, torch.zeros_like(g), g) for n, g in grads.items()}
                grads = {name: grad / 2 for name, grad in grads.items()}
            step = values["step"] + 1
            t = step.float()
            rate = values["base_lr"] * torch.clamp(t / 40, max=1.0)
            moved = {"step": step}
            for name, weight in w.items():
                scale = 0.75 ** (2 - depth.get(name.split(".")[0], 2))
                m, v = values[f"{name}/m"], values[f"{name}/v"]
                m = moved[f"{name}/m"] = m * 0.9 + grads[name] * 0.1
                v = moved[f"{name}/v"] = v * 0.95 + grads[name] * grads[name] * 0.05
                decay = 0.05 if weight.dim() > 1 else 0.0
                move = (m / (1 - 0.9**t)) / ((v / (1 - 0.95**t)).sqrt() + 1e-6) + decay * weight.detach()
                moved[name] = weight.detach() - scale * rate * move
            if due is not None:
                moved = {name: torch.where(due, value, values[name]) for name, value in moved.items()}
            else:
                following |= {f"{n}/ema": torch.lerp(moved[n], values[f"{n}/ema"], 0.999) for n in weights}
            return Outputs({"loss": loss.detach()}, {"visible_error": visible.detach()}, states=moved | following)

        return Step(variant, Inputs(batch, states, {"base_lr": torch.tensor(1e-3)}), run, style, warm=5)

    yield step("accumulated", PLAIN, True)
    yield step("averaged", Style(names="scrambled"), False)


class TwoViews(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(20, 16), nn.ReLU(), nn.Linear(16, 12), nn.ReLU())
        self.projector = nn.Sequential(
            nn.Linear(12, 14, bias=False), nn.LayerNorm(14), nn.ReLU(), nn.Linear(14, 9, bias=False)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.projector(self.body(x))


@kind("lab-redundancy-reduction")
def redundancy_reduction() -> Iterator[Step]:
    """Representations of two views without negatives: cross-correlation, or variance and covariance; LARS."""

    def step(variant: str, style: Style, barlow: bool) -> Step:
        net = TwoViews()
        weights = {name: weight.detach().clone() for name, weight in net.named_parameters()}
        batch = {"view_a": torch.randn(10, 20), "view_b": torch.randn(10, 20)}
        slots = {f"mu.{name}": torch.zeros_like(weight) for name, weight in weights.items()}

        def objective(w: Arrays, values: Arrays) -> tuple[Tensor, Arrays]:
            a, b = (torch.func.functional_call(net, w, (values[view],)) for view in ("view_a", "view_b"))
            count, width = a.shape
            others = 1 - torch.eye(width)
            if barlow:
                a, b = ((z - z.mean(0)) / (z.var(0, correction=0) + 1e-5).sqrt() for z in (a, b))
                c = a.T @ b / count
                on, off = ((c - 1).square() * (1 - others)).sum(), (c * others).square().sum()
                return on + 0.0051 * off, {"on_diagonal": on, "off_diagonal": off}
            parts = {"invariance": F.mse_loss(a, b)}
            parts["variance"] = sum(F.relu(1 - (z.var(0) + 1e-4).sqrt()).mean() for z in (a, b)) / 2
            centred = [z - z.mean(0) for z in (a, b)]
            parts["covariance"] = sum((z.T @ z / (count - 1) * others).square().sum() / width for z in centred)
            return 25 * parts["invariance"] + 25 * parts["variance"] + parts["covariance"], parts

        def run(values: Arrays) -> Outputs:
            present = {name: values[name] for name in weights}
            grads, (loss, parts) = torch.func.grad_and_value(objective, has_aux=True)(present, values)
            following = {"step": values["step"] + 1}
            part = torch.clamp(values["step"].float() / 300, max=1.0)
            rate = 0.2 * (0.5 * (1 + torch.cos(3.14159265 * part)) * 0.998 + 0.002)
            for name, grad in grads.items():
                weight = present[name]
                if weight.dim() > 1:
                    grad = grad + 1e-4 * weight
                    size, length = weight.norm(), grad.norm()
                    trust = torch.where((size > 0) & (length > 0), 0.01 * size / (length + 1e-6), 1.0)
                    grad = grad * trust
                mu = following[f"mu.{name}"] = 0.9 * values[f"mu.{name}"] + grad
                following[name] = weight - rate * mu
            return Outputs({"loss": loss}, parts | {"lr": rate}, states=following)

        return Step(variant, Inputs(batch, weights | slots | {"step": torch.tensor(0)}), run, style)

    yield step("cross-correlation", Style(names="exporter"), True)
    yield step("variance-covariance", Style(shapes="inputs"), False)
