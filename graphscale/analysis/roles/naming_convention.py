"""Evidence by the naming convention of a file, as its certain pairs show it: for open outputs alone, never needed.

Where `w1_next` and `b1_next` are certainly the next values of `w1` and `b1`, `eta_next` is that of `eta`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import onnx_ir as ir

from graphscale.analysis.roles.names import common_words, words_of
from graphscale.analysis.roles.role_table import STATED, Role
from graphscale.analysis.roles.step_interface import Interface
from graphscale.analysis.updates import Update, same_type
from graphscale.graph.values import is_scalar

__all__ = ["pairs_by_convention"]

# The convention of one pair could be a coincidence.
_LEAST_PAIRS = 2
# An exchange of the ends of names, or of their beginnings: the ends, that of a present value, that of a next one.
_Exchange = tuple[bool, str, str]


def pairs_by_convention(step: Interface) -> list[Update]:
    """Return the pairs of open outputs that are named as all certain next values are.

    The prediction of a next observation has such a name, too: it is computed by contractions from a batch that the
    loss reads, and has the rows of a batch.
    """
    certain = [
        (assigned.pair, output)
        for output, assigned in step.outputs.items()
        if assigned.pair is not None and assigned.certain and not assigned.is_named
    ]
    doubtful = [output for output, assigned in step.outputs.items() if not assigned.certain]
    if len(certain) < _LEAST_PAIRS or not doubtful:
        return []
    exchanges = set.intersection(*({*_exchanges(value, output)} for value, output in certain))
    holders = dict.fromkeys((*step.holders, *step.graph.initializers.values()))
    present = {name: value for value in holders for name in _next_names(value.name or "", exchanges)}
    named = {output: present[output.name] for output in doubtful if output.name in present}
    fitting = {o: value for o, value in named.items() if same_type(o, value) and _is_free(step, value)}
    free = [value for value in step.graph.inputs if _is_free(step, value) and not is_scalar(value)]
    batches, dependence = [value for value in free if value not in fitting.values()], step.dependence(free)

    def may_be_predicted(output: ir.Value, value: ir.Value) -> bool:
        if is_scalar(value) or value not in step.topology.forward or not _may_have_rows(value, batches):
            return False
        is_predicted = output not in step.behind_gradients and step.may_predict(output, value)
        return is_predicted or bool(dependence.contracted(output))

    evidence = f"{STATED}its name, as other next values"
    return [Update(o, value, evidence) for o, value in fitting.items() if not may_be_predicted(o, value)]


def _may_have_rows(value: ir.Value, batches: Sequence[ir.Value]) -> bool:
    """Return whether the first dimension of a value may be one of a batch, its last dimension aside."""
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
