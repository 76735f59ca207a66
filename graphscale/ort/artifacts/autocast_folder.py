"""autocast_artifacts: put the training model of an artifact folder into mixed precision."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from graphscale.files.writing import check_output_folder, write_folder
from graphscale.graph.damage import name_damage
from graphscale.graph.original import record_original
from graphscale.ort.artifacts.folder import CHECKPOINT, TRAINING_MODEL, read_folder, watched_outputs
from graphscale.ort.artifacts.scale_folder import repair_versions, scale_artifacts, write_artifacts
from graphscale.passes import Autocast
from graphscale.passes.casting.cast_report import AutocastReport
from graphscale.passes.casting.settings import make_settings
from graphscale.passes.preparation import prepare
from graphscale.targets import get_training_target

__all__ = ["autocast_artifacts"]


@name_damage
def autocast_artifacts(
    folder: str | os.PathLike[str],
    out: str | os.PathLike[str] | None,
    dtype: str = "float16",
    *,
    emulate: bool = False,
    allow: Iterable[str] = (),
    deny: Iterable[str] = (),
    keep: Iterable[str] = (),
    lists: str | os.PathLike[str] | Mapping[str, Any] | None = None,
    loss_scale: Any = None,
    loss: str | Sequence[str] | None = None,
    target: str = "ort-training",
    force: bool = False,
) -> AutocastReport:
    """Write an artifact folder whose training model computes in mixed precision; parameters stay float32.

    Eval model, optimizer model and checkpoint are unchanged, except with `loss_scale`.

    Args:
        folder: the folder that `onnxruntime.training.artifacts.generate_artifacts` wrote.
        out: the new folder, complete with copies of other files. None for a dry run.
        dtype: "float16" or "bfloat16".
        emulate: as for `graphscale.autocast`.
        allow: as for `graphscale.autocast`.
        deny: as for `graphscale.autocast`.
        keep: as for `graphscale.autocast`.
        lists: as for `graphscale.autocast`.
        loss_scale: scale the folder, too, as `scale_artifacts` does; None for no loss scale.
        loss: the name of the loss; None to find it.
        target: a target with training sessions.
        force: replace `out`, even if it is not empty.

    Raises:
        GraphscaleError: the input is not acceptable; nothing is written.
    """
    chosen = get_training_target(target)
    settings = make_settings(allow, deny, keep, lists)
    mixed = Autocast(dtype, emulate, settings, loss, target=target)
    if loss_scale is not None:
        scale_artifacts(folder, out, loss_scale, loss=loss, target=target, force=force, autocast=mixed)
        assert mixed.report is not None
        return mixed.report
    written = None if out is None else check_output_folder(Path(folder), out, force)
    artifacts = read_folder(folder)
    training = artifacts.models[TRAINING_MODEL]
    unchanged = {CHECKPOINT}
    with contextlib.ExitStack() as stack:
        for name, model in artifacts.models.items():
            if name == TRAINING_MODEL or model.ir_version > chosen.max_ir_version:
                stack.enter_context(record_original(model, artifacts.protos[name]))
            else:
                unchanged.add(name)
        warnings = [*repair_versions(artifacts, chosen), *prepare(training)]
        mixed.roles = watched_outputs(training, loss)
        mixed.rewrite(training)
    assert mixed.report is not None
    others = dict.fromkeys(artifacts.others())
    if written is not None:
        with write_folder(written) as temporary:
            write_artifacts(artifacts, others, temporary, unchanged)
    return dataclasses.replace(mixed.report, warnings=(*warnings, *mixed.report.warnings))
