"""Comparison of an exported step, run by ONNX Runtime, with Keras's own steps."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx_ir as ir

from graphscale.errors import ExportError
from graphscale.exporters.export_report import TOLERANCE, make_runner
from graphscale.exporters.rounding import CONDITION, DRAWS, disturb
from graphscale.exporters.step_file import gradient_name
from graphscale.exporters.tensorflow.keras_step import LOSS, KerasStep
from graphscale.exporters.tensorflow.pure_step import PureStep
from graphscale.files import model_files
from graphscale.files.tensor_files import Arrays

__all__ = ["KerasComparison"]

# A weight is rounded once or twice in each step, in units of its own type.
_ROUNDINGS = 4
# A gradient whose largest number may be off by more than this part of it shows nothing.
_DECIDED = 0.5


class _Results(NamedTuple):
    """Results of a step: the loss, the metrics and the gradients; the variables before and after it."""

    outputs: Arrays
    before: Arrays
    after: Arrays

    def output(self, name: str) -> Any:
        """Return a result that is no variable."""
        return self.outputs[name].astype(np.float64)

    def change(self, name: str) -> Any:
        """Return the change of a variable; the next value of a number that was not finite."""
        before = self.before[name]
        return self.after[name].astype(np.float64) - np.where(np.isfinite(before), before, 0)


class KerasComparison:
    """A comparison of an exported step with Keras's, each step from the values that the exported one left.

    An optimizer such as Adam divides a gradient by its own size, so that the rounding of a gradient near zero becomes a
    whole update. Therefore the gradients are compared with those of Keras, and the updates with those that Keras's own
    optimizer makes of the gradients of the exported step.

    Where an error is above its tolerance, Keras computes the step again from numbers that differ by their rounding, and
    some multiples of its own error are allowed, for each number of a tensor by itself.

    Args:
        model: the step, with the gradients among its outputs.
        step: Keras's step.
        pure: the traced step.
        gradients: the names of its gradients.

    Attributes:
        noise: names of the results that rounding decides.
    """

    def __init__(self, model: ir.Model, step: KerasStep, pure: PureStep, gradients: Sequence[str]) -> None:
        self._model, self._step, self._pure, self._gradients = model, step, pure, gradients
        self._unit = float(np.finfo(step.precision).eps)
        self._statistics = {variable.path for variable in step.model.non_trainable_variables}
        self._errors: dict[str, float] = {}
        self._decided: set[str] = set()  # gradients whose largest number is no rounding
        self.noise: set[str] = set()

    @property
    def errors(self) -> dict[str, float]:
        """The largest error of each other result, relative to the largest number of the tensor."""
        return {name: error for name, error in self._errors.items() if name not in self.noise}

    def compare(self, batch: Arrays, count: int) -> None:
        """Compare some steps in a row on a batch.

        Raises:
            ExportError: ONNX Runtime refuses the step, a result differs, or the batch shows too little: Keras's own
                loss, gradients or next values are not finite, or rounding decides every gradient.
        """
        state = {name: self._pure.first[name] for name in self._pure.pairs.values()}
        with tempfile.TemporaryDirectory(prefix="graphscale-") as folder:
            path = Path(folder, "step.onnx")
            model_files.save(self._model, path)
            run = make_runner(path)
            for number in range(count):
                found = run(batch | state)
                self._compare_step(number + 1, batch, state, found)
                state = {name: found[output] for output, name in self._pure.pairs.items()}
        if not self._decided:
            raise ExportError(
                "rounding decides every gradient of the example batch, in Keras as well, so that none can be compared; "
                "pass another batch"
            )

    def _compare_step(self, number: int, batch: Arrays, state: Arrays, found: Arrays) -> None:
        given = {name: found[gradient_name(name)] for name in self._gradients}

        @functools.cache
        def run(least: float, draw: int | None) -> _Results:
            rng = None if draw is None else np.random.default_rng(draw)
            with self._step.unchanged(), self._step.users_code(f"run in step {number} of the comparison"):
                self._step.assign(state)
                self._step.assign(disturb(self._step.values(), rng, least))
                before = self._step.values()
                fed, gradients = disturb(batch, rng, least), disturb(given, rng, 0)
                outputs, own, after = self._step.run_eagerly(fed, gradients)
            return _Results(outputs | {gradient_name(name): value for name, value in own.items()}, before, after)

        exact = run(0, None)
        self._check_batch(number, exact)
        steady = self._tolerance * _largest(exact.output(LOSS))

        def spread(name: str, read: Callable[[_Results, str], Any], least: float) -> Callable[[int], Any]:
            def of_draw(draw: int) -> Any:
                try:
                    drawn = run(least, draw)
                except ExportError:  # a check of the user's refuses the numbers
                    return 0.0
                if (
                    not np.abs(drawn.output(LOSS) - exact.output(LOSS)) <= steady
                ):  # a branch, such as a mask, is another
                    return 0.0
                with np.errstate(invalid="ignore"):
                    return np.nan_to_num(np.abs(read(drawn, name) - read(exact, name)), nan=0, posinf=0)

            return of_draw

        least_number = float(np.finfo(self._step.precision).smallest_subnormal)
        for name, wanted in exact.outputs.items():
            is_gradient = name in map(gradient_name, given)
            kind = self._step.precision if is_gradient else wanted.dtype
            pair = _Pair(name, found[name], wanted, wanted, _ROUNDINGS * least_number if is_gradient else 0.0)
            most = self._tolerance if name == LOSS and number == 1 else np.inf
            allowed = self._check(
                number, pair, TOLERANCE.get(kind.name, 0.0), spread(name, _Results.output, self._unit), most
            )
            if is_gradient and allowed <= _DECIDED:
                self._decided.add(name)
        for output, name in self._pure.pairs.items():
            wanted = exact.after[name]
            unit = float(np.finfo(wanted.dtype).eps) if wanted.dtype.kind == "f" else 0.0
            pair = _Pair(output, found[output], wanted, exact.change(name), _ROUNDINGS * unit * _largest(wanted))
            least = self._unit if name in self._statistics else 0.0
            self._check(number, pair, TOLERANCE.get(wanted.dtype.name, 0.0), spread(name, _Results.change, least))

    @property
    def _tolerance(self) -> float:
        return TOLERANCE[self._step.precision.name]

    def _check_batch(self, number: int, exact: _Results) -> None:
        """Refuse a step of Keras that is not finite, and one that assigns variables that the exported step keeps."""
        named = (LOSS, *map(gradient_name, self._gradients))
        found = {name: ~np.isfinite(exact.outputs[name]) for name in named}
        for name in self._pure.pairs.values():
            if exact.after[name].dtype.kind == "f":
                found[name] = np.isfinite(exact.before[name]) & ~np.isfinite(exact.after[name])
        for name, broken in found.items():
            if broken.any():
                raise ExportError(
                    f"Keras's own step {number} makes {name} infinite or NaN on the example batch; pass another batch"
                )
        carried = set(self._pure.pairs.values())
        for name, value in exact.after.items():
            if name not in carried and not np.array_equal(value, exact.before[name], equal_nan=True):
                raise ExportError(
                    f"Keras's step changes {name}, the exported step keeps it; assign it in each step, without a "
                    "condition of Python"
                )

    def _check(
        self, number: int, pair: _Pair, limit: float, spread: Callable[[int], Any], most: float = np.inf
    ) -> float:
        """Compare a result.

        Args:
            number: the number of the step, from 1.
            pair: the result.
            limit: the error that is allowed at first, relative to the largest number.
            spread: returns Keras's own error of each number in a draw of the rounding.
            most: the error that is allowed at last.

        Returns:
            The error that is allowed to the largest number, relative to it.

        Raises:
            ExportError: an error is larger.
        """
        got, wanted = pair.got, pair.wanted
        if got.dtype != wanted.dtype or got.shape != wanted.shape:
            raise ExportError(
                f"the exported step gives {pair.name} as {got.dtype}{list(got.shape)}, Keras as "
                f"{wanted.dtype}{list(wanted.shape)}; nothing is written"
            )
        a, b = got.astype(np.float64), wanted.astype(np.float64)
        with np.errstate(invalid="ignore"):
            off = np.where((a == b) | (np.isnan(a) & np.isnan(b)), 0.0, np.abs(a - b))
        off = np.nan_to_num(off, nan=np.inf, posinf=np.inf)
        scale, worst = _largest(pair.scale), float(off.max(initial=0))
        if worst > max(self._tolerance * scale, pair.slack):
            self.noise.add(pair.name)
        allowed = np.full(off.shape, max(limit * scale, pair.slack))
        draws = iter(range(DRAWS))
        while (off > allowed).any() and (draw := next(draws, None)) is not None:
            allowed = np.minimum(np.maximum(allowed, CONDITION * spread(draw)), max(most * scale, pair.slack))
        if (off > allowed).any():
            place = np.argmax(off - allowed)
            hint = "if this loss is almost zero, pass another batch; " if pair.name == LOSS else ""
            raise ExportError(
                f"the exported step computes another {pair.name} than Keras in step {number}: off by "
                f"{off.flat[place] / scale:.1e} of its largest {'number' if pair.scale is wanted else 'change'}, "
                f"{allowed.flat[place] / scale:.0e} is allowed; {hint}nothing is written"
            )
        self._errors[pair.name] = max(self._errors.get(pair.name, 0.0), worst / _largest(b))
        return float(allowed.flat[np.argmax(np.abs(b))] / scale) if b.size else 0.0


class _Pair(NamedTuple):
    """A result of the exported step and of Keras, the numbers that an error is relative to, and an error to ignore."""

    name: str
    got: Any
    wanted: Any
    scale: Any
    slack: float


def _largest(values: Any) -> float:
    return float(np.abs(values[np.isfinite(values)]).max(initial=1e-30))
