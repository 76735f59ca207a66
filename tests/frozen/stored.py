"""The committed tables."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

__all__ = ["FOLDER", "Row", "read_table"]

Row = dict[str, Any]

FOLDER = Path(__file__).parent


@functools.cache
def read_table(name: str) -> dict[str, Row]:
    """Return the committed rows of a table by their keys."""
    lines = (FOLDER / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    return {row.pop("key"): row for row in rows}
