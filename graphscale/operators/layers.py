"""ai.onnx: contractions, pooling, sampling, reductions; activations, normalization, losses, recurrent layers."""

from __future__ import annotations

import onnx_ir as ir

from graphscale.operators.columns import (
    ALLOW,
    BOUNDED,
    BOUNDED_BELOW,
    CLEAR,
    FIRST,
    GREATEST,
    INFER,
    KINDS,
    LEAST,
    LOST,
    MULTIPLIED,
    NONLINEAR,
    SIZE,
    SUMMED,
    UNDEFINED,
    WEIGHTED,
    Fate,
    Kind,
    Rule,
    Survival,
    Trait,
    deny,
    infer,
)
from graphscale.operators.table import Survivals, attribute, row

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


def _survive_gemm(node: ir.Node) -> Survivals:
    """Return the survival in Gemm: kernels need not read operands with a coefficient of zero."""
    product, addend = (MULTIPLIED if attribute(node, name, 1.0) else WEIGHTED for name in ("alpha", "beta"))
    return {0: product, 1: product, 2: addend}


def _survive_einsum(node: ir.Node) -> Survivals:
    """Return the survival in Einsum: a diagonal leaves numbers out."""
    terms = attribute(node, "equation", "").partition("->")[0].replace(" ", "").split(",")
    return MULTIPLIED if all(len(set(term)) == len(term) for term in terms) else WEIGHTED


def _resolve_resize(node: ir.Node, rule: Rule) -> Rule:
    """Return Resize's rule: cropping fills the outside of the image with a number of degree 0."""
    crops = attribute(node, "coordinate_transformation_mode", "half_pixel") == "tf_crop_and_resize"
    return NONLINEAR if crops and attribute(node, "extrapolation_value", 0.0) else rule


def _resolve_causal_convolution(node: ir.Node, rule: Rule) -> Rule:
    """Return the rule of CausalConvWithState: linear, but for SiLU on the result."""
    return rule if attribute(node, "activation", "none") == "none" else NONLINEAR


# --- sums of products, pooling, sampling, transforms ------------------------------------------------------------------
_product = Rule(Kind.PRODUCT, contraction=True)
row("MatMul", _product, Trait.TOTAL_BY_SHAPES, ALLOW, survival=MULTIPLIED)
row("Einsum", _product, casting=ALLOW, survival=_survive_einsum)
_convolution = Rule(Kind.PRODUCT, data=(0, 1), addends=(2,), contraction=True)
_without_addend = Rule(Kind.PRODUCT, data=(0, 1), ignored=(2,), contraction=True)
row("Gemm", _convolution, Trait.TOTAL_BY_SHAPES, ALLOW, resolve=_resolve_gemm, survival=_survive_gemm)
row("Conv ConvTranspose", _convolution, casting=ALLOW, survival=WEIGHTED)
# Operand 4 is a mask that multiplies; operand 2 says where to sample.
row("DeformConv", Rule(Kind.PRODUCT, data=(0, 1, 4), addends=(3,), contraction=True), survival=WEIGHTED)

row("AveragePool", FIRST, casting=INFER, survival=SUMMED.with_fate(Fate.GONE))
row("GlobalAveragePool", FIRST, casting=INFER, survival=SUMMED)
row(
    "MaxPool",
    Rule(Kind.LINEAR, data=(0,), outputs=(0,)),
    casting=CLEAR,
    survival=GREATEST.with_fate(Fate.GONE | Fate.TOLD),
)
row("GlobalMaxPool", FIRST, casting=CLEAR, survival=GREATEST)
row("LpPool", FIRST, casting=_POWER, survival=SIZE.with_fate(Fate.GONE))
row("GlobalLpPool", FIRST, casting=_POWER, survival=SIZE)
row("Resize", FIRST, casting=infer(wide_inputs=(1, 2)), resolve=_resolve_resize, survival=WEIGHTED)
row("Upsample GridSample AffineGrid DFT STFT", FIRST, survival=WEIGHTED)
row("RoiAlign", FIRST)
row("MaxRoiPool", NONLINEAR)

# --- one number for all along some axes -------------------------------------------------------------------------------
row("ReduceSum", FIRST, _REDUCE, INFER, survival=SUMMED)
# Without axes, kernels may return the operand itself.
row("ReduceL1", FIRST, _REDUCE, INFER, survival=Survival(Fate.PLUS, Fate.PLUS | Fate.MINUS, Fate.NAN))
row("ReduceMean", FIRST, _REDUCE, _STATISTIC, survival=SUMMED)
row("ReduceMax", FIRST, Trait.REDUCTION, CLEAR, survival=GREATEST)
row("ReduceMin", FIRST, Trait.REDUCTION, CLEAR, survival=LEAST)
row("CumSum", FIRST, casting=_STATISTIC, survival=SUMMED.with_fate(Fate.GONE))
row("ReduceL2", Rule(Kind.POWER, data=(0,)), _REDUCE, _POWER, survival=SIZE)
row("ReduceSumSquare", Rule(Kind.POWER, data=(0,), power=2), _REDUCE, _POWER, survival=SIZE)
row("ReduceProd", NONLINEAR, Trait.REDUCTION, _POWER, survival=MULTIPLIED)
row("CumProd", NONLINEAR, casting=_POWER, survival=WEIGHTED)
row("ReduceLogSum", NONLINEAR, Trait.REDUCTION, _EXPONENTIATES, survival=SUMMED)
row("ReduceLogSumExp", NONLINEAR, Trait.REDUCTION, _EXPONENTIATES, survival=BOUNDED_BELOW.with_fate(Fate.NAN))
row("ArgMax ArgMin", _DEGREE_0, casting=CLEAR, dtype=ir.DataType.INT64)

# --- activations, softmax, dropout ------------------------------------------------------------------------------------
row("Relu", FIRST, _UNARY, CLEAR, survival=BOUNDED_BELOW)
_SLOPED = Survival(Fate.PLUS | Fate.NAN, MULTIPLIED.minus, Fate.NAN)
row("LeakyRelu", FIRST, _UNARY, INFER, survival=_SLOPED)
row("PRelu", FIRST, Trait.ELEMENTWISE | Trait.TOTAL_BY_SHAPES, INFER, survival={0: _SLOPED, 1: WEIGHTED})
row("Tanh Sigmoid Softsign HardSigmoid", NONLINEAR, _UNARY, INFER, survival=BOUNDED)
# The rows without a survival lose NaN as well: kernels compare it, and take another branch.
row("Erf", NONLINEAR, _UNARY, INFER)
row("Elu Selu Celu Softplus", NONLINEAR, _UNARY, INFER, survival=BOUNDED_BELOW)
row("ThresholdedRelu", NONLINEAR, _UNARY, INFER, survival=Survival(Fate.PLUS, LOST.minus, LOST.nan))
row("HardSwish Gelu Mish Swish", NONLINEAR, _UNARY, INFER, survival=BOUNDED_BELOW.with_fate(Fate.NAN))
row("Shrink", NONLINEAR, _UNARY, survival=Survival(Fate.PLUS, Fate.MINUS, LOST.nan))
row("Softmax", NONLINEAR, Trait.TOTAL, _EXPONENTIATES, survival=Survival(Fate.NAN, LOST.minus | Fate.NAN, Fate.NAN))
# The other elements of an axis are finite.
_BESIDE = Fate.MINUS | Fate.NAN | Fate.BENT
row("LogSoftmax", NONLINEAR, Trait.TOTAL, _EXPONENTIATES, survival=Survival(_BESIDE, _BESIDE, _BESIDE))
row("Hardmax", NONLINEAR)
# swish(a) * b: linear in its second operand.
row("SwiGLU", Rule(Kind.LINEAR, data=(1,)), Trait.ELEMENTWISE, INFER, survival=MULTIPLIED)
_dropout = Rule(Kind.LINEAR, data=(0,), outputs=(0,))
row("Dropout", _dropout, Trait.RANDOM | Trait.REMOVABLE, infer(wide_inputs=(1,)), survival=WEIGHTED)

# --- normalization, losses, recurrent layers, attention ---------------------------------------------------------------
# Statistics stay float32: the running ones, those that are saved for the backward pass, and the sums that give them.
_statistics = infer(wide_inputs=(1, 2, 3, 4), wide_outputs=(1, 2, 3, 4))
# A statistic of the operand divides it, or the numbers beside it.
_NORMALIZED = {0: MULTIPLIED, 1: MULTIPLIED, 2: SUMMED}
_DIVIDED = {0: Survival(KINDS, KINDS, KINDS).with_fate(Fate.BENT), 1: MULTIPLIED, 2: SUMMED}
row("BatchNormalization", NONLINEAR, casting=_statistics, overwritten=(3, 4), survival=_NORMALIZED)
# ONNX Runtime has the second in the domain of ONNX, too.
_layer = "LayerNormalization SimplifiedLayerNormalization"
row(_layer, NONLINEAR, casting=infer(wide_outputs=(1, 2)), survival=_DIVIDED)
row("GroupNormalization RMSNormalization", NONLINEAR, casting=INFER, survival=_DIVIDED)
row("InstanceNormalization", NONLINEAR, casting=_OWN_TYPE, survival=_NORMALIZED)
row("LRN LpNormalization", NONLINEAR, casting=_OWN_TYPE, survival=_DIVIDED)
row("MeanVarianceNormalization", NONLINEAR, casting=_OWN_TYPE, survival=UNDEFINED)

row("SoftmaxCrossEntropyLoss NegativeLogLikelihoodLoss", NONLINEAR, casting=_LOSS, class_axis=1)
row("SparseSoftmaxCrossEntropy", NONLINEAR, casting=_LOSS, class_axis=-1)

row("LSTM GRU RNN", NONLINEAR, casting=_STEPS)
row("Attention RotaryEmbedding", NONLINEAR)
# Each rule of its update is linear in the values and the state together, by query, key, decay and rate.
row("LinearAttention", Rule(Kind.LINEAR, data=(2, 3)), survival=MULTIPLIED)
# By the weight, the results are linear in the input, the bias and the state, which is the end of earlier inputs.
row("CausalConvWithState", Rule(Kind.LINEAR, data=(0, 2, 3)), resolve=_resolve_causal_convolution)
row("Det", NONLINEAR, casting=deny("its exponent is all that float16 has"), survival=MULTIPLIED)
