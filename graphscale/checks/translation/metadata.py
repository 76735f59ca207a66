"""The comparison of a scaled file's metadata with those of the original scaled again."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import onnx_ir as ir

from graphscale.analysis.report import STATE_OF_SCALE, TELEMETRY, WRITTEN_IN_PLACE
from graphscale.checks.translation.correspondence import Correspondence
from graphscale.checks.translation.models import compare_models
from graphscale.checks.translation.tensor_bits import tensor_difference
from graphscale.errors import ModelFileError
from graphscale.files.training_info import training_info_of
from graphscale.graph.note_check import find_wrong_notes, texts_of
from graphscale.graph.order import check_order
from graphscale.graph.original import ORIGINAL_KEY
from graphscale.graph.restored import find_references, restore_original
from graphscale.graph.stamp import Stamp, is_scaled
from graphscale.graph.stamp_reading import read_stamp
from graphscale.graph.values import values_by_name

__all__ = ["metadata_differences"]

# Parts of a report with evidence for readers, which the user's hints change.
_PROSE = ("warnings", "roles", "loss_found")
_ORIGINS = (STATE_OF_SCALE, TELEMETRY, WRITTEN_IN_PLACE)
_SHOWN = 120  # characters of a value in a message


def metadata_differences(
    found: ir.Model, stamp: Stamp, expected: ir.Model, wanted: Stamp, same: Correspondence
) -> Iterator[str]:
    """Yield the differences between the metadata of two models, a sentence each.

    The found metadata are `stamp`, the expected ones `wanted`; the graphs of the models correspond as in `same`.
    """
    for field in ("policy", "target", "state", "telemetry", "in_place"):
        yield from _differences(f"graphscale.{field}", getattr(stamp, field), getattr(wanted, field))
    for name in set(wanted.accepted) - set(stamp.accepted):
        yield f"graphscale.accepted lacks {name!r}, whose role is a proposal"
    yield from _name_differences(found, stamp, wanted, expected, same)
    yield from _differences("graphscale.report", _facts(stamp), _facts(wanted))
    roles = [{(e["name"], e["kind"]): (e["role"], e["pair"]) for e in _entries(each)} for each in (stamp, wanted)]
    yield from _differences("the list of roles in graphscale.report", *roles)
    if len(roles[0]) < len(_entries(stamp)):
        yield "the roles in graphscale.report name an input or output twice"
    read = {ORIGINAL_KEY, *(f"graphscale.{field}" for field in vars(stamp))}
    others = [{k: v for k, v in m.metadata_props.items() if k.startswith("graphscale.")} for m in (found, expected)]
    yield from _differences("the metadata", *({k: v for k, v in each.items() if k not in read} for each in others))
    yield from find_wrong_notes(found, expected.doc_string, texts_of(expected))
    if training_info_of(found):
        yield "the model has training_info, which scaling leaves out"
    yield from _record_differences(found, expected, same)


def _name_differences(
    found: ir.Model, stamp: Stamp, wanted: Stamp, expected: ir.Model, same: Correspondence
) -> Iterator[str]:
    mine, theirs = values_by_name(found.graph), values_by_name(expected.graph)
    for role in dict.fromkeys((*stamp.names, *wanted.names)):
        name, other = stamp.names.get(role), wanted.names.get(role)
        value, goal = mine.get(name or ""), theirs.get(other or "")
        # A tool may have renamed values, with or without the metadata.
        is_same = value is not None and goal is not None and same.values.get(value) is goal
        # A tool that changed nodes leaves values without a counterpart, which may have their names.
        is_open = bool(same.differences) and value not in same.values
        if not is_same and (name != other or (value is not None and not is_open)):
            should = "which is another value in this graph" if name == other else f"and should {other!r}"
            yield f"the metadata call {name!r} the {role.replace('_', ' ')}, {should}"


def _facts(stamp: Stamp) -> dict[str, Any]:
    """Return the report without evidence."""
    facts = {key: value for key, value in stamp.report.items() if key not in _PROSE}
    rows = facts.get("state", ())
    return {**facts, "state": [{**row, "how": row["how"] if row.get("how") in _ORIGINS else ""} for row in rows]}


def _entries(stamp: Stamp) -> list[dict[str, Any]]:
    rows = stamp.report.get("roles", ())
    return [row for row in rows if isinstance(row, dict) and {"name", "kind", "role", "pair"} <= row.keys()]


def _record_differences(found: ir.Model, expected: ir.Model, same: Correspondence) -> Iterator[str]:
    """Compare the originals, the results of `strip`."""
    records = [model.metadata_props.get(ORIGINAL_KEY) for model in (found, expected)]
    if None in records:
        if records[0] != records[1]:
            yield "the record of the original is missing" if records[0] is None else "there should be no record"
        return
    try:
        if records[0] != records[1]:
            # The graph itself is compared elsewhere; another tool may have renamed or removed it.
            mine, theirs = restore_original(found, expected.graph), restore_original(expected)
            check_order(mine.graph, "the original")
            yield from _original_differences(mine, theirs, found)
        references = find_references(found)
    except ModelFileError as error:
        yield f"the record of the original is damaged: {error}"
        return
    for name in references:
        # Another tool may have used its name for another constant.
        value, goal = (model.graph.initializers.get(name) for model in (found, expected))
        if value is None or goal is None or same.values.get(value) is goal:
            continue
        one, other = value.const_value, goal.const_value
        problem = None if one is None or other is None else tensor_difference(one, other)
        if problem is not None:
            yield f"the original has a constant {name!r}, which {problem}"


def _original_differences(found: ir.Model, expected: ir.Model, scaled: ir.Model) -> Iterator[str]:
    undone = compare_models(found, expected, "the original in the metadata")
    yield from undone.differences[:1]
    # The scaled graph's initial values are compared elsewhere.
    held = {name: value.const_value for name, value in scaled.graph.initializers.items()}
    own = found.graph.initializers
    yield from [text for name, text in undone.starts.items() if own[name].const_value is not held.get(name)][:1]
    yield from _differences("the IR version of the original", found.ir_version, expected.ir_version)
    metadata = [dict(model.metadata_props) for model in (found, expected)]
    if is_scaled(found) and is_scaled(expected):  # the plain form of a lowered model
        stamps = [read_stamp(each, "the record of the plain form") for each in metadata]
        yield from metadata_differences(found, stamps[0], expected, stamps[1], undone)
        metadata = [{k: v for k, v in each.items() if not k.startswith("graphscale.")} for each in metadata]
    yield from _differences("the metadata of the original", *metadata)
    infos = [[str(info) for info in training_info_of(model)] for model in (found, expected)]
    yield from _differences("the training_info of the original", *infos)


def _differences(what: str, found: Any, expected: Any) -> Iterator[str]:
    if not (isinstance(found, dict) and isinstance(expected, dict)):
        if json.dumps(found, sort_keys=True) != json.dumps(expected, sort_keys=True):
            yield f"{what} is {_short(found)}, and should be {_short(expected)}"
        return
    for key in dict.fromkeys((*found, *expected)):
        if key not in expected:
            yield f"{what} has {_short(key)}: {_short(found[key])}, which it should not"
        elif key not in found:
            yield f"{what} lacks {_short(key)}: {_short(expected[key])}"
        else:
            yield from _differences(f"{what}: {_short(key)}", found[key], expected[key])


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
