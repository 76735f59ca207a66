"""Hostile texts, and the places of models and JSON where they go."""

from __future__ import annotations

import contextlib
import json
import random
from collections.abc import Callable, Iterator, MutableSequence
from typing import Any

import onnx
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

# At the beginning of a line, it shows that a line break of a text was printed.
INJECTED = "injected-line"
_PIECES = (
    *("\x1b[2J", "\x1b]0;owned\x07", "\x1b]8;;http://x\x1b\\", "\x1bP", "\x1b[31m", "\x1b(0", "\x9b31m", "\x9d0;x\x9c"),
    *("\x08", "\x07", "\x0e", "\x7f", "\x00", "\x85", "\x90", "\r", "\n", "\r\n", "\x0b", "\x0c", "\x1c", "\x1e"),
    *("\u2028", "\u2029", "\u202a", "\u202b", "\u202d", "\u202e", "\u2066", "\u2067", "\u2068", "\u2069", "\u200e"),
    *("\u200f", "\u061c", "\u200b", "\u200d", "\u2060", "\ufeff", "\u00ad", "\U000e0041", "\U000e0001", "\ufff9"),
    *("[red]", "[/]", "[link=x:y]", ":boom:", "{0}", "%s", "%n", "\\x1b", "<b>", "&amp;", "'", '"', "`", "$(id)"),
    *("größe", "重み", "\U0001f600", "\u0301", "a" * 200, "w1", "::", "/", "\ue000", "\ufdd0"),
)


def hostile(choices: random.Random, path: bool = False) -> str:
    """Return a hostile text; one that can be a file's name, if it is for a path."""
    text = "".join(choices.choice(_PIECES) for _ in range(choices.randrange(1, 9)))
    text += choices.choice(("", f"\n{INJECTED}\n", f"\r\n{INJECTED}", f"\n{INJECTED}: graphscale: done\n"))
    if not path:
        return text
    name = text.replace("\0", "").replace("/", "")[:40] + choices.choice(("", "\udcff", "\udc9b31m"))
    return name or "\x1b[2J"


def strings(message: Message) -> Iterator[tuple[Message, FieldDescriptor]]:
    """Yield all fields of texts that are set in a message and in those within."""
    for field, value in message.ListFields():
        if field.type == FieldDescriptor.TYPE_STRING:
            yield message, field
        elif field.message_type is not None:
            for item in value if isinstance(value, MutableSequence) else [value]:
                yield from strings(item)


def rewrite_texts(message: Message, change: Callable[[str], str]) -> None:
    """Change all texts of a message and of those within."""
    for holder, field in strings(message):
        held = getattr(holder, field.name)
        if isinstance(held, str):
            setattr(holder, field.name, change(held))
        else:
            held[:] = [change(text) for text in held]


def spoil_model(model: onnx.ModelProto, choices: random.Random) -> None:
    """Put hostile texts into a model: into all places of some texts, or into some places."""
    found = [*strings(model)]
    texts = sorted({text for holder, field in found for text in _texts_of(holder, field)} - {"", "If", "Loop"})
    if choices.random() < 0.6:
        chosen = choices.sample(texts, min(len(texts), choices.choice((1, 2, 5, len(texts)))))
        if choices.random() < 0.8:  # unknown operators end most commands
            chosen = [text for text in chosen if text[:1].islower() and "." not in text]
        renamed = {text: hostile(choices) + text for text in chosen}
        rewrite_texts(model, lambda text: renamed.get(text, text))
        for item in model.metadata_props:
            if item.key.startswith("graphscale."):
                with contextlib.suppress(ValueError):  # a plain text, perhaps a hostile one
                    item.value = json.dumps(_renamed(json.loads(item.value), renamed))
    else:
        for holder, field in choices.sample(found, min(len(found), choices.choice((1, 3, 20)))):
            text = hostile(choices)
            held = getattr(holder, field.name)
            if isinstance(held, str):
                setattr(holder, field.name, choices.choice((text, text + held, held + text)))
            else:
                held[choices.randrange(len(held))] = text
    if choices.random() < 0.5:
        model.doc_string = model.graph.doc_string = hostile(choices)
        model.metadata_props.add(key=hostile(choices), value=hostile(choices))
        model.opset_import.add(domain=hostile(choices), version=1)


def _texts_of(holder: Message, field: FieldDescriptor) -> list[str]:
    held = getattr(holder, field.name)
    return [held] if isinstance(held, str) else [*held]


def _renamed(value: Any, names: dict[str, str]) -> Any:
    if isinstance(value, dict):
        return {names.get(key, key): _renamed(item, names) for key, item in value.items()}
    if isinstance(value, list):
        return [_renamed(item, names) for item in value]
    return names.get(value, value) if isinstance(value, str) else value


def spoil_json(value: Any, make: Callable[[], Any], choices: random.Random) -> Any:
    """Return JSON with one key or value, somewhere, replaced."""
    if isinstance(value, dict) and value and choices.random() < 0.8:
        key = choices.choice([*value])
        if choices.random() < 0.25 and isinstance(new := make(), str):
            return {(new if other == key else other): item for other, item in value.items()}
        return {**value, key: spoil_json(value[key], make, choices)}
    if isinstance(value, list) and value and choices.random() < 0.8:
        at = choices.randrange(len(value))
        return [*value[:at], spoil_json(value[at], make, choices), *value[at + 1 :]]
    return make()
