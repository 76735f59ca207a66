"""Small training graphs, one for each effect of a pass."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import onnx

from graphscale.passes import (
    AddTelemetry,
    Autocast,
    CheckFinite,
    GraphPass,
    GuardUpdates,
    LowerOptimizers,
    OrderWrites,
    ScaleLoss,
    SplitGemm,
    UnscaleGradients,
    UpdateLossScale,
    standard_passes,
)
from graphscale.policy import presets
from tests.build import BACKWARD, LINEAR_BACKWARD, linear_step, step
from tests.cases.steps import read
from tests.passes.test_lower_optimizers import model_of


@dataclasses.dataclass(frozen=True)
class Case:
    """A pass on a graph.

    Attributes:
        name: the pass's name and the case's: where its texts are.
        kind: the pass.
        graph: makes the training graph, on which the passes before this one run first.
        options: the options of `ScaleLoss`, or of `Autocast`.
    """

    name: str
    kind: type[GraphPass]
    graph: Callable[[], onnx.ModelProto]
    options: dict[str, Any] = dataclasses.field(default_factory=dict)

    def passes(self) -> tuple[list[GraphPass], GraphPass]:
        """The passes that run before, and the pass."""
        if self.kind in (Autocast, LowerOptimizers, SplitGemm):
            return [], self.kind(**self.options)
        made = list(standard_passes(ScaleLoss(**self.options), *([self.kind()] if self.kind.optional else [])))
        index = [type(one) for one in made].index(self.kind)
        return made[:index], made[index]


def cross_entropy() -> onnx.ModelProto:
    """Cross-entropy with one-hot targets: softmax - target is the first cotangent, and no constant is its factor."""
    forward = """
        y = MatMul(x, w)
        log_p = LogSoftmax(y)
        picked = Mul(t, log_p)
        total = ReduceSum<keepdims = 0>(picked)
        loss = Neg(total)
    """
    backward = """
        p = Exp(log_p)
        dy = Sub(p, t)
        xt = Transpose<perm = [1, 0]>(x)
        dw = MatMul(xt, dy)
    """
    return linear_step(forward=forward, backward=backward)


def two_losses() -> onnx.ModelProto:
    """Mean squared error + 0.01 * sum of |y|: the backward pass has a second seed."""
    forward = """
        y = MatMul(x, w)
        d = Sub(y, t)
        square = Mul(d, d)
        error = ReduceMean<keepdims = 0>(square)
        size = ReduceL1<keepdims = 0>(y)
        penalty = Mul(size, weight)
        loss = Add(error, penalty)
    """
    backward = """
        dy_error = Mul(d, two_over_n)
        sign = Sign(y)
        dy_penalty = Mul(sign, weight)
        dy = Add(dy_error, dy_penalty)
        xt = Transpose<perm = [1, 0]>(x)
        dw = MatMul(xt, dy)
    """
    return linear_step(forward=forward, backward=backward, constants="float weight = {0.01}")


def float16(optimizer: bool = False) -> onnx.ModelProto:
    """Forward and backward in float16, the loss and, if wanted, SGD on the float32 weight."""
    forward = """
        x16 = Cast<to = 10>(x)
        w16 = Cast<to = 10>(w)
        y16 = MatMul(x16, w16)
        y = Cast<to = 1>(y16)
        d = Sub(y, t)
        square = Mul(d, d)
        loss = ReduceMean<keepdims = 0>(square)
    """
    backward = """
        d16 = Cast<to = 10>(d)
        dy = Mul(d16, two_over_n16)
        xt = Transpose<perm = [1, 0]>(x16)
        dw = MatMul(xt, dy)
    """
    nodes = """
        dw32 = Cast<to = 1>(dw)
        u = Mul(dw32, rate)
        w_next = Sub(w, u)
    """
    return linear_step(
        nodes if optimizer else "",
        forward=forward,
        backward=backward,
        outputs="float16[4,3] dw, float[4,3] w_next" if optimizer else "float16[4,3] dw",
        constants="float16 two_over_n16 = {11605}, float rate = {0.1}",  # 11605: the bits of 1/12
    )


def sgd(weight_decay: bool = False, in_place: bool = False) -> onnx.ModelProto:
    """SGD inside, with weight decay if wanted; the weight as an input, or as an initializer."""
    gradient = "decay = Mul(w, half)\n g = Add(dw, decay)" if weight_decay else "g = Identity(dw)"
    constants = "float rate = {0.1}, float half = {0.5}" if weight_decay else "float rate = {0.1}"
    numbers = ", ".join(str(i / 8) for i in range(12))
    return linear_step(
        f"{gradient}\n u = Mul(g, rate)\n w_next = Sub(w, u)",
        inputs="" if in_place else "float[4,3] w",
        outputs="float[4,3] w_next",
        constants=constants + (f", float[4,3] w = {{{numbers}}}" if in_place else ""),
    )


def clipped() -> onnx.ModelProto:
    """The gradient clipped to a norm of 1: its norm is no linear function of it."""
    nodes = """
        squares = Mul(dw, dw)
        total = ReduceSum<keepdims = 0>(squares)
        norm = Sqrt(total)
        ratio = Div(one, norm)
        factor = Min(ratio, one)
        clipped = Mul(dw, factor)
        w_next = Sub(w, clipped)
    """
    return linear_step(nodes, outputs="float[4,3] w_next", constants="float one = {1}")


def accumulator() -> onnx.ModelProto:
    """A gradient that is added to a buffer in place, as in the training models of ONNX Runtime."""
    return linear_step(
        "added = com.microsoft.InPlaceAccumulatorV2(sum, dw, reset)",
        inputs="float[4,3] w, float[4,3] sum, bool[1] reset",
        outputs="bool[1] added",
        domains=["com.microsoft"],
    )


def logged_weight() -> onnx.ModelProto:
    """SGD on a weight that is an initializer, whose column sums are an output beside it."""
    numbers = ", ".join(str(i / 8) for i in range(12))
    return linear_step(
        "u = Mul(dw, rate)\n w_next = Sub(w, u)\n sums = ReduceSum<keepdims = 0>(w, rows)",
        inputs="",
        outputs="float[4,3] w_next, float[3] sums",
        constants=f"float rate = {{0.1}}, int64[1] rows = {{0}}, float[4,3] w = {{{numbers}}}",
    )


def two_layers() -> onnx.ModelProto:
    """Two layers with a rectified linear unit and SGD: what stands between products, and what reads a weight."""
    return step(
        "u = Mul(dw2, rate)\n w2_next = Sub(w2, u)",
        outputs="float[5,3] w2_next, float[4,5] dw1",
        constants="float zero = {0}, float rate = {0.1}",
        layer="a = Relu(h)",
        slope="open = Greater(a, zero)",
        backward=BACKWARD.replace("Mul(da, slope)", "Where(open, da, zero)"),
    )


def softmax_with_mask() -> onnx.ModelProto:
    """A finite mask that float16 cannot hold, a softmax, and a product behind it."""
    backward = """
        dy = Mul(d, two_over_n)
        at = Transpose<perm = [1, 0]>(a)
        dw2 = MatMul(at, dy)
    """
    return step(
        inputs="bool[8,5] mask",
        outputs="float[5,3] dw2",
        constants="float large = {-1e9}",
        layer="masked = Where(mask, h, large)\n a = Softmax(masked)",
        backward=backward,
    )


_TRAINING = {"target": "ort-training"}
CASES = (
    Case("autocast/two-layers", Autocast, two_layers),
    Case("autocast/emulated", Autocast, two_layers, {"emulate": True}),
    Case("autocast/mask", Autocast, softmax_with_mask),
    Case("autocast/bfloat16", Autocast, linear_step, {"dtype": "bfloat16", "target": "ort-cuda"}),
    Case("scale-loss/constant-edge", ScaleLoss, linear_step),
    Case("scale-loss/value", ScaleLoss, cross_entropy),
    Case("scale-loss/two-losses", ScaleLoss, two_losses),
    Case("scale-loss/float16", ScaleLoss, float16),
    Case("scale-loss/fixed", ScaleLoss, linear_step, {"loss_scale": 128}),
    Case("scale-loss/exposed", ScaleLoss, linear_step, {"loss_scale": 128, "expose_scaled_loss": True}),
    Case(
        "scale-loss/seed",
        ScaleLoss,
        lambda: linear_step(backward=LINEAR_BACKWARD.replace("dy =", "[seed] dy =")),
        {"seed": "seed:0"},
    ),
    Case("unscale-gradients/output", UnscaleGradients, linear_step),
    Case("unscale-gradients/float16", UnscaleGradients, lambda: float16(optimizer=True)),
    Case("unscale-gradients/weight-decay", UnscaleGradients, lambda: sgd(weight_decay=True)),
    Case("unscale-gradients/clipping", UnscaleGradients, clipped),
    Case("unscale-gradients/accumulator", UnscaleGradients, accumulator),
    Case("check-finite/standard-ops", CheckFinite, linear_step),
    Case("check-finite/float16", CheckFinite, lambda: float16(optimizer=True)),
    Case("check-finite/products", CheckFinite, step, {"target": "ort-cuda"}),
    Case("check-finite/kernel", CheckFinite, linear_step, {"target": "ort-training-cuda"}),
    Case("check-finite/fixed", CheckFinite, linear_step, {"loss_scale": 128, "skip_nonfinite": True}),
    Case("update-loss-scale/function", UpdateLossScale, linear_step),
    Case("update-loss-scale/in-place", UpdateLossScale, linear_step, _TRAINING),
    Case("update-loss-scale/without-functions", UpdateLossScale, lambda: linear_step(opset=13, ir_version=7)),
    Case("update-loss-scale/megatron", UpdateLossScale, linear_step, {"loss_scale": presets.megatron()}),
    Case("update-loss-scale/deepspeed", UpdateLossScale, linear_step, {"loss_scale": presets.deepspeed()}),
    # The other targets get an If, whose bodies ONNX's text form prints and cannot read.
    Case("telemetry/cuda", AddTelemetry, linear_step, {"target": "ort-cuda"}),
    Case("guard-updates/weight", GuardUpdates, sgd),
    Case("guard-updates/in-place", GuardUpdates, lambda: sgd(in_place=True), _TRAINING),
    Case("guard-updates/accumulator", GuardUpdates, accumulator),
    Case("guard-updates/gradients-only", GuardUpdates, linear_step),
    Case("order-writes/logged-weight", OrderWrites, logged_weight, _TRAINING),
    Case("split-gemm/update", SplitGemm, lambda: read("gradient_fused_into_update")),
    Case("lower-optimizers/momentum", LowerOptimizers, lambda: model_of("momentum")),
)
