"""strip_artifacts: an artifact folder without graphscale's rewrites, with its trained state."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import onnx_ir as ir

from graphscale.errors import ModelFileError
from graphscale.files import model_files
from graphscale.files.ort_checkpoint import Checkpoint, read_checkpoint
from graphscale.files.writing import check_output_folder, write_folder
from graphscale.graph.damage import name_damage
from graphscale.graph.stamp import is_scaled
from graphscale.ort.artifacts.folder import CHECKPOINT, MODELS, TRAINING_MODEL, ArtifactFolder, check_parameters
from graphscale.ort.artifacts.scale_folder import write_artifacts
from graphscale.policy.names import ScaledValue
from graphscale.step.scaled_step import read
from graphscale.stripping import is_rewritten, strip_model

__all__ = ["strip_artifacts"]


@name_damage
def strip_artifacts(
    folder: str | os.PathLike[str], out: str | os.PathLike[str], *, force: bool = False
) -> tuple[str, ...]:
    """Write an artifact folder without graphscale's loss scale and mixed precision.

    The models are those of the original folder; checkpoints keep parameters, moments and step count, without the state
    of the loss scale. Other files are copied.

    Args:
        folder: a folder from `scale_artifacts` or `autocast_artifacts`, with or without later training.
        out: the new folder, complete.
        force: replace `out`, even if it is not empty.

    Returns:
        The names of the stripped models.

    Raises:
        ModelFileError: a file is missing or damaged, or graphscale has not rewritten the folder.
        OutputError: `out` is not empty, or cannot be written.
    """
    path = Path(folder)
    target = check_output_folder(path, out, force)
    models = {name: model_files.load(path / name) for name in MODELS}
    rewritten = tuple(name for name, model in models.items() if is_rewritten(model))
    if not rewritten:
        raise ModelFileError(
            f"{folder} has nothing to strip: graphscale put neither a loss scale nor casts into it, or another tool "
            "dropped its metadata"
        )
    states = _states(models[TRAINING_MODEL], str(path / TRAINING_MODEL))
    checkpoint = read_checkpoint(path / CHECKPOINT)
    check_parameters(checkpoint, models[TRAINING_MODEL], str(path / CHECKPOINT), str(path / TRAINING_MODEL))
    stripped = {name: strip_model(models[name], str(path / name)) for name in rewritten}
    found = ArtifactFolder(
        path, models | {n: model for n, (model, _) in stripped.items()}, _without(checkpoint, states)
    )
    further = {file: found.further_checkpoint(file) if states else None for file in found.others()}
    others = {file: held and _without(held, states) for file, held in further.items()}
    unchanged = {name for name in MODELS if name not in rewritten} | (set() if states else {CHECKPOINT})
    with write_folder(target) as temporary:
        write_artifacts(found, others, temporary, unchanged, {name: proto for name, (_, proto) in stripped.items()})
    return rewritten


def _states(training: ir.Model, name: str) -> set[str]:
    """Return the frozen parameters with the state of the loss scale."""
    if not is_scaled(training):
        return set()
    named = read(training, name).named.items()
    return {value.name or "" for role, value in named if role != ScaledValue.LOSS and value.is_graph_input()}


def _without(checkpoint: Checkpoint, states: set[str]) -> Checkpoint:
    frozen = {name: array for name, array in checkpoint.frozen.items() if name not in states}
    return dataclasses.replace(checkpoint, frozen=frozen)
