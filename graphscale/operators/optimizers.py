"""ONNX Runtime's optimizer operators, as data: what they read, what they carry, how they can be told to do nothing.

From ONNX Runtime's training operator schemas (orttraining), and from running the kernels of onnxruntime-training
1.19.2: the CPU kernel of AdamOptimizer ignores `update_signal` and `loss_scale`, so a step that shall be skipped is
guarded at its outputs as well.
"""

from __future__ import annotations

import dataclasses

import onnx_ir as ir

from graphscale.operators.rules import MICROSOFT

__all__ = ["OPTIMIZERS", "Optimizer", "optimizer_of"]


@dataclasses.dataclass(frozen=True)
class Optimizer:
    """One optimizer operator.

    Attributes:
        states: `{output: input}`: each output that is the next value of an input.
        update_signal: the input that, if false, makes a step do nothing (where the kernel honours it).
        signal_shape: the shape of that input.
        group: from this output on, states come in groups of `(inputs from, group size)`, as in LambOptimizer.
    """

    states: dict[int, int]
    update_signal: int | None = None
    signal_shape: tuple[int, ...] = ()
    group: tuple[int, int, int] | None = None

    def source(self, output: int) -> int | None:
        """The input that an output is the next value of, or None."""
        if self.group is not None and output >= self.group[0]:
            first_output, first_input, size = self.group
            member = output - first_output
            # The second of a group is the gradient.
            return None if member % size == 1 else first_input + member
        return self.states.get(output)


OPTIMIZERS = {
    (MICROSOFT, "SGDOptimizer"): Optimizer({0: 1}),
    (MICROSOFT, "SGDOptimizerV2"): Optimizer({}, update_signal=3, signal_shape=(1,)),
    (MICROSOFT, "AdamOptimizer"): Optimizer({0: 1, 1: 4, 2: 5, 3: 2, 5: 6}, update_signal=9),
    (MICROSOFT, "AdamWOptimizer"): Optimizer({}, update_signal=6, signal_shape=(1,)),
    # Groups of weight, gradient, two moments and a float16 copy of the weight, after the step counter.
    (MICROSOFT, "LambOptimizer"): Optimizer({0: 4}, update_signal=0, group=(1, 5, 5)),
}


def optimizer_of(node: ir.Node) -> Optimizer | None:
    """The optimizer that a node is, or None."""
    return OPTIMIZERS.get((node.domain, node.op_type))
