"""read_unstamped: the step of a file that somebody else scaled, from its graph and the original.

Inputs and outputs that the original lacks are those of the scaling. The scale is the one among them whose powers cancel
at the outputs of the original. The finite flag is the one that keeps states if it is false. Roles are the original's.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

import numpy as np
import onnx.reference
import onnx_ir as ir

from graphscale.analysis.proof import scaled_contractions
from graphscale.analysis.updates import same_type
from graphscale.errors import ModelFileError
from graphscale.flow.degree import ZERO, DegreeDomain, Mixed, degree_of
from graphscale.flow.interpreter import Flow
from graphscale.flow.outcome import Outcomes, is_kept
from graphscale.flow.support import reach
from graphscale.graph.builder import Editor
from graphscale.graph.stamp import Stamp
from graphscale.graph.values import constant_number, constant_tensor, inputs_of, is_float, is_scalar, own_dtype, uses_of
from graphscale.graph.walks import ancestors
from graphscale.operators import Trait, has_trait
from graphscale.policy.loss_scale import FixedLossScale, LossScale
from graphscale.policy.names import ScaledValue
from graphscale.policy.observed_rule import ObservedLossScale, identify_policy
from graphscale.step.training_step import Carried, Scale, Step
from graphscale.targets import TARGETS

__all__ = ["powers_of", "read_unstamped"]

_TRIED = 16  # flags
_COUNTS = (ScaledValue.GOOD_STEPS, ScaledValue.HYSTERESIS_LEFT, ScaledValue.BAD_STEPS)


def read_unstamped(model: ir.Model, original: Step, name: str = "the model") -> Step:
    """Read the step of a file without a stamp, scaled by somebody else.

    Args:
        model: the model, without functions. A flag that is true for a non-finite gradient gets its opposite as a value.
        original: the step of the original.
        name: the model's name in messages.

    Raises:
        ModelFileError: the graph has no loss scale, or lacks an input or output of the original.
    """
    graph = model.graph
    sources = {v.name: v for v in (*graph.inputs, *graph.initializers.values())}
    outputs = {value.name: value for value in graph.outputs}
    for kind, values, present in (
        ("input", original.graph.inputs, sources),
        ("output", original.graph.outputs, outputs),
    ):
        missing = next((value.name for value in values if value.name not in present), None)
        if missing is not None:
            raise ModelFileError(f"{name} has no {kind} {missing!r}, which the original has")
    known = {value.name for value in (*original.graph.inputs, *original.graph.initializers.values())}
    further = [value for value in graph.inputs if value.name not in known]
    ends = [outputs[value.name] for value in original.graph.outputs]
    scale = _find_scale(graph, original.graph, further, ends)
    if scale is None:
        raise ModelFileError(
            f"{name} carries no loss scale: no input or constant that the original lacks multiplies its backward pass; "
            "scale it first: graphscale scale MODEL -o OUT"
        )
    pairs = {
        sources[update.input.name]: outputs[update.output.name]
        for update in original.states
        if not update.kept and update.input.name in sources
    }
    flag = None if constant_tensor(scale) is not None else _find_flag(graph, scale, pairs, ends)
    added = _pair_up(graph, scale, further, [v for v in graph.outputs if v not in ends])
    rule = _rule_states(scale, flag, added)
    roles = dict(zip((ScaledValue.LOSS_SCALE, *_COUNTS), rule, strict=False))
    policy = _find_policy(model, scale, flag, {state: added[state] for state in rule})
    names = {
        ScaledValue.LOSS_SCALE: scale,
        ScaledValue.ALL_FINITE: flag,
        ScaledValue.LOSS: outputs.get(original.loss.name),
    }
    names |= roles
    kept = [
        (sources[u.input.name], outputs[u.output.name]) for u in original.states if u.kept and u.input.name in sources
    ]
    return Step(
        graph=graph,
        loss=outputs.get(original.loss.name, ir.val("")),
        model=model,
        metadata=Stamp(
            version="",
            policy={"class_name": type(policy).__name__, "config": policy.get_config()},
            state={v.name or "": n.name or "" for v, n in (*pairs.items(), *kept, *added.items())},
            target="onnx",
            names={role.value: value.name or "" for role, value in names.items() if value is not None},
            report={},
        ),
        scales=(
            Scale(
                policy=policy,
                target=TARGETS["onnx"],
                value=scale,
                states=roles,
                next={role: added[state] for role, state in roles.items()},
            ),
        ),
        all_finite=flag,
        guard=flag,
        carried=(
            *(Carried(v, n, False, "", True) for v, n in pairs.items()),
            *(Carried(v, n, False, "", False) for v, n in (*kept, *added.items())),
        ),
    )


# --- the scale --------------------------------------------------------------------------------------------------------


def powers_of(graph: ir.Graph, scale: ir.Value, original: ir.Graph) -> dict[ir.Value, tuple[int, float]]:
    """Return the values with a power of a scale: the power, and the number beside it.

    They are the scale itself, or of a constant one all new constants that are its product with a number of the
    original, or a number over it: other tools fold it into others.
    """
    number = _number_of(scale)
    if number is None:
        return {scale: (1, 1.0)}
    factor, known = max(number, 1 / number), {1.0, *(n for _, n in _constants(original))}
    powers = dict[ir.Value, tuple[int, float]]()
    with np.errstate(all="ignore"):
        for value, n in _constants(graph):
            for power, rest in ((1, float(np.float32(n / factor))), (-1, float(np.float32(n * factor)))):
                if n not in known - {1.0} and rest in known:
                    powers.setdefault(value, (power, rest))
    return powers


def _number_of(value: ir.Value) -> float | None:
    """Return the number in all elements of a small floating-point constant; None for other values."""
    tensor = constant_tensor(value) if is_float(value) else None
    if tensor is None or not 0 < tensor.size <= _SMALL:
        return None
    array = tensor.numpy().reshape(-1)
    return float(array[0]) if (array == array[0]).all() else None


_SMALL = 4096


def _constants(graph: ir.Graph) -> Iterator[tuple[ir.Value, float]]:
    nodes = (node.outputs[0] for node in graph if node.op_type == "Constant")
    inputs = set(graph.inputs)
    for value in (*(v for v in graph.initializers.values() if v not in inputs), *nodes):
        number = _number_of(value)
        if number is not None:
            yield value, number


def _find_scale(
    graph: ir.Graph, original: ir.Graph, further: Iterable[ir.Value], ends: Sequence[ir.Value]
) -> ir.Value | None:
    """Find the value whose powers cancel at some outputs, with the most contractions of the backward pass between."""
    numbers = {number for _, number in _constants(original)}
    inputs = [value for value in further if is_float(value) and is_scalar(value)]
    constants = {number: value for value, number in _constants(graph) if number not in numbers and number > 0}
    best, most = None, (False, 0)
    for value in (*inputs, *constants.values()):
        if most[0] and value not in inputs and best in inputs:
            break
        flow = Flow(DegreeDomain(), {v: power for v, (power, _) in powers_of(graph, value, original).items()})
        flow.visit_all(graph)
        elements = [flow.of(end) for end in ends]
        is_clean = not any(isinstance(each, Mixed) or each not in (0, ZERO) for each in elements)
        degrees = {v: degree_of(element) for v, element in flow.elements.items()}
        rank = (is_clean, sum(1 for _ in scaled_contractions(graph, degrees)))
        # A constant is a scale only if it acts as one in every respect.
        if rank[1] and rank > most and (is_clean or value in inputs):
            best, most = value, rank
    return best or (inputs[0] if len(inputs) == 1 else None)


# --- the finite flag --------------------------------------------------------------------------------------------------


def _find_flag(
    graph: ir.Graph, scale: ir.Value, pairs: Mapping[ir.Value, ir.Value], ends: Collection[ir.Value]
) -> ir.Value | None:
    """Find the flag that decides whether most states keep their old values, as a value that is true if they do not.

    Of a step without states it is a further output, by which the caller skips.
    """
    reached = reach(graph, [scale])
    flags = [v for node in graph for v in node.outputs if own_dtype(v) is ir.DataType.BOOL and v in reached]
    flags = [v for v in flags if v.shape is None or is_scalar(v)]
    if not pairs:
        return next((v for v in flags if v in graph.outputs and v not in ends), None)
    above = ancestors(pairs.values())
    found, most = None, 0
    for flag, result in itertools.product([v for v in reversed(flags) if v in above][:_TRIED], (False, True)):
        outcomes = Outcomes(graph, {flag: result}, pairs)
        count = sum(is_kept(outcomes.of(following), state) for state, following in pairs.items())
        if count > most:
            found, most = (flag, result), count
        if most == len(pairs):
            break
    return None if found is None else _positive(graph, *found)


def _positive(graph: ir.Graph, flag: ir.Value, fails_as: bool) -> ir.Value:
    """Return the flag at the top of negations and views of itself, or the opposite of one that is true for failure."""
    while has_trait(_node(flag), Trait.VIEW) or _is_negation(flag):
        value = inputs_of(_node(flag))[0]
        if value.producer() is None or own_dtype(value) is not ir.DataType.BOOL:
            break  # a cast of a number
        flag, fails_as = value, fails_as != _is_negation(flag)
    if not fails_as:
        return flag
    editor, opposites = Editor(graph), [node for node, _ in uses_of(flag) if _is_negation(node.outputs[0])]
    positive = opposites[0] if opposites else _negate(editor, flag, "finite")
    uses = [use for use in uses_of(flag) if use.node is not positive]
    again = _negate(editor, positive.outputs[0], "again")
    for node, index in uses:
        node.replace_input_with(index, again.outputs[0])
    graph.insert_after(_node(flag), [again] if opposites else [positive, again])
    graph.sort()
    return positive.outputs[0]


def _negate(editor: Editor, flag: ir.Value, end: str) -> ir.Node:
    result = ir.val(editor.unique(f"{flag.name}.{end}"), ir.DataType.BOOL, flag.shape)
    return ir.node("Not", [flag], outputs=[result])


def _node(value: ir.Value) -> ir.Node:
    node = value.producer()
    assert node is not None
    return node


def _is_negation(value: ir.Value) -> bool:
    node = value.producer()
    return node is not None and (node.domain, node.op_type) == ("", "Not")


# --- the update rule --------------------------------------------------------------------------------------------------


def _pair_up(
    graph: ir.Graph, scale: ir.Value, further: Sequence[ir.Value], results: Iterable[ir.Value]
) -> dict[ir.Value, ir.Value]:
    """Pair the scale and the other added states with their next values: outputs of their type that depend on them."""
    pairs, free = dict[ir.Value, ir.Value](), list(results)
    for state in (scale, *(value for value in further if value is not scale)):
        reached = reach(graph, [state])
        fitting = [v for v in free if v in reached and same_type(v, state)]
        if fitting:
            # Of several, one with the state's name.
            best = next((v for v in fitting if (state.name or "") in (v.name or "")), fitting[0])
            free.remove(best)
            pairs[state] = best
    return pairs


def _rule_states(scale: ir.Value, flag: ir.Value | None, pairs: Mapping[ir.Value, ir.Value]) -> list[ir.Value]:
    """Return the scale, and the added states that its next value depends on; none of a scale that the caller feeds."""
    if scale not in pairs:
        return []
    above = ancestors([pairs[scale]], stop=lambda value: value is flag)
    return [scale, *(state for state in pairs if state in above and state is not scale)]


def _find_policy(
    model: ir.Model, scale: ir.Value, flag: ir.Value | None, pairs: Mapping[ir.Value, ir.Value]
) -> LossScale:
    """Identify the policy by evaluating the update rule, which may read its state and the flag alone."""
    fixed, initial = _number_of(scale), constant_number(scale, initial=True)
    if fixed is not None:
        return FixedLossScale(max(fixed, 1 / fixed))
    initial = 2.0**15 if initial is None else initial
    if not pairs or flag is None:
        return ObservedLossScale(initial)
    given = {flag, *pairs}
    above = ancestors(pairs.values(), stop=given.__contains__)
    others = [v.name for v in above if v.producer() is None and v not in given and constant_tensor(v) is None]
    if others:
        return ObservedLossScale(
            initial, faults=[f"the update rule reads {name!r}" for name in sorted(map(str, others))]
        )
    part = ir.convenience.extract(model.graph, [v for v in given if v in above], [*pairs.values()])
    evaluator = onnx.reference.ReferenceEvaluator(ir.serde.serialize_model(ir.Model(part, ir_version=model.ir_version)))
    first = {state: constant_number(state, initial=True) or 0 for state in [*pairs][2:]}

    def rule(number: np.float32, count: int, finite: bool) -> tuple[np.float32, int]:
        numbers = {**first, **dict(zip(pairs, (number, count), strict=False)), flag: finite}
        feeds = {
            v.name or "": np.full(_shape(v), n, (own_dtype(v) or ir.DataType.FLOAT).numpy()) for v, n in numbers.items()
        }
        wanted = {value.name for value in part.inputs}
        with np.errstate(all="ignore"):
            results = evaluator.run(None, {name: array for name, array in feeds.items() if name in wanted})
        following = [np.asarray(result).reshape(-1)[0] for result in results]
        return np.float32(following[0]), int(following[1]) if following[1:] else count

    constants = (constant_number(value) for node in part.all_nodes() for value in inputs_of(node))
    numbers = {number for number in constants if number is not None and np.isfinite(number)}
    return identify_policy(rule, initial, numbers)


def _shape(value: ir.Value) -> tuple[int, ...]:
    return (1,) * (0 if value.shape is None else len(value.shape))
