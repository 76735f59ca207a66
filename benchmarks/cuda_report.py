"""The tables of cuda_step.py."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from step_report import table
from training_steps.device_graphs import HOST, LOOP, PORTABLE, SESSION
from training_steps.sides import PLAIN

__all__ = ["FRAMEWORKS", "report"]

FRAMEWORKS = {"onnx": "ONNX Runtime", "torch": "PyTorch"}
NOTHING = "—"
# The cost of loss scaling: a way, and the same without.
ADDED = {
    "gs.Session, float32": ("onnx", SESSION, PLAIN),
    "loop, float32": ("onnx", LOOP, PLAIN),
    "loop, check of `onnx`": ("onnx", PORTABLE, PLAIN),
    "on the host, float32": ("onnx", HOST, PLAIN),
    "GradScaler, float32": ("torch", "GradScaler", PLAIN),
    "gs.Session, float16": ("onnx", f"float16-{SESSION}", "float16"),
    "on the host, float16": ("onnx", f"float16-{HOST}", "float16"),
    "GradScaler, float16": ("torch", "float16-GradScaler", "float16"),
}
COUNTED = """Memcpy: MemcpyToHost and MemcpyFromHost nodes in the graphs that ONNX Runtime executes. On the CPU: nodes
that it placed on its CPU provider, by the profile of a step, and how many of them graphscale inserted. Copies: tensors
that come to the host in a step whose loss is not fetched, by such nodes or by the loop. Syncs: of ONNX Runtime these
copies, and one for each run of a session, at whose end it waits for its streams (a condition of an If that is made on
the GPU comes by a Memcpy node, and is counted there); of PyTorch what its debug mode warns of. Check: CUDA kernels of
the finite check, counted in the graph that ONNX Runtime executes. GB: of ONNX Runtime what the driver has less after
some steps, kernels and libraries included; of PyTorch the most that its allocator has held. Distance: that of the
weights from the plain ones after the first steps, over the way that these have gone."""

Found = Mapping[str, Mapping[str, Any]]


def report(found: Found) -> str:
    """All tables, of what `measure` has found of each workload."""
    first = next(iter(found.values()))
    parts = []
    for framework in first["seconds"]:
        sides = dict.fromkeys(side for name in found for side in _all_sides(found[name], framework))
        header = ["workload", f"{FRAMEWORKS[framework]}, plain, ms", *(side for side in sides if side != PLAIN)]
        parts.append(table(header, [[name, *_times(found[name], framework, list(sides))] for name in found]))
    added = [title for title, (framework, *_) in ADDED.items() if framework in first["seconds"]]
    rows = [[name, *(_added(found[name]["seconds"], *ADDED[title]) for title in added)] for name in found]
    parts.append(f"What loss scaling adds:\n\n{table(['workload', *added], rows)}")
    header = ["step", "Memcpy", "in branches", "on the CPU", "inserted", "copies", "syncs", "check", "GB", "distance"]
    rows = [
        [f"{name}, {FRAMEWORKS[framework]}, {side}", *_facts(facts), f"{checks[framework][side]['distance']:.1e}"]
        for name, checks in ((name, each["checks"]) for name, each in found.items())
        for framework, sides in found[name]["facts"].items()
        for side, facts in sides.items()
    ]
    parts.append(f"In a step:\n\n{table(header, rows)}\n\n{COUNTED}")
    reasons = {
        f"Without {side} of {FRAMEWORKS[framework]}: {reason}."
        for each in found.values()
        for framework, sides in each["left_out"].items()
        for side, reason in sides.items()
    }
    dropped = [
        f"{name}: {each['dropped']} rounds did not count, since a step was skipped."
        for name, each in found.items()
        if each["dropped"]
    ]
    return "\n\n".join([*parts, *sorted(reasons), *dropped])


def _all_sides(found: Mapping[str, Any], framework: str) -> list[str]:
    return [*found["seconds"][framework], *found["left_out"][framework]]


def _times(found: Mapping[str, Any], framework: str, sides: Sequence[str]) -> list[str]:
    """The milliseconds of the plain step, and the ratio of each other way."""
    seconds = found["seconds"][framework]
    plain = 1e3 * statistics.median(seconds[PLAIN])
    cells = [f"{plain:,.2f}" if plain < 100 else f"{plain:,.0f}"]
    for side in sides:
        if side != PLAIN:
            cells.append(_ratio(seconds[side], seconds[PLAIN]) if side in seconds else NOTHING)
    return cells


def _ratio(ones: Sequence[float], others: Sequence[float]) -> str:
    low, middle, high = _quartiles(ones, others)
    return f"{middle:.3f} ({low:.3f} to {high:.3f})"


def _added(seconds: Mapping[str, Mapping[str, Sequence[float]]], framework: str, scaled: str, unscaled: str) -> str:
    times = seconds[framework]
    if scaled not in times or unscaled not in times:
        return NOTHING
    low, middle, high = (100 * (value - 1) for value in _quartiles(times[scaled], times[unscaled]))
    return f"{middle:.1f} % ({low:.1f} to {high:.1f})"


def _quartiles(ones: Sequence[float], others: Sequence[float]) -> list[float]:
    """The quartiles of the ratio, round by round."""
    return statistics.quantiles([one / other for one, other in zip(ones, others, strict=True)], n=4)


def _facts(facts: Mapping[str, Any]) -> list[str]:
    nodes = facts["host_nodes"]
    if nodes is None:
        on_host = NOTHING
    else:
        kinds = sorted(nodes, key=lambda op_type: (-nodes[op_type], op_type))
        listed = ", ".join(f"{nodes[op_type]} {op_type}" for op_type in kinds[:4])
        more = f", {len(kinds) - 4} other operators" if len(kinds) > 4 else ""
        on_host = f"{sum(nodes.values())} ({listed}{more})" if nodes else "0"
    memory = NOTHING if facts["memory"] is None else f"{facts['memory'] / 1e9:.1f}"
    counts = [
        facts[key] for key in ("memcpy_nodes", "memcpy_in_branches", "inserted_on_host", "copies", "syncs", "launches")
    ]
    memcpy, branches, inserted, *rest = (NOTHING if count is None else str(count) for count in counts)
    return [memcpy, branches, on_host, inserted, *rest, memory]
