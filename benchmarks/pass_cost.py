"""The cost of scaling a training graph, against reading and writing the same file with onnx_ir.

    python benchmarks/pass_cost.py [--nodes 1000 10000 100000] [--rounds 15] [--large-rounds 15] [--graph gpt|residual]
        [--no-large] [--folder FOLDER] [--json FILE]

    bare        onnx_ir.load, onnx_ir.save
    graphscale  graphscale.scale (load, analyse, rewrite, prove, stamp), save

The graphs are training steps of a GPT with clipping and AdamW (gpt_like.py), or of a residual network (residual.py),
and one GPT with more than 2 GB of weights and moments in a file beside the model, which both jobs write anew in another
folder.

Each job is a fresh process; in a round both work on every graph in turn, in alternating order; their files are deleted
and the disk is at rest before the next begins. A first round does not count. Times are those of the job alone, without
start and imports, wall time and CPU time; "process" is the whole process as the user sees it. Ratios are medians of the
rounds' ratios, also those of two sizes. Peak memory is the largest resident set of the process, including that of
Python and the imports, which is also reported. Graphs of 50,000 nodes or more, and the large one, have `--large-rounds`
rounds.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from graphs import Builder, constant, variable
from residual import NODES_PER_LAYER, training_graph

# Names that other benchmarks import from here.
__all__ = ["NODES_PER_LAYER", "Builder", "constant", "training_graph", "variable"]

JOBS = ("bare", "graphscale")
JOB, MODELS = (Path(__file__).with_name(f"pass_cost_{name}.py") for name in ("job", "models"))
MANY_NODES = 50_000
# The largest cost of scaling over that of bare onnx_ir, and that of a graph so small that fixed costs show.
LIMIT, LIMIT_OF_FEW, FEW_NODES = 1.6, 2, 2_000


@dataclasses.dataclass(frozen=True)
class Subject:
    """A model to read, scale and write.

    Attributes:
        name: of the graph.
        nodes: number of nodes.
        path: its file.
        rounds: number of times that each job works on it.
    """

    name: str
    nodes: int
    path: Path
    rounds: int

    @property
    def megabytes(self) -> float:
        """The size of the file, and of what is beside it."""
        return sum(file.stat().st_size for file in self.path.parent.iterdir() if file.stem == self.path.stem) / 1e6


@dataclasses.dataclass(frozen=True)
class Cost:
    """The measures of the rounds.

    Attributes:
        subject: the model of the jobs.
        rounds: `{job: {measure: [a number for each round]}}`; the measures are wall, cpu and process, in seconds, and
            peak, in MB.
    """

    subject: Subject
    rounds: dict[str, dict[str, list[float]]]

    def median(self, job: str, measure: str) -> float:
        """The median of one measure of one job."""
        return statistics.median(self.rounds[job][measure])

    def ratios(self, measure: str) -> tuple[float, float, float]:
        """The lower quartile, the median and the upper quartile of graphscale's cost over bare's, round by round."""
        return quartiles(self.rounds["graphscale"][measure], self.rounds["bare"][measure])

    def growth(self, smaller: Cost, job: str, measure: str) -> tuple[float, float, float]:
        """The lower quartile, the median and the upper quartile of a job's cost over that of a smaller graph."""
        mine, theirs = self.rounds[job][measure], smaller.rounds[job][measure]
        count = min(len(mine), len(theirs))
        return quartiles(mine[:count], theirs[:count])

    def to_dict(self) -> dict[str, Any]:
        """All of it, for JSON."""
        subject = {"graph": self.subject.name, "nodes": self.subject.nodes, "megabytes": self.subject.megabytes}
        return {**subject, "rounds": self.rounds}


def quartiles(costs: Sequence[float], others: Sequence[float]) -> tuple[float, float, float]:
    """The lower quartile, the median and the upper quartile of what the rounds cost over what they cost another."""
    ratios = [mine / theirs for mine, theirs in zip(costs, others, strict=True)]
    found = statistics.quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else ratios * 3
    return found[0], found[1], found[2]


def run(script: Path, *arguments: object) -> dict[str, float]:
    """Run a script in a process of its own, and return what it tells, and the seconds of the process."""
    begin = time.perf_counter()
    done = subprocess.run(
        [sys.executable, str(script), *map(str, arguments)], capture_output=True, text=True, check=False
    )
    process = time.perf_counter() - begin
    if done.returncode:
        raise SystemExit(f"{script.name} {' '.join(map(str, arguments))} failed:\n{done.stderr}")
    found: dict[str, float] = json.loads(done.stdout)
    return {**found, "process": process}


def measure(subjects: Sequence[Subject], folder: Path) -> list[Cost]:
    """Let the jobs, and the graphs, take turns."""
    costs = [Cost(subject, {job: {} for job in JOBS}) for subject in subjects]
    for i in range(max((subject.rounds for subject in subjects), default=0) + 1):
        for cost in (cost for cost in costs if i <= cost.subject.rounds):
            for job in JOBS if i % 2 else JOBS[::-1]:
                with tempfile.TemporaryDirectory(dir=folder) as output:
                    os.sync()
                    found = run(JOB, job, cost.subject.path, Path(output, "out.onnx"))
                for name, value in found.items() if i else ():
                    cost.rounds[job].setdefault(name, []).append(value)
    return costs


def import_costs(rounds: int) -> dict[str, list[float]]:
    """The seconds of importing onnx and onnx_ir, and on top of them graphscale, and all that scales; peaks in MB."""
    found: dict[str, list[float]] = {key: [] for key in ("base", "graphscale", "scale", "bare peak", "graphscale peak")}
    for _ in range(rounds):
        seconds = run(JOB, "import", "graphscale")
        found["base"].append(seconds["onnx"] + seconds["onnx_ir"])
        found["graphscale"].append(seconds["graphscale"])
        found["scale"].append(sum(value for name, value in seconds.items() if name.startswith("graphscale")))
        found["graphscale peak"].append(seconds["peak"])
        found["bare peak"].append(run(JOB, "import", "bare")["peak"])
    return found


def help_imports() -> set[str]:
    """The top-level modules that `graphscale --help` imports."""
    command = [sys.executable, "-X", "importtime", "-m", "graphscale", "--help"]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stderr.splitlines()
    return {line.rpartition("|")[2].strip().partition(".")[0] for line in lines if line.startswith("import time:")}


def seconds(cost: Cost, job: str, measure: str = "wall") -> str:
    """A median with the whole range."""
    values = cost.rounds[job][measure]
    return f"{statistics.median(values):.3f} ({min(values):.3f} to {max(values):.3f})"


def shown(ratios: tuple[float, float, float]) -> str:
    """A median ratio with its quartiles."""
    low, middle, high = ratios
    return f"{middle:.2f} ({low:.2f} to {high:.2f})"


def print_table(costs: Sequence[Cost]) -> None:
    print("| graph | nodes | MB | rounds | bare, s | graphscale, s | ratio | ratio of CPU time | ratio of processes |")
    print("|---|---:|---:|---:|---:|---:|---:|---:|---:|")
    for cost in costs:
        subject = cost.subject
        row = [subject.name, f"{subject.nodes:,}", f"{subject.megabytes:,.1f}", str(subject.rounds)]
        row += [seconds(cost, job) for job in JOBS]
        row += [shown(cost.ratios(name)) for name in ("wall", "cpu", "process")]
        print(f"| {' | '.join(row)} |")
    print()
    print("| graph | nodes | peak memory: bare, MB | graphscale, MB | ratio |")
    print("|---|---:|---:|---:|---:|")
    for cost in costs:
        peaks = [f"{cost.median(job, 'peak'):.0f}" for job in JOBS]
        print(f"| {cost.subject.name} | {cost.subject.nodes:,} | {' | '.join(peaks)} | {shown(cost.ratios('peak'))} |")
    print()


def print_limits(costs: Sequence[Cost], imports: dict[str, list[float]]) -> None:
    """Print the limits of the costs."""
    rows: list[tuple[str, float, float]] = []
    growths: list[tuple[str, str, str]] = []
    steps = [cost for cost in costs if not cost.subject.name.startswith("large")]
    by_size = {round(cost.subject.nodes, -len(str(cost.subject.nodes)) + 1): cost for cost in steps}
    if 100_000 in by_size:
        slow = by_size[100_000]
        rows.append(("100,000 nodes, s", slow.median("graphscale", "wall"), 20))
        if 10_000 in by_size:
            quick = by_size[10_000]
            for name, word in (("wall", "the job by the clock"), ("cpu", "its CPU time"), ("process", "the process")):
                growth = slow.growth(quick, "graphscale", name)
                rows.append((f"100,000 nodes over 10,000, {word}", growth[1], 12))
                growths.append((word, shown(growth), shown(slow.growth(quick, "bare", name))))
    for cost in costs:
        subject = cost.subject
        name = subject.name if subject.name.startswith("large") else f"{subject.nodes:,} nodes"
        limit = LIMIT if subject.nodes > FEW_NODES else LIMIT_OF_FEW
        rows += [(f"{name}, over bare", cost.ratios("wall")[1], limit), ("its CPU time", cost.ratios("cpu")[1], limit)]
        if subject.name.startswith("large"):
            rows.append(("its process", cost.ratios("process")[1], limit))
            rows.append(("its peak memory", cost.ratios("peak")[1], 1.2))
            mine, theirs = (min(cost.rounds[job]["wall"]) for job in ("graphscale", "bare"))
            rows.append(("least over least", mine / theirs, limit))
    medians = {name: statistics.median(values) for name, values in imports.items()}
    rows.append(("import graphscale over import onnx, onnx_ir", medians["graphscale"] / medians["base"], 0.4))
    rows.append(("with all that scales", medians["scale"] / medians["base"], 0.4))
    print("| | measured | at most | holds |\n|---|---:|---:|---|")
    for what, value, limit in rows:
        print(f"| {what} | {value:.2f} | {limit:g} | {'yes' if value <= limit else 'no'} |")
    print(f"| graphscale --help imports onnxruntime | | no | {'no' if 'onnxruntime' in help_imports() else 'yes'} |")
    peaks = f"{medians['bare peak']:.0f} MB with onnx and onnx_ir, {medians['graphscale peak']:.0f} MB with graphscale"
    for word, mine, theirs in growths:
        print(f"\n100,000 nodes over 10,000, {word}: graphscale {mine}, bare {theirs}.", end="")
    print(f"\n\nPeak memory after the imports alone: {peaks}.")


def subjects(options: argparse.Namespace, folder: Path) -> list[Subject]:
    """Write the models."""
    found = []
    for nodes in options.nodes:
        path = folder / f"{options.graph}{nodes}" / "step.onnx"
        path.parent.mkdir()
        count = int(run(MODELS, options.graph, nodes, path)["nodes"])
        found.append(
            Subject(options.graph, count, path, options.rounds if nodes < MANY_NODES else options.large_rounds)
        )
    if not options.no_large:
        path = folder / "large" / "step.onnx"
        path.parent.mkdir()
        count = int(run(MODELS, "large", options.large_blocks, options.large_width, path)["nodes"])
        found.append(Subject("large gpt", count, path, options.large_rounds))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, nargs="*", default=[1_000, 10_000, 100_000])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--large-rounds", type=int, default=15)
    parser.add_argument("--graph", choices=("gpt", "residual"), default="gpt")
    parser.add_argument("--no-large", action="store_true")
    parser.add_argument("--large-blocks", type=int, default=12)
    parser.add_argument("--large-width", type=int, default=1024)
    parser.add_argument("--folder", type=Path, help="where to write, up to 5 GB; default: a temporary folder")
    parser.add_argument("--json", type=Path, help="write all rounds into this file as well")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        costs = measure(subjects(options, Path(name)), Path(name))
        imports = import_costs(options.rounds)
        print_table(costs)
        print_limits(costs, imports)
        if options.json is not None:
            options.json.write_text(json.dumps({"costs": [cost.to_dict() for cost in costs], "imports": imports}))


if __name__ == "__main__":
    main()
