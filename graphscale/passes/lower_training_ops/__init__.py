"""The standard forms of ONNX Runtime's training operators, a family one module.

A formula writes a node's standard form and gives a value for each output: see `writer.py`.
"""

from collections.abc import Mapping

from graphscale.passes.lower_training_ops import (
    activations,
    convolutions,
    gru,
    gru_grad,
    lstm,
    normalizations,
    optimizers,
    pooling,
    weight_optimizers,
)
from graphscale.passes.lower_training_ops.writer import Formula

__all__ = ["FORMULAS"]

# By domain and operator.
FORMULAS: Mapping[tuple[str, str], Formula] = {
    **activations.FORMULAS,
    **convolutions.FORMULAS,
    **gru.FORMULAS,
    **gru_grad.FORMULAS,
    **lstm.FORMULAS,
    **normalizations.FORMULAS,
    **optimizers.FORMULAS,
    **pooling.FORMULAS,
    **weight_optimizers.FORMULAS,
}
