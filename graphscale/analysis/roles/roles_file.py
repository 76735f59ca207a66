"""The roles file, its schema, and the question for it."""

from __future__ import annotations

import json
from typing import Any

from graphscale.analysis.roles.answers import FIELDS, LISTS
from graphscale.analysis.roles.role_table import Role, RoleEntry, RoleTable
from graphscale.errors import RolesError

__all__ = ["OPEN", "ask", "roles_file", "roles_schema"]

_MOST_LISTED = 5  # outputs in a message
OPEN = "outputs in question: correct them above; this list is not read"


def roles_file(entries: tuple[RoleEntry, ...]) -> str:
    """Return the text of a roles file for a table: its outputs, with its proposals."""
    outputs = [entry for entry in entries if entry.kind == "output"]

    def names(*roles: Role) -> list[str]:
        return [entry.name for entry in outputs if Role(entry.role) in roles]

    content = {
        "help": FIELDS | {"open": OPEN},
        "losses": names(Role.LOSS),
        "states": {entry.name: entry.pair for entry in outputs if entry.pair is not None},
        "gradients": names(Role.GRADIENT),
        "metrics": names(Role.METRIC, Role.CONSTANT),
        "kept": [],
        "open": {entry.name: str(entry) for entry in RoleTable(entries).open},
    }
    return json.dumps(content, indent=2) + "\n"


def roles_schema() -> dict[str, Any]:
    """Return the JSON Schema (draft 2020-12) of a roles file."""
    text = {"type": "string"}
    names, pairs = {"type": "array", "items": text}, {"type": "object", "additionalProperties": text}
    properties = {
        field: {"description": description, **(names if field in LISTS else pairs)}
        for field, description in {**FIELDS, "help": "explanations of the fields; not read", "open": OPEN}.items()
    }
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Roles file",
        "type": "object",
        "properties": properties,
        "additionalProperties": False,
    }


def ask(table: RoleTable) -> RolesError:
    """Return the question about all open outputs of a table."""
    count = len(table.open)
    what = "one output has" if count == 1 else f"{count} outputs have"
    listed = "; ".join(f"{entry.name!r}: {entry}" for entry in table.open[:_MOST_LISTED])
    more = f"; and {count - _MOST_LISTED} more" if count > _MOST_LISTED else ""
    return RolesError(
        f"{what} no certain role: {listed}{more}. Take the proposals with graphscale scale --accept, or write all "
        "roles with graphscale inspect MODEL --roles-out FILE.json, correct them, and pass them with --roles FILE.json",
        table,
    )
