"""graphscale inspect: show what the analysis finds in a training graph."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from graphscale.cli import options
from graphscale.cli.options import option
from graphscale.cli.show import print_json, say, shorten, show_report, show_rows

if TYPE_CHECKING:
    from graphscale.checks.derivatives import GradientCheck

__all__ = ["inspect"]


def inspect(
    model: options.ModelPath,
    loss: options.Loss = None,
    seed: options.Seed = None,
    gradient: options.Gradient = None,
    update: options.Update = None,
    roles: options.RolesFile = None,
    force_roles: options.ForceRoles = False,
    roles_out: Annotated[
        Path | None, option("Write the roles, to correct and pass to --roles.", metavar="FILE.json")
    ] = None,
    check_gradients: Annotated[bool, option("Hold each gradient against differences of the loss.")] = False,
    feeds: Annotated[
        Path | None, option("Arrays for inputs, by name, for --check-gradients. Default: random.", metavar="FILE.npz")
    ] = None,
    dim: options.Dim = None,
    html: Annotated[Path | None, option("Draw the graph into a page of HTML.", metavar="FILE")] = None,
    whole: options.EachNode = False,
    json: options.Json = False,
) -> int:
    """Show the loss, where the scale enters, the gradients, and the role of each input and output. Changes nothing.

    Exit code 1 if --check-gradients finds a gradient that is not the derivative of the loss, or none that is.
    """
    from graphscale import pipeline
    from graphscale.analysis.hints import Hints
    from graphscale.analysis.roles.answers import Answers, roles_file
    from graphscale.checks import drawing
    from graphscale.checks.derivatives.gradient_check import check
    from graphscale.files import writing

    answers = Answers.of(options.read_roles(roles)).merge(forced=force_roles)
    hints = Hints(loss, seed, tuple(gradient or ()), options.parse_updates(update), answers)
    if (feeds or dim) and not check_gradients:
        raise typer.BadParameter(f"{'--feeds' if feeds else '--dim'} goes with --check-gradients")
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
    checked = check(model, feeds, hints, dims=options.parse_dims(dim)) if check_gradients else None
    if checked is not None and json:
        print_json({**report.to_dict(), "gradient_check": checked.to_dict()})
    else:
        show_report(report, json, f"{model}" if html is None else f"{model} drawn -> {html}")
    if checked is not None and not json:
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
