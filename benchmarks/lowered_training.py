"""The speed of lowered training steps on stock ONNX Runtime, against the kernels of onnxruntime-training.

    python benchmarks/lowered_training.py --training PYTHON --stock PYTHON [--only mlp-64-sgd ...] [--processes 3]
        [--rounds 5] [--threads 2] [--graphs FOLDER] [--known-batch] [--quick]

The steps are those of ONNX Runtime's gradient builder: forward and backward pass and an optimizer for each weight,
without a loss scale. `--training` names an interpreter with onnxruntime-training, which makes the steps and runs them,
with its kernels and lowered by `gs.lower_training_ops`; `--stock` one with stock ONNX Runtime, which runs the lowered
ones. Both have graphscale and what it needs.

In each round each runs all its ways, while the other waits: see benchmarks/README.md. All ways must have gone the same
way in the end: the weights on one runtime, and the losses on both.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from step_cost import calibrate, mean
from step_report import table
from training_steps.remote import Remote
from training_steps.sides import PLAIN, Time
from training_steps.workloads import workloads

TRAINING, STOCK = "training", "stock"
LOWERED = "lowered"
MAKER = Path(__file__).parent / "training_steps" / "gradient_steps.py"
# Of a weight, relative to the largest way of its tensor; and of the first losses on both runtimes.
MOST_DEVIATION, COMPARED_LOSSES, LOSS_TOLERANCE = 2e-2, 5, 1e-4
MOST_MEAN = 1.3  # what is asked for: of the geometric mean

# The time of each way in each round: with the kernels, lowered on the same runtime, lowered on the stock one.
Times = dict[str, list[Time]]
WAYS = {"kernels": (TRAINING, PLAIN), "lowered": (TRAINING, LOWERED), "stock": (STOCK, PLAIN)}


def measure(remotes: Mapping[str, Remote], name: str, rounds: int) -> Times:
    """Run all ways of a workload in turns.

    Raises:
        ValueError: the ways did not do the same.
    """
    sides = {runtime: remote.prepare(name) for runtime, remote in remotes.items()}
    turns = {runtime: calibrate(remote, sides[runtime]) for runtime, remote in remotes.items()}
    times: Times = {way: [] for way in WAYS}
    for number in range(rounds):
        found: Times = {way: [] for way in WAYS}
        order = list(WAYS.items())[:: 1 if number % 2 else -1]
        steps, count = turns[TRAINING]
        for way, (runtime, side) in (order + order[::-1]) * count:
            found[way].append(remotes[runtime].run(side, steps))
        for way, runs in found.items():
            times[way].append(mean(runs))
    check(remotes, name)
    return times


def check(remotes: Mapping[str, Remote], name: str) -> None:
    """Compare what all ways have come to."""
    results = {runtime: remote.check() for runtime, remote in remotes.items()}
    deviation = results[TRAINING]["deviation"][LOWERED]
    if not deviation <= MOST_DEVIATION:
        raise ValueError(f"{name}: the weights of the lowered step differ from those of the kernels by {deviation:.1e}")
    losses = [result["losses"][:COMPARED_LOSSES] for result in results.values()]
    if not all(math.isclose(*pair, rel_tol=LOSS_TOLERANCE) for pair in zip(*losses, strict=True)):
        raise ValueError(f"{name}: the losses on both runtimes differ: {losses}")
    for remote in remotes.values():
        remote.close()


def ratios(times: Times, way: str, what: str) -> list[float]:
    """The ratio of a way's time to that of the kernels, in each round."""
    pairs = zip(times[way], times["kernels"], strict=True)
    return [getattr(one, what) / getattr(two, what) for one, two in pairs]


def report(found: Mapping[str, Times], what: str) -> str:
    """The table of one measure, `wall` or `cpu`: quartiles of the ratios, and their geometric mean."""
    rows: list[list[str]] = []
    medians: dict[str, dict[str, float]] = {way: {} for way in WAYS if way != "kernels"}
    for name, times in found.items():
        milliseconds = 1e3 * statistics.median(getattr(time, what) for time in times["kernels"])
        cells = [name, f"{milliseconds:,.2f}" if milliseconds < 100 else f"{milliseconds:,.0f}"]
        for way, values in medians.items():
            low, middle, high = statistics.quantiles(ratios(times, way, what), n=4)
            values[name] = middle
            cells.append(f"{middle:.2f} ({low:.2f} to {high:.2f})")
        rows.append(cells)
    means = [statistics.geometric_mean(values.values()) for values in medians.values()]
    rows.append(["geometric mean", "", *(f"{value:.2f}" for value in means)])
    others = [[value for name, value in values.items() if not name.startswith("lstm")] for values in medians.values()]
    if 0 < len(others[0]) < len(found):
        rows.append(["that without LSTMs", "", *(f"{statistics.geometric_mean(values):.2f}" for values in others)])
    header = ["step", "kernels, ms", "lowered, on the kernels' runtime", "lowered, on the stock runtime"]
    verdict = f"At most {MOST_MEAN} is asked for: {'yes' if means[-1] <= MOST_MEAN else 'no'}."
    return f"{table(header, rows)}\n\n{verdict}"


@contextlib.contextmanager
def started(options: argparse.Namespace, folder: Path) -> Iterator[dict[str, Remote]]:
    """Start the processes of both runtimes, and end them."""
    remotes = {}
    try:
        for name in (TRAINING, STOCK):
            arguments = ["--graphs", str(folder), *(["--lowered"] if name == STOCK else [])]
            remotes[name] = Remote(
                "runtime", getattr(options, name), options.threads, options.quick, spinning=False, arguments=arguments
            )
        yield remotes
    finally:
        for remote in remotes.values():
            remote.end()


def make_steps(options: argparse.Namespace, folder: Path) -> None:
    """Let the training build make the steps that are not there.

    Raises:
        RuntimeError: it could not.
    """
    parts = ("kernels", "lowered")
    missing = [name for name in options.only if not all((folder / f"{name}.{part}.onnx").exists() for part in parts)]
    flags = [flag for flag, chosen in (("--quick", options.quick), ("--known-batch", options.known_batch)) if chosen]
    if missing:
        command = [str(options.training), str(MAKER), str(folder), *missing, *flags]
        done = subprocess.run(command, check=False, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{MAKER.name} failed:\n{done.stderr}")


def parsed(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--training", type=Path, metavar="PYTHON", required=True)
    parser.add_argument("--stock", type=Path, metavar="PYTHON", required=True)
    parser.add_argument("--only", nargs="+", choices=workloads(True), default=list(workloads(True)), metavar="WORKLOAD")
    parser.add_argument("--processes", type=int, default=3, help="measure each workload in as many new ones of each")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--graphs", type=Path, metavar="FOLDER", help="keep the steps here, and take them from there")
    parser.add_argument("--known-batch", action="store_true", help="let the steps say the size of the batch")
    parser.add_argument("--quick", action="store_true", help="tiny models")
    options = parser.parse_args(arguments)
    if options.processes < 1 or options.processes * options.rounds < 2:
        parser.error("--processes, --rounds: quartiles need 2 or more in all")
    return options


def main() -> None:
    options = parsed()
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.graphs or Path(temporary)
        make_steps(options, folder)
        found: dict[str, Times] = {name: {way: [] for way in WAYS} for name in options.only}
        for name in options.only:
            for _ in range(options.processes):
                with started(options, folder) as remotes:
                    versions = " and ".join(remote.version for remote in remotes.values())
                    try:
                        times = measure(remotes, name, options.rounds)
                    except ValueError as error:
                        sys.exit(f"lowered_training.py: {error}")
                for way, runs in times.items():
                    found[name][way] += runs
            print(report({name: found[name]}, "cpu"), file=sys.stderr, flush=True)
    print(f"{versions}, {options.threads} threads, {platform.machine()}")
    for what, title in (("wall", "Wall time"), ("cpu", "CPU time of all threads")):
        print(f"\n{title}; medians of {options.processes} x {options.rounds} rounds:\n\n{report(found, what)}")


if __name__ == "__main__":
    main()
