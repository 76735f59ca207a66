"""The measurements: equal values at every loss scale, skipped steps, and the rule of the loss scale."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np

from graphscale.checks.running.random_feeds import Feeder
from graphscale.checks.verification.bench import Bench
from graphscale.checks.verification.finite_states import poisoned
from graphscale.checks.verification.promise import find_applied
from graphscale.checks.verification.verify_report import (
    FAILS,
    HOLDS,
    SKIPPED,
    UNPROVED,
    Case,
    Check,
    Difference,
)
from graphscale.errors import VerifyError
from graphscale.files.tensor_files import Arrays
from graphscale.process.summary import few

__all__ = ["Measurements", "measure", "replay"]

POWERS = (1.0, 2.0**10, 2.0**15)
WIDE_POWERS = (2.0**-10, 2.0**16, 2.0**17, 2.0**24, 2.0**40, 2.0**80, 2.0**120)
HUGE = 2.0**126  # powers of two, beyond the range of most backward passes
MAGNITUDES = (1e3, 1e-3)  # magnitudes of the batches, beside 1
# Number of gradients that are forced alone; with more, all are forced in groups as well, and inputs in groups only, so
# that the number of runs has a limit. A proof says for each gradient that the finite check does not miss it.
_MANY, _GROUPS = 100, 16
_KINDS = (math.nan, math.inf, -math.inf)
_POISONED = 1e-5  # a saturated forward pass leaves small gradients, whose rounding depends on the scale

# A callback with the stage, the number of finished cases, and their total.
Progress = Callable[[str, int, int], None]


@dataclasses.dataclass
class Measurements:
    """The results of the measurements, with the attributes of `VerifyReport`.

    Attributes:
        tolerance: as for `verify`, and at least that of the graph's types.
        comparable: True if the original gives the same values in each run.
    """

    checks: list[Check] = dataclasses.field(default_factory=list)
    notes: list[str] = dataclasses.field(default_factory=list)
    counterexample: Case | None = None
    differences: tuple[Difference, ...] = ()
    runs: int = 0
    progress: Progress = lambda stage, done, total: None
    tolerance: float = 0.0
    comparable: bool = True

    def try_all(self, name: str, cases: Iterable[Case], bench: Bench, what: str) -> None:
        """Run cases up to the first failure, and add a check."""
        wanted = list(cases)
        for i, case in enumerate(wanted):
            self.progress(name, i, len(wanted))
            found: Sequence[Difference] = ()
            try:
                found = bench.evaluate(case)
                reason = str(found[0]) if found else None
            except VerifyError as error:
                if case.kind != "rule":
                    bench.original.run(case.feeds)  # raises for feeds that the original refuses, too
                reason = str(error)
            if reason is not None:
                self.checks.append(Check(name, FAILS, f"{case}: {reason}"))
                if self.counterexample is None:
                    self.counterexample, self.differences = case, tuple(found)
                return
        passed = Check(name, HOLDS, f"{len(wanted)} {what}")
        self.checks.append(passed if wanted else Check(name, SKIPPED, "nothing to run"))


def measure(found: Measurements, bench: Bench, feeder: Feeder, others: Feeder | None, *, runs: int, seed: int) -> None:
    """Run both graphs on random feeds; `others` draws feeds with other sizes of free symbolic axes.

    Raises:
        VerifyError: a graph cannot be run, or the original computes no finite values on random feeds.
    """
    found.notes += feeder.notes
    lacking = bench.scaled.required - bench.original.inputs - bench.pair.states.keys() - bench.oracle.starts()[0].keys()
    if lacking:
        raise VerifyError(f"the scaled graph needs the input {min(lacking)!r}, which the original does not have")
    if bench.replaced:
        note = "IsAllFinite, which has no kernel for the CPU, was replaced by standard operators to run it"
        found.notes.append(note)
    random = np.random.default_rng(seed)
    batches = _batches(bench, feeder, runs, random)
    further = [*_other_sizes(bench, others, random, found), *_other_magnitudes(bench, feeder, batches[0])]
    found.comparable = _settle_randomness(bench, batches[0], found)
    if bench.pair.small:
        found.tolerance = max(found.tolerance, bench.rounding)
        found.notes.append(
            f"the graph computes in a type smaller than float32: values are compared within {found.tolerance:g} of the "
            f"largest element of each tensor{f' and {bench.lost:.1g}, which may underflow' if bench.lost else ''}"
        )
    _compare_values(bench, feeder, batches, further, found)
    _force(bench, feeder, batches, found)
    _poison(bench, feeder, batches[0], found)
    _try_rule(bench, found)
    if bench.untold and not bench.pair.proved:
        why = f"the gradient {bench.untold[0]!r} that they are of is not in the scaled graph"
        found.checks.append(Check("reports of telemetry", UNPROVED, why))
    found.runs = bench.runs
    found.notes += _zeros(bench, batches)


def replay(found: Measurements, bench: Bench, case: Case) -> None:
    """Run one case again; refuse a case of other graphs."""
    for gradient in (case.gradient, *case.others) if case.kind == "skip" else ():
        if gradient not in bench.gradients:
            raise VerifyError(f"the case forces a gradient {gradient!r}, which the original does not have")
    wanted = {value.name or "" for value in bench.pair.step.scale.states.values()}
    if case.kind != "rule":
        wanted = {*bench.original.required, *bench.scaled.required, *bench.pair.states, *bench.oracle.starts()[0]}
    for name in sorted(wanted - set(case.feeds)):
        raise VerifyError(f"the case holds no value for {name!r}: it is of other graphs")
    if case.kind == "rule" and bench.oracle.rule is None:
        raise VerifyError("the case is of the rule of a dynamic loss scale, and this one is fixed")
    if case.kind == "skip" and not 0 <= (case.position or 0) < bench.gradients_on(case.feeds)[case.gradient or ""].size:
        raise VerifyError(f"the case forces element {case.position} of {case.gradient!r}, which does not have so many")
    if case.kind != "rule":
        _settle_randomness(bench, case.feeds, found)
    found.try_all("the case again", [case], bench, "run")
    found.runs = bench.runs


def _batches(bench: Bench, feeder: Feeder, runs: int, random: np.random.Generator) -> list[Arrays]:
    """Draw feeds with finite gradients in the original."""
    try:
        return feeder.search(random, bench.finite_gradients, runs)
    except VerifyError as error:
        why = f"the original could not be tried: {error}; give real values with --feeds FILE.npz"
        raise VerifyError(why) from error


def _other_sizes(bench: Bench, others: Feeder | None, random: np.random.Generator, found: Measurements) -> list[Arrays]:
    """Draw a batch with other sizes of symbolic axes, if the original accepts them."""
    if others is None:
        return []
    try:
        (batch,) = _batches(bench, others, 1, random)
    except VerifyError as error:
        found.notes.append(f"the original was run with one size of its symbolic axes alone: {error}")
        return []
    return [batch]


def _other_magnitudes(bench: Bench, feeder: Feeder, batch: Arrays) -> Iterator[Arrays]:
    """Yield the batch with larger and smaller numbers, if the original's gradients are finite."""
    for factor in MAGNITUDES:
        scaled = feeder.multiply(batch, factor)
        with contextlib.suppress(VerifyError):
            if scaled is not None and bench.finite_gradients(scaled):
                yield scaled


def _settle_randomness(bench: Bench, feeds: Arrays, found: Measurements) -> bool:
    """Return whether the original repeats its values, and note the consequences."""
    if bench.seeds:
        note = f"{bench.seeds} operators that draw random numbers without a seed were given one to run them"
        found.notes.append(note)
    if not bench.repeats(feeds):
        found.notes.append(
            "the original gives other values in each run on the same feeds (it draws random numbers without a seed): "
            "values cannot be compared"
        )
        return False
    if bench.original.fresh:
        found.notes.append("the original draws random numbers from seeds: each run is a session of its own")
    return True


def _compare_values(
    bench: Bench, feeder: Feeder, batches: Sequence[Arrays], further: Sequence[Arrays], found: Measurements
) -> None:
    name, tolerance = "values as in the original", found.tolerance
    if not found.comparable:
        status = SKIPPED if bench.pair.proved else UNPROVED
        found.checks.append(Check(name, status, "they change from run to run"))
        return
    scales: tuple[float, ...] = POWERS if bench.feeds_scale else ()
    rule = bench.oracle.rule
    wide = tuple(scale for scale in WIDE_POWERS if scale >= (1.0 if rule is None else rule.min_loss_scale))
    own = bench.oracle.initial
    if tolerance if math.frexp(own)[0] != 0.5 else not bench.feeds_scale:
        scales = (*scales, own)
    elif math.frexp(own)[0] != 0.5:
        found.notes.append(
            f"the scale {own:g} of the policy is no power of two: multiplying and dividing by it rounds, so that it is "
            "compared only within a --tolerance"
        )
    if not scales:
        found.checks.append(Check(name, UNPROVED, f"the scale {own:g} is a constant, and no power of two: --tolerance"))
        return
    is_checked = bench.pair.step.all_finite is not None and bench.feeds_scale
    pairs = [*itertools.product(batches, scales), *itertools.product(further, scales[:2])]
    # A step with an overflow by the scale itself is skipped, if steps are skipped at all.
    pairs += [(batches[0], scale) for scale in wide] if is_checked else []
    starts = bench.oracle.starts()

    def cases() -> Iterator[Case]:
        for i, (batch, scale) in enumerate(pairs):
            # A step with an overflow is skipped, and a reset is no carried state.
            feeds = feeder.without_resets(batch) if scale in WIDE_POWERS else batch
            start = bench.with_scale(starts[i % len(starts)], scale)
            yield Case("step", {**feeds, **start}, tolerance=tolerance)
        for i, start in enumerate(starts if is_checked else ()):
            feeds = feeder.without_resets(batches[i % len(batches)])
            yield Case("step", {**feeds, **bench.with_scale(start, HUGE)}, tolerance=tolerance)

    tensors = len(bench.gradients) + len(bench.pair.states)
    bits = f"within {tolerance:g}" if tolerance else "bit for bit"
    numbers = f"{', '.join(f'{scale:g}' for scale in scales)}{f', {wide[0]:g} to 2**126' if is_checked else ''}"
    found.try_all(name, cases(), bench, f"steps at scales {numbers}: {tensors} gradients and states {bits}")
    if not bench.compared:
        raise VerifyError("the gradients overflow at every loss scale that was tried; give smaller --feeds FILE.npz")


def _force(bench: Bench, feeder: Feeder, batches: Sequence[Arrays], found: Measurements) -> None:
    if bench.pair.step.all_finite is None:
        why = "a fixed loss scale is not checked: every step is applied"
        found.checks.append(Check("a non-finite gradient", SKIPPED, why))
        return
    name = "a non-finite gradient is skipped"
    if find_applied(bench.pair):
        name += " until the scale is stuck"
    if bench.lacking:
        lost = f"the gradient {bench.lacking[0]!r} of the original is not in the scaled graph"
        if bench.pair.proved or not bench.gradients:
            found.checks.append(Check(name, FAILS if bench.pair.proved else SKIPPED, lost))
            return
        total = len(bench.lacking) + len(bench.gradients)
        found.notes.append(f"{lost}: {len(bench.lacking)} of {total} gradients were not made non-finite")

    count = len(bench.gradients)
    many = count > _MANY

    def cases() -> Iterator[Case]:
        # Each start is combined with each kind of number in turn.
        starts = itertools.cycle(bench.oracle.starts())
        for i, batch in enumerate(batches[:1] if many else batches):
            feeds = feeder.without_resets(batch)
            sizes = {gradient: array.size for gradient, array in bench.gradients_on(feeds).items()}
            filled = [gradient for gradient in bench.gradients if sizes[gradient]]
            alone = enumerate(filled[:: max(1, math.ceil(count / _MANY))])
            forced = [([each], k) for j, each in alone for k in range(3) if not (many and (j - k) % 3)]
            groups = [filled[j::_GROUPS] for j in range(_GROUPS if many else 0)]
            forced += [(group, k) for group in filter(None, groups) for k in range(3)]
            for (first, *others), k in forced:
                position = (0, sizes[first] // 2, sizes[first] - 1)[(i + k) % 3]
                yield Case("skip", {**feeds, **next(starts)}, first, _KINDS[k], position, others=tuple(others))

    how = f"{count} gradients in {_GROUPS} groups, and some alone" if many else f"each of {count} gradients"
    what = f"runs, nan, inf and -inf in {how}: {len(bench.pair.states)} states kept, scale lowered"
    found.try_all(name, cases(), bench, what)


def _poison(bench: Bench, feeder: Feeder, batch: Arrays, found: Measurements) -> None:
    name = "an input that is not finite"
    if bench.pair.step.all_finite is None or not found.comparable:
        why = "a fixed loss scale is not checked" if found.comparable else "values change from run to run"
        found.checks.append(Check(name, SKIPPED, why))
        return
    feeds = feeder.without_resets(batch)
    inputs = [each for each, array in feeds.items() if array.dtype.kind == "f" and array.size]
    batch_inputs = bench.finite_states.inputs(feeds)
    parts = [[each for each in inputs if (each in batch_inputs) is of_batch] for of_batch in (True, False)]
    size = _GROUPS if len(inputs) > _MANY else len(inputs)
    groups = [group for part in parts for i in range(size) if (group := part[i::size])]

    stopped: list[str] = []

    def cases() -> Iterator[Case]:
        starts = itertools.cycle(bench.oracle.starts())
        # A step with random numbers from seeds needs a session for each run.
        kinds = _KINDS[:1] if bench.original.fresh else _KINDS
        for group, number in itertools.product(groups, kinds):
            start = bench.with_scale(next(starts), POWERS[1])
            case = Case(
                "poison", {**poisoned(feeds, group, number), **start}, tolerance=max(found.tolerance, _POISONED)
            )
            if bench.can_run(case.feeds):
                yield case
            else:
                stopped.extend(f"{each!r} = {number}" for each in group)

    found.try_all(name, cases(), bench, f"runs, of {len(inputs)} inputs with nan, inf or -inf")
    if bench.finite_states.stored:
        stored = few([f"{state!r} with {names}" for state, names in bench.finite_states.stored.items()], 2)
        found.notes.append(f"the original itself stores numbers that are not finite, and so does the file: {stored}")
    if stopped:
        found.notes.append(
            f"the original cannot run with {few(stopped, 3)}: such a batch stops the scaled step as well, "
            "and is not skipped"
        )


def _try_rule(bench: Bench, found: Measurements) -> None:
    name = "the loss scale follows its rule"
    if bench.oracle.rule is None:
        found.checks.append(Check(name, SKIPPED, "a fixed loss scale has none"))
        return
    names = {value.name for value in bench.pair.step.scale.states.values()}
    starts = [{k: v for k, v in start.items() if k in names} for start in bench.oracle.starts()]
    cases = (Case("rule", start, finite=finite) for start in starts for finite in (True, False))
    found.try_all(
        name, cases, bench, f"steps from {len(starts)} states, against {type(bench.pair.step.scale.policy).__name__}"
    )


def _zeros(bench: Bench, batches: Sequence[Arrays]) -> Iterator[str]:
    """Yield a note on gradients that are all zero."""
    seen = [bench.original.run(batch).outputs for batch in batches]
    zero = [name for name in bench.gradients if all(name in outputs and not outputs[name].any() for outputs in seen)]
    if zero:
        more = f" and {len(zero) - 3} more" if len(zero) > 3 else ""
        yield f"on these feeds all of {', '.join(map(repr, zero[:3]))}{more} is zero; --feeds FILE.npz gives others"
