"""The results of a verification, as data, and the comparison of a run's values with the expected ones."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from graphscale.files.tensor_files import Arrays
from graphscale.process.summary import Row, Summary, few

__all__ = [
    "FAILS",
    "HOLDS",
    "RELATION",
    "SKIPPED",
    "TRANSLATION",
    "UNPROVED",
    "Case",
    "Check",
    "Difference",
    "VerifyReport",
    "compare_values",
    "is_finite",
    "same_bits",
]

_Array = np.ndarray[Any, Any]
HOLDS, FAILS, SKIPPED, UNPROVED = "holds", "fails", "skipped", "not proved"
TRANSLATION = "translation"  # the name of the check that `numeric` leaves out
RELATION = "equal to the original"
_SHOWN = 3  # largest number of faults of one proof


@dataclasses.dataclass(frozen=True)
class Check:
    """The check of one property.

    Attributes:
        name: the checked property.
        status: "holds", "fails", "not proved", or "skipped".
        detail: the objects checked; of a failure, the contradiction; of a skipped check, the reason.
        proof: True for a proof on the graph; else the property was measured by runs.
    """

    name: str
    status: str
    detail: str
    proof: bool = False

    @classmethod
    def proved(cls, name: str, faults: Iterable[str], what: str, failure: str = FAILS) -> Check:
        """Make the check of a proof, with the first faults and the status `failure`, or with the proved objects."""
        found = list(faults)
        more = f"; and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
        detail = f"{'; '.join(found[:_SHOWN])}{more}" if found else what
        return cls(name, failure if found else HOLDS, detail, True)


@dataclasses.dataclass(frozen=True)
class Case:
    """A repeatable run.

    Attributes:
        kind: "step": both graphs take a step on the same feeds; "skip": a gradient is forced to be non-finite;
            "poison": an input is not finite; "rule": the update rule of the loss scale alone.
        feeds: the feeds, including the state of the loss scale; the original gets those of its own inputs.
        gradient: for "skip", the name of the gradient in the original.
        number: for "skip", the number to force: nan, inf or -inf.
        position: for "skip", the index of the element in the flattened gradient; in each of the others the same one, or
            the last.
        finite: for "rule", the given result of the finite check.
        tolerance: allowed error of floating-point values, relative to the largest element of a tensor; 0 for equal
            bits. In float16, 2**-18 is added for underflow without a scale, and more in a smaller type.
        others: for "skip", the names of further gradients to force.
    """

    kind: str
    feeds: Arrays
    gradient: str | None = None
    number: float | None = None
    position: int | None = None
    finite: bool = True
    tolerance: float = 0.0
    others: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return the case without its arrays as plain data."""
        plain = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "feeds"}
        return {**plain, "number": None if self.number is None else str(self.number)}

    def __str__(self) -> str:
        if self.kind == "skip":
            more = f" and in {len(self.others)} others" if self.others else ""
            return f"with {self.number} at element {self.position} of gradient {self.gradient!r}{more}"
        if self.kind == "rule":
            return f"for gradients that are {'finite' if self.finite else 'not finite'}"
        bad = [repr(name) for name, array in self.feeds.items() if not is_finite(array)]
        return f"on equal feeds, with a number that is not finite in {few(bad, 2)}" if bad else "on equal feeds"


@dataclasses.dataclass(frozen=True)
class Difference:
    """A value that differs from its expectation.

    Attributes:
        name: the value, and the graph's name for it.
        expected: the expected value.
        got: the actual value.
        source: the origin of the expectation.
    """

    name: str
    expected: _Array
    got: _Array
    source: str

    def places(self) -> _Array:
        """Return the indices of the flattened elements with different bits; shape and dtype are the same."""
        arrays = (np.asarray(self.expected), np.asarray(self.got))
        if arrays[0].dtype.kind == "O":  # texts
            return np.flatnonzero(arrays[0] != arrays[1])
        rows = [np.frombuffer(a.tobytes(), np.uint8).reshape(-1, a.dtype.itemsize) for a in arrays]
        return np.flatnonzero((rows[0] != rows[1]).any(axis=1))

    def __str__(self) -> str:
        expected, got = np.asarray(self.expected), np.asarray(self.got)
        if (expected.shape, expected.dtype) != (got.shape, got.dtype):
            return f"{self.name} is {got.dtype.name}{list(got.shape)}, not {expected.dtype.name}{list(expected.shape)}"
        if expected.size == 1:
            return f"{self.name} is {got.item()}, not {expected.item()} ({self.source})"
        wrong = self.places()
        where = np.unravel_index(wrong[0], expected.shape)
        place = "[" + ", ".join(str(int(i)) for i in where) + "]"
        return (
            f"{self.name}{place} is {got[where]}, not {expected[where]} ({self.source}); {wrong.size} of "
            f"{expected.size} elements differ"
        )


def is_finite(array: _Array) -> bool:
    """Return whether all elements of an array of numbers are finite."""
    if array.dtype.kind in "biuO":
        return True
    wide = array if array.dtype.kind == "f" else array.astype(np.float64)  # numpy has no test for bfloat16
    return bool(np.isfinite(wide).all())


def same_bits(one: _Array, other: _Array) -> bool:
    """Return whether two arrays of one type have the same bits, or the same texts."""
    return np.array_equal(one, other) if one.dtype.kind == "O" else one.tobytes() == other.tobytes()


def compare_values(
    name: str, expected: _Array, got: _Array | None, source: str, tolerance: float | None = 0.0, lost: float = 0.0
) -> Iterator[Difference]:
    """Yield the difference between two unequal arrays of numbers; NaN equals NaN, and -0.0 equals 0.0.

    Args:
        name: the name of the value.
        expected: the expected array.
        got: the actual array, or None.
        source: the origin of the expectation.
        tolerance: the allowed error, relative to the largest finite element; None for equal bits.
        lost: the allowed absolute error.
    """
    if got is None:
        return
    expected, got = np.asarray(expected), np.asarray(got)
    same = (expected.dtype, expected.shape) == (got.dtype, got.shape)
    if same and same_bits(expected, got):
        return
    if not same or tolerance is None or not _close(expected, got, tolerance, lost):
        yield Difference(name, expected, got, source)


def _close(expected: _Array, got: _Array, tolerance: float, lost: float) -> bool:
    if expected.dtype.kind in "biuO":
        return False
    one, other = expected.astype(np.float64), got.astype(np.float64)
    finite = np.isfinite(one)
    if not np.array_equal(one[~finite], other[~finite], equal_nan=True) or not np.isfinite(other[finite]).all():
        return False
    largest = np.abs(one[finite]).max(initial=0.0)
    return bool((np.abs(one[finite] - other[finite]) <= tolerance * largest + lost).all())


@dataclasses.dataclass(frozen=True, repr=False)
class VerifyReport(Summary):
    """The results of `verify`.

    Attributes:
        checks: all checks, in order; the proofs come first.
        notes: facts about the checks for the user, a sentence each.
        counterexample: the first failing run, or None.
        differences: the errors in that run.
        runs: number of runs of the scaled graph.
        applied: the policy, if it applies some steps with a non-finite gradient; else empty.
        subject: "folder" or "halves" for a comparison of several models, without runs; else empty.
    """

    checks: tuple[Check, ...]
    notes: tuple[str, ...] = ()
    counterexample: Case | None = None
    differences: tuple[Difference, ...] = ()
    runs: int = 0
    applied: str = ""
    subject: str = ""

    def _summarize(self) -> tuple[str, Iterable[Row]]:
        rows: list[Row] = [(check.name, f"{check.status}: {check.detail}") for check in self.failures]
        for status in (HOLDS, UNPROVED, SKIPPED):
            if names := [check.name for check in self.checks if check.status == status]:
                rows.append((status, f"{len(names)}: {few(names)}"))
        return f"{self.verdict}, {self.counted_runs}", rows

    @property
    def counted_runs(self) -> str:
        """The number of runs as a text, such as "1 run"."""
        return "1 run" if self.runs == 1 else f"{self.runs} runs"

    @property
    def ok(self) -> bool:
        """True if no check failed, and all proofs are complete."""
        return all(check.status in (HOLDS, SKIPPED) for check in self.checks)

    @property
    def verdict(self) -> str:
        """The verdict, such as "verified, exact", "verified", "3 checks failed"; see docs/how-to/checking.md."""
        failed, unproved = (sum(check.status == status for check in self.checks) for status in (FAILS, UNPROVED))
        if failed:
            return f"{failed} check{'s' if failed > 1 else ''} failed" + (
                f", {unproved} not proved" if unproved else ""
            )
        agree = f"numbers agree on {self.counted_runs}" if self.runs else "no numbers were compared"
        if not self.ok:
            return f"not proved; {agree}"
        proofs = {check.name: check.status for check in self.checks if check.proof}
        if not proofs or proofs.get(RELATION) == SKIPPED:
            return f"{agree}; nothing is proved"
        if self.subject:
            return f"verified ({self.subject})"
        exact = ", exact" if proofs.get(TRANSLATION) == HOLDS else ""
        return f"verified{exact}" + (f"; applies non-finite gradients: {self.applied}" if self.applied else "")

    @property
    def failures(self) -> tuple[Check, ...]:
        """The failed checks."""
        return tuple(check for check in self.checks if check.status == FAILS)

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain dicts, lists, strings and numbers, without the arrays of a counterexample."""
        case = self.counterexample
        return {
            "ok": self.ok,
            "verdict": self.verdict,
            "checks": [dataclasses.asdict(check) for check in self.checks],
            "notes": list(self.notes),
            "runs": self.runs,
            "counterexample": case and {**case.to_dict(), "differences": [str(d) for d in self.differences]},
        }
