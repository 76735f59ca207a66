"""Findings of lint in the terminal."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from graphscale.checks.linting import Finding, LintReport
from graphscale.checks.linting.codes import CODES, Code, Severity
from graphscale.cli.show import print_json

__all__ = ["show_lint"]

_STYLES: dict[Severity, str] = {"error": "bold red", "warning": "yellow", "note": "cyan"}


def show_lint(report: LintReport, as_json: bool, title: str) -> None:
    """Print the findings on stdout: by code, with what is wrong where, why it matters, and what to do."""
    if as_json:
        print_json(report.to_dict())
        return
    console = Console(highlight=False)
    console.print(Text(title), soft_wrap=True)
    table = Table(show_header=False, show_edge=False, pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    by_code: dict[str, list[Finding]] = {}
    for finding in report.findings:
        by_code.setdefault(finding.code, []).append(finding)
    for code, findings in by_code.items():
        table.add_row(Text(code, style=_STYLES[CODES[code].severity]), _text(CODES[code], findings))
    if by_code:
        console.print(table)
    console.print(Text(_summary(report)), soft_wrap=True)


def _text(code: Code, findings: list[Finding]) -> Text:
    text = Text()
    text.append(f"{code.severity}: {code.title}\n", style=_STYLES[code.severity])
    for finding in findings:
        where = f"{finding.node}: " if finding.node else ""
        text.append(f"{where}{finding.message}\n")
    text.append(f"why: {code.why}\nfix: {code.fix}")
    return text


def _summary(report: LintReport) -> str:
    counts = [(report.count(severity), severity) for severity in ("error", "warning", "note")]
    found = ", ".join(f"{count} {severity}{'s' * (count != 1)}" for count, severity in counts if count)
    scale = f"loss scale {report.loss_scale}" if report.loss_scale else "no loss scale"
    check = f"finite check {report.check}" if report.check else "no finite check"
    size = f"{report.nodes} node{'s' * (report.nodes != 1)}"
    states = f"{report.states} state{'s' * (report.states != 1)}"
    return f"{found or 'nothing found'} ({size}, {scale}, {check}, {states})"
