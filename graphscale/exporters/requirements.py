"""Packages that an exporter needs beyond graphscale's own dependencies."""

from __future__ import annotations

import importlib

from graphscale.errors import ExportError

__all__ = ["require"]

_RUNTIME = ("onnxruntime", "onnxruntime")


def require(extra: str, *modules: tuple[str, str]) -> None:
    """Check that modules can be imported, and ONNX Runtime, which the file is compared on.

    Args:
        extra: the extra of graphscale with these packages.
        modules: names of modules, each with its package.

    Raises:
        ExportError: one is missing.
    """
    missing = []
    for module, package in (*modules, _RUNTIME):
        try:
            importlib.import_module(module)
        except ImportError:
            missing.append(package)
    if missing:
        extras = f"{extra},ort" if "onnxruntime" in missing else extra
        raise ExportError(
            f"the export needs {' and '.join(missing)}: install the extras of graphscale, pip install "
            f"'graphscale[{extras}]' or, in a checkout, pip install -e '.[{extras}]'"
        )
