"""The standard forms of ONNX Runtime's training operators, one module per family.

A formula writes a node's standard form, and returns a value for each output: see `writer.py`.
"""

from collections.abc import Mapping

from graphscale.passes.lower_training_ops import (
    activations,
    batch_norms,
    convolutions,
    cross_entropies,
    dropout,
    elementwise,
    gru,
    gru_grad,
    indexing,
    losses,
    lstm,
    normalizations,
    optimizers,
    pooling,
    reductions,
    resizing,
    shapes,
    slicing,
    softmaxes,
    weight_optimizers,
)
from graphscale.passes.lower_training_ops.writer import Formula

__all__ = ["FORMULAS"]

# By domain and operator.
FORMULAS: Mapping[tuple[str, str], Formula] = {
    **activations.FORMULAS,
    **batch_norms.FORMULAS,
    **convolutions.FORMULAS,
    **cross_entropies.FORMULAS,
    **dropout.FORMULAS,
    **elementwise.FORMULAS,
    **gru.FORMULAS,
    **gru_grad.FORMULAS,
    **indexing.FORMULAS,
    **losses.FORMULAS,
    **lstm.FORMULAS,
    **normalizations.FORMULAS,
    **optimizers.FORMULAS,
    **pooling.FORMULAS,
    **reductions.FORMULAS,
    **resizing.FORMULAS,
    **shapes.FORMULAS,
    **slicing.FORMULAS,
    **softmaxes.FORMULAS,
    **weight_optimizers.FORMULAS,
}
