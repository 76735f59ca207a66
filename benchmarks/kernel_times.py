"""Times of kernels, from ONNX Runtime's profiler."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import onnxruntime as ort

__all__ = ["Kernel", "inserted", "inserted_kernels", "least", "parts", "profile_in", "profiled", "runs_of"]

_KERNEL = "_kernel_time"
_EXECUTOR = "SequentialExecutor::Execute"
_UNNAMED = "graphscale/unnamed."  # what gs.Session calls a node of the original that has no name
_FUNCTION = "_inlfunc_UpdateLossScale"  # what ONNX Runtime calls the nodes of this function, once it is inlined


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A kernel that ran.

    Attributes:
        name: of the node; of a fused node it contains the names of those that it came from, or of one of them.
        op_type: of the node.
        seconds: that it took, those of its branches left out.
    """

    name: str
    op_type: str
    seconds: float


def profiled(options: ort.SessionOptions, folder: Path, name: str) -> ort.SessionOptions:
    """Let a session write a profile to a folder, at its end."""
    options.enable_profiling = True
    options.profile_file_prefix = str(folder / name)
    return options


def profile_in(folder: Path, name: str) -> Path:
    """The profile that a session has written.

    Raises:
        FileNotFoundError: there is none, or there are several.
    """
    found = list(folder.glob(f"{name}_*.json"))
    if len(found) != 1:
        raise FileNotFoundError(f"{len(found)} profiles {name}_*.json in {folder}; is its session closed?")
    return found[0]


def runs_of(profile: Path) -> list[list[Kernel]]:
    """The kernels of each run of a session, in the order of their beginning.

    Raises:
        ValueError: the profile is not one of ONNX Runtime, or holds no run.
    """
    events = [_Span(event) for event in json.loads(profile.read_text()) if "dur" in event]
    runs = sorted((span for span in events if span.name == "model_run"), key=lambda span: span.begin)
    if not runs:
        raise ValueError(f"{profile}: no run in it")
    kernels = sorted((span for span in events if span.name.endswith(_KERNEL)), key=lambda span: span.begin)
    executors = sorted((span for span in events if span.name == _EXECUTOR), key=lambda span: (span.begin, -span.end))
    return [
        [
            Kernel(span.name.removesuffix(_KERNEL), span.op_type, 1e-6 * (span.length - _branches(span, executors)))
            for span in kernels
            if run.holds(span)
        ]
        for run in runs
    ]


class _Span:
    """An event of a profile; times are in microseconds."""

    def __init__(self, event: Mapping[str, Any]) -> None:
        self.name: str = event["name"]
        self.op_type: str = event.get("args", {}).get("op_name", "")
        self.length: float = event["dur"]
        self.begin: float = event["ts"]
        self.end = self.begin + self.length

    def holds(self, other: _Span) -> bool:
        return self.begin <= other.begin and other.end <= self.end


def _branches(kernel: _Span, executors: Iterable[_Span]) -> float:
    """Return the time of the executors of a control-flow operator's branches."""
    if kernel.op_type not in ("If", "Loop", "Scan"):
        return 0.0
    total, end = 0.0, kernel.begin
    for span in executors:
        if kernel.holds(span) and span.begin >= end:  # one that begins earlier is part of the one before
            total, end = total + span.length, span.end
    return total


def inserted(name: str) -> bool:
    """Return whether a node is or holds one that graphscale inserted, by its name in a profile."""
    return ("graphscale/" in name and not name.startswith(_UNNAMED)) or _FUNCTION in name


def inserted_kernels(runs: Iterable[Iterable[Kernel]]) -> list[list[Kernel]]:
    """Select the kernels that graphscale inserted, in each run."""
    return [[kernel for kernel in run if inserted(kernel.name)] for run in runs]


def least(runs: Sequence[Sequence[Kernel]]) -> float:
    """The seconds of a run if each kernel took its least time: other work on the machine makes kernels only slower."""
    times: dict[str, float] = {}
    for kernel in itertools.chain(*runs):
        times[kernel.name] = min(kernel.seconds, times.get(kernel.name, math.inf))
    return sum(times.values())


def parts(runs: Sequence[Sequence[Kernel]]) -> dict[str, float]:
    """Divide runs into parts, `{pass and operator: its share of the medians}`, the largest first."""
    found: list[dict[str, float]] = []
    for run in runs:
        found.append({})
        for kernel in run:
            part = f"{_pass_of(kernel.name)} {kernel.op_type}"
            found[-1][part] = found[-1].get(part, 0.0) + kernel.seconds
    medians = {part: statistics.median(run.get(part, 0.0) for run in found) for part in set().union(*found)}
    whole = sum(medians.values())
    return {part: medians[part] / whole for part in sorted(medians, key=lambda part: -medians[part])}


def _pass_of(name: str) -> str:
    """The pass that inserted a node."""
    return "update-scale" if _FUNCTION in name else name.partition("graphscale/")[2].partition("/")[0]
