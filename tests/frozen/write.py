"""Write the tables of behaviour, or compare them: `python -m tests.frozen.write [--check] [--only models zoo ...]`.

`--check` writes nothing: it prints the rows that differ from the committed ones, field by field, and ends with exit
code 1 if there is one.
"""

from __future__ import annotations

import argparse
import json
import logging
import multiprocessing
import os
import sys
import time
import warnings
from collections.abc import Iterator
from typing import Any

from tests.frozen.stored import FOLDER, Row, read_table
from tests.frozen.tables import TABLES

__all__ = ["differences", "make_row"]

GROUPS = sorted({table.group for table in TABLES.values()})


def make_row(name: str, key: str) -> Row:
    """Make a row as a file has it."""
    row: Row = json.loads(json.dumps(TABLES[name].row(key)))
    return row


def differences(before: Row, after: Row) -> Iterator[str]:
    """Describe each field that differs, a line each."""
    for field in dict.fromkeys((*before, *after)):
        one, other = (row.get(field, "nothing") for row in (before, after))
        if one != other and isinstance(one, list) and isinstance(other, list):
            gone = [each for each in one if each not in other]
            new = [each for each in other if each not in one]
            yield f"{field}: - {_text(gone)} + {_text(new)}" if gone or new else f"{field}: in another order"
        elif one != other and isinstance(one, dict) and isinstance(other, dict):
            yield from (f"{field}.{line}" for line in differences(one, other))
        elif one != other:
            yield f"{field}: - {_text(one)} + {_text(other)}"


def _text(content: Any) -> str:
    return content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)


def _quiet() -> None:
    """Silence warnings, and what onnx_ir logs about damaged graphs."""
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)


def _make(task: tuple[str, str]) -> Row:
    return make_row(*task)


def _write(name: str, rows: dict[str, Row]) -> None:
    lines = [json.dumps({"key": key, **row}, ensure_ascii=False) for key, row in sorted(rows.items())]
    (FOLDER / f"{name}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


def _compare(name: str, rows: dict[str, Row], every: int) -> int:
    """Print the differences of a table; return the number of rows that differ."""
    before, count = read_table(name), 0
    if every > 1:
        before = {key: row for key, row in before.items() if key in rows}
    for key in sorted({*before, *rows}):
        lines = list(differences(before.get(key, {}), rows.get(key, {})))
        count += bool(lines)
        if lines:
            print(f"{name}: {key}", *(f"    {line}" for line in lines), sep="\n", flush=True)
    return count


def main() -> int:
    """Write or compare the chosen tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=GROUPS, default=GROUPS)
    parser.add_argument("--check", action="store_true", help="compare, and write nothing")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="with --check: every n-th row")
    parser.add_argument("--processes", type=int, default=1, metavar="N")
    chosen = parser.parse_args()
    if chosen.every > 1 and not chosen.check:
        parser.error("--every needs --check: a table is written whole")
    differing = 0
    with multiprocessing.get_context("spawn").Pool(chosen.processes, _quiet) as pool:
        for name, table in TABLES.items():
            if table.group not in chosen.only:
                continue
            started, keys = time.perf_counter(), table.keys()[:: chosen.every]
            made = pool.imap(_make, [(name, key) for key in keys], chunksize=2)
            rows = dict(zip(keys, made, strict=True))
            if not chosen.check:
                _write(name, rows)
            else:
                differing += _compare(name, rows, chosen.every)
            print(f"{name}: {len(rows)} rows, {time.perf_counter() - started:.0f} s", file=sys.stderr, flush=True)
    if chosen.check:
        print(f"{differing} rows differ")
    return int(differing > 0)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
