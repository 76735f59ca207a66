"""All categories of hostile files."""

from __future__ import annotations

import functools

from fuzz.hostile import bombs, disclosure, loss, slow, state_files, terminal, tracebacks
from fuzz.hostile.runner import Category, Kind

_STATE_FILES: dict[str, Kind] = {
    make.__name__: functools.partial(state_files.attempt, make)
    for make in (state_files.flips, state_files.cuts, state_files.forgeries)
}
_STATES = Category(
    "state", "a checkpoint that was changed or forged is refused in one line that names it", _STATE_FILES
)
_FOLDERS = (disclosure.CATEGORY, terminal.CATEGORY, bombs.CATEGORY, slow.CATEGORY, tracebacks.CATEGORY, loss.CATEGORY)
CATEGORIES: dict[str, Category] = {each.name: each for each in (*_FOLDERS, _STATES)}
