"""Positions: nothing overlaps, and everything flows the way that the headings say."""

from __future__ import annotations

import itertools
from collections import defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphscale.checks.drawing.drawing_context import Phase
from graphscale.checks.drawing.lanes import BOX_HEIGHT, Layout
from graphscale.checks.drawing.layered import Layering
from graphscale.checks.drawing.scene import Scene
from tests.checks.drawing.graphs import layout_of, scene_of
from tests.conftest import MODEL_NAMES

pytestmark = [pytest.mark.static, pytest.mark.sample(2)]


def corners(layout: Layout, i: int) -> tuple[float, float, float, float]:
    (x, y), width = layout.centres[i], layout.widths[i]
    return x - width / 2, y - BOX_HEIGHT / 2, x + width / 2, y + BOX_HEIGHT / 2


def assert_apart(scene: Scene, layout: Layout) -> None:
    boxes = sorted((corners(layout, i) for i in range(len(scene.boxes))), key=lambda box: box[0])
    for n, (_, top, right, bottom) in enumerate(boxes):
        for other in itertools.takewhile(lambda box, right=right: box[0] < right, boxes[n + 1 :]):
            assert other[3] <= top or other[1] >= bottom, (boxes[n], other)


@pytest.mark.cover(1)
@pytest.mark.sample(8)
@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("scaled", [True, False])
@pytest.mark.parametrize("name", MODEL_NAMES)
def test_boxes_are_apart_and_links_flow(name: str, scaled: bool, whole: bool) -> None:
    layout = layout_of(name, scaled=scaled, whole=whole)
    scene = layout.scene
    # An ordinary window, at half the size: a drawing folds until it fits.
    assert whole or (layout.width <= 2300 and layout.height <= 1800)
    assert_apart(scene, layout)
    right_edges = [lane.right for lane in layout.lanes]
    drawn = {box.phase for box in scene.boxes}
    assert {Phase.FORWARD, Phase.BACKWARD} <= drawn
    assert [lane.phase for lane in layout.lanes] == [phase for phase in Phase if phase in drawn]
    assert all(a < lane.left for a, lane in zip(right_edges, layout.lanes[1:], strict=False))
    against = 0
    for link in scene.links:
        source, target = scene.boxes[link.source], scene.boxes[link.target]
        (x0, y0), (x1, y1) = layout.centres[link.source], layout.centres[link.target]
        if source.phase is target.phase:
            with_flow = {Phase.FORWARD: y0 < y1, Phase.BACKWARD: y0 > y1, Phase.UPDATE: x0 < x1}[source.phase]
        else:
            with_flow = x0 < x1
        # Only folding can turn a link round: two boxes of many nodes may read each other.
        assert with_flow or len(source.nodes) > 1 or len(target.nodes) > 1
        against += not with_flow
    assert against <= 0.02 * len(scene.links)


def test_a_layout_is_the_same_every_time() -> None:
    first, second = (Layout(scene_of("pytorch/two_losses", scaled=True)) for _ in range(2))
    assert vars(first) | {"scene": None} == vars(second) | {"scene": None}


def test_links_of_one_row_keep_to_channels_between_the_rows() -> None:
    """A link from one lane to another does not run behind the boxes of its own row."""
    scene = scene_of("pytorch/mlp_momentum", scaled=True)
    layout = Layout(scene)
    rows = defaultdict(list)
    for i, box in enumerate(scene.boxes):
        if box.phase is not Phase.UPDATE:
            rows[box.phase, layout.centres[i][1]].append(i)
    checked = 0
    for link in scene.links:
        source, target = scene.boxes[link.source], scene.boxes[link.target]
        if source.phase is target.phase:
            continue
        x, y = layout.centres[link.source]
        row = rows[source.phase, y]
        if any(layout.centres[i][0] > x for i in row):
            first = layout.bends[link.source, link.target][0]
            assert BOX_HEIGHT / 2 < abs(first[1] - y) < 62 - BOX_HEIGHT / 2
            checked += 1
    assert checked >= 3


layer_numbers = st.lists(st.integers(0, 6), min_size=1, max_size=40)


@pytest.mark.full
@settings(max_examples=60, deadline=None)
@given(layer_numbers, st.data())
def test_any_layering_keeps_its_distances(numbers: list[int], data: st.DataObject) -> None:
    layers = dict(enumerate(numbers))
    ends = st.tuples(st.sampled_from(sorted(layers)), st.sampled_from(sorted(layers)))
    links = [(a, b) for a, b in data.draw(st.lists(ends, max_size=60)) if layers[a] < layers[b]]
    sizes = {i: float(10 + i % 7) for i in layers}
    found = Layering(layers, links, sizes, 5.0, {0: (30.0, 1.0)})
    for layer in set(numbers):
        row = sorted((found.positions[i], sizes[i]) for i in layers if layers[i] == layer)
        for (a, size), (b, other) in itertools.pairwise(row):
            assert b - a >= (size + other) / 2 + 5.0 - 1e-6
    for source, target in links:
        assert [layer for layer, _ in found.bends[source, target]] == list(range(layers[source] + 1, layers[target]))


def test_a_chain_is_drawn_straight() -> None:
    layers = {i: i for i in range(8)}
    found = Layering(layers, [(i, i + 1) for i in range(7)], dict.fromkeys(layers, 50.0), 10.0, {})
    assert max(found.positions.values()) - min(found.positions.values()) < 1e-6
