"""Help texts: a command's arguments and options in two columns, by panel, then its examples.

They are read from the function of the command, as typer does, so that the page of the docs has the same texts.
"""

from __future__ import annotations

import dataclasses
import inspect
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, get_args, get_type_hints

from typer.models import ArgumentInfo, OptionInfo

from graphscale.cli.options import GENERAL, LIMITS
from graphscale.cli.show import Part, make_console

__all__ = ["HELP", "Parameter", "by_panel", "command_help", "describe", "parameters_of", "render_help", "usage_of"]

HELP = ("-h, --help", "Show this text.")

_METAVARS = {str: "TEXT", int: "N", float: "X", Path: "PATH"}
_EXAMPLES = "Examples:\n"
_INDENT, _GAP = 2, 2
# The first column is at most this wide; a longer entry has its text on the next line.
_FIRST_COLUMN, _WIDEST = 28, 100


@dataclasses.dataclass(frozen=True)
class Parameter:
    """An argument or an option of a command.

    Attributes:
        names: the names of an option, the longest last; the name of an argument.
        metavar: the value of an option in a usage line; empty for a flag and an argument.
        help: its meaning, and its default.
        panel: the title of its group.
        is_argument: True for an argument.
        required: True for a parameter without a default.
    """

    names: tuple[str, ...]
    metavar: str
    help: str
    panel: str
    is_argument: bool
    required: bool


def describe(function: Callable[..., Any]) -> tuple[list[str], list[str]]:
    """Return the paragraphs of a command's docstring, and its examples, a command line each."""
    text, _, examples = inspect.cleandoc(function.__doc__ or "").partition(_EXAMPLES)
    return [" ".join(part.split()) for part in text.strip().split("\n\n")], [*map(str.strip, examples.splitlines())]


def parameters_of(function: Callable[..., Any]) -> Iterator[Parameter]:
    """Yield the arguments and options of a command in their order."""
    hints = get_type_hints(function, include_extras=True)
    for parameter in inspect.signature(function).parameters.values():
        kind, info = get_args(hints[parameter.name])
        if info.hidden:
            continue
        is_argument = isinstance(info, ArgumentInfo)
        required = parameter.default is parameter.empty
        names = (info.metavar or parameter.name.upper(),) if is_argument else _option_names(parameter.name, info)
        metavar = "" if is_argument else _metavar(kind, info)
        panel = info.rich_help_panel or ("Arguments" if is_argument else "Options")
        yield Parameter(names, metavar, info.help + _default(parameter, info), panel, is_argument, required)


def _option_names(name: str, info: OptionInfo) -> tuple[str, ...]:
    # In an annotation, the first declared name has the place of a default.
    declared = [option for option in (info.default, *(info.param_decls or ())) if isinstance(option, str)]
    return tuple(sorted({*declared} or ["--" + name.replace("_", "-")], key=len))


def _metavar(kind: Any, info: OptionInfo) -> str:
    kinds = [kind, *get_args(kind), *(inner for outer in get_args(kind) for inner in get_args(outer))]
    return "" if bool in kinds else info.metavar or next(_METAVARS[kind] for kind in kinds if kind in _METAVARS)


def _default(parameter: inspect.Parameter, info: Any) -> str:
    if parameter.default is parameter.empty:
        return "" if isinstance(info, ArgumentInfo) else " Required."
    shown = (
        info.show_default
        and parameter.default is not None
        and parameter.default is not False
        and "Default:" not in info.help
    )
    return f" Default: {parameter.default}." if shown else ""


def by_panel(parameters: Sequence[Parameter]) -> dict[str, list[Parameter]]:
    """Group the parameters of a command by panel; those of every command come last."""
    panels = dict.fromkeys(each.panel for each in parameters)
    first, last = ("Arguments", "Options"), (LIMITS, GENERAL)
    order = [*first, *(title for title in panels if title not in (*first, *last)), *last]
    return {title: [each for each in parameters if each.panel == title] for title in order if title in panels}


def usage_of(function: Callable[..., Any], parameters: Iterable[Parameter]) -> str:
    """Return the usage line of a command: its arguments, and the options that it requires."""
    words = ["graphscale", function.__name__.replace("_", "-")]
    for each in parameters:
        if each.is_argument:
            words.append(each.names[0] if each.required else f"[{each.names[0]}]")
        elif each.required:
            words.append(f"{each.names[0]} {each.metavar}")
    return " ".join([*words, "[OPTIONS]"])


def render_help(
    usage: str,
    paragraphs: Sequence[str],
    panels: Iterable[tuple[str, Iterable[tuple[str, str]]]],
    examples: Sequence[str],
) -> Iterator[tuple[Part, ...]]:
    """Yield the lines of a help text, as wide as the terminal.

    Args:
        usage: the usage line.
        paragraphs: the description.
        panels: the titles of groups with their entries: a first column and a text.
        examples: command lines.
    """
    width = min(make_console().width, _WIDEST)
    yield ("Usage: ", "bold"), usage
    for paragraph in paragraphs:
        yield ()
        yield from ((line,) for line in textwrap.wrap(paragraph, width))
    groups = [(title, list(entries)) for title, entries in panels]
    lengths = [len(first) for _, entries in groups for first, _ in entries]
    column = max((length for length in lengths if length <= _FIRST_COLUMN), default=0)
    for title, entries in groups:
        yield ()
        yield ((f"{title}:", "bold"),)
        for first, meaning in entries:
            yield from _entry(first, meaning, column, width)
    if examples:
        yield ()
        yield (("Examples:", "bold"),)
        yield from ((textwrap.indent(line, " " * _INDENT),) for line in examples)


def _entry(first: str, meaning: str, column: int, width: int) -> Iterator[tuple[Part, ...]]:
    margin = " " * (_INDENT + column + _GAP)
    lines = textwrap.wrap(meaning, max(width - len(margin), 20), break_on_hyphens=False)
    start = " " * _INDENT + first
    if len(first) > column:
        yield ((start, "cyan"),)
    else:
        yield (start.ljust(len(margin)), "cyan"), lines.pop(0)
    yield from ((margin + line,) for line in lines)


def command_help(function: Callable[..., Any]) -> Iterator[tuple[Part, ...]]:
    """Return the lines of the help text of a command."""
    parameters = list(parameters_of(function))
    paragraphs, examples = describe(function)
    panels = {
        title: [(" ".join(filter(None, (", ".join(each.names), each.metavar))), each.help) for each in entries]
        for title, entries in by_panel(parameters).items()
    }
    panels.setdefault(GENERAL, []).append(HELP)
    return render_help(usage_of(function, parameters), paragraphs, panels.items(), examples)
