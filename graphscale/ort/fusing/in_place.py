"""Writing the next state over the present one, within the session."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx_ir as ir

from graphscale.errors import UnsupportedModelError
from graphscale.graph.builder import Editor
from graphscale.passes import OrderWrites
from graphscale.passes.nodes.write_order import order_writes

__all__ = ["write_states_in_place"]


def write_states_in_place(editor: Editor, states: Mapping[ir.Value, ir.Value]) -> None:
    """Let the graph assign each state its next value, after all readers of the present one.

    Raises:
        UnsupportedModelError: a state is not float32, the only type that the operator assigns.
    """
    build = editor.builder("fuse", is_marked=False)
    overwrite = editor.constant("optimizer/overwrite", np.asarray([True]))
    for state, value in states.items():
        if state.dtype is not ir.DataType.FLOAT:
            raise UnsupportedModelError(f"{state.name!r} is {state.dtype}; only float32 state can be written in place")
        outputs = [(f"{state.name}.written", ir.DataType.BOOL, [1])]
        inputs = [state, value, overwrite]
        build.node("InPlaceAccumulatorV2", inputs, outputs, domain="com.microsoft")
    order_writes(OrderWrites.builder(editor))
