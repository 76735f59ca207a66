"""The command line: one file per command.

Exit codes: 0 done; 1 the check that was asked for failed; 2 bad input, with one line on stderr and nothing written.
"""

from __future__ import annotations

import functools
import importlib
import logging
import sys
import warnings
from collections.abc import Callable
from typing import Any

import typer.main

from graphscale.cli.options import complete_telemetry
from graphscale.cli.protection import protect
from graphscale.errors import GraphscaleError, ModelFileError
from graphscale.process.command import run

__all__ = ["COMMANDS", "load_command", "main", "make_group"]

# Each is a function in a module of its name.
COMMANDS = (
    "scale",
    "inspect",
    "autocast",
    "demo",
    "lower",
    "lower-training",
    "strip",
    "split",
    "fuse",
    "export-weights",
    "train",
    "plot",
    "verify",
    "lint",
    "diff",
)


def load_command(name: str) -> Callable[..., Any]:
    """Import the function of a command: a process that inspects a file needs none of the modules that train."""
    function = name.replace("-", "_")
    command: Callable[..., Any] = getattr(importlib.import_module(f"{__name__}.{function}"), function)
    return protect(command)


@functools.cache
def make_group(commands: tuple[str, ...] = COMMANDS) -> Any:
    """Make the command line with these commands alone."""
    app = typer.Typer(name="graphscale", help="Loss scaling inside ONNX training graphs.", add_completion=False)
    app.callback()(lambda: None)  # An app of one command and no callback would not expect the command's name.
    for name in commands:
        app.command()(load_command(name))
    return typer.main.get_command(app)


# The error of typer for a wrong option or argument; its name depends on typer's version.
_UsageError: Any = typer.BadParameter.__base__


def main() -> None:
    """Run the command line: the console script `graphscale`."""
    run(_run)


def _run() -> int:
    # The checks of graphscale report the causes of onnx_ir's warnings.
    logging.getLogger("onnx_ir").setLevel(logging.CRITICAL)
    warnings.filterwarnings("ignore", module=r"onnx_ir\.")
    words = complete_telemetry(sys.argv[1:]) or ["--help"]
    group = make_group((words[0],)) if words[0] in COMMANDS else make_group()
    try:
        return group(words, "graphscale", standalone_mode=False) or 0
    except GraphscaleError:
        raise
    except _UsageError as error:
        raise GraphscaleError(f"{error.format_message()} (graphscale --help shows what there is)") from error
    except MemoryError as error:
        raise GraphscaleError(f"the memory is not enough: {error or 'a file asks for more than there is'}") from error
    except typer.Abort as error:
        raise KeyboardInterrupt from error
    except Exception as error:
        from graphscale.graph.diagnosis import find_damage

        # On a sound model, this is a defect of graphscale: show it.
        damage = find_damage(sys.argv[1:])
        if damage is None:
            raise
        raise ModelFileError(damage) from error
