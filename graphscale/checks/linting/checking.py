"""Rules on the finite check: GS301 to GS305."""

from __future__ import annotations

from collections.abc import Iterator

import onnx_ir as ir

from graphscale.checks.linting.check_search import INF, NAN, Check
from graphscale.checks.linting.lint_context import Rule, Subject
from graphscale.checks.linting.lint_report import Finding, found
from graphscale.checks.linting.state_search import Carry
from graphscale.checks.linting.steps import Outcomes
from graphscale.checks.linting.view import number_of
from graphscale.graph.values import op_name
from graphscale.operators import Kind, Trait, has_trait, rule_of

__all__ = ["RULES"]


def _coverage(subject: Subject) -> Iterator[Finding]:
    yield from _covered(subject, subject.check)
    if subject.window_check is not None:
        yield from _covered(subject, subject.window_check)


def _covered(subject: Subject, check: Check | None) -> Iterator[Finding]:
    if check is None or not subject.roots:
        if subject.scale is not None and subject.scale.adjusts:
            name = subject.scale.value.name
            yield found("GS304", f"nothing tests the gradients that {name!r} scales", value=subject.scale.value)
        return
    if not any(value in subject.sources or value in subject.roots for value in check.sees):
        yield found("GS304", f"{check.value.name!r} tests no gradient", check.value.producer(), check.value)
        return
    by_node: dict[tuple[str, ir.Node | None], list[ir.Value]] = {}
    for value in _escaping(subject, check):
        for code, node in _missing(check, value):
            by_node.setdefault((code, node), []).append(value)
    for (code, node), values in by_node.items():
        yield _describe(code, node, values, check)


def _escaping(subject: Subject, check: Check) -> list[ir.Value]:
    """The gradients that reach an output or state without being tested: where each was unscaled, or where it ends."""
    unscaled = {} if subject.flow is None else subject.flow.unscaled
    origin: dict[ir.Value, ir.Value | None] = {root: None for root in subject.roots if not check.covers(root)}
    ends: dict[ir.Value, None] = {}
    for node in subject.view.nodes:
        rule = rule_of(node)
        if rule is not None and rule.kind is Kind.SHAPE:
            continue
        reached = [operand for operand in subject.view.operands(node) if operand in origin]
        if not reached or any(_is_bookkeeping(subject, value) for value in node.outputs):
            continue
        first = next((origin[value] for value in reached if origin[value] is not None), None)
        if has_trait(node, Trait.EFFECT) and not any(check.covers(value) for value in node.outputs):
            ends[first or reached[-1]] = None
        # What the scale divides is no more doubtful than it was before.
        only_scale = all(operand in subject.roots for operand in reached) and subject.flow is not None
        for value in node.outputs:
            if value is check.value or check.covers(value) or (only_scale and not subject.carries_scale(value)):
                continue
            origin[value] = value if value in unscaled or (first is None and value in check.sees) else first
    for value in subject.view.graph.outputs:
        if value in origin and not _is_exempt(subject, value):
            ends[origin[value] or value] = None
    return list(ends)


def _is_bookkeeping(subject: Subject, value: ir.Value) -> bool:
    return subject.scale is not None and value in subject.scale.scalars.values


def _is_exempt(subject: Subject, value: ir.Value) -> bool:
    nexts = () if subject.scale is None else subject.scale.nexts.values()
    return any(value is following for following in nexts) or bool(value.name and value.name.startswith("scaled_loss"))


def _missing(check: Check, value: ir.Value) -> Iterator[tuple[str, ir.Node | None]]:
    lost = check.lost.get(value, {})
    sees = check.sees.get(value, frozenset())
    part = next((node for node in lost.values() if has_trait(node, Trait.PART)), None)
    if part is not None:
        yield "GS301", part
        return
    for kind, code in ((NAN, "GS302"), (INF, "GS303")):
        if kind in lost and kind not in sees:
            yield code, lost[kind]
    if not lost:
        yield "GS301", None


def _describe(code: str, node: ir.Node | None, values: list[ir.Value], check: Check) -> Finding:
    names = ", ".join(repr(value.name) for value in values[:3]) + (" ..." if len(values) > 3 else "")
    if code == "GS301":
        part = "it" if node is None else f"more of it than {op_name(node)} takes"
        message = f"{names} is used, and {check.value.name!r} does not test {part}"
        return found(code, message, node or values[0].producer(), values[0])
    assert node is not None
    kind = NAN if code == "GS302" else INF
    return found(code, f"{op_name(node)} does not tell of {kind} in {names}", node, values[0])


def _elements(subject: Subject) -> Iterator[Finding]:
    """Of a sequence of gradients each element is to be tested."""
    check = subject.check
    indices: dict[ir.Value, set[int]] = {}
    for node in subject.view.nodes if check is not None else ():
        if node.op_type == "SequenceAt" and check is not None and check.covers(node.outputs[0]):
            number, sequence = number_of(node.inputs[1]), node.inputs[0]
            if number is not None and sequence is not None and sequence in subject.roots:
                indices.setdefault(sequence, set()).add(int(number))
    for sequence, present in indices.items():
        missing = sorted(set(range(max(present) + 1)) - present)
        if missing:
            assert check is not None
            message = f"element {missing[0]} of {sequence.name!r} is used, and {check.value.name!r} does not test it"
            yield found("GS301", message, value=sequence)


def _scale_reacts(subject: Subject) -> Iterator[Finding]:
    scale, check = subject.scale, subject.check
    if scale is None or check is None or not scale.adjusts:
        return
    for state in subject.scale_states:
        if state.carry is Carry.ADD:
            yield found(
                "GS305", f"{state.value.name!r} is added to, where it should be assigned", state.node, state.value
            )
    following = scale.nexts[scale.value]
    # A scale that is chosen where a window of steps begins follows the check of the window before.
    direct = scale.scalars.symbol is scale.value
    if subject.window_check is None and direct and following not in check.dependent:
        message = f"{following.name!r} does not depend on {check.value.name!r}"
        yield found("GS305", message, following.producer(), following)
    elif direct and subject.good is not None and subject.bad is not None:
        holds, fails = (_directions(outcomes, following, scale.value) for outcomes in (subject.good, subject.bad))
        if holds is not None and fails is not None and "down" not in fails:
            where = f"falls where {check.value.name!r} holds, and not" if "down" in holds else "does not fall"
            message = f"{scale.value.name!r} {where} where the check fails"
            yield found("GS305", message, following.producer(), following)


def _directions(outcomes: Outcomes, following: ir.Value, scale: ir.Value) -> set[str] | None:
    """Whether the next scale may go "up" or "down" on a step; None if it is computed in a way that does not tell."""
    found_ways: set[str] = set()
    pending, seen = [following], set[ir.Value]()
    while pending:
        value = outcomes.of(pending.pop())
        if not isinstance(value, ir.Value) or value in seen or value is scale or number_of(value) is not None:
            continue
        seen.add(value)
        node = value.producer()
        if node is None:
            return None
        if node.op_type == "Where" or has_trait(node, Trait.VIEW | Trait.BOUND):
            pending += [v for v in node.inputs[node.op_type == "Where" :] if v is not None]
            continue
        factor = next((n for v in node.inputs if (n := number_of(_uncast(v))) is not None), None)
        if node.op_type not in ("Mul", "Div") or factor is None:
            return None
        found_ways.add("up" if (factor > 1) == (node.op_type == "Mul") else "down")
    return found_ways


def _uncast(value: ir.Value | None) -> ir.Value | None:
    node = None if value is None else value.producer()
    return node.inputs[0] if node is not None and node.op_type == "Cast" else value


RULES = (
    Rule(("GS301", "GS302", "GS303", "GS304"), _coverage),
    Rule(("GS301",), _elements),
    Rule(("GS305",), _scale_reacts),
)
