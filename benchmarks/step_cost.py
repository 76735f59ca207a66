"""The cost of loss scaling in a training step on the CPU: graphscale, a rule on the host, and other frameworks.

    python benchmarks/step_cost.py --torch PYTHON [--tensorflow PYTHON] [--artifacts PYTHON] [--rounds 15] [--threads 2]
        [--only mlp-8-sgd ...] [--sides onnx folder torch tensorflow keras] [--graphs FOLDER] [--rate constant]
        [--processes 15] [--times FILE] [--spinning] [--quick]

This interpreter has graphscale and ONNX Runtime; `--torch` and `--tensorflow` (with Keras) name interpreters that have
these. PyTorch also exports the graphs that ONNX Runtime runs. Artifact folders are made of some of them by the
interpreter of `--artifacts`, one with onnxruntime-training and PyTorch, and run in this one, if it has
onnxruntime-training. `--graphs` keeps both in a folder, and takes them from there.

Every framework trains the same model from the same weights on the same batches with the same optimizer, unscaled and
with a dynamic loss scale. In each round each framework runs all its ways, one after the other and once more in reverse
order, while the others wait; a ratio is the median over the rounds' ratios to the framework's own unscaled step. With
--processes each of so many processes gives one ratio, of the means of its rounds, and the median is over these. In the
end all ways must have gone the same way: see benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import json
import math
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from onnxruntime.capi import _pybind_state as runtime
from step_report import FRAMEWORKS, cells, report
from training_steps import folder_sides, onnx_sides
from training_steps.remote import Remote
from training_steps.sides import PLAIN, Bench, Time
from training_steps.workloads import workloads

INTERPRETERS = {"torch": "torch", "tensorflow": "tensorflow", "keras": "tensorflow"}  # the options that name them
GRAPHS = ("step", "gradients", "update")
SCRIPTS = Path(__file__).parent / "training_steps"
EXPORT = SCRIPTS / "export_graphs.py"
# Seconds of the unscaled step: a turn of a way, and its turns of one direction in a round. The shorter turns are, the
# less of what the machine does besides falls on one way alone; but each begins with the caches that another one left.
TURN, ROUND = 0.05, 0.25
MOST_STEPS, MOST_TURNS = 20, 5
# Of a weight, relative to the largest way of its tensor. Powers of two change no gradient, but ONNX Runtime folds a
# constant learning rate into the MatMul of an unscaled gradient, and rounds it otherwise.
SAME_FRAMEWORK = 2e-2
# Of the losses of the first steps, between frameworks. TensorFlow and Keras add Adam's epsilon before the moments' bias
# is corrected, PyTorch after: small gradients take other steps.
COMPARED_LOSSES, OTHER_FRAMEWORK = 5, {"sgd": 1e-3, "adamw": 5e-2}

Benches = Mapping[str, Bench | Remote]
Times = dict[str, dict[str, list[Time]]]


def measure(benches: Benches, name: str, rounds: int) -> Times:
    """Run all ways of a workload in turns.

    Returns:
        `{framework: {side: its time in each round}}`.

    Raises:
        ValueError: the ways of a framework did not do the same, or frameworks did not train the same model.
    """
    times: Times = {framework: {side: [] for side in bench.prepare(name)} for framework, bench in benches.items()}
    turns = {framework: calibrate(bench, times[framework]) for framework, bench in benches.items()}
    for number in range(rounds):
        order = list(benches)
        for framework in order[number % len(order) :] + order[: number % len(order)]:
            sides = list(times[framework])[:: 1 if number % 2 else -1]
            steps, count = turns[framework]
            found: dict[str, list[Time]] = {side: [] for side in sides}
            for side in (sides + sides[::-1]) * count:
                found[side].append(benches[framework].run(side, steps))
            for side, runs in found.items():
                times[framework][side].append(mean(runs))
    check(benches, name)
    for framework in times:
        for what in ("cpu", "wall"):
            print(
                f"{name}: {framework}: {what}: {', '.join(cells(times[framework], what))}", file=sys.stderr, flush=True
            )
    return times


def measure_apart(command: Sequence[str], name: str, processes: int) -> Times:
    """Measure a workload in new processes, one after the other: where memory lies differs from one to the next.

    Args:
        command: runs this script.
        name: the workload.
        processes: number of processes.

    Returns:
        `{framework: {side: its time in each process, the mean of the rounds}}`.

    Raises:
        ValueError: a process failed; what it said is on stderr.
    """
    times: Times = {}
    for number in range(processes):
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, "times.json")
            done = subprocess.run([*command, "--only", name, "--times", str(file)], check=False, stdout=subprocess.PIPE)
            if done.returncode:
                raise ValueError(f"{name}: process {number} ended with exit code {done.returncode}")
            found = json.loads(file.read_text())[name]
        for framework, sides in found.items():
            for side, rounds in sides.items():
                times.setdefault(framework, {}).setdefault(side, []).append(mean([Time(**time) for time in rounds]))
    return times


def calibrate(bench: Bench | Remote, sides: Sequence[str] | Mapping[str, Any]) -> tuple[int, int]:
    """Warm all sides up; return how many steps make a turn, and how many turns there and back make a round."""
    first = {side: [bench.run(side, 1), bench.run(side, 2)][-1] for side in sides}
    steps = max(2, min(MOST_STEPS, math.ceil(TURN / first[PLAIN].wall)))
    return steps, max(1, min(MOST_TURNS, math.ceil(ROUND / (steps * first[PLAIN].wall))))


def mean(times: Sequence[Time]) -> Time:
    """The mean of times, in either measure."""
    return Time(statistics.mean(time.cpu for time in times), statistics.mean(time.wall for time in times))


def check(benches: Benches, name: str) -> None:
    """Compare what all sides have come to."""
    losses: dict[str, list[float]] = {}
    for framework, bench in benches.items():
        found = bench.check()
        for side, deviation in found["deviation"].items():
            if not deviation <= SAME_FRAMEWORK:
                raise ValueError(f"{name}: weights of {framework} {side} differ from the plain ones by {deviation:.1e}")
        said = ", ".join(f"{side} {deviation:.1e}" for side, deviation in found["deviation"].items())
        print(f"{name}: {framework}: {len(found['losses'])} steps; deviation from plain: {said}", file=sys.stderr)
        losses[framework] = found["losses"][:COMPARED_LOSSES]
        bench.close()
    first, *others = losses
    tolerance = OTHER_FRAMEWORK[workloads(True)[name].optimizer]
    for other in others:
        for one, two in zip(losses[first], losses[other], strict=True):
            if not math.isclose(one, two, rel_tol=tolerance):
                raise ValueError(f"{name}: losses of {first} and {other} differ: {losses[first]}, {losses[other]}")


def machine(benches: Benches, threads: int) -> str:
    """Describe the machine."""
    info = Path("/proc/cpuinfo")
    names = [line.split(":")[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
    versions = [f"Python {platform.python_version()}"]
    for package in ("onnxruntime-training", "onnxruntime"):
        try:
            versions.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            continue  # it has the other one
    versions += [f"{FRAMEWORKS[name]} {bench.version}" for name, bench in benches.items() if isinstance(bench, Remote)]
    return f"{len(names)} cores of {names[0]}, {threads} threads; {', '.join(versions)}."


def lacking(folder: Path | None, names: Sequence[str], parts: Sequence[str] = GRAPHS) -> list[str]:
    """The workloads without all of these graphs in a folder."""
    if folder is None:
        return list(names)
    return [name for name in names if any(not (folder / f"{name}.{part}.onnx").exists() for part in parts)]


def export(python: Path, folder: Path, missing: Sequence[str], rate: str, *, quick: bool) -> None:
    """Let PyTorch export graphs.

    Raises:
        RuntimeError: it could not.
    """
    _make(python, EXPORT, str(folder), *missing, "--rate", rate, *(["--quick"] if quick else []))


def _make(python: Path, script: Path, *arguments: str) -> None:
    done = subprocess.run([str(python), str(script), *arguments], check=False, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{script.name} failed:\n{done.stderr}")


def has_artifacts(folder: Path | None, name: str) -> bool:
    """Return whether the artifact folder of a workload is in a folder."""
    return folder is not None and (folder / f"{name}.artifacts" / "checkpoint").exists()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--torch", type=Path, metavar="PYTHON")
    parser.add_argument("--tensorflow", type=Path, metavar="PYTHON")
    parser.add_argument("--artifacts", type=Path, metavar="PYTHON")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--only", nargs="+", choices=workloads(True), default=list(workloads(True)), metavar="WORKLOAD")
    parser.add_argument("--sides", nargs="+", choices=FRAMEWORKS, default=list(FRAMEWORKS))
    parser.add_argument("--graphs", type=Path, metavar="FOLDER")
    parser.add_argument(
        "--rate",
        choices=["input", "constant"],
        default="input",
        help="what the learning rate is in graphs that are exported here",
    )
    parser.add_argument(
        "--processes", type=int, default=1, metavar="N", help="measure each workload in as many new ones, in turn"
    )
    parser.add_argument("--times", type=Path, metavar="FILE", help="write all times as JSON, too")
    parser.add_argument("--spinning", action="store_true", help="let ONNX Runtime's threads spin while they wait")
    parser.add_argument("--quick", action="store_true", help="tiny models")
    options = parser.parse_args()
    if options.rounds < 2:
        parser.error("--rounds: quartiles need 2 or more")
    if options.processes < 1:
        parser.error("--processes: there is 1 at least")
    graphs, folders = absent(options)
    if graphs and options.torch is None:
        parser.error(f"no graphs of {', '.join(graphs)}: --torch names an interpreter with PyTorch, which exports them")
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.graphs or Path(temporary)
        if graphs:
            export(options.torch, folder, graphs, options.rate, quick=options.quick)
        if folders:
            quick = ["--quick"] if options.quick else []
            _make(options.artifacts, SCRIPTS / "make_artifacts.py", str(folder), *folders, *quick)
        benches = start(options, folder)
        print(machine(benches, options.threads), flush=True)
        try:
            if options.processes > 1:
                end(benches)
                command = again(options, folder)
                found = {name: measure_apart(command, name, options.processes) for name in options.only}
            else:
                found = {name: measure(benches, name, options.rounds) for name in options.only}
        except ValueError as error:
            sys.exit(f"step_cost.py: {error}")
        finally:
            end(benches)
    if options.times is not None:
        options.times.write_text(json.dumps(found, default=dataclasses.asdict))
    many = f"{options.processes} processes" if options.processes > 1 else f"{options.rounds} rounds"
    print(f"\n{report(found, many)}")


def absent(options: argparse.Namespace) -> tuple[list[str], list[str]]:
    """The workloads whose graphs are to be exported, and those whose artifact folders are to be made."""
    graphs = lacking(options.graphs, options.only) if "onnx" in options.sides else []
    folders: list[str] = []
    if "folder" in options.sides and options.artifacts is not None:
        folders = [name for name in options.only if not has_artifacts(options.graphs, name)]
    graphs += [name for name in lacking(options.graphs, folders, ["forward"]) if name not in graphs]
    return graphs, folders


def again(options: argparse.Namespace, folder: Path) -> list[str]:
    """Return the command that measures in one process as these options say, but for the workload."""
    command = [sys.executable, __file__, "--graphs", str(folder), "--sides", *options.sides]
    for option in ("torch", "tensorflow", "rounds", "threads"):
        if getattr(options, option) is not None:
            command += [f"--{option}", str(getattr(options, option))]
    return command + [f"--{option}" for option in ("spinning", "quick") if getattr(options, option)]


def start(options: argparse.Namespace, folder: Path) -> dict[str, Bench | Remote]:
    """The frameworks that are asked for and there."""
    benches: dict[str, Bench | Remote] = {}
    if "onnx" in options.sides:
        make = onnx_sides.maker(folder, options.threads, spinning=options.spinning)
        benches["onnx"] = Bench(make, options.quick)
    if "folder" in options.sides:
        if not hasattr(runtime, "Module"):
            print("Without artifact folders: this interpreter has no onnxruntime-training.\n", flush=True)
        elif not all(has_artifacts(folder, name) for name in options.only):
            print("Without artifact folders: --artifacts names no interpreter.\n", flush=True)
        else:
            make = folder_sides.maker(folder, options.threads, spinning=options.spinning)
            benches["folder"] = Bench(make, options.quick)
    for framework, option in INTERPRETERS.items():
        python = getattr(options, option)
        if framework not in options.sides:
            continue
        if python is None:
            print(f"Without {FRAMEWORKS[framework]}: --{option} names no interpreter.\n", flush=True)
            continue
        benches[framework] = Remote(framework, python, options.threads, options.quick, spinning=options.spinning)
    return benches


def end(benches: Benches) -> None:
    """End the processes of other frameworks, if they have not ended."""
    for bench in benches.values():
        if isinstance(bench, Remote):
            bench.end()


if __name__ == "__main__":
    main()
