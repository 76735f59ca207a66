"""graphscale inspect: show what the analysis finds in a training graph."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from graphscale.cli import options
from graphscale.cli.options import option
from graphscale.cli.running import running
from graphscale.cli.show import list_counts, print_json, say, shorten, show_report, show_rows, show_text
from graphscale.errors import GraphscaleError

if TYPE_CHECKING:
    from graphscale.analysis.hints import Hints
    from graphscale.analysis.report import Report
    from graphscale.analysis.roles.role_table import RoleEntry
    from graphscale.checks.derivatives import GradientCheck

__all__ = ["inspect"]

_output = functools.partial(option, rich_help_panel="Output")


def inspect(
    model: options.ModelPath,
    loss: options.Loss = None,
    seed_edge: options.SeedEdge = None,
    gradient: options.Gradient = None,
    update: options.Update = None,
    roles: options.RolesFile = None,
    force_roles: options.ForceRoles = False,
    roles_out: Annotated[
        Path | None, _output("Write the roles, to correct and pass to --roles.", metavar="FILE.json")
    ] = None,
    check_gradients: Annotated[bool, option("Compare each gradient with differences of the loss.")] = False,
    feeds: options.Feeds = None,
    seed: options.RandomSeed = 0,
    dim: options.Dim = None,
    html: Annotated[Path | None, _output("Draw the graph into a page of HTML.", metavar="FILE")] = None,
    whole: options.EachNode = False,
) -> int:
    """Show the loss, where the scale enters, the gradients, and the role of each input and output. Changes nothing.

    Of a folder of artifacts, each model is shown.
    Exit code 1 if --check-gradients finds a gradient that is not the derivative of the loss, or none that is.

    Examples:
        graphscale inspect original.onnx
        graphscale inspect original.onnx --html graph.html --roles-out new_roles.json
        graphscale inspect original.onnx --check-gradients --feeds feeds.npz
    """
    from graphscale.analysis.hints import Hints
    from graphscale.analysis.roles.answers import Answers
    from graphscale.analysis.roles.roles_file import roles_file
    from graphscale.checks import drawing
    from graphscale.checks.derivatives.gradient_check import check
    from graphscale.entries import inspection
    from graphscale.files import writing
    from graphscale.ort.artifacts.folder import holds_artifacts

    answers = Answers.of(options.read_roles(roles)).merge(forced=force_roles)
    hints = Hints(loss, seed_edge, tuple(gradient or ()), options.parse_updates(update), answers)
    for name, value in {"--feeds": feeds, "--seed": seed, "--dim": dim}.items():
        if value and not check_gradients:
            raise typer.BadParameter(f"{name} goes with --check-gradients")
    options.check_whole(whole, html)
    if holds_artifacts(model):
        single = {"--check-gradients": check_gradients, "--html": html, "--roles": roles, "--roles-out": roles_out}
        options.refuse_with_folder(model, {**single, "--seed-edge": seed_edge, "--gradient": gradient})
        return _inspect_folder(model, hints)
    if roles_out is not None:
        writing.check_new_output(roles_out, marked=False)
    if html is not None:
        writing.check_new_output(html)
    options.refuse_one_file({"--roles-out": roles_out, "--html": html})
    report = inspection.inspect(model, **vars(hints))
    if roles_out is not None:
        with writing.write_file(roles_out) as path:
            path.write_text(roles_file(report.roles), encoding="utf-8")
    if html is not None:
        drawing.write_page(drawing.draw_inspection(model, report, model.name, hints, whole=whole), html)
    checked = None
    if check_gradients:
        with running([model]):
            checked = check(model, feeds, hints, seed=seed, dims=options.parse_dims(dim))
    more = {} if checked is None else {"gradient_check": checked.to_dict()}
    show_report(report, f"{model}" if html is None else f"{model} drawn -> {html}", more)
    if checked is not None:
        _show_check(checked)
    return int(checked is not None and not checked.ok)


def _drop_session_inputs(roles: Sequence[RoleEntry], folder: Path) -> tuple[RoleEntry, ...]:
    """Leave out inputs that a training session feeds by itself: parameters, buffers of gradients, their reset."""
    from graphscale.files.ort_checkpoint import read_checkpoint
    from graphscale.ort.artifacts.folder import CHECKPOINT, LAZY_RESET_GRAD, buffer_of

    fed = {LAZY_RESET_GRAD}
    with contextlib.suppress(GraphscaleError):  # without a checkpoint, all are shown
        parameters = read_checkpoint(folder / CHECKPOINT).parameters
        fed.update(parameters, map(buffer_of, parameters))
    return tuple(entry for entry in roles if entry.kind != "input" or entry.name not in fed)


def _inspect_folder(folder: Path, hints: Hints) -> int:
    """Print the report of each model of a folder, an equal one once; models without gradients by their operators."""
    from graphscale.entries import inspection
    from graphscale.files import model_files
    from graphscale.graph.stamp import is_scaled
    from graphscale.ort.artifacts.folder import MODELS, TRAINING_MODEL

    reports: dict[str, Report | dict[str, Any]] = {}
    for path in (folder / name for name in MODELS if (folder / name).is_file()):
        model = model_files.load(path)
        if path.name == TRAINING_MODEL or is_scaled(model):
            report = inspection.inspect(path, **vars(hints))
            reports[str(path)] = dataclasses.replace(report, roles=_drop_session_inputs(report.roles, folder))
        else:
            counts = Counter(node.op_type for node in model.graph)
            reports[str(path)] = {"operators": dict(counts.most_common())}
    print_json(lambda: {"models": {name: r if isinstance(r, dict) else r.to_dict() for name, r in reports.items()}})
    shown: list[str] = []
    for name, each in reports.items():
        if isinstance(each, dict):
            say(name)
            show_rows([("operators", [list_counts(each["operators"])]), ("loss scale", ["none"])])
        elif name not in shown:
            alike = [other for other, report in reports.items() if report == each]
            shown += alike
            show_text(each, ", ".join(alike))
    return 0


def _show_check(checked: GradientCheck) -> None:
    """Print the verdict on each gradient."""
    lines = []
    for each in checked.weights:
        what = each.verdict if each.error is None else f"{each.verdict}, error {each.error:.1e}"
        lines.append(f"{each.weight or each.gradient}: {what}{f': {each.detail}' if each.detail else ''}")
    # Those that do not agree are shown first, since a long list is cut.
    lines.sort(key=lambda line: ": agrees" in line)
    show_rows([(f"derivatives ({checked.dtype})", shorten(lines))])
    counts = {each.verdict for each in checked.weights}
    text = ", ".join(f"{checked.count(v)} {v}" for v in ("agrees", "disagrees", "unsure", "unchecked") if v in counts)
    say((f"gradients against the loss {checked.loss!r}: {text or 'none found'}", "bold"))
    for note in checked.notes:
        say(f"note: {note}")
