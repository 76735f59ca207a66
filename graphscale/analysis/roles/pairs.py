"""Pairs of carried state: by coefficients, by dependence, and by another form of a paired state."""

from __future__ import annotations

import collections
from collections.abc import Callable, Mapping

import onnx_ir as ir

from graphscale.analysis.roles.changed_batches import is_running_statistic, may_be_batch
from graphscale.analysis.roles.nearness import likeness
from graphscale.analysis.roles.role_table import Assigned, Role
from graphscale.analysis.roles.single_numbers import always_holds
from graphscale.analysis.roles.step_interface import Dependence, Interface, eliminate
from graphscale.analysis.updates import NEXT_STATE, find_coefficients, is_stored, possible_factors, same_type, type_of
from graphscale.graph.values import constant_number, constant_tensor, inputs_of, is_float, is_known_zero, is_scalar
from graphscale.graph.walks import reach

__all__ = [
    "confirm_kept_numbers",
    "doubt_replaced_weights",
    "fitting_inputs",
    "is_weight",
    "may_begin_anew",
    "may_hold_moment",
    "may_hold_state",
    "pair_by_coefficients",
    "pair_by_dependence",
    "pair_other_forms",
]

_Test = Callable[[ir.Value], bool]
_Candidates = dict[ir.Value, list[ir.Value]]


def pair_by_coefficients(step: Interface, among: _Test) -> None:
    """Pair outputs with inputs that they contain: a weight with a coefficient near one, a moment with any."""

    def may_hold(output: ir.Value, value: ir.Value, coefficient: float, least: float) -> bool:
        if value in step.inputs or not among(value) or not same_type(output, value) or _fills(step, output, value):
            return False
        if is_scalar(value) and not value.is_graph_input():
            is_weight = coefficient >= NEXT_STATE and value in step.topology.forward and _takes_gradient(step, output)
            return is_weight or _is_counter(step, output, value)
        return coefficient >= least and (coefficient >= NEXT_STATE or value not in step.topology.forward)

    def candidates(find: Callable[[ir.Value], Mapping[ir.Value, float]], least: float) -> _Candidates:
        outputs = [output for output in step.open_outputs() if not step.may_be_shifted(output)]
        return {o: [v for v, c in find(o).items() if may_hold(o, v, c, least)] for o in outputs}

    def is_certain(output: ir.Value, value: ir.Value) -> bool:
        held = step.held(output)
        if step.is_ignored(value) and any(
            c == held.get(value) and same_type(output, v) and _begins_sum(step, v) for v, c in held.items()
        ):
            return False
        # A weight of one element has axes, unlike a number.
        is_number = value.is_graph_input() and is_scalar(value) and is_float(value) and not value.shape
        return _surely_holds(step, output, value) if is_number else not may_be_batch(step, output, value)

    def settle(found: _Candidates) -> None:
        step.settle(found, "depends on its own previous value", is_certain)

    def settle_beside_shares(
        found: _Candidates, choose: Callable[..., list[ir.Value]] = lambda step, output, values: values
    ) -> None:
        # Beside a computed share, any other share may be the larger.
        shares = {o: choose(step, o, [*values, *_other_shares(step, o, values)]) for o, values in found.items()}
        settle({output: [value] for output, value in eliminate(shares) if value in found[output]})

    for least in (NEXT_STATE, 0.0):
        firm = candidates(step.held_firmly, least)
        if step.may_store_state or among == ir.Value.is_graph_input:
            settle(firm)
        else:
            settle_beside_shares(firm)
        settle_beside_shares(candidates(step.held, least))
        settle_beside_shares(candidates(step.held, least), _handed_on)


def _begins_sum(step: Interface, value: ir.Value) -> bool:
    """Return whether a sum begins at a value: stored zeros that may be state."""
    return step.is_open(value) and is_known_zero(value) and any(node.op_type == "Add" for node, _ in value.uses())


def _surely_holds(step: Interface, output: ir.Value, number: ir.Value) -> bool:
    """Return whether all alternatives of an output, or a sum, contain a number, except as the share of an average.

    A share multiplies a number without a role, and is subtracted from another number. A running product of decays only
    corrects the bias of moments; a running maximum decays before the comparison.
    """
    readers = [*step.topology.consumers(number)]
    factors = {each for node in readers if node.op_type == "Mul" for each in inputs_of(node)} - {number}
    is_subtracted = any(node.op_type == "Sub" and node.inputs[1] is number for node in readers)
    is_share = is_subtracted and any(map(step.is_open, factors))
    return (always_holds(output, number) and not is_share) or _corrects_bias(output) or _decays(output, number)


def _decays(output: ir.Value, number: ir.Value) -> bool:
    """Return whether an output is the maximum of another number and a large constant share of a number."""
    node = output.producer()
    if node is None or node.op_type != "Max":
        return False
    shares = [n for n, _ in number.uses() if n.outputs[0] in node.inputs and n.op_type == "Mul"]
    sizes = (constant_number(each) for node in shares for each in inputs_of(node) if each is not number)
    return any(size is not None and NEXT_STATE <= size < 1 for size in sizes)


def _corrects_bias(product: ir.Value) -> bool:
    """Return whether a product of numbers, times others, is only subtracted from 1, for a division."""
    products = [*reach([product], lambda value: [n.outputs[0] for n, _ in value.uses() if n.op_type == "Mul"])]
    readers = [(node, index) for value in products for node, index in value.uses() if node.op_type != "Mul"]
    is_complement = all(n.op_type == "Sub" and i == 1 and constant_number(n.inputs[0]) == 1 for n, i in readers)
    divides = all(n.op_type == "Div" and i == 1 for node, _ in readers for n, i in node.outputs[0].uses())
    is_product = all(node.op_type == "Mul" for value in products if (node := value.producer()) is not None)
    return bool(readers) and is_complement and divides and is_product and all(map(is_scalar, products))


def confirm_kept_numbers(step: Interface) -> None:
    """Confirm pairs of numbers behind a condition that also keeps tensors, as for the best loss and its weights."""
    pairs = {output: each for output, each in step.outputs.items() if each.pair is not None}
    kept = {
        _condition(step, output, each.pair)
        for output, each in pairs.items()
        if each.certain and each.pair is not None and not is_scalar(each.pair)
    } - {None}
    for output, each in pairs.items():
        if not each.certain and each.pair is not None and _condition(step, output, each.pair) in kept:
            step.pair(output, each.pair, "the condition that keeps it keeps other carried state")


def _condition(step: Interface, output: ir.Value, value: ir.Value) -> ir.Value | None:
    """Return the condition of an output that is a choice between a value itself and another."""
    node = step.views(output)[-1].producer()
    if node is None or node.op_type != "Where":
        return None
    condition, *chosen = inputs_of(node)
    is_flag = condition.shape is None or is_scalar(condition)
    is_kept = is_flag and any(step.copied_input(operand) is value for operand in chosen)
    return condition if is_kept else None


def _takes_gradient(step: Interface, output: ir.Value) -> bool:
    """Return whether an output is a sum with a gradient of its type, times or divided by any values."""
    gradients = [value for value in step.plan.unscaled if same_type(value, output)]
    return bool(gradients and find_coefficients(output, gradients, possible_factors(step.factors), least=0.0))


def _is_counter(step: Interface, output: ir.Value, value: ir.Value) -> bool:
    """Return whether an output is an unfolded sum of constants; an integer may have an upper bound.

    The added number may not be zero, nor be compared with the bound.
    """
    node, begins_at_zero = output.producer(), step.factors[value] == 0
    if node is not None and node.op_type == "Add":
        return begins_at_zero and all(map(constant_tensor, node.inputs))
    above = step.topology.ancestors([output])
    if is_float(output) or any(each.is_graph_input() for each in above):
        return False
    readers = [reader for reader in step.topology.consumers(value) if reader.outputs[0] in above]
    is_bounded = any(reader.op_type in ("Less", "LessOrEqual", "Greater", "GreaterOrEqual") for reader in readers)
    sums = [reader.outputs[0] for reader in readers if reader.op_type == "Add"]
    return (begins_at_zero or is_bounded) and step.holds_one_of(output, sums)


def _other_shares(step: Interface, output: ir.Value, values: list[ir.Value]) -> list[ir.Value]:
    """Return the other open inputs of an output's type with an unknown share in the output."""
    if is_scalar(output):
        return []
    found = [value for value in step.held_possibly(output) if value not in values]
    return [value for value in found if step.is_open(value) and same_type(output, value)]


def _handed_on(step: Interface, output: ir.Value, values: list[ir.Value]) -> list[ir.Value]:
    """Return the candidates that a condition keeps unchanged, or all if there are none."""
    return [value for value in values if _condition(step, output, value) is not None] or values


def _fills(step: Interface, output: ir.Value, value: ir.Value) -> bool:
    """Return whether a condition chooses between stored zeros and a value that does not depend on them."""
    node = step.views(output)[-1].producer()
    if node is None or node.op_type != "Where" or not is_known_zero(value):
        return False
    chosen = [operand for operand in inputs_of(node)[1:] if step.copied_input(operand) is not value]
    return len(chosen) == 1 and value not in step.held(chosen[0])


def doubt_replaced_weights(step: Interface) -> None:
    """Doubt pairs with an input outside the loss, where a gradient and a weight of its type remain.

    An average may restart at the first weights in each step: its next value is that of another input.
    """
    gradients = collections.Counter(map(type_of, step.plan.unscaled))
    paired = collections.Counter(type_of(value) for value in step.inputs if value in step.topology.forward)
    untyped = sum(count for kind, count in gradients.items() if None in kind)
    for output, assigned in [*step.outputs.items()]:
        value, kind = assigned.pair, type_of(output)
        if value is None or assigned.is_named or is_scalar(value) or not is_float(value):
            continue
        if gradients[kind] + untyped <= paired[kind]:
            continue
        weights = [each for each in step.open_inputs_like(output) if each in step.topology.forward]
        if weights and may_begin_anew(step, output, value):
            step.pair(output, value, f"it holds {value.name!r}, but may replace another", certain=False)


def may_begin_anew(step: Interface, output: ir.Value, value: ir.Value) -> bool:
    """Return whether an output may be the next value of a weight, computed from an unchanged input."""
    return step.is_ignored(value) and step.held(output).get(value) == 1 and not _sums_gradients(step, output, value)


def _sums_gradients(step: Interface, output: ir.Value, value: ir.Value) -> bool:
    """Return whether an output adds a gradient or a square, unlike a weight, which moves the other way."""
    node = step.views(output)[-1].producer()
    if node is not None and node.op_type == "Add" and any(_is_square(operand) for operand in node.inputs):
        return True
    # m + 0.1 * (g - m)
    from_it = (n.inputs[0] for n in step.topology.consumers(value) if n.op_type == "Sub" and n.inputs[1] is value)
    if any(_is_square(each) or (each is not None and step.is_gradient(each)) for each in from_it):
        return True
    held = find_coefficients(output, step.plan.unscaled, step.factors)
    return any(coefficient >= NEXT_STATE for coefficient in held.values())


def _is_square(value: ir.Value | None) -> bool:
    node = None if value is None else value.producer()
    if node is None or node.op_type not in ("Mul", "Pow"):
        return False
    return node.inputs[0] is node.inputs[1] or (node.op_type == "Pow" and constant_number(node.inputs[1]) == 2)


def fitting_inputs(step: Interface, among: _Test) -> dict[ir.Value, list[ir.Value]]:
    """Return the open inputs of the type of each open output, without empty entries.

    Inputs whose gradients leave the graph are weights with an update elsewhere.
    """
    fitting: dict[ir.Value, list[ir.Value]] = {}
    for output in step.open_outputs():
        values = [value for value in step.open_inputs_like(output) if among(value)]
        values = [value for value in values if value.is_graph_input() or _may_be_stored(step, output, value)]
        if values and output not in step.behind_gradients:
            weights = step.weights_like(output)
            if weights and len(step.gradients_like(output)) >= len(weights):
                values = [value for value in values if value not in step.topology.forward]
        if values:
            fitting[output] = values
    return fitting


def _may_be_stored(step: Interface, output: ir.Value, value: ir.Value) -> bool:
    """Return whether an initializer may be the state that an output replaces, even the only stored one."""
    is_alone = not value.uses() or value in step.held_possibly(output) or likeness(value, output)[0] == 1
    return step.may_store_state or is_alone


def is_weight(step: Interface, value: ir.Value) -> bool:
    """Return whether a value is an input, or an initializer that is a weight, or without another use."""
    return value.is_graph_input() or value in step.topology.states or not value.uses()


def may_hold_moment(value: ir.Value) -> bool:
    """Return whether an initializer may be a moment, by its type."""
    return value.is_initializer() and is_float(value) and not is_scalar(value)


def may_hold_state(step: Interface, value: ir.Value) -> bool:
    """Return whether an initializer may be state: a weight, a moment, a key, or a value without readers."""
    return is_weight(step, value) or not is_scalar(value)


def pair_by_dependence(step: Interface, among: _Test) -> None:
    """Pair outputs with their inputs by dependence, first on paths without a contraction."""
    possible = fitting_inputs(step, among)
    if not possible:
        return
    dependence = step.dependence(value for values in possible.values() for value in values)
    settled: dict[ir.Value, ir.Value] = {}
    for depends in (dependence.plain, dependence.of):
        candidates: dict[ir.Value, list[ir.Value]] = {}
        for output, values in possible.items():
            if output not in step.outputs:
                left = [value for value in values if value not in step.inputs]
                reached = left if step.may_be_shifted(output) else depends(output)
                candidates[output] = [value for value in left if value in reached]

        def is_certain(output: ir.Value, value: ir.Value, is_plain: bool = depends == dependence.plain) -> bool:
            # A prediction also depends on a batch of its own type, and a gradient on its mask.
            if any(view in step.doubtful for view in step.views(output)) or _multiplies(step, value, output):
                return False
            is_weight = bool(value.shape) and output in step.behind_gradients and step.has_gradient(value)
            if is_scalar(value) and is_float(value) and not is_weight:
                return _surely_holds(step, output, value)
            if output in step.behind_gradients:
                if step.is_ignored(value) and len(step.gradients_like(value)) > len(step.weights_like(value)):
                    return False  # a gradient may be its next value
                # A product with a constant also depends on it, and a prediction by the next weights on its batch.
                return step.has_gradient(value) or (
                    is_plain and (step.is_ignored(value) or _is_stored_moment(step, output, value))
                )
            if step.is_ignored(value) and is_float(value):
                return step.copied_input(output) is not None or step.holds_a_share(output, value)
            if is_running_statistic(step, output, value):
                return True
            # A counter that restarts, or a random key.
            unsigned = value.dtype in (ir.DataType.UINT32, ir.DataType.UINT64)
            return not is_float(value) and (unsigned or is_scalar(value))

        found = step.settle(candidates, "it depends on its previous value", is_certain)
        settled |= {output: value for output, value in found.items() if not _may_be_metric(step, output, value)}
    _doubt_swaps(step, settled, dependence)


def _is_stored_moment(step: Interface, output: ir.Value, value: ir.Value) -> bool:
    """Return whether an initializer beside stored weights is added to an operand of an output.

    Such an initializer is an average with an unknown share, or filled with one number, as at the start of sums of
    squares: a constant would be a scalar.
    """
    paired = (each for each, assigned in step.inputs.items() if assigned.pair is not None)
    is_beside_weights = any(is_stored(each) and each in step.topology.forward for each in paired)
    is_tensor = is_stored(value) and not is_scalar(value)
    return is_tensor and is_beside_weights and step.holds_a_share(output, value)


def _may_be_metric(step: Interface, output: ir.Value, value: ir.Value) -> bool:
    """Propose a metric in place of a doubtful pair of numbers: the norm of an update depends on the rate.

    A part of the loss that reads a number more than once, such as a temperature, is certainly a metric.
    """
    if step.outputs[output].certain or not (is_scalar(value) and is_float(value)):
        return False
    del step.inputs[value]
    evidence = f"it depends on {value.name!r}, which has its type"
    topology = step.topology
    is_part = output in topology.forward and output in topology.activation_dependent and len(value.uses()) > 1
    step.outputs[output] = Assigned(Role.METRIC, "a part of the loss" if is_part else evidence, certain=is_part)
    return True


def _multiplies(step: Interface, value: ir.Value, output: ir.Value) -> bool:
    """Return whether an output is a gradient or another output, times or divided by an input outside the loss."""
    node = step.views(output)[-1].producer()
    if node is None or node.op_type not in ("Mul", "Div") or value not in node.inputs or not step.is_ignored(value):
        return False
    return step.is_gradient(output) or any(operand in step.outputs for operand in inputs_of(node))


def _doubt_swaps(step: Interface, pairs: dict[ir.Value, ir.Value], dependence: Dependence) -> None:
    """Doubt pairs of one type where one output depends on the other's input, too."""
    doubtful: dict[ir.Value, None] = {}
    for output, value in pairs.items():
        for other in dependence.of(output):
            third = step.inputs[other].pair if other in step.inputs else None
            if other is not value and third in pairs and same_type(output, other):
                doubtful |= {output: None, third: None}
    for output in doubtful:
        step.pair(output, pairs[output], "it could be swapped with another of its type", certain=False)


def pair_other_forms(step: Interface) -> None:
    """Pair outputs that are another form of the next value of a state, such as float16 casts of masters."""
    carried = [output for output, assigned in step.outputs.items() if assigned.role is Role.STATE]
    nexts = {above for output in carried for above in step.views(output)}
    candidates = {
        output: [value for value in values if not is_scalar(value)]
        for output, values in fitting_inputs(step, lambda value: is_weight(step, value)).items()
        if step.holds_one_of(output, nexts)
    }
    step.settle(
        candidates,
        "it is another form of the next value of a state",
        lambda output, value: not nexts.isdisjoint(step.views(output)),
    )
