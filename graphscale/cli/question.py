"""The question about open roles: a table and a command in a terminal, rows as JSON, else the line of the error."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

from graphscale.cli.show import EscapedTable, join_command, make_console, make_text, print_json
from graphscale.errors import RolesError
from graphscale.process.summary import few

if TYPE_CHECKING:
    from rich.console import Console

    from graphscale.analysis.roles.role_table import RoleEntry, RoleTable

__all__ = ["showing_questions"]

_MOST_ROWS = 20
_ACCEPT = "--accept"


@contextlib.contextmanager
def showing_questions(accepts: bool) -> Iterator[None]:
    """Show the open roles that a command asks about.

    Args:
        accepts: True if the command has `--accept`.
    """
    try:
        yield
    except RolesError as error:
        from graphscale.analysis.roles.role_table import RoleTable

        table, console, message = error.table, make_console(stderr=True), str(error)
        if not isinstance(table, RoleTable):
            raise
        print_json(lambda: {"error": message, "open": [_to_dict(entry, table) for entry in table.open]})
        if not console.is_terminal or console.quiet:
            raise
        _show(table, console)
        if accepts:
            console.print(make_text(f"to take the proposals: {_compose_command(sys.argv[1:])}"), soft_wrap=True)
        raise RolesError(
            "nothing was written: correct the proposals with graphscale inspect MODEL --roles-out FILE.json, and pass "
            "them with --roles FILE.json"
        ) from error


def _to_dict(entry: RoleEntry, table: RoleTable) -> dict[str, object]:
    others = table.others.get(entry.name, ())
    return {"output": entry.name, "role": entry.role, "pair": entry.pair, "why": entry.evidence, "others": [*others]}


def _show(table: RoleTable, console: Console) -> None:
    rows = EscapedTable(show_edge=False, pad_edge=False)
    for title in ("output", "proposal", "why", "other candidates"):
        rows.add_column(title, overflow="fold")
    for entry in table.open[:_MOST_ROWS]:
        role = entry.role if entry.pair is None else f"next value of {entry.pair}"
        others = table.others.get(entry.name, ())
        rows.add_row(entry.name, role, entry.evidence, few(others if role == "metric" else (*others, "a metric")))
    console.print(rows)
    if len(table.open) > _MOST_ROWS:
        console.print(make_text(f"and {len(table.open) - _MOST_ROWS} more"))


def _compose_command(words: list[str]) -> str:
    """Return a command line with `--accept`, or the option alone where a model comes through a pipe."""
    if "-" in words:
        return f"add {_ACCEPT}"
    end = words.index("--") if "--" in words else len(words)
    return join_command(["graphscale", *words[:end], _ACCEPT, *words[end:]])
