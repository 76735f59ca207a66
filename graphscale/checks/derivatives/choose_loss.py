"""The choice between outputs that may each be the loss: the one whose derivatives the backward pass computes."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import onnx_ir as ir

from graphscale.analysis.loss_choice import LossCandidate
from graphscale.checks.derivatives.gradient_bench import Differentiation, open_bench
from graphscale.checks.derivatives.gradient_report import count_agreeing, is_derivative
from graphscale.errors import GraphscaleError

__all__ = ["choose_loss"]

# Beyond these numbers of weights a choice takes minutes, and a question is quicker.
_MANY = 2**25
_IR_VERSION = 10  # that every runtime loads


def choose_loss(graph: ir.Graph, candidates: Sequence[LossCandidate]) -> ir.Value | None:
    """Return the loss whose gradients are its derivatives, as far as they can be checked.

    Args:
        graph: the main graph, with no calls of model-local functions in it.
        candidates: the likeliest first.

    Returns:
        the first loss that no gradient disagrees with, else the likeliest one, if more gradients agree with it than
        with any other; None where that is not so, or nothing can run the graph.
    """
    if sum(value.const_value.size for value in graph.initializers.values() if value.const_value is not None) > _MANY:
        return None
    model, counts = ir.Model(graph, ir_version=_IR_VERSION), [0] * len(candidates)
    for i, candidate in enumerate(candidates):
        subject = Differentiation(model, candidate.loss, candidate.unscalings, candidate.scaled)
        with contextlib.suppress(GraphscaleError), contextlib.closing(open_bench(subject, {}, {}, 0)) as bench:
            checks = bench.check(directions=1)
            if is_derivative(checks):
                return candidate.loss
            counts[i] = count_agreeing(checks)
    return candidates[0].loss if counts[0] > max(counts[1:], default=counts[0]) else None
