"""What makes thousands of commands in one process affordable."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import pytest
import typer.main


@pytest.fixture(autouse=True, scope="module")
def commands_built_once() -> Iterator[None]:
    """Typer builds the tree of all commands anew in each call, which takes longer than most commands."""
    build = typer.main.get_command
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(typer.main, "get_command", functools.cache(build))
        yield
