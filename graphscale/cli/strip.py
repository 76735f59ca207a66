"""graphscale strip: restore the original graph."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from graphscale.cli.options import Force, argument, is_folder, output_path
from graphscale.cli.show import print_json, say

__all__ = ["strip"]


def strip(
    scaled: Annotated[Path, argument("A graph that scale or autocast wrote, or a folder.")],
    output: Annotated[Path, output_path("The original graph or folder.")],
    force: Force = False,
) -> None:
    """Remove the loss scale and mixed precision: nodes, order, names, types and metadata are the original's.

    Weights keep the values that SCALED holds. SCALED may also be a folder of artifacts; then the output is one, too.

    Examples:
        graphscale strip step.onnx -o stripped.onnx
        graphscale strip scaled -o stripped_artifacts
    """
    from graphscale.files import saving
    from graphscale.ort.artifacts.strip_folder import strip_artifacts
    from graphscale.stripping import strip_with_proto

    if is_folder(scaled, output, False, {}, marked=False):
        names = list(strip_artifacts(scaled, output, force=force))
    else:
        model, proto = strip_with_proto(scaled)
        saving.save(model, output, proto)
        names = [output.name]
    print_json(lambda: {"output": str(output), "models": names})
    say(f"{scaled} without graphscale -> {output}")
