"""One job of pass_cost.py, in a process of its own; prints its costs as JSON.

python benchmarks/pass_cost_job.py bare|graphscale STEP.onnx OUT.onnx
python benchmarks/pass_cost_job.py import bare|graphscale
"""

from __future__ import annotations

import importlib
import json
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

# The libraries of each job: nothing else may be in its memory. The last one is imported on its first use.
LIBRARIES = {
    "bare": ("onnx", "onnx_ir"),
    "graphscale": ("onnx", "onnx_ir", "graphscale", "graphscale.pipeline", "graphscale.files.saving"),
}


def timed(work: Callable[..., object], *arguments: object) -> dict[str, float]:
    """Do something, and return its wall time and CPU time in seconds."""
    clock, processor = time.perf_counter(), time.process_time()
    work(*arguments)
    return {"wall": time.perf_counter() - clock, "cpu": time.process_time() - processor}


def peak_memory() -> float:
    """The most that this process has had in memory, in MB."""
    largest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return largest / 1e6 if sys.platform == "darwin" else largest * 1024 / 1e6


def bare(libraries: dict[str, Any], source: Path, target: Path) -> None:
    """Read and write with onnx_ir alone; weights beside the model are written beside the copy."""
    ir = libraries["onnx_ir"]
    model = ir.load(source)
    tensors = (value.const_value for value in model.graph.initializers.values())
    external = any(isinstance(tensor, ir.ExternalTensor) for tensor in tensors)
    ir.save(model, target, external_data=f"{target.name}.data" if external else None)


def graphscale(libraries: dict[str, Any], source: Path, target: Path) -> None:
    """Load, analyse, rewrite, prove, save."""
    result = libraries["graphscale"].scale(source, "dynamic")
    assert result.report.proved
    assert result.report.coverage == 1.0
    result.save(target)


WORK = {"bare": bare, "graphscale": graphscale}


def main() -> None:
    job, *arguments = sys.argv[1:]
    if job == "import":
        found = {name: timed(importlib.import_module, name)["wall"] for name in LIBRARIES[arguments[0]]}
    else:
        libraries = {name: importlib.import_module(name) for name in LIBRARIES[job]}
        found = timed(WORK[job], libraries, *map(Path, arguments))
    print(json.dumps({**found, "peak": peak_memory()}))


if __name__ == "__main__":
    main()
