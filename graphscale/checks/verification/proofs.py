"""The proofs of verify: one list of questions about an original and its scaled step, whoever scaled it."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator

import onnx_ir as ir
from onnx_ir.passes.common import InlinePass

from graphscale.analysis.hazards import find_in_place_writes, find_unordered_readers, is_fresh
from graphscale.analysis.proof import find_untested, scale_degrees
from graphscale.checks.patterns import input_at, producer, skip_ordering
from graphscale.checks.relation.relate import Relation
from graphscale.checks.verification.finite_check import find_other_conditions, find_tested_values
from graphscale.checks.verification.pair import Pair
from graphscale.checks.verification.related import find_unchecked, prove_relation
from graphscale.checks.verification.verify_report import (
    FAILS,
    RELATION,
    SKIPPED,
    UNPROVED,
    Check,
)
from graphscale.errors import InvalidLossScaleError
from graphscale.flow.outcome import Number, Outcomes, is_kept
from graphscale.flow.support import reach
from graphscale.graph.values import constant_tensor, node_name, operands_of, own_dtype
from graphscale.graph.walks import ancestors, source_by_trait
from graphscale.lowering.lower_model import is_lowered
from graphscale.operators import Trait, nodes_with, optimizer_of, overwritten_inputs
from graphscale.policy import presets
from graphscale.policy.loss_scale import DynamicLossScale, FixedLossScale
from graphscale.policy.observed_rule import ObservedLossScale

__all__ = ["NO_CHECK", "prove_pair"]

NO_CHECK = "a fixed loss scale is not checked: every step is applied, as in TensorFlow"
_LOWERED = "a lowered file with other nodes than this version writes: verify the step that it was lowered from"
_FREE = ("initial_loss_scale", "increment_period")  # the numbers that users of a preset choose


def prove_pair(pair: Pair, *, exact: bool, numeric: bool) -> list[Check]:
    """Prove a scaled step right.

    Args:
        pair: both graphs.
        exact: True if the comparison of nodes must hold: then it says that a lowered file with others is not proved.
        numeric: True if numbers alone were asked for: then nothing needs to be proved of other nodes.
    """
    numeric = numeric and not pair.proved
    checks, relation = prove_relation(pair, exact=exact or numeric)
    if is_lowered(pair.step.model):
        status = SKIPPED if exact or numeric else UNPROVED
        checks.append(Check("proof of the file", status, _LOWERED, True))
    else:
        checks += [*_prove_flag(pair, relation), _prove_rule(pair), _prove_order(pair.step.model)]
    if not numeric:
        return checks
    return [
        dataclasses.replace(each, status=SKIPPED) if each.status == UNPROVED or each.name == RELATION else each
        for each in checks
    ]


def _prove_flag(pair: Pair, relation: Relation) -> Iterator[Check]:
    """Yield the checks of the finite check, of applied values, and of guards."""
    step, flag = pair.step, pair.step.all_finite
    names = ("every gradient checked", "what is applied is checked", "carried state guarded")
    if flag is None:
        is_fixed, detail = isinstance(step.scale.policy, FixedLossScale), NO_CHECK
        if not is_fixed:
            detail = "no flag that depends on a gradient keeps the states of the original"
            if not pair.states:
                detail = "no further output is a flag by which the caller can skip the step"
        yield from (Check(name, SKIPPED if is_fixed else FAILS, detail, True) for name in names)
        return
    tested, results = find_tested_values(flag), _find_results(pair)
    degrees, _ = scale_degrees(step.graph, step.scale.value)
    decided = [value for value in (flag, step.scale.stuck) if value is not None]
    missed = find_untested(step.graph, step.scale.value, tested, results, degrees, decided)
    yield Check.proved(names[0], missed, f"{len(results)} results read no multiple that {flag.name!r} does not test")
    # Between different results, no operation has its certain counterpart.
    status = UNPROVED if relation.differs else FAILS
    unchecked = find_unchecked(pair, relation, tested, degrees)
    what = f"all sums in float16, and {len(pair.analysis.terms)} terms past all gradients"
    yield Check.proved(names[1], unchecked, what, status)
    others = find_other_conditions(flag, reach(step.graph, [step.scale.value]))
    conditions = [f"{flag.name!r} depends on {value.name!r}, which is no test of a gradient" for value in others]
    yield Check.proved("only non-finite gradients skip", conditions, "by their tests alone", UNPROVED)
    what = f"{len(pair.states)} states" if pair.states else f"there are none: the caller skips by {flag.name!r}"
    yield Check.proved(names[2], _find_unguarded(pair, flag), what)


def _find_results(pair: Pair) -> set[ir.Value]:
    """Find the values by which a step acts: the outputs of the original, and the operands of its writes."""
    names, added = {value.name for value in pair.original.graph.outputs}, {*pair.step.added}
    if pair.translation is None:  # others let the loss show the overflow of a skipped step
        names = {*pair.states.values(), *(value.name for value in pair.analysis.gradients)}
    writers = (node for node in nodes_with(pair.step.graph, Trait.EFFECT) if added.isdisjoint(node.inputs[:1]))
    outputs = {value for value in pair.step.graph.outputs if value.name in names}
    return outputs | {value for node in writers for value in operands_of(node)}


# --- the guards of carried state --------------------------------------------------------------------------------------


def _find_unguarded(pair: Pair, flag: ir.Value) -> Iterator[str]:
    """Yield the states that a skipped step may change; a policy may accept a step that is stuck non-finite."""
    graph, policy, stuck = pair.step.graph, pair.step.scale.policy, pair.step.scale.stuck
    sources = {value.name: value for value in (*graph.inputs, *graph.initializers.values())}
    outputs = {value.name: value for value in graph.outputs}
    writes = {node.inputs[0].name: node for node in nodes_with(graph, Trait.ACCUMULATOR) if node.inputs[0] is not None}
    flags = {flag: False}
    if stuck is not None and isinstance(policy, DynamicLossScale) and policy.rule.on_stuck == "accept":
        flags[stuck] = False
    skipped = Outcomes(graph, flags, sources.values())
    for name, output in pair.states.items():
        if name in pair.kept:
            continue
        state, following = sources.get(name), outputs.get(output)
        reason: str | None = None
        if state is None or (following is None and name not in writes):
            reason = "it is gone" if state is None else f"its next value {output!r} is gone"
        elif name in writes:
            reason = _find_write_fault(skipped, writes[name])
        elif following is not None:
            reason = _find_guard_fault(skipped, following, state)
        if reason is not None:
            yield f"the state {name!r} is not kept where {flag.name!r} is false: {reason}"
    for written, node in writes.items():
        if written not in pair.following:
            yield f"{node_name(node)!r} writes {written!r}, which is no state of the original (--update OUT={written})"
    for node, value in _find_unprotected_operands(graph):
        yield f"{node_name(node)!r} may overwrite {value.name!r} whether the step is applied or not"


def _find_guard_fault(skipped: Outcomes, value: ir.Value, state: ir.Value) -> str | None:
    """Return the reason why a next value is not the old one on a skipped step, or None."""
    value = skip_ordering(value)
    kept, node = skipped.of(value), value.producer()
    name = value.name if node is None else node_name(node)
    if is_kept(kept, state):
        return None
    if isinstance(kept, ir.Value) and source_by_trait(kept, Trait.CAST) is state:
        return f"{name!r} selects in {own_dtype(kept)}, which does not hold all numbers of {state.dtype}"
    return f"{name!r} gives {getattr(kept, 'name', kept)!r}, not the old value"


def _find_write_fault(skipped: Outcomes, node: ir.Node) -> str | None:
    """Return the reason why an accumulator could change its buffer on a skipped step, or None."""
    state, value, flag = node.inputs[0], node.inputs[1], input_at(node, 2)
    assert state is not None and value is not None
    may_assign = node.op_type == "InPlaceAccumulatorV2"
    if may_assign and flag is not None and skipped.of(flag) is True:
        # It overwrites the buffer, always or on a skipped step, with the buffer's own content.
        return _find_guard_fault(skipped, value, state)
    added = skipped.of(value)
    if added is not Number.MINUS_ZERO:
        return f"{node_name(node)!r} adds {getattr(added, 'name', added)!r}"
    return f"{node_name(node)!r} turns -0.0 into 0.0" if may_assign and flag is None else None


def _find_unprotected_operands(graph: ir.Graph) -> Iterator[tuple[ir.Node, ir.Value]]:
    """Find operands that a kernel overwrites, and that are no copies."""
    for node in graph:
        written: list[int | None] = list(overwritten_inputs(node))
        if (optimizer := optimizer_of(node)) is not None:
            written += [optimizer.source(o) for o, value in enumerate(node.outputs) if value.name]
        for i in written:
            value = input_at(node, i)
            # A sum of one operand is a copy in a new buffer.
            if value is not None and producer(value, "Sum") is None and not is_fresh(value):
                yield node, value


def _prove_order(model: ir.Model) -> Check:
    """Check that no node reads a state after its write, those inside functions included: runtimes inline functions."""
    count = len(list(find_in_place_writes(model.graph)))
    if model.functions:
        model = model.clone()
        InlinePass()(model)
    late = (
        f"{node_name(reader)!r} could read {write.inputs[0].name!r} after it was overwritten"
        for write, readers in find_unordered_readers(model.graph)
        if write.inputs[0] is not None
        for reader in readers
    )
    return Check.proved("in-place writes ordered", late, f"{count} writes, each after all readers")


# --- the update rule --------------------------------------------------------------------------------------------------


def _prove_rule(pair: Pair) -> Check:
    """Check that the update rule reads its own state and the flag alone, and, of a rule by others, its values."""
    name, policy = "update rule", pair.step.scale.policy
    if isinstance(policy, FixedLossScale):
        return Check(name, SKIPPED, "a fixed loss scale has none", True)
    if isinstance(policy, ObservedLossScale):
        return Check.proved(name, policy.faults, "a rule of its own" if policy.rows else "the caller feeds the scale")
    found = _name_preset(policy) if isinstance(policy, DynamicLossScale) else None
    return Check.proved(name, _find_rule_faults(pair), repr(policy) + (f", {found}" if found else ""))


def _find_rule_faults(pair: Pair) -> Iterator[str]:
    graph, scale = pair.step.graph, pair.step.scale
    for role, state in scale.states.items():
        if role not in scale.next:
            yield f"{state.name!r} has no next value"
    own = {*scale.states.values(), *([] if pair.step.all_finite is None else [pair.step.all_finite])}
    sources = (*graph.inputs, *graph.initializers.values())
    others = [value for value in sources if value not in own and constant_tensor(value) is None]
    following = set(scale.next.values())
    if not following.isdisjoint(reach(graph, others, own)):
        above = ancestors(following, stop=own.__contains__)
        yield from (f"the update rule reads {value.name!r}" for value in others if value in above)
    if pair.step.all_finite not in ancestors(following):
        yield "the update rule does not read the finite flag"


def _name_preset(policy: DynamicLossScale) -> str | None:
    """Name the projects with the rule of a policy."""
    own = {field: getattr(policy.rule, field) for field in _FREE}
    if DynamicLossScale(**own).rule == policy.rule:
        return "TensorFlow's rule"
    # Halving and doubling are exact in either arithmetic.
    is_exact = {policy.rule.growth, policy.rule.multiplier} == {2.0} and policy.rule.backoff_factor in (None, 0.5)
    kinds = ("float32", "float64") if is_exact else (policy.rule.arithmetic,)
    rules, found = [dataclasses.replace(policy.rule, arithmetic=kind) for kind in kinds], list[str]()
    for name in presets.NAMES:
        with contextlib.suppress(InvalidLossScaleError):  # a preset may have no rule with these numbers
            found += [name] if getattr(presets, name)(**own).rule in rules else []
    return f"the rule of {' and '.join(found)}" if found else None
