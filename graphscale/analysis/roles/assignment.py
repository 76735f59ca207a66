"""The assignment of a role to each input and output: evidence for all pairs, one matching, one pass of doubts.

The loss and the gradients are known. Every other output is the next value of an input, or is not read by a later step.
Outputs and inputs are matched by elimination within exact type and shape, from the strongest evidence to the weakest.
A pair is certain if it is the only one left and no doubt is raised against it; the other outputs are a question.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType

import onnx_ir as ir

from graphscale.analysis.edits import Plan
from graphscale.analysis.roles.answers import Answers
from graphscale.analysis.roles.doubts import Matched, doubt
from graphscale.analysis.roles.evidence import Table, fixed_role
from graphscale.analysis.roles.facts import Facts, Gradients, Row, Strength
from graphscale.analysis.roles.naming import find_present, widest_pattern
from graphscale.analysis.roles.role_table import Assigned, Role, Roles
from graphscale.analysis.topology import Topology
from graphscale.analysis.updates import NEXT_STATE, Update, same_type
from graphscale.errors import RolesError, suggest
from graphscale.graph.values import is_float, is_scalar, value_label
from graphscale.graph.walks import eliminate

__all__ = ["assign_roles"]


def assign_roles(
    topology: Topology, plan: Plan, named: Sequence[Update], chosen: Collection[ir.Value], answers: Answers
) -> Roles:
    """Assign a role to each input and output of a main graph.

    Args:
        topology: the topology of the graph, for its loss.
        plan: the places of the loss scale, and of the divisions by it.
        named: the pairs that the user named.
        chosen: the values that the user named as places where the scale comes out.
        answers: all answers of the user, these names included.

    Raises:
        RolesError: an answer contradicts the graph.
    """
    facts = Facts(topology, plan)
    gradients = Gradients(facts)
    table = Table(facts, gradients)

    def assign(answered: Mapping[ir.Value, Assigned]) -> dict[ir.Value, Assigned]:
        return _assign(facts, gradients, table, answered)

    outputs = assign(_answered(facts, gradients, named, chosen, answers, assign))
    states = {each.pair: Assigned(Role.STATE, each.evidence, o, each.certain) for o, each in outputs.items()}
    inputs = dict.fromkeys((*topology.graph.inputs, *(value for value in states if value is not None)))
    roles = {value: states.get(value) or Assigned(*_role_of_input(facts, value, outputs)) for value in inputs}
    return Roles(roles, {value: outputs[value] for value in facts.outputs})


def _assign(
    facts: Facts,
    gradients: Gradients,
    table: Table,
    answered: Mapping[ir.Value, Assigned],
    settled: Mapping[ir.Value, Assigned] = MappingProxyType({}),
) -> dict[ir.Value, Assigned]:
    """Return the roles of all outputs, beside those that are answered, and those that names settle."""
    known = {**answered, **settled}
    fixed = {o: fixed_role(facts, gradients, o) for o in facts.outputs if o not in known}
    outputs = {**known, **{o: role for o, role in fixed.items() if role is not None}}
    taken = {each.pair for each in known.values()}
    left = dict.fromkeys(output for output in facts.outputs if output not in outputs)
    outputs |= _match(table, left, taken)
    open_ = [output for output in left if output not in outputs]
    rows = {o: table.possibilities(o) | {v: e for v, e in table.row(o).items() if v not in taken} for o in open_}
    shown = [output for output in facts.outputs if output in settled or (output in left and rows.get(output, True))]
    pattern = widest_pattern(facts.outputs, facts.holders, shown, facts.takes_gradient)
    if not shown:
        finals = (o for o, each in outputs.items() if each.role in (Role.LOSS, Role.GRADIENT))
        named = ((output, find_present(output, facts.inputs_like(output))) for output in finals)
        pattern = {output: value for output, value in named if value is not None}
    outputs |= _unmatched(rows, outputs)
    step = Matched(facts, gradients, table, outputs, pattern)
    doubts = {output: each for output, each in doubt(step).items() if output not in known}
    opened = {output for output in open_ if not outputs[output].certain or output in doubts}
    if opened or doubts:
        from graphscale.analysis.roles.elimination import settle_by_names  # few steps leave a question

        more = settle_by_names(step, opened, doubts)
        if more:
            return _assign(facts, gradients, table, answered, {**settled, **more})
    if not doubts and all(each.certain for each in outputs.values()):
        return outputs
    from graphscale.analysis.roles.proposals import propose  # few steps leave a question

    return outputs | propose(step, rows, doubts)


def _match(table: Table, outputs: Collection[ir.Value], taken: set[ir.Value | None]) -> dict[ir.Value, Assigned]:
    """Match outputs with inputs by elimination, from the strongest evidence to the weakest."""
    pairs: dict[ir.Value, ir.Value] = {}
    for least in sorted(Strength, reverse=True)[:-1]:
        used = taken.union(pairs.values())
        pairs |= eliminate(
            {
                o: [v for v, each in table.row(o, least).items() if each.strength >= least and v not in used]
                for o in outputs
                if o not in pairs
            }
        )
    return {o: Assigned(Role.STATE, table.evidence(o, value).text, value) for o, value in pairs.items()}


def _unmatched(rows: Mapping[ir.Value, Row], outputs: Mapping[ir.Value, Assigned]) -> dict[ir.Value, Assigned]:
    """Treat as metrics the outputs that could replace no open input; the others are open."""
    taken, found = {each.pair for each in outputs.values()}, dict[ir.Value, Assigned]()
    for output, row in rows.items():
        values = [value for value in row if value not in taken]
        count = "an open input" if len(values) == 1 else f"{len(values)} open inputs"
        evidence = f"it has the type of {count}" if values else "no open input has its type"
        found[output] = Assigned(Role.METRIC, evidence, certain=not values)
    return found


def _answered(
    facts: Facts,
    gradients: Gradients,
    named: Sequence[Update],
    chosen: Collection[ir.Value],
    answers: Answers,
    assign: Callable[[Mapping[ir.Value, Assigned]], Mapping[ir.Value, Assigned]],
) -> dict[ir.Value, Assigned]:
    """Return the roles that the user names, or the model states; refuse those that contradict certain pairs.

    Raises:
        RolesError: an answer names no output, or contradicts a certain pair.
    """
    outputs, found = {value.name: value for value in facts.outputs}, dict[ir.Value, Assigned]()
    for role, names in ((Role.METRIC, answers.metrics), (Role.GRADIENT, answers.gradients)):
        for name in names:
            if name not in outputs:
                where, hint = answers.sources.get(name, "roles"), suggest(name, outputs, "there are")
                raise RolesError(f"{where}: the graph has no output {name!r}{hint}")
            found[outputs[name]] = Assigned(role, answers.evidence(name))
    found |= {update.output: Assigned(Role.STATE, update.how, update.input) for update in named}
    _refuse_patterns(facts, gradients, named, answers)
    # An average may contain the weight whose next value it is named to be.
    confirmed = {u.input for u in named if facts.held(u.output).get(u.input, 0.0) >= NEXT_STATE}
    shared = {u.input for u in named if u.input in facts.held_possibly(u.output)}
    others = {
        output: _contradicting(facts, output, a, shared if a.pair is None else confirmed) for output, a in found.items()
    }
    doubted = assign({}) if any(others.values()) else {}
    for output, other in others.items():
        source, value = answers.sources.get(output.name or ""), found[output].pair
        if other is None or not doubted[output].certain or (answers.forced and source is None):
            continue
        said = f"a {found[output].role.value}" if value is None else f"the next value of {value.name!r}"
        where, remedy = ("", "pass --force-roles") if source is None else (f"{source}: ", "name its role with --roles")
        raise RolesError(
            f"{where}output {value_label(output)} is named {said}, but it holds {other.name!r} "
            f"{facts.held(output)[other]:g} times, and no other input of its type; correct it, or {remedy}"
        )
    # A gradient that the next step compares with its own is state.
    places = [o for o in facts.outputs if o in chosen and o not in found]
    places = [o for o in places if not gradients.met(o)]
    return found | {output: Assigned(Role.GRADIENT, answers.evidence(output.name)) for output in places}


def _refuse_patterns(facts: Facts, gradients: Gradients, named: Sequence[Update], answers: Answers) -> None:
    """Refuse a pair that a pattern of names makes of an output that is a metric by the graph alone.

    Raises:
        RolesError: the output is one.
    """
    for update in named:
        source = answers.sources.get(update.output.name or "", "")
        fixed = fixed_role(facts, gradients, update.output) if source.startswith("--update") else None
        if fixed is not None and fixed.role is Role.METRIC:
            raise RolesError(
                f"{source}: output {value_label(update.output)} is named the next value of {update.input.name!r}, but "
                f"{fixed.evidence}; if it is one, name this pair alone"
            )


def _contradicting(facts: Facts, output: ir.Value, answer: Assigned, confirmed: set[ir.Value]) -> ir.Value | None:
    """Return the only input of an output's type that the output holds, if it is another one than the answer's."""
    value = answer.pair
    if is_scalar(output) or facts.copied_input(output) is not None or value in facts.held_possibly(output):
        return None
    held = {v for v, c in facts.held(output).items() if NEXT_STATE <= c <= 1 / NEXT_STATE and same_type(output, v)}
    if held & confirmed and (value is None or value in facts.topology.ancestors([output])):
        return None
    return next(iter(held)) if len(held) == 1 and value not in held else None


def _role_of_input(facts: Facts, value: ir.Value, outputs: Mapping[ir.Value, Assigned]) -> tuple[Role, str]:
    if value.is_initializer():
        return Role.CONSTANT, "it has a value, and no output is its next value"
    if is_scalar(value):
        return Role.HYPERPARAMETER, "one number, and no output is its next value"
    gradients = (o for o, each in outputs.items() if each.role is Role.GRADIENT)
    if is_float(value) and value in facts.weights_like(value) and any(same_type(o, value) for o in gradients):
        return Role.WEIGHT, "a gradient of its type leaves the graph"
    return Role.BATCH, "no output is its next value"
