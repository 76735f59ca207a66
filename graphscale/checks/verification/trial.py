"""The trial of a scaled step: both graphs run on drawn feeds, and on feeds with one number that is not finite.

It believes no analysis: the file loads, its interface is the original's, its values are the original's at any scale,
and no state that was finite becomes non-finite where it depends on a gradient, or where the loss shows it.
"""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from graphscale.checks.running.private import Copy, Results, Runner, find_unseeded
from graphscale.checks.running.random_feeds import STYLES, Feeder
from graphscale.checks.verification.finite_states import FiniteStates, poisoned
from graphscale.checks.verification.rounding_noise import allow_rounding, find_small_types
from graphscale.checks.verification.verify_report import compare_values, is_finite, same_bits
from graphscale.errors import VerifyError
from graphscale.files.external_data import external_tensors
from graphscale.files.tensor_files import Arrays
from graphscale.graph.stamp_reading import read_stamp
from graphscale.graph.values import values_by_name
from graphscale.pipeline import Model, open_copy
from graphscale.policy.names import ScaledValue
from graphscale.process.child import is_out_of_memory
from graphscale.process.summary import few

__all__ = ["FaultError", "Trial", "UntriedError", "run_trial"]

SCALES = (1.0, 2.0**10, 2.0**13)
KINDS = (np.inf, np.nan)
_MOST = 32  # inputs that are made non-finite
# Allowed errors, relative to the largest element: a wrong value is far off, and rounding depends on the scale.
_TOLERANCE, _SMALL_TOLERANCE = 2.0**-10, 2.0**-4


class UntriedError(Exception):
    """The original cannot be tried."""


class FaultError(Exception):
    """The scaled step does other things than its original."""


def run_trial(
    original: Model, prepared: ir.Model, scaled: ir.Model, found: Mapping[str, Any], states: Mapping[str, str]
) -> dict[str, str]:
    """Try a scaled step, in a process of its own.

    Args:
        original: the original.
        prepared: the original, in the mixed precision of the scaled one, with the training operators replaced that the
            target lacks.
        scaled: the scaled model.
        found: the names of the `losses`, `gradients` and `batches` in the original, of states `in_place`, and
            of next values `kept` on skipped steps; `mixed`: it was put into mixed precision.
        states: `{input: output}` of the original's carried state.

    Returns:
        `text`, the result for the report, or `fault`.
    """
    try:
        first = open_copy(original)[0]
        _enter_folder(first)
        written = {states.get(name) for name in found["in_place"]}
        _compare_ends("input", first.graph.inputs, scaled.graph.inputs)
        _compare_ends("output", [v for v in first.graph.outputs if v.name not in written], scaled.graph.outputs)
        trial = Trial((first, prepared), scaled, found, states)
        with np.errstate(all="ignore"):
            return {"text": "; ".join(trial.run())}
    except (UntriedError, FaultError) as result:
        if is_out_of_memory(result):
            raise MemoryError from result
        text = str(result)
        return {"fault": text} if isinstance(result, FaultError) else {"text": f"not tried: {text}"}


def _enter_folder(model: ir.Model) -> None:
    """Enter the folder of external weights, so that ONNX Runtime maps them, and nothing else reads them."""
    folders = {os.fspath(tensor.base_dir) for tensor in external_tensors(model).values()}
    if len(folders) > 1:
        raise UntriedError("its weights lie in several folders")
    os.chdir(next(iter(folders), os.curdir) or os.curdir)


def _compare_ends(kind: str, ends: Sequence[ir.Value], others: Sequence[ir.Value]) -> None:
    """Compare the names, the order and the types of inputs or outputs: those of scaling are added at the end."""
    for value, other in itertools.zip_longest(ends, others[: len(ends)]):
        if other is None or value.name != other.name:
            raise FaultError(f"{kind} {value.name!r} is missing, or at another place")
        small = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
        is_widened = kind == "output" and value.dtype in small and other.dtype is ir.DataType.FLOAT  # gradient_dtype
        if value.dtype not in (None, other.dtype) and not is_widened:
            raise FaultError(f"{kind} {value.name!r} is {other.dtype}, and {value.dtype} in the original")


class Trial:
    """Both graphs, loaded, and a batch with finite results.

    Attributes:
        is_applied: True if a step on the batch was applied.
    """

    def __init__(
        self, originals: Sequence[ir.Model], scaled: ir.Model, found: Mapping[str, Any], states: Mapping[str, str]
    ) -> None:
        prepared = originals[-1]
        self._states = states
        self._names: Mapping[str, str] = found.get("names") or read_stamp(scaled, "the scaled step").names
        values = values_by_name(prepared.graph)
        self._losses = [values[name] for name in found["losses"] if name in values]
        kept = [state for state, output in states.items() if output in found["kept"]]
        gradients, batches = ([values[n] for n in found[key] if n in values] for key in ("gradients", "batches"))
        self._watch = FiniteStates(prepared.graph, states, kept, self._losses, gradients, batches)
        self._seeds = {node.outputs[0].name or "": i for i, node in enumerate(find_unseeded(prepared.graph), 1)}
        small = find_small_types(scaled.graph)
        self._tolerance, _ = allow_rounding(small, _SMALL_TOLERANCE if small else _TOLERANCE)
        try:
            self._feeder = self._make_feeder(prepared)
            self._original = self._load(originals[1:] if found["mixed"] else originals, "the original")
        except VerifyError as error:
            raise UntriedError(str(error)) from error
        try:
            # State that a step writes in place is read in its feeds; weights in other files are not read.
            tensors = {name: scaled.graph.initializers[name].const_value for name in found["in_place"]}
            self._held = {n: t.numpy() for n, t in tensors.items() if t and not isinstance(t, ir.ExternalTensor)}
            self._scaled = self._load([scaled], "the scaled step", self._held)
        except VerifyError as error:
            raise FaultError(f"{error}, and it loads the original") from error
        self._feeds, self._expected = self._draw()
        self.is_applied = False

    def _load(self, models: Sequence[ir.Model], what: str, fed: Iterable[str] = ()) -> Runner:
        """Load the first of some models that the runtime can load, with seeds for random operators."""
        copy = Copy(models[0])
        copy.feed(fed)
        copy.give_seeds({name: seed for name, seed in self._seeds.items() if name in copy.values})
        copy.spell_out_finite_checks()
        try:
            runner = Runner(copy.model, None, what)
        except VerifyError:
            if not models[1:]:
                raise
            return self._load(models[1:], what)
        runner.fresh = bool(self._seeds)
        return runner

    def _make_feeder(self, original: ir.Model) -> Feeder:
        loss = self._losses[0] if self._losses else original.graph.outputs[0]
        # State with an initializer begins at it: external weights are not read here.
        bare = [name for name in self._states if name not in original.graph.initializers]
        return Feeder(original, bare, loss, {}, {})

    def _draw(self) -> tuple[Arrays, Results]:
        """Draw feeds on which the original computes finite losses and states."""
        random, reason = np.random.default_rng(0), "it computes no finite loss and states on random feeds"
        wanted = {*(value.name for value in self._losses), *self._states.values()}
        for style in STYLES:
            feeds = self._feeder.draw(random, style)
            try:
                expected = self._original.run(feeds)
            except VerifyError as error:
                reason = str(error)
                continue
            if all(is_finite(array) for name, array in expected.outputs.items() if name in wanted):
                return feeds, expected
        raise UntriedError(reason)

    def run(self) -> Iterator[str]:
        """Try everything; yield what was tried."""
        import onnxruntime as ort

        yield f"tried on ONNX Runtime {ort.__version__}: {self._compare()}"
        if ScaledValue.ALL_FINITE not in self._names:
            yield "its fixed scale is not checked, and no input was made non-finite"
            return
        inputs = self._watch.inputs(self._feeds)[:_MOST]
        stored = dict[str, str]()
        runs = sum(self._poison(name, number, stored) for name in inputs for number in KINDS)
        yield f"{runs} runs with inf or nan in one of {len(inputs)} inputs keep the state finite"
        if stored:
            cases = few([f"{state!r} with {case}" for state, case in stored.items()], 2)
            yield f"state that only stores its batch, or is no parameter, is not finite next: {cases}"

    def _run_scaled(self, feeds: Arrays) -> Arrays:
        """Run the scaled step; return its outputs, and the next values of states under the names in the original."""
        results = self._scaled.run({**self._held, **feeds})
        written = {output: results.left[state] for state, output in self._states.items() if state in self._held}
        return {**results.outputs, **written}

    # --- values -------------------------------------------------------------------------------------------------------

    def _compare(self) -> str:
        """Compare values at several scales, and describe the comparison."""
        name = self._names.get(ScaledValue.LOSS_SCALE)
        scales: Sequence[float | None] = SCALES if name in self._scaled.inputs else (None,)
        applied = list[float | None]()
        for scale in scales:
            more: Arrays = {} if scale is None or name is None else {name: np.asarray(scale, dtype=np.float32)}
            try:
                got = self._run_scaled({**self._feeds, **more})
            except VerifyError as error:
                raise FaultError(str(error)) from error
            applied += [scale] if self._is_applied(got) else []
            if (fault := self._find_difference(got)) is not None and self._repeats():
                raise FaultError(fault if scale is None else f"at scale {scale:g}, {fault}")
        self.is_applied = bool(applied)
        if not applied:
            return "the interface; the gradients overflow at all scales"
        numbers = ", ".join("its own" if scale is None else f"{scale:g}" for scale in applied)
        return f"interface and values, scale {numbers}"

    def _find_difference(self, got: Arrays) -> str | None:
        """Return the first difference of a step from the original."""
        is_applied, losses = self._is_applied(got), {value.name for value in self._losses}
        for name, wanted in self._expected.outputs.items():
            if name in got and (is_applied or name in losses):
                if wanted.dtype.itemsize < got[name].dtype.itemsize:  # gradient_dtype
                    wanted = wanted.astype(got[name].dtype)
                found = compare_values(name, wanted, got[name], "as in the original", self._tolerance, 2.0**-18)
                if (first := next(found, None)) is not None:
                    return str(first)
        return None

    def _is_applied(self, got: Arrays) -> bool:
        flag = self._names.get(ScaledValue.ALL_FINITE)
        return bool(np.all(got.get(flag or "", True)))

    @functools.cache  # noqa: B019
    def _repeats(self) -> bool:
        """Return whether the original gives the same values again: it may draw random numbers in a body."""
        again = self._original.run(self._feeds).outputs
        return all(same_bits(array, again[name]) for name, array in self._expected.outputs.items())

    # --- numbers that are not finite ----------------------------------------------------------------------------------

    def _poison(self, name: str, number: float, stored: dict[str, str]) -> bool:
        """Run a step with one number that is not finite; return whether it could be run."""
        feeds = poisoned(self._feeds, [name], number)
        case = f"{name} = {number} at element {feeds[name].size // 2}"
        try:
            got = self._run_scaled(feeds)
            infected = self._watch.find_infected(
                [name], feeds, lambda state: got.get(self._states[state]), lambda: self._original.run(feeds).outputs
            )
            for state, is_own in infected:
                if not is_own:
                    raise VerifyError(f"the step is applied, and state {state!r} is not finite")
                stored.setdefault(state, case)
        except VerifyError as error:
            try:
                self._original.run(feeds)
            except VerifyError:  # the case says nothing
                return False
            raise FaultError(f"with {case}, {error}") from error
        return True
