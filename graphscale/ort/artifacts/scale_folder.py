"""scale_artifacts: put loss scaling into an artifact folder of ONNX Runtime training sessions."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from graphscale.analysis.report import Report
from graphscale.files import saving
from graphscale.files.external_data import external_tensors
from graphscale.files.ort_checkpoint import Checkpoint, write_checkpoint
from graphscale.files.writing import check_output_folder, write_folder
from graphscale.graph.builder import count_inserted
from graphscale.graph.damage import name_damage
from graphscale.graph.original import record_original
from graphscale.graph.releases import check_versions
from graphscale.graph.stamp_reading import read_stamp
from graphscale.lowering.flag_window import can_flag
from graphscale.lowering.lower_model import count_lowered, lower_model
from graphscale.ort.artifacts.folder import (
    CHECKPOINT,
    OPTIMIZER_MODEL,
    TRAINING_MODEL,
    ArtifactFolder,
    read_folder,
    watched_outputs,
)
from graphscale.ort.artifacts.optimizer_guard import GuardOptimizer
from graphscale.ort.artifacts.training_scaling import scale_training_model
from graphscale.passes import Autocast
from graphscale.passes.preparation import prepare
from graphscale.pipeline import make_stamp
from graphscale.policy.loss_scale import DynamicLossScale, get_policy
from graphscale.targets import Target, get_training_target

__all__ = ["ScaledArtifacts", "repair_versions", "scale_artifacts", "with_states", "write_artifacts"]

_OPTIMIZER = "optimizer model: "  # the prefix of that model's passes in a report


@dataclasses.dataclass(frozen=True)
class ScaledArtifacts:
    """The result of `scale_artifacts`.

    Attributes:
        path: the written folder; None in a dry run.
        report: findings in the training model, and changes of all models.
    """

    path: Path | None
    report: Report

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain dicts, lists, strings and numbers."""
        return self.report.to_dict()


@name_damage
def scale_artifacts(
    folder: str | os.PathLike[str],
    out: str | os.PathLike[str] | None,
    loss_scale: Any = "dynamic",
    *,
    loss: str | Sequence[str] | None = None,
    target: str = "ort-training",
    skip_nonfinite: bool = False,
    force: bool = False,
    autocast: str | Autocast | None = None,
    lower: bool = True,
) -> ScaledArtifacts:
    """Write an artifact folder with loss scaling. Training scripts need no other change.

    The scale is constant within a window of accumulated gradients. The update rule runs at the beginning of the next
    window: at the first call after `module.lazy_reset_grad()`. If an accumulated gradient of the window is not finite,
    `optimizer.step()` changes nothing. The state is in the checkpoint, as the frozen parameters `current_loss_scale`,
    `good_steps`, `window_finite` and further counts of the policy: a training session saves and resumes it without
    further code. Checkpoints have no gradient buffers, so that an interruption ends the window, for the loss scale and
    the gradients.

    Args:
        folder: the folder that `onnxruntime.training.artifacts.generate_artifacts` wrote.
        out: the new folder, complete with copies of other files. None for a dry run.
        loss_scale: "dynamic", a number of at least 1, a `LossScale`, or `{"class_name": ..., "config": {...}}`.
        loss: the name of the loss; None to find it.
        target: a target with training sessions.
        skip_nonfinite: skip steps for a fixed loss scale as well, unlike TensorFlow.
        force: replace `out`, even if it is not empty.
        autocast: put the training model into mixed precision first: "float16", "bfloat16", or an `Autocast` pass.
        lower: lower the models for a CPU: the training is the same, bit for bit, except for subnormal intermediate
            numbers. The optimizer model then checks only the smallest gradient, where the training model writes NaN if
            any gradient is not finite. Only folders with a dynamic scale and target "ort-training" are lowered.

    Raises:
        GraphscaleError: the input is not acceptable; nothing is written.
    """
    policy = get_policy(loss_scale)
    chosen = get_training_target(target)
    written = None if out is None else check_output_folder(Path(folder), out, force)
    artifacts = read_folder(folder)
    training, evaluation, optimizer = artifacts.models.values()
    with contextlib.ExitStack() as stack:
        for name, model in artifacts.models.items():
            stack.enter_context(record_original(model, artifacts.protos[name]))
        warnings = [*repair_versions(artifacts, chosen), *prepare(training)]
        mixed = Autocast(autocast, loss=loss, target=target) if isinstance(autocast, str) else autocast
        if mixed is not None:
            mixed.roles = watched_outputs(training, loss)
            mixed.rewrite(training)
        states, names, report = scale_training_model(artifacts, policy, chosen, loss, skip_nonfinite)
        # A training session feeds all parameters of the training model to the eval model, by position.
        evaluation.graph.inputs.extend(ir.val(name, ir.DataType.FLOAT, []) for name in states)
        if isinstance(policy, DynamicLossScale) or skip_nonfinite:
            count = len(artifacts.checkpoint.trainable)
            GuardOptimizer(count, chosen, str(artifacts.path / OPTIMIZER_MODEL))(optimizer)
        others, left_out = _sort_others(artifacts, states)
        report = dataclasses.replace(
            report,
            inserted=report.inserted | _count_guards(optimizer),
            warnings=(*warnings, *left_out, *report.warnings),
            autocast=None if mixed is None or mixed.report is None else mixed.report.to_dict(),
        )
        for model in artifacts.models.values():
            make_stamp(report, names).write(model)
    if lower and states and not chosen.cuda:
        report = _lower(artifacts, chosen, report)
    if written is not None:
        with write_folder(written) as temporary:
            artifacts.checkpoint = with_states(artifacts.checkpoint, states)
            write_artifacts(artifacts, others, temporary)
    return ScaledArtifacts(written, report)


def _lower(artifacts: ArtifactFolder, target: Target, report: Report) -> Report:
    """Lower the models of a scaled folder in place; return the new report, which all models carry."""
    training, optimizer = (artifacts.models[name] for name in (TRAINING_MODEL, OPTIMIZER_MODEL))
    if not can_flag(training.graph):
        return report
    lower_model(training, target)
    lower_model(optimizer, target)
    plain = {key: counts for key, counts in report.inserted.items() if not key.startswith(_OPTIMIZER)}
    inserted = plain | count_lowered(training, "training") | _count_guards(optimizer)
    report = dataclasses.replace(report, inserted=inserted, nodes_after=len(training.graph))
    for name, model in artifacts.models.items():
        dataclasses.replace(read_stamp(model, name), report=report.to_dict()).write(model)
    return report


def _count_guards(optimizer: ir.Model) -> dict[str, dict[str, int]]:
    """Count the inserted nodes of the optimizer model, for the report."""
    return {f"{_OPTIMIZER}{key}": value for key, value in count_inserted(optimizer.graph).items()}


def with_states(checkpoint: Checkpoint, states: Mapping[str, float]) -> Checkpoint:
    """Add missing states to a checkpoint."""
    frozen = dict(checkpoint.frozen)
    for name, value in states.items():
        frozen.setdefault(name, np.asarray(value, dtype=np.float32))
    return dataclasses.replace(checkpoint, frozen=frozen)


def repair_versions(artifacts: ArtifactFolder, target: Target) -> list[str]:
    """Lower an IR version that the runtime cannot load, since artifacts need no newer one."""
    warnings = []
    for name, model in artifacts.models.items():
        if model.ir_version > target.max_ir_version:
            warnings.append(
                f"{name} has IR version {model.ir_version}, which {target.runs_on} cannot load; it was written with "
                f"IR version {target.max_ir_version}"
            )
            model.ir_version = target.max_ir_version
        check_versions(model, target)
    return warnings


def _sort_others(
    artifacts: ArtifactFolder, states: Mapping[str, float]
) -> tuple[dict[Path, Checkpoint | None], list[str]]:
    """Return the other files of the folder, with the new content of checkpoints of the model, and warnings."""
    files: dict[Path, Checkpoint | None] = {}
    warnings = []
    for file in artifacts.others():
        checkpoint = artifacts.further_checkpoint(file) if states else None
        if checkpoint is None or not checkpoint.nominal:
            files[file] = None if checkpoint is None else with_states(checkpoint, states)
        else:
            warnings.append(f"{file.name} is a nominal checkpoint, which cannot hold the loss scale; it was not copied")
    return files, warnings


def write_artifacts(
    artifacts: ArtifactFolder,
    others: Mapping[Path, Checkpoint | None],
    folder: Path,
    unchanged: Collection[str] = (),
    protos: Mapping[str, onnx.ModelProto] | None = None,
) -> None:
    """Write all files of a folder: models, checkpoints, and copies of the others.

    Other files get their new content; models and the checkpoint with `unchanged` names are copied. Models with `protos`
    are written as these.
    """
    for name, model in artifacts.models.items():
        if name in unchanged and not external_tensors(model):
            shutil.copy2(artifacts.path / name, folder / name)
        else:
            saving.save(model, folder / name, (protos or {}).get(name))
    own = None if CHECKPOINT in unchanged else artifacts.checkpoint
    for file, checkpoint in {**others, artifacts.path / CHECKPOINT: own}.items():
        if checkpoint is None:
            shutil.copy2(file, folder / file.name)
        else:
            write_checkpoint(folder / file.name, checkpoint)
