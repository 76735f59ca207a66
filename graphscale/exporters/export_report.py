"""The comparison of an exported step with the framework's own step."""

from __future__ import annotations

import dataclasses
import os
import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from graphscale.errors import ExportError, one_line
from graphscale.files import model_files
from graphscale.files.tensor_files import Arrays
from graphscale.session.loading import make_quiet_options

__all__ = ["TOLERANCE", "ExportReport", "compare_steps", "make_runner"]

# Errors are relative to the largest number of a tensor. Float32 sums in another order differ by 1e-6 to 1e-5.
TOLERANCE = {"float64": 1e-6, "float32": 1e-4, "float16": 2e-2}
# A framework whose own result is this far from its float64 result cannot be met any closer.
_CONDITION = 10
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
    exact: Sequence[Arrays] | None = None,
    narrowest: str = "",
) -> dict[str, float]:
    """Run an exported step on ONNX Runtime, and compare each output with the framework's.

    Args:
        model: the step.
        batch: a value for each input that is no state.
        first: first values of the carried inputs.
        pairs: the output with the next value of each carried input, `{output: input}`.
        expected: outputs of the framework's own step, one mapping for each step in a row.
        exact: the same in float64, where the framework could compute it: an output may be as far from the framework's
            as a multiple of that one's own rounding.
        narrowest: the narrowest floating-point type that the step computes in, if that is not the type of its outputs.

    Returns:
        The largest error of each output, relative to the largest number of the tensor.

    Raises:
        ExportError: ONNX Runtime refuses the step, or an output is off by more than TOLERANCE.
    """
    with tempfile.TemporaryDirectory(prefix="graphscale-") as folder:
        path = Path(folder, "step.onnx")
        model_files.save(model, path)
        return _compare(make_runner(path), batch, dict(first), pairs, expected, exact, TOLERANCE.get(narrowest, 0.0))


def _compare(
    run: Callable[[Arrays], Arrays],
    batch: Arrays,
    state: Arrays,
    pairs: Mapping[str, str],
    expected: Sequence[Arrays],
    exact: Sequence[Arrays] | None,
    least: float,
) -> dict[str, float]:
    errors = dict.fromkeys(expected[0], 0.0)
    for number, wanted in enumerate(expected):
        outputs = run(batch | state)
        for name, value in wanted.items():
            precise = None if exact is None else exact[number].get(name)
            error, allowed = _error_of(name, outputs[name], value, precise, least)
            if not error <= allowed:
                raise ExportError(
                    f"the exported step computes another {name} than the framework in step {number + 1}: off by "
                    f"{error:.1e} of its largest number, {allowed:.0e} is allowed; nothing is written"
                )
            errors[name] = max(errors[name], error)
        state = {target: outputs[source] for source, target in pairs.items()}
    return errors


def make_runner(path: Path) -> Callable[[Arrays], Arrays]:
    """Load a step on ONNX Runtime; return the function from feeds to all outputs, by name.

    Raises:
        ExportError: ONNX Runtime refuses the step, now or in a call.
    """
    import onnxruntime as ort

    try:
        session = ort.InferenceSession(os.fspath(path), make_quiet_options(), providers=["CPUExecutionProvider"])
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


def _error_of(name: str, actual: np.ndarray[Any, Any], wanted: Any, exact: Any, least: float) -> tuple[float, float]:
    """Return the error of an output, relative to its largest number, and the error that is allowed."""
    value = np.asarray(wanted)
    if actual.dtype != value.dtype or actual.shape != value.shape:
        raise ExportError(
            f"the exported step gives {name} as {actual.dtype}{list(actual.shape)}, the framework as "
            f"{value.dtype}{list(value.shape)}; nothing is written"
        )
    got, want = actual.astype(np.float64), value.astype(np.float64)
    same = (got == want) | (np.isnan(got) & np.isnan(want))
    if same.all():
        return 0.0, 0.0
    scale = np.abs(want[np.isfinite(want)]).max(initial=1e-30)
    with np.errstate(invalid="ignore"):
        error = float(np.where(same, 0.0, np.abs(got - want)).max() / scale)
        allowed = max(TOLERANCE[value.dtype.name], least) if value.dtype.name in TOLERANCE else 0.0
        if exact is not None:
            distance = np.abs(want - np.asarray(exact, np.float64))
            rounding = float(np.where(np.isfinite(distance), distance, 0.0).max() / scale)
            allowed = max(allowed, _CONDITION * rounding)
    return (np.inf if np.isnan(error) else error), allowed
