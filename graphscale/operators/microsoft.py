"""com.microsoft: forward operators and helpers of ONNX Runtime's training and fused graphs."""

from __future__ import annotations

import dataclasses

import onnx_ir as ir

from graphscale.operators.casting import ALLOW, CLEAR, INFER, deny, infer
from graphscale.operators.rules import FIRST, LINEAR, NONLINEAR, Kind, Rule
from graphscale.operators.table import MICROSOFT, attribute, row
from graphscale.operators.traits import Trait

_LOSS = deny("the loss stays float32")
_DEGREE_0 = Rule(Kind.DEGREE_0)
_HOMOGENEOUS = ("", "Relu", "LeakyRelu")


def _resolve_activation(node: ir.Node, rule: Rule) -> Rule:
    """Return the rule of a product before its activation."""
    homogeneous = attribute(node, "activation", "") in _HOMOGENEOUS
    return rule if homogeneous else dataclasses.replace(rule, kind=Kind.NONLINEAR)


def _resolve_scale(node: ir.Node, rule: Rule) -> Rule:
    """Return the rule of Scale, which an attribute makes a division."""
    return Rule(Kind.QUOTIENT, data=(0, 1)) if attribute(node, "scale_down", 0) else rule


# --- moves ------------------------------------------------------------------------------------------------------------
row("View", FIRST, Trait.MOVE | Trait.SHARES_BUFFER, CLEAR, domain=MICROSOFT)
row("SplitTraining", FIRST, Trait.MOVE, CLEAR, domain=MICROSOFT)
row("ConcatTraining", Rule(Kind.LINEAR, outputs=(0,)), Trait.MOVE, CLEAR, domain=MICROSOFT)
row("ExpandDims", FIRST, Trait.RESHAPE | Trait.MOVE | Trait.SHARES_BUFFER | Trait.NONFINITE_OF_FIRST, domain=MICROSOFT)
row("GatherND ShrunkenGather Trilu", FIRST, Trait.PART | Trait.MOVE, domain=MICROSOFT)
row("PadAndUnflatten", FIRST, Trait.MOVE, domain=MICROSOFT)
row("FlattenAndUnpad", Rule(Kind.LINEAR, data=(0,), outputs=(0,)), Trait.PART | Trait.MOVE, domain=MICROSOFT)
row("PassThrough", LINEAR, Trait.SHARES_BUFFER, domain=MICROSOFT)

# --- sums and products ------------------------------------------------------------------------------------------------
_product = Rule(Kind.PRODUCT, data=(0, 1), contraction=True)
_biased = Rule(Kind.PRODUCT, data=(0, 1), addends=(2,), contraction=True)
_fused_convolution = Rule(Kind.PRODUCT, data=(0, 1), addends=(2, 3), contraction=True)
row("FusedMatMul TransposeMatMul", _product, casting=ALLOW, domain=MICROSOFT)
row("FusedGemm", _biased, casting=ALLOW, domain=MICROSOFT, resolve=_resolve_activation)
row("FusedConv", _fused_convolution, casting=ALLOW, domain=MICROSOFT, resolve=_resolve_activation)
row("Scale", Rule(Kind.PRODUCT, data=(0, 1)), casting=INFER, domain=MICROSOFT, resolve=_resolve_scale)
row("BatchScale", FIRST, casting=INFER, domain=MICROSOFT)
row("ScaledSum", LINEAR, casting=INFER, domain=MICROSOFT)
row("ReduceSumTraining", FIRST, Trait.REDUCTION, INFER, domain=MICROSOFT)
row("NcclAllReduce NcclAllGather NcclReduceScatter", LINEAR, domain=MICROSOFT)

# --- dropout ----------------------------------------------------------------------------------------------------------
_dropout = Rule(Kind.LINEAR, data=(0,), outputs=(0,))
_biased_dropout = Rule(Kind.LINEAR, data=(0, 1, 2), outputs=(0,))
row("BitmaskDropout", _dropout, Trait.RANDOM, infer(wide_inputs=(1,)), domain=MICROSOFT)
row("BiasDropout", _biased_dropout, Trait.RANDOM, INFER, domain=MICROSOFT)
row("BitmaskBiasDropout", _biased_dropout, Trait.RANDOM, domain=MICROSOFT)
row("BiasSoftmaxDropout", NONLINEAR, Trait.RANDOM, domain=MICROSOFT)

# --- results without a scale ------------------------------------------------------------------------------------------
_TEST = Trait.FINITENESS_TEST
row("IsFinite IsAllFinite", _DEGREE_0, _TEST, domain=MICROSOFT, dtype=ir.DataType.BOOL)
row("All Group", _DEGREE_0, domain=MICROSOFT, dtype=ir.DataType.BOOL)
row("BroadcastGradientArgs", _DEGREE_0, domain=MICROSOFT)

# --- not homogeneous --------------------------------------------------------------------------------------------------
row("Gelu FastGelu QuickGelu BiasGelu", NONLINEAR, casting=INFER, domain=MICROSOFT)
row("BiasSoftmax FakeQuant", NONLINEAR, domain=MICROSOFT)
row("SkipLayerNormalization SkipSimplifiedLayerNormalization", NONLINEAR, domain=MICROSOFT)
_statistics = infer(wide_inputs=(1, 2, 3, 4), wide_outputs=(1, 2, 3, 4))
_running = {3: 1, 4: 2}
row("BatchNormInternal", NONLINEAR, Trait.WRITES_INPUT, _statistics, domain=MICROSOFT, written=_running)
row("LSTMTraining GRUTraining", NONLINEAR, casting=deny("rounding adds up over the time steps"), domain=MICROSOFT)
_losses = "SoftmaxCrossEntropy SoftmaxCrossEntropyLossInternal"
row(_losses, NONLINEAR, casting=_LOSS, domain=MICROSOFT, class_axis=1)
_losses = "NegativeLogLikelihoodLossInternal NegativeLogLikelihoodLossInternal2"
row(_losses, NONLINEAR, casting=_LOSS, domain=MICROSOFT, class_axis=1)
