"""The proofs by the relation of two models, which believe nothing of a file but the scale and the flag."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping

import numpy as np
import onnx_ir as ir

from graphscale.analysis.past_gradients import find_narrow_sums
from graphscale.checks.relation.obligations import find_misplaced, find_unscaled
from graphscale.checks.relation.relate import Given, Relation, find_cases, no_numbers
from graphscale.checks.relation.terms import Number, Terms
from graphscale.checks.verification.pair import Pair
from graphscale.checks.verification.verify_report import FAILS, RELATION, UNPROVED, Check
from graphscale.flow.degree import Degree
from graphscale.flow.support import reach
from graphscale.graph.types import holds_all
from graphscale.graph.values import constant_tensor, is_float, is_scalar, own_dtype, values_by_name
from graphscale.lowering.lower_model import is_lowered
from graphscale.operators import Trait, nodes_with
from graphscale.policy.loss_scale import DynamicLossScale
from graphscale.step.unstamped_step import powers_of

__all__ = ["find_unchecked", "prove_relation"]


def prove_relation(pair: Pair, *, exact: bool) -> tuple[list[Check], Relation]:
    """Compare what a scaled step computes on an applied step with the original, and the ways of the scale.

    Spellings of other layouts, and those that round differently, are joined only where the file has differences.

    Args:
        pair: both graphs.
        exact: False to compare the file with the original scaled again, too, where its nodes are other ones.

    Returns:
        the checks, and the relation, of a lowered file that of its plain form, which has the places of the scale.
    """

    def compare(model: ir.Model, *, rounds: bool) -> list[Relation]:
        cases = _applied(pair, model)
        return [Relation(pair.original, model, (no_numbers, case), pair.states, rounds=rounds) for case in cases]

    model, analysis = pair.lowered or pair.step.model, pair.analysis
    relations = compare(model, rounds=False)
    found = exactly = [each for case in relations for each in case.find_differences()]
    if exactly:
        relations = compare(model, rounds=True)
        found = [each for case in relations for each in case.find_differences()]
    # A power of the scale beside the right term is certain.
    status = FAILS if any(case.scaled for case in relations) else UNPROVED
    what = f"{len(pair.original.graph.outputs)} outputs and {len(pair.states)} states follow from the same operators"
    layouts = ", up to layouts and rounding" if exactly else ""
    checks = [Check.proved(RELATION, found, what + layouts, status)]
    if pair.wide is not None:
        checks.append(_compare_with_float32(pair, pair.wide))
    if not exact and pair.translation is not None and pair.translation.graph:
        checks.append(_compare_with_expected(pair.step.model, pair.translation.expected))
    if pair.lowered is not None:
        relations = compare(pair.step.model, rounds=bool(exactly))
    relation = relations[0]
    coverage, topology = analysis.coverage, analysis.topology
    assert topology is not None
    nodes = [n for n in coverage.nodes if n not in set(coverage.missed) and n.graph is analysis.graph]
    covered = f"{coverage.covered} of {coverage.total}" if coverage.total else "there is nothing to protect"
    # Between different results, no operation has its certain counterpart.
    status = UNPROVED if found else FAILS
    checks.append(Check.proved("backward contractions scaled", find_unscaled(relation, nodes), covered, status))
    values = values_by_name(analysis.graph)
    data = topology.descendants({value for value in topology.graph.inputs if not is_scalar(value)})
    fed = (name for name, value in values.items() if value in data)
    scale = pair.step.scale.value.name or ""
    misplaced = find_misplaced(relation, scale, fed, lambda name: topology.is_late(values[name]))
    what = "no value of a forward pass is multiplied by it"
    return [*checks, Check.proved("scale enters at seeds", misplaced, what, UNPROVED)], relation


def _compare_with_float32(pair: Pair, wide: ir.Model) -> Check:
    """Compare a file in mixed precision with the float32 original, its casts left out where it may round."""
    model, narrow = pair.lowered or pair.step.model, ir.DataType[str(pair.dtype).upper()]
    given = _applied(pair, model)

    def compare(*, rounds: bool) -> tuple[list[str], int]:
        found, count = list[str](), 0
        for case in given:
            relation = Relation(wide, model, (no_numbers, case), pair.states, rounds=rounds, narrow=narrow)
            misplaced, count = relation.find_wide(pair.roundable)
            found += [*relation.find_differences(), *misplaced]
        return found, count

    found, count = compare(rounds=False)
    if found:
        found, count = compare(rounds=True)
    what = f"up to rounding to {pair.dtype} at {count} values"
    return Check.proved("equal to the float32 original", found, what, UNPROVED)


def _compare_with_expected(step: ir.Model, expected: ir.Model) -> Check:
    """Compare all inputs, outputs and written states with those of the original scaled again.

    So the update rule and the finite check are the policy's, in any spelling: a check that also refuses finite
    gradients would not change an applied step.
    """
    others = list[str]()
    for kind in ("inputs", "outputs"):
        names, wanted = ([value.name for value in getattr(model.graph, kind)] for model in (step, expected))
        others += [f"{name!r} is a further one of the {kind}" for name in names if name not in wanted]
        pairs = zip([n for n in wanted if n in names], [n for n in names if n in wanted], strict=False)
        others += [f"{name!r} is not in its place among the {kind}" for name, at in pairs if name != at]
    differences = Relation(expected, step, rounds=True).find_differences()
    what = f"{len(expected.graph.outputs)} outputs are those of the policy's step"
    return Check.proved("equal to the original scaled again", [*others, *differences], what, UNPROVED)


def _applied(pair: Pair, model: ir.Model) -> list[Given]:
    """Give numbers to the scale and the flags of an applied step; a lowered step has one case for each branch."""
    scale, flag = pair.step.scale.value, "" if pair.step.all_finite is None else pair.step.all_finite.name or ""
    powers = {scale: (1, 1.0)}
    if pair.translation is None:
        powers = powers_of(pair.step.graph, scale, pair.original.graph)

    def give(terms: Terms, known: Mapping[str, bool]) -> Mapping[str, Number]:
        flags = {name: Number(terms.true if is_set else terms.false) for name, is_set in known.items()}
        return flags | {v.name or "": Number(terms.array_term(_fill(v, n)), power) for v, (power, n) in powers.items()}

    cases = find_cases(model, flag) if is_lowered(model) else [{flag: True}]
    return [functools.partial(give, known=case) for case in cases]


def _fill(value: ir.Value, number: float) -> np.ndarray:
    """Return an array like a value with a number in all elements."""
    tensor, dtype = constant_tensor(value), own_dtype(value) or ir.DataType.FLOAT
    shape = tuple(tensor.shape.numpy()) if tensor is not None else (1,) * len(value.shape or ())
    return np.full(shape, number, dtype.numpy())


# --- values past the gradients ----------------------------------------------------------------------------------------


def find_unchecked(
    pair: Pair, relation: Relation, tested: set[ir.Value], degrees: Mapping[ir.Value, Degree]
) -> Iterator[str]:
    """Yield the values past the gradients that can make a weight non-finite, where no finite check tests them.

    Args:
        pair: both graphs.
        relation: their relation.
        tested: the values that the flag tests.
        degrees: the values that carry the scale.
    """
    found = pair.analysis
    known = {number.term for v in tested if (number := relation.second.named(v.name or "")) is not None}
    sums = find_narrow_sums(tuple(found.graph), found.gradients, (), found.losses, found.states)
    reasons = {value.name: "can overflow in float16 though all gradients are finite" for value in sums}
    reasons |= {value.name: "moves a weight by a batch past all gradients" for value in found.terms}
    for name, reason in reasons.items():
        number = relation.first.named(name or "")
        if number is None or number.term not in known:
            yield f"{name!r} {reason}, and is not checked"
    policy = pair.step.scale.policy
    if isinstance(policy, DynamicLossScale) and policy.rule.min_loss_scale < 1:
        # By a scale of at least 1, the quotient of a float16 number is one.
        reached = reach(pair.step.graph, [pair.step.scale.value])
        quotients = {value for value in reached if value in tested and value not in degrees}
        for node in nodes_with(pair.step.graph, Trait.CAST):
            whole, value = node.inputs[0], node.outputs[0]
            is_narrow = whole is not None and is_float(value) and not holds_all(value.dtype, whole.dtype)
            if whole in quotients and is_narrow and value not in tested:
                yield f"{value.name!r} can overflow in {value.dtype} by a scale below 1, and is not checked"
