"""The check by the relation: on an applied step the scaled graph computes the original's outputs and states."""

from __future__ import annotations

from graphscale.checks.relation.relate import Relation
from graphscale.checks.verification.pair import Pair
from graphscale.checks.verification.verify_report import RELATION, UNPROVED, Check
from graphscale.policy.names import ScaledValue

__all__ = ["compare_terms"]


def compare_terms(pair: Pair) -> Check:
    """Number the original and the file in one table, and compare their outputs and states.

    Operations whose results may differ in the last bits are joined only if no difference is left then.
    """
    names, model = pair.step.stamp.names, pair.lowered or pair.step.model
    scale, flags = names.get(ScaledValue.LOSS_SCALE, ""), [names.get(ScaledValue.ALL_FINITE, "")]
    what = f"{len(pair.original.graph.outputs)} outputs and {len(pair.states)} states"
    for suffix, rounds in (("", False), (", up to rounding", True)):
        relation = Relation(pair.original, model, scale, flags, rounds=rounds)
        differences = list(relation.find_differences(pair.states))
        if not differences:
            break
    return Check.proved(RELATION, differences, f"{what} follow from the same operators{suffix}", UNPROVED)
