"""ai.onnx: constants, shapes, random numbers, control flow, sequences and optional values."""

from __future__ import annotations

import onnx_ir as ir

from graphscale.operators.columns import FIRST, KEPT, NONLINEAR, PICKED, Kind, Rule, Trait, deny
from graphscale.operators.table import row

_SHAPE, _DEGREE_0, _BODY = Rule(Kind.SHAPE), Rule(Kind.DEGREE_0), Rule(Kind.BODY)
_INDEX = ir.DataType.INT64

# --- results without a scale ------------------------------------------------------------------------------------------
row("Constant", _DEGREE_0, Trait.TOTAL)
row("ConstantOfShape", _DEGREE_0)
row("Range", NONLINEAR)
row("NonZero", _DEGREE_0, dtype=_INDEX)
row("HannWindow HammingWindow BlackmanWindow", _DEGREE_0)
row("Shape Size", _SHAPE, Trait.TOTAL, dtype=_INDEX)
row("EyeLike", _SHAPE)
row("RandomNormalLike RandomUniformLike", _SHAPE, Trait.RANDOM)
row("RandomNormal RandomUniform", _DEGREE_0, Trait.RANDOM)
row("Bernoulli Multinomial", NONLINEAR, Trait.RANDOM)

# --- subgraphs --------------------------------------------------------------------------------------------------------
row("If", _BODY, Trait.REMOVABLE_BY_CONDITION, deny("its bodies are treated by themselves"))
row("Loop Scan", _BODY, Trait.REMOVABLE, deny("rounding adds up over the time steps"))

# --- sequences and optional values ------------------------------------------------------------------------------------
row("Optional OptionalGetElement SplitToSequence", FIRST, Trait.SHARES_BUFFER, survival=KEPT)
row("SequenceAt", FIRST, Trait.SHARES_BUFFER, survival=PICKED)
row("ConcatFromSequence", FIRST, Trait.REMOVABLE, survival=KEPT)
# A sequence of gradients cannot be divided: its members are unscaled.
row("SequenceConstruct", Rule(Kind.LINEAR, unscaled_first=True), Trait.SHARES_BUFFER, survival=KEPT)
_inserted = Rule(Kind.LINEAR, data=(0, 1), unscaled_first=True)
row("SequenceInsert", _inserted, Trait.SHARES_BUFFER, survival=KEPT)
row("SequenceLength SequenceEmpty OptionalHasElement", _DEGREE_0)

# --- quantized numbers, text, boxes -----------------------------------------------------------------------------------
row("QuantizeLinear", NONLINEAR, like=2)
row("DequantizeLinear", NONLINEAR, like=1)
row("DynamicQuantizeLinear", Rule(Kind.NONLINEAR, outputs=(1,)))
row("MatMulInteger ConvInteger", NONLINEAR, dtype=ir.DataType.INT32)
row("QLinearMatMul QLinearConv", NONLINEAR, like=7)
row("NonMaxSuppression MelWeightMatrix", NONLINEAR)
row("StringNormalizer", _DEGREE_0)
