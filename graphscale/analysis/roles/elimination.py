"""Elimination: the pairs that remain if each output gets an input of its own, and what names leave to it.

Names are complete if one pattern names several next values, and the graph makes no pair certain outside of it. They
say which outputs and inputs are states, and never which is the next value of which: a named pair is certain where the
graph permits no other assignment among the named ones. An output without such a name is no state, unless the graph
has evidence for a pair of it, and none against that pair.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import TypeVar

import onnx_ir as ir

from graphscale.analysis.roles.doubts import Doubt, Matched
from graphscale.analysis.roles.role_table import Assigned, Role
from graphscale.analysis.updates import same_type
from graphscale.graph.values import is_scalar

__all__ = ["eliminate", "settle_by_names"]

_Output = TypeVar("_Output")
_Input = TypeVar("_Input")


def settle_by_names(
    step: Matched, opened: Collection[ir.Value], doubts: Mapping[ir.Value, Doubt]
) -> dict[ir.Value, Assigned]:
    """Return the roles that complete names settle, of outputs that are open or in doubt.

    Args:
        step: the step with its matched pairs.
        opened: the outputs without a certain role.
        doubts: the doubts about the others.
    """
    pattern, pairs, asked = step.pattern, step.pairs, {*opened, *doubts}
    if len(pattern) < 2 or any(output not in pattern for output in pairs if output not in asked):
        return {}
    rejected = {output for output, each in doubts.items() if each.by_content and each.is_excluded}
    claimed = {each.pair for o, each in step.outputs.items() if o not in asked}
    claimed |= {value for o, value in pairs.items() if o not in pattern and o not in rejected}
    named = {o: v for o, v in pattern.items() if o in asked and v not in claimed}
    permitted = {o: [v for v in named.values() if same_type(o, v) and _permits(step, o, v, o in opened)] for o in named}
    found = {
        output: Assigned(Role.STATE, "named like the other next values, and no other assignment is possible", value)
        for output, value in eliminate(permitted)
        if named[output] is value
    }
    for output in asked.difference(pattern):
        assigned = step.outputs[output]
        if assigned.pair is None or output in rejected:
            role = Role.METRIC if assigned.pair is not None else assigned.role
            found[output] = Assigned(role, "all next values have names of one pattern")
    return found


def _permits(step: Matched, output: ir.Value, value: ir.Value, is_open: bool) -> bool:
    """Return whether the graph permits an output as the next value of an input of its type.

    A negative multiple is none. The next value of a weight with a gradient takes this gradient.
    """
    facts, assigned = step.facts, step.outputs[output]
    if assigned.pair is None and not is_open and (assigned.role is Role.METRIC or value in facts.topology.forward):
        return False
    if facts.held(output).get(value, 0.0) < 0:
        return False
    return is_scalar(value) or not facts.has_gradient(value) or facts.takes_gradient(output)


def eliminate(candidates: Mapping[_Output, Collection[_Input]]) -> Iterator[tuple[_Output, _Input]]:
    """Yield the pairs that remain if every output with candidates gets one of its own.

    An output has no pair if its only candidate is also the only one of another output.

    Args:
        candidates: for each output, the inputs whose next value it may be.
    """
    left = {output: set(inputs) for output, inputs in candidates.items() if inputs}
    claimants: dict[_Input, set[_Output]] = {}
    for output, inputs in left.items():
        for value in inputs:
            claimants.setdefault(value, set()).add(output)
    leaves = [output for output, inputs in left.items() if len(inputs) == 1]
    while leaves:
        wanted: dict[_Input, list[_Output]] = {}
        for output in leaves:
            for value in left[output]:
                wanted.setdefault(value, []).append(output)
        leaves = []
        for value, outputs in wanted.items():
            if len(outputs) == 1:
                yield outputs[0], value
                for other in claimants[value]:
                    left[other].discard(value)
                    if len(left[other]) == 1:
                        leaves.append(other)
