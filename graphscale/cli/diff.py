"""graphscale diff: what changed from one model to another."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from graphscale.checks import drawing
from graphscale.checks.diffing.compare import compare
from graphscale.checks.diffing.diff_report import Change, DiffReport, NodeEntry, ValueEntry
from graphscale.checks.drawing.pages import unrelated
from graphscale.cli.options import Json
from graphscale.cli.show import print_json

__all__ = ["diff"]

_SHOWN = 12
_LONGEST = 60


def diff(
    before: Annotated[Path, typer.Argument(metavar="A", help="A model.", show_default=False)],
    after: Annotated[Path, typer.Argument(metavar="B", help="Another one.", show_default=False)],
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw B into a page of HTML.", show_default=False)
    ] = None,
    exit_code: Annotated[bool, typer.Option("--exit-code", help="Exit with 1 if the models differ.")] = False,
    json: Json = False,
) -> None:
    """Show what changed from A to B: operators, nodes by the pass that inserted them, edges, names."""
    if html is not None:
        drawing.check_page(html, before, after)
    comparison = compare(before, after)
    report = comparison.report
    if html is not None:
        names = [before.name, after.name] if before.name != after.name else [str(before), str(after)]
        drawing.write_page(drawing.comparison_page(comparison, *names), html)
    if json:
        print_json(report.to_dict())
    else:
        _show(report, f"{before} -> {after}" + (f", drawn -> {html}" if html is not None else ""))
    if exit_code and report.different:
        raise typer.Exit(1)


def _show(report: DiffReport, title: str) -> None:
    console = Console(highlight=False)
    console.print(Text(title), soft_wrap=True)
    if not report.different:
        console.print("no difference")
        return
    if not report.related:
        console.print(Text(unrelated(report.matched, report.nodes_before, report.nodes_after)), soft_wrap=True)
    console.print(_operators(report))
    table = Table(show_header=False, show_edge=False, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, lines in _rows(report):
        if lines:
            table.add_row(f"{name} ({len(lines)})", Text("\n".join(_few(lines))))
    console.print(table)


def _operators(report: DiffReport) -> Table:
    """Before and after, for the operators that changed in number; all others in one line."""
    table = Table(show_edge=False, pad_edge=False)
    table.add_column("operator")
    for column in ("before", "after", "change"):
        table.add_column(column, justify="right")
    for op in report.ops:
        if op.difference:
            table.add_row(op.op, str(op.before), str(op.after), f"{op.difference:+d}")
    same = sum(op.before for op in report.ops if not op.difference)
    if same:
        table.add_row("all others", str(same), str(same), "0")
    before, after = (sum(counts) for counts in zip(*((op.before, op.after) for op in report.ops), strict=True))
    table.add_section()
    table.add_row("all nodes", str(before), str(after), f"{after - before:+d}")
    return table


def _rows(report: DiffReport) -> Iterator[tuple[str, list[str]]]:
    for name, entries in report.inserted.items():
        yield name, _nodes(entries)
    yield "added", _nodes(report.added)
    yield "removed", _nodes(report.removed)
    yield (
        "edges rewired",
        [
            f"output {edge.reader}: {edge.before} -> {edge.after}"
            if edge.input is None
            else f"{edge.reader}:{edge.input}: {edge.before} -> {edge.after}"
            for edge in report.rewired
        ],
    )
    yield "values renamed", [f"{change.before} -> {change.after}" for change in report.renamed]
    yield "values retyped", _changes(report.retyped)
    yield "attributes", _changes(report.attributes)
    yield "order", ["nodes that are in both stand in another order"] if report.reordered else []
    yield "inputs added", _values(report.inputs_added)
    yield "inputs removed", _values(report.inputs_removed)
    yield "outputs added", _values(report.outputs_added)
    yield "outputs removed", _values(report.outputs_removed)
    yield "initializers added", _values(report.initializers_added)
    yield "initializers removed", _values(report.initializers_removed)
    yield "initializers changed", _changes(report.initializers_changed)
    yield "functions added", list(report.functions_added)
    yield "functions removed", list(report.functions_removed)
    yield "metadata", _changes(report.metadata)
    yield "versions", _changes(report.versions)


def _nodes(entries: Sequence[NodeEntry]) -> list[str]:
    return [f"{entry.op} {entry.name}" + (f" in {entry.scope}" if entry.scope else "") for entry in entries]


def _values(values: Sequence[ValueEntry]) -> list[str]:
    return [f"{value.name} {value.dtype}{value.shape}" for value in values]


def _changes(changes: Sequence[Change]) -> list[str]:
    return [f"{change.name}: {_short(change.before) or '-'} -> {_short(change.after) or '-'}" for change in changes]


def _short(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def _few(lines: list[str]) -> list[str]:
    if len(lines) <= _SHOWN:
        return lines
    return [*lines[:_SHOWN], f"... and {len(lines) - _SHOWN} more (--json shows all)"]
