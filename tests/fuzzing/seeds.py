"""The good files before the damage: small graphs, scaled and not, of several exporters and targets."""

from __future__ import annotations

import functools

import onnx

import graphscale as gs
from tests.build import linear_step, step
from tests.cli.bad_graphs import sgd
from tests.conftest import MODELS

_MOMENTUM = (
    'w_next, v_next = ai.onnx.preview.training.Momentum <alpha = 0.9, beta = 1.0, mode = "standard", '
    "norm_coefficient = 0.0> (rate, count, w, dw, v)"
)


@functools.cache
def originals() -> tuple[onnx.ModelProto, ...]:
    """Training graphs before scaling."""
    real = ("pytorch/mse_tanh", "ort/gradbuilder_regression", "ort/digits_mlp", "pytorch/mlp_momentum")
    return (linear_step(), step(), sgd(), _with_optimizer(), *(onnx.load(MODELS / f"{name}.onnx") for name in real))


def _with_optimizer() -> onnx.ModelProto:
    """A step whose optimizer is an operator of ONNX's own."""
    return linear_step(
        _MOMENTUM,
        inputs="float[4,3] w, float[4,3] v",
        outputs="float[4,3] w_next, float[4,3] v_next",
        constants="float rate = {0.1}, int64 count = {3}",
        domains=["ai.onnx.preview.training"],
    )


@functools.cache
def pairs() -> tuple[tuple[onnx.ModelProto, onnx.ModelProto], ...]:
    """Graphs, with what scaling made of them."""
    linear, two, descent, optimizer, tanh, regression, digits, _ = originals()
    return (
        (linear, gs.scale(linear).model),
        (linear, gs.scale(linear, 1024).model),
        (two, gs.scale(two, gs.presets.deepspeed()).model),
        (descent, gs.scale(descent).model),
        (descent, gs.scale(descent, target="ort-training").model),
        (descent, gs.scale(descent, telemetry=True).model),
        (optimizer, gs.scale(optimizer).model),
        (tanh, gs.scale(tanh).model),
        (regression, gs.scale(regression, target="ort-cuda").model),
        (digits, gs.scale(digits, target="ort-training").model),
    )


@functools.cache
def rewritten() -> tuple[onnx.ModelProto, ...]:
    """Everything that can be stripped: scaled graphs, and those in mixed precision."""
    linear, two, descent, *_ = originals()
    return (
        *(scaled for _, scaled in pairs()),
        gs.autocast(two).model,
        gs.autocast(linear, emulate=True).model,
        gs.scale(gs.autocast(descent).model).model,
    )


@functools.cache
def portable_pairs() -> tuple[tuple[onnx.ModelProto, onnx.ModelProto], ...]:
    """Pairs of `pairs` that stock ONNX Runtime runs on a CPU."""
    domains = {"", "graphscale"}
    return tuple(pair for pair in pairs() if {imported.domain for imported in pair[1].opset_import} <= domains)
