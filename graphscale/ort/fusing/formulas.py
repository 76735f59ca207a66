"""A reader of the optimizer models of ONNX Runtime's training sessions, and a writer of their formulas."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir

from graphscale.errors import UnsupportedModelError
from graphscale.graph.builder import Editor
from graphscale.graph.values import node_name
from graphscale.operators import attribute, optimizer_of
from graphscale.ort.artifacts.optimizer_guard import trace_clips
from graphscale.passes.nodes.training_optimizers import AdamW, Operand

__all__ = ["Formula", "read_optimizer"]


def read_optimizer(model: ir.Model, name: str) -> tuple[AdamW | None, list[float]]:
    """Read an optimizer model; messages name its path.

    Returns:
        the attributes of AdamWOptimizer, None for SGDOptimizerV2, which has none; the global norms of the clipping
        before it, in order.

    Raises:
        UnsupportedModelError: the model has an operator other than AdamWOptimizer, SGDOptimizerV2 and
            InplaceClipGradNorm, or other operands for them than `generate_artifacts` writes.
    """
    nodes = tuple(model.graph)
    optimizers = [(node, found.inputs) for node in nodes if (found := optimizer_of(node)) and found.inputs]
    if len(optimizers) != 1:
        raise UnsupportedModelError(
            f"{name} has {len(optimizers)} optimizer operators; one is needed, AdamWOptimizer or SGDOptimizerV2"
        )
    [(node, roles)] = optimizers
    for index, operand in enumerate(node.inputs):
        role = roles[index] if index < len(roles) else None
        if role is None and operand is not None:
            raise UnsupportedModelError(
                f"{name} steers {node_name(node)!r} with the update signal {operand.name!r}, which a fused step "
                "decides by itself; fuse the folder as generate_artifacts wrote it"
            )
        if role is not None and role != "gradients" and (operand is None or operand.name != role):
            given = "nothing" if operand is None else repr(operand.name)
            raise UnsupportedModelError(f"{name}: {node_name(node)!r} reads {given} where {role!r} is expected")
    gradients, clips = trace_clips(node.inputs[roles.index("gradients")])
    source = None if gradients is None else gradients.producer()
    if source is not None:
        raise UnsupportedModelError(
            f"{name}: the optimizer's gradients come from {source.op_type} (node {node_name(source)!r}), not from "
            "InplaceClipGradNorm"
        )
    if gradients is None or gradients.name != "gradients":
        raise UnsupportedModelError(f"{name}: the optimizer's gradients do not come from the input 'gradients'")
    others = [other for other in nodes if other is not node and other not in clips]
    if others:
        raise UnsupportedModelError(
            f"{name}: fuse knows AdamWOptimizer, SGDOptimizerV2 and InplaceClipGradNorm, and not "
            f"{others[0].op_type} (node {node_name(others[0])!r})"
        )
    attributes = {key: held.value for key, held in node.attributes.items()}
    rule = AdamW(**attributes) if node.op_type == "AdamWOptimizer" else None
    if rule is not None and not rule.has_kernel:
        raise UnsupportedModelError(
            f"{name}: ONNX Runtime has no AdamWOptimizer with adam_mode {rule.adam_mode} and correct_bias "
            f"{rule.correct_bias}"
        )
    return rule, [attribute(clip, "max_norm", 1.0) for clip in reversed(clips)]


class Formula:
    """A writer of float32 arithmetic as nodes at the end of a graph."""

    def __init__(self, editor: Editor) -> None:
        self.editor = editor
        # The step is an original graph: only nodes inserted later by scale carry a mark.
        self.build = editor.builder("fuse", shape=(), is_marked=False)
        self._numbers: dict[tuple[float, ir.DataType], ir.Value] = {}

    def __call__(
        self, name: str, op_type: str, *operands: Operand, dtype: ir.DataType = ir.DataType.FLOAT, **options: Any
    ) -> ir.Value:
        """Add a node, and return its output, by default a scalar; the options are those of `Builder.op`."""
        inputs = [operand if isinstance(operand, ir.Value) else self._number(operand, dtype) for operand in operands]
        return self.build.op(op_type, inputs, name=name, dtype=dtype, **options)

    def _number(self, number: float | np.floating[Any], dtype: ir.DataType) -> ir.Value:
        key = (float(number), dtype)
        if key not in self._numbers:
            self._numbers[key] = self.editor.constant(f"optimizer/{number:g}", np.asarray(number, dtype.numpy()))
        return self._numbers[key]
