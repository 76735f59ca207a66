"""The checks by the relation of two models, which believe nothing of a file but the names of the scale and the flag."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import numpy as np
import onnx_ir as ir

from graphscale.checks.relation.obligations import find_misplaced, find_unscaled
from graphscale.checks.relation.relate import Given, Relation, no_numbers
from graphscale.checks.relation.terms import Number, Terms
from graphscale.checks.translation.validation import Translation
from graphscale.checks.verification.finite_check import find_tested_values
from graphscale.checks.verification.pair import Pair
from graphscale.checks.verification.verify_report import RELATION, SKIPPED, UNPROVED, Check
from graphscale.graph.values import is_scalar, values_by_name
from graphscale.policy.names import ScaledValue
from graphscale.step.training_step import Step

__all__ = ["compare_with_original", "relate"]


def relate(pair: Pair, translation: Translation, *, exact: bool, numeric: bool) -> list[Check]:
    """Compare the file with the original, and with the original scaled again where its nodes are not the expected ones.

    Args:
        pair: both graphs.
        translation: the comparison of nodes.
        exact: True if it must hold.
        numeric: True if numbers alone were asked for.
    """
    if numeric and translation.graph:
        return [Check(RELATION, SKIPPED, "numbers alone were asked for", True)]
    rules = [] if exact or not translation.graph else [_compare_with_expected(pair, translation.expected)]
    return [*_compare_with_original(pair), *rules]


def _compare_with_original(pair: Pair) -> Iterator[Check]:
    """Compare the file with the original; of a lowered file its plain form, which is the file's node by node."""
    names = pair.step.stamp.names

    def applied(terms: Terms) -> Mapping[str, Number]:
        scale = Number(terms.array_term(np.array(1, np.float32)), 1)
        numbers = {ScaledValue.LOSS_SCALE: scale, ScaledValue.ALL_FINITE: Number(terms.true)}
        return {names[role]: number for role, number in numbers.items() if role in names}

    moved = _find_moved(pair.original.graph, pair.step.graph)
    yield from compare_with_original(pair.original, pair.analysis, pair.step, pair.states, applied, moved)


def compare_with_original(
    original: ir.Model,
    analysis: Step,
    step: Step,
    states: Mapping[str, str | None],
    applied: Given,
    moved: Iterable[str] = (),
) -> Iterator[Check]:
    """Compare what a scaled step computes on an applied step with the original, and the ways of the scale.

    Spellings of other layouts, and those that round differently, are joined only where the file has differences.

    Args:
        original: the original.
        analysis: its step.
        step: the scaled step.
        states: `{input: output}` of the original's carried state.
        applied: gives the numbers of the scale and the flag on an applied step.
        moved: further differences.
    """

    def compare(*, rounds: bool) -> Relation:
        return Relation(original, step.model, (no_numbers, applied), states, rounds=rounds)

    relation = compare(rounds=False)
    found = exact = list(relation.find_differences())
    if exact:
        relation = compare(rounds=True)
        found = list(relation.find_differences())
    what = f"{len(original.graph.outputs)} outputs and {len(states)} states follow from the same operators"
    layouts = ", up to layouts and rounding" if exact else ""
    yield Check.proved(RELATION, [*moved, *found], what + layouts, UNPROVED)
    coverage, topology = analysis.coverage, analysis.topology
    assert topology is not None
    nodes = [n for n in coverage.nodes if n not in set(coverage.missed) and n.graph is analysis.graph]
    covered = f"{coverage.covered} of {coverage.total}" if coverage.total else "there is nothing to protect"
    yield Check.proved("backward contractions scaled", find_unscaled(relation, nodes), covered)
    untested = _find_untested_terms(analysis, step.all_finite, relation)
    yield Check.proved("moving terms checked", untested, f"{len(analysis.terms)} terms")
    values = values_by_name(analysis.graph)
    data = topology.descendants({value for value in topology.graph.inputs if not is_scalar(value)})
    fed = (name for name, value in values.items() if value in data)
    misplaced = find_misplaced(relation, fed, lambda name: topology.is_late(values[name]))
    yield Check.proved("scale enters at seeds", misplaced, "no value of a forward pass is multiplied by it")


def _find_untested_terms(analysis: Step, finite: ir.Value | None, relation: Relation) -> Iterator[str]:
    """Yield the terms by which a batch moves weights past all gradients, where no finite check tests them."""
    terms = analysis.terms
    if finite is None or not terms:
        return
    names = (value.name or "" for value in find_tested_values(finite, frozenset()))
    tested = {number.term for name in names if (number := relation.second.named(name)) is not None}
    for value in terms:
        number = relation.first.named(value.name or "")
        if number is None or number.term not in tested:
            yield f"{value.name!r} moves a weight by a batch past all gradients, and is not checked"


def _find_moved(original: ir.Graph, found: ir.Graph) -> Iterator[str]:
    """Yield the first input or output of the original that has another place among those of the file."""
    for kind in ("inputs", "outputs"):
        wanted, names = ([value.name for value in getattr(graph, kind)] for graph in (original, found))
        present = [name for name in wanted if name in names]
        order = [name for name in names if name in present]
        yield from (
            f"{name!r} is not in its place among the {kind}"
            for name, at in zip(present, order, strict=False)  # a damaged file names one twice
            if name != at
        )


def _compare_with_expected(pair: Pair, expected: ir.Model) -> Check:
    """Compare all outputs and written states with those of the original scaled again.

    So the update rule and the finite check are the policy's, in any spelling: a check that also refuses finite
    gradients would not change an applied step.
    """
    model = pair.lowered or pair.step.model
    names = {value.name for value in expected.graph.inputs}
    further = (f"{v.name!r} is a further input" for v in model.graph.inputs if v.name not in names)
    differences = Relation(expected, model, rounds=True).find_differences()
    what = f"{len(expected.graph.outputs)} outputs are those of the policy's step"
    return Check.proved("equal to the original scaled again", [*further, *differences], what, UNPROVED)
