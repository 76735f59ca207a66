"""Recipes of vision: segmentation, classification, keypoints, detection."""

import math
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.zoo.pytorch.recipes import (
    BARE,
    EXPORTER,
    SCRAMBLED,
    adam_state,
    adamw,
    call,
    clip_norm,
    copies_of,
    grads_of,
    heavy_ball,
    keras_adam,
    matrices,
    parameters,
    select,
    zeros_of,
)
from models.zoo.steps import Arrays, Inputs, Outputs, Step, Style, kind


def doubled(x: Tensor) -> Tensor:
    """Upsample an image to twice its size by the nearest pixel."""
    b, c, h, w = x.shape
    return x[:, :, :, None, :, None].expand(b, c, h, 2, w, 2).reshape(b, c, 2 * h, 2 * w)


class UNet(nn.Module):
    """Two levels with group normalization."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Conv2d(2, 8, 3, padding=1)
        self.enter_norm = nn.GroupNorm(4, 8)
        self.down = nn.Conv2d(8, 12, 3, stride=2, padding=1)
        self.down_norm = nn.GroupNorm(3, 12)
        self.bottom = nn.Conv2d(12, 12, 3, padding=1)
        self.up = nn.Conv2d(12 + 8, 10, 3, padding=1)
        self.up_norm = nn.GroupNorm(2, 10)
        self.leave = nn.Conv2d(10, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        skip = F.silu(self.enter_norm(self.enter(x)))
        x = F.silu(self.down_norm(self.down(skip)))
        x = x + F.silu(self.bottom(x))
        x = torch.cat([doubled(x), skip], 1)
        return self.leave(F.silu(self.up_norm(self.up(x))))


@kind("unet-segmentation")
def unet_segmentation() -> Iterator[Step]:
    """Cross-entropy and soft Dice of a U-Net; AdamW with warm-up and cosine, or SGD with polynomial decay."""
    net = UNet()
    params = parameters(net)
    batch = {"image": torch.randn(3, 2, 10, 10), "mask": torch.randint(4, (3, 10, 10))}

    def objective(weights: Arrays, values: Arrays) -> tuple[Tensor, Arrays]:
        logits = call(net, weights, values["image"])
        entropy = F.cross_entropy(logits, values["mask"], weight=values.get("class_weight"))
        p = torch.softmax(logits, 1)
        target = (values["mask"][:, None] == torch.arange(4)[:, None, None]).float()
        overlap = 2 * (p * target).sum((0, 2, 3)) / ((p + target).sum((0, 2, 3)) + 1e-3)
        pixels = (logits.argmax(1) == values["mask"]).float().mean()
        dice = 1 - overlap.mean()
        return entropy + dice, {"cross_entropy": entropy, "dice_loss": dice, "pixel_accuracy": pixels}

    def with_adamw(values: Arrays) -> Outputs:
        weights = select(values, params)
        loss, metrics, grads = grads_of(lambda w: objective(w, values), weights)
        done = values["step"].float()
        progress = ((done - 5) / 95).clamp(0, 1)
        lr = 3e-3 * torch.minimum((done + 1) / 5, 0.5 * (1 + torch.cos(math.pi * progress)))
        states = adamw(weights, grads, values, lr, decay=0.05, decayed=matrices)
        return Outputs({"loss": loss}, metrics | {"lr": lr}, states=states)

    def with_sgd(values: Arrays) -> Outputs:
        weights = select(values, params)
        loss, metrics, grads = grads_of(lambda w: objective(w, values), weights)
        lr = values["base_lr"] * (1 - values["iteration"].float() / 1000) ** 0.9
        states = heavy_ball(weights, grads, values, lr, decay=5e-4)
        return Outputs(
            {"loss": loss},
            {"accuracy": metrics["pixel_accuracy"]},
            states=states | {"iteration": values["iteration"] + 1},
        )

    yield Step("adamw-warmup", Inputs(batch, params | adam_state(params)), with_adamw)
    states = params | zeros_of(params, "momentum") | {"iteration": torch.tensor(40, dtype=torch.int32)}
    given = Inputs(batch, states, {"base_lr": torch.tensor(0.05)}, {"class_weight": torch.tensor([0.2, 1.0, 2.0, 1.5])})
    yield Step("sgd-class-weights", given, with_sgd, EXPORTER)


class Mixer(nn.Module):
    """Two blocks that mix patches and channels."""

    def __init__(self, patches: int = 9, width: int = 14) -> None:
        super().__init__()
        self.embed = nn.Linear(12, width)
        self.blocks = nn.ModuleList()
        for _ in range(2):
            block = {"token_norm": nn.LayerNorm(width), "token_in": nn.Linear(patches, 20)}
            block |= {"token_out": nn.Linear(20, patches), "channel_norm": nn.LayerNorm(width)}
            block |= {"channel_in": nn.Linear(width, 32), "channel_out": nn.Linear(32, width)}
            self.blocks.append(nn.ModuleDict(block))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 6)

    def forward(self, image: Tensor) -> Tensor:
        b = image.shape[0]
        x = image.reshape(b, 3, 3, 2, 3, 2).permute(0, 2, 4, 3, 5, 1).reshape(b, 9, 12)
        x = self.embed(x)
        for block in self.blocks:
            y = block["token_norm"](x).transpose(1, 2)
            x = x + block["token_out"](F.gelu(block["token_in"](y))).transpose(1, 2)
            x = x + block["channel_out"](F.gelu(block["channel_in"](block["channel_norm"](x))))
        return self.head(self.norm(x).mean(1))


@kind("mlp-mixer")
def mlp_mixer() -> Iterator[Step]:
    """Mixed-up labels; AdamW with Lookahead every five steps, and LAMB with trust ratios as an output."""
    net = Mixer()
    params = parameters(net)
    labels = {"label_a": torch.randint(6, (5,)), "label_b": torch.randint(6, (5,)), "mix": torch.rand(5)}
    batch = {"image": torch.randn(5, 3, 6, 6)} | labels

    def objective(weights: Arrays, values: Arrays) -> tuple[Tensor, Arrays]:
        logits = call(net, weights, values["image"])
        first = F.cross_entropy(logits, values["label_a"], reduction="none", label_smoothing=0.1)
        second = F.cross_entropy(logits, values["label_b"], reduction="none", label_smoothing=0.1)
        hits = (logits.argmax(-1) == values["label_a"]).float() * values["mix"]
        hits = hits + (logits.argmax(-1) == values["label_b"]).float() * (1 - values["mix"])
        return (values["mix"] * first + (1 - values["mix"]) * second).mean(), {"accuracy": hits.mean()}

    def with_lookahead(values: Arrays) -> Outputs:
        weights = select(values, params)
        loss, metrics, grads = grads_of(lambda w: objective(w, values), weights)
        states = adamw(weights, grads, values, 2e-3, decay=0.1, decayed=matrices)
        due = states["step"] % 5 == 0
        for name in params:
            slow = values[f"slow.{name}"]
            moved = slow + 0.5 * (states[name] - slow)
            states[f"slow.{name}"] = torch.where(due, moved, slow)
            states[name] = torch.where(due, moved, states[name])
        return Outputs({"loss": loss}, metrics, states=states)

    def with_lamb(values: Arrays) -> Outputs:
        weights = select(values, params)
        loss, metrics, grads = grads_of(lambda w: objective(w, values), weights)
        grads, norm = clip_norm(grads, 1.0)
        count = values["step"] + 1
        states, ratios = {"step": count}, []
        for name, w in weights.items():
            m = 0.9 * values[f"m.{name}"] + 0.1 * grads[name]
            v = 0.99 * values[f"v.{name}"] + 0.01 * grads[name] ** 2
            update = m / (1 - 0.9**count) / ((v / (1 - 0.99**count)).sqrt() + 1e-6) + 0.01 * w
            ratio = (w.norm() / update.norm().clamp(min=1e-6)).clamp(0.1, 10.0) if w.dim() > 1 else torch.tensor(1.0)
            ratios.append(ratio)
            states |= {name: w - values["lr"] * ratio * update, f"m.{name}": m, f"v.{name}": v}
        metrics |= {"gradient_norm": norm, "mean_trust": torch.stack(ratios).mean()}
        return Outputs({"loss": loss}, metrics, states=states)

    yield Step(
        "adamw-lookahead", Inputs(batch, params | adam_state(params) | copies_of(params, "slow")), with_lookahead
    )
    states = params | zeros_of(params, "m", "v") | {"step": torch.tensor(0.0)}
    yield Step("lamb", Inputs(batch, states, {"lr": torch.tensor(0.01)}), with_lamb, SCRAMBLED)


class Heatmaps(nn.Module):
    """A stem and a head that gives one map for each point."""

    def __init__(self) -> None:
        super().__init__()
        self.stem1 = nn.Conv2d(1, 7, 5, padding=2)
        self.stem2 = nn.Conv2d(7, 9, 3, padding=1)
        self.head1 = nn.Conv2d(9, 12, 3, padding=1)
        self.head2 = nn.Conv2d(12, 5, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.stem2(F.relu(self.stem1(x))))
        return self.head2(F.relu(self.head1(x)))


@kind("keypoint-heatmaps")
def keypoint_heatmaps() -> Iterator[Step]:
    """Gaussian targets drawn in the graph, points that are hidden, soft-argmax; the stem is frozen in the second."""
    net, size = Heatmaps(), 9
    params = parameters(net)
    points = torch.rand(4, 5, 2) * (size - 1)
    batch = {"image": torch.randn(4, 1, size, size), "points": points, "visible": (torch.rand(4, 5) < 0.7).float()}

    def objective(weights: Arrays, values: Arrays) -> tuple[Tensor, Arrays]:
        heat = call(net, weights, values["image"])
        line = torch.arange(size, dtype=torch.float32)
        x, y = values["points"][..., 0, None], values["points"][..., 1, None]
        target = torch.exp(-((line - y) ** 2)[..., None] / 4.5) * torch.exp(-((line - x) ** 2)[..., None, :] / 4.5)
        visible = values["visible"]
        fit = ((heat - target) ** 2).mean((2, 3))
        p = torch.softmax(4 * heat.flatten(2), -1).reshape(heat.shape)
        guess = torch.stack([(p.sum(2) * line).sum(-1), (p.sum(3) * line).sum(-1)], -1)
        off = (guess - values["points"]).abs().sum(-1)
        total = visible.sum().clamp(min=1.0)
        fit, shift = (fit * visible).sum() / total, (off * visible).sum() / total
        close = ((off < 2.0).float() * visible).sum() / total
        return fit + 0.05 * shift, {"heatmap_loss": fit, "shift": shift, "pck": close}

    def run(values: Arrays, learnt: Arrays) -> Outputs:
        fixed = {name: values[name] for name in params if name not in learnt}
        weights = select(values, learnt)
        loss, metrics, grads = grads_of(lambda w: objective(fixed | w, values), weights)
        lr = 5e-3 * 0.1 ** torch.floor(values["iterations"].float() / 30)
        return Outputs({"loss": loss}, metrics, states=keras_adam(weights, grads, values, lr))

    def gradients(values: Arrays) -> Outputs:
        loss, metrics, grads = grads_of(lambda w: objective(w, values), select(values, params))
        return Outputs({"loss": loss}, metrics, {f"{name}.grad": grad for name, grad in grads.items()})

    head = {name: value for name, value in params.items() if name.startswith("head")}
    stem = {name: value for name, value in params.items() if name not in head}
    count = {"iterations": torch.tensor(28)}
    whole = Inputs(batch, params | zeros_of(params, "m", "v") | count)
    yield Step("adam-step-decay", whole, lambda values: run(values, params), EXPORTER)
    part = Inputs(batch, head | zeros_of(head, "m", "v") | count, constants=stem)
    yield Step("frozen-stem", part, lambda values: run(values, head), Style(opset=18, order="reversed"))
    yield Step("gradients", Inputs(batch, constants=params), gradients, BARE)


class Detector(nn.Module):
    """A tower with a head of classes and a head of boxes."""

    def __init__(self) -> None:
        super().__init__()
        self.tower1 = nn.Conv2d(3, 10, 3, stride=2, padding=1)
        self.tower2 = nn.Conv2d(10, 12, 3, padding=1)
        self.classes = nn.Conv2d(12, 2 * 3, 3, padding=1)
        self.boxes = nn.Conv2d(12, 2 * 4, 3, padding=1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = F.relu(self.tower2(F.relu(self.tower1(x))))
        b = x.shape[0]
        classes = self.classes(x).permute(0, 2, 3, 1).reshape(b, -1, 3)
        return classes, self.boxes(x).permute(0, 2, 3, 1).reshape(b, -1, 4)


@kind("anchor-detector")
def anchor_detector() -> Iterator[Step]:
    """RetinaNet: focal loss and boxes divided by a carried average of the number of matched anchors."""
    net = Detector()
    params = parameters(net)
    match = torch.randint(-2, 4, (2, 32)).clamp(min=-1)
    batch = {"image": torch.randn(2, 3, 8, 8), "match": match, "deltas": torch.randn(2, 32, 4)}

    def run(values: Arrays, adaptive: bool) -> Outputs:
        weights, match = select(values, params), values["match"]
        matched = (match > 0).float()
        normaliser = 0.9 * values["loss_normalizer"] + 0.1 * matched.sum().clamp(min=1.0)

        def objective(w: Arrays) -> tuple[Tensor, Arrays]:
            logits, deltas = call(net, w, values["image"])
            target = (match[..., None] == torch.arange(1, 4)).float()
            each = F.binary_cross_entropy_with_logits(logits, target, reduction="none")
            p = torch.sigmoid(logits)
            missed = p * (1 - target) + (1 - p) * target
            each = (0.25 * target + 0.75 * (1 - target)) * missed**2 * each
            classes = (each * (match >= 0).float()[..., None]).sum() / normaliser
            boxes = F.smooth_l1_loss(deltas, values["deltas"], beta=0.1, reduction="none").sum(-1)
            boxes = (boxes * matched).sum() / normaliser
            return classes + boxes, {"loss_cls": classes, "loss_box": boxes, "positives": matched.sum()}

        loss, metrics, grads = grads_of(objective, weights)
        states = {"loss_normalizer": normaliser}
        if adaptive:
            states |= adamw(weights, grads, values, values["lr"], decay=1e-4)
        else:
            rate = 0.01 * ((values["iter"].float() + 1) / 500).clamp(max=1.0)
            grads = {name: grad.clamp(-1.0, 1.0) for name, grad in grads.items()}
            biases = {name: w for name, w in weights.items() if name.endswith("bias")}
            others = {name: w for name, w in weights.items() if name not in biases}
            states |= heavy_ball(others, grads, values, rate, decay=1e-4)
            states |= heavy_ball(biases, grads, values, 2 * rate) | {"iter": values["iter"] + 1}
        return Outputs({"total_loss": loss}, metrics, states=states)

    carried = {"loss_normalizer": torch.tensor(20.0)}
    states = params | zeros_of(params, "momentum") | carried | {"iter": torch.tensor(300)}
    yield Step("sgd-bias-rates", Inputs(batch, states), lambda values: run(values, False))
    given = Inputs(batch, params | adam_state(params) | carried, {"lr": torch.tensor(1e-3)})
    yield Step("adamw", given, lambda values: run(values, True), Style(states="initializers"))
