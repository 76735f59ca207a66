"""ai.onnx: contractions, pooling, sampling, reductions; activations, normalization, losses, recurrent layers."""

from __future__ import annotations

import onnx_ir as ir

from graphscale.operators.casting import ALLOW, CLEAR, INFER, deny, infer
from graphscale.operators.rules import FIRST, NONLINEAR, Kind, Rule
from graphscale.operators.table import attribute, row
from graphscale.operators.traits import Trait

_POWER = deny("powers leave the range of float16")
_EXPONENTIATES = deny("it exponentiates and sums; its small results are lost in float16")
_STATISTIC = deny("a mean is a statistic, the sum of a long axis")
_OWN_TYPE = deny("its statistics are computed in its operands' type")
_LOSS = deny("the loss stays float32")
_STEPS = deny("rounding adds up over the time steps")
_UNARY = Trait.ELEMENTWISE | Trait.TOTAL
_REDUCE = Trait.REDUCTION | Trait.TOTAL_BY_AXES
_DEGREE_0 = Rule(Kind.DEGREE_0)


def _resolve_gemm(node: ir.Node, rule: Rule) -> Rule:
    """Return Gemm's rule: a beta of zero leaves the third operand out."""
    return rule if attribute(node, "beta", 1.0) else _without_addend


def _resolve_resize(node: ir.Node, rule: Rule) -> Rule:
    """Return Resize's rule: cropping fills the outside of the image with a number of degree 0."""
    crops = attribute(node, "coordinate_transformation_mode", "half_pixel") == "tf_crop_and_resize"
    return NONLINEAR if crops and attribute(node, "extrapolation_value", 0.0) else rule


def _resolve_causal_convolution(node: ir.Node, rule: Rule) -> Rule:
    """Return the rule of CausalConvWithState: linear, but for SiLU on the result."""
    return rule if attribute(node, "activation", "none") == "none" else NONLINEAR


# --- sums of products, pooling, sampling, transforms ------------------------------------------------------------------
_GREATEST = Trait.LOSES_NAN | Trait.LOSES_NEGATIVE
row("MatMul", Rule(Kind.PRODUCT, contraction=True), Trait.TOTAL_BY_SHAPES, ALLOW)
row("Einsum", Rule(Kind.PRODUCT, contraction=True), casting=ALLOW)
_convolution = Rule(Kind.PRODUCT, data=(0, 1), addends=(2,), contraction=True)
_without_addend = Rule(Kind.PRODUCT, data=(0, 1), ignored=(2,), contraction=True)
row("Gemm", _convolution, Trait.TOTAL_BY_SHAPES, ALLOW, resolve=_resolve_gemm)
row("Conv ConvTranspose", _convolution, casting=ALLOW)
# Operand 4 is a mask that multiplies; operand 2 says where to sample.
row("DeformConv", Rule(Kind.PRODUCT, data=(0, 1, 4), addends=(3,), contraction=True))

row("AveragePool GlobalAveragePool", FIRST, casting=INFER)
row("MaxPool", Rule(Kind.LINEAR, data=(0,), outputs=(0,)), _GREATEST, CLEAR)
row("GlobalMaxPool", FIRST, _GREATEST, CLEAR)
row("LpPool GlobalLpPool", FIRST, casting=_POWER)
row("Resize", FIRST, casting=infer(wide_inputs=(1, 2)), resolve=_resolve_resize)
row("Upsample RoiAlign GridSample AffineGrid DFT STFT", FIRST)
row("MaxRoiPool", NONLINEAR)

# --- one number for all along some axes -------------------------------------------------------------------------------
row("ReduceSum ReduceL1", FIRST, _REDUCE | Trait.NONFINITE_OF_FIRST, INFER)
row("ReduceMean", FIRST, _REDUCE | Trait.NONFINITE_OF_FIRST, _STATISTIC)
row("ReduceMax", FIRST, Trait.REDUCTION | _GREATEST, CLEAR)
row("ReduceMin", FIRST, Trait.REDUCTION | Trait.LOSES_NAN | Trait.LOSES_INFINITY, CLEAR)
row("CumSum", FIRST, casting=_STATISTIC)
row("ReduceL2", Rule(Kind.POWER, data=(0,)), _REDUCE | Trait.NONFINITE_OF_FIRST, _POWER)
row("ReduceSumSquare", Rule(Kind.POWER, data=(0,), power=2), _REDUCE | Trait.NONFINITE_OF_FIRST, _POWER)
row("ReduceProd", NONLINEAR, Trait.REDUCTION, _POWER)
row("CumProd", NONLINEAR, casting=_POWER)
row("ReduceLogSum", NONLINEAR, Trait.REDUCTION, _EXPONENTIATES)
row("ReduceLogSumExp", NONLINEAR, Trait.REDUCTION | Trait.LOSES_NEGATIVE, _EXPONENTIATES)
row("ArgMax ArgMin", _DEGREE_0, Trait.LOSES_NAN | Trait.LOSES_INFINITY, CLEAR, dtype=ir.DataType.INT64)

# --- activations, softmax, dropout ------------------------------------------------------------------------------------
row("Relu", FIRST, _UNARY | Trait.LOSES_NEGATIVE, CLEAR)
row("LeakyRelu", FIRST, _UNARY, INFER)
row("PRelu", FIRST, Trait.ELEMENTWISE | Trait.TOTAL_BY_SHAPES, INFER)
row("Tanh Sigmoid Erf Softsign HardSigmoid", NONLINEAR, _UNARY | Trait.LOSES_INFINITY, INFER)
row("Elu Selu Celu Softplus ThresholdedRelu", NONLINEAR, _UNARY | Trait.LOSES_NEGATIVE, INFER)
row("HardSwish Gelu Mish Swish", NONLINEAR, _UNARY, INFER)
row("Shrink", NONLINEAR, _UNARY)
row("Softmax", NONLINEAR, Trait.TOTAL | Trait.LOSES_NEGATIVE, _EXPONENTIATES)
row("LogSoftmax", NONLINEAR, Trait.TOTAL, _EXPONENTIATES)
row("Hardmax", NONLINEAR)
# swish(a) * b: linear in its second operand.
row("SwiGLU", Rule(Kind.LINEAR, data=(1,)), Trait.ELEMENTWISE, INFER)
row("Dropout", Rule(Kind.LINEAR, data=(0,), outputs=(0,)), Trait.RANDOM | Trait.REMOVABLE, infer(wide_inputs=(1,)))

# --- normalization, losses, recurrent layers, attention ---------------------------------------------------------------
# Statistics stay float32: the running ones, those that are saved for the backward pass, and the sums that give them.
_statistics = infer(wide_inputs=(1, 2, 3, 4), wide_outputs=(1, 2, 3, 4))
row("BatchNormalization", NONLINEAR, casting=_statistics, overwritten=(3, 4))
# ONNX Runtime has the second in the domain of ONNX, too.
row("LayerNormalization SimplifiedLayerNormalization", NONLINEAR, casting=infer(wide_outputs=(1, 2)))
row("GroupNormalization RMSNormalization", NONLINEAR, casting=INFER)
row("InstanceNormalization LRN LpNormalization MeanVarianceNormalization", NONLINEAR, casting=_OWN_TYPE)

row("SoftmaxCrossEntropyLoss NegativeLogLikelihoodLoss", NONLINEAR, casting=_LOSS, class_axis=1)
row("SparseSoftmaxCrossEntropy", NONLINEAR, casting=_LOSS, class_axis=-1)

row("LSTM GRU RNN", NONLINEAR, casting=_STEPS)
row("Attention RotaryEmbedding", NONLINEAR)
# Each rule of its update is linear in the values and the state together, by query, key, decay and rate.
row("LinearAttention", Rule(Kind.LINEAR, data=(2, 3)))
# By the weight, the results are linear in the input, the bias and the state, which is the end of earlier inputs.
row("CausalConvWithState", Rule(Kind.LINEAR, data=(0, 2, 3)), resolve=_resolve_causal_convolution)
row("Det", NONLINEAR, casting=deny("its exponent is all that float16 has"))
