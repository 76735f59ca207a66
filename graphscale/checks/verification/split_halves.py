"""The verification of a split step: the step split once more, and compared model by model."""

from __future__ import annotations

import os
from typing import Any

import onnx_ir as ir

from graphscale.checks.verification.pair import open_scaled
from graphscale.checks.verification.translated import compare_part
from graphscale.checks.verification.verify_report import Check, VerifyReport
from graphscale.errors import VerifyError
from graphscale.files.reading import parse_json
from graphscale.graph.diagnosis import name_damage
from graphscale.graph.stamp import read_stamp
from graphscale.pipeline import Model
from graphscale.replicas.buckets import LEAST_BYTES
from graphscale.replicas.splitting import SPLIT_KEY, split, stage_path

__all__ = ["verify_halves"]

_NOTES = (
    "no model was run: the step was split once more, as the halves claim it was",
    "the step itself is taken as it is; hold it against its original: verify ORIGINAL STEP",
)


@name_damage
def verify_halves(step: Model, *parts: Model) -> VerifyReport:
    """Verify the halves of a step.

    Args:
        step: the scaled step.
        parts: the stages of the first half, and the second half; of paths, the first and the last will do.

    Raises:
        GraphscaleError: one cannot be read, or the step cannot be split as the halves claim.
    """
    given: list[Any] = [*parts]
    if len(given) < 2:
        raise VerifyError("a split step has two halves; verify takes both: verify STEP GRADS UPDATE")
    first, name, _, _ = open_scaled(given[0])
    expected = split(step, **_read_claims(first, name))
    wanted = [*expected.gradients, expected.update]
    if len(given) == 2 and isinstance(given[0], str | os.PathLike):
        given[:1] = [stage_path(given[0], i) for i in range(len(wanted) - 1)]
    if len(given) != len(wanted):
        raise VerifyError(f"{name} is one of {len(wanted) - 1} stages before the update; got {len(given) - 1}")
    checks = list[Check]()
    labels = [*(f"stage {i}" for i in range(1, len(wanted))), "the update"]
    for part, label, other in zip(given, labels, wanted, strict=True):
        model, path, stamp, _ = open_scaled(part)
        shown = os.path.basename(path) if isinstance(part, str | os.PathLike) else label
        made = other if isinstance(other, ir.Model) else ir.from_proto(other)
        version = read_stamp(made.metadata_props, "the step").version
        checks += compare_part(model, shown, stamp, made, version)
    return VerifyReport(tuple(checks), _NOTES, subject="halves")


def _read_claims(half: ir.Model, name: str) -> dict[str, Any]:
    """Read the options of the splitting. Buckets of the largest one's size are those that were made."""
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
