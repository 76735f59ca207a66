"""graphscale strip: give back the graph as it was before."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from graphscale.cli.options import Force, argument, is_folder, option
from graphscale.cli.show import say

__all__ = ["strip"]


def strip(
    scaled: Annotated[Path, argument("A graph that scale or autocast wrote, or a folder.")],
    output: Annotated[Path, option("Where to write the graph or folder.", "-o", "--output")],
    force: Force = False,
) -> None:
    """Take the loss scale and mixed precision out again: nodes, order, names, types and metadata as they were.

    Weights keep the values that SCALED holds. SCALED may also be a folder of artifacts; then OUT is a folder, too.
    """
    from graphscale.files import model_files
    from graphscale.ort.artifacts.strip_folder import strip_artifacts
    from graphscale.stripping import strip as strip_model

    if is_folder(scaled, output, False, {}, marked=False):
        strip_artifacts(scaled, output, force=force)
    else:
        model_files.save(strip_model(scaled), output)
    say(f"{scaled} without graphscale -> {output}")
