"""Proposals for the outputs with an open role."""

from __future__ import annotations

import itertools

import onnx_ir as ir

from graphscale.analysis.roles.nearness import Nearness, likeness
from graphscale.analysis.roles.pairs import fitting_inputs, may_hold_state
from graphscale.analysis.roles.role_table import Assigned, Role
from graphscale.analysis.roles.single_numbers import is_next_number, numbers_below
from graphscale.analysis.roles.step_interface import VIEWS, Dependence, Interface
from graphscale.analysis.updates import NEXT_STATE, same_type, type_of
from graphscale.graph.values import inputs_of, is_float, is_known_zero, is_scalar
from graphscale.graph.walks import follows_from_numbers, source_by_trait

__all__ = ["doubt_surplus", "propose"]


def propose(step: Interface) -> None:
    """Give each open output a role: a certain one if it could replace no open input, else a proposal."""
    possible = fitting_inputs(step, lambda value: may_hold_state(step, value))
    may_be_stored = step.may_store_state
    doubted = _take_back(step)
    taken = [assigned.pair for assigned in doubted.values() if assigned.pair is not None]
    dependence = step.dependence([*itertools.chain(*possible.values()), *taken])
    shifted = {type_of(output) for output in (*possible, *doubted) if step.may_be_shifted(output)}

    fitting = {
        o: [v for v in values if type_of(o) in shifted or _may_replace(step, o, v, dependence)]
        for o, values in possible.items()
    }
    fitting |= {o: [v for v in step.open_inputs_like(o) if may_hold_state(step, v)] for o in doubted}
    pairs = _find_likeliest(step, fitting, doubted, dependence)
    known = step.outputs.values()
    are_exported = any(each.role is Role.GRADIENT for each in known) and all(each.pair is None for each in known)
    for output in sorted(step.open_outputs(), key=is_float):  # counters first: schedules are computed from them
        values, value = fitting.get(output, []), pairs.get(output)
        if value is not None and value in step.topology.forward and are_exported and is_float(output):
            evidence = "it may be a gradient, as all others leave the graph, too"
            step.outputs[output] = Assigned(Role.GRADIENT, evidence, certain=False)
        elif value is not None:
            before = doubted.get(output)
            is_same = before is not None and before.pair is value
            count = "an open input" if len(values) == 1 else f"{len(values)} open inputs"
            evidence = before.evidence if before and is_same else f"it has the type of {count}"
            step.pair(output, value, evidence, certain=False)
        elif values:
            likely = next((each for each in values if each not in step.inputs), values[0])
            reason = "for which another output is proposed" if likely in step.inputs else "but does not depend on it"
            if _is_changed_batch(step, output, likely):
                reason = "and may be a batch that the network reads in this form"
            evidence = f"it has the type of {likely.name!r}, {reason}"
            step.outputs[output] = Assigned(Role.METRIC, evidence, certain=False)
        elif seeds := numbers_below(step, output, may_be_stored):
            evidence = "it is computed from numbers in the graph alone"
            left = [value for value in seeds if value not in step.inputs]
            if left:
                step.pair(output, left[0], evidence, may_be_stored and is_next_number(output, left))
            else:
                step.outputs[output] = Assigned(Role.METRIC, evidence, certain=False)
        elif any(view in step.doubtful for view in step.views(output)):
            step.outputs[output] = Assigned(Role.GRADIENT, "a gradient and a share of another value", certain=False)
        elif other := _state_in_another_form(step, output):
            evidence = f"it holds {other.name!r}, but has another type or shape"
            step.outputs[output] = Assigned(Role.METRIC, evidence, certain=False)
        else:
            step.outputs[output] = Assigned(Role.METRIC, "no open input has its type")


def _find_likeliest(
    step: Interface, fitting: dict[ir.Value, list[ir.Value]], doubted: dict[ir.Value, Assigned], dependence: Dependence
) -> dict[ir.Value, ir.Value]:
    """Find the likeliest pairs among the inputs that fit each output, and the withdrawn pairs."""
    nearness, shifts = Nearness(step, dependence), _find_shifts(step)
    newest = {step.copied_input(output) for output in shifts}
    taken = [assigned.pair for assigned in doubted.values() if assigned.pair is not None]

    def is_likely(output: ir.Value, value: ir.Value) -> bool:
        if output in shifts or value in shifts.values():
            return shifts.get(output) is value
        if value in newest:
            return same_type(output, value) and value not in dependence.of(output)
        is_in_order = nearness.between.get(output) is value
        is_again = output in doubted and doubted[output].pair is value
        return same_type(output, value) and (is_in_order or _is_likely(step, output, value, dependence, is_again))

    return nearness.assign(
        {
            output: [value for value in dict.fromkeys((*values, *taken)) if is_likely(output, value)]
            for output, values in fitting.items()
            if values
        }
    )


def _find_shifts(step: Interface) -> dict[ir.Value, ir.Value]:
    """Find outputs that are inputs, compared with older ones: their values shift by one step.

    The input is divided by the older one, or the older one is subtracted, and neither has a next value yet.
    """
    shifts: dict[ir.Value, ir.Value] = {}
    for output in step.open_outputs():
        newer = step.copied_input(output)
        if newer is None or newer not in step.open_inputs_like(output):
            continue
        compared = (node for node in step.topology.consumers(newer) if node.op_type in ("Div", "Sub"))
        olders = {node.inputs[1] for node in compared if node.inputs[0] is newer} & {*step.open_inputs_like(output)}
        shifts.update((output, older) for older in olders if older is not None and older is not newer)
    return shifts


def _take_back(step: Interface) -> dict[ir.Value, Assigned]:
    """Withdraw the doubtful pairs, and return them, for a new choice of all of them."""
    doubted = {
        output: assigned
        for output, assigned in step.outputs.items()
        if assigned.pair is not None and not (assigned.certain or assigned.is_named or is_scalar(output))
    }
    for output, assigned in doubted.items():
        del step.outputs[output], step.inputs[assigned.pair]  # type: ignore[index]
    return doubted


def _is_likely(step: Interface, output: ir.Value, value: ir.Value, dependence: Dependence, is_again: bool) -> bool:
    if _is_changed_batch(step, output, value):
        return False
    is_named = likeness(value, output)[0] == 1
    if not (is_again or is_named) and (_is_error(step, output) or _is_measured(step, output, value)):
        return False
    return is_named or output in step.behind_gradients or value in dependence.of(output)


def _is_error(step: Interface, output: ir.Value) -> bool:
    """Return whether an output depends on the comparison with a target of its type, such as each example's error.

    An average reads its last value twice, v + 0.1 * (x - v), a target is read once.
    """
    if output in step.behind_gradients or output not in step.topology.tail_dependent:
        return False
    targets = (v for v in step.topology.targets & step.topology.ancestors([output]) if same_type(output, v))
    readers = ([*step.topology.consumers(v)] for v in targets)
    return any(len(each) == 1 and each[0].op_type in ("Add", "Sub") for each in readers)


def _is_measured(step: Interface, output: ir.Value, value: ir.Value) -> bool:
    """Return whether an output depends on results of the network, and contains no share of an input.

    Where gradients leave the graph, such an output may be a gradient without a product with the seed.
    """
    are_exported = any(assigned.role is Role.GRADIENT for assigned in step.outputs.values())
    if are_exported or output in step.behind_gradients or output in step.topology.forward:
        return False
    return output in step.topology.tail_dependent and not step.holds_a_share(output, value)


def _is_changed_batch(step: Interface, output: ir.Value, value: ir.Value) -> bool:
    """Return whether the loss reads an input only through an output of this input alone, such as a normalized batch."""
    if output not in step.topology.forward:
        return False
    return all(each is value or is_scalar(each) or each.is_initializer() for each in step.sources_of(output))


def _may_replace(step: Interface, output: ir.Value, value: ir.Value, dependence: Dependence) -> bool:
    """Return whether an output could be the next value of an input of its type, by the two alone."""
    if value in dependence.of(output):
        return True
    is_stored = value.is_initializer() and not value.is_graph_input()
    if not value.uses():
        return not (is_stored and is_scalar(value) and is_float(value))  # a remaining constant
    if is_stored:
        if value in step.topology.forward:
            return output in step.behind_gradients and _reads_master(step, output)
        if output in step.topology.forward:
            return False
        return output in step.behind_gradients or not (step.factors[value] or is_known_zero(value))
    if output in step.behind_gradients and _scales_integers(step, value):
        return True
    if is_scalar(value) and is_float(value):
        # A metric reads a batch; a number computed from numbers may be a schedule's. The loss reads no next rate.
        if output in step.topology.forward:
            return False
        return step.is_ignored(value) and follows_from_numbers(output)
    if output in step.behind_gradients:
        return True
    # An input that enters behind the last contraction is a target or similar.
    return not step.topology.late_inputs(value) and is_float(value)


def _scales_integers(step: Interface, value: ir.Value) -> bool:
    """Return whether an input is a factor or divisor of an integer state, such as a quantized moment."""
    products = (node for node in step.topology.consumers(value) if node.op_type in ("Mul", "Div"))
    sources = {source_by_trait(operand, VIEWS) for node in products for operand in inputs_of(node)} - {value}
    return any(source in step.inputs and step.inputs[source].pair and not is_float(source) for source in sources)


def _reads_master(step: Interface, output: ir.Value) -> bool:
    """Return whether an output is computed from a state outside the loss, like a weight from its master."""
    states = (v for v in step.sources_of(output) if v in step.inputs or step.is_ignored(v))
    return any(value not in step.topology.forward and not is_scalar(value) for value in states)


def doubt_surplus(step: Interface) -> None:
    """Doubt the pairs that could differ if an output without a certain pair were a next value.

    The input of a pair may have that output as its next value, the output of the pair another input, and so on. The
    share of a projected or pruned weight is unknown.
    """
    pending = [output for output, assigned in step.outputs.items() if _may_be_next_value(output, assigned)]
    while pending:
        output = pending.pop()
        for value in _held_states(step, output):
            assigned = step.inputs.get(value)
            other = None if assigned is None else assigned.pair
            if assigned is None or other is None or other is output or not assigned.certain or assigned.is_named:
                continue
            evidence = f"{output.name!r} may be the next value of {value.name!r}, too"
            step.pair(other, value, evidence, certain=False)
            pending.append(other)
            mine = step.outputs[output]
            if mine.certain:
                evidence = f"it may be the next value of {value.name!r}"
                step.outputs[output] = Assigned(mine.role, evidence, certain=False)


def _may_be_next_value(output: ir.Value, assigned: Assigned) -> bool:
    if is_scalar(output) or not is_float(output) or assigned.is_named:
        return False
    return not assigned.certain or assigned.role in (Role.METRIC, Role.CONSTANT)


def _held_states(step: Interface, output: ir.Value) -> list[ir.Value]:
    """Return the values of an output's type in it with a coefficient near one, and the weights with any share."""
    held = [value for value, c in step.held(output).items() if NEXT_STATE <= c <= 1 / NEXT_STATE]
    if output in step.behind_gradients:
        held += [value for value in step.held_possibly(output) if value in step.topology.forward and value not in held]
    return [value for value in held if same_type(output, value)]


def _state_in_another_form(step: Interface, output: ir.Value) -> ir.Value | None:
    if output not in step.behind_gradients or is_scalar(output):
        return None
    held = step.held(output).items()
    return next((v for v, c in held if c >= NEXT_STATE and v not in step.inputs and not is_scalar(v)), None)
