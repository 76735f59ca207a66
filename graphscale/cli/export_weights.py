"""graphscale export-weights: trained weights back into an inference model or a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from graphscale.cli.options import Json
from graphscale.cli.show import print_json
from graphscale.files import writing
from graphscale.ort.fusing import export_weights as export

__all__ = ["export_weights"]


def export_weights(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="STEP_OR_STATE",
            help="The trained weights: a saved state (.npz, .safetensors), or a training step that holds them.",
        ),
    ],
    destination: Annotated[
        Path,
        typer.Argument(
            metavar="INFERENCE_MODEL",
            help="The model, or the checkpoint, whose weights of the same names get replaced.",
        ),
    ],
    output: Annotated[Path, typer.Option("-o", "--output", help="Where to write it.", show_default=False)],
    partial: Annotated[
        bool, typer.Option("--partial", help="Keep weights that the source does not have, instead of refusing.")
    ] = False,
    json: Json = False,
) -> None:
    """Write trained weights into an inference model or a checkpoint, by name. Neither file given is changed."""
    writing.check_output(output)
    result = export(source, destination, partial=partial)
    result.save(output)
    if json:
        found = {"written": result.written, "kept": result.kept, "unused": result.unused}
        print_json(found)
        return
    console = Console(highlight=False)
    console.print(Text(f"{len(result.written)} weights from {source} -> {output}"), soft_wrap=True)
    for verb, names in (("kept", result.kept), ("not used", result.unused)):
        if names:
            console.print(Text(f"{verb}: {', '.join(names)}"), soft_wrap=True)
