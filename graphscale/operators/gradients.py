"""com.microsoft: gradient operators of ONNX Runtime, linear in the upstream gradient."""

from __future__ import annotations

from graphscale.operators.casting import ALLOW, CLEAR, INFER, deny, infer
from graphscale.operators.rules import Kind, Rule
from graphscale.operators.table import MICROSOFT, row

_PROBABILITIES = deny("sums of products of small probabilities")
_LOSS = deny("the loss stays float32")
_CONTRIBUTIONS = deny("many contributions add up in the result's type")
_STEPS = deny("rounding adds up over the time steps")

_first = Rule(Kind.LINEAR, data=(0,), gradient=True)
_third = Rule(Kind.LINEAR, data=(2,), gradient=True)
_sum = Rule(Kind.LINEAR, data=(0,), contraction=True, gradient=True)

row("ConvGrad ConvTransposeGrad", _sum, casting=ALLOW, domain=MICROSOFT)
row("ReluGrad SliceGrad", _first, casting=CLEAR, domain=MICROSOFT)
row("LeakyReluGrad SigmoidGrad TanhGrad DivGrad", _first, casting=INFER, domain=MICROSOFT)
row("GeluGrad FastGeluGrad QuickGeluGrad BiasGeluGrad_dX BiasFastGeluGrad_dX", _first, casting=INFER, domain=MICROSOFT)
row("DropoutGrad BitmaskDropoutGrad", _first, casting=infer(wide_inputs=(2,)), domain=MICROSOFT)
row("ResizeGrad", _first, casting=infer(wide_inputs=(2, 3)), domain=MICROSOFT)
_statistics = infer(wide_inputs=(2, 3, 4), wide_outputs=(1, 2))
row("BatchNormalizationGrad", _first, casting=_statistics, domain=MICROSOFT)
row("LayerNormalizationGrad", _first, casting=infer(wide_inputs=(3, 4)), domain=MICROSOFT)
row("SimplifiedLayerNormalizationGrad", _first, casting=infer(wide_inputs=(3,)), domain=MICROSOFT)
row("InvertibleLayerNormalizationGrad FakeQuantGrad", _first, domain=MICROSOFT)
row("SoftmaxGrad SoftmaxGrad_13 LogSoftmaxGrad LogSoftmaxGrad_13", _first, casting=_PROBABILITIES, domain=MICROSOFT)
row("SoftmaxDropoutGrad", _first, casting=_PROBABILITIES, domain=MICROSOFT)
row("SoftmaxCrossEntropyGrad SoftmaxCrossEntropyLossGrad", _first, casting=_LOSS, domain=MICROSOFT)
# Input 5 is added to the gradient.
_added = Rule(Kind.LINEAR, data=(0, 5), gradient=True)
row("SoftmaxCrossEntropyLossInternalGrad", _added, casting=_LOSS, domain=MICROSOFT)
row("GatherGrad GatherNDGrad", _third, casting=_CONTRIBUTIONS, domain=MICROSOFT)
row("GatherElementsGrad", _first, casting=_CONTRIBUTIONS, domain=MICROSOFT)
_lstm = Rule(Kind.LINEAR, data=(9, 10, 11), contraction=True, gradient=True)
row("LSTMGrad", _lstm, casting=_STEPS, domain=MICROSOFT)
row("GRUGrad", Rule(Kind.LINEAR, data=(8, 9), contraction=True, gradient=True), casting=_STEPS, domain=MICROSOFT)

# ONNX Runtime has these in the domain of ONNX.
row("AveragePoolGrad MaxPoolGrad", _first, casting=INFER)
row("SparseSoftmaxCrossEntropyGrad", _first, casting=_LOSS)
