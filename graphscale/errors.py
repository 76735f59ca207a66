"""Every error that graphscale raises on bad input.

Each message is one line: the fault, the place (file, node, value), and the remedy. The command line prints it and exits
with code 2.
"""

from __future__ import annotations

import contextlib
import difflib
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

# The address of the documentation, in messages and in files.
DOCS_URL = "https://graphscale.readthedocs.io/en/latest/"

_FEW = 12  # names that are listed
_LONGEST = 1000  # characters of a text from a library or a file
# Unicode's default-ignorable characters, invisible in terminals, as far as `str.isprintable` accepts them.
_HIDDEN = re.compile("[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u3164\ufe00-\ufe0f\uffa0\U000e0100-\U000e01ef]")


def printable(text: object) -> str:
    """Escape control, bidirectional and invisible characters of a text: `\\x1b`, `\\n`, `\\u202e`."""
    line = str(text)
    if line.isprintable() and not _HIDDEN.search(line):
        return line
    return "".join(ascii(c)[1:-1] if not c.isprintable() or _HIDDEN.match(c) else c for c in line)


def one_line(error: object) -> str:
    """Return the text of a library's error, or of a file, without line breaks, and cut to a limit."""
    text = " ".join(str(error).split())
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def suggest(name: str, names: Iterable[str | None], kind: str = "") -> str:
    """Return a hint to a name that does not exist: the nearest of the names, else all of them if they are few.

    Args:
        name: the name.
        names: those that exist.
        kind: begins the list of all, such as "its inputs are"; empty for no such list.
    """
    known = [each for each in names if each]
    if close := difflib.get_close_matches(str(name), known, 1):
        return f"; did you mean {close[0]!r}?"
    return f"; {kind} {', '.join(known)}" if kind and 0 < len(known) <= _FEW else ""


class GraphscaleError(Exception):
    """Base class of all errors on input that graphscale cannot accept."""


@contextlib.contextmanager
def reporting(kind: type[GraphscaleError], problem: str, *causes: type[Exception]) -> Iterator[None]:
    """Turn an error of a library, an OSError unless other `causes` are given, into one of graphscale's own.

    Give `Exception` as the cause where the exceptions of a library, such as ONNX Runtime, share no public base class.
    """
    caught = causes or (OSError,)
    try:
        yield
    except caught as error:
        raise kind(f"{problem}: {getattr(error, 'strerror', None) or one_line(error)}") from error


class ModelFileError(GraphscaleError):
    """The file is not a readable ONNX model (missing, truncated, of another format, or not sorted)."""


class UnsupportedModelError(GraphscaleError):
    """The model has a feature that the rewrite would lose or break, such as a graph in its `training_info`."""


class AlreadyScaledError(GraphscaleError):
    """The model already carries a loss scale: graphscale's, with or without its metadata, or its own."""


class InvalidLossScaleError(GraphscaleError, ValueError):
    """The loss scale, or its configuration, is not acceptable."""


class LossError(GraphscaleError):
    """The loss was not found, or the value named is not a scalar of a floating-point type."""


class SeedNotFoundError(GraphscaleError):
    """No place was found where the loss scale can enter the backward pass."""


class NonlinearGradientError(GraphscaleError):
    """A gradient is not linear in the seed, as in a gradient penalty."""


class UnknownOperatorError(GraphscaleError):
    """An operator without a degree rule stands on the gradient path."""


class GradientError(GraphscaleError):
    """A value named as a gradient does not exist, or the scale does not reach it."""


class UpdateError(GraphscaleError):
    """The pairs of the carried state (weights, moments, counters) are in doubt."""


class RolesError(UpdateError):
    """The role of an output is open, or an answer about roles contradicts the graph.

    Attributes:
        table: the roles with proposals for those that are open (a `RoleTable`), or None.
    """

    def __init__(self, message: str, table: object = None) -> None:
        super().__init__(message)
        self.table = table


class TargetError(GraphscaleError):
    """The target does not exist, or cannot load a model of this opset or IR version."""


class PassOrderError(GraphscaleError):
    """A pass ran before another pass that it needs."""


class ProofError(GraphscaleError):
    """The rewritten graph failed the static proof. This is a defect of graphscale, not of the input."""


class TrialError(GraphscaleError):
    """The scaled step does other things than its original when both run, or a skip does not keep its state finite."""


class OutputError(GraphscaleError):
    """The result cannot be written to the given path."""


class SessionError(GraphscaleError):
    """A training session got feeds or state that do not fit its graph."""


class AutocastError(GraphscaleError):
    """A graph cannot be put into mixed precision, or the lists of operators are not acceptable."""


class TrainingError(GraphscaleError):
    """The data, the checkpoint, the metrics or a setting of a training run does not fit."""


class VerifyError(GraphscaleError):
    """Two graphs cannot be compared: they do not belong together, or one cannot be run on the feeds."""


class LintError(GraphscaleError):
    """A lint code does not exist, or there is nothing to lint in an inference graph."""


class SplitError(GraphscaleError):
    """A step cannot be cut at its gradients, or not at the given ones."""


class ReplicaError(GraphscaleError):
    """Replicas do not agree, one of them has failed or does not answer, or MPI is missing."""


class ExportError(GraphscaleError):
    """A framework's training step cannot be exported, or the exported file computes other values than the framework."""
