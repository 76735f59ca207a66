"""The skip of a step in the optimizer model of an artifact folder."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import onnx_ir as ir
from onnx_ir.passes import PassResult

from graphscale.errors import UnsupportedModelError
from graphscale.graph.builder import Editor
from graphscale.operators import MICROSOFT, Optimizer, optimizer_of
from graphscale.passes import CheckFinite, GraphPass
from graphscale.passes.guard_in_place import guard_optimizer
from graphscale.passes.nodes.finite import all_finite
from graphscale.targets import Target

__all__ = ["GuardOptimizer", "trace_clips"]

GRADIENTS = "gradients"
_CLIP = "InplaceClipGradNorm"

# The first opset with a sequence as a result of If, and an operand of Identity.
_SEQUENCE_OPSET = 14


@dataclasses.dataclass(frozen=True)
class GuardOptimizer(GraphPass):
    """Stop the optimizer if an accumulated gradient is not finite.

    Before: `clipped = InplaceClipGradNorm(gradients)`
            `updated = AdamWOptimizer(learning_rate, step, params, clipped, moments_1, moments_2)`
    After:  `all_finite = Not(IsNaN(Sum(ReduceSum(Mul(SequenceAt(gradients, 0), 0)), ...)))`
            `clipped = If <then: InplaceClipGradNorm(gradients), else: Identity(gradients)> (all_finite)`
            `updated = AdamWOptimizer(learning_rate, step, params, clipped, moments_1, moments_2, all_finite)`

    The training session counts a step for the bias correction if the first output, `updated`, is true: a skipped step
    does not count.

    `count` is the number of gradients, and `path` the model's name in messages.
    """

    name = "guard-optimizer"

    count: int
    target: Target
    path: str = "the optimizer model"

    def call(self, model: ir.Model) -> PassResult:
        """Rewrite the optimizer model."""
        graph = model.graph
        node, optimizer = self._find_optimizer(graph)
        gradients, clips = self._trace_gradients(graph, node, optimizer.inputs.index(GRADIENTS))
        if clips and graph.opset_imports.get("", 0) < _SEQUENCE_OPSET:
            raise UnsupportedModelError(
                f"{self.path} clips gradients in opset {graph.opset_imports.get('', 0)}, where an If cannot give a "
                f"sequence; make it with opset {_SEQUENCE_OPSET} or later"
            )
        editor = Editor(graph)
        values = [_element(editor, gradients, i) for i in range(self.count)]
        finite = all_finite(CheckFinite.builder(editor), values, self.target)
        for clip in clips:
            _clip_if(editor, clip, finite)
        guard_optimizer(self.builder(editor), node, finite, name="update_signal", shape="signal_shape")
        graph.sort()
        return PassResult(model, modified=True)

    def _find_optimizer(self, graph: ir.Graph) -> tuple[ir.Node, Optimizer]:
        found = [(node, optimizer) for node in graph if (optimizer := optimizer_of(node)) is not None]
        if [node.op_type for node, _ in found] not in (["AdamWOptimizer"], ["SGDOptimizerV2"]):
            kinds = ", ".join(node.op_type for node, _ in found) or "none"
            raise UnsupportedModelError(
                f"{self.path} needs one optimizer of a training session, with an input to skip a step "
                f"(AdamWOptimizer or SGDOptimizerV2); it has: {kinds}"
            )
        return found[0]

    def _trace_gradients(self, graph: ir.Graph, node: ir.Node, index: int) -> tuple[ir.Value, list[ir.Node]]:
        """Return the input `gradients`, and the nodes that clip it before the optimizer's operand."""
        gradients = next(value for value in graph.inputs if value.name == GRADIENTS)
        source, clips = trace_clips(node.inputs[index])
        if source is not gradients:
            raise UnsupportedModelError(
                f"the gradients that {node.op_type} {node.name!r} of {self.path} reads cannot be traced to its input "
                f"{GRADIENTS!r}; only {_CLIP} may stand between them"
            )
        others = [use.node for use in gradients.uses() if use.node is not node and use.node not in clips]
        if others:
            raise UnsupportedModelError(
                f"{others[0].op_type} {others[0].name!r} of {self.path} reads {GRADIENTS!r}, and could change the "
                f"buffers on a skipped step; only {_CLIP} is known"
            )
        return gradients, clips


def trace_clips(gradients: ir.Value | None) -> tuple[ir.Value | None, list[ir.Node]]:
    """Return the source of an optimizer's clipped gradients, and the nodes that clip, the last one first."""
    clips: list[ir.Node] = []
    while gradients is not None and (node := gradients.producer()) is not None:
        if (node.domain, node.op_type) != (MICROSOFT, _CLIP):
            break
        clips.append(node)
        gradients = node.inputs[0]
    return gradients, clips


def _element(editor: Editor, sequence: ir.Value, index: int) -> ir.Value:
    position = editor.constant(f"graphscale/index.{index}", np.asarray(index, dtype=np.int64))
    dtype = sequence.dtype or ir.DataType.FLOAT
    return CheckFinite.builder(editor, dtype=dtype).op("SequenceAt", [sequence, position], name=f"gradient.{index}")


def _clip_if(editor: Editor, clip: ir.Node, finite: ir.Value) -> None:
    """Make a node that clips in place run only on finite gradients."""
    sequence, clipped = clip.inputs[0], clip.outputs[0]
    assert sequence is not None and clipped.name is not None
    uses, build = tuple(clipped.uses()), GuardOptimizer.builder(editor, at=("before", clip))

    def branch(name: str, op_type: str, domain: str = "", **attributes: Any) -> ir.Graph:
        body = GuardOptimizer.builder(editor, is_marked=False).within(f"{clipped.name}.{name}")
        output = body.op(op_type, [sequence], name=f"{clipped.name}.{name}", domain=domain, **attributes)
        output.type = clipped.type or sequence.type
        return body.closed([output])

    branches: dict[str, Any] = {
        "then_branch": branch("clip", clip.op_type, clip.domain, **clip.attributes),
        "else_branch": branch("keep", "Identity"),
    }
    chosen = build.op("If", [finite], name=f"{clipped.name}.guarded", **branches)
    chosen.type = clipped.type or sequence.type
    editor.replace(clipped, chosen, uses, "unguarded")
    editor.graph.remove(clip, safe=True)
