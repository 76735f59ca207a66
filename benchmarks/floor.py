"""The cost of inserted nodes, against one read and one write of all gradients: the least a CPU could do.

    python benchmarks/floor.py [--torch PYTHON | --graphs FOLDER] [--rounds 21] [--threads 1 2] [--only 16 256 ...]
        [--rate constant] [--spinning] [--variants] [--quick]

Steps are generated whose gradients are 16 MB (one weight) and 256 MB (16 weights), with plain SGD and batches of 8; and
the transformer of step_cost.py is taken, which PyTorch exports (`--torch`) or has exported to a folder (`--graphs`).

In each round a plain loop, a gs.Session and a loop on the file for `ort-cpu` run a step each; a second gs.Session,
and loops on that file and on the scaled file, run one with ONNX Runtime's profiler; and NumPy copies as many
bytes as the gradients have (`np.copyto`, on one thread, whatever ONNX Runtime has), in turns. Inserted work is the sum
of the kernel times of all nodes that graphscale inserted, in a run. See benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import itertools
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
from floor_variants import CHECKS, UNSCALES, variant_times
from gradient_sets import KINDS, GradientSet
from kernel_times import Kernel, inserted_kernels, least, parts, profile_in, profiled, runs_of
from loops import ByBinding, first_values, options
from step_cost import SAME_FRAMEWORK, export, lacking, machine
from step_report import table
from training_steps.workloads import BATCHES, INCREMENT_PERIOD, INITIAL_LOSS_SCALE, RATES, Arrays, workloads

import graphscale as gs

SETS = {"16": 1, "256": 16}  # weights of WIDTH x WIDTH, by the gradients' megabytes (of 2**20 bytes)
WIDTH = 2048
TRANSFORMERS = ("transformer-4-sgd", "transformer-4-adamw")
WARM_UP = 2
PLAIN, SESSION, LOWERED, SCALED = "plain", "session", "lowered", "scaled"
FILE, FILE_KERNELS = "file", "file-kernels"  # the file of target `ort-cpu`, without and with the profiler
MOST, MOST_OF_A_STEP = 1.5, 0.03  # what is asked for: of the floor; of the unscaled step


@dataclasses.dataclass(frozen=True)
class Case:
    """A step to be scaled.

    Attributes:
        name: of the step and the policy.
        model: the step.
        weights: the first weights; each has a gradient.
        batches: the feeds, in turn.
        multiplier: of the policy. With another one than a power of two gradients must be divided.
    """

    name: str
    model: onnx.ModelProto
    weights: Arrays
    batches: list[Arrays]
    multiplier: float

    @property
    def megabytes(self) -> float:
        """The size of all gradients."""
        return sum(weight.nbytes for weight in self.weights.values()) / 2**20


@dataclasses.dataclass(frozen=True)
class Found:
    """Seconds in each round.

    Attributes:
        copies: of a copy of as many bytes as each gradient has, by numpy.
        steps: of a whole step without a profiler, PLAIN, SESSION and FILE: (wall time, CPU time of all threads).
        kernels: of inserted nodes, LOWERED (in a session), FILE_KERNELS and SCALED.
    """

    copies: list[list[float]]
    steps: dict[str, list[tuple[float, float]]]
    kernels: dict[str, list[list[Kernel]]]

    def work(self, side: str) -> list[float]:
        """All inserted work of a side."""
        return [sum(kernel.seconds for kernel in run) for run in self.kernels[side]]

    @property
    def floor(self) -> list[float]:
        """The copies of all gradients."""
        return [sum(copies) for copies in self.copies]

    def least(self, side: str) -> float:
        """Inserted work over the floor, if each kernel and each copy took its least time."""
        return least(self.kernels[side]) / sum(map(min, zip(*self.copies, strict=True)))

    def step(self, side: str) -> list[float]:
        """The wall time of a side."""
        return [wall for wall, _ in self.steps[side]]

    def added(self, *, side: str = SESSION, cpu: bool) -> list[float]:
        """Return the time of a step of a side above the plain one."""
        return [one[cpu] - other[cpu] for one, other in zip(self.steps[side], self.steps[PLAIN], strict=True)]


def generated(names: Sequence[str], *, constant_rate: bool, quick: bool) -> Iterator[Case]:
    """Sets of gradients."""
    for name in names:
        for kind in KINDS:
            made = GradientSet(SETS[name], 128 if quick else WIDTH, kind, constant_rate=constant_rate)
            for multiplier in (2.0, 3.0):
                full = f"{name} MB, {kind}, multiplier {multiplier:g}"
                yield Case(full, ir.to_proto(made.model()), made.weights(), made.batches(BATCHES), multiplier)


def exported(names: Sequence[str], folder: Path, *, quick: bool) -> Iterator[Case]:
    """Transformers."""
    for name in names:
        workload, model = workloads(quick)[name], onnx.load(folder / f"{name}.step.onnx")
        fed = {value.name for value in model.graph.input}
        rate = {"learning_rate": np.array(RATES[workload.optimizer], np.float32)} if "learning_rate" in fed else {}
        yield Case(name, model, workload.weights(), [batch | rate for batch in workload.batches()], 2.0)


class Copy:
    """A copy between arrays of some shapes: one read and one write of all their bytes."""

    def __init__(self, shapes: Sequence[tuple[int, ...]]) -> None:
        self._pairs = [(np.ones(shape, np.float32), np.zeros(shape, np.float32)) for shape in shapes]

    def seconds(self) -> list[float]:
        """The seconds of each."""
        found = []
        for source, target in self._pairs:
            begin = time.perf_counter()
            np.copyto(target, source)
            found.append(time.perf_counter() - begin)
        return found


def measure(case: Case, rounds: int, threads: int, *, spinning: bool) -> Found:
    """Run all sides of a case in turns.

    Raises:
        ValueError: the step is not scaled as a whole, or the sides did not do the same.
    """
    policy = gs.DynamicLossScale(INITIAL_LOSS_SCALE, INCREMENT_PERIOD, case.multiplier)
    result, lowered = gs.scale(case.model, policy), gs.scale(case.model, policy, target="ort-cpu")
    if result.report.coverage != 1.0 or not result.report.proved:
        raise ValueError(f"{case.name}: coverage is {result.report.coverage}, proved: {result.report.proved}")
    state = case.weights | _zeros(result, case.weights)
    carried = {s.input: s.output for s in result.report.state}
    bare = {name: output for name, output in carried.items() if name in state}
    first = first_values(result, state)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)

        def made(profile: str = "") -> ort.SessionOptions:
            plain = options(threads, spinning=spinning)
            return profiled(plain, folder, profile) if profile else plain

        runners: dict[str, ByBinding | gs.Session] = {
            PLAIN: ByBinding(case.model, bare, state, made()),
            SESSION: gs.Session(result, state=state, session_options=made()),
            FILE: ByBinding(lowered.model, carried, first, made()),
            LOWERED: gs.Session(result, state=state, session_options=made(LOWERED)),
            FILE_KERNELS: ByBinding(lowered.model, carried, first, made(FILE_KERNELS)),
            SCALED: ByBinding(result.model, carried, first, made(SCALED)),
        }
        copies, steps = _run(case, {side: runner.step for side, runner in runners.items()}, rounds)
        _check(case, {side: runner.state_dict() for side, runner in runners.items()}, WARM_UP + rounds)
        del runners  # a session writes its profile when it ends
        gc.collect()
        profiles = {side: runs_of(profile_in(folder, side))[WARM_UP:] for side in (LOWERED, FILE_KERNELS, SCALED)}
    kernels = {side: inserted_kernels(runs) for side, runs in profiles.items()}
    return Found(copies, {side: steps[side] for side in (PLAIN, SESSION, FILE)}, kernels)


def _zeros(result: gs.ScaledModel, weights: Arrays) -> Arrays:
    """The first moments, and counts of steps."""
    inputs = {value.name: value.type.tensor_type.shape.dim for value in result.model.graph.input}
    initialized = {tensor.name for tensor in result.model.graph.initializer}
    names = [s.input for s in result.report.state if s.input not in weights and s.input not in initialized]
    return {name: np.zeros([dim.dim_value for dim in inputs[name]], np.float32) for name in names}


def _run(
    case: Case, steps: Mapping[str, Callable[[Arrays], object]], rounds: int
) -> tuple[list[list[float]], dict[str, list[tuple[float, float]]]]:
    copy = Copy([weight.shape for weight in case.weights.values()])
    copies: list[list[float]] = []
    times: dict[str, list[tuple[float, float]]] = {side: [] for side in steps}
    for number in range(WARM_UP + rounds):
        batch, order = case.batches[number % len(case.batches)], [*steps]
        gc.collect()
        for side in order[number % len(order) :] + order[: number % len(order)]:
            wall, cpu = time.perf_counter(), time.process_time()
            steps[side](batch)
            times[side].append((time.perf_counter() - wall, time.process_time() - cpu))
        copy.seconds()  # the steps have taken its arrays out of the caches
        copies.append(copy.seconds())
    return copies[WARM_UP:], {side: found[WARM_UP:] for side, found in times.items()}


def _check(case: Case, states: Mapping[str, Arrays], count: int) -> None:
    """Compare where all sides have come to."""
    for side, state in states.items():
        if side != PLAIN and (float(state["current_loss_scale"]), int(state["good_steps"])) != (
            INITIAL_LOSS_SCALE,
            count,
        ):
            raise ValueError(f"{case.name}: {side} has not applied all of {count} steps")
        for name, first in case.weights.items():
            wanted = states[PLAIN][name]
            deviation = np.abs(state[name] - wanted).max() / np.abs(wanted - first).max()
            if not deviation <= SAME_FRAMEWORK:
                raise ValueError(f"{case.name}: {name} of {side} differs from the plain one's by {deviation:.1e}")


def spread(values: Sequence[float], form: str) -> str:
    """The median, with the quartiles."""
    low, middle, high = statistics.quantiles(values, n=4)
    return f"{middle:{form}} ({low:{form}} to {high:{form}})"


def milliseconds(seconds: Sequence[float]) -> str:
    return spread([1e3 * value for value in seconds], ".2f")


def ratios(ones: Sequence[float], others: Sequence[float]) -> list[float]:
    return [one / other for one, other in zip(ones, others, strict=True)]


def floor_row(case: Case, threads: int, found: Found) -> list[str]:
    """Inserted work beside the floor."""
    low, scaled = ratios(found.work(LOWERED), found.floor), ratios(found.work(SCALED), found.floor)
    return [
        case.name,
        str(threads),
        milliseconds(found.floor),
        milliseconds(found.work(LOWERED)),
        spread(low, ".2f"),
        "yes" if statistics.median(low) <= MOST else "no",
        f"{found.least(LOWERED):.2f}",
        spread(ratios(found.work(FILE_KERNELS), found.floor), ".2f"),
        spread(scaled, ".2f"),
        spread(ratios(found.added(cpu=False), found.floor), ".2f"),
        spread(ratios(found.added(cpu=True), found.floor), ".2f"),
        spread(ratios(found.added(side=FILE, cpu=True), found.floor), ".2f"),
    ]


def step_row(case: Case, threads: int, found: Found) -> list[str]:
    """Inserted work beside the unscaled step."""
    plain, cpu = found.step(PLAIN), [cpu for _, cpu in found.steps[PLAIN]]
    share = ratios(found.work(LOWERED), plain)
    return [
        case.name,
        str(threads),
        milliseconds(plain),
        milliseconds(found.work(LOWERED)),
        spread(share, ".1%"),
        "yes" if statistics.median(share) <= MOST_OF_A_STEP else "no",
        spread(ratios(found.work(FILE_KERNELS), plain), ".1%"),
        spread(ratios(found.work(SCALED), plain), ".1%"),
        spread(ratios(found.added(cpu=False), plain), ".1%"),
        spread(ratios(found.added(cpu=True), cpu), ".1%"),
        spread(ratios(found.added(side=FILE, cpu=True), cpu), ".1%"),
    ]


def parts_row(case: Case, threads: int, found: Found) -> list[str]:
    """The largest parts of what gs.Session runs of inserted work."""
    largest = itertools.islice(parts(found.kernels[LOWERED]).items(), 5)
    return [case.name, str(threads), ", ".join(f"{part} {share:.0%}" for part, share in largest)]


FLOOR_HEADER = (
    "gradients",
    "threads",
    "floor, ms",
    "inserted, ms",
    "inserted / floor",
    f"<= {MOST}",
    "least / least",
    "file / floor",
    "as scaled / floor",
    "(session - plain) / floor",
    "the same, CPU time",
    "(file - plain) / floor, CPU time",
)
STEP_HEADER = (
    "step",
    "threads",
    "plain, ms",
    "inserted, ms",
    "inserted / plain",
    f"<= {MOST_OF_A_STEP:.0%}",
    "file / plain",
    "as scaled / plain",
    "session / plain - 1",
    "the same, CPU time",
    "file / plain - 1, CPU time",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    choices = (*SETS, *TRANSFORMERS)
    parser.add_argument("--torch", type=Path, metavar="PYTHON")
    parser.add_argument("--graphs", type=Path, metavar="FOLDER")
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--only", nargs="+", choices=choices, default=choices, metavar="CASE")
    parser.add_argument(
        "--rate", choices=["input", "constant"], default="input", help="what the learning rate is in a graph"
    )
    parser.add_argument("--spinning", action="store_true", help="let ONNX Runtime's threads spin while they wait")
    parser.add_argument("--variants", action="store_true", help="time other ways to test and unscale gradients instead")
    parser.add_argument("--quick", action="store_true", help="tiny models")
    arguments = parser.parse_args()
    if arguments.rounds < 2:
        parser.error("--rounds: quartiles need 2 or more")
    named = [name for name in arguments.only if name in TRANSFORMERS]
    missing = [] if arguments.variants else lacking(arguments.graphs, named)
    if missing and arguments.torch is None:
        parser.error(
            f"no graphs of {', '.join(missing)}: --torch names an interpreter with PyTorch, which exports them"
        )
    for threads in arguments.threads:
        print(machine({}, threads))
    if arguments.variants:
        run_variants(arguments)
        return
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.graphs or Path(temporary)
        if missing:
            export(arguments.torch, folder, missing, arguments.rate, quick=arguments.quick)
        try:
            run(arguments, folder)
        except ValueError as error:
            sys.exit(f"floor.py: {error}")


def run(arguments: argparse.Namespace, folder: Path) -> None:
    """Measure what is asked for, and print it."""
    constant, quick = arguments.rate == "constant", arguments.quick
    cases = itertools.chain(
        generated([name for name in arguments.only if name in SETS], constant_rate=constant, quick=quick),
        exported([name for name in arguments.only if name in TRANSFORMERS], folder, quick=quick),
    )
    rows: dict[bool, list[list[str]]] = {False: [], True: []}
    largest = []
    for case in cases:
        for threads in arguments.threads:
            found = measure(case, arguments.rounds, threads, spinning=arguments.spinning)
            is_step = case.name in TRANSFORMERS
            rows[is_step].append((step_row if is_step else floor_row)(case, threads, found))
            largest.append(parts_row(case, threads, found))
            print(rows[is_step][-1], largest[-1], file=sys.stderr, flush=True)
    for header, found_rows in ((FLOOR_HEADER, rows[False]), (STEP_HEADER, rows[True])):
        if found_rows:
            print(f"\n{table(header, found_rows)}")
    print(f"\n{table(('inserted work', 'threads', 'the largest parts of it'), largest)}")


def run_variants(arguments: argparse.Namespace) -> None:
    """Measure other ways to do what is inserted, on one tensor of each size, and print them."""
    sizes = {
        name: 128 if arguments.quick else math.isqrt(SETS[name]) * WIDTH for name in arguments.only if name in SETS
    }
    rows = []
    for name, text in (CHECKS | UNSCALES).items():
        row = [name]
        for size in sizes.values():
            copy = Copy([(size, size)])
            for threads in arguments.threads:
                made = options(threads, spinning=arguments.spinning)
                pairs = list(
                    variant_times(text, size, WARM_UP + arguments.rounds, made, lambda copy=copy: sum(copy.seconds()))
                )[WARM_UP:]
                own, floor = zip(*pairs, strict=True)
                row += [milliseconds(own), f"{min(own) / min(floor):.2f}"]
        rows.append(row)
        print(row, file=sys.stderr, flush=True)
    columns = [f"{name} MB, {threads} threads, ms | least / least" for name in sizes for threads in arguments.threads]
    print(f"\n{table(('', *' | '.join(columns).split(' | ')), rows)}")


if __name__ == "__main__":
    main()
