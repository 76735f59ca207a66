"""graphscale diff: the differences between two models."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from graphscale.cli.options import EachNode, argument, check_whole, option
from graphscale.cli.show import EscapedTable, make_console, make_table, print_json, say, shorten, show_rows

if TYPE_CHECKING:
    from graphscale.checks.diffing.diff_report import DiffReport, Entry

__all__ = ["diff"]

_LONGEST = 60


def diff(
    before: Annotated[Path, argument("A model.", metavar="A")],
    after: Annotated[Path, argument("The model to compare with it.", metavar="B")],
    html: Annotated[
        Path | None, option("Draw B into a page of HTML.", metavar="FILE", rich_help_panel="Output")
    ] = None,
    whole: EachNode = False,
    exit_code: Annotated[bool, option("Exit with 1 if the models differ.")] = False,
) -> int:
    """Show what changed from A to B: operators, nodes by the pass that inserted them, edges, names.

    Examples:
        graphscale diff original.onnx step.onnx
        graphscale diff original.onnx step.onnx --html changes.html --exit-code
    """
    from graphscale.checks import drawing
    from graphscale.checks.diffing.compare import compare
    from graphscale.files import writing

    check_whole(whole, html)
    if html is not None:
        writing.check_new_output(html)
    comparison = compare(before, after)
    report = comparison.report
    if html is not None:
        names = [before.name, after.name] if before.name != after.name else [str(before), str(after)]
        drawing.write_page(drawing.draw_comparison(comparison, *names, whole=whole), html)
    print_json(report.to_dict)
    _show(report, f"{before} -> {after}" + (f", drawn -> {html}" if html is not None else ""))
    return int(exit_code and report.different)


def _show(report: DiffReport, title: str) -> None:
    from graphscale.checks.drawing.pages import describe_unrelated

    say(title)
    if not report.different:
        say("no difference")
        return
    if not report.related:
        say(describe_unrelated(report.matched, report.nodes_before, report.nodes_after))
    make_console().print(_operators(report))
    show_rows((f"{name} ({len(lines)})", shorten(lines)) for name, lines in _rows(report) if lines)


def _operators(report: DiffReport) -> EscapedTable:
    """Make a table of the operators that changed in number, and of all others in one line."""
    table = make_table("before", "after", "change", left="operator")
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
    for name, entries in (*report.inserted.items(), *((title.lower(), found) for title, _, found in report.sections())):
        yield name, [_line(name, entry) for entry in entries]
    yield "order", ["nodes that are in both stand in another order"] if report.reordered else []


def _line(section: str, entry: Entry) -> str:
    from graphscale.checks.diffing.diff_report import Change, NodeEntry, Rewiring, ValueEntry

    match entry:
        case NodeEntry():
            return f"{entry.op} {entry.name}" + (f" in {entry.scope}" if entry.scope else "")
        case Rewiring():
            place = f"output {entry.reader}" if entry.input is None else f"{entry.reader}:{entry.input}"
            return f"{place}: {entry.before} -> {entry.after}"
        case ValueEntry():
            return f"{entry.name} {entry.type}"
        case Change() if section == "values renamed":
            return f"{entry.before} -> {entry.after}"
        case Change():
            return f"{entry.name}: {_short(entry.before) or 'none'} -> {_short(entry.after) or 'none'}"
    return entry


def _short(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."
