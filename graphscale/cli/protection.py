"""The option --force of every command, without which no file is lost."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from graphscale.cli.options import Force
from graphscale.files.replacing import protecting

__all__ = ["protect"]


def protect(command: Callable[..., Any]) -> Callable[..., Any]:
    """Let a command replace no file that it reads or that graphscale did not write, unless --force is given."""
    signature = inspect.signature(command, eval_str=True)
    has_force = "force" in signature.parameters

    @functools.wraps(command)
    def protected(*, force: bool = False, **given: Any) -> Any:
        if has_force:
            given["force"] = force
        if force:
            return command(**given)
        with protecting(list(_existing_files(sys.argv[2:]))):
            return command(**given)

    if not has_force:
        added = inspect.Parameter("force", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=Force)
        parameters = [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in signature.parameters.values()]
        vars(protected)["__signature__"] = signature.replace(parameters=[*parameters, added])
        protected.__annotations__ = {**command.__annotations__, "force": Force}
    return protected


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
                    yield from _artifacts(path)
            except (OSError, ValueError):  # a text that is no path
                continue


def _artifacts(folder: Path) -> Iterator[Path]:
    from graphscale.ort.artifacts.folder import holds_artifacts

    if holds_artifacts(folder):
        yield from (file for file in folder.rglob("*") if file.is_file())
