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


def fit(context: DrawingContext, *, whole: bool = False) -> Layout:
    """Lay out a drawing with as much detail as fits a window; with each node, if `whole`."""
    wiring = Wiring(context.model.graph)
    least: tuple[float, Layout] | None = None
    for boxes in fold(context, wiring):
        if len(boxes) > _MOST and not whole:
            continue
        scene = make_scene(context, wiring, boxes)
        if not whole and _against(scene) > _AGAINST * len(scene.links):
            continue
        layout = Layout(scene)
        excess = max(layout.width / _WIDTH, layout.height / _HEIGHT)
        if whole or excess <= 1:
            return layout
        if least is None or excess < least[0]:
            least = excess, layout
    return least[1] if least is not None else Layout(scene)


def _against(scene: Scene) -> int:
    return sum(scene.boxes[link.source].order >= scene.boxes[link.target].order for link in scene.links)
