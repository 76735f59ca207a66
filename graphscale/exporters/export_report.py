"""The report of an export, and the run of an exported step on ONNX Runtime."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path

from graphscale.errors import ExportError, one_line
from graphscale.files.tensor_files import Arrays
from graphscale.session.loading import make_quiet_options
from graphscale.targets import CPU_PROVIDER

__all__ = ["ExportReport", "make_runner"]

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
