"""Rules on precision: GS601 to GS608."""

from __future__ import annotations

from collections.abc import Iterator

import onnx_ir as ir

from graphscale.analysis.scales import Bookkeeping
from graphscale.analysis.updates import find_coefficients
from graphscale.checks.linting.lint_context import LintContext, rule
from graphscale.checks.linting.lint_report import Finding, report
from graphscale.checks.linting.state_search import Carry, State
from graphscale.graph.values import constant_number, inputs_of, is_scalar
from graphscale.graph.walks import source_by_trait, source_of
from graphscale.operators import Trait, has_trait, nodes_with

__all__: list[str] = []

_HALF, _BRAIN = ir.DataType.FLOAT16, ir.DataType.BFLOAT16
_SMALL: dict[ir.DataType | None, str] = {_HALF: "float16", _BRAIN: "bfloat16"}
_LARGEST = 65504
# The least coefficient of the old value in a running sum, above that in an average.
_SUM = 0.9999


@rule("GS601", "GS604")
def _small_scale(context: LintContext) -> Iterator[Finding]:
    number = None if context.scale is None else constant_number(context.scale.value)
    # A small constant is exact in float16.
    if context.scale is None or (number is not None and number <= _LARGEST):
        return
    scalars = context.scale.scalars
    for node in context.nodes:
        source = node.inputs[0] if node.op_type == "Cast" else None
        is_small = context.dtypes.get(node.outputs[0]) is _HALF
        if source is not None and is_small and source in scalars.multiples and _is_power(scalars, source):
            yield report("GS601", f"{source.name!r}, the loss scale, is cast to float16", node, source)
    for value in dict.fromkeys((context.scale.value, scalars.symbol)):
        if context.dtypes.get(value) is _HALF:
            yield report("GS604", f"the loss scale {value.name!r} is float16", value.producer(), value)


def _is_power(scalars: Bookkeeping, value: ir.Value) -> bool:
    """Return whether a value is the scale itself, or its reciprocal; a product with another number is a seed."""

    def operand(node: ir.Node) -> ir.Value | None:
        others = [value for value in inputs_of(node) if value in scalars.multiples]
        is_view = has_trait(node, Trait.VIEW | Trait.REPEAT)
        return others[0] if len(others) == 1 and (is_view or node.op_type in ("Reciprocal", "Div")) else None

    return source_of(value, operand) in (scalars.symbol, *scalars.leaves)


@rule("GS603")
def _unscaling(context: LintContext) -> Iterator[Finding]:
    for value, node in context.unscaled.items():
        if context.dtypes.get(value) is _HALF:
            yield report("GS603", f"{value.name!r} is unscaled in float16", node, value)


@rule("GS602")
def _accumulation(context: LintContext) -> Iterator[Finding]:
    nodes = nodes_with(context.nodes, Trait.ACCUMULATOR)
    sums = [(node, node.inputs[0]) for node in nodes if _HALF in map(context.dtypes.get, node.inputs[:2])]
    states = [state for state in context.states if context.dtypes.get(state.value) is _HALF]
    more = [(state.next.producer(), state.value) for state in states if _is_sum_of_gradients(context, state)]
    for node, value in [*sums, *more]:
        if value is not None:
            yield report("GS602", f"{value.name!r} adds up gradients in float16", node, value)


def _is_sum_of_gradients(context: LintContext, state: State) -> bool:
    if state.carry is not Carry.OUTPUT or state.next not in context.sources or is_scalar(state.value):
        return False
    if context.topology is not None and state.value in context.topology.forward:
        return False
    return find_coefficients(_unguarded(context, state), {state.value}).get(state.value, 0) >= _SUM


def _unguarded(context: LintContext, state: State) -> ir.Value:
    """Return the next value of a state on an applied step: its guards contain the old value."""
    applied = state.next if context.outcomes is None else context.outcomes[0].of(state.next)
    return applied if isinstance(applied, ir.Value) else state.next


def _is_rounded_copy(context: LintContext, state: State) -> bool:
    """Return whether a state is rounded on each step from masters of a wider type, without a share of its old value."""
    value = _unguarded(context, state)
    is_rounded = context.dtypes.get(source_by_trait(value, Trait.VIEW)) not in _SMALL
    return is_rounded and state.value not in find_coefficients(value, {state.value}, least=0)


@rule("GS605")
def _counters(context: LintContext) -> Iterator[Finding]:
    counters = [state.value for state in context.states if state.carry is not Carry.ADD and is_scalar(state.value)]
    counters += [value for value in context.nexts if context.scale is None or value is not context.scale.value]
    for value in counters:
        if (name := _SMALL.get(context.dtypes.get(value))) is not None:
            yield report("GS605", f"{value.name!r} is {name}", value=value)


@rule("GS607")
def _states(context: LintContext) -> Iterator[Finding]:
    for state in context.states:
        name, value = _SMALL.get(context.dtypes.get(state.value)), state.value
        if name is None or is_scalar(value) or state.next not in context.sources:
            continue
        is_written = state.carry in (Carry.OUTPUT, Carry.WRITE)
        if is_written and not _is_sum_of_gradients(context, state) and not _is_rounded_copy(context, state):
            yield report("GS607", f"{value.name!r} is carried in {name}", value=value)


@rule("GS608")
def _outputs(context: LintContext) -> Iterator[Finding]:
    nexts = {state.next for state in context.states}
    for output in context.graph.outputs:
        source = source_by_trait(output, Trait.VIEW)
        is_narrowed = context.dtypes.get(output) is _HALF and context.dtypes.get(source) is not _HALF
        if is_narrowed and source in context.unscaled and output not in nexts:
            yield report("GS608", f"{output.name!r}, a gradient, leaves in float16", output.producer(), output)


@rule("GS606")
def _bfloat16(context: LintContext) -> Iterator[Finding]:
    if context.scale is not None and context.has_gradients_in(_BRAIN) and not context.has_gradients_in(_HALF):
        yield report("GS606", "the gradients are computed in bfloat16", value=context.scale.value)
