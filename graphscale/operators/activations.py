"""ai.onnx: activations, softmax, dropout."""

from __future__ import annotations

from graphscale.operators.casting import CLEAR, INFER, deny, infer
from graphscale.operators.rules import FIRST, NONLINEAR, Kind, Rule
from graphscale.operators.table import row
from graphscale.operators.traits import Trait

_UNARY = Trait.ELEMENTWISE | Trait.TOTAL
_EXPONENTIATES = deny("it exponentiates and sums; its small results are lost in float16")

row("Relu", FIRST, _UNARY, CLEAR)
row("LeakyRelu", FIRST, _UNARY, INFER)
row("PRelu", FIRST, Trait.ELEMENTWISE | Trait.TOTAL_BY_SHAPES, INFER)
row("Tanh Sigmoid Erf Softsign HardSigmoid", NONLINEAR, _UNARY | Trait.LOSES_INFINITY, INFER)
row("Elu Selu Celu Softplus HardSwish Gelu Mish Swish ThresholdedRelu", NONLINEAR, _UNARY, INFER)
row("Shrink", NONLINEAR, _UNARY)
row("Softmax LogSoftmax", NONLINEAR, Trait.TOTAL, _EXPONENTIATES)
row("Hardmax SwiGLU", NONLINEAR)
_dropout = Rule(Kind.LINEAR, data=(0,), outputs=(0,))
row("Dropout", _dropout, Trait.RANDOM | Trait.REMOVABLE, infer(wide_inputs=(1,)))
