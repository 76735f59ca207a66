"""The comparison of an exported step with the framework's own step."""

from __future__ import annotations

import dataclasses
import os
import re
import tempfile
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from graphscale.errors import ExportError, one_line
from graphscale.exporters.rounding import CONDITION
from graphscale.files import model_files
from graphscale.files.tensor_files import Arrays
from graphscale.session.loading import make_quiet_options
from graphscale.targets import CPU_PROVIDER

__all__ = ["TOLERANCE", "ExportReport", "compare_steps", "make_runner"]

# Errors are relative to the largest number of a tensor. Float32 sums in another order differ by 1e-6 to 1e-5.
TOLERANCE = {"float64": 1e-6, "float32": 1e-4, "float16": 2e-2}
# The limit of an excused error: some tolerances if the distance that excuses it is within the tolerance, else some of
# the tensor's largest distances.
_WITHIN, _BEYOND = 3, 2
# Number of characters of a reason in a message.
_LONGEST = 200


@dataclasses.dataclass(frozen=True)
class ExportReport:
    """The result of an export.

    Attributes:
        path: the file.
        framework: the framework of the step, with its version.
        nodes: number of nodes.
        inputs: names of the inputs to feed in each step.
        states: number of carried inputs, which have their values in the file.
        steps: number of steps that were compared.
        errors: largest error of each output in these steps, relative to the largest number of the tensor.
        notes: facts that a user should know, one sentence each.
    """

    path: str
    framework: str
    nodes: int
    inputs: tuple[str, ...]
    states: int
    steps: int
    errors: Mapping[str, float]
    notes: tuple[str, ...] = ()

    @property
    def largest_error(self) -> float:
        """The largest error of all outputs."""
        return max(self.errors.values(), default=0.0)

    def __str__(self) -> str:
        worst = max(self.errors, key=lambda name: self.errors[name], default="")
        lines = [
            f"{self.path}: {self.nodes} nodes, {self.states} carried states; feed {', '.join(self.inputs)}",
            f"{self.steps} steps on ONNX Runtime are within {self.largest_error:.1e} of {self.framework} ({worst})",
        ]
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])


def compare_steps(
    model: ir.Model,
    batch: Arrays,
    first: Arrays,
    pairs: Mapping[str, str],
    expected: Sequence[Arrays],
    losses: Collection[str],
    draws: Iterable[Sequence[Arrays]] = (),
    narrowest: str = "",
) -> dict[str, float]:
    """Run an exported step on ONNX Runtime, and compare each output with the framework's.

    Each number must be within TOLERANCE. One that the framework's own rounding moves may be off by a multiple of this
    distance. Below the tolerance that is a few tolerances. Above it the multiple has no fixed limit: of such numbers,
    be they one or all of a tensor, the size alone is proven. The losses of the first step are never excused, for no
    update takes part in them.

    Args:
        model: the step.
        batch: a value for each input that is no state.
        first: first values of the carried inputs.
        pairs: the output with the next value of each carried input, `{output: input}`.
        expected: outputs of the framework's own step, one mapping for each step in a row.
        losses: names of the losses.
        draws: the same from numbers that differ by their rounding, as often as they are needed. One that changes a loss
            of the first step by more than its tolerance does not count.
        narrowest: the narrowest floating-point type that the step computes in, if that is not the type of its outputs.

    Returns:
        The largest error of each output, relative to the largest number of the tensor.

    Raises:
        ExportError: ONNX Runtime refuses the step, or a number is off by more than is allowed.
    """
    least, errors = TOLERANCE.get(narrowest, 0.0), dict.fromkeys(expected[0], 0.0)
    far: list[_Output] = []
    with tempfile.TemporaryDirectory(prefix="graphscale-") as folder:
        path = Path(folder, "step.onnx")
        model_files.save(model, path)
        run, state = make_runner(path), dict(first)
        for number, wanted in enumerate(expected):
            outputs = run(batch | state)
            for name, value in wanted.items():
                output = _Output(name, number, outputs[name], value, least)
                errors[name] = max(errors[name], output.error)
                if output.is_far():
                    far.append(output)
            state = {target: outputs[source] for source, target in pairs.items()}
    strict = [output for output in far if output.number == 0 and output.name in losses]
    source = iter(draws)
    while far and not strict and (draw := next(source, None)) is not None:
        if any(_Output(name, 0, draw[0][name], expected[0][name], least).is_far() for name in losses):
            continue
        for output in far:
            output.add(draw[output.number][output.name])
        far = [output for output in far if output.is_far()]
    if refused := strict or far:
        raise refused[0].refusal()
    return errors


class _Output:
    """The numbers of an output of one step, and those of the framework.

    Args:
        name: the output.
        number: the number of the step, from 0.
        actual: the value.
        wanted: the framework's.
        least: the least tolerance of floating-point numbers.

    Attributes:
        error: the largest error, relative to the largest number.

    Raises:
        ExportError: the values differ in type or shape.
    """

    def __init__(self, name: str, number: int, actual: np.ndarray[Any, Any], wanted: Any, least: float) -> None:
        value = np.asarray(wanted)
        if actual.dtype != value.dtype or actual.shape != value.shape:
            raise ExportError(
                f"the exported step gives {name} as {actual.dtype}{list(actual.shape)}, the framework as "
                f"{value.dtype}{list(value.shape)}; nothing is written"
            )
        self.name, self.number = name, number
        got, self._want = actual.astype(np.float64), value.astype(np.float64)
        self._scale = np.abs(self._want[np.isfinite(self._want)]).max(initial=1e-30)
        self._tolerance = max(TOLERANCE[value.dtype.name], least) if value.dtype.name in TOLERANCE else 0.0
        self._distances = np.zeros(value.shape)
        with np.errstate(invalid="ignore"):
            same = (got == self._want) | (np.isnan(got) & np.isnan(self._want))
            errors = np.where(same, 0.0, np.abs(got - self._want) / self._scale)
        self._errors = np.where(np.isnan(errors), np.inf, errors)
        self.error = float(self._errors.max(initial=0.0))

    def add(self, draw: Any) -> None:
        """Add the framework's value from numbers that differ by their rounding."""
        with np.errstate(invalid="ignore"):
            distances = np.abs(np.asarray(draw, np.float64) - self._want) / self._scale
        self._distances = np.maximum(self._distances, np.where(np.isfinite(distances), distances, 0.0))

    def _allowed(self) -> Any:
        """Return the error that is allowed for each number."""
        distances, tolerance = self._distances, self._tolerance
        most = np.where(distances > tolerance, _BEYOND * distances.max(initial=0.0), _WITHIN * tolerance)
        return np.maximum(tolerance, np.minimum(CONDITION * distances, most))

    def is_far(self) -> bool:
        """Report whether a number is off by more than is allowed."""
        return bool((self._errors > self._allowed()).any())

    def refusal(self) -> ExportError:
        """Return the error about the number that is furthest off."""
        allowed = self._allowed()
        worst = np.argmax(np.where(self._errors > allowed, self._errors, 0.0))
        return ExportError(
            f"the exported step computes another {self.name} than the framework in step {self.number + 1}: off by "
            f"{self._errors.flat[worst]:.1e} of its largest number, {allowed.flat[worst]:.0e} is allowed; nothing is "
            "written"
        )


def make_runner(path: Path) -> Callable[[Arrays], Arrays]:
    """Load a step on ONNX Runtime; return the function from feeds to all outputs, by name.

    Raises:
        ExportError: ONNX Runtime refuses the step, now or in a call.
    """
    import onnxruntime as ort

    try:
        session = ort.InferenceSession(os.fspath(path), make_quiet_options(), providers=[CPU_PROVIDER])
    except Exception as error:  # those of ONNX Runtime share no public base class
        raise ExportError(f"ONNX Runtime {ort.__version__} cannot load the exported step: {_reason(error)}") from error
    names = [output.name for output in session.get_outputs()]
    known = {value.name for value in (*session.get_inputs(), *session.get_overridable_initializers())}

    def run(feeds: Arrays) -> Arrays:
        fed = {name: value for name, value in feeds.items() if name in known}
        try:
            return dict(zip(names, session.run(names, fed), strict=True))
        except Exception as error:
            raise ExportError(
                f"ONNX Runtime {ort.__version__} cannot run the exported step: {_reason(error)}"
            ) from error

    return run


def _reason(error: Exception) -> str:
    """Return the reason in a message of ONNX Runtime, without its codes and the path of the file."""
    text = re.sub(r"^\[ONNXRuntimeError\] : \d+ : \w+ : |Load model from .*? failed: ?", "", one_line(error))
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST].rstrip()}..."
