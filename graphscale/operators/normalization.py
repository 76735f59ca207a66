"""ai.onnx: normalization, losses, recurrent layers, attention."""

from __future__ import annotations

from graphscale.operators.casting import INFER, deny, infer
from graphscale.operators.rules import NONLINEAR
from graphscale.operators.table import row

_OWN_TYPE = deny("its statistics are computed in its operands' type")
_LOSS = deny("the loss stays float32")
_STEPS = deny("rounding adds up over the time steps")

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
