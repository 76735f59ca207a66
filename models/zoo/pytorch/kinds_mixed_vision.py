"""Kinds as people export them, of images: residual networks, detection heads, a mixer in half precision."""

from collections.abc import Iterator
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from models.zoo.pytorch.problems import Problem, layers
from models.zoo.pytorch.training import differentiate
from models.zoo.steps import PLAIN, Arrays, Inputs, Outputs, Step, Style, kind

EXPORTER = Style(names="exporter")


def global_norm(tensors: Arrays) -> Tensor:
    """Return the norm of the norms, as `torch.nn.utils.get_total_norm` does."""
    return torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(each) for each in tensors.values()]))


def clipped(grads: Arrays, limit: float) -> tuple[Arrays, Tensor]:
    """Return gradients as `torch.nn.utils.clip_grad_norm_` leaves them, and their norm before."""
    norm = global_norm(grads)
    factor = (limit / (norm + 1e-6)).clamp(max=1.0)
    return {name: grad * factor for name, grad in grads.items()}, norm


def filters(outputs: int, inputs: int, size: int) -> Tensor:
    """Return the filters of a convolution by He's rule."""
    return torch.randn(outputs, inputs, size, size) * (2 / (inputs * size * size)) ** 0.5


def residual_network() -> Problem:
    """Return a residual network with batch normalizations and label smoothing."""
    norms = {"bn1": 8, "layer1_bn1": 12, "layer1_bn2": 12, "layer2_bn1": 12}

    def loss(weights: Arrays, values: Arrays) -> tuple[Tensor, Outputs]:
        stats: Arrays = {}

        def norm(x: Tensor, name: str) -> Tensor:
            mean, variance = x.mean((0, 2, 3)), x.var((0, 2, 3), correction=0)
            n = x.numel() / mean.numel()
            unbiased = variance.detach() * n / (n - 1)
            stats[f"{name}_running_mean"] = 0.9 * values[f"{name}_running_mean"] + 0.1 * mean.detach()
            stats[f"{name}_running_var"] = 0.9 * values[f"{name}_running_var"] + 0.1 * unbiased
            stats[f"{name}_num_batches_tracked"] = values[f"{name}_num_batches_tracked"] + 1
            x = (x - mean[:, None, None]) * torch.rsqrt(variance + 1e-5)[:, None, None]
            return x * weights[f"{name}_weight"][:, None, None] + weights[f"{name}_bias"][:, None, None]

        x = F.relu(norm(F.conv2d(values["images"], weights["conv1"], padding=1), "bn1"))
        y = F.relu(norm(F.conv2d(x, weights["layer1_conv1"], stride=2, padding=1), "layer1_bn1"))
        y = norm(F.conv2d(y, weights["layer1_conv2"], padding=1), "layer1_bn2")
        x = F.relu(y + F.conv2d(x, weights["layer1_downsample"], stride=2))
        x = F.relu(x + norm(F.conv2d(x, weights["layer2_conv1"], padding=1), "layer2_bn1"))
        logits = F.linear(x.mean((2, 3)), weights["fc_weight"], weights["fc_bias"])
        accuracy = (logits.argmax(-1) == values["labels"]).float().mean()
        value = F.cross_entropy(logits, values["labels"], label_smoothing=0.1)
        return value, Outputs(metrics={"accuracy": accuracy}, states=stats)

    weights = {"conv1": filters(8, 3, 3), "layer1_conv1": filters(12, 8, 3), "layer1_conv2": filters(12, 12, 3)}
    weights |= {"layer1_downsample": filters(12, 8, 1), "layer2_conv1": filters(12, 12, 3)}
    states: Arrays = {}
    for name, width in norms.items():
        weights |= {f"{name}_weight": torch.ones(width), f"{name}_bias": torch.zeros(width)}
        states |= {f"{name}_running_mean": torch.zeros(width), f"{name}_running_var": torch.ones(width)}
        states |= {f"{name}_num_batches_tracked": torch.tensor(0)}
    weights |= {"fc_weight": 0.3 * torch.randn(10, 12), "fc_bias": torch.zeros(10)}
    return Problem(weights, {"images": torch.randn(6, 3, 10, 10), "labels": torch.randint(10, (6,))}, loss, states)


def nesterov(weights: Arrays, grads: Arrays, values: Arrays, rate: Tensor) -> tuple[Arrays, Arrays]:
    """Return the next weights and momenta; matrices and filters decay, vectors do not."""
    moved, buffers = {}, {}
    for name, weight in weights.items():
        grad = grads[name] + 5e-4 * weight if weight.dim() > 1 else grads[name]
        buffer = 0.9 * values[f"{name}_momentum_buffer"] + grad
        moved[name] = weight - rate * (grad + 0.9 * buffer)
        buffers[f"{name}_momentum_buffer"] = buffer
    return moved, buffers


@kind("residual-image-trainer")
def residual_image_trainer() -> Iterator[Step]:
    """A residual network by Nesterov's momentum: its rate is fed, or one cycle of a counter with averaged weights."""
    net = residual_network()
    buffers = {f"{name}_momentum_buffer": torch.zeros_like(weight) for name, weight in net.weights.items()}

    def fed(values: Arrays) -> Outputs:
        outputs, grads = differentiate(net, values)
        weights = {name: values[name] for name in net.weights}
        moved, momenta = nesterov(weights, grads, values, values["lr"])
        metrics = outputs.metrics | {"grad_norm": global_norm(grads)}
        return replace(outputs, metrics=metrics, states=moved | outputs.states | momenta)

    def cycle(values: Arrays) -> Outputs:
        outputs, grads = differentiate(net, values)
        weights, step = {name: values[name] for name in net.weights}, values["step"]
        rate = 0.1 * torch.minimum((step + 1) / 10, (100 - step).clamp(min=1) / 90)
        moved, momenta = nesterov(weights, grads, values, rate)
        decay = torch.minimum(torch.tensor(0.999), (1 + step) / (10 + step))
        averages = {f"ema_{name}": decay * values[f"ema_{name}"] + (1 - decay) * new for name, new in moved.items()}
        metrics = outputs.metrics | {"lr": rate, "param_norm": global_norm(moved)}
        states = moved | outputs.states | momenta | averages | {"step": step + 1}
        return replace(outputs, metrics=metrics, states=states)

    states = net.weights | net.states | buffers
    yield Step("fed-rate", Inputs(net.batch, states, {"lr": torch.tensor(0.05)}), fed)
    averages = {f"ema_{name}": weight.clone() for name, weight in net.weights.items()}
    yield Step("one-cycle", Inputs(net.batch, states | averages | {"step": torch.tensor(0)}), cycle, EXPORTER)


def detector() -> Problem:
    """Return a one-stage detector: objectness by the focal loss, boxes by overlap, classes by cross-entropy."""

    def corners(boxes: Tensor) -> tuple[Tensor, ...]:
        cx, cy, width, height = boxes.unbind(-1)
        return cx - width / 2, cy - height / 2, cx + width / 2, cy + height / 2

    def loss(weights: Arrays, values: Arrays) -> tuple[Tensor, Outputs]:
        x = values["image"]
        for name in ("backbone1", "backbone2", "backbone3"):
            x = F.silu(F.conv2d(x, weights[f"{name}_w"], weights[f"{name}_b"], 1 if name[-1] == "3" else 2, 1))
        x = F.conv2d(x, weights["head_w"], weights["head_b"]).permute(0, 2, 3, 1)
        wanted, positive = values["box_target"], values["object_target"]
        count = positive.sum().clamp(min=1.0)
        raw = F.binary_cross_entropy_with_logits(x[..., 0], positive, reduction="none")
        p = torch.sigmoid(x[..., 0])
        sure = positive * p + (1 - positive) * (1 - p)
        loss_obj = (raw * (1 - sure) ** 2).sum() / count
        x0, y0, x1, y1 = corners(torch.cat([torch.sigmoid(x[..., 1:3]), torch.exp(x[..., 3:5].clamp(-3, 1))], -1))
        u0, v0, u1, v1 = corners(wanted)
        width = (torch.minimum(x1, u1) - torch.maximum(x0, u0)).clamp(min=0)
        height = (torch.minimum(y1, v1) - torch.maximum(y0, v0)).clamp(min=0)
        both = (x1 - x0) * (y1 - y0) + (u1 - u0) * (v1 - v0)
        overlap = width * height / (both - width * height + 1e-6)
        loss_box = ((1 - overlap) * positive).sum() / count
        each = F.cross_entropy(x[..., 5:].flatten(0, 2), values["class_target"].flatten(), reduction="none")
        loss_cls = (each * positive.flatten()).sum() / count
        metrics = {"loss_obj": loss_obj, "loss_box": loss_box, "loss_cls": loss_cls}
        metrics |= {"mean_iou": (overlap * positive).sum().detach() / count, "num_pos": positive.sum()}
        return loss_obj + 2.0 * loss_box + loss_cls, Outputs(metrics=metrics)

    weights: Arrays = {}
    for name, outputs, inputs in (("backbone1", 8, 3), ("backbone2", 16, 8), ("backbone3", 20, 16)):
        weights |= {f"{name}_w": filters(outputs, inputs, 3), f"{name}_b": torch.zeros(outputs)}
    weights |= {"head_w": 0.1 * torch.randn(9, 20, 1, 1), "head_b": torch.zeros(9)}
    boxes = torch.cat([torch.rand(2, 4, 4, 2), 0.3 + torch.rand(2, 4, 4, 2)], -1)
    data = {"image": torch.randn(2, 3, 16, 16), "object_target": (torch.rand(2, 4, 4) < 0.3).float()}
    data |= {"box_target": boxes, "class_target": torch.randint(4, (2, 4, 4))}
    return Problem(weights, data, loss)


@kind("one-stage-detector")
def one_stage_detector() -> Iterator[Step]:
    """A detector whose three losses are outputs: AMSGrad with a counter for each weight, or a slower backbone."""
    net = detector()

    def amsgrad(values: Arrays) -> Outputs:
        outputs, grads = differentiate(net, values)
        states: Arrays = {}
        for name in net.weights:
            grad, step = grads[name], values[f"{name}.step"] + 1
            first = torch.lerp(values[f"{name}.exp_avg"], grad, 0.1)
            second = torch.addcmul(values[f"{name}.exp_avg_sq"] * 0.999, grad, grad, value=0.001)
            largest = torch.maximum(values[f"{name}.max_exp_avg_sq"], second)
            root = largest.sqrt() / (1 - 0.999**step).sqrt() + 1e-6
            states |= {name: values[name] - 2e-3 / (1 - 0.9**step) * (first / root)}
            states |= {f"{name}.step": step, f"{name}.exp_avg": first, f"{name}.exp_avg_sq": second}
            states |= {f"{name}.max_exp_avg_sq": largest}
        return replace(outputs, states=states)

    def groups(values: Arrays) -> Outputs:
        outputs, grads = differentiate(net, values)
        grads, norm = clipped(grads, 5.0)
        rate = 0.02 * ((values["iteration"] + 1) / 50).clamp(max=1.0)
        states: Arrays = {"iteration": values["iteration"] + 1}
        for name in net.weights:
            buffer = 0.9 * values[f"{name}_velocity"] + grads[name] + 1e-4 * values[name]
            states[f"{name}_velocity"] = buffer
            states[name] = values[name] - rate * (0.1 if "backbone" in name else 1.0) * buffer
        return replace(outputs, metrics=outputs.metrics | {"grad_norm": norm}, states=states)

    states: Arrays = {}
    for name, weight in net.weights.items():
        states |= {name: weight, f"{name}.step": torch.zeros(()), f"{name}.exp_avg": torch.zeros_like(weight)}
        states |= {f"{name}.{slot}": torch.zeros_like(weight) for slot in ("exp_avg_sq", "max_exp_avg_sq")}
    yield Step("amsgrad", Inputs(net.batch, states), amsgrad, EXPORTER)
    velocities = {f"{name}_velocity": torch.zeros_like(weight) for name, weight in net.weights.items()}
    states = net.weights | velocities | {"iteration": torch.tensor(0.0)}
    yield Step("slower-backbone", Inputs(net.batch, states), groups)


@kind("half-precision-mixer")
def half_precision_mixer() -> Iterator[Step]:
    """A mixer with float16 weights, float32 masters, and a loss scale that grows and shrinks; overflows are skipped."""
    weights = {"embed": torch.randn(16, 24) / 4} | {f"block_{k}": v for k, v in mixing().items()}
    weights |= {"head": torch.randn(24, 7) / 5, "head_bias": torch.zeros(7)}
    half = {name: weight.half() for name, weight in weights.items()}
    masters = {f"master_{name}": weight.float() for name, weight in half.items()}
    data = {"patches": torch.randn(5, 9, 16), "label": torch.randint(7, (5,))}

    def loss(w: Arrays, values: Arrays) -> tuple[Tensor, Outputs]:
        x = values["patches"].half() @ w["embed"]
        y = F.layer_norm(x.float(), (24,)).half().transpose(1, 2)
        x = x + (F.gelu(y @ w["block_token1"]) @ w["block_token2"]).transpose(1, 2)
        y = F.layer_norm(x.float(), (24,)).half()
        x = x + F.gelu(y @ w["block_channel1"]) @ w["block_channel2"]
        logits = (x.mean(1) @ w["head"] + w["head_bias"]).float()
        value = F.cross_entropy(logits, values["label"])
        return value * values["loss_scale"], Outputs(metrics={"value": value})

    def step(momentum: bool, variant: str, style: Style = PLAIN) -> Step:
        slots = ("velocity",) if momentum else ("exp_avg", "exp_avg_sq")

        def run(values: Arrays) -> Outputs:
            outputs, grads = differentiate(Problem(half, {}, loss), values)
            grads = {name: grad.float() / values["loss_scale"] for name, grad in grads.items()}
            norm = global_norm(grads)
            finite, time = torch.isfinite(norm), values["optimizer_step"] + 1
            states: Arrays = {"optimizer_step": time}
            for name, grad in grads.items():
                master = values[f"master_{name}"]
                if momentum:
                    buffer = 0.9 * values[f"{name}_velocity"] + grad
                    states[f"{name}_velocity"], moved = buffer, master - 0.05 * (grad + 0.9 * buffer)
                else:
                    first = 0.9 * values[f"{name}_exp_avg"] + 0.1 * grad
                    second = 0.99 * values[f"{name}_exp_avg_sq"] + 0.01 * grad * grad
                    root = (second / (1 - 0.99**time)).sqrt() + 1e-5
                    moved = master * (1 - 2e-5) - 2e-3 * first / (1 - 0.9**time) / root
                    states |= {f"{name}_exp_avg": first, f"{name}_exp_avg_sq": second}
                states[f"master_{name}"], states[name] = moved, moved.half()
            states = {name: torch.where(finite, new, values[name]) for name, new in states.items()}
            good, scale = torch.where(finite, values["good_steps"] + 1, 0), values["loss_scale"]
            scale = torch.where(finite, torch.where(good >= 20, scale * 2, scale), scale * 0.5)
            kept = {"loss_scale": scale, "good_steps": torch.where(good >= 20, 0, good)}
            metrics = {"grad_norm": norm, "overflow": 1 - finite.float()}
            return Outputs({"loss": outputs.metrics["value"]}, metrics, states=states, kept=kept)

        moments = {f"{name}_{slot}": torch.zeros_like(weight) for slot in slots for name, weight in weights.items()}
        carried = {"optimizer_step": torch.tensor(0.0)}
        carried |= {"loss_scale": torch.tensor(256.0), "good_steps": torch.tensor(0)}
        return Step(variant, Inputs(data, half | masters | moments | carried), run, style)

    yield step(False, "adamw")
    yield step(True, "nesterov", Style(names="exporter", states="initializers"))


def mixing() -> Arrays:
    """Return the weights of one block: over 9 patches, and over 24 channels."""
    token = layers(9, 12, 9, bias=False)
    channel = layers(24, 40, 24, bias=False)
    pairs = {"token1": token["w1"], "token2": token["w2"], "channel1": channel["w1"], "channel2": channel["w2"]}
    return {name: 0.7 * weight for name, weight in pairs.items()}
