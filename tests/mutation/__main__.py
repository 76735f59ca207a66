"""Try the tests on small mistakes in the code: `python -m tests.mutation FOLDER [--of PACKAGE ...] [--count N]`.

FOLDER keeps everything; a run that was interrupted goes on. First a tier runs once on the code without a mistake, and
the tests that come by each mistake are recorded. Then each mistake is tried on the files of tests that come by it, the
quickest first, until one fails: on the quick tier, and those with the numbers after --full on the full tier.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.mutation.sites import Mutant, choose_mutants, write_package

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("analysis", "flow", "passes", "step")
_FIRST = 60  # tests that are tried before the files of all others are imported
PYTEST = ("-m", "pytest", "-p", "tests.mutation.selection", "-p", "no:cacheprovider", "-q")


class Trial:
    """Mutants and the tests that may kill them, in a folder.

    Attributes:
        folder: the folder.
        mutants: the mutants, by number.
        seconds: `{full: {name: seconds}}` of the tests that pass without a mutant.
        visitors: the files of tests that come by each mutant.
    """

    def __init__(self, folder: Path, packages: Sequence[str], count: int, seed: int, processes: int) -> None:
        self.folder, self.code, self.processes = folder, folder / "code", processes
        if not self.code.exists():
            self.mutants = choose_mutants(ROOT, [f"graphscale/{name}" for name in packages], count, seed)
            write_package(ROOT, self.mutants, self.code)
            (folder / "mutants.json").write_text(json.dumps([dataclasses.asdict(mutant) for mutant in self.mutants]))
        self.mutants = [Mutant(**each) for each in json.loads((folder / "mutants.json").read_text())]
        self.seconds: dict[bool, dict[str, float]] = {False: {}, True: {}}
        self.visitors: dict[int, set[str]] = collections.defaultdict(set)

    def _run(self, *options: str, timeout: float | None = None, **environment: str | Path) -> int:
        environment = {**os.environ, "PYTHONPATH": str(self.code), **{key: str(at) for key, at in environment.items()}}
        process = subprocess.Popen(
            [sys.executable, *PYTEST, *options],
            cwd=self.code,
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            return process.wait(timeout)
        except subprocess.TimeoutExpired:
            return -1
        finally:
            if process.poll() is None:
                os.killpg(process.pid, 9)
                process.wait()

    def record(self, full: bool) -> None:
        """Run a tier without a mutant, unless that is done; read which tests pass, and which come by each mutant."""
        tier = "full" if full else "quick"
        visits, outcomes, done = (self.folder / f"{name}-{tier}" for name in ("visits", "outcomes", "recorded"))
        if not done.exists():
            visits.mkdir(exist_ok=True)
            outcomes.mkdir(exist_ok=True)
            code = self._run(
                *("-m", "full" if full else "not full", "-n", str(self.processes)),
                GRAPHSCALE_MUTANT_VISITS=visits,
                GRAPHSCALE_MUTANT_RECORD=outcomes,
            )
            if code not in (0, 1):
                sys.exit(f"the {tier} tier did not run to its end: pytest ended with {code}")
            done.touch()
        for path in sorted(outcomes.iterdir()):
            for line in path.read_text(encoding="utf-8").splitlines():
                name, _, seconds, outcome = json.loads(line)
                if outcome == "passed":
                    self.seconds[full][name] = seconds
        for path in sorted(visits.iterdir()):
            for line in path.read_text(encoding="utf-8").splitlines():
                number, _, test = line.partition(" ")
                self.visitors[int(number)].add(test)

    def _tests_for(self, number: int, full: bool) -> dict[str, float]:
        """Order the tests of the files that come by a mutant, with their seconds.

        Those that come by it are first, the quickest ahead. Where that is the import of a module, all do: those of
        the module's own folder are first then.
        """
        visitors, seconds = self.visitors[number], self.seconds[full]
        files = {test.partition("::")[0] for test in visitors}
        everywhere = "" in visitors
        folder = f"tests/{self.mutants[number].path.split('/')[1]}/"

        def rank(name: str) -> tuple[bool, float]:
            near = name.startswith(folder) if everywhere else name in visitors
            return not near, seconds[name]

        chosen = [name for name in seconds if everywhere or name.partition("::")[0] in files]
        return {name: seconds[name] for name in sorted(chosen, key=rank)}

    def _kill_imported(self, number: int, full: bool) -> str:
        """Return the first test of a tier that fails with a mutant of what an import runs, or "survived"."""
        tests = list(self._tests_for(number, full).items())
        for part, chosen in enumerate((tests[:_FIRST], tests[_FIRST:])):
            if chosen and (outcome := self._try(number, f"{number}-{full}-{part}", dict(chosen))) != "survived":
                return outcome
        return "survived"

    def _try(self, number: int, label: str, tests: dict[str, float]) -> str:
        listed, record = self.folder / f"tests-{label}.txt", self.folder / f"outcomes-{label}"
        listed.write_text("\n".join(tests), encoding="utf-8")
        record.mkdir(exist_ok=True)
        code = self._run(
            *("-x", "-m", "", f"--basetemp={self.folder / f'temporary-{label}'}"),
            *sorted({name.partition("::")[0] for name in tests}),
            timeout=300 + 10 * sum(tests.values()),
            GRAPHSCALE_MUTANT=str(number),
            GRAPHSCALE_MUTANT_TESTS=listed,
            GRAPHSCALE_MUTANT_RECORD=record,
        )
        if code == 0:
            return "survived"
        lines = [json.loads(line) for path in record.iterdir() for line in path.read_text().splitlines()]
        return next((name for name, _, _, outcome in lines if outcome == "failed"), "timeout" if code < 0 else "import")

    def _results(self, full: bool) -> tuple[Path, dict[int, str]]:
        """Return the file of a tier's outcomes, and the outcomes by mutant."""
        path = self.folder / f"results-{'full' if full else 'quick'}.jsonl"
        return path, dict(json.loads(line) for line in path.read_text().splitlines()) if path.exists() else {}

    def run(self, numbers: list[int], full: bool) -> None:
        """Try mutants on a tier, and write down the outcomes."""
        path, done = self._results(full)
        left = [number for number in numbers if number not in done]
        imported = [number for number in left if "" in self.visitors[number]]
        forked = [number for number in left if "" not in self.visitors[number]]
        with concurrent.futures.ThreadPoolExecutor(self.processes) as pool:
            list(pool.map(lambda k: self._fork(k, forked[k :: self.processes], full, path), range(self.processes)))
            for number, outcome in zip(
                imported, pool.map(lambda number: self._kill_imported(number, full), imported), strict=True
            ):
                with path.open("a") as file:
                    file.write(json.dumps([number, outcome]) + "\n")

    def _fork(self, worker: int, numbers: list[int], full: bool, results: Path) -> None:
        """Try mutants of what no import runs, in forks of a process that has collected the tests of a tier."""
        plan = self.folder / f"plan-{worker}.json"
        plan.write_text(json.dumps({number: self._tests_for(number, full) for number in numbers}), encoding="utf-8")
        tier = "full" if full else "not full"
        code = self._run("-m", tier, GRAPHSCALE_MUTANT_PLAN=plan, GRAPHSCALE_MUTANT_RESULTS=results)
        if code not in (0, 5):
            sys.exit(f"worker {worker} did not run to its end: pytest ended with {code}")

    def report(self) -> None:
        """Print a line for each kind of mutant, and the survivors."""
        full = self._results(full=True)[1]
        tallies: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
        for number, killer in self._results(full=False)[1].items():
            mutant = self.mutants[number]
            if killer != "survived":
                tallies[mutant.kind]["quick"] += 1
            elif full.get(number, "survived") != "survived":
                tallies[mutant.kind]["full"] += 1
                print(f"{number}: only {full[number]}")
            else:
                tallies[mutant.kind]["survivors"] += 1
                tried = "" if number in full else ", not tried on the full tier"
                print(f"{number}: {mutant.path}:{mutant.line}: {mutant.before} -> {mutant.after}{tried}")
        for kind, tally in sorted(tallies.items()):
            print(f"| {kind} | {tally['quick']} | {tally['full']} | {tally['survivors']} |")


def main() -> None:
    """Run the trial that the command line describes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--of", nargs="+", choices=PACKAGES, default=PACKAGES, metavar="PACKAGE", dest="packages")
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--full", type=int, nargs="*", metavar="NUMBER", help="survivors to try on the full tier")
    chosen = parser.parse_args()
    chosen.folder.mkdir(parents=True, exist_ok=True)
    trial = Trial(chosen.folder.resolve(), chosen.packages, chosen.count, chosen.seed, chosen.processes)
    trial.record(full=False)
    trial.run(list(range(len(trial.mutants))), full=False)
    if chosen.full:
        trial.record(full=True)
        trial.run(chosen.full, full=True)
    trial.report()


if __name__ == "__main__":
    main()
