"""Kinds from the field, images: lesions by a U-Net in mixed precision, poses by heatmaps."""

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.zoo.pytorch.field_parts import (
    ADAM,
    MOMENTUM,
    Optimizer,
    adam,
    clip_norm,
    matrices,
    one_step,
    radam,
    rmsprop,
    zeros,
)
from models.zoo.steps import Arrays, Inputs, Outputs, Step, Style, kind


def upsample(x: Tensor) -> Tensor:
    """Repeat each pixel twice along both axes."""
    n, c, h, w = x.shape
    return x[:, :, :, None, :, None].expand(n, c, h, 2, w, 2).reshape(n, c, 2 * h, 2 * w)


class UNet(nn.Module):
    """Two levels with a connection between them; group normalization."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Conv2d(2, 8, 3, padding=1)
        self.norm = nn.GroupNorm(2, 8)
        self.down = nn.Conv2d(8, 12, 3, stride=2, padding=1)
        self.bottom = nn.Conv2d(12, 12, 3, padding=1)
        self.up = nn.Conv2d(20, 10, 3, padding=1)
        self.mask = nn.Conv2d(10, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        top = F.relu(self.norm(self.enter(x)))
        low = F.relu(self.bottom(F.relu(self.down(top))))
        return self.mask(F.relu(self.up(torch.cat([top, upsample(low)], 1))))[:, 0]


def overlap(logit: Tensor, truth: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the sum of the two losses, and both: soft Dice, and cross-entropy by pixel."""
    p = torch.sigmoid(logit)
    shared = (p * truth).sum((1, 2))
    dice = 1 - ((2 * shared + 1) / (p.sum((1, 2)) + truth.sum((1, 2)) + 1)).mean()
    pixels = F.binary_cross_entropy_with_logits(logit, truth)
    return dice + 0.5 * pixels, dice, pixels


def in_half(values: Arrays, names: list[str], net: UNet) -> Outputs:
    """One step as autocast and GradScaler take it: float16 inside, scaled loss, a skipped update if it overflows."""
    leaves = {name: values[name].detach().requires_grad_() for name in names}
    half = {name: leaf.half() for name, leaf in leaves.items()}
    logit = torch.func.functional_call(net, half, (values["scan"].half(),)).float()
    loss, dice, pixels = overlap(logit, values["lesion"])
    found = torch.autograd.grad(loss * values["loss_scale"], list(leaves.values()))
    grads = {name: grad.float() / values["loss_scale"] for name, grad in zip(names, found, strict=True)}
    finite = torch.stack([torch.isfinite(grad).all() for grad in grads.values()]).all()
    t = values["step"] + finite.to(torch.int64)
    states = {}
    for name, grad in grads.items():
        slots = {slot: values[f"{name}.{slot}"] for slot in ADAM}
        moved, after = adam(values[name], grad, slots, t.clamp(min=1).float(), 1e-3, 0.01)
        states[name] = torch.where(finite, moved, values[name])
        for slot, value in after.items():
            states[f"{name}.{slot}"] = torch.where(finite, value, slots[slot])
    tracker = torch.where(finite, values["growth_tracker"] + 1, 0)
    grown = torch.where(tracker >= 2000, values["loss_scale"] * 2.0, values["loss_scale"])
    states["step"] = t
    kept = {"loss_scale": torch.where(finite, grown, values["loss_scale"] * 0.5)}
    kept["growth_tracker"] = torch.where(tracker >= 2000, 0, tracker)
    metrics = {"dice_loss": dice, "pixel_loss": pixels, "grads_finite": finite}
    metrics = {name: value.detach() for name, value in metrics.items()}
    return Outputs({"loss": loss.detach()}, metrics, states=states, kept=kept)


@kind("field-lesion-segmentation")
def lesion_segmentation() -> Iterator[Step]:
    """A small U-Net, Dice and cross-entropy: float16 inside with a scale that the step adapts; AMSGrad in float32."""
    batch = {"scan": torch.randn(2, 2, 10, 12), "lesion": (torch.rand(2, 10, 12) > 0.7).float()}
    net = UNet()
    weights = {name: weight.detach().clone() for name, weight in net.named_parameters()}
    slots = {f"{name}.{slot}": torch.zeros_like(weight) for name, weight in weights.items() for slot in ADAM}
    scaler = {"step": torch.tensor(0), "loss_scale": torch.tensor(256.0), "growth_tracker": torch.tensor(0)}
    states = weights | slots | scaler
    yield Step("mixed-precision", Inputs(batch, states), lambda values: in_half(values, list(weights), net))

    def objective(net: Callable, values: Arrays) -> tuple[Tensor, Arrays, Arrays]:
        logit = net(values["scan"])
        loss, _, _ = overlap(logit, values["lesion"])
        said = (logit > 0).float()
        union = torch.maximum(said, values["lesion"]).sum()
        return loss, {"intersection_over_union": (said * values["lesion"]).sum() / (union + 1e-3)}, {}

    amsgrad = Optimizer(adam, ADAM | {"max_exp_avg_sq": zeros}, lambda values, t: 2e-3, matrices(1e-2), "num_updates")
    yield one_step("amsgrad", UNet(), batch, objective, amsgrad, Style(names="exporter"), clip=clip_norm(1.0))


class PoseNet(nn.Module):
    """Strided convolutions, a bottleneck, and one map for each joint by pixel shuffle."""

    def __init__(self, joints: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 10, 3, stride=2, padding=1)
        self.stage = nn.Conv2d(10, 16, 3, stride=2, padding=1)
        self.squeeze = nn.Conv2d(16, 6, 1)
        self.expand = nn.Conv2d(6, 16, 3, padding=1)
        self.maps = nn.Conv2d(16, joints * 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.stage(F.relu(self.stem(x))))
        x = F.relu(x + self.expand(F.relu(self.squeeze(x))))
        return F.pixel_shuffle(self.maps(x), 2)


@kind("field-pose-heatmaps")
def pose_heatmaps() -> Iterator[Step]:
    """Heatmaps of joints, some of them not visible, against Gaussians drawn in the step; RAdam, RMSprop."""

    def objective(net: Callable, values: Arrays) -> tuple[Tensor, Arrays, Arrays]:
        maps = net(values["photo"])
        rows, columns = torch.arange(8.0)[:, None], torch.arange(8.0)
        y, x = values["joints"][..., 0, None, None], values["joints"][..., 1, None, None]
        wanted = torch.exp(-((rows - y) ** 2 + (columns - x) ** 2) / 2.5)
        seen = values["visible"]
        each = (maps - wanted).square().mean((2, 3)) * seen
        found = maps.flatten(2).argmax(2)
        place = torch.stack([found // 8, found % 8], 2).float()
        near = ((place - values["joints"]).square().sum(2) < 4.0).float() * seen
        total = seen.sum() + 1e-6
        return each.sum() / total, {"correct_keypoints": near.sum() / total, "found_joints": place}, {}

    batch = {"photo": torch.randn(3, 3, 16, 16), "joints": 7 * torch.rand(3, 5, 2)}
    batch["visible"] = (torch.rand(3, 5) > 0.3).float()
    fed = {"base_lr": torch.tensor(2e-3)}

    def staged(values: Arrays, t: Tensor) -> Tensor:
        return values["base_lr"] * torch.where(t < 170, 1.0, torch.where(t < 200, 0.1, 0.01))

    rectified = Optimizer(radam, ADAM, staged, counter="step_count", label="{weight}/{slot}")
    yield one_step("radam", PoseNet(5), batch, objective, rectified, fed=fed, show_rate="current_lr")
    root = Optimizer(rmsprop, {"square_avg": zeros} | MOMENTUM, lambda values, t: 1e-3, matrices(1e-4))
    yield one_step("rmsprop", PoseNet(5), batch, objective, root, Style(shapes="inputs", opset=18), ema=0.995)
