"""The standard forms of ONNX Runtime's training operators, a family one module.

A formula writes a node's standard form and gives a value for each output: see `writer.py`.
"""

from collections.abc import Mapping

from graphscale.passes.lower_training_ops import activations, cross_entropies, dropout, losses, softmaxes
from graphscale.passes.lower_training_ops.writer import Formula

__all__ = ["FORMULAS"]

# By domain and operator.
FORMULAS: Mapping[tuple[str, str], Formula] = {
    **activations.FORMULAS,
    **cross_entropies.FORMULAS,
    **dropout.FORMULAS,
    **losses.FORMULAS,
    **softmaxes.FORMULAS,
}
