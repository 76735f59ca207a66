"""Packages that an exporter needs beyond graphscale's own dependencies."""

from __future__ import annotations

import importlib

from graphscale.errors import ExportError
from graphscale.process.extras import RUNTIME, install_command

__all__ = ["require"]


def require(extra: str, *modules: tuple[str, str]) -> None:
    """Check that modules can be imported, and ONNX Runtime, which the file is compared on.

    Args:
        extra: the extra of graphscale with these packages.
        modules: names of modules, each with its package.

    Raises:
        ExportError: one is missing.
    """
    missing = []
    for module, package in (*modules, (RUNTIME, RUNTIME)):
        try:
            importlib.import_module(module)
        except ImportError:
            missing.append(package)
    if missing:
        command = install_command(extra, *({RUNTIME} & {*missing}))
        raise ExportError(f"the export needs {' and '.join(missing)}, which cannot be imported here: {command}")
