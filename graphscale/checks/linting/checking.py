"""Rules on the finite check, and on gradients that become finite before it: GS301 to GS306."""

from __future__ import annotations

from collections.abc import Iterator

import onnx_ir as ir

from graphscale.checks.linting.check import INFINITY, Check, is_hiding
from graphscale.checks.linting.lint_context import LintContext, rule
from graphscale.checks.linting.lint_report import Finding, report
from graphscale.checks.linting.state_search import Carry
from graphscale.flow.outcome import Outcomes
from graphscale.flow.showing import is_empty
from graphscale.flow.support import reach
from graphscale.graph.values import constant_number, inputs_of, is_float, is_scalar, op_name
from graphscale.graph.walks import source_by_trait
from graphscale.operators import Fate, Trait, has_trait, nodes_with, rule_of

__all__: list[str] = []


@rule("GS301", "GS302", "GS303", "GS304", "GS306")
def _coverage(context: LintContext) -> Iterator[Finding]:
    checks = filter(None, (context.check, context.window_check)) if context.roots else ()
    for check in checks:
        yield from _covered(context, check)
    if (context.check is None or not context.roots) and context.scale is not None and context.scale.adjusts:
        name = context.scale.value.name
        yield report("GS304", f"nothing tests the gradients that {name!r} scales", value=context.scale.value)


def _covered(context: LintContext, check: Check) -> Iterator[Finding]:
    if not any(value in context.sources or value in context.roots for value in check.tested.kinds):
        yield report("GS304", f"{check.value.name!r} tests no gradient", check.value.producer(), check.value)
        return
    by_node: dict[tuple[str, ir.Node | None], list[ir.Value]] = {}
    # The original says that it is the loss: it may show an overflow, and changes nothing.
    shown = context.loss if context.step.scales and context.stamp is None else None
    for value in (value for value in _escaping(context, check) if value is not shown):
        for code, node in _missing(check, value):
            by_node.setdefault((code, node), []).append(value)
    for (code, node), values in by_node.items():
        yield _describe(code, node, values, check)


def _escaping(context: LintContext, check: Check) -> list[ir.Value]:
    """Return the gradients that reach an output or state untested: unscaled ones, tested in part, or the last form."""
    tested = {value for value in check.tested.kinds if check.covers(value)} | {check.value}
    nodes = [node for node in context.nodes if not any(map(context.is_bookkeeping, node.outputs))]
    roots = context.roots - tested
    if (scale := context.scale) is not None and context.half is None:
        # A quotient by the scale is no more doubtful than its dividend, and neither is a gradient clipped to the scaled
        # threshold.
        entries = (n for n in nodes if not roots.isdisjoint(n.inputs) and tested.isdisjoint(context.operands(n)))
        roots = {v for n in entries for v in n.outputs if scale.carries(v)} - tested
    reached = reach(nodes, roots, tested)
    effects = (node for node in nodes_with(nodes, Trait.EFFECT) if tested.isdisjoint(node.outputs))
    ends = [v for node in effects for v in inputs_of(node) if v in reached]
    ends += [v for v in context.graph.outputs if v in reached and v not in context.exempt(context.nexts)]
    named = [value for value in context.unscaled or check.tested.kinds if value in reached]
    named += context.roots if context.half else []
    above = context.ancestors(ends, stop={*named, *tested}.__contains__)
    found = [value for value in named if value in above]
    behind = reach(nodes, found, tested)
    return [*found, *(value for value in dict.fromkeys(ends) if value not in behind)]


def _missing(check: Check, value: ir.Value) -> list[tuple[str, ir.Node | None]]:
    lost = check.tested.lost.get(value, {})
    hiding = next((loss.node for loss in lost.values() if is_hiding(loss.node)), None)
    if hiding is not None:
        return [("GS306", hiding)]
    part = next((n for loss in lost.values() if has_trait(n := loss.node, Trait.PART) or is_empty(n)), None)
    if part is not None or not lost:
        return [("GS301", part)]
    # Infinity that becomes NaN is no second loss where NaN is lost as well.
    nan, infinite = lost.get(Fate.NAN), [lost[kind] for kind in INFINITY if kind in lost]
    infinite = [each for each in infinite if nan is None or each.kinds is not Fate.NAN]
    return [(code, each.node) for code, each in (("GS302", nan), ("GS303", next(iter(infinite), None))) if each]


def _describe(code: str, node: ir.Node | None, values: list[ir.Value], check: Check) -> Finding:
    names = ", ".join(repr(value.name) for value in values[:3]) + (" ..." if len(values) > 3 else "")
    if code == "GS301":
        part = "it" if node is None else f"more of it than {op_name(node)} takes"
        message = f"{names} is used, and {check.value.name!r} does not test {part}"
        return report(code, message, node or values[0].producer(), values[0])
    assert node is not None
    if code == "GS306":
        return report(code, f"{op_name(node)} hides NaN or infinity in {names} from the check", node, values[0])
    kind = "NaN" if code == "GS302" else "infinity"
    return report(code, f"{op_name(node)} does not tell of {kind} in {names}", node, values[0])


@rule("GS301")
def _elements(context: LintContext) -> Iterator[Finding]:
    """Find elements of a sequence of gradients that are not tested."""
    if (check := context.check) is None:
        return
    indices: dict[ir.Value, set[int]] = {}
    for node in context.nodes:
        if node.op_type == "SequenceAt" and check.covers(node.outputs[0]):
            number, sequence = constant_number(node.inputs[1]), node.inputs[0]
            if number is not None and sequence is not None and sequence in context.roots:
                indices.setdefault(sequence, set()).add(int(number))
    for sequence, present in indices.items():
        missing = next((i for i in range(max(present)) if i not in present), None)
        if missing is not None:
            message = f"element {missing} of {sequence.name!r} is used, and {check.value.name!r} does not test it"
            yield report("GS301", message, value=sequence)


@rule("GS305")
def _scale_reacts(context: LintContext) -> Iterator[Finding]:
    scale, check = context.scale, context.check
    if scale is None or check is None or not scale.adjusts:
        return
    for state in context.scale_states:
        if state.carry is Carry.ADD:
            message = f"{state.value.name!r} is added to, where it should be assigned"
            yield report("GS305", message, state.node, state.value)
    following = scale.nexts[scale.value]
    # A scale chosen at the beginning of a window of steps follows the check of the last window.
    direct = scale.scalars.symbol is scale.value
    if context.window_check is None and direct and following not in check.dependent:
        message = f"{following.name!r} does not depend on {check.value.name!r}"
        yield report("GS305", message, following.producer(), following)
    elif direct and context.outcomes is not None:
        holds, fails = (_directions(outcomes, following, scale.value) for outcomes in context.outcomes)
        if holds is not None and fails is not None and "down" not in fails:
            where = f"falls where {check.value.name!r} holds, and not" if "down" in holds else "does not fall"
            message = f"{scale.value.name!r} {where} where the check fails"
            yield report("GS305", message, following.producer(), following)


def _directions(outcomes: Outcomes, following: ir.Value, scale: ir.Value) -> set[str] | None:
    """Return whether the next scale may go "up" or "down" on a step, None if unknown."""
    found_ways: set[str] = set()
    pending, seen = [following], set[ir.Value]()
    while pending:
        value = outcomes.of(pending.pop())
        if not isinstance(value, ir.Value) or value in seen or value is scale or constant_number(value) is not None:
            continue
        seen.add(value)
        node = value.producer()
        if node is None:
            return None
        if node.op_type == "Where" or has_trait(node, Trait.VIEW | Trait.BOUND):
            pending += inputs_of(node)[node.op_type == "Where" :]
            continue
        operands = (source_by_trait(v, Trait.CAST) for v in inputs_of(node))
        factor = next((n for v in operands if (n := constant_number(v)) is not None), None)
        if node.op_type not in ("Mul", "Div") or factor is None:
            return None
        found_ways.add("up" if (factor > 1) == (node.op_type == "Mul") else "down")
    return found_ways


@rule("GS306")
def _hidden(context: LintContext) -> Iterator[Finding]:
    """Find the nodes that lose NaN or infinity of a gradient before a check of their results."""
    if context.check is None or context.scale is None or context.window_check is not None:
        return
    check, positions = context.check, context.positions
    hidden: dict[tuple[ir.Node, ir.Value], Fate] = {}
    for value, losses in check.shown.lost.items():
        lost = [each for each in losses.values() if not check.needed.isdisjoint(each.node.outputs)]
        # The first node that loses any of them, in execution order: behind it, a clip loses no more.
        node = min((each.node for each in lost), key=positions.__getitem__, default=None)
        for each in lost if _may_overflow(context, value) else ():
            if each.node is node and each.value is not None:
                hidden[node, each.value] = hidden.get((node, each.value), Fate.NONE) | each.kinds
    for (node, value), kinds in hidden.items():
        # The scale's own values are no gradients, and neither is a sum over a whole tensor.
        is_own = any(map(context.is_bookkeeping, (value, *node.outputs))) or value in context.roots
        if is_float(value) and not is_own and not is_scalar(value):
            names = [name for name, lost in (("NaN", Fate.NAN), ("infinity", INFINITY)) if lost & kinds]
            what = f"{' and '.join(names)} in {value.name!r}"
            message = f"{op_name(node)} makes {what} finite, and {check.value.name!r} tests the result"
            yield report("GS306", message, node, value)


def _may_overflow(context: LintContext, value: ir.Value) -> bool:
    """Return whether a gradient may be the first that is not finite: no view, no norm, no result of an optimizer."""
    node, scale = value.producer(), context.scale
    if node is None or scale is None:
        return True
    if value in context.unscaled and not (node.op_type == "Div" and node.inputs[0] in context.roots):
        return True
    rule = rule_of(node)
    is_norm = rule is not None and rule.bends
    return scale.degree(value) == 1 and not is_norm and not has_trait(node, Trait.EXACT)
