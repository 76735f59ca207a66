"""com.microsoft: operators of ONNX Runtime's training and fused graphs, forward and backward, and its optimizers."""

from __future__ import annotations

import dataclasses
from typing import Any

import onnx_ir as ir

from graphscale.operators.columns import (
    ALLOW,
    CLEAR,
    FIRST,
    INFER,
    KEPT,
    LINEAR,
    LOST,
    MULTIPLIED,
    NONLINEAR,
    PICKED,
    SUMMED,
    TESTED,
    WEIGHTED,
    Kind,
    Rule,
    Trait,
    deny,
    infer,
)
from graphscale.operators.table import MICROSOFT, PREVIEW_TRAINING, Optimizer, Survivals, attribute, row

_LOSS = deny("the loss stays float32")
_STEPS = deny("rounding adds up over the time steps")
_PROBABILITIES = deny("sums of products of small probabilities")
_CONTRIBUTIONS = deny("many contributions add up in the result's type")
_DEGREE_0 = Rule(Kind.DEGREE_0)
_HOMOGENEOUS = ("", "Relu", "LeakyRelu")


def _resolve_activation(node: ir.Node, rule: Rule) -> Rule:
    """Return the rule of a product before its activation."""
    homogeneous = attribute(node, "activation", "") in _HOMOGENEOUS
    return rule if homogeneous else dataclasses.replace(rule, kind=Kind.NONLINEAR)


def _survive_activation(node: ir.Node) -> Survivals:
    """Return the survival in a product before its activation."""
    return LOST if attribute(node, "activation", "") else WEIGHTED


def _resolve_scale(node: ir.Node, rule: Rule) -> Rule:
    """Return the rule of Scale, which an attribute makes a division."""
    return Rule(Kind.QUOTIENT, data=(0, 1)) if attribute(node, "scale_down", 0) else rule


# --- moves ------------------------------------------------------------------------------------------------------------
row("View", FIRST, Trait.MOVE | Trait.SHARES_BUFFER, CLEAR, domain=MICROSOFT, survival=KEPT)
row("SplitTraining", FIRST, Trait.MOVE, CLEAR, domain=MICROSOFT, survival=KEPT)
row("ConcatTraining", Rule(Kind.LINEAR, outputs=(0,)), Trait.MOVE, CLEAR, domain=MICROSOFT, survival=KEPT)
row("ExpandDims", FIRST, Trait.RESHAPE | Trait.MOVE | Trait.SHARES_BUFFER, domain=MICROSOFT, survival=KEPT)
_PART = Trait.PART | Trait.MOVE
row("GatherND ShrunkenGather Trilu", FIRST, _PART, domain=MICROSOFT, survival=PICKED)
row("PadAndUnflatten", FIRST, Trait.MOVE, domain=MICROSOFT, survival=KEPT)
row("FlattenAndUnpad", Rule(Kind.LINEAR, data=(0,), outputs=(0,)), _PART, domain=MICROSOFT, survival=PICKED)
row("PassThrough", LINEAR, Trait.SHARES_BUFFER, domain=MICROSOFT, survival=KEPT)

# --- sums and products ------------------------------------------------------------------------------------------------
_product = Rule(Kind.PRODUCT, data=(0, 1), contraction=True)
_biased = Rule(Kind.PRODUCT, data=(0, 1), addends=(2,), contraction=True)
_fused_convolution = Rule(Kind.PRODUCT, data=(0, 1), addends=(2, 3), contraction=True)
row("FusedMatMul TransposeMatMul", _product, casting=ALLOW, domain=MICROSOFT, survival=MULTIPLIED)
_activated: dict[str, Any] = {"domain": MICROSOFT, "resolve": _resolve_activation, "survival": _survive_activation}
row("FusedGemm", _biased, casting=ALLOW, **_activated)
row("FusedConv", _fused_convolution, casting=ALLOW, **_activated)
_scaled = Rule(Kind.PRODUCT, data=(0, 1))
row("Scale", _scaled, casting=INFER, domain=MICROSOFT, resolve=_resolve_scale, survival={0: MULTIPLIED})
row("BatchScale", FIRST, casting=INFER, domain=MICROSOFT, survival=MULTIPLIED)
row("ScaledSum", LINEAR, casting=INFER, domain=MICROSOFT, survival=MULTIPLIED)
row("ReduceSumTraining", FIRST, Trait.REDUCTION, INFER, domain=MICROSOFT, survival=SUMMED)
row("NcclAllReduce NcclAllGather NcclReduceScatter", LINEAR, domain=MICROSOFT, survival=SUMMED)

# --- dropout ----------------------------------------------------------------------------------------------------------
_dropout = Rule(Kind.LINEAR, data=(0,), outputs=(0,))
_biased_dropout = Rule(Kind.LINEAR, data=(0, 1, 2), outputs=(0,))
row("BitmaskDropout", _dropout, Trait.RANDOM, infer(wide_inputs=(1,)), domain=MICROSOFT, survival=WEIGHTED)
row("BiasDropout", _biased_dropout, Trait.RANDOM, INFER, domain=MICROSOFT, survival=WEIGHTED)
row("BitmaskBiasDropout", _biased_dropout, Trait.RANDOM, domain=MICROSOFT, survival=WEIGHTED)
row("BiasSoftmaxDropout", NONLINEAR, Trait.RANDOM, domain=MICROSOFT)

# --- results without a scale ------------------------------------------------------------------------------------------
_test: dict[str, Any] = {"domain": MICROSOFT, "dtype": ir.DataType.BOOL, "survival": TESTED}
row("IsFinite IsAllFinite", _DEGREE_0, Trait.FINITENESS_TEST, **_test)
row("All Group", _DEGREE_0, domain=MICROSOFT, dtype=ir.DataType.BOOL)
row("BroadcastGradientArgs", _DEGREE_0, domain=MICROSOFT)

# --- not homogeneous --------------------------------------------------------------------------------------------------
row("Gelu FastGelu QuickGelu BiasGelu", NONLINEAR, casting=INFER, domain=MICROSOFT)
row("BiasSoftmax FakeQuant", NONLINEAR, domain=MICROSOFT)
row("SkipLayerNormalization SkipSimplifiedLayerNormalization", NONLINEAR, domain=MICROSOFT)
_statistics = infer(wide_inputs=(1, 2, 3, 4), wide_outputs=(1, 2, 3, 4))
_running = {3: 1, 4: 2}
row("BatchNormInternal", NONLINEAR, Trait.WRITES_INPUT, _statistics, domain=MICROSOFT, written=_running)
row("LSTMTraining GRUTraining", NONLINEAR, casting=_STEPS, domain=MICROSOFT)
row("SoftmaxCrossEntropy SoftmaxCrossEntropyLossInternal", NONLINEAR, casting=_LOSS, domain=MICROSOFT, class_axis=1)
_losses = "NegativeLogLikelihoodLossInternal NegativeLogLikelihoodLossInternal2"
row(_losses, NONLINEAR, casting=_LOSS, domain=MICROSOFT, class_axis=1)

# --- gradients: linear in the cotangent -------------------------------------------------------------------------------
_backward: dict[str, Any] = {"domain": MICROSOFT, "survival": WEIGHTED}
_first = Rule(Kind.LINEAR, data=(0,), gradient=True)
_third = Rule(Kind.LINEAR, data=(2,), gradient=True)
_sum = Rule(Kind.LINEAR, data=(0,), contraction=True, gradient=True)

row("ConvGrad ConvTransposeGrad", _sum, casting=ALLOW, **_backward)
row("ReluGrad SliceGrad", _first, casting=CLEAR, **_backward)
row("LeakyReluGrad SigmoidGrad TanhGrad DivGrad", _first, casting=INFER, **_backward)
row("GeluGrad FastGeluGrad QuickGeluGrad BiasGeluGrad_dX BiasFastGeluGrad_dX", _first, casting=INFER, **_backward)
row("DropoutGrad BitmaskDropoutGrad", _first, casting=infer(wide_inputs=(2,)), **_backward)
row("ResizeGrad", _first, casting=infer(wide_inputs=(2, 3)), **_backward)
_batch_statistics = infer(wide_inputs=(2, 3, 4), wide_outputs=(1, 2))
row("BatchNormalizationGrad", _first, casting=_batch_statistics, **_backward)
row("LayerNormalizationGrad", _first, casting=infer(wide_inputs=(3, 4)), **_backward)
row("SimplifiedLayerNormalizationGrad", _first, casting=infer(wide_inputs=(3,)), **_backward)
row("InvertibleLayerNormalizationGrad FakeQuantGrad", _first, **_backward)
row("SoftmaxGrad SoftmaxGrad_13 LogSoftmaxGrad LogSoftmaxGrad_13", _first, casting=_PROBABILITIES, **_backward)
row("SoftmaxDropoutGrad", _first, casting=_PROBABILITIES, **_backward)
row("SoftmaxCrossEntropyGrad SoftmaxCrossEntropyLossGrad", _first, casting=_LOSS, **_backward)
# Input 5 is added to the gradient.
_added = Rule(Kind.LINEAR, data=(0, 5), gradient=True)
row("SoftmaxCrossEntropyLossInternalGrad", _added, casting=_LOSS, **_backward)
row("GatherGrad GatherNDGrad", _third, casting=_CONTRIBUTIONS, **_backward)
row("GatherElementsGrad", _first, casting=_CONTRIBUTIONS, **_backward)
_lstm = Rule(Kind.LINEAR, data=(9, 10, 11), contraction=True, gradient=True)
row("LSTMGrad", _lstm, casting=_STEPS, **_backward)
row("GRUGrad", Rule(Kind.LINEAR, data=(8, 9), contraction=True, gradient=True), casting=_STEPS, **_backward)

# ONNX Runtime has these in the domain of ONNX.
row("AveragePoolGrad MaxPoolGrad", _first, casting=INFER, survival=WEIGHTED)
row("SparseSoftmaxCrossEntropyGrad", _first, casting=_LOSS, survival=WEIGHTED)

# --- optimizers and accumulators --------------------------------------------------------------------------------------
# Their operands are unscaled gradients. From ONNX Runtime's training operator schemas (orttraining), and from running
# the kernels of onnxruntime-training 1.19.2: the CPU kernel of AdamOptimizer ignores `update_signal` and `loss_scale`,
# so a step to be skipped is guarded at its outputs as well.
_WRITES = Trait.WRITES_INPUT | Trait.EFFECT
_sgd_v2 = Optimizer(update_signal=3, signal_shape=(1,), inputs=("learning_rate", "params", "gradients"))
_adam = Optimizer({0: 1, 1: 4, 2: 5, 3: 2, 5: 6}, update_signal=9, ignores_signal=True)
_moments = ("first_order_moments", "second_order_moments")
_adam_w = Optimizer(
    update_signal=6, signal_shape=(1,), inputs=("learning_rate", "step", "params", "gradients", *_moments)
)
# Groups of weight, gradient, two moments and a float16 copy of the weight, after the step counter.
_lamb = Optimizer({0: 4}, update_signal=0, group=(1, 5, 5))

row("SGDOptimizer", NONLINEAR, _WRITES, domain=MICROSOFT, optimizer=Optimizer({0: 1}))
row("SGDOptimizerV2", NONLINEAR, _WRITES, domain=MICROSOFT, optimizer=_sgd_v2)
row("AdamOptimizer", NONLINEAR, _WRITES, domain=MICROSOFT, optimizer=_adam)
row("AdamWOptimizer", NONLINEAR, _WRITES, domain=MICROSOFT, optimizer=_adam_w)
row("LambOptimizer", NONLINEAR, _WRITES, domain=MICROSOFT, optimizer=_lamb)
row("InplaceClipGradNorm", NONLINEAR, _WRITES, domain=MICROSOFT)
row("ZeroGradient", _DEGREE_0, _WRITES, domain=MICROSOFT)
# A running sum of gradients, kept in a buffer of the caller's: its operands must be unscaled, since the scale may
# change between two additions. An assignment leaves the old sum out.
_accumulated: dict[str, Any] = {"domain": MICROSOFT, "survival": {0: PICKED, 1: SUMMED}}
row("InPlaceAccumulator InPlaceAccumulatorV2", NONLINEAR, _WRITES | Trait.ACCUMULATOR, **_accumulated)
row("ReduceAllL2", NONLINEAR, domain=MICROSOFT)

# Operators of ONNX that return their results, and do not write.
row("Adagrad Adam Momentum", NONLINEAR, domain=PREVIEW_TRAINING)
