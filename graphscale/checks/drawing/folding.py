"""The nodes that are drawn one by one, and those that are folded: in ever fewer boxes."""

from __future__ import annotations

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping

import onnx_ir as ir

from graphscale.checks.drawing.drawing_context import DrawingContext, Phase
from graphscale.checks.drawing.wiring import Wiring
from graphscale.graph.cones import producers_of
from graphscale.graph.walks import reach
from graphscale.passes import ScaleLoss, UnscaleGradients, UpdateLossScale

__all__ = ["Boxes", "fold"]

Boxes = list[tuple[ir.Node, ...]]
# A value with more readers than this ties nothing together, as a learning rate does not; nor does a node with more
# operands, as the norm of all gradients does not.
_SHARED = 3
# The forward and the backward pass are folded in as many sections at most.
_SECTIONS = 12


@dataclasses.dataclass(frozen=True)
class _Detail:
    """A degree of detail.

    Attributes:
        hops: the distance from a landmark, or from a node that the loss scaling concerns, up to which nodes keep a box.
        samples: the number of gradients with boxes of their own on the way through check and update; None for all.
        merged: True if all pieces of one kind are one box, siblings included.
    """

    hops: int
    samples: int | None = None
    merged: bool = False


_DETAILS = (
    *(_Detail(hops) for hops in (3, 2, 1, 0)),
    *(_Detail(hops, merged=True) for hops in (2, 1, 0)),
    *(_Detail(hops, samples, merged=True) for samples in (6, 4, 2) for hops in (1, 0)),
    _Detail(0, 0, merged=True),
)


def fold(context: DrawingContext, wiring: Wiring, most: int) -> Iterator[Boxes]:
    """Yield at most `most` boxes of a drawing, of one node or of many of one phase, in graph order: ever less detail.

    First each node has a box. Then those that the loss scaling put in, or would touch, have one, with their neighbours
    around; the rest is folded into sections of the forward and the backward pass and into pieces of the optimizer.
    Then all gradients and inserted nodes are folded, too, by their passes, but for a few that stand for all. At last
    all nodes of one kind are one box, also where two of these read each other.
    """
    if len(wiring.nodes) <= most:
        yield [(node,) for node in wiring.nodes]
    folding = _Folding(context, wiring)
    landmarks = _landmarks(context)
    gradients = producers_of(context.unscalings)
    marked = {*context.passes, *landmarks, *context.step.coverage.missed, *gradients}
    for detail in _DETAILS:
        samples = {} if detail.samples is None else folding.choose_samples(detail.samples)
        centre = (marked if detail.samples is None else landmarks).intersection(wiring.index)
        shown = centre | (marked & samples.keys())
        # An optimizer is the same for every weight: each has one box.
        around = _around(wiring, centre, detail.hops) | shown
        kept = {node for node in around if node in shown or context.phases[node] is not Phase.UPDATE}
        if len(kept) <= most:
            boxes = folding.fold(kept, samples, detail.merged)
            if len(boxes) <= most:
                yield boxes
    yield _gather(wiring.nodes, folding.kinds)


def _landmarks(context: DrawingContext) -> set[ir.Node]:
    """Return the loss and the places where the scale enters: shown in any case."""
    places = context.step.places
    found = producers_of([context.step.loss, *(place.value for place in places if place.edge is None)])
    found |= {place.edge.node for place in places if place.edge is not None}
    return found | {node for node, mark in context.passes.items() if mark in (ScaleLoss.name, UpdateLossScale.name)}


def _around(wiring: Wiring, centre: Iterable[ir.Node], hops: int) -> set[ir.Node]:
    found, edge = set(centre), set(centre)
    for _ in range(hops):
        near: set[ir.Node] = set()
        for node in edge:
            for others in (wiring.sources[node], wiring.targets[node]):
                near.update(others if len(others) <= 4 * _SHARED else ())
        edge = near - found
        found |= near
    return found


class _Folding:
    """Folds what is not kept into connected pieces."""

    def __init__(self, context: DrawingContext, wiring: Wiring) -> None:
        self.context = context
        self.wiring = wiring
        sections = _sections(context, wiring)
        self.kinds = {n: (context.phases[n], context.passes.get(n), sections[n]) for n in wiring.nodes}
        readers = Counter(value for _, _, value in wiring.links)
        self.ties = [(s, t) for s, t, value in wiring.links if max(readers[value], len(wiring.sources[t])) <= _SHARED]
        self.owners = self._find_owners()

    def choose_samples(self, count: int) -> dict[ir.Node, int]:
        """Choose the nodes of the update of some gradients, evenly, with the number of the gradient."""
        starts = list(dict.fromkeys(owner for owner in self.owners.values() if owner is not None))
        count = min(count, len(starts))
        chosen = {starts[n * len(starts) // count]: n for n in range(count)}
        return {node: chosen[owner] for node, owner in self.owners.items() if owner in chosen}

    def _find_owners(self) -> dict[ir.Node, ir.Node | None]:
        """Find the one gradient that each node of the update belongs to; None where several meet, as in a norm."""
        context, owners = self.context, dict[ir.Node, ir.Node | None]()
        for node in self.wiring.nodes:
            mark = context.passes.get(node)
            if mark == UnscaleGradients.name or any(value in context.unscalings for value in node.outputs):
                owners[node] = node
            elif context.phases[node] is Phase.UPDATE:
                above = [owners[source] for source in self.wiring.sources[node] if source in owners]
                # The finite flag and a norm are everyone's: their readers are still those of one gradient.
                own = {owner for owner in above if owner is not None}
                if above:
                    owners[node] = own.pop() if len(own) == 1 else None
        return owners

    def fold(self, kept: set[ir.Node], samples: Mapping[ir.Node, int], merged: bool) -> Boxes:
        nodes, kinds = self.wiring.nodes, self.kinds
        keys: dict[ir.Node, object] = {}
        if merged:
            # Numbers are compared sooner than kinds.
            numbers: dict[object, int] = {}
            merged_kinds = ((n, (*kinds[n], samples.get(n))) for n in nodes)
            keys = self._split({n: n if n in kept else numbers.setdefault(k, len(numbers)) for n, k in merged_kinds})
        else:
            near: dict[ir.Node, list[ir.Node]] = defaultdict(list)
            for source, target in self.ties:
                if source not in kept and target not in kept and kinds[source] == kinds[target]:
                    near[source].append(target)
                    near[target].append(source)
            for first in nodes:
                if first not in keys:
                    keys |= dict.fromkeys(reach([first], near.__getitem__), first)
        return _gather(nodes, keys)

    def _split(self, kinds: Mapping[ir.Node, object]) -> dict[ir.Node, object]:
        """Split each kind where a path leaves it and comes back, so that its boxes do not read each other."""
        visits: dict[ir.Node, int] = {}
        # For each kind at or above a node: the number of the visit that a path from the node would be.
        following: dict[ir.Node, dict[object, int]] = {}
        for node in self.wiring.nodes:
            kind, found, visit = kinds[node], dict[object, int](), 0
            sources = self.wiring.sources[node]
            if len(sources) == 1 and sources[0] in visits and kinds[sources[0]] == kind:  # most nodes
                visits[node], following[node] = visits[sources[0]], following[sources[0]]
                continue
            for source in sources:
                after = following.get(source, {})
                visit = max(visit, visits.get(source, 0) if kinds[source] == kind else after.get(kind, 0))
                for other, number in after.items():
                    found[other] = max(number, found.get(other, 0))
            visits[node] = visit
            if kind is not node:
                found[kind] = visit + 1
            following[node] = found
        return {node: (kinds[node], visits[node]) for node in kinds}


def _gather(nodes: Iterable[ir.Node], keys: Mapping[ir.Node, object]) -> Boxes:
    """Put the nodes of one key into one box."""
    pieces: dict[object, list[ir.Node]] = defaultdict(list)
    for node in nodes:
        pieces[keys[node]].append(node)
    return [tuple(piece) for piece in pieces.values()]


def _sections(context: DrawingContext, wiring: Wiring) -> dict[ir.Node, int]:
    """Return the section of each node: the forward and the backward pass cut by depth; the optimizer is one."""
    depth: dict[ir.Node, int] = {}
    for node in wiring.nodes:
        phase = context.phases[node]
        near = [depth[s] for s in wiring.sources[node] if s in depth and context.phases[s] is phase]
        depth[node] = max(near, default=-1) + 1
    for node in reversed(wiring.nodes):
        # The factor of a gradient stands with the gradient, not where the backward pass begins.
        if context.phases[node] is Phase.BACKWARD and not any(map(context.carries_scale, node.outputs)):
            after = [depth[t] for t in wiring.targets[node] if context.phases[t] is Phase.BACKWARD]
            depth[node] = min(after, default=depth[node])
    deepest: dict[Phase, int] = defaultdict(int)
    for node, level in depth.items():
        deepest[context.phases[node]] = max(deepest[context.phases[node]], level)
    heights = {phase: max(6, -(-(level + 1) // _SECTIONS)) for phase, level in deepest.items()}
    return {
        node: 0 if context.phases[node] is Phase.UPDATE else level // heights[context.phases[node]]
        for node, level in depth.items()
    }
