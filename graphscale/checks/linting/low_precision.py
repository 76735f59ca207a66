"""Rules on precision: GS601 to GS607."""

from __future__ import annotations

from collections.abc import Iterator

import onnx_ir as ir

from graphscale.analysis.degrees import ZERO
from graphscale.analysis.updates import find_coefficients
from graphscale.checks.linting.lint_context import Rule, Subject
from graphscale.checks.linting.lint_report import Finding, found
from graphscale.checks.linting.state_search import Carry, State
from graphscale.checks.linting.view import number_of
from graphscale.graph.values import is_scalar
from graphscale.operators import Trait, has_trait

__all__ = ["RULES"]

_HALF, _BRAIN = ir.DataType.FLOAT16, ir.DataType.BFLOAT16
_LARGEST = 65504
# The coefficient of the old value from which on a state is a running sum, and no average.
_SUM = 0.9999


def _casts(subject: Subject) -> Iterator[Finding]:
    if subject.scale is None or _is_small_constant(subject):
        return
    scalars = subject.scale.scalars
    for node in subject.view.nodes:
        source = node.inputs[0] if node.op_type == "Cast" else None
        if source is None or source not in scalars.values or scalars.degree(source) in (0, ZERO):
            continue
        if subject.dtype(node.outputs[0]) is _HALF:
            yield found("GS601", f"{source.name!r}, the loss scale, is cast to float16", node, source)


def _is_small_constant(subject: Subject) -> bool:
    number = None if subject.scale is None else number_of(subject.scale.value)
    return number is not None and number <= _LARGEST


def _scale_dtype(subject: Subject) -> Iterator[Finding]:
    if subject.scale is None or _is_small_constant(subject):
        return
    for value in dict.fromkeys((subject.scale.value, subject.scale.scalars.symbol)):
        if subject.dtype(value) is _HALF:
            yield found("GS604", f"the loss scale {value.name!r} is float16", value.producer(), value)


def _unscaling(subject: Subject) -> Iterator[Finding]:
    for value, node in {} if subject.flow is None else subject.flow.unscaled.items():
        if subject.dtype(value) is _HALF:
            yield found("GS603", f"{value.name!r} is unscaled in float16", node, value)


def _accumulation(subject: Subject) -> Iterator[Finding]:
    for node in subject.view.nodes:
        if has_trait(node, Trait.ACCUMULATOR) and node.inputs[0] is not None:
            if _HALF in (subject.dtype(node.inputs[0]), subject.dtype(node.inputs[1])):
                yield found("GS602", f"{node.inputs[0].name!r} adds up gradients in float16", node, node.inputs[0])
    for state in subject.states:
        if subject.dtype(state.value) is _HALF and _is_sum_of_gradients(subject, state):
            yield found(
                "GS602", f"{state.value.name!r} adds up gradients in float16", state.next.producer(), state.value
            )


def _is_sum_of_gradients(subject: Subject, state: State) -> bool:
    if state.carry is not Carry.OUTPUT or state.next not in subject.sources or is_scalar(state.value):
        return False
    if subject.topology is not None and state.value in subject.topology.forward:
        return False
    return find_coefficients(state.next, {state.value}).get(state.value, 0) >= _SUM


def _counters(subject: Subject) -> Iterator[Finding]:
    counters = [state.value for state in subject.states if state.carry is not Carry.ADD and is_scalar(state.value)]
    if subject.scale is not None:
        counters += [value for value in subject.scale.nexts if value is not subject.scale.value]
    for value in counters:
        dtype = subject.dtype(value)
        if dtype in (_HALF, _BRAIN):
            assert dtype is not None
            yield found("GS605", f"{value.name!r} is {dtype.name.lower()}", value=value)


def _states(subject: Subject) -> Iterator[Finding]:
    for state in subject.states:
        dtype = subject.dtype(state.value)
        if dtype not in (_HALF, _BRAIN) or is_scalar(state.value) or state.next not in subject.sources:
            continue
        if state.carry in (Carry.OUTPUT, Carry.WRITE) and not _is_sum_of_gradients(subject, state):
            assert dtype is not None
            yield found("GS607", f"{state.value.name!r} is carried in {dtype.name.lower()}", value=state.value)


def _bfloat16(subject: Subject) -> Iterator[Finding]:
    if subject.flow is None:
        return
    found_types = {subject.dtype(value): value for value in subject.flow.touched if subject.carries_scale(value)}
    if _BRAIN in found_types and _HALF not in found_types:
        yield found(
            "GS606", "the gradients are computed in bfloat16", value=subject.scale.value if subject.scale else None
        )


RULES = (
    Rule(("GS601",), _casts),
    Rule(("GS602",), _accumulation),
    Rule(("GS603",), _unscaling),
    Rule(("GS604",), _scale_dtype),
    Rule(("GS605",), _counters),
    Rule(("GS606",), _bfloat16),
    Rule(("GS607",), _states),
)
