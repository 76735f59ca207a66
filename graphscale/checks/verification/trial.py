"""The trial of a scaled step: both graphs run on drawn feeds, and on feeds with one number that is not finite.

It believes no analysis: the file loads, its interface is the original's, its values are the original's at any scale,
and no state that was finite becomes non-finite where it depends on a gradient, or where the loss shows it.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
from collections.abc import Callable, Collection, Mapping, Sequence

import numpy as np
import onnx_ir as ir

from graphscale.analysis.edits import Unscaling
from graphscale.analysis.report import Report
from graphscale.analysis.roles.role_table import Assigned, Role, Roles
from graphscale.analysis.updates import Update
from graphscale.checks.running.random_feeds import Feeder
from graphscale.checks.verification.bench import Bench
from graphscale.checks.verification.finite_states import poisoned
from graphscale.checks.verification.pair import Pair
from graphscale.checks.verification.rounding_noise import find_small_types
from graphscale.checks.verification.verify_report import (
    FAILS,
    HOLDS,
    SKIPPED,
    UNPROVED,
    Case,
    Check,
    Difference,
    is_finite,
)
from graphscale.errors import VerifyError
from graphscale.files.external_data import external_tensors
from graphscale.files.tensor_files import Arrays
from graphscale.graph.values import values_by_name
from graphscale.pipeline import Model, open_copy
from graphscale.process.child import is_out_of_memory
from graphscale.process.summary import few
from graphscale.step.scaled_step import read
from graphscale.step.training_step import Step

__all__ = ["run_trial", "try_step"]

SCALES = (1.0, 2.0**10, 2.0**13)
KINDS = (np.inf, np.nan)
_MOST = 32  # inputs that are made non-finite
# Allowed errors, relative to the largest element: a wrong value is far off, and rounding depends on the scale.
_TOLERANCE, _SMALL_TOLERANCE, _LOST = 2.0**-10, 2.0**-4, 2.0**-18


def run_trial(
    original: Model, prepared: ir.Model, scaled: ir.Model, report: Report, kept: Collection[str]
) -> dict[str, str]:
    """Try a scaled step, in a process of its own.

    Args:
        original: the original.
        prepared: the original, in the mixed precision of the scaled one, with the training operators replaced that the
            target lacks.
        scaled: the scaled model.
        report: the report of its scaling, with the names in the original.
        kept: outputs that are the next values of states on skipped steps, too.

    Returns:
        `text`, the result for the report, or `fault`.
    """
    first = open_copy(original)[0]
    folders = {os.fspath(tensor.base_dir) for tensor in external_tensors(first).values()}
    if len(folders) > 1:
        return {"text": "not tried: its weights lie in several folders"}
    # ONNX Runtime maps external weights in the present folder, and nothing else reads them.
    os.chdir(next(iter(folders), os.curdir) or os.curdir)
    states = {row.pair: row.name for row in report.roles if row.kind == "output" and row.pair is not None}
    written = {states.get(state.input) for state in report.state if state.output is None}
    outputs = [value for value in first.graph.outputs if value.name not in written]
    fault = _compare_ends("input", first.graph.inputs, scaled.graph.inputs)
    if fault := fault or _compare_ends("output", outputs, scaled.graph.outputs):
        return {"fault": fault}
    added = scaled.graph.inputs[len(first.graph.inputs) :]
    if bare := [value.name for value in added if not value.is_initializer()]:
        return {"fault": f"input {bare[0]!r}, which scaling adds, has no initial value"}
    is_first = report.autocast is None and {*states.values()} <= {value.name for value in first.graph.outputs}
    models = [first, prepared] if is_first else [prepared]
    check = try_step([_understand(model, report, states, kept) for model in models], read(scaled))
    if is_out_of_memory(check.detail):
        raise MemoryError
    return {"fault" if check.status == FAILS else "text": check.detail}


def _understand(model: ir.Model, report: Report, states: Mapping[str, str], kept: Collection[str]) -> Step:
    """Return the step of an original by the names of its values, as far as it has them."""
    values = values_by_name(model.graph)
    inputs, outputs = (
        {values[r.name]: Assigned(Role(r.role), "") for r in report.roles if r.kind == kind and r.name in values}
        for kind in ("input", "output")
    )
    return Step(
        graph=model.graph,
        model=model,
        loss=values.get(report.loss, model.graph.outputs[0]),
        unscalings=tuple(Unscaling(values[each.value]) for each in report.gradients if each.value in values),
        roles=Roles(inputs, outputs),
        updates=tuple(Update(values[o], values[i], "", o in kept) for i, o in states.items() if i in values),
    )


def _compare_ends(kind: str, ends: Sequence[ir.Value], others: Sequence[ir.Value]) -> str | None:
    """Compare the names, the order and the types of inputs or outputs: those of scaling are added at the end."""
    for value, other in itertools.zip_longest(ends, others[: len(ends)]):
        if other is None or value.name != other.name:
            return f"{kind} {value.name!r} is missing, or at another place"
        small = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
        is_widened = kind == "output" and value.dtype in small and other.dtype is ir.DataType.FLOAT  # gradient_dtype
        if value.dtype not in (None, other.dtype) and not is_widened:
            return f"{kind} {value.name!r} is {other.dtype}, and {value.dtype} in the original"
    return None


def try_step(originals: Sequence[Step], step: Step) -> Check:
    """Try a scaled step beside the first of some forms of its original that the runtime can load."""
    import onnxruntime as ort

    name, status = "numbers", SKIPPED
    with contextlib.ExitStack() as stack, np.errstate(all="ignore"):
        try:
            bench = stack.enter_context(contextlib.closing(_open_bench(originals, step)))
            feeder = _make_feeder(bench.pair)
            (drawn,) = feeder.search(np.random.default_rng(0), functools.partial(_are_finite, bench))
            feeds, repeats, status = feeder.without_resets(drawn), bench.repeats(drawn), FAILS
            bench.scaled.outputs  # noqa: B018
            compared = _compare(bench, feeds) if repeats else "the interface; values change from run to run"
            detail = f"tried on ONNX Runtime {ort.__version__}: {compared}; {_poison(bench, feeds)}"
            return Check(name, HOLDS if bench.compared or not repeats else UNPROVED, detail)
        except VerifyError as error:
            return Check(name, status, str(error) if status == FAILS else f"not tried: {error}")


def _open_bench(originals: Sequence[Step], step: Step) -> Bench:
    first, *others = originals
    pair = Pair(
        original=first.model,
        step=step,
        analysis=first,
        states={update.input.name or "": update.output.name for update in first.states},
        kept=frozenset(update.input.name or "" for update in first.states if update.kept),
        nodes={},
        translation=None,
        small=find_small_types(step.graph),
        notes=(),
    )
    try:
        bench = Bench(pair, None)
    except VerifyError:
        if not others:
            raise
        return _open_bench(others, step)
    bench.lost = max(bench.lost, _LOST)
    return bench


def _make_feeder(pair: Pair) -> Feeder:
    # Weights in other files are not read here: a state with an initializer among them begins at it.
    tensors = {name: value.const_value for name, value in pair.original.graph.initializers.items()}
    read = [name for name in pair.states if not isinstance(tensors.get(name), ir.ExternalTensor)]
    return Feeder(pair.original, read, pair.analysis.loss, {}, {})


def _are_finite(bench: Bench, feeds: Arrays) -> bool:
    """Return whether the original computes finite losses and states."""
    outputs, analysis = bench.original.run(feeds).outputs, bench.pair.analysis
    wanted = {*(value.name for value in analysis.losses), *bench.pair.states.values()}
    return all(is_finite(array) for name, array in outputs.items() if name in wanted)


def _evaluate(evaluate: Callable[[Case], list[Difference]], case: Case, words: str) -> None:
    """Raise an error for a case with a difference."""
    try:
        found = evaluate(case)
    except VerifyError as error:
        raise VerifyError(f"{words}, {error}") from error
    if found:
        raise VerifyError(f"{words}, {found[0]}")


def _compare(bench: Bench, feeds: Arrays) -> str:
    """Compare values at several scales, and describe the comparison."""
    applied, least = list[float](), _SMALL_TOLERANCE if bench.pair.small else _TOLERANCE
    start = bench.oracle.starts()[0]
    for scale in SCALES if bench.feeds_scale else (bench.oracle.initial,):
        case = Case("step", {**feeds, **bench.with_scale(start, scale)}, tolerance=max(least, bench.rounding))
        before = bench.compared
        _evaluate(bench.evaluate, case, f"at scale {scale:g}")
        applied += [scale] if bench.compared > before else []
    if not applied:
        return "the interface; the gradients overflow at all scales"
    numbers = ", ".join(f"{scale:g}" for scale in applied) if bench.feeds_scale else "its own"
    return f"interface and values, scale {numbers}"


def _poison(bench: Bench, feeds: Arrays) -> str:
    """Run steps with one number that is not finite, and describe them."""
    if bench.pair.step.all_finite is None:
        return "its fixed scale is not checked, and no input was made non-finite"
    runs, inputs = 0, bench.finite_states.inputs(feeds)[:_MOST]
    start = bench.with_scale(bench.oracle.starts()[0], SCALES[1])
    bench.original.fresh = bench.scaled.fresh = False
    for name, number in itertools.product(inputs, KINDS):
        case = Case("poison", {**poisoned(feeds, [name], number), **start})
        try:
            _evaluate(bench.find_infected, case, f"with {name} = {number} at element {feeds[name].size // 2}")
        except VerifyError:
            if bench.can_run(case.feeds):  # else the case says nothing
                raise
        else:
            runs += 1
    text = f"{runs} runs with inf or nan in one of {len(inputs)} inputs keep the state finite"
    if not bench.finite_states.stored:
        return text
    cases = few([f"{state!r} with {names}" for state, names in bench.finite_states.stored.items()], 2)
    return f"{text}; state that only stores its batch, or is no parameter, is not finite next: {cases}"
