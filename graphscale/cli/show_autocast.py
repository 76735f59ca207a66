"""The report of autocast as a table in the terminal."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from graphscale.cli.show import print_json
from graphscale.passes.casting.cast_report import AutocastReport

__all__ = ["show_autocast"]


def show_autocast(report: AutocastReport, as_json: bool, title: str) -> None:
    """Print a report on stdout, its warnings on stderr."""
    if as_json:
        print_json(report.to_dict())
        return
    console = Console(highlight=False)
    console.print(Text(title), soft_wrap=True)
    console.print(_table(report))
    if report.emulate:
        how = f"{report.casts // 2} pairs of casts round to it"
    else:
        how = f"{report.casts} casts stand at the borders"
    before, after = report.activation_bytes_before, report.activation_bytes_after
    console.print(
        Text(
            f"{report.low_nodes} of {report.low_nodes + report.kept_nodes} nodes run in {report.dtype}; "
            f"{how}; activations for the backward pass: {before:,} -> {after:,} bytes"
        ),
        soft_wrap=True,
    )
    for constant in report.constants:
        console.print(Text(f"kept in float32: {constant}"), soft_wrap=True)
    for warning in report.warnings:
        Console(stderr=True, highlight=False).print(Text(f"warning: {warning}"))


def _table(report: AutocastReport) -> Table:
    table = Table(show_edge=False, pad_edge=False)
    table.add_column("operator", no_wrap=True)
    table.add_column(report.dtype, justify="right")
    table.add_column("float32", justify="right")
    table.add_column("why it stays float32", overflow="fold")
    for op in report.ops:
        why = "\n".join(f"{count}: {reason}" for reason, count in op.reasons.items())
        table.add_row(Text(op.op), str(op.low or ""), str(op.kept or ""), Text(why))
    return table
