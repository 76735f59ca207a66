"""resume_artifacts: continue the training of a scaled artifact folder from any checkpoint of its model."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

from graphscale.errors import ModelFileError
from graphscale.files import model_files
from graphscale.files.ort_checkpoint import read_checkpoint, write_checkpoint
from graphscale.graph.damage import name_damage
from graphscale.graph.stamp_reading import find_wrong_number, read_stamp
from graphscale.ort.artifacts.folder import CHECKPOINT, TRAINING_MODEL, check_parameters
from graphscale.ort.artifacts.scale_folder import with_states
from graphscale.ort.artifacts.training_scaling import initial_states
from graphscale.policy.loss_scale import get
from graphscale.policy.names import ScaledValue

__all__ = ["ResumedArtifacts", "resume_artifacts"]


@dataclasses.dataclass(frozen=True)
class ResumedArtifacts:
    """The state at the start of a training session of the folder.

    Attributes:
        path: the written checkpoint.
        added: the states of the loss scale that the given checkpoint lacked.
        loss_scale: the loss scale; None for a fixed one, which is part of the model.
        good_steps: the good steps since the scale changed; None for a fixed one.
        step: the number of applied optimizer steps, for Adam's bias correction; None for a checkpoint without optimizer
            state: then moments and count restart, as without a loss scale.
    """

    path: Path
    added: tuple[str, ...]
    loss_scale: float | None
    good_steps: int | None
    step: int | None


@name_damage
def resume_artifacts(folder: str | os.PathLike[str], checkpoint: str | os.PathLike[str]) -> ResumedArtifacts:
    """Make a checkpoint the starting point of a scaled artifact folder: it becomes the folder's `checkpoint`.

    A checkpoint that a training session of the folder has saved can be loaded directly, and continues exactly if it
    was saved with `include_optimizer_state=True`. This function is for scripts that always load the folder's own
    checkpoint, and for a checkpoint from before the scaling, which gets the initial state of the loss scale.
    Parameters, moments, step count and properties are kept.

    Args:
        folder: a folder from `scale_artifacts`.
        checkpoint: a checkpoint of the same model, scaled or not.

    Raises:
        ModelFileError: the folder is not scaled, or the checkpoint is damaged, of another model, or has an invalid loss
            scale or count.
        OutputError: the folder cannot be written.
    """
    path = Path(folder, TRAINING_MODEL)
    training = model_files.load(path)
    stamp = read_stamp(training, str(path))
    found = read_checkpoint(checkpoint)
    if found.nominal:
        raise ModelFileError(f"{checkpoint} is nominal: it holds no values to start from")
    check_parameters(found, training, os.fspath(checkpoint), str(path))
    expected = read_checkpoint(Path(folder, CHECKPOINT))
    missing = [name for name in expected.trainable if name not in found.trainable]
    beginning = initial_states(get(stamp.policy))
    states = {stamp.names[role]: number for role, number in beginning.items() if role in stamp.names}
    missing += [name for name in expected.frozen if name not in found.frozen and name not in states]
    if missing:
        raise ModelFileError(f"{checkpoint} lacks the parameter {missing[0]!r} of {path}; it is of another model")
    if (fault := find_wrong_number(stamp, found.frozen)) is not None:
        raise ModelFileError(f"{checkpoint}: {fault}")
    complete = with_states(found, states)
    written = Path(folder, CHECKPOINT)
    write_checkpoint(written, complete)
    groups = list(complete.groups.values())
    held = {key: float(complete.frozen[name]) for key, name in stamp.names.items() if name in states}
    return ResumedArtifacts(
        path=written,
        added=tuple(name for name in states if name not in found.frozen),
        loss_scale=held.get(ScaledValue.LOSS_SCALE),
        good_steps=int(held[ScaledValue.GOOD_STEPS]) if ScaledValue.GOOD_STEPS in held else None,
        step=groups[0].step if groups else None,
    )
