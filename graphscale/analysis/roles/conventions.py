"""Evidence by names and order in a file, learned from its other pairs: for open outputs only, never needed.

Where `w1_next` and `b1_next` are certainly the next values of `w1` and `b1`, `eta_next` is that of `eta`, and
`td_error` is none.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

import onnx_ir as ir

from graphscale.analysis.roles.nearness import Nearness, common_words, find_between, find_positions, likeness, words_of
from graphscale.analysis.roles.role_table import STATED, Assigned, Role
from graphscale.analysis.roles.step_interface import Interface
from graphscale.analysis.updates import Update, same_type
from graphscale.graph.values import is_float, is_scalar

__all__ = ["gradients_by_convention", "metrics_by_convention", "pairs_by_convention", "pairs_by_order"]

# The convention of one pair could be a coincidence.
_LEAST_PAIRS = 2
_LEAST_GUESSES = 3
# A random order of this many pairs in a row is the same on both sides once in 120 times.
_LEAST_RUN = 5
_EVIDENCE = f"{STATED}its name, as other next values"
_IN_ORDER = f"{STATED}its place, between other next values"
_UNLIKE = f"{STATED}its name, unlike all next values"
# An exchange of the ends of names, or of their beginnings, from a present value's to a next value's.
_Exchange = tuple[bool, str, str]


def pairs_by_convention(step: Interface) -> list[Update]:
    """Return the pairs of open outputs, and of metrics, with names like those of all certain next values.

    Where few pairs are certain, the pairs that the graph alone proposes show the convention. The graph contradicts a
    name if another output of the same convention is nearer to the input; such a name is no evidence.
    """
    certain = _certain_pairs(step)
    doubtful = {
        output: assigned
        for output, assigned in step.outputs.items()
        if not assigned.certain or (assigned.role is Role.METRIC and not assigned.is_named)
    }
    if not doubtful:
        return []
    if len(certain) >= _LEAST_PAIRS:
        shown = certain
    else:
        nearest = _nearest(step, {output: assigned.pair for output, assigned in doubtful.items() if assigned.pair})
        shown = [*certain, *nearest.items()] if len(nearest) >= _LEAST_GUESSES else []
    exchanges = _common_exchanges(shown)
    holders = dict.fromkeys((*step.holders, *step.graph.initializers.values()))
    present = {name: value for value in holders for name in _next_names(value.name or "", exchanges)}
    named = {output: present[output.name] for output in doubtful if output.name in present}
    fitting = {o: value for o, value in named.items() if same_type(o, value) and _is_free(step, value)}
    nearest = _nearest(step, fitting)
    may_be_predicted = _predictions(step, fitting.values())
    return [
        Update(o, value, _EVIDENCE)
        for o, value in fitting.items()
        if nearest.get(o, value) is value and not may_be_predicted(o, value)
    ]


def metrics_by_convention(step: Interface) -> dict[ir.Value, Assigned]:
    """Return roles for open outputs that look like metrics, with names unlike those of the file's next values.

    All next values of the file end, or begin, with one word; such an output does not. Its name is not that of an input
    of its type, and, except for numbers, shares no word with it. A number that looks like the next value of a rate may
    be the present rate.
    """
    shown = _certain_pairs(step)
    marks = {(at_end, new) for at_end, _, new in _common_exchanges(shown) if new}
    if len(shown) < _LEAST_GUESSES or not marks:
        return {}
    found = {}
    for output, assigned in step.outputs.items():
        name = output.name or ""
        if assigned.certain or any(name.endswith(new) if at_end else name.startswith(new) for at_end, new in marks):
            continue
        if assigned.role is Role.METRIC:
            is_alike = any(_are_alike(output, value) for value in step.holders if same_type(output, value))
            found[output] = Assigned(Role.METRIC, assigned.evidence if is_alike else _UNLIKE, certain=not is_alike)
        elif assigned.role is Role.STATE and is_scalar(output) and is_float(output):
            found[output] = Assigned(Role.METRIC, "its name is unlike those of all next values", certain=False)
    return found


def _are_alike(output: ir.Value, value: ir.Value) -> bool:
    shared = {*words_of(output)} & {*words_of(value)}
    return likeness(value, output)[0] == 1 or (not is_scalar(output) and any(map(str.isalpha, shared)))


def gradients_by_convention(step: Interface) -> dict[ir.Value, Assigned]:
    """Return roles for open outputs that look like gradients, and are named after weights as all gradients are."""
    certain = [o for o, each in step.outputs.items() if each.role is Role.GRADIENT and each.certain]
    if len(certain) < _LEAST_PAIRS:
        return {}

    def exchanges(output: ir.Value) -> set[_Exchange]:
        weights = (v for v in step.graph.inputs if same_type(output, v))
        return {each for weight in weights for each in _exchanges(weight, output)}

    common = set.intersection(*map(exchanges, certain))
    likely = (o for o, each in step.outputs.items() if each.role is Role.GRADIENT and not each.certain)
    named = (output for output in likely if common & exchanges(output))
    return {output: Assigned(Role.GRADIENT, f"{STATED}its name, as other gradients") for output in named}


def _certain_pairs(step: Interface) -> list[tuple[ir.Value, ir.Value]]:
    pairs = ((output, each) for output, each in step.outputs.items() if each.certain and not each.is_named)
    return [(output, each.pair) for output, each in pairs if each.pair is not None]


def _common_exchanges(pairs: Collection[tuple[ir.Value, ir.Value]]) -> set[_Exchange]:
    return set.intersection(*({*_exchanges(value, output)} for output, value in pairs)) if pairs else set()


def _nearest(step: Interface, pairs: Mapping[ir.Value, ir.Value]) -> dict[ir.Value, ir.Value]:
    """Return the nearest pairs among the outputs and inputs of some pairs, by the graph alone."""
    candidates = {output: [value for value in pairs.values() if same_type(output, value)] for output in pairs}
    turned = {output: values[::-1] for output, values in candidates.items()}
    nearness = Nearness(step, step.dependence(pairs.values()))
    found = [nearness.assign(each, by_interface=False) for each in (candidates, turned, dict(reversed(turned.items())))]
    return {o: value for o, value in found[0].items() if all(each.get(o) is value for each in found)}


def _predictions(step: Interface, values: Collection[ir.Value]) -> Callable[[ir.Value, ir.Value], bool]:
    """Return a test for outputs that may be predictions of a next value.

    A prediction is computed by contractions from a batch of the loss, and has the rows of a batch. No contraction lies
    between a prediction and the loss, in contrast to a hidden state.
    """
    free = [value for value in step.graph.inputs if _is_free(step, value) and not is_scalar(value)]
    batches, dependence = [value for value in free if value not in values], step.dependence(free)
    forward, tail = step.topology.forward, step.topology.tail

    def may_be_predicted(output: ir.Value, value: ir.Value) -> bool:
        if is_scalar(value) or value not in forward or (output in forward and output not in tail):
            return False
        if not _may_have_rows(value, batches):
            return False
        is_predicted = output not in step.behind_gradients and step.may_predict(output, value)
        return is_predicted or bool(dependence.contracted(output))

    return may_be_predicted


def _may_have_rows(value: ir.Value, batches: Sequence[ir.Value]) -> bool:
    """Return whether the first dimension of a value, unless it is also the last, may be that of a batch."""
    rows, dims = _leading_dims(value)[:1], [dim for batch in batches for dim in _leading_dims(batch)]
    are_known = all(isinstance(dim, int) for dim in (*rows, *dims))
    return not (dims and are_known) or rows[0] in dims


def _leading_dims(value: ir.Value) -> list[int | ir.SymbolicDim | None]:
    dims = [None] if value.shape is None else [*value.shape]
    return dims[:-1] or dims


def _is_free(step: Interface, value: ir.Value) -> bool:
    assigned = step.inputs.get(value)
    return assigned is None or assigned.role is not Role.STATE or not assigned.certain


def _exchanges(present: ir.Value, following: ir.Value) -> Iterator[_Exchange]:
    """Yield the exchanges that turn one name into another, and keep a word of it."""
    for at_end, order in ((True, 1), (False, -1)):
        old, new = words_of(present)[::order], words_of(following)[::order]
        kept = common_words(old, new)
        if any(map(str.isalpha, kept)):
            yield at_end, "".join(old[len(kept) :][::order]), "".join(new[len(kept) :][::order])


def _next_names(present: str, exchanges: set[_Exchange]) -> Iterator[str]:
    for at_end, old, new in exchanges:
        if at_end and present.endswith(old):
            yield present[: len(present) - len(old)] + new
        elif not at_end and present.startswith(old):
            yield new + present[len(old) :]


def pairs_by_order(step: Interface) -> list[Update]:
    """Return the pairs of open outputs between certain pairs, if no proposal contradicts them.

    Exporters keep the order of inputs and outputs. The exported function returns its state in the order of its inputs
    if the pairs before and after an output are certain, have equally many inputs and outputs between them, and lie in a
    run of certain pairs in one order.
    """
    found = {
        output: value
        for run in _runs(step.graph, dict(_certain_pairs(step)))
        for output, value in find_between(step.graph, run).items()
        if same_type(output, value)
    }
    return [Update(output, value, _IN_ORDER) for output, value in found.items() if _may_stand_for(step, output, value)]


def _runs(graph: ir.Graph, pairs: Mapping[ir.Value, ir.Value]) -> list[dict[ir.Value, ir.Value]]:
    """Return the long runs of pairs with outputs in a row and inputs in the same order."""
    runs: list[list[tuple[int, int]]] = []
    for index, place in find_positions(graph, pairs):
        if not runs or place < runs[-1][-1][1]:
            runs.append([])
        runs[-1].append((index, place))
    return [{graph.outputs[i]: graph.inputs[j] for i, j in run} for run in runs if len(run) >= _LEAST_RUN]


def _may_stand_for(step: Interface, output: ir.Value, value: ir.Value) -> bool:
    """Return whether an open output may be the next value of an open input, and depends on no other of its type."""
    assigned = step.outputs[output]
    if assigned.certain or assigned.pair not in (None, value):
        return False
    others = [v for v in step.graph.inputs if _is_free(step, v) and same_type(output, v)]
    above = [other for other in others if other in step.topology.ancestors([output])]
    return value in others and (value in above or not above)
