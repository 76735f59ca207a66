"""A verification as a table in the terminal."""

from __future__ import annotations

import shlex
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from graphscale.checks.verification.verify_report import Difference, VerifyReport
from graphscale.cli.show import print_json

__all__ = ["replay_command", "show_differences", "show_verification"]

_STYLES = {"holds": "green", "fails": "bold red", "skipped": "dim"}
_SHOWN = 6


def show_verification(report: VerifyReport, as_json: bool, title: str, command: str | None) -> None:
    """Print a report on stdout.

    Args:
        report: the report.
        as_json: print JSON.
        title: what was verified.
        command: what runs the counterexample again, if there is one.
    """
    if as_json:
        print_json({**report.to_dict(), "replay": command})
        return
    console = Console(highlight=False)
    console.print(Text(title), soft_wrap=True)
    table = Table(show_edge=False, pad_edge=False, box=None, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for check in report.checks:
        how = "proof  " if check.proof else "measure"
        table.add_row(
            Text(how, "dim"), Text(check.name), Text(check.status, _STYLES[check.status]) + f": {check.detail}"
        )
    console.print(table)
    for note in report.notes:
        console.print(Text(f"note: {note}"), soft_wrap=True)
    failed = len(report.failures)
    verdict = "verified" if report.ok else f"{failed} check{'s' if failed > 1 else ''} failed"
    console.print(Text(f"{verdict} ({report.runs} runs of the scaled graph)", "bold"))
    if command is not None:
        console.print(Text(f"the first counterexample again: {command}"), soft_wrap=True)


def show_differences(report: VerifyReport) -> None:
    """Print what a case should have given, and what it gave."""
    table = Table(show_edge=False, pad_edge=False)
    for column in ("value", "source", "expected", "got"):
        table.add_column(column, overflow="fold")
    for difference in report.differences:
        expected, got = _texts(difference)
        table.add_row(Text(difference.name), difference.source, Text(expected), Text(got))
    if report.differences:
        Console(highlight=False).print(table)


def replay_command(original: Path, scaled: Path, case: Path) -> str:
    """The command line that runs a counterexample again."""
    return shlex.join(["graphscale", "verify", str(original), str(scaled), "--replay", str(case)])


def _texts(difference: Difference) -> tuple[str, str]:
    """The elements that differ, or the types."""
    expected, got = np.asarray(difference.expected), np.asarray(difference.got)
    if (expected.shape, expected.dtype) != (got.shape, got.dtype):
        return f"{expected.dtype.name}{list(expected.shape)}", f"{got.dtype.name}{list(got.shape)}"
    wrong = difference.places()
    more = f" ... ({wrong.size} of {expected.size})" if wrong.size > _SHOWN else ""
    flat = [", ".join(str(number) for number in array.reshape(-1)[wrong[:_SHOWN]]) for array in (expected, got)]
    return flat[0] + more, flat[1] + more
