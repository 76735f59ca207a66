"""The operators with each trait, by name: a change to a fact of the table shows here."""

from __future__ import annotations

import pytest

from graphscale.operators import Trait
from graphscale.operators.table import operators_with

SETS = {
    Trait.RESHAPE: "Flatten Identity Reshape Squeeze Unsqueeze microsoft.ExpandDims",
    Trait.CAST: "Cast CastLike",
    Trait.PERMUTE: "DepthToSpace ReverseSequence SpaceToDepth Transpose",
    Trait.REPEAT: "Expand Tile",
    Trait.SIGN: "Abs Neg",
    Trait.WINDOW: "Gather Slice Split",
    Trait.PART: (
        "CenterCropPad Compress Gather GatherElements GatherND Slice TopK Trilu "
        "microsoft.FlattenAndUnpad microsoft.GatherND microsoft.ShrunkenGather microsoft.Trilu"
    ),
    Trait.MOVE: (
        "Abs Cast CastLike CenterCropPad Clip Compress Concat DepthToSpace Expand Flatten Gather GatherElements "
        "GatherND Identity Pad Reshape ReverseSequence Slice SpaceToDepth Split Squeeze Tile Transpose Trilu "
        "Unique Unsqueeze Where microsoft.ConcatTraining microsoft.ExpandDims "
        "microsoft.FlattenAndUnpad microsoft.GatherND microsoft.PadAndUnflatten microsoft.ShrunkenGather "
        "microsoft.SplitTraining microsoft.Trilu microsoft.View"
    ),
    Trait.ELEMENTWISE: (
        "Abs Acos Acosh Add And Asin Asinh Atan Atanh BitShift BitwiseAnd BitwiseNot BitwiseOr BitwiseXor Cast "
        "CastLike Ceil Celu Clip Cos Cosh Div Elu Equal Erf Exp Floor Gelu Greater GreaterOrEqual HardSigmoid "
        "HardSwish Identity IsInf IsNaN LeakyRelu Less LessOrEqual Log Max Mean Min Mish Mod Mul Neg Not Or PRelu "
        "Pow Reciprocal Relu Round Selu Shrink Sigmoid Sign Sin Sinh Softplus Softsign Sqrt Sub Sum SwiGLU Swish Tan "
        "Tanh ThresholdedRelu Where Xor"
    ),
    Trait.COMMUTATIVE: "Add And BitwiseAnd BitwiseOr BitwiseXor Equal Max Mean Min Mul Or Sum Xor",
    Trait.BOUND: "Clip Max Min",
    Trait.REDUCTION: (
        "ReduceL1 ReduceL2 ReduceLogSum ReduceLogSumExp ReduceMax ReduceMean ReduceMin ReduceProd ReduceSum "
        "ReduceSumSquare microsoft.ReduceSumTraining"
    ),
    Trait.FINITENESS_TEST: "IsInf IsNaN microsoft.IsAllFinite microsoft.IsFinite",
    Trait.RANDOM: (
        "Bernoulli Dropout Multinomial RandomNormal RandomNormalLike RandomUniform RandomUniformLike "
        "microsoft.BiasDropout microsoft.BiasSoftmaxDropout microsoft.BitmaskBiasDropout microsoft.BitmaskDropout"
    ),
    Trait.WRITES_INPUT: (
        "microsoft.AdamOptimizer microsoft.AdamWOptimizer microsoft.BatchNormInternal "
        "microsoft.InPlaceAccumulator microsoft.InPlaceAccumulatorV2 microsoft.InplaceClipGradNorm "
        "microsoft.LambOptimizer microsoft.SGDOptimizer microsoft.SGDOptimizerV2 microsoft.ZeroGradient"
    ),
    Trait.EFFECT: (
        "microsoft.AdamOptimizer microsoft.AdamWOptimizer microsoft.InPlaceAccumulator "
        "microsoft.InPlaceAccumulatorV2 microsoft.InplaceClipGradNorm microsoft.LambOptimizer "
        "microsoft.SGDOptimizer microsoft.SGDOptimizerV2 microsoft.ZeroGradient"
    ),
    Trait.ACCUMULATOR: "microsoft.InPlaceAccumulator microsoft.InPlaceAccumulatorV2",
    Trait.TOTAL: (
        "Abs Acos Acosh Asin Asinh Atan Atanh BitwiseNot Cast CastLike Ceil Celu Constant Cos Cosh Elu Erf Exp "
        "Floor Gelu HardSigmoid HardSwish Identity IsInf IsNaN LeakyRelu Log LogSoftmax Mish Neg Not Reciprocal "
        "Relu Round Selu Shape Shrink Sigmoid Sign Sin Sinh Size Softmax Softplus Softsign Sqrt Swish Tan Tanh "
        "ThresholdedRelu Transpose"
    ),
    Trait.TOTAL_BY_AXES: "ReduceL1 ReduceL2 ReduceMean ReduceSum ReduceSumSquare",
    Trait.TOTAL_BY_SHAPES: (
        "Add And BitShift BitwiseAnd BitwiseOr BitwiseXor Div Equal Gemm Greater GreaterOrEqual Less LessOrEqual "
        "MatMul Max Mean Min Mul Or PRelu Pow Sub Sum Where Xor"
    ),
    Trait.SHARES_BUFFER: (
        "Flatten Identity Optional OptionalGetElement Reshape SequenceAt SequenceConstruct SequenceInsert "
        "SplitToSequence Squeeze Transpose Unsqueeze microsoft.ExpandDims microsoft.PassThrough microsoft.View"
    ),
    Trait.REMOVABLE: (
        "Cast CastLike Clip Concat ConcatFromSequence Dropout Expand Loop Max Mean Min Pad Scan Slice Split Sum Tile"
    ),
    Trait.REMOVABLE_BY_CONDITION: "If Where",
    Trait.REMOVABLE_BY_FACTOR: "Add Div Mul Sub",
    Trait.READS_FIRST: "Abs Add Div Max Min Mul Neg Pow Sqrt Sub Where",
    Trait.INDEXES_AXIS: "Gather GatherElements Scatter ScatterElements",
    Trait.INDEXES_AXES: "GatherND ScatterND",
}


@pytest.mark.parametrize("trait", Trait)
def test_operators_with_a_trait(trait: Trait) -> None:
    names = (f"{domain.split('.')[-1]}.{name}" if domain else name for domain, name in operators_with(trait))
    assert sorted(names) == SETS[trait].split()
