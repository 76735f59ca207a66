"""Recipes of the derivatives of activations."""

from __future__ import annotations

from tests.passes.training_ops.cases import Case
from tests.passes.training_ops.drawing import Draw, recipe


@recipe("ReluGrad LeakyReluGrad SigmoidGrad TanhGrad GeluGrad FastGeluGrad QuickGeluGrad")
def draw_activation(draw: Draw) -> Case:
    shape = draw.shape()
    has_alpha = draw.op in ("LeakyReluGrad", "QuickGeluGrad")
    attributes = draw.options(alpha=(0.25, 0.0, 1.5)) if has_alpha else {}
    return draw.case(draw.floats(shape), draw.floats(shape), attributes=attributes)


@recipe("BiasGeluGrad_dX BiasFastGeluGrad_dX")
def draw_biased_activation(draw: Draw) -> Case:
    # The kernels divide by the size of the bias.
    shape = draw.shape(1, empty=False)
    return draw.case(draw.floats(shape), draw.floats(shape), draw.floats(shape[-1:]))
