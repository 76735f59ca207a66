"""Exporters of training steps, one per framework: each is imported, with its framework, when it is called."""

from __future__ import annotations

import importlib
from typing import Any

__all__ = ["jax", "pytorch", "tensorflow"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
