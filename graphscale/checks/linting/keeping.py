"""Rules on the keeping of state, GS501 to GS506; on its first values, GS107; on unexplained state, GS407."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import onnx_ir as ir

from graphscale.analysis.hazards import find_unordered_readers
from graphscale.checks.linting.lint_context import LintContext, rule
from graphscale.checks.linting.lint_report import Finding, report
from graphscale.checks.linting.state_search import Carry, find_in_place
from graphscale.graph.notes import SCALED_LOSS_NOTE
from graphscale.graph.stamp import Stamp
from graphscale.graph.values import constant_number, is_scalar, is_source, node_name, op_name
from graphscale.policy.loss_scale import DynamicLossScale
from graphscale.policy.names import COUNTERS, ScaledValue

__all__ = ["UNSEEN"]

# The codes that a half of a split step cannot show. The scale enters in one stage, and comes out in another; values
# between the halves are no state; only the forward pass shows the weights among the state.
UNSEEN = {"gradients": ["GS3"], "stage": ["GS1", "GS2", "GS3", "GS407"], "update": ["GS602"]}
_SCALE = ScaledValue.LOSS_SCALE
_LARGEST = float(np.finfo(np.float32).max)
# The factor from the smallest float16 number above zero to beyond the largest.
_OVERFLOWS = 2.0**40
# Bounds of telemetry's counters by others, `{counter: bound}`.
_BOUNDS = {"skipped_steps": "steps", "last_skip_step": "steps", "consecutive_skips": "skipped_steps"}


@rule("GS501")
def _foldable(context: LintContext) -> Iterator[Finding]:
    carried = [(state.value, state.node) for state in context.states if state.carry is not Carry.STATISTIC]
    for value, node in [*carried, *((value, None) for value in context.nexts)]:
        is_constant = value.is_initializer() and not value.is_graph_input()
        if is_constant and any(use.node is not node for use in value.uses()):
            yield report("GS501", f"{value.name!r} changes from step to step, and is an initializer only", value=value)


@rule("GS502")
def _hazards(context: LintContext) -> Iterator[Finding]:
    for write, readers in find_unordered_readers(context.graph):
        state = write.inputs[0]
        names = ", ".join(repr(node_name(node)) for node in readers[:3]) + (" ..." if len(readers) > 3 else "")
        name = "?" if state is None else state.name
        yield report("GS502", f"{names} may read {name!r} after it was overwritten", write, state)


@rule("GS503")
def _metadata(context: LintContext) -> Iterator[Finding]:
    if (stamp := context.stamp) is None:
        return
    exposed = {("output", value.name or ""): SCALED_LOSS_NOTE for value in context.exempt(context.nexts)}
    yield from (report("GS503", text) for text in stamp.find_wrong_notes(context.model, exposed))
    if _is_other_part(context, stamp):
        return
    outputs = {value.name for value in context.graph.outputs}
    # Each half has some of the named values.
    named = [] if context.half else [name for name in stamp.names.values() if name]
    missing = [name for name in [*named, *stamp.state] if name not in context.values]
    missing += [name for name in stamp.state.values() if name not in outputs]
    for name in dict.fromkeys(missing):
        place = "" if name not in context.values else " as an output"
        yield report("GS503", f"the metadata name {name!r}, which the graph does not have{place}")
    written = {state.value.name for state in find_in_place(context.nodes)}
    known = {*stamp.carried, *stamp.names.values()}.difference(stamp.state, written)
    for value in (update.input for update in context.understood.updates if stamp.state and update.input.name in known):
        yield report(
            "GS503", f"{value.name!r} is carried, and the metadata do not say what its next value is", value=value
        )


@rule("GS506")
def _half(context: LintContext) -> Iterator[Finding]:
    if context.half is not None:
        codes = ", ".join(UNSEEN[context.half])
        yield report("GS506", f"{codes}, and values that the metadata name and this half lacks, are not looked for")


def _is_other_part(context: LintContext, stamp: Stamp) -> bool:
    """Return whether a model has none of the named values: the models of an artifact folder share one stamp."""
    return not stamp.state and context.values.keys().isdisjoint(stamp.names.values())


@rule("GS407")
def _unexplained(context: LintContext) -> Iterator[Finding]:
    """Find state added to a scaled graph: state that neither the metadata nor the roles in its report have."""
    stamp = context.stamp
    if stamp is None or _is_other_part(context, stamp):
        return
    report_of, carried = stamp.report, {*stamp.carried, *stamp.names.values()}
    with_roles = {entry.get("name") for entry in report_of.get("roles", ()) if isinstance(entry, dict)}
    known = {*carried, *with_roles, *stamp.state.values(), *(f"{name}.next" for name in carried)}
    exempt = context.exempt(context.nexts)
    for state, output in ((update.input, update.output) for update in context.understood.updates):
        is_constant = is_scalar(state) and not state.is_graph_input()
        if not is_constant and state.name not in carried and output.name not in known and output not in exempt:
            yield _describe_state(context, f"output {output.name!r} may be the next value of", output, state)
    accumulators = set(report_of.get("accumulators", ()))
    # Without a check, no step is skipped: the original's statistics need no guard.
    for found in () if context.check is None else find_in_place(context.graph.all_nodes()):
        node, value = found.node, found.value
        if node is not None and value.name not in carried and node_name(node) not in accumulators and is_source(value):
            yield _describe_state(context, f"{op_name(node)} writes in place", node.outputs[0], value)


def _describe_state(context: LintContext, message: str, following: ir.Value, state: ir.Value) -> Finding:
    bad = None if context.outcomes is None else context.outcomes[1].of(following)
    also = "" if bad is state or bad is None else ", on a skipped step too"
    text = f"{message} {state.name!r}{also}; neither the metadata nor the roles have it as state"
    return report("GS407", text, following.producer(), state)


@rule("GS107", "GS504", "GS505")
def _beginnings(context: LintContext) -> Iterator[Finding]:
    """Find the scale and counts that begin outside of their range, or not as the policy does."""
    step, scale = context.step, context.scale
    policy = step.scale.policy if step.scales else None
    values: dict[str, ir.Value] = {role: value for role, value in context.named.items() if role != _SCALE}
    if scale is not None and (step.scales or scale.value is scale.scalars.symbol):
        values[_SCALE] = scale.value
    numbers = {r: number for r, v in values.items() if (number := constant_number(v, initial=True)) is not None}
    most_of = {role: numbers.get(_BOUNDS.get(role, ""), math.inf) for role in (*COUNTERS, ScaledValue.BAD_STEPS)}
    ranges: dict[str, tuple[float, float]] = {r: (0, most if most >= 0 else math.inf) for r, most in most_of.items()}
    ranges[_SCALE] = (1.0, _LARGEST)
    firsts: dict[str, float] = {} if policy is None or scale is None else {_SCALE: float(policy())}
    dynamic = policy.rule if isinstance(policy, DynamicLossScale) else None
    if dynamic is not None:
        firsts |= {role.value: number for role, number in dynamic.carried(dynamic.initial_state()).items()}
        ranges |= {role: ends for role, ends in dynamic.ranges.items() if role is not ScaledValue.BAD_STEPS}
    for role, number in numbers.items():
        least, most = ranges.get(role, (-math.inf, math.inf))
        is_scale, value = role == _SCALE, values[role]
        ends = f"at least {least:g}" if most >= _LARGEST else f"from {least:g} to {most:g}"
        name = f"{value.name!r} begins with {number:g}"
        code, what = ("GS107", f"the loss scale {name}") if is_scale else ("GS504", f"{name}, and it is a count {ends}")
        is_sound = number > 0 if is_scale else number.is_integer()
        if role in ranges and not (least <= number <= most and is_sound):
            kept = "" if not is_scale or dynamic is None else f", and its policy keeps it {ends}"
            yield report(code, f"{what}{kept}", value=value)
        elif is_scale and number > _OVERFLOWS and context.has_gradients_in(ir.DataType.FLOAT16):
            yield report(code, f"{what}, times which every number of float16 but zero overflows", value=value)
        elif role in firsts and number != np.float32(firsts[role]):
            yield report("GS505", f"{name}, and the policy begins with {firsts[role]:g}", value=value)
