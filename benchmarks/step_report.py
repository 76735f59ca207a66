"""The tables of step_cost.py: the cost of loss scaling in a training step."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from training_steps.sides import PLAIN, Time

__all__ = ["FRAMEWORKS", "PEERS", "cells", "report", "table"]

FRAMEWORKS = {
    "onnx": "ONNX Runtime",
    "folder": "ONNX Runtime's training session",
    "torch": "PyTorch",
    "tensorflow": "TensorFlow",
    "keras": "Keras",
}
PEERS = ("torch", "tensorflow", "keras")  # each has one way with a loss scale
FILE, SESSION, HOST = "file", "session", "host"
# The columns of the first table: graphscale's ways, and what a user would do without it.
COSTS = {
    "file": ("onnx", FILE),
    "file, one buffer": ("onnx", "one buffer"),
    "folder": ("folder", "scaled"),
    "`gs.Session`": ("onnx", SESSION),
    "PyTorch's GradScaler": ("torch", "GradScaler"),
    "TensorFlow's optimizer": ("tensorflow", "MixedPrecisionLossScaleOptimizer"),
    "Keras's optimizer": ("keras", "LossScaleOptimizer"),
    "a rule on the host": ("onnx", HOST),
}
MOST_OF_FILE, MOST_OF_TRANSFORMER, MOST_OF_FOLDER = 1.05, 1.03, 1.06  # what is asked for

Sides = Mapping[str, Sequence[Time]]
Times = Mapping[str, Sides]


def ratio(times: Sides, side: str, what: str) -> tuple[float, float, float]:
    """The quartiles of the ratio to the unscaled step, the median in the middle."""
    pairs = zip(times[side], times[PLAIN], strict=True)
    low, middle, high = statistics.quantiles([getattr(one, what) / getattr(two, what) for one, two in pairs], n=4)
    return low, middle, high


def cells(times: Sides, what: str) -> list[str]:
    """The milliseconds of the unscaled step, and the ratio of each other way."""
    plain = 1e3 * statistics.median(getattr(time, what) for time in times[PLAIN])
    found = [f"{plain:,.2f}" if plain < 100 else f"{plain:,.0f}"]
    for side in times:
        if side != PLAIN:
            low, middle, high = ratio(times, side, what)
            found.append(f"{middle:.3f} ({low:.3f} to {high:.3f})")
    return found


def costs(times: Times, what: str) -> list[str]:
    """The first table's row: the percentages that each way adds to its framework's unscaled step, with quartiles."""
    found = []
    for framework, side in COSTS.values():
        if framework in times:
            # 0.0 makes +0.0 of -0.0
            low, middle, high = (round(100 * (value - 1), 1) + 0.0 for value in ratio(times[framework], side, what))
            found.append(f"{middle:+.1f} % ({low:+.1f} to {high:+.1f})")
    return found


def verdict(name: str, times: Times, what: str) -> list[str]:
    """Hold the file, the folder and the session against what is asked of them."""
    found = []
    if "onnx" in times:
        most = MOST_OF_TRANSFORMER if name.startswith("transformer") else MOST_OF_FILE
        file, session, host = (ratio(times["onnx"], side, what) for side in (FILE, SESSION, HOST))
        found.append(_answer(file[1] <= most))
        found += [_below(file, times[peer], what) for peer in times if peer in PEERS]
        found.append(_answer(session[1] - 1 < (host[1] - 1) / 2))
    if "folder" in times:
        found.append(_answer(ratio(times["folder"], "scaled", what)[1] <= MOST_OF_FOLDER))
    return found


def _answer(holds: bool) -> str:
    return "yes" if holds else "no"


def _below(ours: tuple[float, float, float], times: Sides, what: str) -> str:
    [theirs] = [ratio(times, side, what) for side in times if side != PLAIN]
    if ours[2] < theirs[0] or theirs[2] < ours[0]:
        return _answer(ours[1] < theirs[1])
    return f"{_answer(ours[1] < theirs[1])}, within the noise"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown."""
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def summary(found: Mapping[str, Times], what: str) -> str:
    """The first table in one measure, `wall` or `cpu`."""
    measured = next(iter(found.values()))
    header = ["workload", *(title for title, (framework, _) in COSTS.items() if framework in measured)]
    return table(header, [[name, *costs(times, what)] for name, times in found.items()])


def details(found: Mapping[str, Times], what: str) -> str:
    """The tables of each framework in one measure, and that of what is asked for."""
    first = next(iter(found.values()))
    parts = []
    for framework, sides in first.items():
        header = ["workload", f"{FRAMEWORKS[framework]}, plain, ms", *(side for side in sides if side != PLAIN)]
        parts.append(table(header, [[name, *cells(times[framework], what)] for name, times in found.items()]))
    header = ["workload"]
    if "onnx" in first:
        peers = [f"file below {FRAMEWORKS[peer]}" for peer in first if peer in PEERS]
        header += [f"file <= {MOST_OF_FILE}, transformer {MOST_OF_TRANSFORMER}", *peers, "session below half of host"]
    if "folder" in first:
        header.append(f"folder <= {MOST_OF_FOLDER}")
    if len(header) > 1:
        parts.append(table(header, [[name, *verdict(name, times, what)] for name, times in found.items()]))
    return "\n\n".join(parts)


def report(found: Mapping[str, Times], medians: str) -> str:
    """All tables, those of the first kind first.

    Args:
        found: `{workload: {framework: {side: its times}}}`.
        medians: over what they are, such as `15 rounds`.
    """
    titles = {"wall": "wall time", "cpu": "CPU time of all threads"}
    said = f"medians of {medians}, with quartiles"
    parts = [f"Loss scaling adds in {title}; {said}:\n\n{summary(found, what)}" for what, title in titles.items()]
    parts += [f"Ratios of {title}; {said}:\n\n{details(found, what)}" for what, title in titles.items()]
    return "\n\n".join(parts)
