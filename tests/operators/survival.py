"""The survival of infinities and NaN that the table of operators claims, compared with a runtime's results."""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from graphscale.operators import Fate, Survival, survival_of
from tests.operators.cases import Case
from tests.operators.runtimes import Run, is_reference, open_case
from tests.operators.scaling import build_node
from tests.operators.values import Data, is_float_data

SPECIAL = {Fate.PLUS: np.inf, Fate.MINUS: -np.inf, Fate.NAN: np.nan}
# The numbers that an overflow may stand for: a result that is not one of them is no other for any of these.
_ORDINARY = (5.0, -5.0, 0.25, -0.25, 0.0)
# So many elements of an operand are replaced, one after the other.
_PLACES = 4
# There the reference evaluator takes NaN and infinity for marks of its own: of padding, of weights without a number.
_MARKS = ("AveragePool", "LpPool", "Resize")
# Anything may become of a number with these.
_LOST = Fate.GONE | Fate.BENT

Claim = Callable[[ir.Node, int], Survival]
# An index of an operand, and a kind of number.
Key = tuple[int, Fate]


@dataclasses.dataclass
class Trial:
    """The outcome for one case.

    Attributes:
        case: the case.
        seen: the effects of each kind of number in each operand.
        claimed: the effects that the table allows for.
        wrong: a sentence for each effect that it does not allow for.
        tried: the number of runs.
    """

    case: Case
    seen: dict[Key, Fate] = dataclasses.field(default_factory=dict)
    claimed: dict[Key, Fate] = dataclasses.field(default_factory=dict)
    wrong: list[str] = dataclasses.field(default_factory=list)
    tried: int = 0


def try_survival(case: Case, claim: Claim = survival_of) -> Trial:
    """Put infinities and NaN into the operands of a case, and compare the effects with the claims.

    Raises:
        RefusedError: no runtime runs the case.
    """
    trial, run = Trial(case), open_case(case)
    if is_reference(run) and case.operator[1] in _MARKS:
        return trial
    outputs = run(case.feeds)
    node = build_node(case, outputs, typed=True)
    for index, name in enumerate(case.node.input):
        operand = case.feeds.get(name)
        if isinstance(operand, list) or not is_float_data(operand):
            continue
        for place in list(np.ndindex(operand.shape))[:: max(operand.size // _PLACES, 1)]:
            others = [r for number in _ORDINARY if (r := _replace(run, case, name, place, number)) is not None]
            for kind, number in SPECIAL.items():
                results = _replace(run, case, name, place, number)
                if results is None or not any(array.size for array in _arrays(results)):
                    continue
                key, effects = (index, kind), _effects(results, others)
                trial.tried += 1
                trial.seen[key] = trial.seen.get(key, Fate.NONE) | effects
                allowed = trial.claimed[key] = claim(node, index).through(kind)
                if effects & ~allowed and _LOST not in allowed:
                    trial.wrong.append(f"{case.name}: {number} at {place} of operand {index}: {effects & ~allowed}")
    return trial


def _replace(run: Run, case: Case, name: str, place: tuple[int, ...], number: float) -> Sequence[Data] | None:
    """Return the results with a number in place of another; None if its type has no such number, or the node fails."""
    changed = np.array(case.feeds[name])
    with np.errstate(all="ignore"):
        changed[place] = number
    if not np.array_equal(float(changed[place]), number, equal_nan=True):
        return None
    try:
        return run({**case.feeds, name: changed})
    except Exception:  # the runtimes' exceptions share no public base class
        return None


def _arrays(results: Sequence[Data]) -> Iterator[np.ndarray]:
    for value in results:
        for array in value if isinstance(value, list) else [value]:
            if isinstance(array, np.ndarray) and array.dtype.kind not in "OSU":
                yield array


def _effects(results: Sequence[Data], others: Sequence[Sequence[Data]]) -> Fate:
    """Return the effects of a number: compared with the results of ordinary numbers in its place."""
    columns = list(zip(*(list(_arrays(each)) for each in (results, *others)), strict=True))
    effects = Fate.GONE if any(is_float_data(array) for array, *_ in columns) else Fate.NONE
    for array, *ordinary in columns:
        if any(other.shape != array.shape for other in ordinary):
            return _LOST
        if not is_float_data(array):
            effects |= Fate.NONE if all(np.array_equal(array, other) for other in ordinary) else Fate.TOLD
            continue
        wide, others_wide = array.astype(np.float64), [other.astype(np.float64) for other in ordinary]
        if not np.isfinite(wide).all():
            effects &= ~Fate.GONE
        independent = np.all([_same(wide, other, array.dtype) for other in others_wide], axis=0)
        kinds = {Fate.PLUS: np.isposinf, Fate.MINUS: np.isneginf, Fate.NAN: np.isnan, Fate.BENT: np.isfinite}
        for kind, test in kinds.items():
            if (test(wide) & ~independent).any():
                effects |= kind
    return effects


def _same(one: np.ndarray, two: np.ndarray, dtype: np.dtype[Any]) -> np.ndarray:
    """Compare numbers; a sum may be rounded otherwise."""
    return np.isclose(one, two, rtol=1e-2 if dtype.itemsize < 4 else 1e-5, atol=1e-6, equal_nan=True)


def find_weak(trials: Sequence[Trial]) -> Mapping[int, Fate]:
    """Return the kinds of numbers, by operand, that the table allows to be bent, and no node of an operator bends them.

    Operands that may not be scaled are left out: no overflow reaches them.
    """
    weak: dict[int, Fate] = {}
    for index, kind in {key for trial in trials for key in trial.claimed}:
        ran = [trial for trial in trials if (index, kind) in trial.claimed]
        bends = (_LOST & ~Fate.GONE | Fate.TOLD) & functools.reduce(operator.or_, (t.seen[index, kind] for t in ran))
        if not bends and all(Fate.BENT in trial.claimed[index, kind] for trial in ran):
            weak[index] = weak.get(index, Fate.NONE) | kind
    return weak
