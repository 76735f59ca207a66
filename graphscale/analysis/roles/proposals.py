"""The proposals for outputs that are open or in doubt: the pairs that are likeliest together, and the other roles."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence

import onnx_ir as ir

from graphscale.analysis.roles.doubts import Doubt, Matched
from graphscale.analysis.roles.facts import Evidence, Facts, Row, Strength
from graphscale.analysis.roles.naming import likeness
from graphscale.analysis.roles.nearness import Nearness
from graphscale.analysis.roles.role_table import Assigned, Role
from graphscale.analysis.updates import NEXT_STATE, Type, same_type, type_of
from graphscale.graph.values import is_float, is_scalar
from graphscale.graph.walks import eliminate

__all__ = ["propose"]


def propose(step: Matched, rows: Mapping[ir.Value, Row], doubts: Mapping[ir.Value, Doubt]) -> dict[ir.Value, Assigned]:
    """Propose the likeliest role for each output that is open or in doubt."""
    facts, outputs = step.facts, step.outputs
    freed = {outputs[output].pair for output in doubts}
    others = {output for output, row in rows.items() if not freed.isdisjoint(row)}
    left = [outputs[output].pair for output, each in doubts.items() if each.is_excluded]
    metrics = [o for o, each in outputs.items() if each.role is Role.METRIC and not each.is_named]
    others |= {output for output in metrics if _may_be_next(step, output, left)}
    opened = [o for o in facts.outputs if o in doubts or o in others or not outputs[o].certain]
    if not opened:
        return {}
    taken = {each.pair for o, each in outputs.items() if o not in opened}
    nearness, edges, batch = Nearness(facts), [], _only_batch(step, opened, taken)
    for output in opened:
        known = rows.get(output, {}) if outputs[output].pair is None else step.table.row(output)
        row = step.table.possibilities(output) | known
        for value in (
            each
            for each in facts.inputs_like(output)
            if each not in taken and (each is not batch or likeness(each, output)[0] == 1)
        ):
            if _is_likely(
                step, output, value, row.get(value), is_excluded=output in doubts and doubts[output].is_excluded
            ):
                share, length = likeness(value, output)
                is_named, stays = step.pattern.get(output) is value, _strength(row.get(value)) >= Strength.STAYS
                rank = (not is_named, not stays, nearness.distance(output, value), -share, -length)
                edges.append((rank, output, value))
    likely: dict[ir.Value, list[ir.Value]] = {}
    for _, output, value in edges:
        likely.setdefault(output, []).append(value)
    forced = dict(eliminate(likely))
    found = {output: Assigned(Role.STATE, "", value) for output, value in forced.items()}
    used = {*forced.values()}
    places = _places(edges)
    for _, output, value in sorted(edges, key=lambda each: (each[0], abs(places[each[1]] - places[each[2]]))):
        if output not in found and value not in used:
            used.add(value)
            found[output] = Assigned(Role.STATE, "", value)
    for output in opened:
        before = outputs[output]
        role = before.role
        if role is Role.STATE:
            role = Role.GRADIENT if facts.views(output)[-1] in step.gradients.doubtful else Role.METRIC
        freed_type = "it has the type of an input whose pair is in doubt" if before.certain else before.evidence
        evidence = doubts[output].text if output in doubts else freed_type
        found[output] = dataclasses.replace(found.get(output) or Assigned(role, ""), evidence=evidence, certain=False)
    return found


def _places(edges: Sequence[tuple[object, ir.Value, ir.Value]]) -> dict[ir.Value, int]:
    """Return the places of outputs, and of inputs, among those of the same type: exporters keep their order."""
    places, counts = dict[ir.Value, int](), Counter[tuple[Type, bool]]()
    for _, *pair in edges:
        for value, is_output in zip(pair, (True, False), strict=True):
            if value not in places:
                places[value] = counts[type_of(value), is_output]
                counts[type_of(value), is_output] += 1
    return places


def _only_batch(step: Matched, opened: Collection[ir.Value], taken: Collection[ir.Value | None]) -> ir.Value | None:
    """Return the only input with an example for each one of a target, if no other one may be a batch, or None."""
    facts = step.facts
    left = [v for v in facts.graph.inputs if v in facts.topology.forward and v not in taken and not is_scalar(v)]
    late = [v for v in left if _is_late(facts, v) or not is_float(v)]
    sizes, early = {v.shape[0] for v in late if v.shape}, [v for v in left if v not in late]
    batches = [v for v in early if v.shape is not None and len(v.shape) > 1 and v.shape[0] in sizes]
    states = [v for v in early if any(facts.held(o).get(v, 0.0) >= NEXT_STATE for o in opened)]
    return batches[0] if len(batches) == 1 and {*early} <= {*states, *batches} else None


def _is_late(facts: Facts, value: ir.Value) -> bool:
    return value in facts.topology.targets or bool(facts.topology.late_inputs(value))


def _strength(evidence: Evidence | None) -> Strength:
    return Strength.TYPE if evidence is None else evidence.strength


def _may_be_next(step: Matched, output: ir.Value, values: Iterable[ir.Value | None]) -> bool:
    """Return whether an output may replace one of some inputs that were paired with other outputs."""
    like = [value for value in values if value is not None and same_type(output, value)]
    if is_scalar(output) and not step.pattern:
        return bool(like)
    return bool(like) and not step.table.possibilities(output).keys().isdisjoint(like)


def _is_likely(step: Matched, output: ir.Value, value: ir.Value, evidence: Evidence | None, is_excluded: bool) -> bool:
    """Return whether a pair may be proposed for an output whose own pair may be out of the question."""
    facts, role = step.facts, step.outputs[output].role
    if (step.outputs[output].pair is value and is_excluded) or facts.held(output).get(value, 0.0) < 0:
        return False
    if step.pattern.get(output) is value:
        return True
    if is_scalar(output) and len(step.pattern) > 1 and likeness(value, output)[0] < 1:
        return False  # the names of all other next values
    if role is Role.CONSTANT:
        return facts.is_ignored(value) and not (is_float(value) and value.uses())
    if role is Role.GRADIENT or facts.views(output)[-1] in facts.topology.losses:
        return facts.is_ignored(value)
    strength, is_backward = _strength(evidence), output in facts.behind_gradients
    if evidence is None:
        return False
    if (
        strength is Strength.TYPE
        and value in facts.topology.forward
        and not (facts.has_gradient(value) and any(c >= NEXT_STATE for c in facts.held(output).values()))
    ):
        return False
    if strength < Strength.HOLDS and value in facts.topology.forward and not is_backward:  # an error
        late = [v for v in step.unpaired if same_type(v, output) and _is_late(facts, v)]
        if value in late and len(late) > 1:
            return False
    if strength < Strength.HOLDS and not facts.is_ignored(value) and Role.GRADIENT in step.roles:
        return False
    is_target = value in facts.topology.targets and not is_backward
    own = step.outputs[output].pair
    is_error = is_target and own is not None and facts.held(output).get(own, 0.0) > 0
    if is_excluded and (step.pattern or is_error):  # a by-product, unlike all that is named
        return strength > Strength.SHARE
    if strength > Strength.TYPE or is_backward or is_scalar(value):
        return True
    return likeness(value, output)[0] == 1
