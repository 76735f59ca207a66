"""The comparison of an exported step, run by ONNX Runtime, with the framework's own steps."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from graphscale.errors import ExportError
from graphscale.exporters.export_report import make_runner
from graphscale.exporters.rounding import Numbers, disturb, largest, tolerance_of
from graphscale.files import saving
from graphscale.files.tensor_files import Arrays

__all__ = ["Comparison", "OwnStep"]

# Draws of the rounding, as far as they are needed: in some alone, a number near zero has the other sign.
_DRAWS = 12
# A number of the state is rounded once or twice in each step, in units of its own type.
_ROUNDINGS = 4
# A smaller loss may be a difference of larger numbers.
_LEAST_LOSS = 1e-3


@dataclasses.dataclass(frozen=True)
class OwnStep:
    """The step of a framework as a function of arrays.

    Attributes:
        framework: its name.
        run: compute a step, `(number, batch, state, gradients) -> outputs`. The number of the step counts from 1. The
            optimizer takes these gradients, if there are any. The outputs are those of the exported step, and the next
            values of constants among the state by their own names.
        pairs: the output with the next value of each carried input, `{output: input}`.
        losses: names of the losses.
        gradients: the output with the gradient of each weight, `{output: weight}`, if both steps have them.
        precision: the coarsest type that an output is computed in, if that is not its own.
    """

    framework: str
    run: Callable[[int, Arrays, Arrays, Arrays], Arrays]
    pairs: Mapping[str, str]
    losses: Collection[str]
    gradients: Mapping[str, str] = dataclasses.field(default_factory=dict)
    precision: Mapping[str, str] = dataclasses.field(default_factory=dict)


class Comparison:
    """A comparison of an exported step with the framework's, each step from the values that the exported one left.

    An optimizer such as Adam divides a gradient by its own size, so that the rounding of a gradient near zero becomes a
    whole update. Where the gradients are outputs, they are compared, and the updates with those that the framework's
    own optimizer makes of the gradients of the exported step. The errors of next values are relative to their change.

    Where an error is above its tolerance, the framework computes the step again from numbers that differ by their
    rounding, and `Numbers` decides. Losses are never excused, for no update takes part in them.

    Args:
        model: the step.
        own: the framework's.

    Attributes:
        excused: results with numbers that rounding decides: how many, and of how many.
    """

    def __init__(self, model: ir.Model, own: OwnStep) -> None:
        self._model, self._own = model, own
        self._errors: dict[str, float] = {}
        self._is_decided = False
        self.excused: dict[str, tuple[int, int]] = {}

    @property
    def errors(self) -> dict[str, float]:
        """The largest error of each other result, relative to the largest number of the tensor."""
        return {name: error for name, error in self._errors.items() if name not in self.excused}

    @property
    def notes(self) -> list[str]:
        """Facts that a user should know."""
        found = [f"{count} of {size} numbers of {name}" for name, (count, size) in self.excused.items()]
        return [f"decided by rounding, in {self._own.framework} as well: {', '.join(found)}"] if found else []

    def compare(self, batches: Iterable[Arrays], first: Arrays) -> None:
        """Compare steps in a row.

        Args:
            batches: a value for each input that is no state, for each step.
            first: the first values of the carried inputs, and of constants.

        Raises:
            ExportError: ONNX Runtime refuses the step, a result differs, or the batch shows too little: the framework's
                own results are not finite, or rounding decides them all.
        """
        state = dict(first)
        with tempfile.TemporaryDirectory(prefix="graphscale-") as folder:
            path = Path(folder, "step.onnx")
            saving.save(self._model, path)
            run = make_runner(path)
            for number, batch in enumerate(batches, 1):
                found = run(batch | state)
                self._compare_step(number, batch, state, found)
                state |= {name: found[output] for output, name in self._own.pairs.items()}
        if not self._is_decided:
            what = "every gradient" if self._own.gradients else "all numbers that the step computes"
            raise ExportError(
                f"rounding decides {what} of the example batch, in {self._own.framework} as well, so that nothing is "
                "proven; pass another batch"
            )

    def _compare_step(self, number: int, batch: Arrays, state: Arrays, found: Arrays) -> None:
        own, given = self._own, {name: found[output] for output, name in self._own.gradients.items()}
        exact = own.run(number, batch, state, given)
        self._check_batch(number, state, exact)
        results = {name: self._numbers(name, found[name], exact, state) for name in exact if name not in state}
        for kind in {own.precision.get(name, "") for name in results}:
            least = float(np.finfo(kind).eps) if kind else 0.0
            wrong = [name for name in results if own.precision.get(name, "") == kind]
            for seed in range(_DRAWS):
                if not (wrong := [name for name in wrong if results[name].are_wrong]):
                    break
                rng = np.random.default_rng(seed)
                before = disturb(state, rng, least)
                try:
                    drawn = own.run(number, disturb(batch, rng, least), before, disturb(given, rng, 0.0))
                except ExportError:  # a check of the user's refuses the numbers
                    continue
                # With another loss, a branch such as a mask is another.
                if not any(self._numbers(name, drawn[name], exact, state).excused for name in own.losses):
                    for name in wrong:
                        results[name].add(self._compared(name, drawn, before))
        for name, numbers in results.items():
            self._judge(number, name, numbers)

    def _judge(self, number: int, name: str, numbers: Numbers) -> None:
        """Refuse a result, or add its errors to those of the comparison."""
        own = self._own
        if numbers.are_wrong:
            error, allowed = numbers.worst
            hint = "if this loss is almost zero, pass another batch; " if name in own.losses else ""
            raise ExportError(
                f"the exported step computes another {name} than {own.framework} in step {number}: off by {error:.1e} "
                f"of its largest {'change' if name in own.pairs else 'number'}, {allowed:.0e} is allowed; {hint}"
                "nothing is written"
            )
        self._errors[name] = max(self._errors.get(name, 0.0), numbers.error)
        if numbers.excused:
            count, _ = self.excused.get(name, (0, 0))
            self.excused[name] = max(numbers.excused, count), numbers.size
        if name in own.gradients or not own.gradients:
            self._is_decided |= numbers.are_decided

    def _compared(self, name: str, outputs: Arrays, before: Arrays) -> Any:
        """Return the numbers that errors are relative to: results, or changes of the state.

        The next value of a number that was not finite stands for its change.
        """
        value = outputs[name].astype(np.float64)
        if name not in self._own.pairs:
            return value
        first = before[self._own.pairs[name]]
        return value - np.where(np.isfinite(first), first, 0)

    def _numbers(self, name: str, got: Any, exact: Arrays, state: Arrays) -> Numbers:
        """Compare a result with that of the framework.

        Raises:
            ExportError: they differ in type or shape.
        """
        own, wanted = self._own, exact[name]
        if got.dtype != wanted.dtype or got.shape != wanted.shape:
            raise ExportError(
                f"the exported step gives {name} as {got.dtype}{list(got.shape)}, {own.framework} as "
                f"{wanted.dtype}{list(wanted.shape)}; nothing is written"
            )
        kind = wanted.dtype.name
        precision, slack = own.precision.get(name, kind), 0.0
        if name in own.gradients:
            slack = _ROUNDINGS * float(np.finfo(precision).smallest_subnormal)
        elif name in own.pairs and wanted.dtype.kind == "f":
            slack = _ROUNDINGS * float(np.finfo(kind).eps) * largest(wanted)
        tolerance, coarse = tolerance_of(kind), max(map(tolerance_of, (kind, precision)))
        return Numbers(
            got,
            wanted,
            self._compared(name, exact, state),
            # Draws do not show all rounding inside a float16 step: a gradient may be a sum that stays unchanged.
            # Where gradients are outputs, the other results need no such allowance.
            tolerance=coarse if name in own.gradients or not own.gradients else tolerance,
            coarse=coarse,
            slack=slack,
            least=_LEAST_LOSS if name in own.losses else 0.0,
            is_strict=name in own.losses,
        )

    def _check_batch(self, number: int, state: Arrays, exact: Arrays) -> None:
        """Refuse a step that is not finite, and one that assigns variables that the exported step keeps."""
        own = self._own
        for name in (*own.losses, *own.gradients, *own.pairs):
            value = exact[name]
            if value.dtype.kind != "f":
                continue
            # A state may be infinite from the start, as the best loss so far; its next value is compared exactly.
            old = state[own.pairs[name]] if name in own.pairs else np.zeros_like(value)
            kept = (np.isinf(value) & ~np.isfinite(old)) | (np.isnan(value) & np.isnan(old))
            if not (np.isfinite(value) | kept).all():
                options = ", or options of the optimizer" if name in own.pairs else ""
                raise ExportError(
                    f"{own.framework}'s own step {number} makes {name} infinite or NaN on the example batch; pass "
                    f"another batch{options}"
                )
        for name in state.keys() & exact.keys():
            if not np.array_equal(exact[name], state[name], equal_nan=state[name].dtype.kind == "f"):
                raise ExportError(
                    f"{own.framework}'s step changes {name}, the exported step keeps it; assign it in each step, "
                    "without a condition of Python"
                )
