"""The packages of an extra, and the command that installs them: it fits a checkout and a wheel."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from importlib import metadata
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from packaging.requirements import Requirement

__all__ = ["RUNTIME", "install_command", "requirements_of"]

RUNTIME = "onnxruntime"


def requirements_of(extra: str) -> Iterator[Requirement]:
    """Yield the requirements that an extra adds on this machine, but no runtime; without one, those of graphscale."""
    from packaging.requirements import Requirement

    for text in metadata.requires("graphscale") or ():
        requirement = Requirement(text)
        always, now = (
            requirement.marker is None or requirement.marker.evaluate({"extra": name}) for name in ("", extra)
        )
        if now and not (always and extra) and not requirement.name.startswith(RUNTIME):
            yield requirement


def install_command(extra: str, *packages: str) -> str:
    """Return the command that installs the packages of an extra, and further ones."""
    needed = [f"{requirement.name}{requirement.specifier}" for requirement in requirements_of(extra)]
    return shlex.join(["pip", "install", *needed, *packages])
