"""Try hostile files of every category, and write the table of what was tried.

    python -m fuzz.hostile --minutes 5                     # five minutes of each category
    python -m fuzz.hostile terminal loss --tries 1000      # so many cases of some categories
    python -m fuzz.hostile terminal --only 123             # one case again
    python -m fuzz.hostile --minutes 30 --table docs/project/hostile-files.md

A case is known by its category, the seed and its number: the same files each time. Exit code 1 if a promise was broken.
"""

from __future__ import annotations

import argparse
import functools
import multiprocessing
import platform
import re
import shlex
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from fuzz.hostile import processes
from fuzz.hostile.categories import CATEGORIES
from fuzz.hostile.runner import Category, Tally, try_case, try_many

_BEGIN, _END = "<!-- table of hostile files -->\n", "<!-- end of the table -->\n"


def main() -> int:
    """Try what the command line asks for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("categories", nargs="*", choices=[[], *CATEGORIES], help="Default: all.")
    parser.add_argument("--minutes", type=float, help="Of each category.")
    parser.add_argument("--tries", type=int, help="Of each category.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="The number of the first case.")
    parser.add_argument("--only", type=int, help="The number of the only case.")
    parser.add_argument("--kind", help="Cases of this kind alone count.")
    parser.add_argument("--jobs", type=int, default=1, help="Categories at the same time.")
    parser.add_argument("--table", type=Path, help="A page of Markdown whose table is written anew.")
    given = parser.parse_args()
    chosen = [CATEGORIES[name] for name in given.categories or CATEGORIES]
    if given.kind is not None:
        chosen = [Category(each.name, each.promise, {given.kind: each.kinds[given.kind]}) for each in chosen]
    if given.only is not None:
        processes.warm_up()
        faults = [try_case(category, given.seed, given.only) for category in chosen]
        print("\n".join(fault or "the promise is kept" for fault in faults))
        return int(any(faults))
    if given.minutes is None and given.tries is None:
        parser.error("give --minutes or --tries")
    tallies: dict[str, Tally] = {}
    with ProcessPoolExecutor(given.jobs, multiprocessing.get_context("fork")) as pool:
        for category, tally in zip(chosen, pool.map(functools.partial(_try, given), chosen), strict=True):
            tallies[category.name] = tally
    if given.table is not None:
        write_table(given.table, tallies, shlex.join(["python", "-m", "fuzz.hostile", *sys.argv[1:]]))
    return int(any(tally.faults for tally in tallies.values()))


def _try(given: argparse.Namespace, category: Category) -> Tally:
    """Try cases of a category, and print the faults as they are found."""
    seconds, tally = None if given.minutes is None else 60 * given.minutes, Tally()
    for tally in try_many(category, given.seed, given.tries, seconds, given.first):
        number = given.first + tally.tries - 1
        if number in tally.faults:
            print(f"    {category.name} {number}: {tally.faults[number]}", flush=True)
    codes = ", ".join(f"{code}: {count}" for code, count in sorted(processes.CODES.items()))
    failed = f"{len(tally.faults)} of {tally.tries} failed"
    print(f"{category.name}: {failed}, {tally.seconds:.0f} s; exit codes {codes or 'none'}", flush=True)
    processes.CODES.clear()
    return tally


def write_table(page: Path, tallies: dict[str, Tally], command: str) -> None:
    """Put the counts of a run into a page, between two marks."""
    lines = ["| category | promise | kinds | tries | failures | seconds |", "|---|---|---|---|---|---|"]
    for name, tally in tallies.items():
        cells = (
            name,
            CATEGORIES[name].promise,
            len(tally.by_kind),
            tally.tries,
            len(tally.faults),
            f"{tally.seconds:.0f}",
        )
        lines.append(f"| {' | '.join(map(str, cells))} |")
    lines += ["", f"`{command}`, Python {platform.python_version()} on {platform.system()}.", ""]
    text = page.read_text(encoding="utf-8")
    inside = re.compile(f"{re.escape(_BEGIN)}.*{re.escape(_END)}", re.DOTALL)
    if not inside.search(text):
        raise SystemExit(f"{page} has no place for the table: {_BEGIN.strip()}")
    page.write_text(inside.sub(lambda _: f"{_BEGIN}\n" + "\n".join(lines) + f"\n{_END}", text), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
