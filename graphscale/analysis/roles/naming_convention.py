"""Evidence by the naming convention of a file, as its certain pairs show it: for open outputs alone, never needed.

Where `w1_next` and `b1_next` are certainly the next values of `w1` and `b1`, `eta_next` is that of `eta`.
"""

from __future__ import annotations

from collections.abc import Iterator

import onnx_ir as ir

from graphscale.analysis.roles.names import common_words, words_of
from graphscale.analysis.roles.role_table import STATED, Role
from graphscale.analysis.roles.step_interface import Interface
from graphscale.analysis.updates import Update, same_type

__all__ = ["pairs_by_convention"]

# The convention of one pair could be a coincidence.
_LEAST_PAIRS = 2
# An exchange of the ends of names, or of their beginnings: the ends, that of a present value, that of a next one.
_Exchange = tuple[bool, str, str]


def pairs_by_convention(step: Interface) -> list[Update]:
    """Return the pairs of open outputs that are named as all certain next values are.

    The prediction of a next observation has such a name, too: it is computed by contractions from a batch that the
    loss reads.
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
    pairs = []
    for output in doubtful:
        value = present.get(output.name or "")
        if value is None or not same_type(output, value) or not _is_free(step, value):
            continue
        if not _may_be_predicted(step, output, value):
            pairs.append(Update(output, value, f"{STATED}its name, as other next values"))
    return pairs


def _may_be_predicted(step: Interface, output: ir.Value, value: ir.Value) -> bool:
    if output in step.behind_gradients or value not in step.topology.forward:
        return False
    return step.may_predict(output, value)


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
