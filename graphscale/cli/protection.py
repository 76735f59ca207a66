"""The options of every command: how much it prints, --force, and the limits for input files."""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, get_args

import typer

from graphscale.cli.display import Display, showing
from graphscale.cli.options import LIMITS, Force, Json, Quiet, Verbose, option
from graphscale.cli.question import showing_questions
from graphscale.cli.show import Amount, make_console, printing
from graphscale.files.descriptors import STDOUT
from graphscale.files.limits import Limits, limiting
from graphscale.files.writing import protecting

__all__ = ["protect"]

_limit = functools.partial(option, rich_help_panel=LIMITS)
_LIMITS = {
    "external_data_root": Annotated[
        Path | None, _limit("Weights may lie in this folder, too, not only beside the model.", metavar="DIR")
    ],
    "max_nodes": Annotated[int | None, _limit("Refuse models of more nodes. Default: 1000000.", min=1)],
    "max_depth": Annotated[int | None, _limit("Refuse bodies and functions in more levels. Default: 16.", min=1)],
    "max_bytes": Annotated[
        int | None, _limit("Refuse packed files of more bytes, unpacked. Default: 1073741824.", min=1)
    ],
    "max_seconds": Annotated[
        int | None, _limit("End runs of a model after this CPU time. Default: 300; of the trial 5.", min=1)
    ],
    "max_memory": Annotated[
        int | None, _limit("End runs of a model with more bytes of memory. Default: 2 GiB or more.", min=1)
    ],
}


def protect(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the limits and --force to a command; without --force, its inputs and foreign files are protected."""
    signature = inspect.signature(command, eval_str=True)
    has_force = "force" in signature.parameters

    @functools.wraps(command)
    def protected(*, force: bool = False, **given: Any) -> Any:
        limits = {name: value for name in _LIMITS if (value := given.pop(name, None)) is not None}
        root = limits.get("external_data_root")
        if root is not None and not root.is_dir():
            raise typer.BadParameter(f"--external-data-root {root}: there is no such folder")
        amounts = [amount for amount in Amount if given.pop(amount.value[2:], False)]
        if len(amounts) > 1:
            raise typer.BadParameter(f"{amounts[0].value} and {amounts[1].value} exclude each other")
        writes = any(
            STDOUT in (str(path), *(map(str, path) if isinstance(path, tuple) else ())) for path in given.values()
        )
        if writes and amounts == [Amount.JSON]:
            raise typer.BadParameter("--json and -o - both need standard output; name a file to write")
        if has_force:
            given["force"] = force
        named = None if force else list(_existing_files(sys.argv[2:]))
        with contextlib.ExitStack() as stack:
            stack.enter_context(limiting(Limits(**limits)))
            stack.enter_context(printing(amounts[0] if amounts else Amount.NORMAL, writes))
            if named is not None:
                stack.enter_context(protecting(named))
            stderr = make_console(stderr=True)
            if not stderr.quiet:
                stack.enter_context(showing(Display(stderr)))
            stack.enter_context(showing_questions("accept" in signature.parameters))
            return command(**given)

    kind = inspect.Parameter.KEYWORD_ONLY
    has_files = any(Path in (given, *get_args(given)) for given in map(_kind, signature.parameters.values()))
    flags = {"quiet": Quiet, "verbose": Verbose, "json": Json}
    flags |= {"force": Force} if has_files and not has_force else {}
    limits = _LIMITS if has_files else {}
    added = [inspect.Parameter(name, kind, default=None, annotation=given) for name, given in limits.items()]
    added += [inspect.Parameter(name, kind, default=False, annotation=given) for name, given in flags.items()]
    parameters = [*(each.replace(kind=kind) for each in signature.parameters.values()), *added]
    for each in parameters:
        info = get_args(each.annotation)[1]
        if isinstance(each.default, bool) and not info.param_decls:
            # typer would give a flag without a name an opposite: --no-NAME
            info.param_decls = (f"--{each.name.replace('_', '-')}",)
    vars(protected)["__signature__"] = signature.replace(parameters=parameters)
    protected.__annotations__ = {**command.__annotations__, **{each.name: each.annotation for each in added}}
    return protected


def _kind(parameter: inspect.Parameter) -> Any:
    return get_args(parameter.annotation)[0]


def _existing_files(words: list[str]) -> Iterator[Path]:
    """Yield the files that words of a command line name, those in folders of artifacts among them."""
    for word in words:
        # FILE, --option=FILE, --feed NAME=FILE, --feed=NAME=FILE, -oFILE
        texts = {word, word.partition("=")[2], word.rpartition("=")[2], word[2:] if word[:2] == "-o" else ""}
        for path in map(Path, filter(None, texts)):
            try:
                if path.is_file():
                    yield path
                elif path.is_dir():
                    from graphscale.ort.artifacts.folder import holds_artifacts

                    if holds_artifacts(path):
                        yield from (file for file in path.rglob("*") if file.is_file())
            except (OSError, ValueError):  # a text that is no path
                continue
