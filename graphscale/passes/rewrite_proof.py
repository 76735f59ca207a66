"""The proof of a rewritten graph, from the facts that the passes recorded."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from graphscale.analysis.proof import prove, scaled_contractions
from graphscale.errors import ProofError
from graphscale.graph.values import node_name
from graphscale.passes.rewrite import Rewrite
from graphscale.process.stages import report_stage

__all__ = ["prove_rewrite"]


def prove_rewrite(
    rewrite: Rewrite, scale: ir.Value, rule_nodes: frozenset[ir.Node], exposed: Sequence[ir.Value] = ()
) -> None:
    """Prove the rewritten graph.

    Args:
        rewrite: the rewrite.
        scale: the loss scale.
        rule_nodes: the nodes that give the next loss scale, or order writes.
        exposed: the outputs that may contain the scale.

    Raises:
        ProofError: the rewritten graph is wrong.
    """
    report_stage("proving the new graph")
    graph = rewrite.training_graph
    degrees = prove(
        rewrite.model.graph,
        scale,
        graph.loss,
        guarded={carried.next: carried.input for carried in rewrite.carried if carried.guarded},
        checked=rewrite.checked,
        all_finite=rewrite.all_finite,
        applies=rewrite.applies,
        exempt=exposed,
        rule_nodes=rule_nodes,
    )
    covered = {node_name(node) for node in graph.coverage.nodes} - {node_name(n) for n in graph.coverage.missed}
    lacking = covered.difference(scaled_contractions(rewrite.model.graph, degrees))
    if lacking:
        raise ProofError(f"the scale was planned to reach {sorted(lacking)[0]!r}, and does not")
