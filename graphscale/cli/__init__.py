"""The command line: one file per command, imported when it is called.

Exit codes: 0 success; 1 a failed check; 2 bad input, with one line on stderr and no output file.
"""

from __future__ import annotations

import functools
import importlib
import logging
import sys
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Annotated, Any

import typer.main
from typer.core import TyperCommand, TyperGroup

from graphscale.cli import help
from graphscale.cli.old_names import replace_old_names
from graphscale.cli.options import complete_telemetry, name_streams, option
from graphscale.cli.protection import protect
from graphscale.cli.show import Part, say
from graphscale.cli.usage import explain_usage, refuse_empty
from graphscale.errors import GraphscaleError, ModelFileError
from graphscale.process.command import run

__all__ = ["COMMANDS", "load_command", "main", "make_command", "make_group"]

# Each command is a function in a module of its name.
_PANELS = {
    "Training steps": {
        "scale": "Put loss scaling into a training graph.",
        "autocast": "Put a training graph into mixed precision.",
        "lower": "Make a scaled graph as fast as one runtime allows.",
        "strip": "Restore the original graph.",
    },
    "Checks": {
        "inspect": "Show the loss, the gradients and all roles.",
        "verify": "Prove a scaled graph right, and run it.",
        "lint": "Find mistakes in the loss scaling of a graph.",
        "diff": "Show the changes from one model to another.",
    },
    "Training": {
        "demo": "Train a digit classifier, with one overflow on the way.",
        "train": "Train from a scaled step, with checkpoints.",
        "plot": "Draw a run from its metrics.",
        "export-weights": "Write trained weights into an inference model.",
        "split": "Cut a scaled step at its gradients, for replicas.",
    },
    "Artifacts of ONNX Runtime": {
        "fuse": "Turn an artifact folder into one training step.",
        "lower-training": "Replace training operators by standard ones.",
    },
    "Installation": {
        "doctor": "Show what is installed here, and what to install.",
    },
}
COMMANDS = {name: text for commands in _PANELS.values() for name, text in commands.items()}
_OPTIONS = {
    "--version": "Show the version.",
    "--install-completion": "Install completion for this shell.",
    "--show-completion": "Show the script that completes in this shell.",
}
_SETTINGS = {"help_option_names": ["-h", "--help"]}


def load_command(name: str) -> Callable[..., Any]:
    """Import the function of a command: a process that inspects a file needs none of the modules that train."""
    function = name.replace("-", "_")
    command: Callable[..., Any] = getattr(importlib.import_module(f"{__name__}.{function}"), function)
    return protect(command)


class _Command(TyperCommand):
    """A command with a help text of `graphscale.cli.help`."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        _print_help(help.command_help(load_command(self.name or "")))


class _Group(TyperGroup):
    """The commands, without their modules until one of them is called."""

    def resolve_command(self, ctx: Any, args: Any) -> Any:
        name, command, words = super().resolve_command(ctx, args)
        return name, command and make_command(command.name), words

    def format_help(self, ctx: Any, formatter: Any) -> None:
        panels = {**{title: commands.items() for title, commands in _PANELS.items()}, "Options": _entries(self, ctx)}
        more = "graphscale COMMAND --help shows the options and examples of a command."
        usage = "graphscale COMMAND [ARGUMENTS] [OPTIONS]"
        _print_help(help.render_help(usage, [self.help or "", more], panels.items(), []))


def _entries(group: Any, context: Any) -> list[tuple[str, str]]:
    """Return the options of the group, those that typer adds among them, with their texts."""
    names = (max(each.opts, key=len) for each in group.get_params(context))
    return [help.HELP if name == "--help" else (name, _OPTIONS[name]) for name in names]


def _print_help(lines: Iterable[tuple[Part, ...]]) -> None:
    for parts in lines:
        say(*parts)


@functools.cache
def make_command(name: str) -> Any:
    """Import a command, and make it one of the command line."""
    app = typer.Typer(add_completion=False)
    app.command(name, cls=_Command, context_settings=_SETTINGS)(load_command(name))
    return typer.main.get_command(app)


def _show_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        say(f"graphscale {version('graphscale')}")
        raise typer.Exit


def _options(
    version: Annotated[bool, option(_OPTIONS["--version"], "--version", callback=_show_version, is_eager=True)] = False,
) -> None:
    """Loss scaling inside ONNX training graphs."""


@functools.cache
def make_group() -> Any:
    """Make the command line."""
    app = typer.Typer(name="graphscale", cls=_Group, context_settings=_SETTINGS, callback=_options)
    group = typer.main.get_command(app)
    group.commands = {name: TyperCommand(name, help=text) for name, text in COMMANDS.items()}  # type: ignore[attr-defined]
    return group


# The error of typer for a wrong option or argument; its name depends on typer's version.
_UsageError: Any = typer.BadParameter.__base__


def main() -> None:
    """Run the command line: the console script `graphscale`."""
    run(_run)


def _run() -> int:
    # The checks of graphscale report the causes of onnx_ir's warnings.
    logging.getLogger("onnx_ir").setLevel(logging.CRITICAL)
    warnings.filterwarnings("ignore", module=r"onnx_ir\.")
    try:
        return make_group()(_words(sys.argv[1:]), "graphscale", standalone_mode=False) or 0
    except GraphscaleError:
        raise
    except _UsageError as error:
        command = next((word for word in sys.argv[1:2] if word in COMMANDS), None)
        declared = help.parameters_of(load_command(command)) if command else ()
        values = {name: each.metavar for each in declared if each.metavar for name in each.names}
        raise GraphscaleError(explain_usage(error, values)) from error
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


def _words(given: Sequence[str]) -> list[str]:
    """Return the words of a command line in the form that the commands declare."""
    refuse_empty(given)
    return name_streams(replace_old_names(complete_telemetry(given))) or ["--help"]
