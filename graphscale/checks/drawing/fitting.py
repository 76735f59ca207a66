"""The choice of a drawing's detail: as much as fits the window of a browser."""

from __future__ import annotations

from graphscale.checks.drawing.drawing_context import DrawingContext
from graphscale.checks.drawing.folding import fold
from graphscale.checks.drawing.lanes import Layout
from graphscale.checks.drawing.scene import Scene, make_scene
from graphscale.checks.drawing.wiring import Wiring

__all__ = ["fit"]

# The extent of a drawing whose smallest text can be read, if only just, where a window shows all of it.
_WIDTH, _HEIGHT = 2300.0, 1800.0
# More boxes than this never fit.
_MOST = 420
# Links against the order of the graph, as folding may make, confuse: at most this share.
_AGAINST = 0.02
# The excess for which such links make up: a drawing of this size is to be read in parts.
_UNCLEAR = 2.5


def fit(context: DrawingContext, *, whole: bool = False) -> Layout:
    """Lay out a drawing with as much detail as fits a window; with each node, if `whole`."""
    wiring = Wiring(context.step.graph)
    if whole:
        return Layout(make_scene(context, wiring, [(node,) for node in wiring.nodes]))
    found: list[tuple[float, Layout]] = []
    for boxes in fold(context, wiring, _MOST):
        layout = Layout(make_scene(context, wiring, boxes))
        excess = max(layout.width / _WIDTH, layout.height / _HEIGHT)
        is_clear = _against(layout.scene) <= _AGAINST * len(layout.scene.links)
        if excess <= 1 and is_clear:
            return layout
        # The last one has the fewest boxes, and may be unclear.
        found.append((excess if is_clear else max(excess, _UNCLEAR), layout))
    return min(found, key=lambda each: each[0])[1]


def _against(scene: Scene) -> int:
    return sum(scene.boxes[link.source].order >= scene.boxes[link.target].order for link in scene.links)
