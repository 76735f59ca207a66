"""Metadata properties that record the changes of a rewrite on nodes and values."""

from __future__ import annotations

import onnx_ir as ir

__all__ = [
    "AUTOCAST",
    "CHECK_FINITE",
    "DELAY_UPDATE",
    "LOWER_TRAINING_OPS",
    "MARKS",
    "PASS_KEY",
    "SCALE_LOSS",
    "UNSCALE_GRADIENTS",
    "WAS_FLOAT",
    "is_rounding",
]

# The common beginning of their names.
MARKS = "graphscale."
# On every inserted node: its pass.
PASS_KEY = "graphscale.pass"
# The name of the pass that inserts casts for mixed precision.
AUTOCAST = "autocast"
# The names of the passes for a loss scale alone.
SCALE_LOSS, UNSCALE_GRADIENTS = "scale-loss", "unscale-gradients"
# The names of the passes that insert the finite flag, and that delay it.
CHECK_FINITE, DELAY_UPDATE = "check-finite", "delay-update"
# The name of the pass that replaces the operators of ONNX Runtime's training builds.
LOWER_TRAINING_OPS = "lower-training-ops"
# On a cast of the original that gave float32 and now gives a small type.
WAS_FLOAT = "graphscale.was_float"


def is_rounding(node: ir.Node) -> bool:
    """Return whether a node is a cast of mixed precision, which only changes the precision of an original value."""
    return node.metadata_props.get(PASS_KEY) == AUTOCAST and node.op_type == "Cast"
