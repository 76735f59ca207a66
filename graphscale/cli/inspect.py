"""graphscale inspect: show what the analysis finds in a training graph."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from graphscale.cli import options
from graphscale.cli.options import option
from graphscale.cli.show import say, shorten, show_report, show_rows

if TYPE_CHECKING:
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
    check_gradients: Annotated[bool, option("Hold each gradient against differences of the loss.")] = False,
    feeds: options.Feeds = None,
    seed: options.RandomSeed = 0,
    dim: options.Dim = None,
    html: Annotated[Path | None, _output("Draw the graph into a page of HTML.", metavar="FILE")] = None,
    whole: options.EachNode = False,
) -> int:
    """Show the loss, where the scale enters, the gradients, and the role of each input and output. Changes nothing.

    Exit code 1 if --check-gradients finds a gradient that is not the derivative of the loss, or none that is.

    Examples:
        graphscale inspect original.onnx
        graphscale inspect original.onnx --html graph.html --roles-out new_roles.json
        graphscale inspect original.onnx --check-gradients --feeds feeds.npz
    """
    from graphscale import pipeline
    from graphscale.analysis.hints import Hints
    from graphscale.analysis.roles.answers import Answers, roles_file
    from graphscale.checks import drawing
    from graphscale.checks.derivatives.gradient_check import check
    from graphscale.files import writing

    answers = Answers.of(options.read_roles(roles)).merge(forced=force_roles)
    hints = Hints(loss, seed_edge, tuple(gradient or ()), options.parse_updates(update), answers)
    for name, value in {"--feeds": feeds, "--seed": seed, "--dim": dim}.items():
        if value and not check_gradients:
            raise typer.BadParameter(f"{name} goes with --check-gradients")
    options.check_whole(whole, html)
    if roles_out is not None:
        writing.check_new_output(roles_out, marked=False)
    if html is not None:
        writing.check_new_output(html)
    report = pipeline.inspect(model, **vars(hints))
    if roles_out is not None:
        with writing.write_file(roles_out) as path:
            path.write_text(roles_file(report.roles), encoding="utf-8")
    if html is not None:
        drawing.write_page(drawing.draw_inspection(model, report, model.name, hints, whole=whole), html)
    checked = check(model, feeds, hints, seed=seed, dims=options.parse_dims(dim)) if check_gradients else None
    more = {} if checked is None else {"gradient_check": checked.to_dict()}
    show_report(report, f"{model}" if html is None else f"{model} drawn -> {html}", more)
    if checked is not None:
        _show_check(checked)
    return int(checked is not None and not checked.ok)


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
