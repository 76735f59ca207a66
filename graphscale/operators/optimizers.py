"""com.microsoft: optimizers and accumulators, whose operands are unscaled gradients.

From ONNX Runtime's training operator schemas (orttraining), and from running the kernels of onnxruntime-training
1.19.2: the CPU kernel of AdamOptimizer ignores `update_signal` and `loss_scale`, so a step to be skipped is guarded at
its outputs as well.
"""

from __future__ import annotations

from graphscale.operators.rules import NONLINEAR, Kind, Rule
from graphscale.operators.table import MICROSOFT, Optimizer, row
from graphscale.operators.traits import Trait

_WRITES = Trait.WRITES_INPUT | Trait.EFFECT
_sgd = Optimizer({0: 1})
_sgd_v2 = Optimizer(update_signal=3, signal_shape=(1,), inputs=("learning_rate", "params", "gradients"))
_adam = Optimizer({0: 1, 1: 4, 2: 5, 3: 2, 5: 6}, update_signal=9)
_moments = ("first_order_moments", "second_order_moments")
_adam_w = Optimizer(
    update_signal=6, signal_shape=(1,), inputs=("learning_rate", "step", "params", "gradients", *_moments)
)
# Groups of weight, gradient, two moments and a float16 copy of the weight, after the step counter.
_lamb = Optimizer({0: 4}, update_signal=0, group=(1, 5, 5))

row("SGDOptimizer", NONLINEAR, _WRITES, domain=MICROSOFT, optimizer=_sgd)
row("SGDOptimizerV2", NONLINEAR, _WRITES, domain=MICROSOFT, optimizer=_sgd_v2)
row("AdamOptimizer", NONLINEAR, _WRITES, domain=MICROSOFT, optimizer=_adam)
row("AdamWOptimizer", NONLINEAR, _WRITES, domain=MICROSOFT, optimizer=_adam_w)
row("LambOptimizer", NONLINEAR, _WRITES, domain=MICROSOFT, optimizer=_lamb)
row("InplaceClipGradNorm", NONLINEAR, _WRITES, domain=MICROSOFT)
row("ZeroGradient", Rule(Kind.DEGREE_0), _WRITES, domain=MICROSOFT)
# A running sum of gradients, kept in a buffer of the caller's: its operands must be unscaled, since the scale may
# change between two additions.
row("InPlaceAccumulator InPlaceAccumulatorV2", NONLINEAR, _WRITES | Trait.ACCUMULATOR, domain=MICROSOFT)
row("ReduceAllL2", NONLINEAR, domain=MICROSOFT)

# Operators of ONNX that return what they computed, and write nothing.
row("Adagrad Adam Momentum", NONLINEAR, domain="ai.onnx.preview.training")
