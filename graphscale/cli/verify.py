"""graphscale verify: compare a scaled graph with the original."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np

from graphscale.cli import options
from graphscale.cli.options import argument, option
from graphscale.cli.running import running
from graphscale.cli.show import EscapedTable, join_command, make_console, make_text, print_json, say
from graphscale.files import writing
from graphscale.files.descriptors import is_stream
from graphscale.process.stages import report_stage

if TYPE_CHECKING:
    from graphscale.checks.verification.verify_report import Difference, VerifyReport

__all__ = ["verify"]

_STYLES = {"holds": "green", "fails": "bold red", "not proved": "bold yellow", "skipped": "dim"}
_SHOWN = 6
_NARROW = 100  # columns of a terminal: below them, names and details share one


def verify(
    original: Annotated[Path, argument("The training graph, or folder of artifacts, before scaling.")],
    scaled: Annotated[Path, argument("The training graph, or folder of artifacts, after scaling.")],
    half: Annotated[
        Path | None, argument("Of a split step: its halves are compared with it, STEP GRADS UPDATE.", metavar="UPDATE")
    ] = None,
    runs: Annotated[int, option("How many random feeds to try; 0 for the proof alone.", min=0)] = 3,
    tolerance: Annotated[
        float, option("How far values may be off, relative to the largest element of a tensor; 0: the same bits.")
    ] = 0.0,
    provider: options.Provider = None,
    seed: options.RandomSeed = 0,
    feeds: options.Feeds = None,
    dim: options.Dim = None,
    replay: Annotated[Path | None, option("Run this counterexample alone.", metavar="FILE.npz")] = None,
    save_counterexample: Annotated[
        Path | None,
        option(
            "The first counterexample. Default: SCALED.counterexample.npz.",
            metavar="FILE.npz",
            rich_help_panel="Output",
        ),
    ] = None,
    loss: options.Loss = None,
    seed_edge: options.SeedEdge = None,
    gradient: options.Gradient = None,
    update: options.Update = None,
    roles: options.RolesFile = None,
    keep: options.Keep = None,
    force_roles: options.ForceRoles = False,
    no_exact: Annotated[
        bool, option("Accept nodes that this version would not write, where the file still equals the original.")
    ] = False,
    expect_policy: Annotated[
        str | None,
        option(
            "The policy that SCALED must have: dynamic, for any that skips, a number, a preset, a file.",
            metavar="SCALE",
        ),
    ] = None,
    expect_dtype: Annotated[
        str | None, option("The type of its mixed precision; float32 for none.", metavar="DTYPE")
    ] = None,
    numeric: Annotated[bool, option("Numbers alone: nodes may differ, and nothing is proved.")] = False,
    trained: Annotated[bool, option("State may begin at other values in the policy's range.")] = False,
    derivatives: Annotated[bool, option("Compare the original's gradients with slopes of its loss, too.")] = False,
) -> int:
    """Prove a scaled graph right, and run it against the original: exit code 0 if all holds, 1 if not.

    The original is scaled once more, and each node of SCALED must be one of the result. Two folders of artifacts are
    compared so with their checkpoints, and nothing is run; so are the halves that split makes of a step. A graph is
    compared with a folder of artifacts as with the step that fuse makes of it.

    Examples:
        graphscale verify original.onnx step.onnx
        graphscale verify original.onnx step.onnx --runs 10 --feeds feeds.npz
        graphscale verify original.onnx step.onnx --replay case.npz
        graphscale verify artifacts scaled
    """
    from graphscale.checks.verification import verify as verify_graphs
    from graphscale.checks.verification.counterexample import save_case

    if save_counterexample is not None:
        writing.check_new_output(save_counterexample)
    with running([original, scaled], provider):
        report = verify_graphs(
            original,
            scaled if half is None else (scaled, half),
            runs=runs,
            tolerance=tolerance,
            providers=provider,
            seed=seed,
            feeds=feeds,
            dims=options.parse_dims(dim),
            loss=loss,
            place=seed_edge,
            gradients=gradient,
            updates=options.parse_updates(update),
            roles=options.read_roles(roles),
            keep=keep,
            force_roles=force_roles,
            exact=not no_exact,
            expect_policy=_parse_policy(expect_policy),
            expect_dtype=expect_dtype,
            numeric=numeric,
            trained=trained,
            derivatives=derivatives,
            replay=replay,
            progress=report_stage,
        )
    command = None
    if report.counterexample is not None:
        case = replay
        if case is None:
            folder = Path() if is_stream(scaled) else scaled.parent
            case = save_counterexample or folder / f"{scaled.name}.counterexample.npz"
            writing.check_new_output(case)
            save_case(report.counterexample, case)
        hints = {
            "--loss": loss,
            "--seed-edge": [seed_edge],
            "--gradient": gradient,
            "--update": update,
            "--roles": [roles],
            "--keep": keep,
            "--provider": provider,
        }
        words = [word for name, values in hints.items() for each in values or [] if each for word in (name, str(each))]
        words += ["--force-roles"] if force_roles else []
        command = join_command(["graphscale", "verify", str(original), str(scaled), *words, "--replay", str(case)])
    title = f"{scaled} against {original}" if half is None else f"{scaled} and {half} against {original}"
    print_json(lambda: {**report.to_dict(), "replay": command})
    _show(report, title, command)
    if replay is not None:
        _show_differences(report)
    return int(not report.ok)


def _parse_policy(text: str | None) -> Any:
    """Return an expected policy, or the word for any dynamic one."""
    return text if text in (None, "dynamic") else options.parse_loss_scale(text, option="--expect-policy")


def _show(report: VerifyReport, title: str, command: str | None) -> None:
    """Print a report, and the command that runs its counterexample again, if it has one."""
    say(title)
    console = make_console()
    table = EscapedTable(show_edge=False, pad_edge=False, box=None, show_header=False)
    table.add_column(no_wrap=True)
    is_narrow = console.width < _NARROW
    if not is_narrow:
        table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for check in report.checks:
        kind = make_text(("proof  " if check.proof else "measure", "dim"))
        result = ((check.status, _STYLES[check.status]), f": {check.detail}")
        if is_narrow:
            table.add_row(kind, make_text((check.name, "bold"), ": ", *result))
        else:
            table.add_row(kind, check.name, make_text(*result))
    console.print(table)
    for note in report.notes:
        if is_narrow:
            console.print(make_text(f"note: {note}"))
        else:
            say(f"note: {note}")
    runs = f" ({report.counted_runs} of the scaled graph)"
    if report.subject or report.counted_runs in report.verdict:
        runs = ""
    say((f"{report.verdict}{runs}", "bold"))
    if command is not None:
        say(f"the first counterexample again: {command}")


def _show_differences(report: VerifyReport) -> None:
    """Print the expected values of a case, and those that it gave."""
    table = EscapedTable(show_edge=False, pad_edge=False)
    for column in ("value", "source", "expected", "got"):
        table.add_column(column, overflow="fold")
    for difference in report.differences:
        expected, got = _describe(difference)
        table.add_row(difference.name, difference.source, expected, got)
    if report.differences:
        make_console().print(table)


def _describe(difference: Difference) -> tuple[str, str]:
    """Return the elements that differ, or the types."""
    expected, got = np.asarray(difference.expected), np.asarray(difference.got)
    if (expected.shape, expected.dtype) != (got.shape, got.dtype):
        return f"{expected.dtype.name}{list(expected.shape)}", f"{got.dtype.name}{list(got.shape)}"
    wrong = difference.places()
    more = f" ... ({wrong.size} of {expected.size})" if wrong.size > _SHOWN else ""
    flat = [", ".join(str(number) for number in array.reshape(-1)[wrong[:_SHOWN]]) for array in (expected, got)]
    return flat[0] + more, flat[1] + more
