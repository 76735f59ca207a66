"""How each operator changes the degree of what flows through it: the rule table, as data.

The *degree* of a value is the power of a symbol S > 0 that it is multiplied by when some values of the graph are
multiplied by S: 0 for what S does not touch, 1 for a gradient of a scaled loss. Positive homogeneity counts: since
S > 0, Relu, Abs, Max and pooling keep the degree of what they are given.

The rules follow the operators' definitions in the ONNX specification (ai.onnx) and in ONNX Runtime's contrib and
training operator documentation (com.microsoft). To teach graphscale a new operator, add it to a line below.
"""

from __future__ import annotations

import dataclasses
import enum

__all__ = ["ALL", "IN_PLACE", "IN_PLACE_ACCUMULATORS", "MICROSOFT", "RULES", "Kind", "Rule", "rule_for"]

MICROSOFT = "com.microsoft"

# Stands for "all inputs" (or "all outputs") of an operator with a variable number of them.
ALL: tuple[int, ...] = (-1,)


class Kind(enum.Enum):
    """What an operator does to degrees."""

    LINEAR = "the data operands must agree in degree, and the result has it"
    PRODUCT = "the degrees of the factors add up"
    QUOTIENT = "the degree of the divisor is subtracted"
    COMPARE = "the operands must agree in degree; the result has degree 0"
    SHAPE = "the result depends on the shape of what goes in alone"
    DEGREE_0 = "the result has degree 0, whatever goes in"
    NONLINEAR = "everything that goes in must have degree 0"
    BODY = "the degrees follow from the operator's subgraphs"


@dataclasses.dataclass(frozen=True)
class Rule:
    """One operator's rule.

    Attributes:
        kind: what it does to degrees.
        data: the operands the rule speaks of; all others must have degree 0.
        addend: an operand that is added to the result of a product, such as the bias of Gemm.
        outputs: the outputs that have the resulting degree; all others have degree 0.
        contraction: sums products over an axis (MatMul, Conv): where float16 gains, and where coverage is measured.
        gradient: an operator of a backward pass; `data` is its upstream gradient, known for certain.
    """

    kind: Kind
    data: tuple[int, ...] = ALL
    addend: int | None = None
    outputs: tuple[int, ...] = ALL
    contraction: bool = False
    gradient: bool = False

    def operands(self, count: int) -> tuple[int, ...]:
        """The indices of the data operands of a node with `count` inputs."""
        return tuple(range(count)) if self.data == ALL else tuple(i for i in self.data if i < count)

    def has_degree(self, output: int) -> bool:
        """Whether the output of this index has the resulting degree."""
        return self.outputs == ALL or output in self.outputs


RULES: dict[tuple[str, str], Rule] = {}


def _add(rule: Rule, names: str, domain: str = "") -> None:
    for name in names.split():
        RULES[domain, name] = rule


def rule_for(domain: str, op_type: str) -> Rule | None:
    """Return the rule of an operator, or None if it is unknown."""
    return RULES.get(("" if domain == "ai.onnx" else domain, op_type))


# --- ai.onnx: the degree of the first input is kept -----------------------------------------------------------------
_first = Rule(Kind.LINEAR, data=(0,))
_add(
    _first,
    "Identity Neg Cast Reshape Flatten Transpose Squeeze Unsqueeze Expand Tile Slice Split Gather GatherND",
)
_add(_first, "GatherElements Compress ReduceSum ReduceMean ReduceMax ReduceMin ReduceL1 Relu LeakyRelu Abs")
_add(
    _first,
    "PRelu CumSum Trilu DepthToSpace SpaceToDepth ReverseSequence Upsample Resize Col2Im CenterCropPad",
)
_add(_first, "AveragePool GlobalAveragePool GlobalMaxPool LpPool GlobalLpPool MaxUnpool RoiAlign GridSample")
_add(_first, "AffineGrid DFT STFT Optional OptionalGetElement SequenceAt SplitToSequence ConcatFromSequence")
_add(_first, "CastLike")
_add(Rule(Kind.LINEAR, data=(0,), outputs=(0,)), "Dropout MaxPool TopK Unique")

# --- ai.onnx: operands that must agree ------------------------------------------------------------------------------
_all = Rule(Kind.LINEAR)
_add(_all, "Add Sub Sum Max Min Mean Concat")
# clip(S*x, S*low, S*high) = S*clip(x, low, high): the bounds are operands like x.
_add(Rule(Kind.LINEAR, data=(0, 1, 2)), "Clip")
_add(Rule(Kind.LINEAR, data=(1, 2)), "Where")
_add(Rule(Kind.LINEAR, data=(0, 2)), "ScatterElements ScatterND Scatter Pad")
_add(Rule(Kind.LINEAR, data=(2,)), "OneHot")
_add(Rule(Kind.LINEAR, data=(0, 1)), "TensorScatter")

# --- ai.onnx: products and quotients --------------------------------------------------------------------------------
_add(Rule(Kind.PRODUCT), "Mul")
_add(Rule(Kind.PRODUCT, contraction=True), "MatMul Einsum")
_add(Rule(Kind.PRODUCT, data=(0, 1), addend=2, contraction=True), "Gemm Conv ConvTranspose")
_add(Rule(Kind.PRODUCT, data=(0, 1), contraction=True), "DeformConv")
_add(Rule(Kind.QUOTIENT, data=(0, 1)), "Div")

# --- ai.onnx: results that carry no scale ---------------------------------------------------------------------------
_add(Rule(Kind.COMPARE), "Equal Greater GreaterOrEqual Less LessOrEqual")
_add(Rule(Kind.SHAPE), "Shape Size EyeLike RandomNormalLike RandomUniformLike")
_add(Rule(Kind.DEGREE_0), "IsNaN IsInf Sign ArgMax ArgMin Not And Or Xor")
_add(Rule(Kind.DEGREE_0), "Constant ConstantOfShape Range RandomNormal RandomUniform NonZero")
_add(
    Rule(Kind.DEGREE_0),
    "SequenceLength SequenceEmpty OptionalHasElement BitShift BitwiseAnd BitwiseOr BitwiseXor",
)
_add(Rule(Kind.DEGREE_0), "BitwiseNot HannWindow HammingWindow BlackmanWindow StringNormalizer Bernoulli")

# --- ai.onnx: not homogeneous (or of another degree than 1: unscaled first, so that S*S never arises) ---------------
_nonlinear = Rule(Kind.NONLINEAR)
# A sequence of gradients cannot be divided: its members are unscaled.
_add(_nonlinear, "SequenceConstruct SequenceInsert")
_add(
    _nonlinear,
    "Exp Log Sqrt Reciprocal Pow Mod Floor Ceil Round Sin Cos Tan Asin Acos Atan Sinh Cosh Tanh Asinh",
)
_add(
    _nonlinear,
    "Acosh Atanh Erf Sigmoid HardSigmoid HardSwish Softplus Softsign Elu Selu Celu Gelu Mish Swish",
)
_add(_nonlinear, "ThresholdedRelu Shrink Softmax LogSoftmax Hardmax ReduceL2 ReduceSumSquare ReduceLogSum")
_add(_nonlinear, "ReduceLogSumExp ReduceProd BatchNormalization InstanceNormalization LayerNormalization")
_add(_nonlinear, "GroupNormalization RMSNormalization LpNormalization MeanVarianceNormalization LRN Det")
_add(
    _nonlinear,
    "SoftmaxCrossEntropyLoss NegativeLogLikelihoodLoss LSTM GRU RNN Attention RotaryEmbedding CumProd",
)
_add(
    _nonlinear,
    "QuantizeLinear DequantizeLinear DynamicQuantizeLinear MatMulInteger ConvInteger QLinearMatMul",
)
_add(_nonlinear, "QLinearConv MaxRoiPool NonMaxSuppression Multinomial MelWeightMatrix BitCast")

# --- ai.onnx: operators with subgraphs ------------------------------------------------------------------------------
_add(Rule(Kind.BODY), "If Loop Scan")

# --- com.microsoft: gradient operators, linear in the upstream gradient dY ------------------------------------------
_dy_first = Rule(Kind.LINEAR, data=(0,), gradient=True)
_add(_dy_first, "ReluGrad LeakyReluGrad SigmoidGrad TanhGrad GeluGrad FastGeluGrad QuickGeluGrad", MICROSOFT)
_add(_dy_first, "BiasGeluGrad_dX BiasFastGeluGrad_dX SoftmaxGrad SoftmaxGrad_13 LogSoftmaxGrad", MICROSOFT)
_add(_dy_first, "LogSoftmaxGrad_13 DivGrad DropoutGrad BitmaskDropoutGrad SoftmaxDropoutGrad", MICROSOFT)
_add(_dy_first, "FakeQuantGrad ResizeGrad GatherElementsGrad SliceGrad LayerNormalizationGrad", MICROSOFT)
_add(_dy_first, "SimplifiedLayerNormalizationGrad InvertibleLayerNormalizationGrad", MICROSOFT)
_add(_dy_first, "BatchNormalizationGrad SoftmaxCrossEntropyGrad SoftmaxCrossEntropyLossGrad", MICROSOFT)
_add(_dy_first, "BinaryCrossEntropyGrad", MICROSOFT)
_add(_dy_first, "AveragePoolGrad MaxPoolGrad SparseSoftmaxCrossEntropyGrad")
_add(Rule(Kind.LINEAR, data=(0,), contraction=True, gradient=True), "ConvGrad ConvTransposeGrad", MICROSOFT)
_add(Rule(Kind.LINEAR, data=(2,), gradient=True), "GatherGrad GatherNDGrad", MICROSOFT)
# Input 5 is added to the gradient.
_add(Rule(Kind.LINEAR, data=(0, 5), gradient=True), "SoftmaxCrossEntropyLossInternalGrad", MICROSOFT)
_add(Rule(Kind.LINEAR, data=(9, 10, 11), contraction=True, gradient=True), "LSTMGrad", MICROSOFT)
_add(Rule(Kind.LINEAR, data=(8, 9), contraction=True, gradient=True), "GRUGrad", MICROSOFT)

# --- com.microsoft: linear helpers of ORT's training and fused graphs -----------------------------------------------
_add(_first, "SplitTraining ReduceSumTraining View BatchScale PadAndUnflatten ShrunkenGather Trilu", MICROSOFT)
_add(_first, "GatherND ExpandDims Crop", MICROSOFT)
_add(Rule(Kind.LINEAR, data=(0,), outputs=(0,)), "FlattenAndUnpad BitmaskDropout", MICROSOFT)
_add(Rule(Kind.LINEAR, outputs=(0,)), "ConcatTraining", MICROSOFT)
_add(Rule(Kind.LINEAR, data=(0, 1, 2), outputs=(0,)), "BiasDropout BitmaskBiasDropout", MICROSOFT)
_add(_all, "ScaledSum PassThrough NcclAllReduce NcclAllGather NcclReduceScatter", MICROSOFT)
_add(Rule(Kind.PRODUCT, data=(0, 1), contraction=True), "FusedMatMul TransposeMatMul", MICROSOFT)
_add(Rule(Kind.PRODUCT, data=(0, 1), addend=2, contraction=True), "FusedGemm FusedConv", MICROSOFT)
_add(Rule(Kind.PRODUCT, data=(0, 1)), "Scale", MICROSOFT)
_add(Rule(Kind.DEGREE_0), "BroadcastGradientArgs Group IsFinite IsAllFinite All ZeroGradient", MICROSOFT)

# --- com.microsoft: forward operators that are not homogeneous, and optimizers: they take unscaled gradients --------
_add(_nonlinear, "Gelu FastGelu QuickGelu BiasGelu BiasSoftmax BiasSoftmaxDropout BatchNormInternal", MICROSOFT)
_add(
    _nonlinear,
    "SoftmaxCrossEntropy SoftmaxCrossEntropyLossInternal NegativeLogLikelihoodLossInternal",
    MICROSOFT,
)
_add(
    _nonlinear,
    "NegativeLogLikelihoodLossInternal2 BinaryCrossEntropy LayerNormalization FakeQuant",
    MICROSOFT,
)
_add(
    _nonlinear,
    "SimplifiedLayerNormalization SkipLayerNormalization SkipSimplifiedLayerNormalization",
    MICROSOFT,
)
_add(
    _nonlinear,
    "LSTMTraining GRUTraining ReduceAllL2 InplaceClipGradNorm SGDOptimizer SGDOptimizerV2",
    MICROSOFT,
)
_add(_nonlinear, "AdamOptimizer AdamWOptimizer LambOptimizer AdagradOptimizer", MICROSOFT)
_add(_nonlinear, "SparseSoftmaxCrossEntropy SimplifiedLayerNormalization")
_add(_nonlinear, "Adagrad Adam Momentum", "ai.onnx.preview.training")

# A running sum of gradients, kept in a buffer of the caller's: what goes in must be unscaled, since the scale
# may change between two additions.
IN_PLACE_ACCUMULATORS = {(MICROSOFT, "InPlaceAccumulator"), (MICROSOFT, "InPlaceAccumulatorV2")}
_add(_nonlinear, "InPlaceAccumulator InPlaceAccumulatorV2", MICROSOFT)

# The operators whose effect is on their inputs: they take part in the step even if nothing reads their outputs.
IN_PLACE = IN_PLACE_ACCUMULATORS | {
    (MICROSOFT, name)
    for name in (
        *(
            "SGDOptimizer",
            "SGDOptimizerV2",
            "AdamOptimizer",
            "AdamWOptimizer",
            "LambOptimizer",
            "AdagradOptimizer",
        ),
        *("InplaceClipGradNorm", "ZeroGradient"),
    )
}
