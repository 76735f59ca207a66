"""The checks by the relation of two models, which believe nothing of a file but the names of the scale and the flag."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import numpy as np
import onnx_ir as ir

from graphscale.checks.relation.obligations import find_misplaced, find_unscaled
from graphscale.checks.relation.relate import Given, Relation, find_cases, no_numbers
from graphscale.checks.relation.terms import Number, Terms
from graphscale.checks.translation.validation import Translation
from graphscale.checks.verification.finite_check import find_tested_values
from graphscale.checks.verification.pair import Pair
from graphscale.checks.verification.verify_report import FAILS, RELATION, SKIPPED, UNPROVED, Check
from graphscale.graph.values import is_scalar, values_by_name
from graphscale.lowering.lower_model import is_lowered
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
    wide = [] if pair.wide is None else [_compare_with_float32(pair, pair.wide)]
    return [*_compare_with_original(pair), *wide, *rules]


def _compare_with_original(pair: Pair) -> Iterator[Check]:
    """Compare the file with the original, of a lowered one in each case of the branches that give its flag."""
    model = pair.lowered or pair.step.model
    moved = _find_moved(pair.original.graph, model.graph)
    applied = functools.partial(_applied, pair)
    yield from compare_with_original(pair.original, pair.analysis, pair.step, pair.states, applied, moved, pair.lowered)


def compare_with_original(
    original: ir.Model,
    analysis: Step,
    step: Step,
    states: Mapping[str, str | None],
    applied: Callable[[ir.Model], Sequence[Given]],
    moved: Iterable[str] = (),
    lowered: ir.Model | None = None,
) -> Iterator[Check]:
    """Compare what a scaled step computes on an applied step with the original, and the ways of the scale.

    Spellings of other layouts, and those that round differently, are joined only where the file has differences.

    Args:
        original: the original.
        analysis: its step.
        step: the scaled step.
        states: `{input: output}` of the original's carried state.
        applied: gives the numbers of the scale and the flags in each case of an applied step.
        moved: further differences.
        lowered: the lowered file with the step as its plain form, which has the places of the scale.
    """

    def compare(model: ir.Model, *, rounds: bool) -> list[Relation]:
        return [Relation(original, model, (no_numbers, case), states, rounds=rounds) for case in applied(model)]

    relations = compare(lowered or step.model, rounds=False)
    found = exact = [each for case in relations for each in case.find_differences()]
    if exact:
        relations = compare(lowered or step.model, rounds=True)
        found = [each for case in relations for each in case.find_differences()]
    what = f"{len(original.graph.outputs)} outputs and {len(states)} states follow from the same operators"
    layouts = ", up to layouts and rounding" if exact else ""
    yield Check.proved(RELATION, [*moved, *found], what + layouts, UNPROVED)
    if lowered is not None:
        relations = compare(step.model, rounds=bool(exact))
    relation = relations[0]
    coverage, topology = analysis.coverage, analysis.topology
    assert topology is not None
    nodes = [n for n in coverage.nodes if n not in set(coverage.missed) and n.graph is analysis.graph]
    covered = f"{coverage.covered} of {coverage.total}" if coverage.total else "there is nothing to protect"
    # Between different results, no operation has its certain counterpart.
    status = UNPROVED if found else FAILS
    yield Check.proved("backward contractions scaled", find_unscaled(relation, nodes), covered, status)
    untested = _find_untested_terms(analysis, step.all_finite, relation)
    yield Check.proved("moving terms checked", untested, f"{len(analysis.terms)} terms", status)
    values = values_by_name(analysis.graph)
    data = topology.descendants({value for value in topology.graph.inputs if not is_scalar(value)})
    fed = (name for name, value in values.items() if value in data)
    misplaced = find_misplaced(relation, step.scale.value.name or "", fed, lambda name: topology.is_late(values[name]))
    yield Check.proved("scale enters at seeds", misplaced, "no value of a forward pass is multiplied by it", UNPROVED)


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


def _applied(pair: Pair, model: ir.Model) -> list[Given]:
    """Give numbers to the scale and the flags of an applied step; a lowered step has one case for each branch."""
    names = pair.step.stamp.names
    scale, flag = names.get(ScaledValue.LOSS_SCALE, ""), names.get(ScaledValue.ALL_FINITE, "")

    def give(terms: Terms, known: Mapping[str, bool]) -> Mapping[str, Number]:
        flags = {name: Number(terms.true if is_set else terms.false) for name, is_set in known.items()}
        return {**flags, scale: Number(terms.array_term(np.array(1, np.float32)), 1)}

    cases = find_cases(model, flag) if is_lowered(model) else [{flag: True}]
    return [functools.partial(give, known=case) for case in cases]


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
