"""Lint and verify every step after it was scaled: `python -m models.zoo.check_trial [FOLDER] [--variant NAME ...]`.

FOLDER holds ONNX files at any depth, such as `models`, or what `models.zoo.export` wrote; without it the packed steps
are tried. A step whose roles are asked about is scaled with those of the truth beside it. A scaled step is to have no
finding of lint but notes and those that the step itself has, such as moments in float16, which `--original` prints; and
verify is to accept it.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import warnings
import zipfile
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import onnx

import graphscale as gs
from graphscale.errors import GraphscaleError, RolesError, VerifyError
from graphscale.passes import Autocast
from graphscale.policy import presets
from graphscale.targets import TARGETS
from models.zoo.pack import PACKED

__all__ = ["VARIANTS", "find"]

Finding = tuple[str, str]
Truth = dict[str, Any] | None

# The options of `graphscale.scale`, by a name of the command line.
VARIANTS: dict[str, dict[str, Any]] = {
    **{target: {"target": target} for target in TARGETS},
    **{f"{target}-telemetry": {"target": target, "telemetry": True} for target in TARGETS},
    **{
        f"{target}-ranges": {"target": target, "telemetry": "ranges,activations"}
        for target, each in TARGETS.items()
        if not each.cuda
    },
    "float16": {"autocast": Autocast("float16", emulate=True), "telemetry": True},
    "scaled-loss": {"expose_scaled_loss": True},
    "fixed": {"loss_scale": 1024.0},
    "fixed-checked": {"loss_scale": 1024.0, "skip_nonfinite": True},
    "fixed-in-place": {"loss_scale": 1024.0, "skip_nonfinite": True, "target": "ort-training"},
    **{name: {"loss_scale": getattr(presets, name)()} for name in presets.NAMES},
    "reset": {"loss_scale": gs.DynamicLossScale(1024, 3, on_stuck="reset")},
    "accept": {"loss_scale": gs.DynamicLossScale(1024, 3, on_stuck="accept", max_consecutive_skips=3)},
}


def find(model: onnx.ModelProto, truth: Truth, variant: str | None, runs: int | None = None) -> list[Finding]:
    """Lint and verify a step after it was scaled, or, without a variant, lint the original.

    Args:
        model: the step.
        truth: the roles of its outputs, as `models.zoo.export` writes them; None if it has no truth.
        variant: one of `VARIANTS`.
        runs: the runs of verify; None to lint alone.

    Returns:
        the code and message of each finding of lint that is more than a note, and that the step itself does not have;
        a check of verify that does not hold has the code "verify", an original that ONNX Runtime cannot load "not run",
        a refusal of `scale` "refused", and an exception "error".
    """
    try:
        if variant is None:
            return [(each.code, each.message) for each in _serious(model)]
        scaled, given = _scale(model, truth, VARIANTS[variant])
    except GraphscaleError as error:
        return [("refused", f"{type(error).__name__}: {error}")]
    try:
        found = _serious(scaled)
        own = {(each.code, each.value) for each in _serious(model)} if found else set()
        found = [each for each in found if (each.code, each.value) not in own]
        more = [] if runs is None else _verify(model, scaled, runs, given)
    except Exception as error:
        return [("error", f"{type(error).__name__}: {error}")]
    return [(each.code, each.message) for each in found] + more


def _serious(model: onnx.ModelProto) -> list[gs.Finding]:
    return [finding for finding in gs.lint(model).findings if finding.severity != "note"]


def _verify(model: onnx.ModelProto, scaled: Any, runs: int, given: dict[str, Any]) -> list[Finding]:
    """Verify a scaled step; by its proofs alone where this build of ONNX Runtime cannot load the original."""
    more = list[Finding]()
    try:
        report = gs.verify(model, scaled, runs=runs, **given)
    except VerifyError as error:
        if not runs or "cannot load the original" not in str(error):
            raise
        more = [("not run", str(error))]
        report = gs.verify(model, scaled, runs=0, **given)
    failed = [check for check in report.checks if check.status not in ("holds", "skipped")]
    return more + [("verify", f"{check.name}: {check.detail}") for check in failed]


def _scale(model: onnx.ModelProto, truth: Truth, options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Scale a model, with the roles of its truth where it is asked about them; return these, too."""
    try:
        return gs.scale(model, **options).model, {}
    except RolesError as error:
        if error.table is None or truth is None:
            raise
    roles = {field: truth[field] for field in ("losses", "states", "gradients", "metrics", "kept")}
    given = {"roles": roles, "force_roles": True}
    return gs.scale(model, **given, **options).model, given


def main() -> int:
    """Check the steps of a folder, and print the count of findings and of steps by code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", help="default: the packed steps")
    parser.add_argument("--variant", nargs="+", choices=VARIANTS, default=["onnx"], metavar="NAME")
    parser.add_argument("--original", action="store_true", help="lint the steps as they are")
    parser.add_argument("--runs", type=int, default=1, help="of verify; 0 for its proofs alone")
    parser.add_argument("--only", default="*", metavar="PATTERN")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="try every n-th step")
    chosen = parser.parse_args()
    warnings.simplefilter("ignore")
    if chosen.folder is not None:
        return _try_all(chosen.folder, chosen)
    with tempfile.TemporaryDirectory() as folder, zipfile.ZipFile(PACKED) as packed:
        packed.extractall(folder)
        return _try_all(Path(folder), chosen)


def _try_all(folder: Path, chosen: argparse.Namespace) -> int:
    paths, failed = sorted(folder.rglob(f"{chosen.only}.onnx"))[:: chosen.every], False
    for variant in [None] if chosen.original else chosen.variant:
        counts, where = Counter[str](), defaultdict[str, set[Path]](set)
        for path in paths:
            beside = path.with_suffix(".json")
            truth = json.loads(beside.read_text()) if beside.exists() else None
            for code, message in find(onnx.load(path), truth, variant, chosen.runs):
                counts[code] += 1
                where[code].add(path)
                print(f"{path.relative_to(folder)}: {code} {message}")
        table = ", ".join(f"{code} {n} in {len(where[code])} steps" for code, n in sorted(counts.items()))
        print(f"{variant or 'original'}: {len(paths)} steps: {table or 'nothing'}", flush=True)
        failed |= not {"refused", "not run"} >= set(counts)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
