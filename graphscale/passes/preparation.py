"""The preparation of a training graph: no node hides the gradient path, or lacks a kernel."""

from __future__ import annotations

import onnx_ir as ir

from graphscale.analysis.hints import NO_HINTS, Hints
from graphscale.analysis.updates import find_fused_updates
from graphscale.errors import GraphscaleError
from graphscale.graph.types import dtypes_of
from graphscale.graph.values import node_name
from graphscale.graph.walks import NodeIndex
from graphscale.operators import OPERATORS, PREVIEW_TRAINING
from graphscale.passes.graph_pass import run_passes
from graphscale.step.understanding import understand
from graphscale.targets import IN_ONNX_DOMAIN, Target

__all__ = ["prepare", "replace_training_ops"]


def prepare(model: ir.Model, hints: Hints = NO_HINTS, index: NodeIndex | None = None) -> list[str]:
    """Spell out nodes that hide the gradient path or have no kernel, with warnings; add missing types of outputs.

    Args:
        model: the model.
        hints: the user's names.
        index: the nodes of its graph, if they are known; afterwards those of the new one.
    """
    warnings, index = [], index or NodeIndex(model.graph)
    if model.functions:
        from graphscale.passes.inline_functions import InlineFunctions  # few models have functions

        names = ", ".join(f"{domain}::{name}" for domain, name, _ in model.functions)
        InlineFunctions()(model)
        warnings.append(f"the model-local functions {names} were inlined")
        index.refresh()
    if PREVIEW_TRAINING in model.opset_imports:
        from graphscale.passes.lower_optimizers import LowerOptimizers

        if LowerOptimizers()(model).modified:
            warnings.append(f"the {PREVIEW_TRAINING} optimizers, which no runtime executes, were spelled out")
            index.refresh()
    if any(value.dtype is None or value.shape is None for value in model.graph.outputs):
        from graphscale.graph.inference import complete_types

        complete_types(model)
    if None in index.dtypes:
        known = dtypes_of(model.graph.all_nodes())
        for value in (value for node in index.nodes for value in node.outputs):
            if value.dtype is None and value in known and not known[value].is_floating_point():
                value.dtype = known[value]  # a value of an unknown dtype may be scaled
        index.refresh()
    fused = _find_hidden_gradients(model, hints, index)
    if fused:
        from graphscale.passes.split_gemm import SplitGemm

        SplitGemm(fused)(model)
        index.refresh()
        names = ", ".join(node_name(node) for node in fused)
        warnings.append(f"a gradient was fused into an update: the Gemm nodes {names} were split into product and sum")
    return warnings


def _find_hidden_gradients(model: ir.Model, hints: Hints, index: NodeIndex) -> list[ir.Node]:
    """Find the Gemm nodes with a gradient and a state that the loss scale does not reach."""
    fused = find_fused_updates(model.graph) if index.nodes_of("Gemm") else []
    if not fused:
        return []
    try:
        missed = understand(model, hints, index, asking=False).coverage.missed
    except GraphscaleError:
        return fused  # the analysis of the split step may raise it again
    return [node for node in fused if node in missed]


def replace_training_ops(model: ir.Model, target: Target, index: NodeIndex | None = None) -> dict[str, int]:
    """Replace the operators of ONNX Runtime's training builds, if the target is no such build.

    Args:
        model: the model.
        target: the target.
        index: the nodes of its graph, if they are known; afterwards those of the new one.

    Returns:
        `{operator: nodes}`, the replaced nodes.

    Raises:
        UnsupportedModelError: an operator has no standard form.
    """
    by_operator = {} if target.in_place else (index or NodeIndex(model.graph)).by_operator
    # The schemas of ONNX take longer to load than a small step takes to scale.
    keys = (key for key in by_operator if key not in OPERATORS or key[0] or key[1] in IN_ONNX_DOMAIN)
    nodes = [by_operator[key][-1] for key in keys]
    if not nodes:
        return {}
    from graphscale.operators.stock_kernels import needs_training_build

    if not any(map(needs_training_build, nodes)):
        return {}
    from graphscale.passes.lower_training_ops.lower_training_ops import LowerTrainingOps  # with all formulas

    lowering = LowerTrainingOps()
    run_passes(model, lowering)
    if index is not None:
        index.refresh()
    return lowering.counts
