"""Edits of the metadata of a model: any leaf of their JSON, any key, any text."""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Iterator
from typing import Any

from onnx import ModelProto, StringStringEntryProto

from benchmarks.edits.draw import Draw, exchange, fill, kind
from benchmarks.edits.interfaces import edit_record

__all__: list[str] = []

_RECORD = "graphscale.original"


def _entries(draw: Draw) -> list[tuple[StringStringEntryProto, Any]]:
    """The properties that hold JSON, with their content."""
    found = []
    for entry in draw.model.metadata_props:
        try:
            content = json.loads(entry.value)
        except ValueError:
            continue
        if isinstance(content, dict | list):
            found.append((entry, content))
    return found


def _places(content: Any) -> Iterator[tuple[Any, Any]]:
    """Each container with each of its keys or positions."""
    keys = list(content) if isinstance(content, dict) else range(len(content))
    for key in keys:
        yield content, key
        if isinstance(content[key], dict | list):
            yield from _places(content[key])


def _place(draw: Draw) -> tuple[StringStringEntryProto, Any, Any, Any] | None:
    """A property, its content, and a container in it with a key; by half of all draws each property is as likely."""
    found = [(entry, content, list(_places(content))) for entry, content in _entries(draw)]
    found = [item for item in found if item[2]]
    if not found:
        return None
    if draw.chance(0.5):
        entry, content, places = draw.pick(found)
        return (entry, content, *draw.pick(places))
    flat = [(entry, content, *place) for entry, content, places in found for place in places]
    return draw.pick(flat)


def _other(draw: Draw, value: Any) -> Any:
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return draw.integer(value)
    if isinstance(value, float):
        return draw.number(value)
    if isinstance(value, str):
        graph = draw.model.graph
        names = [item.name for item in (*graph.input, *graph.output, *graph.initializer)]
        words = ["input", "output", "batch", "weight", "moment", "gradient", "loss", "telemetry", "FLOAT", "onnx"]
        return draw.pick([draw.text(value), draw.pick(names), draw.pick(words)])
    if value is None:
        return draw.pick(["x", 0, False, {}, []])
    return draw.pick([{}, [], None])


@kind("metadata: a value")
def _(draw: Draw) -> str | None:
    found = _place(draw)
    if found is None:
        return None
    entry, content, container, key = found
    before, container[key] = container[key], _other(draw, container[key])
    entry.value = json.dumps(content)
    return f"{entry.key} {key!r}: {str(before)[:60]!r} -> {container[key]!r}"


@kind("metadata: a value removed")
def _(draw: Draw) -> str | None:
    found = _place(draw)
    if found is None:
        return None
    entry, content, container, key = found
    before = str(container.pop(key))[:60]
    entry.value = json.dumps(content)
    return f"{entry.key} {key!r}: {before!r}"


@kind("metadata: a value added")
def _(draw: Draw) -> str | None:
    found = _place(draw)
    if found is None:
        return None
    entry, content, container, key = found
    other = draw.pick([item for _, _, c, k in [_place(draw) or found] for item in (c[k], 1, "x")])
    if isinstance(container, dict):
        words = ["stuck", "all_finite", "cause", "offender", "hysteresis", "on_stuck", "min_loss_scale", "custom"]
        names = [value.name for value in draw.model.graph.input]
        name = draw.pick([draw.pick(words), draw.pick(names)])
        if name in container:
            return None
        container[name] = other
    else:
        container.insert(draw.below(len(container) + 1), draw.pick([other, container[key]]))
        name = "an item"
    entry.value = json.dumps(content)
    return f"{entry.key} beside {key!r}: {name!r} = {str(other)[:60]!r}"


@kind("metadata: a value of another type")
def _(draw: Draw) -> str | None:
    found = _place(draw)
    if found is None:
        return None
    entry, content, container, key = found
    before = container[key]
    others = [str(before), [before], {"x": before}, None, True, 0, 1.5, "", {}, []]
    if isinstance(before, bool | int | float) and abs(before) < 1e300:
        others += [float(before), int(before), bool(before)] * 2
    container[key] = draw.pick([other for other in others if (type(other), other) != (type(before), before)])
    entry.value = json.dumps(content)
    return f"{entry.key} {key!r}: {str(before)[:60]!r} -> {str(container[key])[:60]!r}"


@kind("metadata: two values exchanged")
def _(draw: Draw) -> str | None:
    first, second = _place(draw), _place(draw)
    if first is None or second is None or first[0].key != second[0].key:
        return None
    entry, content = first[0], first[1]
    places = list(_places(content))
    (one, i), (other, j) = (draw.pick(places) for _ in range(2))
    if isinstance(one[i], dict | list) or isinstance(other[j], dict | list):
        return None
    one[i], other[j] = other[j], one[i]
    entry.value = json.dumps(content)
    return f"{entry.key} {i!r} and {j!r}"


@kind("metadata: a key")
def _(draw: Draw) -> str | None:
    found = _place(draw)
    if found is None or not isinstance(found[2], dict):
        return None
    entry, content, container, key = found
    new = draw.text(str(key))
    items = [(new if k == key else k, v) for k, v in container.items()]
    if draw.chance(0.3):
        items.reverse()
    container.clear()
    container.update(items)
    entry.value = json.dumps(content)
    return f"{entry.key} {key!r} -> {new!r}"


@kind("metadata: another writing of the JSON")
def _(draw: Draw) -> str | None:
    found = _entries(draw)
    if not found:
        return None
    entry, content = draw.pick(found)
    manner = draw.pick(["spaces", "order", "a key twice", "trailing"])
    if manner == "spaces":
        entry.value = json.dumps(content, indent=2)
    elif manner == "order":
        entry.value = json.dumps(content, sort_keys=True)
    elif manner == "trailing":
        entry.value = entry.value + draw.pick([" ", "\n", "x", "{}", "\0"])
    else:
        keys = list(content) if isinstance(content, dict) else []
        if not keys:
            return None
        key = draw.pick(keys)
        twice = f"{json.dumps(key)}: {json.dumps(_other(draw, content[key]))}"
        entry.value = f"{{{twice}, {entry.value[1:]}" if draw.chance(0.5) else f"{entry.value[:-1]}, {twice}}}"
    return f"{entry.key} {manner}"


@kind("metadata: text")
def _(draw: Draw) -> str | None:
    entry = draw.pick(draw.model.metadata_props)
    targets = ["onnx", "ort-cuda", "ort-training", "ort-training-cuda", "0.0.9", "0.1.1", "{}", "[]", "null", ""]
    entry.value, before = draw.pick([draw.text(entry.value), draw.pick(targets)]), entry.value
    return f"{entry.key}: {before[:60]!r} -> {entry.value[:60]!r}"


@kind("metadata: a property removed, added, twice")
def _(draw: Draw) -> str | None:
    entries = draw.model.metadata_props
    k, manner = (
        draw.below(len(entries)),
        draw.pick(["removed", "added", "twice", "renamed", "order", "of another model"]),
    )
    entry = entries[k]
    key = entry.key
    if manner == "removed":
        del entries[k]
    elif manner == "added":
        key = draw.pick(["custom", *(f"graphscale.{n}" for n in ("roles", "split", "autocast", "custom", "telemetry"))])
        entries.add(key=key, value=draw.pick(["{}", "x", "", '{"gradients": []}']))
    elif manner == "twice":
        sources = [other.value for donor in draw.donors for other in donor.metadata_props if other.key == key]
        entries.add(key=key, value=draw.pick([entry.value, *sources, "{}"]))
        if draw.chance(0.5):
            exchange(entries, k, len(entries) - 1)
    elif manner == "renamed":
        entry.key = draw.text(key)
    elif manner == "order":
        fill(entries, list(entries)[::-1])
    else:
        sources = [other.value for donor in draw.donors for other in donor.metadata_props if other.key == key]
        if not sources:
            return None
        entry.value = draw.pick(sources)
    return f"{key} {manner}"


@kind("metadata: the record of the original")
def _(draw: Draw) -> str | None:
    entry = next((entry for entry in draw.model.metadata_props if entry.key == _RECORD), None)
    if entry is None:
        return None
    content = zlib.decompress(base64.b64decode(entry.value))
    manner = draw.pick(["edited", "edited", "edited", "packed anew", "one character", "trailing", "cut off"])
    if manner == "one character":
        k = draw.below(len(entry.value))
        entry.value = entry.value[:k] + draw.pick("ABCabc+/") + entry.value[k + 1 :]
        return f"{manner} {k}"
    if manner == "cut off":
        entry.value = entry.value[: -4 * (1 + draw.below(5))]
        return manner
    if manner == "trailing":
        entry.value = base64.b64encode(base64.b64decode(entry.value) + b"more").decode()
        return manner
    if manner == "edited":
        original = ModelProto.FromString(content)
        where = edit_record(Draw(original, draw.rng))
        if where is None:
            return None
        content, manner = original.SerializeToString(), where
    entry.value = base64.b64encode(zlib.compress(content, 9)).decode()
    return manner
