"""Elimination among named states.

Names are complete if one pattern names several next values, and the graph makes no pair certain outside of it. They
say which outputs and inputs are states, and never the pairs of these: a named pair is certain where the graph permits
no other assignment among the named ones. An output without such a name is no state, unless the graph
has evidence for a pair of it, and none against that pair, or the update reads an input of its type that is left over.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import onnx_ir as ir

from graphscale.analysis.roles.doubts import Doubt, Matched
from graphscale.analysis.roles.role_table import Assigned, Role
from graphscale.analysis.updates import ByType, same_type
from graphscale.graph.values import is_scalar
from graphscale.graph.walks import eliminate

__all__ = ["settle_by_names"]

# The fewest pairs of a pattern that the graph shows, too.
_FEWEST = 2


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
    confirmed = [output for output in pairs if output not in asked]
    if any(output not in pattern for output in confirmed):
        return {}
    rejected = {output for output, each in doubts.items() if each.by_content and each.is_excluded}
    taken = {each.pair for o, each in step.outputs.items() if o not in asked}
    claimed = {value for o, value in pairs.items() if o not in pattern and o not in rejected}
    named = {o: v for o, v in pattern.items() if o in asked and v not in taken}
    matched = {o: v for o, v in named.items() if pairs.get(o) is v}
    rest = {o: v for o, v in named.items() if o not in matched}
    found = {
        output: Assigned(Role.STATE, "named like the other next values, and no other assignment is possible", value)
        for output, value in (*matched.items(), *eliminate(_permitted(step, rest, opened)))
        if named[output] is value and value not in claimed
    }
    by_graph = [output for output in found if sum(same_type(output, value) for value in named.values()) > 1]
    if len(confirmed) + len(by_graph) < _FEWEST:
        return {}
    for output, assigned in step.outputs.items():
        if output in pattern or output not in asked:
            continue
        # Numbers such as a learning rate are always left over: only one that the output's name contains counts.
        left = [v for v in step.left_like(output) if not is_scalar(output) or (v.name or "") in (output.name or "")]
        is_left = assigned.pair is None and not left
        is_named = assigned.pair is not None and (assigned.pair.name or "") in (output.name or "")
        if is_left or (output in rejected and not is_named):
            role = Role.METRIC if assigned.pair is not None else assigned.role
            found[output] = Assigned(role, "all next values have names of one pattern")
    return found


def _permitted(
    step: Matched, named: Mapping[ir.Value, ir.Value], opened: Collection[ir.Value]
) -> dict[ir.Value, list[ir.Value]]:
    """Return, for named outputs, the named inputs whose next value the graph permits each to be.

    A negative multiple of an input is none, and neither is a value of another layer, where names keep layers apart. A
    gradient moves a weight that has one.
    """
    facts, inputs = step.facts, ByType(named.values())
    layers = _layers(step, named)
    permitted: dict[ir.Value, list[ir.Value]] = {}
    for output in named:
        role = step.outputs[output].role
        if role is Role.STATE or output in opened:
            like = [*inputs.like(output)]
        else:
            like = [v for v in inputs.like(output) if role is not Role.METRIC and v not in facts.topology.forward]
        layer = [v for v in like if named[output] not in layers[output] or v in layers[output]]
        held = {**facts.held_possibly(output), **facts.held(output)}
        permitted[output] = [value for value in layer if held.get(value, 0.0) >= 0]
    for value in filter(facts.has_gradient, named.values()):
        outputs = [output for output, values in permitted.items() if value in values]
        if any(output in facts.behind_gradients for output in outputs):
            for output in outputs:
                if output not in facts.behind_gradients:
                    permitted[output].remove(value)
    return permitted


def _layers(step: Matched, named: Mapping[ir.Value, ir.Value]) -> dict[ir.Value, set[ir.Value]]:
    """Return, for each named output, the named inputs that it depends on, and those of outputs that share them."""
    values, dependence = {*named.values()}, step.facts.dependence
    layers: dict[ir.Value, set[ir.Value]] = {}
    for output in named:
        layer = values.intersection(dependence.of(output))
        shared = [o for o, others in layers.items() if not others.isdisjoint(layer)]
        layer = layer.union(*(layers[o] for o in shared))
        layers |= dict.fromkeys((output, *shared), layer)
    return layers
