"""The command line: one file per command.

Exit codes: 0 done; 1 the check that was asked for failed; 2 bad input, with one line on stderr and nothing written.
"""

from __future__ import annotations

import sys

import typer

from graphscale.cli.demo import demo
from graphscale.cli.inspect import inspect
from graphscale.cli.scale import scale
from graphscale.errors import GraphscaleError

__all__ = ["app", "main"]

app = typer.Typer(
    name="graphscale",
    help="Loss scaling inside ONNX training graphs.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command()(scale)
app.command()(inspect)
app.command()(demo)


def main() -> None:
    """Run the command line: the console script `graphscale`."""
    try:
        app()
    except GraphscaleError as error:
        print(f"graphscale: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(2)
