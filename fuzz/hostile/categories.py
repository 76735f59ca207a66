"""All categories of hostile files."""

from __future__ import annotations

from fuzz.hostile import bombs, loss, terminal, tracebacks
from fuzz.hostile.runner import Category

CATEGORIES: dict[str, Category] = {each.CATEGORY.name: each.CATEGORY for each in (terminal, bombs, tracebacks, loss)}
