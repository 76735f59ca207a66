"""The proof, on the rewritten graph alone, that the loss scale has no effect on outputs and carried state.

The symbol S is now the loss scale itself, of degree 1, and no product or division is assumed any more: inserted nodes
are nodes like all others. Then every output and every carried state must have degree 0, the loss must not depend on S
at all, every carried state must have a guard, an overflow of any value must reach the finite check, and every in-place
write must be ordered.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable, Iterator, Mapping, Sequence

import onnx_ir as ir

from graphscale.errors import ProofError
from graphscale.flow.degree import ZERO, Conflict, Degree, DegreeDomain, degree_of
from graphscale.flow.interpreter import Flow
from graphscale.flow.outcome import Outcomes, is_kept
from graphscale.flow.support import depends_on, reach
from graphscale.flow.survival import find_lost
from graphscale.graph.types import holds_all
from graphscale.graph.values import (
    Use,
    all_nodes,
    constant_tensor,
    inputs_of,
    is_float,
    node_name,
    operand_at,
    operands_of,
    own_dtype,
    subgraphs,
)
from graphscale.graph.walks import ancestors
from graphscale.operators import Trait, has_trait, nodes_with, rule_of

__all__ = ["find_untested", "prove", "scale_degrees", "scaled_contractions"]


def prove(
    graph: ir.Graph,
    scale: ir.Value,
    loss: ir.Value,
    *,
    guarded: Mapping[ir.Value, ir.Value] | None = None,
    checked: Iterable[ir.Value] = (),
    all_finite: ir.Value | None = None,
    applies: ir.Value | None = None,
    exempt: Iterable[ir.Value] = (),
    rule_nodes: frozenset[ir.Node] = frozenset(),
) -> dict[ir.Value, Degree]:
    """Prove a scaled graph right, and return the degrees other than 0 in the loss scale.

    Args:
        graph: the rewritten main graph.
        scale: the loss scale.
        loss: the loss.
        guarded: `{next value: state}` of all carried state; without `applies` each must be the state, bit for bit.
        checked: the unscaled gradients; each must reach `all_finite`.
        all_finite: the result of the finite check; None for a step without one, and without guards.
        applies: the value that decides whether the step is applied, and depends on `all_finite`; None for `all_finite`.
        exempt: outputs that are scaled on purpose.
        rule_nodes: the nodes of the update rule: their results are a new scale, not scaled values.

    Raises:
        ProofError: a value or node contradicts the proof; the message names the first.
    """
    nodes, exempt, checked = tuple(graph), frozenset(exempt), tuple(checked)
    others = [node for node in nodes if node not in rule_nodes]
    degrees, conflicts = scale_degrees(others, scale)
    if conflicts:
        raise ProofError(f"the loss scale does not cancel out: {next(iter(conflicts.values()))}")
    for value in graph.outputs:
        if degrees.get(value, 0) not in (0, ZERO) and value not in exempt:
            raise ProofError(f"output {value.name!r} would still be multiplied by the loss scale")
    if depends_on(loss, scale, graph):
        raise ProofError(f"the loss {loss.name!r} would depend on the loss scale")
    if all_finite is not None:
        condition = all_finite if applies is None else applies
        if condition is not all_finite and all_finite not in ancestors([condition], operands=inputs_of):
            raise ProofError("whether the step is applied would not depend on the finite check")
        _prove_guards(nodes, condition, guarded or {})
        # A branch need not read all its captures: a capture does not prove that the check reads a gradient.
        above = ancestors([all_finite], stop=frozenset(checked).__contains__, operands=inputs_of)
        if not above.issuperset(checked):
            above = ancestors([all_finite], operands=inputs_of)  # some are met only above others
        for value in checked:
            if value not in above:
                raise ProofError(f"gradient {value.name!r} would not be tested for finiteness")
        results = {value: None for value in graph.outputs if value not in exempt}
        results |= {value: None for node in nodes_with(others, Trait.EFFECT) for value in operands_of(node)}
        # Behind a tested value of degree 0, neither an overflow nor the scale has an effect.
        dependents = _find_dependents(others, scale, {v for v in checked if degrees.get(v, 0) in (0, ZERO)})
        for fault in find_untested(dependents, scale, frozenset(checked), results, degrees):
            raise ProofError(fault)
    if nodes_with(nodes, Trait.ACCUMULATOR):
        from graphscale.analysis.hazards import find_unordered_readers  # few targets write in place

        for write, readers in find_unordered_readers(graph):
            names = ", ".join(node_name(node) for node in readers)
            raise ProofError(f"{names} could read {operand_at(Use(write, 0)).name!r} after it was overwritten")
    return degrees


def find_untested(
    nodes: Iterable[ir.Node],
    scale: ir.Value,
    checked: Collection[ir.Value],
    results: Iterable[ir.Value],
    degrees: Mapping[ir.Value, Degree],
    decided: Iterable[ir.Value] = (),
) -> Iterator[str]:
    """Yield the overflows that may not reach the finite check, with the reasons, and the results beside it.

    Results may depend on multiples of the scale through tested values alone, their views and casts to a wider type. The
    scale itself, its reciprocal and their products with constants are no such multiples.

    Args:
        nodes: the nodes of a main graph, in execution order.
        scale: the loss scale.
        checked: the tested values.
        results: outputs, and operands with an effect.
        degrees: the degrees in the loss scale.
        decided: the flags by which a step is applied.
    """
    multiples, plain, tested, alone = dict[ir.Value, None](), set[ir.Value](), set(checked), {scale}
    for node in (nodes := tuple(nodes)):
        is_alone = not alone.isdisjoint(node.inputs) and all(
            value in alone or constant_tensor(value) is not None for value in operands_of(node)
        )
        first = node.inputs[0] if node.inputs and has_trait(node, Trait.EXACT) else None
        for value in node.outputs:
            degree = degrees.get(value, 0)
            if is_alone and degree in (1, -1):
                alone.add(value)
            elif first in tested and holds_all(own_dtype(value), own_dtype(first)):
                tested.add(value)
            elif degree not in (0, ZERO) or (is_alone and is_float(value)):
                multiples[value] = None
            if degree in (0, ZERO) and is_float(value):
                plain.add(value)
    for value, loss in find_lost(nodes, scale, tested - alone, plain).items():
        yield f"an overflow would not reach the finite check of {value.name!r}: {loss}"
    stop = {*tested, *decided}
    reached = reach(nodes, [value for value in multiples if value not in stop], stop)
    for value in results:
        if value in reached:
            above = ancestors([value], stop=lambda each: each in stop, operands=operands_of)
            passed = next((each for each in reversed(multiples) if each in above), value)
            yield f"the multiple {passed.name!r} of the scale reaches {value.name!r}, and no finite check tests it"


def _find_dependents(nodes: Iterable[ir.Node], source: ir.Value, stop: Container[ir.Value]) -> list[ir.Node]:
    """Find the nodes that read a value or its dependents, up to some values, and all nodes with bodies."""
    found, values = list[ir.Node](), {source}
    for node in nodes:
        if not values.isdisjoint(node.inputs) or (node.attributes.data and subgraphs(node)):
            found.append(node)
            values.update(value for value in node.outputs if value not in stop)
    return found


def scale_degrees(
    nodes: Iterable[ir.Node], scale: ir.Value, rule_nodes: Container[ir.Node] = ()
) -> tuple[dict[ir.Value, Degree], dict[ir.Node, Conflict]]:
    """Evaluate the degrees other than 0 in the loss scale, and collect the nodes without degrees.

    Args:
        nodes: the nodes of a main graph, in execution order.
        scale: the loss scale.
        rule_nodes: the nodes of the update rule, which are left out.
    """
    domain = DegreeDomain()
    flow = Flow(domain, {scale: 1})
    flow.visit_all(node for node in nodes if node not in rule_nodes)
    elements = ((value, degree_of(element)) for value, element in flow.elements.items())
    return {value: degree for value, degree in elements if degree != 0}, domain.conflicts


def _prove_guards(nodes: Sequence[ir.Node], applies: ir.Value, guarded: Mapping[ir.Value, ir.Value]) -> None:
    left: Collection[tuple[ir.Value, ir.Value]] = guarded.items()
    for states in ((), guarded.values()):  # few steps guard copies of their states
        skipped = Outcomes(nodes, {applies: False}, states)
        left = [(value, state) for value, state in left if not is_kept(skipped.of(value), state)]
        if not left:
            return
    raise ProofError(f"the next value {next(iter(left))[0].name!r} of carried state would not be guarded")


def scaled_contractions(nodes: Iterable[ir.Node], degrees: Mapping[ir.Value, Degree]) -> Iterator[str]:
    """Yield the names of contractions and gradient operators with a scaled operand, bodies included."""
    scaled = {value for value, degree in degrees.items() if degree not in (0, ZERO)}
    for node in all_nodes(nodes):
        rule = None if scaled.isdisjoint(node.inputs) else rule_of(node)
        if rule is not None and (rule.contraction or rule.gradient):
            yield node_name(node)
