"""Which operators run in float16: the allow, infer, clear and deny lists, as data.

The lists are those of TensorFlow's graph rewrite (grappler's auto_mixed_precision), carried over to ONNX and to the
gradient operators of ONNX Runtime:

- allow: always in float16. They are where the time goes, and hardware adds up their products in float32.
- infer: safe in float16, but not worth a cast; in float16 between allowed operators, unless what a denied one gave
  reaches them.
- clear: they move, select or compare numbers and round none; in float16 wherever that saves a cast.
- deny: never in float16, each for a reason.
"""

from __future__ import annotations

import dataclasses
import enum

from graphscale.operators.rules import MICROSOFT

__all__ = ["Colour", "OpRule", "default_rules"]


class Colour(enum.Enum):
    """The list that an operator is on."""

    ALLOW = "allow"
    INFER = "infer"
    CLEAR = "clear"
    DENY = "deny"


@dataclasses.dataclass(frozen=True)
class OpRule:
    """How to treat an operator.

    Attributes:
        colour: its list.
        reason: for a denied one, why.
        wide_inputs: operands that stay float32 where the operator is in float16: statistics, ratios.
        wide_outputs: results that do.
    """

    colour: Colour
    reason: str = ""
    wide_inputs: tuple[int, ...] = ()
    wide_outputs: tuple[int, ...] = ()


_RULES: dict[tuple[str, str], OpRule] = {}


def _add(colour: Colour, names: str, domain: str = "", **options: tuple[int, ...]) -> None:
    for name in names.split():
        _RULES[domain, name] = OpRule(colour, **options)  # type: ignore[arg-type]


def _deny(reason: str, names: str, domain: str = "") -> None:
    for name in names.split():
        _RULES[domain, name] = OpRule(Colour.DENY, reason)


def default_rules() -> dict[tuple[str, str], OpRule]:
    """The rule of each known operator, by domain and name; an operator that is not there is denied."""
    return dict(_RULES)


# --- allow ----------------------------------------------------------------------------------------------------------
_add(Colour.ALLOW, "MatMul Gemm Conv ConvTranspose Einsum")
_add(Colour.ALLOW, "FusedMatMul TransposeMatMul FusedGemm FusedConv ConvGrad ConvTransposeGrad", MICROSOFT)

# --- infer ----------------------------------------------------------------------------------------------------------
_add(Colour.INFER, "Add Sub Mul Div Sum Mean Sqrt Reciprocal Tanh Sigmoid Erf Elu Selu Celu Softplus Softsign")
_add(Colour.INFER, "HardSigmoid HardSwish Gelu Mish Swish LeakyRelu PRelu ThresholdedRelu Sin Cos")
_add(Colour.INFER, "AveragePool GlobalAveragePool AveragePoolGrad MaxPoolGrad")
_add(Colour.INFER, "Resize", wide_inputs=(1, 2))
_add(Colour.INFER, "Dropout", wide_inputs=(1,))
_add(Colour.INFER, "DropoutGrad BitmaskDropoutGrad", MICROSOFT, wide_inputs=(2,))
_add(Colour.INFER, "BitmaskDropout", MICROSOFT, wide_inputs=(1,))
_add(Colour.INFER, "ReduceSum ReduceL1")
_add(Colour.INFER, "Gelu FastGelu QuickGelu BiasGelu GeluGrad FastGeluGrad QuickGeluGrad", MICROSOFT)
_add(Colour.INFER, "BiasGeluGrad_dX BiasFastGeluGrad_dX TanhGrad SigmoidGrad LeakyReluGrad DivGrad", MICROSOFT)
_add(Colour.INFER, "ReduceSumTraining ScaledSum Scale BatchScale BiasDropout", MICROSOFT)
_add(Colour.INFER, "ResizeGrad", MICROSOFT, wide_inputs=(2, 3))
# Statistics stay float32: the running ones, those that are saved for the backward pass, and the sums that give them.
_add(Colour.INFER, "BatchNormalization", wide_inputs=(1, 2, 3, 4), wide_outputs=(1, 2, 3, 4))
_add(Colour.INFER, "BatchNormInternal", MICROSOFT, wide_inputs=(1, 2, 3, 4), wide_outputs=(1, 2, 3, 4))
_add(Colour.INFER, "BatchNormalizationGrad", MICROSOFT, wide_inputs=(2, 3, 4), wide_outputs=(1, 2))
# ONNX Runtime has both in the domain of ONNX.
_add(Colour.INFER, "LayerNormalization SimplifiedLayerNormalization", wide_outputs=(1, 2))
_add(Colour.INFER, "LayerNormalizationGrad", MICROSOFT, wide_inputs=(3, 4))
_add(Colour.INFER, "SimplifiedLayerNormalizationGrad", MICROSOFT, wide_inputs=(3,))
_add(Colour.INFER, "GroupNormalization RMSNormalization")

# --- clear ----------------------------------------------------------------------------------------------------------
_add(Colour.CLEAR, "Identity Reshape Flatten Transpose Squeeze Unsqueeze Expand Tile Slice Split Gather GatherND")
_add(Colour.CLEAR, "GatherElements Concat Pad Where Relu Abs Neg Sign Max Min Clip MaxPool DepthToSpace Compress")
_add(Colour.CLEAR, "SpaceToDepth ReverseSequence Trilu ReduceMax ReduceMin TopK GlobalMaxPool")
_add(Colour.CLEAR, "Equal Greater GreaterOrEqual Less LessOrEqual ArgMax ArgMin")
_add(Colour.CLEAR, "SplitTraining ConcatTraining View ReluGrad SliceGrad", MICROSOFT)

# --- deny -----------------------------------------------------------------------------------------------------------
_deny("its result overflows float16 from 11.1 on", "Exp")
_deny("what float16 rounds to zero has no logarithm", "Log")
_deny("powers leave the range of float16", "Pow ReduceSumSquare ReduceL2 ReduceProd CumProd LpPool GlobalLpPool")
_deny("it exponentiates and sums; its small results are lost in float16", "Softmax LogSoftmax ReduceLogSumExp")
_deny("it exponentiates and sums; its small results are lost in float16", "ReduceLogSum")
_deny("sums of products of small probabilities", "SoftmaxGrad SoftmaxGrad_13 LogSoftmaxGrad", MICROSOFT)
_deny("sums of products of small probabilities", "LogSoftmaxGrad_13 SoftmaxDropoutGrad", MICROSOFT)
_deny("the loss stays float32", "SoftmaxCrossEntropyLoss NegativeLogLikelihoodLoss SparseSoftmaxCrossEntropy")
_deny("the loss stays float32", "SparseSoftmaxCrossEntropyGrad")
_deny("the loss stays float32", "SoftmaxCrossEntropy SoftmaxCrossEntropyLossInternal BinaryCrossEntropy", MICROSOFT)
_deny("the loss stays float32", "SoftmaxCrossEntropyGrad SoftmaxCrossEntropyLossGrad", MICROSOFT)
_deny("the loss stays float32", "SoftmaxCrossEntropyLossInternalGrad BinaryCrossEntropyGrad", MICROSOFT)
_deny("the loss stays float32", "NegativeLogLikelihoodLossInternal NegativeLogLikelihoodLossInternal2", MICROSOFT)
_deny("a mean is a statistic, the sum of a long axis", "ReduceMean CumSum")
_deny("its statistics are computed in its operands' type", "InstanceNormalization LRN LpNormalization")
_deny("its statistics are computed in its operands' type", "MeanVarianceNormalization")
_deny("many contributions add up in the result's type", "ScatterElements ScatterND Scatter MaxUnpool Col2Im")
_deny("many contributions add up in the result's type", "GatherGrad GatherNDGrad GatherElementsGrad", MICROSOFT)
_deny("rounding adds up over the time steps", "LSTM GRU RNN Loop Scan")
_deny("rounding adds up over the time steps", "LSTMTraining GRUTraining LSTMGrad GRUGrad", MICROSOFT)
_deny("its bodies are treated by themselves", "If")
_deny("its exponent is all that float16 has", "Sinh Cosh Tan Atanh Asinh Acosh Asin Acos Atan Mod Round Floor Ceil Det")
