"""Reports as tables in the terminal."""

from __future__ import annotations

import json
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from graphscale.analysis.report import Report

__all__ = ["print_json", "show_report"]

_SHOWN = 12


def print_json(data: dict[str, Any]) -> None:
    """Print a report on stdout as JSON, whole or, if a part of it cannot be told in JSON, not at all."""
    print(json.dumps(data, indent=2))


def show_report(report: Report, as_json: bool, title: str) -> None:
    """Print a report on stdout, its warnings on stderr."""
    if as_json:
        print_json(report.to_dict())
        return
    table = Table(show_header=False, show_edge=False, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, lines in _rows(report):
        table.add_row(name, Text("\n".join(lines)))
    console = Console(highlight=False)
    console.print(Text(title), soft_wrap=True)
    console.print(table)
    for warning in report.warnings:
        Console(stderr=True, highlight=False).print(Text(f"warning: {warning}"))


def _rows(report: Report) -> list[tuple[str, list[str]]]:
    places = [p.value if p.node is None else f"{p.value} at {p.node}:{p.input}" for p in report.places]
    gradients = [f"{g.value} {g.dtype}{g.shape}" for g in report.gradients]
    state = [f"{s.input} -> {s.output or '(in place)'}" for s in report.state]
    covered = report.contractions - len(report.missed)
    rows = [
        ("loss", [f"{report.loss} ({report.loss_found})"]),
        ("scale enters", _short(places)),
        (
            "coverage",
            [f"{100 * report.coverage:.0f} % ({covered} of {report.contractions} backward contractions)"],
        ),
        (f"gradients ({len(gradients)})", _short(gradients)),
        (f"carried state ({len(state)})", _short(state) or ["none"]),
    ]
    if report.accumulators:
        rows.append((f"accumulators ({len(report.accumulators)})", _short(list(report.accumulators))))
    if report.policy is not None:
        config = ", ".join(f"{key}={value}" for key, value in report.policy["config"].items())
        rows.append(("loss scale", [f"{report.policy['class_name']}({config})"]))
        rows.append(("target", [str(report.target)]))
        if report.autocast is not None:
            mixed = report.autocast
            nodes = f"{mixed['low_nodes']} of {mixed['low_nodes'] + mixed['kept_nodes']} nodes in {mixed['dtype']}"
            rows.append(("mixed precision", [f"{nodes}, {mixed['casts']} casts"]))
        rows.append(("nodes", [f"{report.nodes_before} before, {report.nodes_after} after"]))
        for name, counts in report.inserted.items():
            rows.append((f"  {name}", [", ".join(f"{count} {op}" for op, count in counts.items())]))
        rows.append(("proof", ["every output and carried state is free of the scale"]))
    rows.extend(("renamed", [f"{wanted} was taken: {given}"]) for wanted, given in report.renamed.items())
    return rows


def _short(lines: list[str]) -> list[str]:
    if len(lines) <= _SHOWN:
        return lines
    return [*lines[:_SHOWN], f"... and {len(lines) - _SHOWN} more (--json shows all)"]
