"""Export the zoo: training steps whose scripts know the role of every input and output.

    python -m models.zoo.export --out FOLDER [--only PATTERN ...] [--small] [--exporters NAME ...]

Writes NAME.onnx, NAME.npz (a value for every input) and NAME.json (the truth, see `steps.Truth`) into FOLDER/open, or,
for the fifth of the kinds that is set aside, into FOLDER/aside. PATTERN is a kind, or KIND.VARIANT, with wildcards.
"""

import argparse
import importlib
import importlib.util
import json
import time
import traceback
from collections import Counter
from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnxruntime

from models.zoo import styles
from models.zoo.steps import KINDS, Step, is_aside, steps

EXPORTERS = {"pytorch": "torch", "jax": "jax2onnx", "tensorflow": "tf2onnx", "hand": "onnx"}
"""The package that each exporter needs; one without it is left out."""


def write(step: Step, folder: Path) -> str:
    """Export one step, run it, and write its files; return one line of summary."""
    exporter = importlib.import_module(f"models.zoo.{step.exporter}.exporter")
    model, truth, feeds, expected = exporter.export(step)
    truth, feeds = styles.apply(step.style, model, truth, feeds)
    given = [value.name for value in model.graph.inputs]
    feeds = {name: feeds[name] for name in given}
    if step.style.runtime:
        model = styles.optimize_by_runtime(model, step.style.runtime)
    if step.style.simplified:
        model = styles.simplify(model)
    names = [value.name for value in model.graph.outputs]
    truth.check(given, names)
    if missing := set(truth.states.values()) - set(given) - set(model.graph.initializers):
        raise ValueError(f"states are missing in the graph: {sorted(missing)}")
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{step.name}.onnx"
    ir.save(model, path)
    try:
        note = compare(path, feeds, names, expected, tolerance_of(model) if step.deterministic else np.inf)
    except Exception:
        path.unlink()
        raise
    np.savez_compressed(path.with_suffix(".npz"), **feeds)
    path.with_suffix(".json").write_text(truth.to_json())
    return f"{step.name}: {len(model.graph)} nodes, {path.stat().st_size} bytes, {note}"


def tolerance_of(model: ir.Model) -> float:
    """Return the largest relative error that is no sign of a wrong export."""
    values = [value for node in model.graph.all_nodes() for value in node.outputs]
    return 5e-2 if any(value.dtype == ir.DataType.FLOAT16 for value in [*values, *model.graph.inputs]) else 1e-3


def compare(path: Path, feeds: styles.Feeds, names: list[str], expected: list[np.ndarray], tolerance: float) -> str:
    """Run the graph by ONNX Runtime; raise a ValueError if its outputs are not those of the framework."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    try:
        session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    except Exception as error:
        if "NOT_IMPLEMENTED" in str(error) or "Unsupported model" in str(error) or "under development" in str(error):
            return "not run, ONNX Runtime lacks a kernel"
        raise
    worst = 0.0
    for name, actual, wanted in zip(names, session.run(names, feeds), expected, strict=True):
        if actual.dtype != wanted.dtype or actual.shape != wanted.shape:
            raise ValueError(f"{name} is {actual.dtype}{actual.shape}, not {wanted.dtype}{wanted.shape}")
        if not np.isfinite(actual.astype(np.float64)).all():
            raise ValueError(f"{name} is not finite")
        error = np.abs(actual.astype(np.float64) - wanted.astype(np.float64)).max(initial=0)
        error /= max(np.abs(wanted.astype(np.float64)).max(initial=0), 1e-5)
        if error > tolerance:
            raise ValueError(f"{name} differs from the framework's by {error:.1e}")
        worst = max(worst, float(error))
    return f"largest error {worst:.1e}"


def prepare(kind: str) -> None:
    """Prepare the exporter of a kind for it."""
    importlib.import_module(f"models.zoo.{KINDS[kind][0]}.exporter").prepare(kind)


def main() -> int:
    """Export the steps that the command line selects; return 1 if one of them failed."""
    parser = argparse.ArgumentParser(description="Export training steps with their ground truth.")
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER")
    parser.add_argument(
        "--only", nargs="+", default=["*"], metavar="PATTERN", help="kinds, or KIND.VARIANT, with wildcards"
    )
    parser.add_argument("--small", action="store_true", help="the first step of each kind only")
    parser.add_argument("--exporters", nargs="+", choices=EXPORTERS, help="those that are installed, if not given")
    arguments = parser.parse_args()
    failed: dict[str, str] = {}
    counts: Counter[str] = Counter()
    installed = [name for name, package in EXPORTERS.items() if importlib.util.find_spec(package)]
    for exporter in arguments.exporters or installed:
        importlib.import_module(f"models.zoo.{exporter}.exporter")
    for step in steps(arguments.only, prepare):
        if arguments.small and counts[step.kind]:
            continue
        counts[step.kind] += 1
        start = time.perf_counter()
        try:
            line = write(step, arguments.out / ("aside" if is_aside(step.kind) else "open"))
            print(f"{line}, {time.perf_counter() - start:.1f} s", flush=True)
        except Exception as error:
            failed[step.name] = f"{type(error).__name__}: {error}"[:500]
            print(f"{step.name} FAILED: {failed[step.name]}", flush=True)
            with (arguments.out / "failed.log").open("a") as log:
                log.write(f"{step.name}\n{''.join(traceback.format_exception(error))}\n")
    print(json.dumps({"kinds": len(counts), "steps": sum(counts.values()), "failed": len(failed)}))
    return int(bool(failed))


if __name__ == "__main__":
    raise SystemExit(main())
