"""The metadata properties by which nodes and values say what a rewrite did to them."""

from __future__ import annotations

import onnx_ir as ir

__all__ = ["AUTOCAST", "MARKS", "PASS_KEY", "SCALE_LOSS", "UNSCALE_GRADIENTS", "WAS_FLOAT", "is_rounding"]

# Begins the names of them all.
MARKS = "graphscale."
# Of every inserted node: the pass that inserted it.
PASS_KEY = "graphscale.pass"
# The name of the pass that inserts casts for mixed precision.
AUTOCAST = "autocast"
# The names of the passes that only a loss scale brings.
SCALE_LOSS, UNSCALE_GRADIENTS = "scale-loss", "unscale-gradients"
# Of a cast of the original that gave float32 and gives a small type.
WAS_FLOAT = "graphscale.was_float"


def is_rounding(node: ir.Node) -> bool:
    """Return whether a node only changes the precision of a value of the original: a cast of mixed precision."""
    return node.metadata_props.get(PASS_KEY) == AUTOCAST and node.op_type == "Cast"
