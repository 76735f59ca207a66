"""ai.onnx: activations, softmax, dropout, normalization, losses, recurrent layers, attention."""

from __future__ import annotations

from graphscale.operators.casting import CLEAR, INFER, deny, infer
from graphscale.operators.rules import FIRST, NONLINEAR, Kind, Rule
from graphscale.operators.table import row
from graphscale.operators.traits import Trait

_UNARY = Trait.ELEMENTWISE | Trait.TOTAL
_EXPONENTIATES = deny("it exponentiates and sums; its small results are lost in float16")
_OWN_TYPE = deny("its statistics are computed in its operands' type")
_LOSS = deny("the loss stays float32")
_STEPS = deny("rounding adds up over the time steps")

row("Relu", FIRST, _UNARY | Trait.LOSES_NEGATIVE, CLEAR)
row("LeakyRelu", FIRST, _UNARY, INFER)
row("PRelu", FIRST, Trait.ELEMENTWISE | Trait.TOTAL_BY_SHAPES, INFER)
row("Tanh Sigmoid Erf Softsign HardSigmoid", NONLINEAR, _UNARY | Trait.LOSES_INFINITY, INFER)
row("Elu Selu Celu Softplus ThresholdedRelu", NONLINEAR, _UNARY | Trait.LOSES_NEGATIVE, INFER)
row("HardSwish Gelu Mish Swish", NONLINEAR, _UNARY, INFER)
row("Shrink", NONLINEAR, _UNARY)
row("Softmax", NONLINEAR, Trait.TOTAL | Trait.LOSES_NEGATIVE, _EXPONENTIATES)
row("LogSoftmax", NONLINEAR, Trait.TOTAL, _EXPONENTIATES)
row("Hardmax SwiGLU", NONLINEAR)
_dropout = Rule(Kind.LINEAR, data=(0,), outputs=(0,))
row("Dropout", _dropout, Trait.RANDOM | Trait.REMOVABLE, infer(wide_inputs=(1,)))

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
row("Attention RotaryEmbedding LinearAttention CausalConvWithState", NONLINEAR)
row("Det", NONLINEAR, casting=deny("its exponent is all that float16 has"))
