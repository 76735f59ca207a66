"""Reports in the terminal: texts, tables, JSON. This module prints all texts, and escapes them."""

from __future__ import annotations

import contextlib
import enum
import json
import os
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from graphscale.cli import display
from graphscale.errors import printable

if TYPE_CHECKING:
    from graphscale.analysis.report import Report

__all__ = [
    "Amount",
    "EscapedTable",
    "Part",
    "is_verbose",
    "join",
    "join_command",
    "list_counts",
    "make_console",
    "make_table",
    "make_text",
    "print_json",
    "printing",
    "say",
    "shorten",
    "show_report",
    "show_rows",
    "show_summary",
    "show_text",
    "warn",
]

_SHOWN = 12
_PROOF = "every output and carried state is free of the scale"
# A piece of a line: a text, or a text and its style.
Part = str | tuple[str, str]


class Amount(enum.Enum):
    """The amount of text that a command prints: an option of every command."""

    QUIET = "--quiet"
    NORMAL = ""
    VERBOSE = "--verbose"
    JSON = "--json"


_amount, _stdout_is_taken = Amount.NORMAL, False


@contextlib.contextmanager
def printing(amount: Amount, stdout_is_taken: bool = False) -> Iterator[None]:
    """Set the amount that is printed in the block.

    Args:
        amount: texts are dropped where it is `QUIET` or `JSON`, objects unless it is `JSON`.
        stdout_is_taken: a file is written to stdout, and texts go to stderr.
    """
    global _amount, _stdout_is_taken
    before = _amount, _stdout_is_taken
    _amount, _stdout_is_taken = amount, stdout_is_taken
    try:
        yield
    finally:
        _amount, _stdout_is_taken = before


def is_verbose() -> bool:
    """Return whether all details are printed."""
    return _amount is Amount.VERBOSE


def make_text(*parts: Part | Text) -> Text:
    """Make a line of parts, without the markup, the control characters and the line breaks that names may have."""
    return Text.assemble(*(printable(p) if isinstance(p, str) else _escape(p) for p in parts))


def _escape(part: tuple[str, str] | Text) -> tuple[str, str] | Text:
    return part if isinstance(part, Text) else (printable(part[0]), part[1])


def join(lines: Iterable[str | Text]) -> Text:
    """Put lines one below the other."""
    return Text("\n").join(map(make_text, lines))


def join_command(words: Iterable[str]) -> str:
    """Join words into a line for a shell that is safe for a terminal."""
    return " ".join(shlex.quote(word) if printable(word) == word else _quote_bytes(word) for word in words)


def _quote_bytes(word: str) -> str:
    """Quote a word as bash and zsh do: a name may hold bytes that are no text."""
    plain = set(range(32, 127)) - {*b"\\'"}
    escaped = [chr(byte) if byte in plain else f"\\x{byte:02x}" for byte in os.fsencode(word)]
    return f"$'{''.join(escaped)}'"


class EscapedTable(Table):
    """A table whose cells are escaped."""

    def add_row(self, *cells: Any, **options: Any) -> None:
        """Add a row of texts."""
        super().add_row(*map(make_text, cells), **options)


class _Terminal(Console):
    """A terminal that hides progress before it prints."""

    def print(self, *objects: Any, **options: Any) -> None:
        display.hide()
        super().print(*objects, **options)


def make_console(stderr: bool = False, quiet: bool = False) -> Console:
    """Make the terminal. It is quiet with --quiet and with --json."""
    silent = quiet or _amount in (Amount.QUIET, Amount.JSON)
    return _Terminal(highlight=False, markup=False, emoji=False, stderr=stderr or _stdout_is_taken, quiet=silent)


def print_json(make: Callable[[], dict[str, Any]]) -> None:
    """Print a report on stdout as JSON in ASCII, whole or, if JSON cannot hold a part of it, not at all.

    Without --json, it is not made.
    """
    if _amount is Amount.JSON:
        display.hide()
        print(json.dumps(make(), indent=2).replace("\x7f", "\\u007f"))


def say(*parts: Part) -> None:
    """Print a line on stdout."""
    make_console().print(make_text(*parts), soft_wrap=True)


def warn(warnings: Iterable[str]) -> None:
    """Print warnings on stderr."""
    for warning in warnings:
        make_console(stderr=True).print(make_text(f"warning: {warning}"))


def make_table(*right: str, left: str | None = None, **options: Any) -> EscapedTable:
    """Make a table without a frame.

    Args:
        right: the headers of its columns of numbers, behind a column of names.
        left: the header of that one; None for a table of names and texts, without headers.
        options: more options of the table.
    """
    table = EscapedTable(show_header=left is not None, show_edge=False, pad_edge=False, **options)
    if left is None:
        table.add_column(style="bold", no_wrap=True)
        table.add_column(overflow="fold")
    else:
        table.add_column(left, no_wrap=True)
    for header in right:
        table.add_column(header, justify="right", no_wrap=True)
    return table


def show_rows(rows: Iterable[tuple[str, Sequence[str]]]) -> None:
    """Print a table of names and lines."""
    table = make_table()
    for name, lines in rows:
        table.add_row(name, join(lines))
    make_console().print(table)


def shorten(lines: Sequence[str]) -> list[str]:
    """Return the first of many lines, and the number of the others; no line stands for a single one."""
    if len(lines) <= _SHOWN + 1 or is_verbose():
        return [*lines]
    return [*lines[:_SHOWN], f"... and {len(lines) - _SHOWN} more (-v shows all)"]


def show_report(report: Report, title: str, more: Mapping[str, Any] = MappingProxyType({})) -> None:
    """Print a report on stdout, its warnings on stderr; `more` is added to its JSON."""
    print_json(lambda: {**report.to_dict(), **more})
    show_text(report, title)


def show_text(report: Report, title: str) -> None:
    """Print a report as text alone, as one of several."""
    say(title)
    show_rows(_rows(report))
    warn(report.warnings)


def show_summary(report: Report, title: str) -> None:
    """Print a report in two lines, the second one with the coverage and the proof; the whole with --verbose."""
    if is_verbose():
        show_report(report, title)
        return
    print_json(report.to_dict)
    say(title)
    say(f"coverage: {report.coverage_text}" + (f"; proof: {_PROOF}" if report.proved else ""))
    if report.trial is not None:
        say(f"trial: {report.trial}")
    warn(report.warnings)


def list_counts(counts: Mapping[str, int]) -> str:
    """Return operators with their numbers, such as "2 Add, 1 Mul"."""
    return ", ".join(f"{count} {operator}" for operator, count in counts.items())


def _rows(report: Report) -> list[tuple[str, list[str]]]:
    places = [p.value if p.node is None else f"{p.value} at {p.node}:{p.input}" for p in report.places]
    gradients = [f"{g.value} {g.type}" for g in report.gradients]
    state = [f"{s.input} -> {s.output or '(in place)'}" for s in report.state]
    rows = [
        ("loss", [f"{report.loss} ({report.loss_found})"]),
        ("scale enters", shorten(places)),
        ("coverage", [report.coverage_text]),
        (f"gradients ({len(gradients)})", shorten(gradients)),
        (f"carried state ({len(state)})", shorten(state) or ["none"]),
    ]
    if report.replaced:
        rows.append(("replaced", [list_counts(report.replaced)]))
    for kind in ("input", "output"):
        lines = [f"{entry.name}: {entry}" for entry in report.roles if entry.kind == kind]
        rows.append((f"{kind}s ({len(lines)})", shorten(lines)))
    if report.accumulators:
        rows.append((f"accumulators ({len(report.accumulators)})", shorten(report.accumulators)))
    if report.policy is not None:
        config = ", ".join(f"{key}={value}" for key, value in report.policy["config"].items())
        rows.append(("loss scale", [report.policy["class_name"], config]))
        rows.append(("target", [str(report.target)]))
        if report.autocast is not None:
            mixed = report.autocast
            nodes = f"{mixed['low_nodes']} of {mixed['low_nodes'] + mixed['kept_nodes']} nodes in {mixed['dtype']}"
            rows.append(("mixed precision", [f"{nodes}, {mixed['casts']} casts"]))
        rows.append(("nodes", [f"{report.nodes_before} before, {report.nodes_after} after"]))
        for name, counts in report.inserted.items():
            rows.append((f"  {name}", [list_counts(counts)]))
        rows.append(("proof", [_PROOF]))
    if report.trial is not None:
        rows.append(("trial", report.trial.split("; ")))
    rows.extend(("renamed", [f"{wanted} was taken: {given}"]) for wanted, given in report.renamed.items())
    return rows
