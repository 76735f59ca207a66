"""A laid-out scene as SVG text. Every text comes from a file, and is escaped."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from itertools import pairwise

from graphscale.checks.drawing.drawing_context import Phase
from graphscale.checks.drawing.lanes import BOX_HEIGHT, Layout, Point, short
from graphscale.checks.drawing.scene import BADGES, Box, Link, Scene
from graphscale.graph.values import node_name
from graphscale.passes import ORDER, ScaleLoss

__all__ = ["CHIPS", "draw", "identifier"]

# The text of the chip at a box's left: the colour is not the only sign of a pass.
CHIPS = {kind.name: kind.sign for kind in ORDER} | {"added": "+"}
_HEADINGS = {Phase.FORWARD: "Forward pass ↓", Phase.BACKWARD: "Backward pass ↑", Phase.UNKNOWN: "Graph ↓"}
_CALLOUTS = 3
_ARROW = (
    '<marker id="arrow-{0}" class="arrow {0}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
    'markerUnits="userSpaceOnUse" orient="auto"><path d="M0 0.6 L8 4 L0 7.4 z"/></marker>'
)


def identifier(mark: str | None) -> str:
    """Return the pass as part of a class name: one of the known ones, or "other"."""
    return "none" if mark is None else mark if mark in CHIPS else "other"


def _label(box: Box) -> str:
    """Return a sentence on a box for screen readers."""
    if box.output is not None:
        return f"output {box.title}"
    origin = f"inserted by {box.mark}" if box.mark and box.mark != "added" else box.mark or ""
    phase = {Phase.UNKNOWN: "", Phase.UPDATE: "update"}.get(box.phase, f"{box.phase.value} pass")
    name = f"{box.title} {node_name(box.nodes[0])}" if len(box.nodes) == 1 else f"{box.title} folded: {box.subtitle}"
    return ", ".join(filter(None, [name, phase, origin, "a multiple of the loss scale" if box.scaled else ""]))


def draw(layout: Layout, title: str) -> str:
    """Return the `<svg>` element: lanes, links, boxes."""
    scene = layout.scene
    lines = [
        f'<svg id="drawing" role="group" aria-label="{escape(title)}" '
        f'viewBox="{layout.left:.0f} {layout.top:.0f} {layout.width:.0f} {layout.height:.0f}" xmlns="http://www.w3.org/2000/svg">',
        f"<title>{escape(title)}</title>",
        "<defs>",
        *(_ARROW.format(name) for name in ("plain", "scaled", "marked")),
        "</defs>",
        '<g id="view">',
        *_lanes(scene, layout),
        '<g id="links" aria-hidden="true">',
        *(_link(scene, layout, link, ports) for link, ports in zip(scene.links, _ports(scene, layout), strict=True)),
        "</g>",
        '<g id="boxes">',
        *(_box(i, box, layout.centres[i], layout.widths[i]) for i, box in enumerate(scene.boxes)),
        "</g>",
        *_callouts(layout),
        "</g></svg>",
    ]
    return "\n".join(lines)


def _lanes(scene: Scene, layout: Layout) -> Iterator[str]:
    top, bottom = layout.lane_top, layout.lane_bottom
    unknown = scene.context.note is not None
    for lane in layout.lanes:
        phase = Phase.UNKNOWN if unknown else lane.phase
        yield (
            f'<g class="lane {phase.value}"><rect x="{lane.left - 22:.1f}" y="{top:.1f}" rx="14" '
            f'width="{lane.right - lane.left + 44:.1f}" height="{bottom - top:.1f}"/>'
            f'<text x="{lane.left - 6:.1f}" y="{top + 25:.1f}">{_heading(scene, phase)}</text></g>'
        )


def _heading(scene: Scene, phase: Phase) -> str:
    if phase is not Phase.UPDATE:
        return _HEADINGS[phase]
    if scene.context.scale is not None:
        return "Gradients, check and update →"
    is_optimizer = any(box.phase is Phase.UPDATE and box.output is None for box in scene.boxes)
    return "Optimizer →" if is_optimizer else "Gradients →"


# --- links ----------------------------------------------------------------------------------------------------------


def _side(scene: Scene, link: Link) -> str:
    """Return the direction of a link: down, up, or right."""
    source, target = scene.boxes[link.source].phase, scene.boxes[link.target].phase
    if source is target and source in (Phase.FORWARD, Phase.UNKNOWN):
        return "down"
    return "up" if source is target is Phase.BACKWARD else "right"


def _ports(scene: Scene, layout: Layout) -> list[tuple[float, float]]:
    """Return the points where links leave and enter a box's side, so that they neither overlap nor cross there."""
    ends: dict[tuple[int, str, bool], list[tuple[float, int]]] = {}
    for n, link in enumerate(scene.links):
        side = _side(scene, link)
        axis = 1 if side == "right" else 0
        bends = layout.bends.get((link.source, link.target))
        first = bends[0] if bends else layout.centres[link.target]
        last = bends[-1] if bends else layout.centres[link.source]
        ends.setdefault((link.source, side, False), []).append((first[axis], n))
        ends.setdefault((link.target, side, True), []).append((last[axis], n))
    ports = [[0.0, 0.0] for _ in scene.links]
    for (box, side, entering), members in ends.items():
        room = (BOX_HEIGHT if side == "right" else layout.widths[box]) - 20
        # All that leaves a box leaves at one point: it is one value most often.
        step = 0.0 if not entering else min(16.0, room / max(1, len(members) - 1))
        for place, (_, n) in enumerate(sorted(members)):
            ports[n][1 if entering else 0] = (place - (len(members) - 1) / 2) * step
    return [(out, into) for out, into in ports]


def _link(scene: Scene, layout: Layout, link: Link, ports: tuple[float, float]) -> str:
    side = _side(scene, link)
    (x0, y0), (x1, y1) = layout.centres[link.source], layout.centres[link.target]
    half = BOX_HEIGHT / 2
    out, into = ports
    if side == "right":
        start = (x0 + layout.widths[link.source] / 2, y0 + out)
        end = (x1 - layout.widths[link.target] / 2 - 2, y1 + into)
    else:
        sign = 1 if side == "down" else -1
        start, end = (x0 + out, y0 + sign * half), (x1 + into, y1 - sign * (half + 2))
    path = _path(start, layout.bends.get((link.source, link.target), []), end, horizontal=side == "right")
    scaled = link.degree != 0
    marked = scene.boxes[link.source].mark or scene.boxes[link.target].mark
    style = "scaled" if scaled else "marked" if marked else "plain"
    crossing = " crossing" if scene.boxes[link.source].phase is not scene.boxes[link.target].phase else ""
    return (
        f'<path class="link {style}{crossing}" data-from="{link.source}" data-to="{link.target}" '
        f'marker-end="url(#arrow-{style})" d="{path}"/>'
    )


def _path(start: Point, bends: list[Point], end: Point, horizontal: bool) -> str:
    """Return a smooth curve that leaves, passes its bends and arrives in the direction of flow."""
    points = [start, *bends, end]
    parts = [f"M{start[0]:.1f} {start[1]:.1f}"]
    for (x0, y0), (x1, y1) in pairwise(points):
        dx, dy = (max(18.0, min(abs(x1 - x0) / 2, 90.0)), 0.0) if horizontal else (0.0, (y1 - y0) / 2)
        parts.append(f"C{x0 + dx:.1f} {y0 + dy:.1f} {x1 - dx:.1f} {y1 - dy:.1f} {x1:.1f} {y1:.1f}")
    return "".join(parts)


def _callouts(layout: Layout) -> Iterator[str]:
    """Yield a text below each box where the loss scale enters: the drawing starts there."""
    boxes, scaled = layout.scene.boxes, layout.scene.context.scale is not None
    seeds = [i for i, box in enumerate(boxes) if box.mark == ScaleLoss.name or "enters" in box.badges]
    for i in seeds if len(seeds) <= _CALLOUTS else ():
        x, y = layout.centres[i][0] - layout.widths[i] / 2, layout.centres[i][1]
        verb = "enters" if scaled else "would enter"
        yield f'<text class="callout" x="{x:.1f}" y="{y + BOX_HEIGHT / 2 + 15:.1f}">the loss scale {verb} here</text>'


# --- boxes ----------------------------------------------------------------------------------------------------------


def _box(index: int, box: Box, centre: Point, width: float) -> str:
    kind = "output" if box.output is not None else "group" if len(box.nodes) > 1 else "node"
    mark = box.mark if box.output is None else None
    classes = f"box {kind} {box.phase.value} pass-{identifier(mark)}" + (" multiple" if box.scaled else "")
    classes += " loss" if "loss" in box.badges else ""
    label = escape(_label(box))
    x, y = centre[0] - width / 2, centre[1] - BOX_HEIGHT / 2
    radius = BOX_HEIGHT / 2 if box.output is not None else 7
    parts = [
        f'<g class="{classes}" id="box-{index}" data-box="{index}" tabindex="0" role="button" '
        f'transform="translate({x:.1f} {y:.1f})" aria-label="{label}">',
        f"<title>{label}</title>",
    ]
    if len(box.nodes) > 1:
        parts.append(f'<rect class="behind" x="4" y="4" width="{width:.1f}" height="{BOX_HEIGHT:.0f}" rx="{radius}"/>')
    parts.append(f'<rect class="body" width="{width:.1f}" height="{BOX_HEIGHT:.0f}" rx="{radius}"/>')
    middle = width / 2
    if mark is not None:
        parts.append(f'<text class="chip" x="17" y="{BOX_HEIGHT / 2 + 4.5}">{CHIPS.get(mark, "+")}</text>')
        parts.append(f'<path class="rule" d="M31 7V{BOX_HEIGHT - 7:.0f}"/>')
        middle += 15
    y = 15.5 if box.subtitle else BOX_HEIGHT / 2 + 4.5
    parts.append(f'<text class="title" x="{middle:.1f}" y="{y}">{escape(short(box.title))}</text>')
    if box.subtitle:
        parts.append(f'<text class="subtitle" x="{middle:.1f}" y="28.5">{escape(short(box.subtitle))}</text>')
    for n, badge in enumerate(b for b in box.badges if box.output is None):
        at = (2.0, 1.0) if badge == "enters" else (width - 2, 1.0 if n == 0 or "enters" in box.badges else BOX_HEIGHT)
        parts.append(
            f'<g class="badge {badge}" transform="translate({at[0]:.1f} {at[1]:.1f})"><circle r="12"/>'
            f'<text y="3.6">{BADGES[badge][0]}</text></g>'
        )
    parts.append("</g>")
    return "".join(parts)
