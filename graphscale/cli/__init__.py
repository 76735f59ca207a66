"""The command line: one file per command.

Exit codes: 0 done; 1 the check that was asked for failed; 2 bad input, with one line on stderr and nothing written.
"""

from __future__ import annotations

import logging
import sys
import warnings
from typing import Any, NoReturn

import typer

from graphscale.cli.autocast import autocast
from graphscale.cli.demo import demo
from graphscale.cli.diff import diff
from graphscale.cli.export_weights import export_weights
from graphscale.cli.fuse import fuse
from graphscale.cli.inspect import inspect
from graphscale.cli.lint import lint
from graphscale.cli.plot import plot
from graphscale.cli.scale import scale
from graphscale.cli.split import split
from graphscale.cli.strip import strip
from graphscale.cli.train import train
from graphscale.cli.verify import verify
from graphscale.errors import GraphscaleError
from graphscale.graph.diagnosis import damage_in

__all__ = ["app", "main"]

app = typer.Typer(
    name="graphscale",
    help="Loss scaling inside ONNX training graphs.",
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command()(scale)
app.command()(inspect)
app.command()(autocast)
app.command()(demo)
app.command()(strip)
app.command()(split)
app.command()(fuse)
app.command()(export_weights)
app.command()(train)
app.command()(plot)
app.command()(verify)
app.command()(lint)
app.command()(diff)


# What typer raises for a wrong option or argument; its own name for it depends on typer's version.
_UsageError: Any = typer.BadParameter.__base__


def main() -> None:
    """Run the command line: the console script `graphscale`."""
    # What onnx_ir warns of is checked, and said, here.
    logging.getLogger("onnx_ir").setLevel(logging.CRITICAL)
    warnings.filterwarnings("ignore", module=r"onnx_ir\.")
    try:
        code = app(standalone_mode=False) if len(sys.argv) > 1 else app(["--help"], standalone_mode=False)
    except GraphscaleError as error:
        _refuse(str(error))
    except _UsageError as error:
        _refuse(f"{error.format_message()} (graphscale --help shows what there is)")
    except (KeyboardInterrupt, typer.Abort):
        sys.exit(130)
    except Exception:
        # On a sound model, this is a defect of graphscale: show it.
        damage = damage_in(sys.argv[1:])
        if damage is None:
            raise
        _refuse(damage)
    sys.exit(code or 0)


def _refuse(message: str) -> NoReturn:
    print(f"graphscale: {' '.join(message.split())}", file=sys.stderr)
    sys.exit(2)
