"""Mutation testing of the rewrite: which checks notice a damaged scaled graph?

    python benchmarks/mutants.py [--models NAME ...] [--kinds TEXT ...] [--targets T ...] [--sites N] [--every-target]
        [--measure NAME ...] [--output FILE.md]

Each graph of models/, and a step with wide layers, is scaled and damaged in one place at a time, in every way of
`mutation/`; then `verify` (the match with the expected graph, its other proofs, and its runs) and `lint` check it. A
mutant that verify accepts is a survivor, unless it is shown to change nothing: the command lists them and ends with
exit code 1.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import graphscale as gs  # noqa: E402
from benchmarks.mutation import KINDS, SAME, Kind  # noqa: E402
from benchmarks.mutation.damaged import Damaged  # noqa: E402
from benchmarks.mutation.scalings import MODELS, TARGETS, WIDE, Scaled  # noqa: E402

__all__ = ["Mutant", "Verdict", "judge", "mutants"]

# Small graphs, which have a site for almost every kind between them; all others take an hour or more.
MEASURED = (
    "jax/mlp",
    "jax/mlp_sgd",
    "ort/bce",
    "ort/digits_mlp",
    "ort/gradbuilder_regression",
    "ort/opset12",
    "pytorch/clip_by_value",
    "pytorch/mlp_float16",
    "pytorch/mlp_momentum",
    "pytorch/mse_tanh",
    "pytorch/two_losses",
    *WIDE,
)
# The checks of translation validation, the first alone is left out by `--numeric`.
MATCH = ("translation", "initial values", "metadata of the scaling")


@dataclasses.dataclass(frozen=True)
class Mutant:
    """A damaged graph.

    Attributes:
        model: the name of the original in models/.
        target: the target that it was scaled for.
        kind: the kind of damage.
        site: its place.
        damaged: the damaged graph.
        harmless: the reason why the damage changes nothing that anybody could notice; None if it does.
        hints: the hints for verify.
        sound: the graph before it is damaged.
    """

    model: str
    target: str
    kind: Kind
    site: str
    damaged: ir.Model | onnx.ModelProto
    harmless: str | None
    hints: dict[str, Any]
    sound: ir.Model

    def __str__(self) -> str:
        return f"{self.kind.name} at {self.site} of {self.model} ({self.target})"


@dataclasses.dataclass(frozen=True)
class Verdict:
    """The checks that noticed, and their words.

    Attributes:
        by: of "match", "proof", "runs", "refused" and the codes of lint, those that noticed.
        accepted: whether verify accepts the mutant.
        numeric: whether `verify(..., numeric=True)` notices.
        why: the words of the first check that noticed.
    """

    by: tuple[str, ...]
    accepted: bool
    numeric: bool
    why: str


def mutants(
    models: Sequence[str],
    targets: Sequence[str],
    kinds: Sequence[Kind],
    sites: int = 1,
    every_target: bool = False,
    find: Callable[[str], Scaled] = Scaled,
) -> Iterator[tuple[Mutant, ir.Model]]:
    """Yield every mutant, with its original.

    Args:
        models: names of graphs of models/.
        targets: the targets to scale them for; from model to model another one comes first.
        kinds: the kinds of damage.
        sites: the number of sites of a graph where each kind is tried, evenly spread.
        every_target: try each kind for every target, not only for the first that gives it a site.
        find: gives the scaled graphs of a name.
    """
    for i, name in enumerate(models):
        gc.collect()  # graphs are full of cycles
        scaled = find(name)
        for kind in kinds:
            for target in (*targets[i % len(targets) :], *targets[: i % len(targets)]):
                sound = scaled.model(target, kind.scaling)
                found = [] if sound is None else _spread(list(kind.sites(Damaged(sound))), sites)
                for site in found:
                    assert sound is not None
                    damaged = Damaged(sound)
                    harmless = kind.harmless(damaged, site)
                    kind.damage(damaged, site)
                    hints = scaled.hints(kind.scaling)
                    yield (
                        Mutant(name, target, kind, site, damaged.finish(), harmless, hints, sound),
                        scaled.original(target),
                    )
                if found and not every_target:
                    break


def _spread(sites: list[str], count: int) -> list[str]:
    """The first, the last, and some between."""
    if len(sites) <= count:
        return sites
    return [sites[i * (len(sites) - 1) // max(1, count - 1)] for i in range(count)]


def judge(mutant: Mutant, original: ir.Model, *, runs: int = 1, lint: bool = True) -> Verdict:
    """Show a mutant to verify, with as many runs, and to lint."""
    by: list[str] = []
    reasons: list[str] = []
    accepted = numeric = False
    try:
        report = gs.verify(original, mutant.damaged, runs=runs, **mutant.hints)
        accepted = report.ok
        for check in report.checks:
            if check.status not in ("holds", "skipped"):
                by.append("match" if check.name in MATCH else "proof" if check.proof else "runs")
                numeric = numeric or check.name != MATCH[0]
                reasons.append(f"{check.name}: {check.detail}")
    except gs.GraphscaleError as error:
        by.append("refused")
        numeric = True
        reasons.append(str(error))
    if lint:
        codes = _lint_codes(mutant.damaged) - _lint_codes_of_sound(mutant)
        by += sorted(codes)
        reasons += [f"lint {code}" for code in sorted(codes)]
    return Verdict(tuple(dict.fromkeys(by)), accepted, numeric, reasons[0] if reasons else "")


def _lint_codes(model: ir.Model | onnx.ModelProto) -> set[str]:
    try:
        return {finding.code for finding in gs.lint(model).findings}
    except gs.GraphscaleError:
        return set()


_SOUND: dict[tuple[str, str, str], set[str]] = {}


def _lint_codes_of_sound(mutant: Mutant) -> set[str]:
    """Lint the graph before it is damaged."""
    key = (mutant.model, mutant.target, mutant.kind.scaling)
    if key not in _SOUND:
        _SOUND[key] = _lint_codes(mutant.sound)
    return _SOUND[key]


def main() -> None:
    arguments = _arguments()
    kinds = [k for k in (*KINDS, *SAME) if not arguments.kinds or any(text in k.name for text in arguments.kinds)]
    rows: dict[str, Counter[str]] = {kind.name: Counter() for kind in kinds}
    proofs: dict[str, set[str]] = {kind.name: set() for kind in kinds}
    survivors: list[Mutant] = []
    started = time.perf_counter()
    for mutant, original in mutants(
        arguments.models, arguments.targets, kinds, arguments.sites, arguments.every_target
    ):
        runs = int(mutant.model in arguments.measure)
        verdict, row = judge(mutant, original, runs=runs), rows[mutant.kind.name]
        row.update(("made", *verdict.by))
        row["measured"] += runs
        row["accepted"] += verdict.accepted
        row["numeric"] += verdict.numeric and runs
        if mutant.harmless is not None:
            row["harmless"] += 1
            proofs[mutant.kind.name].add(mutant.harmless)
        elif verdict.accepted:
            survivors.append(mutant)
            print(f"survivor: {mutant}", file=sys.stderr)
        if arguments.verbose:
            missed = " (not by numbers)" if runs and not verdict.numeric else ""
            print(f"{mutant}: {', '.join(verdict.by)}{missed}: {verdict.why}", flush=True)
    text = _page(rows, proofs, survivors, arguments, time.perf_counter() - started)
    print(text)
    if arguments.output is not None:
        arguments.output.write_text(text, encoding="utf-8")
    sys.exit(1 if survivors else 0)


def _page(
    rows: dict[str, Counter[str]],
    proofs: dict[str, set[str]],
    survivors: Sequence[Mutant],
    arguments: argparse.Namespace,
    seconds: float,
) -> str:
    damage = [kind.name for kind in KINDS if kind.name in rows]
    total = sum(rows[name]["made"] for name in damage)
    numeric, measured = (sum(rows[name][column] for name in damage) for column in ("numeric", "measured"))
    lines = [
        "# Mutants",
        "",
        "Written by `python benchmarks/mutants.py --output benchmarks/MUTANTS.md`.",
        "",
        f"{total} mutants of {len(arguments.models)} graphs, scaled for {', '.join(arguments.targets)}, by "
        f"{len(damage)} kinds of damage; {len(survivors)} survived. `--numeric` notices {numeric} of {measured}. "
        f"{seconds:.0f} s.",
        "",
        "| damage | made | match | proof | runs | lint | numeric, of | harmless | accepted |",
        "|---|---:|---:|---:|---:|---|---:|---:|---:|",
        *(_row(name, rows[name]) for name in damage),
        "",
        "Match: the graph, its initial values or its metadata are not those that the original gives. Proof: what",
        "`graphscale verify` proves on the graph otherwise, or refuses to read. Runs: what it measures (`--runs 1`)",
        f"in {len(arguments.measure)} graphs: {', '.join(arguments.measure)}.",
        "Numeric: `verify --numeric` notices, of the mutants of these.",
        "Lint: codes of `graphscale lint` that the sound graph does not get.",
        "Harmless: nothing changes that anybody could notice:",
        "",
        *(f"- {name}: {'; '.join(sorted(proofs[name]))}." for name in damage if proofs[name]),
        "",
        "## Changes that are none",
        "",
        "| change | reason | made | accepted |",
        "|---|---|---:|---:|",
        *(
            f"| {kind.name} | {'; '.join(sorted(proofs[kind.name]))} | {row['made']} | {row['accepted']} |"
            for kind in SAME
            if (row := rows.get(kind.name)) is not None and row["made"]
        ),
        "",
    ]
    return "\n".join(lines)


def _row(name: str, row: Counter[str]) -> str:
    codes = ", ".join(f"{code} ({n})" for code, n in sorted(row.items()) if code.startswith("GS"))
    numbers = [row["made"], row["match"], row["proof"] + row["refused"], row["runs"]]
    last = [f"{row['numeric']}, {row['measured']}", row["harmless"], row["accepted"]]
    return f"| {name} | {' | '.join(map(str, numbers))} | {codes} | {' | '.join(map(str, last))} |"


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS, metavar="NAME")
    parser.add_argument("--kinds", nargs="+", default=[], metavar="TEXT", help="parts of names of kinds")
    parser.add_argument("--targets", nargs="+", default=list(TARGETS), choices=TARGETS)
    parser.add_argument("--sites", type=int, default=1, help="of each kind in each graph")
    parser.add_argument(
        "--every-target", action="store_true", help="try each kind for all targets, not only for one of each graph"
    )
    parser.add_argument("--output", type=Path, help="where to write the table as Markdown")
    parser.add_argument(
        "--measure", nargs="*", default=list(MEASURED), choices=MODELS, metavar="NAME", help="graphs that are run"
    )
    parser.add_argument("--verbose", action="store_true", help="print each mutant with the checks that noticed it")
    return parser.parse_args()


if __name__ == "__main__":
    main()
