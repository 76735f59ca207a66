"""verify for a step that somebody else scaled: relation with the original, finite check, update rule, trial."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import onnx_ir as ir

from graphscale.analysis.hints import NO_HINTS, Hints
from graphscale.analysis.proof import scale_degrees
from graphscale.checks.relation.terms import Number, Terms
from graphscale.checks.verification.finite_check import find_other_conditions, find_tested_values
from graphscale.checks.verification.related import compare_with_original
from graphscale.checks.verification.trial import try_step
from graphscale.checks.verification.verify_report import (
    FAILS,
    HOLDS,
    SKIPPED,
    UNPROVED,
    Check,
    VerifyReport,
)
from graphscale.errors import AlreadyScaledError
from graphscale.flow.degree import ZERO
from graphscale.flow.outcome import Outcomes, is_kept
from graphscale.flow.support import reach
from graphscale.flow.survival import find_lost
from graphscale.graph.cones import producers_of
from graphscale.graph.inference import infer_types
from graphscale.graph.order import check_order
from graphscale.graph.stamp import has_lost_stamp, is_scaled
from graphscale.graph.types import holds_all
from graphscale.graph.values import constant_tensor, operands_of, own_dtype
from graphscale.graph.walks import ancestors
from graphscale.operators import Trait, has_trait
from graphscale.passes import LowerTrainingOps, replace_training_ops
from graphscale.passes.preparation import prepare
from graphscale.pipeline import Model, open_copy
from graphscale.policy import presets
from graphscale.policy.loss_scale import DynamicLossScale, FixedLossScale, LossScale
from graphscale.policy.observed_rule import ObservedLossScale
from graphscale.step.training_step import Step
from graphscale.step.understanding import understand
from graphscale.step.unstamped_step import powers_of, read_unstamped
from graphscale.targets import TARGETS

__all__ = ["open_unstamped", "verify_unstamped"]

_FREE = ("initial_loss_scale", "increment_period")  # the numbers that users of a preset choose


def open_unstamped(scaled: Model) -> tuple[ir.Model, str] | None:
    """Return a copy of a model that graphscale has not scaled, and its name; None for one that it has."""
    model, name = open_copy(scaled)
    return None if is_scaled(model) or has_lost_stamp(model) else (model, name)


def verify_unstamped(
    original: Model, scaled: tuple[ir.Model, str], hints: Hints, expected: LossScale | str | None, *, runs: int
) -> VerifyReport:
    """Verify a step that somebody else scaled; see `verify`.

    Args:
        original: the original.
        scaled: a copy of the scaled model, and its name.
        hints: the user's names in the original.
        expected: the expected policy, or "dynamic".
        runs: 0 for the proof alone.

    Raises:
        GraphscaleError: a graph cannot be read, the original cannot be understood, or the graph has no loss scale.
    """
    (first, first_name), (model, name) = open_copy(original), scaled
    if is_scaled(first):
        raise AlreadyScaledError(f"{first_name} carries a loss scale; the original comes first: verify ORIGINAL SCALED")
    for each, its_name in ((first, first_name), scaled):
        check_order(each.graph, its_name)
        prepare(each, hints if each is first else NO_HINTS)
        infer_types(each)  # other tools leave types out
    if not LowerTrainingOps.applies(model):
        replace_training_ops(first, TARGETS["onnx"])
    found = understand(first, hints)
    step = read_unstamped(model, found, name)
    rule, rows = _describe_rule(step)
    checks = [
        *_compare(found, step),
        *_check_flag(found, step),
        rule,
        *_compare_policies(step.scale.policy, expected),
    ]
    notes = [*_describe(step), *rows]
    if runs:
        checks.append(_try(found, step))
    return VerifyReport(
        tuple(checks), tuple(notes), runs=int(bool(runs)), applied=repr(step.scale.policy) if _applies(step) else ""
    )


def _applies(step: Step) -> bool:
    return step.all_finite is None


def _describe(step: Step) -> Iterator[str]:
    what = "applied" if _applies(step) else "skipped"
    yield f"somebody else scaled this file: {step.scale.value.name!r} is its loss scale" + (
        "" if step.all_finite is None else f", {step.all_finite.name!r} its finite flag"
    )
    yield f"a step with a non-finite gradient is {what}: {step.scale.policy!r}"


# --- the proofs -------------------------------------------------------------------------------------------------------


def _compare(original: Step, step: Step) -> Iterator[Check]:
    """Compare the outputs and states of an applied step with the original's."""
    powers = powers_of(step.graph, step.scale.value, original.graph)
    flag = step.all_finite

    def applied(terms: Terms) -> Mapping[str, Number]:
        numbers = {
            v.name or "": Number(terms.array_term(np.full(_shape(v), number, _dtype(v))), power)
            for v, (power, number) in powers.items()
        }
        return numbers if flag is None else {**numbers, flag.name or "": Number(terms.true)}

    states = {update.input.name or "": update.output.name for update in original.states}
    return compare_with_original(original.model, original, step, states, lambda _: [applied])


def _shape(value: ir.Value) -> tuple[int, ...]:
    tensor = constant_tensor(value)
    return tuple(tensor.shape.numpy()) if tensor is not None else (1,) * len(value.shape or ())


def _dtype(value: ir.Value) -> np.dtype[Any]:
    return (own_dtype(value) or ir.DataType.FLOAT).numpy()


def _check_flag(original: Step, step: Step) -> Iterator[Check]:
    """Yield the checks of the finite check, and of the guards."""
    names, flag = ("every gradient checked", "carried state guarded"), step.all_finite
    if flag is None:
        is_fixed = isinstance(step.scale.policy, FixedLossScale)
        detail = "a constant scale without a finite check: every step is applied"
        reason = "no flag that depends on a gradient keeps the states of the original"
        if not original.states:
            reason = "no further output is a flag by which the caller can skip the step"
        for name in names:
            yield Check(name, SKIPPED if is_fixed else FAILS, detail if is_fixed else reason, True)
        return
    tested = find_tested_values(flag, frozenset())
    guarded = [each for each in step.carried if each.guarded]
    # A loss or a metric may show the overflow of a skipped step; what is carried, or leaves as a gradient, may not.
    gradients = {value.name for value in original.gradients}
    results = {each.next for each in guarded} | {v for v in step.graph.outputs if v.name in gradients}
    yield Check.proved(names[0], _find_untested(step, tested, results), f"all that {len(results)} outputs read of it")
    others = find_other_conditions(flag, reach(step.graph, [step.scale.value]))
    conditions = [f"{flag.name!r} depends on {value.name!r}, which is no test of a gradient" for value in others]
    yield Check.proved("only non-finite gradients skip", conditions, "by their tests alone", UNPROVED)
    outcomes = Outcomes(step.graph, {flag: False}, [each.input for each in guarded])
    unguarded = (
        f"the state {each.input.name!r} is not kept where {flag.name!r} is false"
        for each in guarded
        if not is_kept(outcomes.of(each.next), each.input)
    )
    what = f"{len(guarded)} states" if guarded else f"there are none: the caller skips by {flag.name!r}"
    yield Check.proved(names[1], unguarded, what)


def _find_untested(step: Step, tested: set[ir.Value], results: set[ir.Value]) -> Iterator[str]:
    """Yield the multiples of the scale that reach results past the tested values, and overflows that become finite.

    A tested multiple needs no second test after views and casts to a wider type; a narrower one may overflow again.
    """
    scale, states = step.scale.value, {*step.scale.states.values()}
    aside = {
        node for following in step.scale.next.values() for node in _nodes_of(following, {step.all_finite, *states})
    }
    aside -= producers_of(ancestors(results))
    nodes = [node for node in step.graph if node not in aside]
    degrees, _ = scale_degrees(nodes, scale)
    multiples, known, alone = dict[ir.Value, None](), set(tested), {scale}
    for node in nodes:
        follows = all(v in alone or constant_tensor(v) is not None for v in operands_of(node))
        alone.update(node.outputs if follows and not alone.isdisjoint(node.inputs) else ())
        operand = node.inputs[0] if node.inputs else None
        is_same = has_trait(node, Trait.EXACT) and operand is not None and operand in known
        for value in node.outputs:
            if degrees.get(value, 0) in (0, ZERO) or value in alone or value in known:
                continue
            if is_same and operand is not None and holds_all(own_dtype(value), own_dtype(operand)):
                known.add(value)
            else:
                multiples[value] = None
    for value, loss in find_lost(nodes, scale, tested).items():
        yield f"an overflow would not reach the finite check of {value.name!r}: {loss}"
    stop = {value for value in (*tested, step.all_finite) if value is not None and value not in alone}
    # The relation names an output that is a multiple itself.
    reached = reach(nodes, [value for value in multiples if value not in results], stop)
    for value in step.graph.outputs:
        if value in results and value in reached:
            above = ancestors([value], stop=stop.__contains__) - {value}
            passed = next(multiple for multiple in reversed(multiples) if multiple in above)
            yield f"{value.name!r} reads the multiple {passed.name!r} of the scale, which no finite check tests"


def _nodes_of(value: ir.Value, stop: set[ir.Value | None]) -> Iterator[ir.Node]:
    for each in ancestors([value], stop=stop.__contains__):
        if each not in stop and (node := each.producer()) is not None:
            yield node


# --- the policy -------------------------------------------------------------------------------------------------------


def _describe_rule(step: Step) -> tuple[Check, list[str]]:
    """Return the check of the update rule, and its values if it is no policy's."""
    name, policy = "update rule", step.scale.policy
    if isinstance(policy, ObservedLossScale):
        what = "a rule of its own" if policy.rows else "the caller feeds the scale"
        notes = [f"its update rule gives: {policy.table}"] if policy.rows else []
        return Check.proved(name, policy.faults, what), notes
    if isinstance(policy, DynamicLossScale):
        found = _name_preset(policy)
        return Check(name, HOLDS, f"{policy!r}" + (f", {found}" if found else ""), True), []
    return Check(name, SKIPPED, "a fixed loss scale has none", True), []


def _name_preset(policy: DynamicLossScale) -> str | None:
    """Name the projects with the rule of a policy."""
    own = {field: getattr(policy.rule, field) for field in _FREE}
    if DynamicLossScale(**own).rule == policy.rule:
        return "TensorFlow's rule"
    # Halving and doubling are exact in either arithmetic.
    is_exact = {policy.rule.growth, policy.rule.multiplier} == {2.0} and policy.rule.backoff_factor in (None, 0.5)
    kinds = ("float32", "float64") if is_exact else (policy.rule.arithmetic,)
    rules = [dataclasses.replace(policy.rule, arithmetic=kind) for kind in kinds]
    found = [name for name in presets.NAMES if getattr(presets, name)(**own).rule in rules]
    return f"the rule of {' and '.join(found)}" if found else None


def _compare_policies(policy: LossScale, expected: LossScale | str | None) -> Iterator[Check]:
    if expected is not None:
        is_fit = (
            isinstance(policy, DynamicLossScale)
            if isinstance(expected, str)
            else (type(policy), policy.get_config()) == (type(expected), expected.get_config())
        )
        detail = repr(policy) if is_fit else f"the file has {policy!r}, and {expected!r} was expected"
        yield Check("policy as expected", HOLDS if is_fit else FAILS, detail, True)


# --- the numbers ------------------------------------------------------------------------------------------------------


def _try(original: Step, step: Step) -> Check:
    """Run both graphs; see `trial`."""
    if step.all_finite is not None and step.all_finite not in step.graph.outputs:
        step.graph.outputs.append(step.all_finite)
    return try_step([original], step)
