"""Verification of a scaled graph: `graphscale.verify`."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from graphscale.analysis.hints import Hints
from graphscale.analysis.roles.answers import Answers
from graphscale.checks.derivatives.differences import DISAGREES
from graphscale.checks.derivatives.gradient_check import check as check_gradients
from graphscale.checks.derivatives.gradient_report import count_agreeing
from graphscale.checks.running.random_feeds import SIZE, Feeder
from graphscale.checks.verification.bench import Bench
from graphscale.checks.verification.counterexample import load_case
from graphscale.checks.verification.numeric import Measurements, Progress, measure
from graphscale.checks.verification.numeric import replay as replay_case
from graphscale.checks.verification.pair import Pair, check_names, open_pair
from graphscale.checks.verification.promise import (
    compare_expectations,
    describe_promises,
    find_applied,
    parse_expectation,
)
from graphscale.checks.verification.proofs import prove_pair
from graphscale.checks.verification.translated import compare_translation
from graphscale.checks.verification.trial import try_step
from graphscale.checks.verification.verify_report import FAILS, HOLDS, SKIPPED, Case, Check, VerifyReport
from graphscale.collector import paused_collector
from graphscale.errors import VerifyError
from graphscale.files.tensor_files import read_npz
from graphscale.graph.damage import name_damage
from graphscale.passes import LowerTrainingOps
from graphscale.pipeline import Model, open_copy

__all__ = ["verify"]

# The options that a step by others does not have: they are for the numbers of files with names of our own.
_OWN = ("tolerance", "feeds", "dims", "expect_dtype", "numeric", "derivatives", "replay", "trained")


@name_damage
@paused_collector()
def verify(
    original: Model,
    scaled: Any,
    *,
    runs: int = 3,
    tolerance: float = 0.0,
    providers: Sequence[Any] | None = None,
    seed: int = 0,
    feeds: Mapping[str, Any] | str | os.PathLike[str] | None = None,
    dims: Mapping[str, int] | None = None,
    loss: str | Sequence[str] | None = None,
    place: str | None = None,
    gradients: Sequence[str] | None = None,
    updates: Mapping[str, str] | None = None,
    roles: Any = None,
    keep: Sequence[str] | None = None,
    force_roles: bool = False,
    exact: bool = True,
    expect_policy: Any = None,
    expect_dtype: str | None = None,
    numeric: bool = False,
    trained: bool = False,
    derivatives: bool = False,
    replay: Case | str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
) -> VerifyReport:
    """Verify a scaled graph against the original: by translation validation, by proof, and by running both.

    The original is scaled again, with the policy, the target and the options that the file claims. Each node, constant,
    input, output, initial value and metadata property of the file must be one of the result; with different nodes,
    nothing is proved. Roles are taken only from the original and the arguments. Then the file's degrees are proved
    again, and both graphs run on the same feeds on ONNX Runtime: outputs, gradients and next states must have the same
    bits at loss scales that are powers of two; each gradient is made non-finite, which must leave all state unchanged;
    and the loss scale must follow its rule. Gradients are made non-finite one at a time, of more than 100 some one at a
    time and all in groups. Without a scale a gradient below 1.2e-38 loses bits; then the next states must have the bits
    of the original's update of the scaled graph's gradient.

    A folder is compared with the original folder scaled again: models, checkpoint and other files. Halves are compared
    with those of the step. Then no model is run. The options for a folder are `loss` and `trained`. A single graph is
    compared with the step that `fuse` makes of an original folder.

    Args:
        original: the graph before scaling: a path, an onnx_ir model or a ModelProto; or a folder of artifacts.
        scaled: the graph after scaling: the same kinds, the result of `scale`, or a folder of `scale_artifacts`; or the
            halves of the scaled step in the first argument: the result of `split`, or a list of its models.
        runs: number of random feeds; 0 for the proof alone.
        tolerance: allowed error of values, relative to the largest element of a tensor; 0 for the same bits.
        providers: execution providers, as for `onnxruntime.InferenceSession`; None for the CPU.
        seed: the seed of the random feeds.
        feeds: arrays for inputs by name, or an .npz file of them, in place of random ones.
        dims: sizes for symbolic axes, by name; by default the size in `feeds`, else 4, and 7.
        loss: the name of the loss, or several, as given to the scaling.
        place: `NODE:INDEX`, the input of a node where the scale enters, as given to the scaling (there: `seed`).
        gradients: names of gradients, as given to the scaling.
        updates: `{output: input}` of carried state, as given to the scaling.
        roles: answers about roles, as given to the scaling.
        keep: states that advance on skipped steps, as given to the scaling.
        force_roles: accept the answers even where the original contradicts them, as given to the scaling.
        exact: False to accept nodes that this version would not write: another tool may have rewritten the file, or
            somebody else have scaled it. Then the relation to the original must hold.
        expect_policy: the policy that the file must have, as for `scale`; "dynamic" for each dynamic one that skips all
            steps with a non-finite gradient.
        expect_dtype: the type of its mixed precision; "float32" for none.
        numeric: True for numbers alone: nodes that are neither the original's nor inserted pieces are no failure.
        trained: True if carried state may begin at other values than in the original, within the range of the policy,
            as in a file that a session has exported.
        derivatives: True to also compare the original's gradients with slopes of its loss, as `check_gradients` does; a
            wrong choice of the loss fails, and so do surrogate gradients.
        replay: a counterexample, or its file, to run alone.
        progress: a callback with the name of a stage, the number of its finished runs, and their total.

    Raises:
        GraphscaleError: a file cannot be read, the graphs do not belong together, or a graph cannot be run.
    """
    if runs < 0:
        raise VerifyError(f"runs must be at least 0; got {runs}")
    if not np.isfinite(tolerance) or tolerance < 0:
        raise VerifyError(f"the tolerance must be a finite number of at least 0; got {tolerance:g}")
    if isinstance(feeds, str | os.PathLike):
        feeds = read_npz(feeds)
    given = {name: np.asarray(array) for name, array in (feeds or {}).items()}
    case = load_case(replay) if isinstance(replay, str | os.PathLike) else replay
    scaled = getattr(scaled, "model", scaled) if not isinstance(scaled, str | os.PathLike) else scaled
    progress = progress or (lambda stage, done, total: None)
    single: dict[str, Any] = {
        "providers": providers,
        "tolerance": tolerance,
        "feeds": feeds,
        "dims": dims,
        "place": place,
        "gradients": gradients,
        "updates": updates,
        "roles": roles,
        "keep": keep,
        "force_roles": force_roles,
        "inexact": not exact,
        "expect_policy": expect_policy,
        "expect_dtype": expect_dtype,
        "numeric": numeric,
        "derivatives": derivatives,
        "replay": replay,
    }
    answers = Answers.of(roles).merge(kept=keep or (), forced=force_roles)
    expected_policy = parse_expectation(expect_policy)
    hints = Hints(loss, place, gradients or (), updates, answers)
    report = _verify_several(original, scaled, loss, trained, single, progress)
    if report is not None:
        return report
    progress("scaling the original again", 0, 0)
    if _is_folder(original):
        original, hints = _fuse(str(original), scaled, hints)
    pair = open_pair(original, scaled, hints)
    if pair.translation is None:
        _refuse({**single, "trained": trained}, _OWN, "files that graphscale scaled")
    notes = [*describe_promises(pair), *pair.notes]
    found = Measurements(notes=notes, progress=progress, tolerance=tolerance)
    if case is not None:
        return _replay(found, pair, case, providers)
    if pair.translation is not None:
        found.checks += compare_translation(pair.translation, pair, exact=exact and not numeric, trained=trained)
    found.checks += compare_expectations(pair, expected_policy, expect_dtype)
    try:
        check_names(pair)
    except VerifyError as error:
        return VerifyReport((*found.checks, Check("named values", FAILS, str(error), True)), tuple(notes))
    progress("proving the scaled graph", 0, 0)
    found.checks += prove_pair(pair, exact=exact, numeric=numeric)
    if derivatives:
        progress("comparing gradients with slopes", 0, 0)
        found.checks.append(_compare_with_slopes(original, given, hints, seed, dims or {}))
    if runs and pair.translation is None:
        found.checks.append(_try(pair))
        found.runs = 1
    elif runs:
        _measure(found, pair, (given, dims or {}), providers, runs=runs, seed=seed)
    return _report(found, pair)


def _measure(
    found: Measurements,
    pair: Pair,
    chosen: tuple[Mapping[str, Any], Mapping[str, int]],
    providers: Sequence[Any] | None,
    *,
    runs: int,
    seed: int,
) -> None:
    """Run both graphs of a step; `chosen` are arrays for inputs, and sizes of symbolic axes."""
    drawn = (pair.original, pair.states, pair.analysis.loss, *chosen)
    feeder, others = Feeder(*drawn), None
    if feeder.chosen:
        with contextlib.suppress(VerifyError):
            others = Feeder(*drawn, size=SIZE + 3)
    try:
        with contextlib.closing(Bench(pair, providers)) as bench:
            measure(found, bench, feeder, others, runs=runs, seed=seed)
    except VerifyError as error:
        if all(check.status in (HOLDS, SKIPPED) for check in found.checks):
            raise
        found.checks.append(Check("numbers", FAILS, str(error)))


def _try(pair: Pair) -> Check:
    """Run both graphs of a step that somebody else scaled; see `trial`."""
    step = pair.step
    if step.all_finite is not None and step.all_finite not in step.graph.outputs:
        step.graph.outputs.append(step.all_finite)
    return try_step([pair.analysis], step)


def _replay(found: Measurements, pair: Pair, case: Case, providers: Sequence[Any] | None) -> VerifyReport:
    """Run a counterexample alone."""
    try:
        check_names(pair)
    except VerifyError as error:
        raise VerifyError(f"the case cannot be run again: {error}") from error
    with contextlib.closing(Bench(pair, providers)) as bench:
        replay_case(found, bench, case)
    return _report(found, pair)


def _report(found: Measurements, pair: Pair) -> VerifyReport:
    parts = tuple(found.checks), tuple(found.notes), found.counterexample, found.differences, found.runs
    return VerifyReport(*parts, applied=find_applied(pair))


def _is_folder(model: Any) -> bool:
    return isinstance(model, str | os.PathLike) and Path(model).is_dir()


def _fuse(folder: str, scaled: Model, hints: Hints) -> tuple[Model, Hints]:
    """Return the fused step of a folder, with training operators if the scaled step has them.

    Returns:
        the step, and the hints for its scaling.
    """
    from graphscale.ort.fusing import fuse, join_models

    step = (join_models if LowerTrainingOps.applies(open_copy(scaled)[0]) else fuse)(folder)
    return step.model, dataclasses.replace(hints, loss=hints.loss or step.loss, updates=hints.updates or step.updates)


def _verify_several(
    original: Model,
    scaled: Any,
    loss: str | Sequence[str] | None,
    trained: bool,
    single: Mapping[str, Any],
    progress: Progress,
) -> VerifyReport | None:
    """Verify a folder of artifacts, or the halves of a step; return None for single graphs.

    The options `single` are for single graphs only; all others are those of `verify`.
    """
    folders = [_is_folder(original), _is_folder(scaled)]
    parts = [*scaled.gradients, scaled.update] if hasattr(scaled, "update") else scaled
    is_split = isinstance(parts, list | tuple)
    if not folders[1] and not is_split:
        return None
    if folders != [not is_split, not is_split]:
        folder = original if folders[0] else scaled
        raise VerifyError(f"{folder} is a folder; verify takes two single graphs, or two folders of artifacts")
    unused = {**single, "loss": loss, "trained": trained} if is_split else single
    _refuse(unused, unused, "a single graph; models of a folder, or of a split step, are not run")
    from graphscale.checks.verification import several_models

    if is_split:
        progress("splitting the step again", 0, 0)
        return several_models.verify_halves(getattr(original, "model", original), *parts)
    progress("scaling the original again", 0, 0)
    return several_models.verify_folder(str(original), scaled, loss, trained)


def _refuse(options: Mapping[str, Any], names: Iterable[str], subject: str) -> None:
    option = next((name for name in names if options[name]), None)
    if option is not None:
        raise VerifyError(f"{option} is for {subject}")


def _compare_with_slopes(
    original: Model, feeds: Mapping[str, Any], hints: Hints, seed: int, dims: Mapping[str, int]
) -> Check:
    """Compare the gradients of an original with the slopes of its loss: a wrong choice of the loss fails."""
    name = "gradients are slopes of the loss"
    try:
        found = check_gradients(original, feeds, hints, seed=seed, dims=dims)
    except VerifyError as error:
        return Check(name, SKIPPED, str(error))
    wrong = [f"{each.gradient!r} of {each.weight!r}" for each in found.weights if each.verdict == DISAGREES]
    if wrong:
        more = f" and {len(wrong) - 1} more" if wrong[1:] else ""
        detail = f"{wrong[0]}{more} is no slope of {found.loss!r}; inspect --check-gradients says more"
        return Check(name, FAILS, detail)
    agreeing = count_agreeing(found.weights)
    detail = f"{agreeing} of {len(found.weights)} agree with {found.loss!r} in {found.dtype}"
    return Check(name, HOLDS if agreeing else SKIPPED, detail)
