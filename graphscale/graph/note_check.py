"""The check of the notes in a scaled file."""

from __future__ import annotations

from collections.abc import Mapping

import onnx_ir as ir

from graphscale.graph.notes import BEGINNING

__all__ = ["find_wrong_notes", "texts_of"]


def find_wrong_notes(model: ir.Model, about: str | None, notes: Mapping[tuple[str, str], str | None]) -> list[str]:
    """Return the differences between the notes in a model and those that it should have, a sentence each.

    Notes may lack, as tools drop doc_strings, and all other text is free.

    Args:
        model: the model.
        about: the text with its own note.
        notes: the texts with the notes of inputs and outputs, by kind and name.
    """
    texts = [("the model", model.doc_string, about)]
    for kind, values in (("input", model.graph.inputs), ("output", model.graph.outputs)):
        texts += [(f"the {kind} {v.name!r}", v.doc_string, notes.get((kind, v.name or ""))) for v in values]
    return [
        f"the doc_string of {place} says {note!r}, and should " + (f"say {wanted!r}" if wanted else "not")
        for place, text, wanted in texts
        for note in _notes_in(text)
        if note not in _notes_in(wanted)
    ]


def texts_of(model: ir.Model) -> dict[tuple[str, str], str | None]:
    """Return the doc_strings of inputs and outputs, by kind and name."""
    ends = {"input": model.graph.inputs, "output": model.graph.outputs}
    return {(kind, value.name or ""): value.doc_string for kind, values in ends.items() for value in values}


def _notes_in(text: str | None) -> list[str]:
    return [line for line in (text or "").splitlines() if line.startswith(BEGINNING)]
