"""The tables of behaviour: for each, the keys of its rows, and a function that makes the row of a key."""

from __future__ import annotations

import dataclasses
import functools
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import onnx

import graphscale as gs
from graphscale.errors import GraphscaleError, RolesError
from graphscale.targets import TARGETS
from models.zoo import pack, trial
from tests.frozen import damage
from tests.frozen.digests import digest_of_json, digests, steady
from tests.frozen.stored import FOLDER, Row

__all__ = ["TABLES", "Table"]

MODELS = FOLDER.parents[1] / "models"
_VARIANTS: dict[str, Mapping[str, Any]] = {"plain": {}, "float16": {"telemetry": True, "autocast": "float16"}}


@dataclasses.dataclass(frozen=True)
class Table:
    """A table: a row for each key.

    Attributes:
        group: the tables that are written and compared together.
        keys: gives the keys of all rows.
        row: makes the row of a key, without the key.
    """

    group: str
    keys: Callable[[], list[str]]
    row: Callable[[str], Row]


# --- models -----------------------------------------------------------------------------------------------------------


@functools.cache
def _names() -> list[str]:
    paths = (path.relative_to(MODELS).with_suffix("").as_posix() for path in MODELS.glob("**/*.onnx"))
    return sorted(name for name in paths if not name.startswith("zoo/"))


def _scaled_keys() -> list[str]:
    keys = [f"{name} {target} plain" for name in _names() for target in TARGETS]
    return keys + [f"{name} onnx float16" for name in _names()]


def _scale(key: str) -> gs.ScaledModel:
    name, target, variant = key.split(" ")
    return gs.scale(_load(name), target=target, **_VARIANTS[variant])


def _load(name: str) -> onnx.ModelProto:
    return onnx.load(MODELS / f"{name}.onnx")


def _scaled_row(key: str) -> Row:
    try:
        result = _scale(key)
    except GraphscaleError as error:
        return {"refused": steady(error, 200)}
    return _summary(result)


def _summary(result: gs.ScaledModel) -> Row:
    report = result.report
    return {
        **digests(result.model),
        **_found(report),
        "nodes": [report.nodes_before, report.nodes_after],
        "inserted": {name: sum(counts.values()) for name, counts in sorted(report.inserted.items())},
        "state": [_pair(state.input, state.output) for state in report.state],
        "warnings": list(report.warnings),
    }


def _found(report: gs.Report) -> Row:
    return {
        "loss": report.loss,
        "places": [p.value if p.node is None else f"{p.value} at {p.node}:{p.input}" for p in report.places],
        "coverage": f"{report.contractions - len(report.missed)}/{report.contractions}",
        "gradients": [gradient.value for gradient in report.gradients],
    }


def _pair(name: str, output: str | None) -> str:
    return name if output == f"{name}.next" else f"{name} > {output or 'in place'}"


def _report_row(name: str) -> Row:
    try:
        report = gs.inspect(_load(name))
    except GraphscaleError as error:
        return {"refused": steady(error, 200)}
    return {
        "digest": digest_of_json(report.to_dict()),
        **_found(report),
        "loss found": report.loss_found,
        "roles": [f"{entry.kind} {entry.name}: {entry}" for entry in report.roles],
    }


def _artifact_keys() -> list[str]:
    folders = sorted({Path(name).parent.as_posix() for name in _names() if "/artifacts/" in name})
    return [f"{folder} {target}" for folder in folders for target, each in TARGETS.items() if each.in_place]


def _artifact_row(key: str) -> Row:
    folder, target = key.split(" ")
    with tempfile.TemporaryDirectory() as out:
        gs.scale_artifacts(MODELS / folder, out, target=target)
        return {path.stem: digests(onnx.load(path)) for path in sorted(Path(out).rglob("*.onnx"))}


def _checked_row(key: str) -> Row:
    try:
        result = _scale(key)
    except GraphscaleError as error:
        return {"refused": type(error).__name__}
    name = key.partition(" ")[0]
    return {**_lint(result), "verify": _verify(_load(name), result.model)}


def _lint(result: gs.ScaledModel) -> Row:
    return {"lint": [f"{finding.code} {finding.value or finding.node}" for finding in gs.lint(result.model).findings]}


def _verify(original: onnx.ModelProto, scaled: Any) -> str:
    """Prove a scaled graph, without runs: these need the operators of one build."""
    report = gs.verify(original, scaled, runs=0)
    failed = [check.name for check in report.checks if check.status not in ("holds", "skipped")]
    return ", ".join(failed) or ("accepted" if report.ok else "rejected")


# --- the zoo ----------------------------------------------------------------------------------------------------------


def _zoo_row(name: str, packed: Path = pack.PACKED) -> Row:
    content, truth = pack.read(name, packed)
    model = onnx.load_from_string(content)
    origin = {"kind": truth["kind"], "exporter": truth["exporter"]}
    try:
        result = gs.scale(model)
        outcome = trial.judge(name, model, result.report, truth).outcome
        return {**origin, "outcome": outcome, **_of_zoo(result)}
    except RolesError as error:
        return {**origin, **_asked(name, model, truth), "asked": steady(error, 160)}
    except GraphscaleError as error:
        return {**origin, "outcome": "refused", "refused": steady(error, 160)}
    except Exception as error:
        return {**origin, "outcome": "wrong", "raised": steady(error, 160)}


def _asked(name: str, model: onnx.ModelProto, truth: dict[str, Any]) -> Row:
    """Take the proposals."""
    report = gs.inspect(model)
    outcome = trial.judge(name, model, report, truth).outcome
    outputs = [entry for entry in report.roles if entry.kind == "output"]
    proposals: dict[str, Any] = {
        field: [entry.name for entry in outputs if entry.role in roles]
        for field, roles in {"losses": "loss", "gradients": "gradient", "metrics": ("metric", "constant")}.items()
    }
    proposals["states"] = {entry.name: entry.pair for entry in outputs if entry.pair is not None}
    try:
        return {"outcome": outcome, **_of_zoo(gs.scale(model, roles=proposals))}
    except GraphscaleError as error:
        return {"outcome": outcome, "proposals refused": steady(error, 160)}


def _of_zoo(result: gs.ScaledModel) -> Row:
    states = {state.input: state.output for state in result.report.state}
    summary = {**digests(result.model), **_found(result.report), "state": digest_of_json(states)}
    return {**summary, "places": len(result.report.places)}


TABLES = {
    "models": Table("models", _scaled_keys, _scaled_row),
    "artifacts": Table("models", _artifact_keys, _artifact_row),
    "reports": Table("models", _names, _report_row),
    "zoo": Table("zoo", pack.names, _zoo_row),
    "fresh": Table("zoo", lambda: pack.names(pack.FRESH), lambda name: _zoo_row(name, pack.FRESH)),
    "examples": Table("zoo", lambda: pack.names(pack.EXAMPLES), lambda name: _zoo_row(name, pack.EXAMPLES)),
    "unseen": Table("zoo", lambda: pack.names(pack.UNSEEN), lambda name: _zoo_row(name, pack.UNSEEN)),
    "later": Table("zoo", lambda: pack.names(pack.LATER), lambda name: _zoo_row(name, pack.LATER)),
    "lint": Table("lint", _scaled_keys, _checked_row),
    "mutants": Table("mutants", damage.mutant_keys, damage.mutant_row),
    "edits": Table("mutants", damage.edit_keys, damage.edit_row),
}
