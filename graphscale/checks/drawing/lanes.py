"""The place of each box: the forward pass down on the left, the backward pass up beside it, the update to the right.

A backward node stands beside, or below, what it reads of the forward pass; the forward pass is spread so that the two
keep step. So gradients leave at the height of the weights they belong to.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict

from graphscale.checks.drawing.drawing_context import Phase
from graphscale.checks.drawing.layered import Layering
from graphscale.checks.drawing.scene import Box, Scene

__all__ = ["BOX_HEIGHT", "Lane", "Layout"]

BOX_HEIGHT, ROW = 36.0, 62.0
_GAP_X, _GAP_Y, _COLUMN_GAP, _LANE_GAP = 22.0, 16.0, 36.0, 66.0
_MARGIN, _HEADING, _AROUND = 34.0, 62.0, 12.0
# From the bend of a link to the edge of a lane.
_CLEARANCE = BOX_HEIGHT / 3
# A lane is wide enough for its heading.
_NARROWEST = 130.0
_CHARACTER, _SMALL_CHARACTER, _LONGEST = 7.1, 5.7, 24
# A branch of the backward pass is at most this long.
_BRANCH = 5
Point = tuple[float, float]


@dataclasses.dataclass(frozen=True)
class Lane:
    """A part of the drawing with a heading, and its sides."""

    phase: Phase
    left: float
    right: float


def short(text: str) -> str:
    """Shorten a text to fit into a box: the end of a long name tells more than its middle."""
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST // 3]}…{text[_LONGEST // 3 + 1 - _LONGEST :]}"


def width_of(box: Box) -> float:
    """Return the width of a box, by its texts."""
    chip = 30.0 if box.mark else 0.0
    texts = max(len(short(box.title)) * _CHARACTER, len(short(box.subtitle)) * _SMALL_CHARACTER)
    return max(64.0, texts + 24.0 + chip)


class Layout:
    """The positions of all boxes and links of a scene.

    Attributes:
        centres: the centre of each box.
        widths: the width of each box.
        bends: for each link within one lane, the points that it goes through.
        lanes: the parts of the drawing.
        lane_top, lane_bottom: the extent of each lane.
        left, top, width, height: the extent of the drawing.
    """

    def __init__(self, scene: Scene) -> None:
        self.scene = scene
        self.widths = [width_of(box) for box in scene.boxes]
        self.centres: list[Point] = [(0.0, 0.0)] * len(scene.boxes)
        self.bends: dict[tuple[int, int], list[Point]] = {}
        self.lanes: list[Lane] = []
        self._lane = [Phase.FORWARD if box.phase is Phase.UNKNOWN else box.phase for box in scene.boxes]
        self._sources: dict[int, list[int]] = defaultdict(list)
        self._targets: dict[int, list[int]] = defaultdict(list)
        for link in scene.links:
            # A link against the order of the graph, as folding may make, is drawn and has no say.
            if scene.boxes[link.source].order < scene.boxes[link.target].order:
                self._sources[link.target].append(link.source)
                self._targets[link.source].append(link.target)
        self._order = sorted(range(len(scene.boxes)), key=lambda i: scene.boxes[i].order)
        self._row: dict[int, int] = {}
        self._rows()
        left = self._vertical(Phase.FORWARD, 0.0)
        left = self._vertical(Phase.BACKWARD, left)
        self._update(left)
        self._detours()
        xs = [x + side * w / 2 for (x, _), w in zip(self.centres, self.widths, strict=True) for side in (-1, 1)]
        ys = [y for _, y in self.centres]
        ys += [y + side * _CLEARANCE for bends in self.bends.values() for _, y in bends for side in (-1, 1)]
        self.lane_top, self.lane_bottom = min(ys, default=0) - _HEADING, max(ys, default=0) + BOX_HEIGHT
        self.left, self.top = min(xs, default=0) - _MARGIN, self.lane_top - _AROUND
        self.width = max(xs, default=0) + _MARGIN - self.left
        self.height = self.lane_bottom + _AROUND - self.top

    def _in(self, phase: Phase) -> list[int]:
        return [i for i in self._order if self._lane[i] is phase]

    def _near(self, near: dict[int, list[int]], i: int, phase: Phase) -> list[int]:
        return [j for j in near.get(i, ()) if self._lane[j] is phase]

    # --- rows of the forward and the backward pass ------------------------------------------------------------------

    def _rows(self) -> None:
        forward, backward, row = self._in(Phase.FORWARD), self._in(Phase.BACKWARD), self._row
        for i in forward:
            row[i] = max((row[j] + 1 for j in self._near(self._sources, i, Phase.FORWARD)), default=0)
        for i in reversed(backward):
            later = [row[j] + 1 for j in self._near(self._targets, i, Phase.BACKWARD)]
            row[i] = max([*later, *(row[j] for j in self._near(self._sources, i, Phase.FORWARD))], default=0)
        last = max((row[i] for i in (*forward, *backward)), default=0)
        for i in reversed(forward):
            below = [row[j] - 1 for j in self._near(self._targets, i, Phase.FORWARD)]
            beside = [row[j] for j in self._near(self._targets, i, Phase.BACKWARD)]
            at_end = self.scene.boxes[i].output is not None and "loss" in self.scene.boxes[i].badges
            row[i] = max(row[i], min([*below, *beside], default=last if at_end else row[i]))
        self._pull_branches(backward)
        used = {r: n for n, r in enumerate(sorted(set(row.values())))}
        self._row = {i: used[r] for i, r in row.items()}

    def _pull_branches(self, backward: list[int]) -> None:
        """Put what branches off the backward pass, as a weight's gradient does, next to where it branches off."""
        height: dict[int, int] = {}
        for i in reversed(backward):
            height[i] = max((height[j] + 1 for j in self._near(self._targets, i, Phase.BACKWARD)), default=0)
        branches: set[int] = set()
        for i in backward:
            before = [j for j in self._near(self._sources, i, Phase.BACKWARD) if self.scene.boxes[j].scaled]
            if height[i] <= _BRANCH and before and all(j in branches or height[j] > height[i] + 1 for j in before):
                branches.add(i)
        # A node that only branches read goes with them: a saved activation, reshaped.
        feeders: set[int] = set()
        for i in reversed(backward):
            after = self._near(self._targets, i, Phase.BACKWARD)
            if after and not self.scene.boxes[i].scaled and all(j in branches or j in feeders for j in after):
                feeders.add(i)
        for i in backward:
            before = [self._row[j] for j in self._near(self._sources, i, Phase.BACKWARD) if j not in feeders]
            if i in branches and before:
                self._row[i] = max(self._row[i], min(before) - 1)
        for i in reversed(backward):
            after = [self._row[j] + 1 for j in self._near(self._targets, i, Phase.BACKWARD)]
            self._row[i] = max([self._row[i], *after])

    def _vertical(self, phase: Phase, left: float) -> float:
        """Lay out the forward or the backward pass, from `left` on; return where the next lane begins."""
        members = self._in(phase)
        if not members:
            return left
        wishes = {}
        for i in members if phase is Phase.BACKWARD else ():
            # Gradients leave to the right; what is only read from the forward pass comes from the left.
            if self._near(self._targets, i, Phase.UPDATE):
                wishes[i] = (240.0, 0.5)
            elif not self._near(self._sources, i, Phase.BACKWARD):
                wishes[i] = (-240.0, 0.5)
        found = self._arrange({i: self._row[i] for i in members}, self.widths, _GAP_X, wishes)
        low = min(found.positions[i] - self.widths[i] / 2 for i in members)
        high = max(found.positions[i] + self.widths[i] / 2 for i in members)
        for i in members:
            self.centres[i] = (left + found.positions[i] - low, self._row[i] * ROW)
        for link, points in found.bends.items():
            self.bends[link] = [(left + position - low, layer * ROW) for layer, position in points]
        right = left + max(high - low, _NARROWEST)
        self.lanes.append(Lane(phase, left, right))
        return right + _LANE_GAP

    # --- columns of the update --------------------------------------------------------------------------------------

    def _update(self, left: float) -> None:
        members = self._in(Phase.UPDATE)
        if not members:
            return
        columns = self._columns(members)
        # Links from the other lanes enter in a column of their own, at the height of their origin.
        givers = {j for i in members for j in self._sources.get(i, ()) if self._lane[j] is not Phase.UPDATE}
        layers = {i: columns[i] + 1 for i in members} | dict.fromkeys(givers, 0)
        sizes = [4.0 if i in givers else BOX_HEIGHT for i in range(len(self.widths))]
        wishes = {i: (self.centres[i][1], 30.0) for i in givers}
        found = self._arrange(layers, sizes, _GAP_Y, wishes)
        widest: dict[int, float] = defaultdict(lambda: 40.0)
        for i in members:
            widest[layers[i]] = max(widest[layers[i]], self.widths[i])
        starts, x = {0: left - _LANE_GAP / 2}, left
        widest[0] = 0.0
        for column in range(1, max(layers.values()) + 1):
            starts[column] = x
            x += widest[column] + _COLUMN_GAP
        for i in members:
            # Left-aligned: the gaps between columns stay free for the links.
            self.centres[i] = (starts[layers[i]] + self.widths[i] / 2, found.positions[i])
        for link, points in found.bends.items():
            path = [(starts[layer] + widest[layer] / 2, position) for layer, position in points]
            entry = [(starts[0], found.positions[link[0]])] if link[0] in givers else []
            self.bends[link] = [*entry, *path]
        self.lanes.append(Lane(Phase.UPDATE, left, max(x - _COLUMN_GAP, left + _NARROWEST)))

    # --- links from one lane to another -----------------------------------------------------------------------------

    def _detours(self) -> None:
        """Let links between lanes pass the boxes of a row above them, where there are any in the way."""
        ends = {lane.phase: {-1: lane.left, 1: lane.right} for lane in self.lanes}
        rows: dict[tuple[Phase, int], list[int]] = defaultdict(list)
        for i, row in self._row.items():
            rows[self._lane[i], row].append(i)

        def leave(i: int, side: int, source: int) -> list[Point]:
            """Return the points from a box to the edge of its lane: 1 the right one, -1 the left one."""
            x, y = self.centres[i]
            # Links rise and fall between the lanes, where no boxes are; several in one channel run beside each other.
            edge, channel = ends[self._lane[i]][side] + side * 10, y - side * ROW / 2 + 4 * (source % 5 - 2)
            if any((self.centres[j][0] - x) * side > 0 for j in rows[self._lane[i], self._row[i]]):
                return [(x + side * self.widths[i] / 2 + side * _GAP_X - side * 4, channel), (edge, channel)]
            return [(edge, y)]

        for link in self.scene.links:
            source, target = link.source, link.target
            if self._lane[source] is self._lane[target] or source not in self._row:
                continue
            arrival = leave(target, -1, source)[::-1] if target in self._row else []
            self.bends[source, target] = [*leave(source, 1, source), *self.bends.get((source, target), []), *arrival]

    def _columns(self, members: list[int]) -> dict[int, int]:
        column: dict[int, int] = {}
        for i in members:
            column[i] = max((column[j] + 1 for j in self._near(self._sources, i, Phase.UPDATE)), default=0)
        for i in reversed(members):
            later = [column[j] - 1 for j in self._near(self._targets, i, Phase.UPDATE)]
            if later and not self._sources.get(i):
                column[i] = max(column[i], min(later))
        return column

    def _arrange(
        self, layers: dict[int, int], sizes: list[float], gap: float, wishes: dict[int, tuple[float, float]]
    ) -> Layering:
        ends = ((link.source, link.target) for link in self.scene.links)
        links = [(a, b) for a, b in ends if a in layers and b in layers and layers[a] != layers[b]]
        return Layering(layers, links, {i: sizes[i] for i in layers}, gap, wishes)
