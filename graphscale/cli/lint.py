"""graphscale lint: find mistakes in the loss scaling of a training graph."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from graphscale.cli.options import ModelPath, option
from graphscale.cli.show import EscapedTable, join, make_console, make_text, print_json, say
from graphscale.files import writing

if TYPE_CHECKING:
    from graphscale.checks.linting import Finding, LintReport

__all__ = ["lint"]

_STYLES = {"error": "bold red", "warning": "yellow", "note": "cyan"}


def lint(
    model: ModelPath,
    scale: Annotated[str | None, option("The loss scale in the graph. Default: found.", metavar="NAME")] = None,
    original: Annotated[
        Path | None, option("Of a step that somebody else scaled: the step before scaling.", metavar="FILE")
    ] = None,
    select: Annotated[
        list[str] | None, option("Report only this code (GS201), or a group (GS2). Repeatable.", metavar="CODE")
    ] = None,
    ignore: Annotated[list[str] | None, option("Do not report this code. Repeatable.", metavar="CODE")] = None,
    sarif: Annotated[
        Path | None, option("Write the findings in SARIF 2.1.0.", metavar="FILE", rich_help_panel="Output")
    ] = None,
) -> int:
    """Find mistakes in the loss scaling of a training graph, scaled or not, by graphscale or by hand.

    Of a folder of artifacts, the models for training are checked. Exit code 1 if there is an error or a warning.

    Examples:
        graphscale lint step.onnx
        graphscale lint step.onnx --select GS2 --ignore GS201 --sarif findings.sarif
    """
    from graphscale.checks.linting import lint as find
    from graphscale.checks.linting.sarif import write_sarif
    from graphscale.ort.artifacts.folder import EVAL_MODEL, MODELS, holds_artifacts

    if sarif is not None:
        writing.check_new_output(sarif)
    is_folder = holds_artifacts(model)
    paths = [model / name for name in MODELS if (model / name).is_file()] if is_folder else [model]
    left_out = [path for path in paths if is_folder and path.name == EVAL_MODEL]
    reports = {
        path: find(path, scale=scale, original=original, select=select or (), ignore=ignore or ())
        for path in paths
        if path not in left_out
    }
    if sarif is not None:
        write_sarif(reports, sarif)
    found = {str(path): report.to_dict() for path, report in reports.items()}
    print_json(lambda: {"models": found} if is_folder else found[str(model)])
    for path, report in reports.items():
        _show(report, str(path))
    for path in left_out:
        say(f"{path} is an inference graph, and left out")
    return int(not all(report.clean for report in reports.values()))


def _show(report: LintReport, name: str) -> None:
    """Print the findings by code, with the reason why each matters, and its remedy."""
    from graphscale.checks.linting.codes import CODES

    say(name)
    table = EscapedTable(show_header=False, show_edge=False, pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    by_code: dict[str, list[Finding]] = {}
    for finding in report.findings:
        by_code.setdefault(finding.code, []).append(finding)
    for key, findings in by_code.items():
        code = CODES[key]
        style = _STYLES[code.severity]
        lines = [(f"{finding.node}: " if finding.node else "") + finding.message for finding in findings]
        title = make_text((f"{code.severity}: {code.title}", style))
        table.add_row(make_text((key, style)), join([title, *lines, f"why: {code.why}", f"fix: {code.fix}"]))
    if by_code:
        make_console().print(table)
    if report.hint:
        say(f"note: {report.hint}")
    say(_summarize(report))


def _summarize(report: LintReport) -> str:
    counts = [(report.count(severity), severity) for severity in ("error", "warning", "note")]
    found = ", ".join(f"{count} {severity}{'s' * (count != 1)}" for count, severity in counts if count)
    scale = f"loss scale {report.loss_scale}" if report.loss_scale else "no loss scale"
    check = f"finite check {report.check}" if report.check else "no finite check"
    size = f"{report.nodes} node{'s' * (report.nodes != 1)}"
    states = f"{report.states} state{'s' * (report.states != 1)}"
    return f"{found or 'nothing found'} ({size}, {scale}, {check}, {states})"
