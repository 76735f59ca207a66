"""The operators' traits in the table, compared with a runtime's results."""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
import onnx_ir as ir

from graphscale.graph.failures import cannot_fail
from graphscale.operators import overwritten_inputs
from tests.operators.cases import Case
from tests.operators.claims import CHECKED_TRAITS, keeps_degree, traits_of
from tests.operators.runtimes import Run, open_case, run_in_place, run_with_seed
from tests.operators.scaling import build_node
from tests.operators.values import Data, is_float_data

_SPECIAL = (np.nan, np.inf, -np.inf)
# So many elements of an operand are replaced, one after the other.
_PLACES = 6


@dataclasses.dataclass
class Findings:
    """The outcome for the traits of one case.

    Attributes:
        tried: number of tests of each trait.
        shown: the traits that say that something may happen, where it happened.
        wrong: a sentence for each trait that does not hold.
    """

    tried: Counter[str] = dataclasses.field(default_factory=Counter)
    shown: set[str] = dataclasses.field(default_factory=set)
    wrong: list[str] = dataclasses.field(default_factory=list)


class _Probe:
    """A case with its results, and runs of it with other operands."""

    def __init__(self, case: Case, never_fails: Callable[[ir.Node], bool]) -> None:
        self.case, self.never_fails = case, never_fails
        self.run: Run = open_case(case)
        self.outputs = self.run(case.feeds)
        self.node = build_node(case, self.outputs, typed=True)
        self.names = list(case.node.input)
        self.first: Data = case.feeds.get(self.names[0]) if self.names else None
        self.operands = [case.feeds[name] for name in self.names if name]

    @property
    def result(self) -> np.ndarray:
        """The first output."""
        return self.outputs[0]

    def replace(self, index: int, values: Sequence[float]) -> Iterator[tuple[tuple[int, ...], float, list[Data]]]:
        """Put each value at some places of an operand, one at a time; return the place, the value, and the results."""
        name = self.names[index]
        operand = self.case.feeds[name]
        places = list(np.ndindex(operand.shape))
        for place, value in itertools.product(places[:: max(len(places) // _PLACES, 1)], values):
            changed = np.array(operand)
            changed[place] = value
            if operand.dtype.kind != "b" and not np.array_equal(float(changed[place]), value, equal_nan=True):
                continue  # its type has no such number
            yield place, value, self.run({**self.case.feeds, name: changed})


_Check = Callable[[_Probe], Iterator[str]]


def _keep_exactly(probe: _Probe) -> Iterator[str]:
    """NaN stays NaN, and infinity stays infinite."""
    if not is_float_data(probe.first):
        return
    for place, value, (result, *_) in probe.replace(0, _SPECIAL):
        wide = result.astype(np.float64)
        if not result.size:
            return  # repeated no times
        # A type without infinities has NaN in their place.
        infinite = np.isinf if np.isinf(np.asarray(np.inf, result.dtype).astype(np.float64)) else np.isnan
        kept = (np.isnan(wide) if np.isnan(value) else infinite(wide)).any()
        yield "" if kept else f"{value} at {place} is lost"


def _check_kept(trait: str) -> _Check:
    def check(probe: _Probe) -> Iterator[str]:
        if probe.result.size or trait != "REPEAT":
            yield "" if _KEPT[trait](probe.first, probe.result) else "other elements, or another order or shape"

    return check


def _check_members(probe: _Probe, operands: Sequence[Data]) -> Iterator[str]:
    """The numbers of a result are those of operands and attributes, but for signs, and for zeros that fill."""
    numbers = [abs(attribute.f) for attribute in probe.case.node.attribute if attribute.type == attribute.FLOAT]
    arrays = [item for operand in operands for item in (operand if isinstance(operand, list) else [operand])]
    for result in probe.outputs[0] if isinstance(probe.outputs[0], list) else probe.outputs[:1]:
        if not _has_numbers(result) or (is_float_data(result) and np.isnan(result.astype(np.float64)).any()):
            continue
        rounded = [np.abs(array.ravel()).astype(result.dtype).tolist() for array in arrays if _has_numbers(array)]
        known = {0.0}.union(numbers, *rounded)
        yield "" if known.issuperset(np.abs(result.ravel()).tolist()) else "other numbers than those of the operands"


def _check_elementwise(probe: _Probe) -> Iterator[str]:
    result = probe.result
    for index, name in enumerate(probe.names):
        operand = probe.case.feeds.get(name)
        if not isinstance(operand, np.ndarray):
            continue
        for place, _, (changed, *_) in probe.replace(index, (3,)):
            elsewhere = _differ(result, changed) & ~_spread(operand.shape, place, result.shape)
            yield f"element {place} of operand {index} changes other places" if elsewhere.any() else ""


def _spread(shape: tuple[int, ...], place: tuple[int, ...], target: tuple[int, ...]) -> np.ndarray:
    """Mark where an element of an operand comes to be by broadcasting: nowhere if the shapes do not agree."""
    mask = np.zeros(shape, np.bool_)
    mask[place] = True
    try:
        return np.broadcast_to(mask, target)
    except ValueError:
        return np.zeros(target, np.bool_)


def _has_numbers(value: Data) -> bool:
    """Return whether a value is an array of numbers."""
    return isinstance(value, np.ndarray) and value.dtype.kind not in "OSU"


def _equal(one: Data, two: Data) -> bool:
    if isinstance(one, list):
        return len(one) == len(two) and all(map(_equal, one, two))
    return one is two or (np.shape(one) == np.shape(two) and not bool(np.any(_differ(one, two))))


def _differ(one: np.ndarray, two: np.ndarray) -> np.ndarray:
    if is_float_data(one):
        one, two = one.astype(np.float64), two.astype(np.float64)
        return ~((one == two) | (np.isnan(one) & np.isnan(two)))
    return np.asarray(one != two)


def _check_commutative(probe: _Probe) -> Iterator[str]:
    names = [name for name in probe.names if name]
    feeds = dict(zip(names, reversed(probe.operands), strict=True))
    if any(feeds[name].shape != probe.case.feeds[name].shape for name in names):
        return  # the types of the case fix the shapes
    (changed, *_) = probe.run({**probe.case.feeds, **feeds})
    # A sum of several terms may be rounded otherwise.
    near = {"rtol": 1e-2 if probe.result.dtype.itemsize < 4 else 1e-5, "atol": 1e-5, "equal_nan": True}
    same = (
        np.allclose(changed, probe.result, **near) if is_float_data(changed) else np.array_equal(changed, probe.result)
    )
    yield "" if same else "the order of the operands counts"


def _check_total(probe: _Probe) -> Iterator[str]:
    if not probe.never_fails(probe.node):
        return
    for numbers, integers in ((np.nan, 0), (np.inf, -1), (-1e30, 127), (0.0, -128), (1e-30, 1)):
        feeds = {name: _fill(value, numbers, integers) for name, value in probe.case.feeds.items()}
        try:
            probe.run(feeds)
        except Exception as error:  # the runtimes' exceptions share no public base class
            yield f"operands of {numbers} and {integers} fail: {error}"
        else:
            yield ""


def _fill(value: Data, number: float, integer: int) -> Data:
    if isinstance(value, list):
        return [_fill(item, number, integer) for item in value]
    if not isinstance(value, np.ndarray) or value.dtype.kind in "OSU":
        return value
    with np.errstate(all="ignore"):
        if is_float_data(value):
            return np.full(value.shape, number, np.float64).astype(value.dtype)
        return np.full(value.shape, integer, np.int64).astype(value.dtype)


_KEPT: Mapping[str, Callable[[np.ndarray, np.ndarray], bool]] = {
    "RESHAPE": lambda first, result: _equal(first.ravel(), result.ravel()),
    "CAST": lambda first, result: first.shape == result.shape,
    "PERMUTE": lambda first, result: _equal(np.sort(first, None), np.sort(result, None)),
    "REPEAT": lambda first, result: _equal(np.unique(first), np.unique(result)),
    "SIGN": lambda first, result: _equal(np.abs(first), np.abs(result)),
}
# They look at more than one array.
_OF_ALL: Mapping[str, _Check] = {
    "PART": lambda probe: _check_members(probe, [probe.first]),
    **dict.fromkeys(("MOVE", "BOUND"), lambda probe: _check_members(probe, probe.operands)),
    **dict.fromkeys(("TOTAL", "TOTAL_BY_AXES", "TOTAL_BY_SHAPES"), _check_total),
}
_CHECKS: Mapping[str, _Check] = {
    **{trait: _check_kept(trait) for trait in _KEPT},
    **_OF_ALL,
    "ELEMENTWISE": _check_elementwise,
    "COMMUTATIVE": _check_commutative,
}
assert _CHECKS.keys() | {"RANDOM", "WRITES_INPUT"} == CHECKED_TRAITS


def try_traits(
    case: Case, claimed: frozenset[str] | None = None, never_fails: Callable[[ir.Node], bool] = cannot_fail
) -> Findings:
    """Hold the traits of a case's operator against a runtime.

    Args:
        case: the case.
        claimed: the traits; None for those of the table.
        never_fails: the claim that a node gives a result for all operands of its types and shapes.

    Raises:
        RefusedError: no runtime runs the case.
    """
    findings, probe = Findings(), _Probe(case, never_fails)
    traits = traits_of(case.operator) if claimed is None else claimed
    if "CAST" in traits and not keeps_degree(probe.node):
        traits = traits & {"ELEMENTWISE", "TOTAL"}  # a cast to integers, or to a type without infinity
    checks = [(trait, _CHECKS[trait]) for trait in sorted(traits & _CHECKS.keys())]
    checks += [(trait, _keep_exactly) for trait in sorted(traits & _KEPT.keys())]
    if not all(map(_has_numbers, (probe.first, probe.outputs[0]))):
        checks = [(trait, check) for trait, check in checks if trait in _OF_ALL]
    for trait, check in checks:
        for text in check(probe):
            findings.tried[trait] += 1
            if text:
                findings.wrong.append(f"{case.name} {trait}: {text}")
    _try_randomness(probe, "RANDOM" in traits, findings)
    _try_writing(probe, "WRITES_INPUT" in traits, findings)
    return findings


def _try_randomness(probe: _Probe, random: bool, findings: Findings) -> None:
    """Run twice, with two seeds: an operator that is not random gives the same."""
    pair = [run_with_seed(probe.case, seed) for seed in (1, 2)]
    if pair[0] is None or pair[1] is None:
        return
    findings.tried["RANDOM"] += 1
    if all(map(_equal, *pair)):
        return
    findings.shown.add("RANDOM")
    if not random:
        findings.wrong.append(f"{probe.case.name} RANDOM: two runs differ")


def _try_writing(probe: _Probe, writes: bool, findings: Findings) -> None:
    """Run on the operands themselves: an operator that does not write into its inputs leaves them."""
    after = run_in_place(probe.case)
    if after is None:
        return
    findings.tried["WRITES_INPUT"] += 1
    feeds = probe.case.feeds
    written = {i for i, name in enumerate(probe.names) if name in after and not _equal(after[name], feeds[name])}
    if written:
        findings.shown.add("WRITES_INPUT")
    if not writes and written - set(overwritten_inputs(probe.node)):
        findings.wrong.append(f"{probe.case.name} WRITES_INPUT: inputs {sorted(written)} are written")
