"""The proof again, on the scaled graph alone, with its metadata only for names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import onnx_ir as ir
from onnx_ir.passes.common import InlinePass

from graphscale.analysis.hazards import find_in_place_writes, find_unordered_readers, is_fresh
from graphscale.analysis.proof import find_untested, prove, scale_degrees
from graphscale.checks.patterns import assigns, input_at, producer, skip_ordering
from graphscale.checks.verification.finite_check import find_tested_values
from graphscale.checks.verification.pair import Pair
from graphscale.checks.verification.unchecked_sums import find_unchecked_sums
from graphscale.checks.verification.verify_report import FAILS, HOLDS, SKIPPED, UNPROVED, Check
from graphscale.errors import ProofError
from graphscale.flow.degree import ZERO, Degree
from graphscale.flow.outcome import Number, Outcomes, is_kept
from graphscale.graph.cones import producers_of
from graphscale.graph.values import constant_tensor, inputs_of, is_float, node_name, own_dtype, reads_shape, uses_of
from graphscale.graph.walks import ancestors, source_by_trait
from graphscale.operators import Trait, nodes_with, optimizer_of, overwritten_inputs
from graphscale.policy.loss_scale import DynamicLossScale
from graphscale.policy.names import RESULTS

__all__ = ["NO_CHECK", "prove_again"]

NO_CHECK = "a fixed loss scale is not checked: every step is applied, as in TensorFlow"


def prove_again(pair: Pair) -> list[Check]:
    """Prove the scaled graph from the analysis of the original."""
    graph, scale, finite = pair.step.graph, pair.step.scale, pair.step.all_finite
    checks = [Check.proved("named values", _metadata(pair), f"{len(pair.step.stamp.state)} pairs of state")]
    rule, ordering = _rule_nodes(pair), _ordering_nodes(graph)
    exempt = [] if pair.scaled_loss is None else [pair.scaled_loss]
    outputs = {value.name: value for value in graph.outputs}
    loss, degrees = pair.counterpart(pair.analysis.loss) or outputs.get(pair.analysis.loss.name), None
    contradiction = f"the loss {pair.analysis.loss.name!r} of the original is not in the graph"
    if scale.value.graph is None:
        loss, contradiction = None, f"the loss scale {scale.value.name!r} is not in the graph"
    try:
        if loss is not None:
            degrees = prove(graph, scale.value, loss, exempt=exempt, rule_nodes=rule | ordering)
    except ProofError as error:
        contradiction = str(error)
    checks.append(_free_of_scale(pair, degrees, contradiction, loss))
    names = ("every gradient checked", "carried state guarded", "update rule", "what is applied is checked")
    if finite is None:
        checks += [Check(name, SKIPPED, NO_CHECK, True) for name in names]
    else:
        quotients = _quotients(pair, rule | ordering)
        tested = find_tested_values(finite, frozenset(quotients))
        missed = find_untested(graph, scale.value, tested & quotients, rule, exempt)
        checks.append(Check.proved(names[0], missed, f"{len(tested & quotients)} gradients reach {finite.name!r}"))
        status = FAILS if pair.proved else UNPROVED  # next weights may have no counterpart then
        sums = find_unchecked_sums(pair, finite, tested & quotients, tested, degrees or {}, rule | ordering)
        checks.append(Check.proved(names[3], sums, "no sum in float16 applies more than was checked", status))
        unguarded = _guards(pair, finite)
        checks.append(Check.proved(names[1], unguarded, f"{len(pair.states)} states"))
        dynamic = isinstance(pair.step.scale.policy, DynamicLossScale)
        skipped = Check(names[2], SKIPPED, "a fixed loss scale has none", True)
        what = f"{len(scale.states)} states follow from {finite.name!r} and themselves alone"
        checks.append(Check.proved(names[2], _rule(pair, finite, rule, ordering), what) if dynamic else skipped)
    writes = list(find_in_place_writes(graph))
    what = f"{len(writes)} writes, each after all readers"
    checks.append(Check.proved("in-place writes ordered", _late_readers(pair.step.model), what))
    return checks


def _late_readers(model: ir.Model) -> Iterator[str]:
    """Yield late readers, including those inside functions, since runtimes inline functions."""
    if model.functions:
        model = model.clone()
        InlinePass()(model)
    graph = model.graph
    for write, readers in find_unordered_readers(graph):
        if (state := write.inputs[0]) is not None:
            for reader in readers:
                yield f"{node_name(reader)!r} could read {state.name!r} after it was overwritten"


def _metadata(pair: Pair) -> Iterator[str]:
    """Compare the sessions' metadata with the graph: the state to feed back, without omissions."""
    for node in pair.analysis.graph:
        if node not in pair.nodes and pair.proved:
            yield f"node {node_name(node)!r} of the original is gone"
    stamped = dict(pair.step.stamp.state)
    in_place = {s["input"] for s in pair.step.stamp.report.get("state", ()) if s.get("output") is None}
    in_place |= {name for name, output in pair.states.items() if output is None}
    outputs = {value.name for value in pair.step.graph.outputs}
    for name, output in pair.following.items():
        if output is None and name in pair.step.stamp.names.values() and name not in pair.written:
            yield f"the metadata name no next value of {name!r}, and nothing writes it in place"
        if output is None and name not in in_place:
            yield f"the state {name!r} is written in place, and the metadata do not say so"
        if output is not None and output not in outputs:
            yield f"the next value {output!r} of {name!r} is gone"
        if output is not None and stamped.pop(name, None) != output:
            yield f"the metadata do not say that {output!r} is the next value of {name!r}"
    for name, output in stamped.items():
        yield f"the metadata call {output!r} the next value of {name!r}, which it is not"
    moved = {output for name, output in pair.states.items() if name in pair.written}
    for value in pair.analysis.graph.outputs:
        if value.name not in outputs | moved:
            yield f"the output {value.name!r} of the original is gone"
    for value in pair.step.added:
        if not value.is_graph_input() or value.const_value is None:
            yield f"the state {value.name!r} is not an input with an initial value"
    known = {value.name for value in pair.analysis.graph.outputs} | set(pair.following.values())
    known |= {pair.step.stamp.names.get(role) for role in RESULTS}
    # In-place state may also have its next value among the outputs, for the caller.
    known |= {f"{value.name}.next" for value in pair.step.added}
    for value in pair.step.graph.outputs:
        if value.name not in known and value is not pair.scaled_loss:
            yield f"the output {value.name!r} is neither the original's nor one of the scaling"


def _free_of_scale(
    pair: Pair, degrees: Mapping[ir.Value, Degree] | None, contradiction: str, loss: ir.Value | None
) -> Check:
    name, graph = "outputs, state and loss free of the scale", pair.step.graph
    if degrees is None:
        if "after it was overwritten" not in contradiction:
            # Another tool may have removed the loss, and folded a constant scale.
            is_open = not pair.proved and (loss is None or not pair.step.scale.value.is_graph_input())
            return Check(name, UNPROVED if is_open else FAILS, contradiction, True)
        return Check(name, SKIPPED, "see: in-place writes ordered", True)
    for node in nodes_with(graph, Trait.ACCUMULATOR):
        value = node.inputs[1]
        if value is not None and degrees.get(skip_ordering(value), 0) not in (0, ZERO):
            return Check(name, FAILS, f"{node_name(node)!r} writes {value.name!r}, which carries the loss scale", True)
    return Check(name, HOLDS, f"{len(graph.outputs)} outputs of degree 0 in {pair.step.scale.value.name!r}", True)


def _rule_nodes(pair: Pair) -> frozenset[ir.Node]:
    """Return the nodes between the present and the next state of the loss scale, and the writes of the next."""
    scale, finite = pair.step.scale, pair.step.all_finite
    results = [skip_ordering(value) for value in scale.next.values()]
    results += [] if scale.stuck is None else [scale.stuck]
    found = producers_of(ancestors(results, stop=lambda value: value is finite) - {finite})
    states = set(scale.states.values())
    return frozenset(
        found | {node for node in nodes_with(pair.step.graph, Trait.ACCUMULATOR) if node.inputs[0] in states}
    )


def _ordering_nodes(graph: ir.Graph) -> frozenset[ir.Node]:
    """Return the selects that only delay a write, and the nodes with these as their only readers."""
    outputs = set(graph.outputs)
    found: set[ir.Node] = set()
    for node in reversed(list(graph)):
        if node.op_type == "Where" and skip_ordering(node.outputs[0]) is not node.outputs[0]:
            found.add(node)
            continue
        readers = {use.node for value in node.outputs for use in uses_of(value)}
        if readers and readers <= found and not outputs.intersection(node.outputs):
            # A select passes its last operand on: the nodes above that operand are no part of the ordering.
            handed = {skip_ordering(reader.outputs[0]) for reader in readers}
            if not handed.intersection(node.outputs):
                found.add(node)
    return frozenset(found)


def _quotients(pair: Pair, aside: frozenset[ir.Node]) -> set[ir.Value]:
    """Return the unscaled gradients."""
    nodes = tuple(pair.step.graph)
    degrees, _ = scale_degrees(nodes, pair.step.scale.value, aside)
    unscaling = (node for node in nodes if node not in aside and not reads_shape(node))
    unscaling = (n for n in unscaling if any(degrees.get(v, 0) not in (0, ZERO) for v in inputs_of(n)))
    return {v for node in unscaling for v in node.outputs if degrees.get(v, 0) == 0 and is_float(v)}


def _guards(pair: Pair, finite: ir.Value) -> Iterator[str]:
    graph = pair.step.graph
    inputs = {value.name: value for value in (*graph.inputs, *graph.initializers.values())}
    outputs = {value.name: value for value in graph.outputs}
    written = {node.inputs[0].name: node for node in nodes_with(graph, Trait.ACCUMULATOR) if node.inputs[0] is not None}
    steps = _Steps(pair, finite)
    for state, output in pair.states.items():
        if state in pair.kept:
            continue
        value, reason = inputs.get(state), None
        if value is None:
            yield f"the state {state!r} of the original is gone"
        elif state in written:
            reason = steps.find_write_fault(written[state])
        elif output is None or output not in outputs:
            yield f"the next value of {state!r} is gone"
        else:
            reason = steps.find_guard_fault(outputs[output], value)
        if reason is not None:
            yield f"the state {state!r} is not guarded: {reason}"
    for name, node in written.items():
        if name not in pair.following:
            yield f"{node_name(node)!r} writes {name!r}, which is no state of the original (--update OUT={name})"
    for node, value in _find_unprotected_operands(graph):
        yield f"{node_name(node)!r} may overwrite {value.name!r} whether the step is applied or not"


def _rule(pair: Pair, finite: ir.Value, rule: frozenset[ir.Node], ordering: frozenset[ir.Node]) -> Iterator[str]:
    """Find faults of the update rule, which must read only its own state and the flag, and have no other readers."""
    graph, scale = pair.step.graph, pair.step.scale
    given, aside = {finite, *scale.states.values()}, rule | ordering
    for node in graph:
        if node not in rule or node in ordering or node.op_type.startswith("InPlaceAccumulator"):
            continue
        for value in inputs_of(node):
            if value not in given and constant_tensor(value) is None and value.producer() not in rule:
                yield f"the update rule reads {value.name!r} at {node_name(node)!r}"
        for value in node.outputs:
            others = [use.node for use in uses_of(value) if use.node not in aside]
            if value is not scale.stuck and others:
                yield f"{node_name(others[0])!r} reads {value.name!r} of the update rule"
    for role, state in scale.states.items():
        write = next((n for n in nodes_with(graph, Trait.ACCUMULATOR) if n.inputs[0] is state), None)
        if role not in scale.next:
            yield f"{state.name!r} has no next value"
        elif write is not None and not assigns(write):
            yield f"{node_name(write)!r} does not assign to {state.name!r}"
    if not any(finite in node.inputs for node in rule):
        yield f"the update rule does not read {finite.name!r}"


# --- the guards of carried state --------------------------------------------------------------------------------------


class _Steps:
    """The outcomes of a skipped step and of applied steps; a policy may accept a step that is stuck non-finite."""

    def __init__(self, pair: Pair, finite: ir.Value) -> None:
        accepts = (
            isinstance(pair.step.scale.policy, DynamicLossScale) and pair.step.scale.policy.rule.on_stuck == "accept"
        )
        flags = [finite, *([pair.step.scale.stuck] if accepts and pair.step.scale.stuck is not None else [])]
        graph, states = pair.step.graph, [*pair.step.graph.inputs, *pair.step.graph.initializers.values()]
        self._skipped = Outcomes(graph, dict.fromkeys(flags, False), states)
        self._applied = [Outcomes(graph, {each: each is flag for each in flags}, states) for flag in flags]
        self._pair = pair

    def find_guard_fault(self, value: ir.Value, state: ir.Value) -> str | None:
        """Return the reason why a next value is not the old one on a skipped step alone, or None."""
        value = skip_ordering(value)
        kept, applied, node = self._skipped.of(value), [each.of(value) for each in self._applied], value.producer()
        name = value.name if node is None else node_name(node)
        if is_kept(kept, state):
            is_lost = kept in applied and not self._passes_on(state)
            return f"on an applied step {name!r} gives the old value, too" if is_lost else None
        if isinstance(kept, ir.Value) and source_by_trait(kept, Trait.CAST) is state:
            return f"{name!r} selects in {own_dtype(kept)}, which does not hold all numbers of {state.dtype}"
        if all(outcome == kept for outcome in applied):
            return f"{value.name!r} is not selected by whether the step is applied"
        return f"on a skipped step {name!r} gives {getattr(kept, 'name', kept)!r}, not the old value"

    def _passes_on(self, state: ir.Value) -> bool:
        """Return whether the original itself passes a state on."""
        pairs = [(u.input, u.output) for u in self._pair.analysis.states if u.input.name == state.name]
        outcomes = Outcomes(self._pair.analysis.graph, {}, [old for old, _ in pairs])
        return any(outcomes.of(new) is old for old, new in pairs)

    def find_write_fault(self, node: ir.Node) -> str | None:
        """Return the reason why an accumulator could change its buffer on a skipped step, or None."""
        state, value, flag = node.inputs[0], node.inputs[1], input_at(node, 2)
        assert state is not None and value is not None
        may_assign = node.op_type == "InPlaceAccumulatorV2"
        if may_assign and flag is not None and self._skipped.of(flag) is True:
            # It overwrites the buffer, always or on a skipped step, with the buffer's own content.
            return self.find_guard_fault(value, state)
        added = self._skipped.of(value)
        if all(each.of(value) == added for each in self._applied):
            return f"{node_name(node)!r} adds {value.name!r} whether the step is applied or not"
        if added is not Number.MINUS_ZERO:
            return f"{node_name(node)!r} adds something on a skipped step"
        if may_assign and flag is None:
            return f"{node_name(node)!r} turns -0.0 into 0.0 on a skipped step"
        return None


def _find_unprotected_operands(graph: ir.Graph) -> Iterator[tuple[ir.Node, ir.Value]]:
    """Find operands that a kernel overwrites, and that are no copies."""
    for node in graph:
        written: list[int | None] = list(overwritten_inputs(node))
        if (optimizer := optimizer_of(node)) is not None:
            written += [optimizer.source(o) for o, value in enumerate(node.outputs) if value.name]
        for i in written:
            value = input_at(node, i)
            # A sum of one operand is a copy in a new buffer.
            if value is not None and producer(value, "Sum") is None and not is_fresh(value):
                yield node, value
