"""The notes of a scaled model in its `doc_string`s: for people and viewers that know nothing of graphscale.

A note is the last line of a doc_string, after the exporter's own lines.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import onnx_ir as ir

from graphscale.errors import DOCS_URL, printable
from graphscale.policy.names import RESULTS, STATES

__all__ = [
    "SCALED_LOSS_NOTE",
    "annotate",
    "compose_notes",
    "describe_model",
]

BEGINNING = "graphscale: "
SCALED_LOSS_NOTE = f"{BEGINNING}the loss times the loss scale"
_PAGE = f"{DOCS_URL}start/deploy/"
_CARRIED = "carried state"


def compose_notes(
    state: Mapping[str, str], names: Mapping[str, str], written: Collection[str]
) -> dict[tuple[str, str], str]:
    """Return the note of each input and output that has one, by its kind, `input` or `output`, and its name.

    Args:
        state: `{input name: output name}` of the state to be fed back.
        names: the names of values by their role, as in a stamp.
        written: the carried state that the graph writes in place.
    """
    words = {names[role]: role.text for role in STATES if role in names}
    texts = {("output", names[role]): role.text for role in RESULTS if role in names}
    sources: dict[str, list[str]] = {}
    for source, output in state.items():
        texts["input", source] = f"{words.get(source, _CARRIED)}; feed {printable(output)} back here"
        sources.setdefault(output, []).append(source)
    for output, inputs in sources.items():
        name = " and ".join(map(printable, inputs))
        texts["output", output] = f"the next value of {name}; feed it back there"
    for name in words.keys() & written:
        texts["input", name] = f"{words[name]}, which the runtime keeps from run to run; feed nothing here"
        texts["output", f"{name}.next"] = f"the next value of {printable(name)}, which holds it already"
    return {place: BEGINNING + text for place, text in texts.items()}


def describe_model(target: str, state: Collection[str], scale: str | None, *, is_part: bool) -> str:
    """Return the note of a model.

    Args:
        target: its target.
        state: the inputs of the state to be fed back.
        scale: the name of the loss scale.
        is_part: whether it is a part of a split step.
    """
    subject = "a part of a training step" if is_part else "a training graph"
    feed = ""
    if state:
        too = ", that of the loss scale too" if scale in state else ""
        feed = f" After each run, feed every next value back to its input{too}: graphscale.state lists the pairs."
    return f"{BEGINNING}{subject} with loss scaling inside, for target {printable(target)}.{feed} {_PAGE}"


def annotate(model: ir.Model, about: str, notes: Mapping[tuple[str, str], str], *, anew: bool) -> None:
    """Write the notes of a model, its inputs and its outputs.

    Args:
        model: the model.
        about: its own note.
        notes: those of inputs and outputs, from `compose_notes`.
        anew: whether they replace older ones.
    """
    model.doc_string = _replace(model.doc_string, about, anew)
    for kind, values in (("input", model.graph.inputs), ("output", model.graph.outputs)):
        for value in values:
            note = notes.get((kind, value.name or ""))
            if note is not None or (anew and value.doc_string != SCALED_LOSS_NOTE):
                value.doc_string = _replace(value.doc_string, note, anew)


def _replace(text: str | None, note: str | None, anew: bool) -> str | None:
    own, _, last = (text or "").rpartition("\n")
    if not (anew and last.startswith(BEGINNING)):
        own = text or ""
    return "\n".join(filter(None, (own, note))) or None
