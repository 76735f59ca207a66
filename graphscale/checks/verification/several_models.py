"""The verification of several models: an artifact folder is scaled again, a step split again, and compared."""

from __future__ import annotations

import dataclasses
import filecmp
import functools
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from graphscale.checks.translation.tensor_bits import tensor_difference
from graphscale.checks.translation.validation import Claims, read_claims
from graphscale.checks.verification.pair import open_scaled
from graphscale.checks.verification.proofs import NO_CHECK
from graphscale.checks.verification.translated import compare_part, state_faults
from graphscale.checks.verification.verify_report import SKIPPED, Check, VerifyReport
from graphscale.errors import AlreadyScaledError, GraphscaleError, VerifyError
from graphscale.files import model_files
from graphscale.files.contents import parse_json
from graphscale.files.ort_checkpoint import Checkpoint, is_checkpoint, read_checkpoint
from graphscale.graph.damage import name_damage
from graphscale.graph.stamp import Stamp, is_scaled
from graphscale.graph.stamp_reading import find_wrong_number, read_stamp
from graphscale.lowering.lower_model import is_lowered
from graphscale.ort.artifacts.autocast_folder import autocast_artifacts
from graphscale.ort.artifacts.folder import CHECKPOINT, MODELS, TRAINING_MODEL, ArtifactFolder, check_complete
from graphscale.ort.artifacts.scale_folder import scale_artifacts
from graphscale.ort.artifacts.training_scaling import initial_states
from graphscale.pipeline import Model
from graphscale.policy.loss_scale import FixedLossScale, LossScale
from graphscale.policy.names import ScaledValue
from graphscale.replicas.buckets import LEAST_BYTES
from graphscale.replicas.splitting import SPLIT_KEY, split, stage_path

__all__ = ["verify_folder", "verify_halves"]

Compare = Callable[[Checkpoint, Checkpoint], Iterator[str]]

_NOTE = "no model was run: those of a folder work on one state, in a training session"
_GUARDS = "optimizer model: "  # the prefix of the optimizer model's counts in a report
# ONNX Runtime checks further parts of a checkpoint, which are not read here.
_OTHER_BYTES = "its bytes are not those that scaling writes; --trained accepts the checkpoint of a session"
_SPLIT = (
    "no model was run: the step was split once more, as the halves claim it was",
    "the step itself is not checked; compare it with its original: verify ORIGINAL STEP",
)


def verify_folder(
    original: str | os.PathLike[str],
    scaled: str | os.PathLike[str],
    loss: str | Sequence[str] | None,
    trained: bool = False,
) -> VerifyReport:
    """Verify a scaled artifact folder against the original.

    Args:
        original: the folder before scaling.
        scaled: the folder after scaling.
        loss: the name of the loss, as given to the scaling.
        trained: True if the checkpoint may have other values, for the loss scale within the range of the policy.

    Raises:
        GraphscaleError: a file cannot be read, or the original cannot be scaled by the scaled folder's claims.
    """
    first, second = check_complete(original), check_complete(scaled)
    training = model_files.load(first / TRAINING_MODEL)
    if is_scaled(training):
        raise AlreadyScaledError(f"{original} carries a loss scale; the original comes first: verify ORIGINAL SCALED")
    opened = {name: open_scaled(second / name) for name in MODELS}
    models = {name: step.model for name, (step, _) in opened.items()}
    found = ArtifactFolder(second, models, read_checkpoint(second / CHECKPOINT))
    step, _ = opened[TRAINING_MODEL]
    stamp, policy, claims = step.stamp, step.scale.policy, read_claims(step, training)
    guarded = any(key.startswith(_GUARDS) for key in stamp.report.get("inserted", ()))
    claims = dataclasses.replace(claims, skip_nonfinite=isinstance(policy, FixedLossScale) and guarded)
    checks = list[Check]()
    with tempfile.TemporaryDirectory(prefix="graphscale-") as temporary:
        lower = is_lowered(found.models[TRAINING_MODEL])
        wanted = _scale_again(first, Path(temporary), claims, loss, lower)
        models = {name: model_files.load(wanted / name) for name in MODELS}
        for name, model in models.items():
            checks += compare_part(opened[name][0], name, model, stamp.version)
        expected = ArtifactFolder(wanted, models, read_checkpoint(wanted / CHECKPOINT))
        compare: Compare = _checkpoint_differences
        if trained:
            wanted_stamp = read_stamp(models[TRAINING_MODEL].metadata_props, TRAINING_MODEL)
            compare = functools.partial(_trained_differences, stamp=wanted_stamp, policy=policy)
        faults = [*compare(found.checkpoint, expected.checkpoint)]
        if not (faults or trained or filecmp.cmp(second / CHECKPOINT, wanted / CHECKPOINT, shallow=False)):
            faults = [_OTHER_BYTES]
        held = f"{len(expected.checkpoint.parameters)} parameters, the state of the loss scale among them"
        checks.append(Check.proved(f"content of {CHECKPOINT}", faults, held))
        others = {file.name: file for file in expected.others()}
        strays = _file_differences(found, others, compare, exact=not trained)
        checks.append(Check.proved("other files", strays, ", ".join(others) or "there are none"))
    if isinstance(policy, FixedLossScale) and not guarded:
        checks.append(Check("skipped steps", SKIPPED, NO_CHECK, True))
    return VerifyReport(tuple(checks), (_NOTE,), subject="folder")


def _scale_again(folder: Path, temporary: Path, claims: Claims, loss: str | Sequence[str] | None, lower: bool) -> Path:
    """Scale the original by the claims of the scaled folder, and return the new folder."""
    mixed = claims.cast_pass()
    if claims.cast_before and claims.autocast is not None:
        cast = temporary / "cast"
        autocast_artifacts(folder, cast, **claims.autocast, loss=loss, target=claims.target)
        folder, mixed = cast, None
    if mixed is not None:
        mixed = dataclasses.replace(mixed, loss=loss, target=claims.target)
    written = scale_artifacts(
        folder,
        temporary / "scaled",
        claims.policy,
        loss=loss,
        target=claims.target,
        skip_nonfinite=claims.skip_nonfinite,
        autocast=mixed,
        lower=lower,
    ).path
    assert written is not None
    return written


def _file_differences(
    found: ArtifactFolder, expected: dict[str, Path], compare: Compare, *, exact: bool
) -> Iterator[str]:
    """Compare the files that are neither models nor their checkpoint; with `exact`, all checkpoints by bytes."""
    mine = {file.name: file for file in found.others()}
    for path in sorted(found.path.iterdir()):
        if not path.is_file():
            yield f"{path.name!r} is no file of the original folder"
    for name in dict.fromkeys((*mine, *expected)):
        if name not in expected:
            yield f"the file {name!r} is neither the original's nor one that scaling writes"
        elif name not in mine:
            yield f"the file {name!r} is missing"
        elif not filecmp.cmp(mine[name], expected[name], shallow=False):
            if is_checkpoint(mine[name]) and is_checkpoint(expected[name]):
                try:
                    held = [read_checkpoint(file) for file in (mine[name], expected[name])]
                except GraphscaleError as error:
                    yield str(error)
                else:
                    faults = [*compare(*held)] or [_OTHER_BYTES] * exact
                    yield from (f"{name!r}: {fault}" for fault in faults)
            else:
                yield f"the file {name!r} has other content than it should"


# --- checkpoints ----------------------------------------------------------------------------------------------------


def _checkpoint_differences(found: Checkpoint, expected: Checkpoint) -> Iterator[str]:
    """Yield the differences between two checkpoints, a sentence each."""
    mine, theirs = dict(_entries(found)), dict(_entries(expected))
    for what in dict.fromkeys((*mine, *theirs)):
        if what not in theirs:
            yield f"{what} is neither the original's nor the loss scale's"
        elif what not in mine:
            yield f"{what} is missing"
        else:
            problem = _difference(mine[what], theirs[what])
            if problem is not None:
                yield f"{what} {problem}"


def _entries(checkpoint: Checkpoint) -> Iterator[tuple[str, Any]]:
    """Yield the entries of a checkpoint, with their descriptions."""
    yield from ((f"the trainable parameter {name!r}", array) for name, array in checkpoint.trainable.items())
    yield from ((f"the frozen parameter {name!r}", array) for name, array in checkpoint.frozen.items())
    yield from ((f"the property {name!r}", value) for name, value in checkpoint.properties.items())
    yield "the version", checkpoint.version
    yield "the nominal state", checkpoint.nominal
    for key, group in checkpoint.groups.items():
        yield f"the step of the optimizer group {key!r}", group.step
        yield f"the learning rate of the optimizer group {key!r}", group.initial_learning_rate
        for parameter, moments in group.moments.items():
            yield f"the moments of {parameter!r}", len(moments)
            yield from ((f"the moment {name!r} of {parameter!r}", array) for name, array in moments.items())


def _difference(found: Any, expected: Any) -> str | None:
    if hasattr(found, "dtype") and hasattr(expected, "dtype"):
        return tensor_difference(ir.tensor(found), ir.tensor(expected))
    return None if repr(found) == repr(expected) else f"is {found!r}, and should be {expected!r}"


def _trained_differences(found: Checkpoint, expected: Checkpoint, stamp: Stamp, policy: LossScale) -> Iterator[str]:
    """Yield differences that training cannot explain: other parameters, a state that no run reaches.

    `stamp` is the expected metadata of the folder's models.
    """
    bare = [_without_values(checkpoint) for checkpoint in (found, expected)]
    yield from _checkpoint_differences(*bare)
    names = {role: stamp.names[role] for role in initial_states(policy)}
    held: dict[str, Any] = {role: found.frozen[name] for role, name in names.items() if name in found.frozen}
    fault = find_wrong_number(stamp, found.frozen)
    yield from state_faults(policy, held) if fault is None else (fault,)
    for role, numbers in ((ScaledValue.WINDOW_FINITE, (-1, 0, 1)), (ScaledValue.STUCK, (0, 1))):
        if role in held and not all(number in numbers for number in held[role].reshape(-1)):
            yield f"{names[role]!r} is {held[role]}, and should be one of {', '.join(map(str, numbers))}"


def _without_values(checkpoint: Checkpoint) -> Checkpoint:
    kinds = (checkpoint.trainable, checkpoint.frozen)
    zeros = [{name: np.zeros_like(array) for name, array in kind.items()} for kind in kinds]
    return dataclasses.replace(checkpoint, trainable=zeros[0], frozen=zeros[1], properties={}, groups={})


# --- halves ---------------------------------------------------------------------------------------------------------


@name_damage
def verify_halves(step: Model, *parts: Model) -> VerifyReport:
    """Verify the halves of a step.

    Args:
        step: the scaled step.
        parts: the stages of the first half, and the second half; for paths, the first and the last are enough.

    Raises:
        GraphscaleError: a model cannot be read, or the step cannot be split as the halves claim.
    """
    given: list[Any] = [*parts]
    if len(given) < 2:
        raise VerifyError("a split step has two halves; verify takes both: verify STEP GRADS UPDATE")
    first, name = open_scaled(given[0])
    expected = split(step, **_read_claims(first.model, name))
    wanted = [*expected.gradients, expected.update]
    if len(given) == 2 and isinstance(given[0], str | os.PathLike):
        given[:1] = [stage_path(given[0], i) for i in range(len(wanted) - 1)]
    if len(given) != len(wanted):
        raise VerifyError(f"{name} is one of {len(wanted) - 1} stages before the update; got {len(given) - 1}")
    checks = list[Check]()
    labels = [*(f"stage {i}" for i in range(1, len(wanted))), "the update"]
    for part, label, other in zip(given, labels, wanted, strict=True):
        opened, path = open_scaled(part)
        shown = os.path.basename(path) if isinstance(part, str | os.PathLike) else label
        made = other if isinstance(other, ir.Model) else ir.from_proto(other)
        version = read_stamp(made.metadata_props, "the step").version
        checks += compare_part(opened, shown, made, version)
    return VerifyReport(tuple(checks), _SPLIT, subject="halves")


def _read_claims(half: ir.Model, name: str) -> dict[str, Any]:
    """Read the options of the splitting. The size of the largest bucket gives the same buckets."""
    if SPLIT_KEY not in half.metadata_props:
        raise VerifyError(f"{name} is no half of a split step; verify takes both: verify STEP GRADS UPDATE")
    try:
        claimed = parse_json(half.metadata_props[SPLIT_KEY])
        sizes = {bucket["name"]: bucket["bytes"] for bucket in claimed["buckets"]}
        largest = max([LEAST_BYTES, *sizes.values()])
        packed = any(value.name in sizes for value in half.graph.outputs)
        return {"bucket_bytes": largest, "stages": claimed["stages"], "pack_buckets": packed}
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError) as error:
        raise VerifyError(f"{name} has a damaged property {SPLIT_KEY}") from error
