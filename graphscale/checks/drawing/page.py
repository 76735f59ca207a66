"""The page: one HTML file that needs nothing else, with the drawing, facts about its boxes, and tables beside it."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from importlib import resources
from typing import Any

import onnx_ir as ir

from graphscale.checks.diffing.texts import attribute_text, tensor_text
from graphscale.checks.drawing.drawing_context import DrawingContext, Phase
from graphscale.checks.drawing.lanes import Layout
from graphscale.checks.drawing.scene import BADGES, Box, Scene
from graphscale.checks.drawing.svg import CHIPS, draw, identifier
from graphscale.files.writing import WRITER
from graphscale.flow.degree import ZERO
from graphscale.graph.values import constant_tensor, node_name, op_name

__all__ = ["Cell", "Jump", "Table", "degree_of", "embed_json", "list_facts", "render"]


@dataclasses.dataclass(frozen=True)
class Jump:
    """A text that leads to a box of the drawing."""

    text: str
    box: int


Cell = str | int | Jump


@dataclasses.dataclass(frozen=True)
class Table:
    """A table beside the drawing.

    Attributes:
        title: its subject; with a head, the number of rows stands beside it.
        rows: the cells; those of the first column are headings where there is no head.
        head: the names of the columns.
        is_open: whether it is unfolded at first.
    """

    title: str
    rows: Sequence[Sequence[Cell]]
    head: Sequence[str] = ()
    is_open: bool = False


def render(layout: Layout, title: str, lead: str, tables: Iterable[Table], notes: Iterable[str] = ()) -> str:
    """Return the page: the drawing beside a heading, a lead below it, notes not to be missed, and tables."""
    scene = layout.scene
    rest: list[list[Any]] = []
    first, *others = [_table(table, rest) for table in tables if table.rows]
    style, script = _resource("page.css"), _resource("page.js")
    drawing = draw(layout, f"The graph of {title}")
    policy = (
        f"default-src 'none'; img-src data:; style-src '{_hash(style)}'; script-src '{_hash(script)}'; "
        "base-uri 'none'; form-action 'none'"
    )
    page = f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="generator" content="{WRITER}">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)} · graphscale</title>
<link rel="icon" href="data:,">
<style>{style}</style>
</head>
<body>
<aside>
<a class="skip" href="#drawing">To the drawing</a>
<h1>{escape(title)}</h1>
<p class="lead">{escape(lead)}</p>
{"".join(f'<p class="note">{escape(note)}</p>' for note in notes)}
<div class="search"><input id="search" type="search" placeholder="Find a node or a value   /" autocomplete="off"
  aria-label="Find a node or a value" role="combobox" aria-expanded="false" aria-controls="results">
<ul id="results" role="listbox" aria-label="Found" hidden></ul></div>
<section class="card" id="pinned" aria-live="polite" hidden><div></div>
<button type="button" class="jump" id="unpin">Unpin</button></section>
{first}
<details open><summary>Legend</summary><div class="legend">{"".join(_legend(scene))}</div></details>
{"".join(others)}
</aside>
<main>
{drawing}
<div class="tools"><button type="button" id="out" aria-label="Zoom out">&minus;</button>
<button type="button" id="in" aria-label="Zoom in">+</button>
<button type="button" id="fit">Show all</button></div>
<div id="tip" role="tooltip" hidden></div>
</main>
<script type="application/json" id="rows">{embed_json(rest)}</script>
<script type="application/json" id="facts">{embed_json(list_facts(scene))}</script>
<script>{script}</script>
</body>
</html>
"""
    return page.encode("utf-8", "replace").decode()


def _resource(name: str) -> str:
    return resources.files("graphscale.checks.drawing").joinpath(name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    """Return the name of an inline style or script in a Content-Security-Policy: nothing else on the page is run."""
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


# --- tables ---------------------------------------------------------------------------------------------------------

_NUMBER = ' class="number"'
# Of a table longer than this so many rows are elements of the page at first: thousands would make it slow.
_LONG, _SHOWN = 60, 40


def _table(table: Table, rest: list[list[Any]]) -> str:
    """Return a table as HTML; the rows of a long one that are shown on demand go to the end of `rest`."""
    rows = table.rows if len(table.rows) <= _LONG else table.rows[:_SHOWN]
    more = ""
    if len(rows) < len(table.rows):
        more = f'<button type="button" class="jump more" data-rest="{len(rest)}">Show all {len(table.rows)}</button>'
        rest.append([[[c.text, c.box] if isinstance(c, Jump) else c for c in row] for row in table.rows[_SHOWN:]])
    count = f'<span class="count">{len(table.rows)}</span>' if table.head else ""
    numeric = {i for row in table.rows for i, cell in enumerate(row) if _is_number(cell)}
    names = (f'<th scope="col"{_NUMBER * (i in numeric)}>{escape(name)}</th>' for i, name in enumerate(table.head))
    head = "".join(names)
    body = "".join(f"<tr>{''.join(_cells(row, bool(table.head)))}</tr>" for row in rows)
    return (
        f"<details{' open' if table.is_open else ''}><summary>{escape(table.title)} {count}</summary><table>"
        f"{f'<thead><tr>{head}</tr></thead>' if head else ''}<tbody>{body}</tbody></table>{more}</details>\n"
    )


def _cells(row: Sequence[Cell], has_head: bool) -> Iterator[str]:
    for i, cell in enumerate(row):
        text = escape(cell.text if isinstance(cell, Jump) else str(cell))
        if isinstance(cell, Jump):
            text = f'<button type="button" class="jump" data-jump="{cell.box}">{text}</button>'
        is_heading = i == 0 and not has_head
        yield f'<th scope="row">{text}</th>' if is_heading else f"<td{_NUMBER * _is_number(cell)}>{text}</td>"


def _is_number(cell: Cell) -> bool:
    """Return whether a cell is a number, or a change of one, such as +3."""
    return isinstance(cell, int) or (isinstance(cell, str) and cell[:1] in ("+", "-") and cell[1:].isdigit())


# --- legend ---------------------------------------------------------------------------------------------------------

_PHASES = {
    Phase.FORWARD: "forward pass",
    Phase.BACKWARD: "backward pass",
    Phase.UPDATE: "update",
    Phase.UNKNOWN: "node",
}


def _legend(scene: Scene) -> Iterator[str]:
    boxes = scene.boxes
    for phase, text in _PHASES.items():
        if any(box.phase is phase and box.output is None and box.mark is None for box in boxes):
            select = f".{phase.value}.pass-none:not(.multiple):not(.output)"
            yield _entry(f"box {phase.value} pass-none", "", text, select)
    if any(box.scaled for box in boxes):
        yield _entry("box backward pass-none multiple", "", "a multiple of S", ".multiple", ".scaled")
    for mark in dict.fromkeys(mark for mark in CHIPS if any(box.mark == mark for box in boxes)):
        yield _entry(f"box pass-{mark}", CHIPS[mark], mark, f".pass-{mark}")
    others = sorted({box.mark for box in boxes if box.mark and identifier(box.mark) == "other"})
    if others:
        yield _entry("box pass-other", "+", ", ".join(others), ".pass-other")
    badges = {badge for box in boxes for badge in box.badges}
    for badge, (chip, text, _) in BADGES.items():
        if badge in badges - {"loss"}:
            sign = f'<circle r="10"/><text y="3.6">{chip}</text>'
            mark = f'<g class="badge {badge}" transform="translate(17 11)">{sign}</g>'
            yield _button(mark, text, f":has(.badge.{badge})")
    if any(len(box.nodes) > 1 for box in boxes):
        yield _entry("box group update pass-none", "", "folded nodes", ".group")
    yield _entry("box output pass-none", "", "output", ".output")


def _entry(classes: str, chip: str, text: str, select: str, links: str = "") -> str:
    radius = 10 if "output" in classes else 5
    behind = '<rect x="4" y="4" width="28" height="18" rx="5"/>' if "group" in classes else ""
    label = f'<text class="chip" x="16" y="14.5">{escape(chip)}</text>' if chip else ""
    mark = f'<g class="{classes}">{behind}<rect x="1" y="1" width="30" height="19" rx="{radius}"/>{label}</g>'
    return _button(mark, text, select, links)


def _button(mark: str, text: str, select: str, links: str = "") -> str:
    extra = f' data-links="{escape(links)}"' if links else ""
    return (
        f'<button type="button" aria-pressed="false" data-select="{escape(select)}"{extra}>'
        f'<svg width="36" height="24" aria-hidden="true">{mark}</svg>{escape(text)}</button>'
    )


# --- facts about a box that the page shows when it is pointed at, as JSON for its script ----------------------------

_LONGEST = 200


def list_facts(scene: Scene) -> list[dict[str, Any]]:
    """Return for each box: operator, name, phase, pass, attributes, operands and results with type and degree."""
    return [_box(scene, box) for box in scene.boxes]


def embed_json(data: Any) -> str:
    """Return JSON for a `<script>` element: no `<`, `>` or `&` that could end it or begin another."""
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    # Names from a damaged file may hold half of a surrogate pair, which no encoding has.
    return text.encode("utf-8", "replace").decode()


def _box(scene: Scene, box: Box) -> dict[str, Any]:
    found: dict[str, Any] = {"title": box.title, "phase": "" if box.phase is Phase.UNKNOWN else box.phase.value}
    if box.mark is not None:
        found["pass"] = box.mark
    if box.badges:
        found["notes"] = [BADGES[badge][2] for badge in box.badges]
    if box.output is not None:
        return {**found, "name": box.output.name or "", "in": [_value(scene, box.output)]}
    if len(box.nodes) > 1:
        return {**found, "ops": _count(box.nodes), "names": [node_name(node) for node in box.nodes]}
    node = box.nodes[0]
    graphs = (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS)
    texts = {name: attribute_text(a) for name, a in node.attributes.items() if a.type not in graphs}
    found |= {
        "op": op_name(node),
        "name": node_name(node),
        "attributes": [[n, t if len(t) <= _LONGEST else f"{t[:_LONGEST]}…"] for n, t in texts.items()],
        "in": [_value(scene, value) for value in node.inputs if value is not None],
        "out": [_value(scene, value) for value in node.outputs if value.name],
    }
    inside = _count(scene.context.nodes_inside(node))
    return {**found, "ops": inside} if inside else found


def _count(nodes: Iterable[ir.Node]) -> list[tuple[str, int]]:
    return Counter(map(op_name, nodes)).most_common()


def _value(scene: Scene, value: ir.Value) -> list[Any]:
    """Return name, type, degree in the loss scale, the box that gives it (or None), and its origin otherwise."""
    producer = value.producer()
    box = None if producer is None else scene.box_of.get(producer)
    return [value.name or "", _type(value), degree_of(scene.context, value), box, _origin(value)]


def _type(value: ir.Value) -> str:
    dtype = "?" if value.dtype is None else value.dtype.name.lower()
    dtype = {"float": "float32", "double": "float64"}.get(dtype, dtype)
    return f"{dtype} {'[?]' if value.shape is None else '[' + ', '.join(str(d) for d in value.shape) + ']'}"


def degree_of(context: DrawingContext, value: ir.Value) -> str:
    """Return the degree in the loss scale as text, empty where none is known."""
    if context.note is not None or (context.scale is None and not context.step.places):
        return ""
    if value in context.unclear:
        return "?"
    degree = context.step.degrees.get(value, 0)
    return "any" if degree is ZERO else str(degree)


def _origin(value: ir.Value) -> str:
    tensor = constant_tensor(value)
    if tensor is not None:
        if tensor.size == 1 and (text := tensor_text(tensor)) is not None:
            return f"constant {text.strip('[]')}"
        return "initializer" if value.producer() is None else "constant"
    if value.is_graph_input():
        return "input with initializer" if value.is_initializer() else "input"
    return ""
