# ruff: noqa: RUF001  (signs in the drawing)
"""The contents of a drawing, without positions: boxes, of many nodes each in a large graph, and links between them."""

from __future__ import annotations

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping

import onnx_ir as ir

from graphscale.analysis.degrees import ZERO, Degree
from graphscale.analysis.edits import Place
from graphscale.checks.diffing.match import tensor_text
from graphscale.checks.drawing.drawing_context import DrawingContext, Phase
from graphscale.graph.values import constant_tensor, inputs_of, operands_of
from graphscale.graph.walks import producers_of, reach
from graphscale.passes import ScaleLoss, UnscaleGradients, UpdateLossScale

__all__ = ["BADGES", "Box", "Link", "Scene", "make_scene"]

# The sign of each badge, its text in the legend, and in the facts about a box.
BADGES = {
    "enters": ("×S", "the scale would enter", "the loss scale enters here"),
    "leaves": ("÷S", "a gradient: it would come out", "a gradient leaves here: the loss scale would come out"),
    "missed": ("!", "not reached by the scale", "a backward contraction that the loss scale would not reach"),
    "loss": ("loss", "the loss", "the loss"),
}
# Graphs up to this size are drawn whole; of larger ones at most about the second number of boxes.
_WHOLE, _LIMIT = 300, 420
_HOPS = (3, 2, 1, 0)
# A value with more readers than this ties nothing together, as a learning rate does not; nor does a node with more
# operands, as the norm of all gradients does not.
_SHARED = 3
# The forward and the backward pass are folded in as many sections at most.
_SECTIONS = 12
# In a huge graph, so many gradients are shown on their way through check and update.
_SAMPLES = 6


@dataclasses.dataclass(frozen=True)
class Box:
    """A node, many nodes folded into one, or an output of the graph.

    Attributes:
        nodes: the nodes; none for an output.
        output: the output.
        phase: the phase of the nodes.
        mark: the pass that inserted them; None for nodes of the original graph.
        order: the place in the graph, to tell forward from back.
        title: the first line: the operator, or how many nodes.
        subtitle: the second line: operands that no node computes.
        scaled: whether a multiple of the loss scale leaves it.
        badges: what else is to be seen: "enters", "leaves", "loss", "missed".
    """

    nodes: tuple[ir.Node, ...]
    output: ir.Value | None
    phase: Phase
    mark: str | None
    order: float
    title: str
    subtitle: str = ""
    scaled: bool = False
    badges: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Link:
    """The values that one box gives to another.

    Attributes:
        source: the index of the box that gives.
        target: the index of the box that reads.
        degree: the highest degree with which one is read; None if one's degree does not follow.
    """

    source: int
    target: int
    degree: Degree


@dataclasses.dataclass(frozen=True)
class Scene:
    """All boxes and links, and where each node of the main graph went."""

    context: DrawingContext
    boxes: tuple[Box, ...]
    links: tuple[Link, ...]
    box_of: dict[ir.Node, int]


def make_scene(context: DrawingContext) -> Scene:
    """Choose the boxes of a drawing and link them."""
    wiring = _Wiring(context.model.graph)
    folded = _choose_boxes(context, wiring)
    boxes = [_box(context, wiring, nodes) for nodes in folded]
    box_of = {node: i for i, nodes in enumerate(folded) for node in nodes}
    degrees: dict[tuple[int, int], list[Degree]] = {}
    for source, target, value in wiring.links:
        ends = box_of[source], box_of[target]
        if ends[0] != ends[1]:
            degrees.setdefault(ends, []).append(context.degree_read(value, target))
    is_whole = len(folded) == len(wiring.nodes)
    for i, value in enumerate(context.model.graph.outputs):
        producer = value.producer()
        if producer is None or producer not in box_of:
            continue
        giver = box_of[producer]
        if is_whole or value is context.loss:
            degrees[giver, len(boxes)] = [context.degree_read(value, None)]
            boxes.append(_output(context, value, boxes[giver], len(wiring.nodes) + i))
        elif len(boxes[giver].nodes) == 1:
            # A large drawing is kept small: the box itself says what it gives.
            count = sum(output.is_graph_output() for output in producer.outputs)
            text = f"→ {value.name}" if count == 1 else f"→ {count} outputs"
            boxes[giver] = dataclasses.replace(boxes[giver], subtitle=text)
    links = tuple(Link(*ends, ZERO if ZERO in found else max(d or 0 for d in found)) for ends, found in degrees.items())
    return Scene(context, tuple(boxes), links, box_of)


def _box(context: DrawingContext, wiring: _Wiring, nodes: tuple[ir.Node, ...]) -> Box:
    first = nodes[0]
    order = sum(wiring.index[node] for node in nodes) / len(nodes)
    scaled = any(context.carries_scale(value) for node in nodes for value in node.outputs)
    if len(nodes) > 1:
        title, counts = f"{len(nodes)} nodes", Counter(node.op_type for node in nodes).most_common(2)
        subtitle = ", ".join(f"{count} {op}" for op, count in counts)
    else:
        title, inner = first.op_type, len(context.nodes_inside(first))
        subtitle = f"{inner} nodes inside" if inner else _operands(context, first)
    mark, badges = context.passes.get(first), _badges(context, nodes)
    return Box(nodes, None, context.phases[first], mark, order, title, subtitle, scaled, badges)


def _output(context: DrawingContext, value: ir.Value, source: Box, order: float) -> Box:
    badges = ("loss",) if value is context.loss else ()
    # A gradient that leaves the graph is part of the flow beside the backward pass.
    phase = Phase.UPDATE if source.phase is Phase.BACKWARD else source.phase
    return Box((), value, phase, source.mark, order, value.name or "?", "", False, badges)


def _badges(context: DrawingContext, nodes: tuple[ir.Node, ...]) -> tuple[str, ...]:
    outputs = {value for node in nodes for value in node.outputs}
    members = set(nodes)
    found = {
        "enters": any(_enters(place, members, outputs) for place in context.places),
        "leaves": not outputs.isdisjoint(context.unscalings),
        "missed": not members.isdisjoint(context.missed),
    }
    return tuple(badge for badge, is_shown in found.items() if is_shown)


def _enters(place: Place, nodes: set[ir.Node], outputs: set[ir.Value]) -> bool:
    if place.edge is not None:
        return place.edge.node in nodes
    if place.value.producer() is not None:
        return place.value in outputs
    # A constant or an input has no box: the mark is on its readers.
    return any(node in nodes for node, _ in place.value.uses())


def _operands(context: DrawingContext, node: ir.Node) -> str:
    operands = (v for v in inputs_of(node) if (giver := v.producer()) is None or giver.op_type == "Constant")
    return ", ".join(filter(None, ("S" if value is context.scale else _number(value) for value in operands)))


def _number(value: ir.Value) -> str:
    """Return a floating-point constant's number, the name of an input or a weight, nothing for an index or a shape."""
    tensor = constant_tensor(value)
    if tensor is None:
        return value.name or ""
    if not tensor.dtype.is_floating_point():
        return ""
    elements = tensor_text(tensor) if tensor.size == 1 else None
    return value.name or "" if elements is None else f"{float(elements.strip('[]')):.4g}"


# --- the nodes that are drawn one by one, and those that are folded --------------------------------------------------


class _Wiring:
    """The links between the nodes of a main graph, through subgraphs, too; constants are left out.

    Attributes:
        nodes: the nodes that a drawing may show, in graph order.
        index: the place of each.
        links: `(source, target, value)` for each value that a node reads from another, each once.
        sources: the links into each node.
        targets: the links out of each node.
    """

    def __init__(self, graph: ir.Graph) -> None:
        self.nodes = [node for node in graph if not _is_constant(node)]
        self.index = {node: i for i, node in enumerate(self.nodes)}
        self.links: list[tuple[ir.Node, ir.Node, ir.Value]] = []
        self.sources: dict[ir.Node, list[ir.Node]] = defaultdict(list)
        self.targets: dict[ir.Node, list[ir.Node]] = defaultdict(list)
        for node in self.nodes:
            for value in dict.fromkeys(operands_of(node)):
                producer = value.producer()
                if producer is not None and producer in self.index:
                    self.links.append((producer, node, value))
                    self.sources[node].append(producer)
                    self.targets[producer].append(node)


def _is_constant(node: ir.Node) -> bool:
    """Return whether a node is a mere constant, which is shown in its readers."""
    is_constant = node.op_type == "Constant" and node.domain in ("", "ai.onnx")
    return is_constant and not any(value.is_graph_output() for value in node.outputs)


def _choose_boxes(context: DrawingContext, wiring: _Wiring) -> list[tuple[ir.Node, ...]]:
    """Choose the boxes: of one node each, or of many nodes of one phase, in graph order.

    A graph of up to 300 nodes is drawn whole. Of a larger one: what the loss scaling put in, or would touch, with its
    neighbours, as far around as there is room for; the rest in sections of the forward and the backward pass and in
    pieces of the optimizer. In a huge one the inserted nodes are folded, too, by their passes, but for those of a few
    gradients that stand for all.
    """
    if len(wiring.nodes) <= _WHOLE:
        return [(node,) for node in wiring.nodes]
    folding = _Folding(context, wiring)
    marked = {*context.passes, *_landmarks(context), *context.missed, *producers_of(context.unscalings)}
    centre = marked.intersection(wiring.index)
    boxes: list[tuple[ir.Node, ...]] = []
    samples = {node for node in folding.samples if node in context.passes}
    for around in (*(_around(wiring, centre, hops) for hops in _HOPS), _landmarks(context) | samples):
        # An optimizer is the same for every weight: each has one box.
        kept = {node for node in around if node in centre or context.phases[node] is not Phase.UPDATE}
        boxes = folding.fold(kept)
        if len(boxes) <= _LIMIT:
            break
    return boxes


def _landmarks(context: DrawingContext) -> set[ir.Node]:
    """Return the loss and the places where the scale enters: shown in any case."""
    values = [context.loss, *(place.value for place in context.places if place.edge is None)]
    found = producers_of(value for value in values if value is not None)
    found |= {place.edge.node for place in context.places if place.edge is not None}
    return found | {node for node, mark in context.passes.items() if mark in (ScaleLoss.name, UpdateLossScale.name)}


def _around(wiring: _Wiring, centre: Iterable[ir.Node], hops: int) -> set[ir.Node]:
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

    def __init__(self, context: DrawingContext, wiring: _Wiring) -> None:
        self.context = context
        self.wiring = wiring
        self.sections = _sections(context, wiring)
        readers = Counter(value for _, _, value in wiring.links)
        self.ties = [(s, t) for s, t, value in wiring.links if max(readers[value], len(wiring.sources[t])) <= _SHARED]
        self.samples = self._samples()

    def _samples(self) -> dict[ir.Node, int]:
        """Choose the nodes of the update of some gradients, evenly, with the number of the gradient."""
        after: dict[ir.Node, list[ir.Node]] = defaultdict(list)
        for source, target in self.ties:
            after[source].append(target)
        starts = [node for node, mark in self.context.passes.items() if mark == UnscaleGradients.name and node in after]

        def updates(nodes: Iterable[ir.Node]) -> list[ir.Node]:
            return [node for node in nodes if self.context.phases[node] is Phase.UPDATE]

        found: dict[ir.Node, int] = {}
        for n in range(min(_SAMPLES, len(starts))):
            start = starts[n * len(starts) // _SAMPLES]
            for node in reach(updates([start]), lambda node: updates(after[node])):
                found.setdefault(node, n)
        return found

    def fold(self, kept: set[ir.Node]) -> list[tuple[ir.Node, ...]]:
        context, nodes = self.context, self.wiring.nodes
        kinds = {node: (context.phases[node], context.passes.get(node), self.sections[node]) for node in nodes}
        near: dict[ir.Node, list[ir.Node]] = defaultdict(list)
        for source, target in self.ties:
            if source not in kept and target not in kept and kinds[source] == kinds[target]:
                near[source].append(target)
                near[target].append(source)
        firsts: dict[ir.Node, ir.Node] = {}
        for first in nodes:
            if first not in firsts:
                firsts |= dict.fromkeys(reach([first], near.__getitem__), first)
        keys: Mapping[ir.Node, object] = firsts
        if len(set(firsts.values())) > _LIMIT:
            # Too many still: all pieces of one kind become one.
            merged = {first: (*kinds[first], self.samples.get(first)) for first in firsts.values() if first not in kept}
            keys = {node: merged.get(first, first) for node, first in firsts.items()}
        pieces: dict[object, list[ir.Node]] = defaultdict(list)
        for node in nodes:
            pieces[keys[node]].append(node)
        return [tuple(piece) for piece in pieces.values()]


def _sections(context: DrawingContext, wiring: _Wiring) -> dict[ir.Node, int]:
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
