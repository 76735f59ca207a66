"""The cost of loss scaling in a training step on a GPU, in float32 and float16: by graphscale, on the host, by PyTorch.

    python benchmarks/cuda_step.py [--torch PYTHON] [--graphs FOLDER] [--device cuda|cpu] [--rounds 15] [--json FILE]
        [--only WORKLOAD ...] [--ways WAY ...] [--batch 8] [--length 512] [--turn 0.5] [--tf32] [--threads 4] [--quick]

This interpreter has graphscale and onnxruntime-gpu (or onnxruntime-training); `--torch` names one that has PyTorch with
CUDA. PyTorch also exports the graphs that ONNX Runtime runs; `--graphs` keeps them in a folder, and takes them from
there.

Both frameworks train models of 100 million weights, a causal transformer and a perceptron, from the same weights on the
same batches with the same optimizer. In each round each framework runs all its ways, one after the other and once more
in reverse order, while the other waits; a ratio is the median over the rounds' ratios to the framework's own unscaled
float32 step. Time is that of the clock, from an idle device to an idle device, over several steps whose losses stay on
the device but for the last; processor time would only say how busy the host was. No time counts before the ways have
gone the same way, nor that of a round in which a step was skipped. See benchmarks/README.md.

`--device cpu --quick` runs the same code with tiny models on a machine without a GPU. It cannot show where ONNX
Runtime places nodes on a GPU, copies, syncs, device memory, and float16 that overflows (its CPU provider computes in
float32 between casts). Its times have no meaning.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cuda_machine import describe, lacks
from cuda_report import report
from step_cost import EXPORT, lacking
from training_steps import device_graphs
from training_steps.device_bench import DeviceBench, tolerance
from training_steps.device_onnx import Machine
from training_steps.remote import RemoteDevice
from training_steps.sides import PLAIN
from training_steps.workloads import Workload, large_workloads

TORCH_WAYS = (PLAIN, "GradScaler", "float16", "float16-GradScaler")  # device_torch.NAMES, which needs PyTorch
WAYS = tuple(dict.fromkeys((*device_graphs.NAMES, *TORCH_WAYS)))
MOST_STEPS = 200  # of a turn

Benches = Mapping[str, DeviceBench | RemoteDevice]
Seconds = dict[str, dict[str, list[float]]]
Steps = dict[str, dict[str, int]]


def measure(benches: Benches, name: str, rounds: int, length: float) -> dict[str, Any]:
    """Run all ways of a workload in turns.

    Args:
        benches: of each framework.
        name: of the workload.
        rounds: that count.
        length: seconds of a turn, or more.

    Returns:
        for each framework and way its `facts`, why it was `left_out`, its `checks` and the `seconds` of a step in each
        round, the `steps` of a turn; and how many rounds were `dropped`.

    Raises:
        ValueError: ways did not do the same, or steps were skipped again and again.
    """
    prepared = {framework: bench.prepare(name) for framework, bench in benches.items()}
    checks = {framework: bench.check() for framework, bench in benches.items()}
    compare(checks)
    for framework, sides in checks.items():
        said = ", ".join(f"{side} {of['distance']:.1e} ({of['skipped']} skipped)" for side, of in sides.items())
        print(f"{name}: {framework}: distance from plain: {said}", file=sys.stderr, flush=True)
    steps: Steps = {framework: calibrate(bench, checks[framework], length) for framework, bench in benches.items()}
    seconds: Seconds = {framework: {side: [] for side in sides} for framework, sides in checks.items()}
    kept = dropped = 0
    while kept < rounds:
        if dropped > rounds:
            raise ValueError(f"in {dropped} rounds steps were skipped: the loss scale does not settle")
        if one_round(benches, steps, seconds, kept + dropped):
            kept += 1
            print(f"{name}: round {kept} of {rounds}", file=sys.stderr, flush=True)
        else:
            dropped += 1
    for bench in benches.values():
        bench.close()
    facts, left_out = ({key: found[what] for key, found in prepared.items()} for what in ("facts", "left_out"))
    return {
        "facts": facts,
        "left_out": left_out,
        "checks": checks,
        "seconds": seconds,
        "steps": steps,
        "dropped": dropped,
    }


def compare(checks: Mapping[str, Mapping[str, Any]]) -> None:
    """Hold the losses of a framework's plain way against those of the others.

    Raises:
        ValueError: they differ.
    """
    (first, wanted), *others = ((framework, sides[PLAIN]["losses"]) for framework, sides in checks.items())
    for framework, losses in others:
        if not all(math.isclose(*pair, rel_tol=tolerance(PLAIN)) for pair in zip(losses, wanted, strict=True)):
            raise ValueError(f"the losses of {framework} and {first} differ: {losses}, {wanted}")


def calibrate(bench: DeviceBench | RemoteDevice, sides: Mapping[str, Any], length: float) -> dict[str, int]:
    """Warm all sides up; return how many steps make a turn of each long enough."""
    first = {side: [bench.run(side, 1), bench.run(side, 2)][-1]["seconds"] for side in sides}
    return {side: max(2, min(MOST_STEPS, math.ceil(length / time))) for side, time in first.items()}


def one_round(benches: Benches, steps: Steps, seconds: Seconds, number: int) -> bool:
    """Let each framework run each way twice, and note the mean time; return whether the round counts.

    Raises:
        ValueError: a loss is not finite.
    """
    order = list(benches)
    found: Seconds = {framework: {side: [] for side in sides} for framework, sides in seconds.items()}
    counts = True
    for framework in order[number % len(order) :] + order[: number % len(order)]:
        sides = list(seconds[framework])[:: 1 if number % 2 else -1]
        for side in sides + sides[::-1]:
            turn = benches[framework].run(side, steps[framework][side])
            if not math.isfinite(turn["loss"]):
                raise ValueError(f"{framework} {side}: a loss is not finite")
            counts = counts and not turn["skipped"]
            found[framework][side].append(turn["seconds"])
    if counts:
        for framework, of_sides in found.items():
            for side, (one, two) in of_sides.items():
                seconds[framework][side].append((one + two) / 2)
    return counts


def export(python: Path, folder: Path, missing: Sequence[str], arguments: Sequence[str]) -> None:
    """Let PyTorch export graphs, on the CPU.

    Raises:
        RuntimeError: it could not.
    """
    for name in missing:
        print(f"{name}: exporting", file=sys.stderr, flush=True)
        command = [str(python), str(EXPORT), str(folder), name, *arguments]
        done = subprocess.run(command, check=False, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"the export failed:\n{done.stderr}")


def start(options: argparse.Namespace, folder: Path, workloads: Mapping[str, Workload]) -> dict[str, Any]:
    """The frameworks that are there."""
    ways = device_graphs.opener(folder, Machine(options.device, options.threads, options.tf32))
    benches: dict[str, Any] = {"onnx": DeviceBench(ways, workloads, tuple(options.ways))}
    if options.torch is None:
        print("Without PyTorch: --torch names no interpreter.\n", flush=True)
        return benches
    named = [way for way in options.ways if way in TORCH_WAYS]
    flags = [f"--{flag}" for flag in ("quick", "tf32") if getattr(options, flag)]
    sizes = ["--large", str(options.batch), str(options.length)]
    arguments = ["--device", options.device, "--ways", *named, *sizes, *flags]
    return benches | {"torch": RemoteDevice(options.torch, arguments, options.threads)}


def parse() -> argparse.Namespace:
    """The options, and the workloads that they choose.

    Raises:
        SystemExit: they are wrong, or the machine lacks something; with exit code 2.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--torch", type=Path, metavar="PYTHON")
    parser.add_argument("--graphs", type=Path, metavar="FOLDER")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path, metavar="FILE", help="all rounds, facts and checks")
    parser.add_argument("--only", nargs="+", metavar="WORKLOAD")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS), metavar="WAY", help=", ".join(WAYS))
    parser.add_argument("--batch", type=int, default=8, help="sequences of a batch")
    parser.add_argument("--length", type=int, default=512, help="tokens of a sequence")
    parser.add_argument("--turn", type=float, default=0.5, metavar="SECONDS", help="the least time of a way")
    parser.add_argument("--tf32", action="store_true", help="let float32 products be rounded to TF32")
    parser.add_argument("--threads", type=int, default=4, help="of the CPU, in each framework")
    parser.add_argument("--quick", action="store_true", help="tiny models")
    options = parser.parse_args()
    if options.rounds < 2:
        parser.error("--rounds: quartiles need 2 or more")
    known = large_workloads(options.quick, options.batch, options.length)
    options.only = options.only or list(known)
    unknown = [name for name in options.only if name not in known]
    if unknown:
        parser.error(f"--only: there is no {unknown[0]}; there are {', '.join(known)}")
    missing = lacks(options.device, options.torch)
    if missing:
        sys.stderr.write(f"cuda_step.py: cannot run with --device {options.device}: {'; '.join(missing)}\n")
        sys.exit(2)
    options.missing = lacking(options.graphs, options.only)
    if options.missing and options.torch is None:
        parser.error(f"no graphs of {', '.join(options.missing)}: --torch names an interpreter with PyTorch, to export")
    return options


def main() -> None:
    options = parse()
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.graphs or Path(temporary)
        if options.missing:
            sizes = ["--large", str(options.batch), str(options.length), *(["--quick"] if options.quick else [])]
            export(options.torch, folder, options.missing, sizes)
        workloads = large_workloads(options.quick, options.batch, options.length)
        benches = start(options, folder, workloads)
        version = benches["torch"].version if "torch" in benches else None
        machine = describe(options.device, options.threads, version)
        print(machine, flush=True)
        length = 0.02 if options.quick else options.turn
        found: dict[str, Any] = {}
        for name in options.only:
            try:
                found[name] = measure(benches, name, options.rounds, length)
            except ValueError as error:
                sys.exit(f"cuda_step.py: {error}")
            if options.json:  # after each workload, since a run takes long
                content = {"machine": machine, "tf32": options.tf32, "rounds": options.rounds, "workloads": found}
                options.json.write_text(json.dumps(content, indent=1))
    precision = "TF32 products in float32" if options.tf32 else "full float32 products"
    weights = ", ".join(f"{name} {workloads[name].size():,}" for name in options.only)
    print(f"\nWeights: {weights}; {precision}.\n\nWall time; medians of {options.rounds} rounds, with quartiles:\n")
    print(report(found))
    for bench in benches.values():
        if isinstance(bench, RemoteDevice):
            bench.end()


if __name__ == "__main__":
    main()
