"""A loss scale in graph mode, for hand-built training graphs: the result of `LossScale.bind(graph)`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import onnx_ir as ir

from graphscale.graph.builder import Editor
from graphscale.passes.check_finite import CheckFinite
from graphscale.passes.nodes.finite import all_finite
from graphscale.passes.nodes.graph_scale import add_decision, add_rule, add_scale
from graphscale.passes.nodes.write_order import order_writes
from graphscale.passes.order_writes import OrderWrites
from graphscale.passes.update_loss_scale import UpdateLossScale
from graphscale.policy.eager import flatten
from graphscale.policy.loss_scale import LossScale
from graphscale.policy.names import ScaledValue
from graphscale.targets import Target, get_target

__all__ = ["BoundLossScale"]


class BoundLossScale:
    """A loss scale with its state in a graph: the finite check and the update rule in one call.

    Args:
        policy: a `FixedLossScale` or a `DynamicLossScale`; its current state becomes the initial state.
        graph: the main graph, or a model: then the update rule is a model-local function, called by one node, if the
            model's IR version has functions. In a bare graph, the rule is written as nodes.
        target: the runtime that executes the graph.
    """

    def __init__(self, policy: LossScale, graph: ir.Graph | ir.Model, target: str = "onnx") -> None:
        self._model = graph if isinstance(graph, ir.Model) else None
        self._editor = Editor(graph.graph if isinstance(graph, ir.Model) else graph)
        self._scale = add_scale(self._editor, policy, get_target(target))

    def __call__(self) -> ir.Value:
        """Return the current loss scale, a scalar float32 value of the graph."""
        return self._scale.value

    @property
    def policy(self) -> LossScale:
        """The policy."""
        return self._scale.policy

    @property
    def target(self) -> Target:
        """The runtime that executes the graph."""
        return self._scale.target

    @property
    def states(self) -> Mapping[ScaledValue, ir.Value]:
        """All state by its role, the scale included; none of a fixed loss scale."""
        return self._scale.states

    @property
    def good_steps(self) -> ir.Value | None:
        """The count of good steps, a scalar initializer and graph input; None for a fixed loss scale."""
        return self._scale.states.get(ScaledValue.GOOD_STEPS)

    @property
    def next_state(self) -> dict[ir.Value, ir.Value]:
        """The next value of each state value, after `update`."""
        return {self._scale.states[role]: value for role, value in self._scale.next.items()}

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
        if self._scale.is_fixed:
            return None, True
        self._editor.refresh()
        values = list(flatten(grads))
        wrong = [value for value in values if not isinstance(value, ir.Value)]
        if wrong:
            raise TypeError(f"gradients in graph mode are onnx_ir values; got {wrong[0]!r}")
        finite = all_finite(self._editor.builder(CheckFinite.name), values, self.target)
        build = self._editor.builder(UpdateLossScale.name)
        self._scale, node = add_rule(build, self._model, self._scale, finite)
        applies = add_decision(build, self._scale, finite)
        self.order_writes()
        return node, applies

    def order_writes(self) -> bool:
        """Make in-place writes wait for all readers of the old values; return whether the graph has changed."""
        self._editor.refresh()
        return order_writes(self._editor.builder(OrderWrites.name))
