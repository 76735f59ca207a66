"""The first half in stages: each gives some of the gradients, the first ones first."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import onnx_ir as ir

from graphscale.errors import SplitError
from graphscale.graph.values import operands_of
from graphscale.graph.walks import nodes_above
from graphscale.replicas.buckets import Gradient
from graphscale.replicas.cut import Cut
from graphscale.replicas.halves import extract, know_types

__all__ = ["cut_stages"]


def cut_stages(
    model: ir.Model, cut: Cut, groups: Sequence[Sequence[Gradient]], states: Collection[str]
) -> tuple[ir.Model, ...]:
    """Return the models of the first half, one for each group of gradients.

    A node belongs to the first stage that needs it; what no gradient needs, a metric, to the first that can give it.
    """
    nodes = list(model.graph)
    stage_of = _stages(nodes, cut, groups)
    producers = {value.name or "": node for node in nodes for value in node.outputs}
    outputs: list[dict[str, None]] = [{} for _ in groups]
    for name in (*cut.gradients, *cut.outputs, *cut.average, *cut.local):
        outputs[stage_of[producers[name]]][name] = None
    crossing: dict[str, None] = {}
    for node, stage in stage_of.items():
        for value in operands_of(node):
            producer = value.producer()
            if producer is not None and stage_of[producer] < stage:
                outputs[stage_of[producer]][value.name or ""] = None
                crossing[value.name or ""] = None
    know_types(model, list(crossing))
    index = {node: i for i, node in enumerate(nodes)}
    models = []
    for stage, names in enumerate(outputs):
        own = [index[node] for node, of in stage_of.items() if of == stage]
        part, renamed = extract(model, own, list(names), states, keep_states=False)
        assert not renamed
        models.append(part)
    return tuple(models)


def _stages(nodes: Sequence[ir.Node], cut: Cut, groups: Sequence[Sequence[Gradient]]) -> dict[ir.Node, int]:
    values = {value.name: value for node in nodes for value in node.outputs}
    found: dict[ir.Node, int] = {}
    for stage, group in enumerate(groups):
        needed = nodes_above(*(values[gradient.name] for gradient in group))
        new = [node for node in needed if node not in found]
        if not new:
            names = ", ".join(gradient.name for gradient in group)
            raise SplitError(
                f"{len(groups)} stages do not fit: the gradients {names} are there when stage {stage} has run; take "
                "fewer"
            )
        found.update((node, stage) for node in new)
    for i in sorted(cut.first):
        node = nodes[i]
        if node not in found:
            before = [found[p] for value in operands_of(node) if (p := value.producer()) is not None]
            found[node] = max(before, default=0)
    return {node: found[node] for node in nodes if node in found}
