"""A loss scale in graph mode, for hand-built training graphs: the result of `LossScale.bind(graph)`."""

from __future__ import annotations

from typing import Any

import onnx_ir as ir

from graphscale.passes.check_finite import CheckFinite
from graphscale.passes.nodes.finite import all_finite
from graphscale.passes.nodes.graph_scale import GraphScale
from graphscale.passes.nodes.write_order import order_writes
from graphscale.passes.order_writes import OrderWrites
from graphscale.passes.update_loss_scale import UpdateLossScale
from graphscale.policy.loss_scale import FixedLossScale, flatten

__all__ = ["BoundLossScale"]


class BoundLossScale(GraphScale):
    """A loss scale with its state in a graph: the finite check and the update rule in one call."""

    def update(self, grads: Any) -> tuple[ir.Node | None, ir.Value | bool]:
        """Add the nodes that update the loss scale from unscaled gradients.

        Args:
            grads: floating-point values of the graph, already divided by the loss scale, nested in sequences and
                mappings in any way. None is ignored.

        Returns:
            `(update_op, should_apply_gradients)`: the node with the new state, and a scalar bool value of the graph. A
            fixed loss scale has nothing to update: `(None, True)`. On targets with explicit state, the new state is
            also a graph output, `current_loss_scale.next` and `good_steps.next`, to be fed back. On targets that write
            state in place, call `order_writes` after adding further readers of the scale.
        """
        if isinstance(self.policy, FixedLossScale):
            return None, True
        self.look_for_names()
        values = list(flatten(grads))
        wrong = [value for value in values if not isinstance(value, ir.Value)]
        if wrong:
            raise TypeError(f"gradients in graph mode are onnx_ir values; got {wrong[0]!r}")
        finite = all_finite(self.editor.builder(CheckFinite.name), values, self.target)
        build = self.editor.builder(UpdateLossScale.name)
        node, applies = self.write(build, finite), self.applies(build, finite)
        self.order_writes()
        return node, applies

    def order_writes(self) -> bool:
        """Make in-place writes wait for all readers of the old values; return whether the graph has changed."""
        self.look_for_names()
        return order_writes(self.editor.builder(OrderWrites.name))
