"""The proof of a scaled step, from the facts that the passes recorded."""

from __future__ import annotations

import onnx_ir as ir

from graphscale.analysis.proof import prove, scaled_contractions
from graphscale.errors import ProofError
from graphscale.graph.values import node_name
from graphscale.process.stages import report_stage
from graphscale.step.training_step import Step

__all__ = ["prove_step"]


def prove_step(step: Step, rule_nodes: frozenset[ir.Node]) -> None:
    """Prove the graph of a step.

    Args:
        step: the step, after all passes.
        rule_nodes: the nodes that give the next loss scale, or order writes.

    Raises:
        ProofError: the graph is wrong.
    """
    report_stage("proving the new graph")
    degrees = prove(
        step.graph,
        step.scale.value,
        step.loss,
        guarded={carried.next: carried.input for carried in step.carried if carried.guarded},
        checked=step.checked,
        all_finite=step.all_finite,
        applies=step.guard,
        exempt=step.exposed,
        rule_nodes=rule_nodes,
    )
    covered = {node_name(node) for node in step.coverage.nodes} - {node_name(n) for n in step.coverage.missed}
    lacking = covered.difference(scaled_contractions(step.graph, degrees))
    if lacking:
        raise ProofError(f"the scale was planned to reach {sorted(lacking)[0]!r}, and does not")
