"""The sets of operators that modules derive from the table, by name: a change to a fact shows here."""

from __future__ import annotations

import importlib

import pytest

SETS = {
    "graphscale.analysis.branches:_ELEMENTWISE": "Abs Add Div Max Min Mul Neg Pow Sqrt Sub Where",
    "graphscale.analysis.failures:_UNARY": (
        "Abs Cast Ceil Constant Cos Erf Exp Floor Identity IsInf IsNaN Log LogSoftmax Neg Not Reciprocal Relu "
        "Round Shape Sigmoid Sign Sin Size Softmax Sqrt Tanh Transpose"
    ),
    "graphscale.analysis.failures:_REDUCTIONS": "ReduceL1 ReduceL2 ReduceMean ReduceSum ReduceSumSquare",
    "graphscale.analysis.failures:_ELEMENTWISE": "Add And Div Equal Greater GreaterOrEqual Less LessOrEqual Max Mean Min Mul Or Pow Sub Sum Where Xor",
    "graphscale.analysis.recomputed:_RANDOM": "Bernoulli Dropout Multinomial RandomNormal RandomNormalLike RandomUniform RandomUniformLike",
    "graphscale.analysis.recomputed:_COMMUTATIVE": "Add Max Min Mul Sum",
    "graphscale.analysis.solve:_VIEWS": "Cast Flatten Identity Reshape Squeeze Transpose Unsqueeze",
    "graphscale.analysis.updates:_DIRECT": "Cast Clip Expand Identity Max Min Reshape Squeeze Transpose Unsqueeze",
    "graphscale.analysis.views:PURE_VIEWS": (
        "Flatten Identity Optional OptionalGetElement Reshape SequenceAt SequenceConstruct SequenceInsert "
        "SplitToSequence Squeeze Transpose Unsqueeze"
    ),
    "graphscale.analysis.views:_VIEWS": "Cast Clip Concat ConcatFromSequence Dropout Expand Loop Max Mean Min Pad Scan Slice Split Sum Tile",
    "graphscale.analysis.views:_SELECTIONS": "If Where",
    "graphscale.analysis.views:_FACTORS": "Add Div Mul Sub",
    "graphscale.graph.types:_FLAGS": "And IsInf IsNaN Not Or Xor",
    "graphscale.graph.types:_INDICES": "ArgMax ArgMin NonZero Shape Size",
    "graphscale.checks.linting.check_search:_SINGLE": "Cast Flatten Identity Reshape Squeeze Unsqueeze",
    "graphscale.checks.linting.checking:_PASSED": "Cast Clip Identity Max Min Reshape Where",
    "graphscale.checks.linting.guarding:_VIEWS": "Cast Identity Reshape",
    "graphscale.checks.linting.scale_search:_TESTS": "IsAllFinite IsInf IsNaN",
    "graphscale.checks.linting.scale_search:_REDUCTIONS": "If IsAllFinite IsInf IsNaN Loop Scan",
    "graphscale.checks.linting.scaling:_BOUNDS": "Clip Max Min",
    "graphscale.checks.linting.scaling:_VIEWS": "Cast Identity Reshape Squeeze",
    "graphscale.checks.linting.steps:_VIEWS": "Cast Expand Flatten Identity Reshape Squeeze Tile Unsqueeze",
    "graphscale.checks.linting.steps:_KEEPS_ZERO": "Abs Neg ReduceMax ReduceMean ReduceMin ReduceSum Relu Sqrt Transpose",
    "graphscale.checks.linting.tested:TESTS": "IsAllFinite IsFinite IsInf IsNaN",
    "graphscale.checks.linting.tested:COMPARISONS": "Equal Greater GreaterOrEqual Less LessOrEqual",
    "graphscale.checks.linting.tested:_LOSES_NAN": "ArgMax ArgMin GlobalMaxPool MaxPool ReduceMax ReduceMin TopK",
    "graphscale.checks.linting.tested:PARTIAL": "Gather GatherElements GatherND Slice TopK",
    "graphscale.checks.linting.tested:_BOUNDED": "Atan Clip Erf Min Reciprocal Sigmoid Sign Softsign Tanh",
    "graphscale.checks.linting.tested:_EXACT": "Abs Cast Expand Flatten Identity Neg Reshape Squeeze Tile Transpose Unsqueeze",
    "graphscale.checks.verification.finite_check:_ALL_OPERANDS": "Add Concat Mean Mul Sub Sum",
    "graphscale.checks.verification.finite_check:_FIRST_OPERAND": (
        "Abs Cast Div Expand Flatten Identity Neg ReduceMean ReduceSum Reshape Squeeze Tile Transpose Unsqueeze"
    ),
    "graphscale.checks.verification.finite_check:_KEEPS_INFINITY": "Abs Cast Expand Flatten Identity Neg Reshape Squeeze Tile",
    "graphscale.checks.verification.private:_RANDOM": (
        "Bernoulli BiasDropout BitmaskBiasDropout BitmaskDropout Dropout Multinomial RandomNormal "
        "RandomNormalLike RandomUniform RandomUniformLike SoftmaxDropout"
    ),
    "graphscale.checks.verification.ranges:_MOVES": (
        "Abs Cast Clip Concat Expand Flatten Gather GatherElements GatherND Identity Pad Reshape Slice Split "
        "Squeeze Tile Transpose Unsqueeze View Where"
    ),
    "graphscale.checks.verification.ranges:_WHOLE_MOVES": "Add Max Min Sub",
    "graphscale.checks.verification.ranges:_INDEXES_ONE_AXIS": "Gather GatherElements Scatter ScatterElements",
    "graphscale.checks.verification.ranges:_INDEXES_AXES": "GatherND ScatterND",
    "graphscale.checks.verification.ranges:_LABELS": (
        "NegativeLogLikelihoodLoss NegativeLogLikelihoodLossInternal NegativeLogLikelihoodLossInternal2 "
        "SoftmaxCrossEntropy SoftmaxCrossEntropyLoss SoftmaxCrossEntropyLossInternal "
        "SparseSoftmaxCrossEntropy"
    ),
    "graphscale.replicas.cut:_RANDOM": "Bernoulli Dropout Multinomial RandomNormal RandomNormalLike RandomUniform RandomUniformLike",
    "graphscale.session.selection:_DRAWS": "Bernoulli Dropout Multinomial RandomNormal RandomNormalLike RandomUniform RandomUniformLike",
    "graphscale.session.terms:_TABLES": "ScatterElements ScatterND",
    "graphscale.session.terms:_CONTRACTIONS": "Conv ConvTranspose Einsum Gemm MatMul",
    "graphscale.session.terms:_VIEWS": "Flatten Identity Neg Reshape Squeeze Transpose Unsqueeze",
    "graphscale.session.terms:_PARTS": "ReduceSum Slice Trilu",
    "graphscale.targets:_CPU_WIDE": "AveragePoolGrad ConvGrad LayerNormalizationGrad MaxPoolGrad SliceGrad SplitTraining",
}


@pytest.mark.parametrize("place", SETS)
def test_set(place: str) -> None:
    module, name = place.split(":")
    assert sorted(getattr(importlib.import_module(module), name)) == SETS[place].split()
