"""graphscale strip: give back the graph as it was before."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import onnx_ir as ir
import typer

from graphscale.files import model_files, writing
from graphscale.ort.artifacts.folder import holds_artifacts
from graphscale.ort.artifacts.strip_folder import strip_artifacts
from graphscale.stripping import strip as strip_model

__all__ = ["strip"]


def strip(
    scaled: Annotated[
        Path, typer.Argument(help="A graph that scale or autocast wrote, or a folder.", show_default=False)
    ],
    output: Annotated[
        Path, typer.Option("-o", "--output", help="Where to write the graph or folder.", show_default=False)
    ],
    force: Annotated[bool, typer.Option("--force", help="Replace an output folder that is not empty.")] = False,
) -> None:
    """Take the loss scale and mixed precision out again: nodes, order, names, types and metadata as they were.

    Weights keep the values that SCALED holds. SCALED may also be a folder of artifacts; then OUT is a folder, too.
    """
    if holds_artifacts(scaled):
        strip_artifacts(scaled, output, force=force)
    else:
        writing.check_output(output)
        stripped = strip_model(scaled)
        assert isinstance(stripped, ir.Model)
        model_files.save(stripped, output)
    print(f"{scaled} without graphscale -> {output}")
