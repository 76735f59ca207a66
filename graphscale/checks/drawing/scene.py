# ruff: noqa: RUF001  (signs in the drawing)
"""The contents of a drawing, without positions: boxes, of many nodes each in a large graph, and links between them."""

from __future__ import annotations

import dataclasses
import heapq
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

import onnx_ir as ir

from graphscale.analysis.edits import Place
from graphscale.checks.diffing.texts import tensor_text
from graphscale.checks.drawing.drawing_context import DrawingContext, Phase
from graphscale.checks.drawing.wiring import Wiring
from graphscale.flow.degree import ZERO, Degree
from graphscale.graph.values import constant_tensor, inputs_of

__all__ = ["BADGES", "Box", "Link", "Scene", "make_scene"]

# The sign of each badge, its text in the legend, and in the facts about a box.
BADGES = {
    "enters": ("×S", "the scale would enter", "the loss scale enters here"),
    "leaves": ("÷S", "a gradient: it would come out", "a gradient leaves here: the loss scale would come out"),
    "missed": ("!", "not reached by the scale", "a backward contraction that the loss scale would not reach"),
    "loss": ("loss", "the loss", "the loss"),
}


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
        badges: further marks: "enters", "leaves", "loss", "missed".
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


def make_scene(context: DrawingContext, wiring: Wiring, folded: Sequence[tuple[ir.Node, ...]]) -> Scene:
    """Make the boxes of a drawing, of the nodes that each is given, and link them."""
    boxes = [_box(context, wiring, nodes) for nodes in folded]
    box_of = {node: i for i, nodes in enumerate(folded) for node in nodes}
    degrees: dict[tuple[int, int], list[Degree]] = {}
    for source, target, value in wiring.links:
        ends = box_of[source], box_of[target]
        if ends[0] != ends[1]:
            degrees.setdefault(ends, []).append(context.degree_read(value, target))
    is_whole = len(folded) == len(wiring.nodes)
    for i, value in enumerate(context.step.graph.outputs):
        producer = value.producer()
        if producer is None or producer not in box_of:
            continue
        giver = box_of[producer]
        if is_whole or value is context.step.loss:
            degrees[giver, len(boxes)] = [context.degree_read(value, None)]
            boxes.append(_output(context, value, boxes[giver], len(wiring.nodes) + i))
        elif len(boxes[giver].nodes) == 1:
            # To keep a large drawing small, only the box has the names of its results.
            count = sum(output.is_graph_output() for output in producer.outputs)
            text = f"→ {value.name}" if count == 1 else f"→ {count} outputs"
            boxes[giver] = dataclasses.replace(boxes[giver], subtitle=text)
    for box, place in _orders(boxes, degrees.keys()).items():
        boxes[box] = dataclasses.replace(boxes[box], order=place)
    links = tuple(Link(*ends, ZERO if ZERO in found else max(d or 0 for d in found)) for ends, found in degrees.items())
    return Scene(context, tuple(boxes), links, box_of)


def _orders(boxes: Sequence[Box], ends: Iterable[tuple[int, int]]) -> dict[int, int]:
    """Return the place of each box in an order that the links follow, as far as folding leaves one."""
    sources, targets = defaultdict[int, list[int]](list), defaultdict[int, list[int]](list)
    for source, target in ends:
        sources[target].append(source)
        targets[source].append(target)
    waiting = {i: len(sources[i]) for i in range(len(boxes))}
    ready = [(boxes[i].order, i) for i, count in waiting.items() if not count]
    heapq.heapify(ready)
    orders: dict[int, int] = {}
    while len(orders) < len(boxes):
        if not ready:  # boxes read each other: the one nearest to the front goes first
            ready = [min((boxes[i].order, i) for i in waiting if i not in orders)]
        _, box = heapq.heappop(ready)
        if box in orders:
            continue
        orders[box] = len(orders)
        for target in targets[box]:
            waiting[target] -= 1
            if not waiting[target]:
                heapq.heappush(ready, (boxes[target].order, target))
    return orders


def _box(context: DrawingContext, wiring: Wiring, nodes: tuple[ir.Node, ...]) -> Box:
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
    badges = ("loss",) if value is context.step.loss else ()
    # A gradient that leaves the graph is part of the flow beside the backward pass.
    phase = Phase.UPDATE if source.phase is Phase.BACKWARD else source.phase
    return Box((), value, phase, source.mark, order, value.name or "?", "", False, badges)


def _badges(context: DrawingContext, nodes: tuple[ir.Node, ...]) -> tuple[str, ...]:
    outputs = {value for node in nodes for value in node.outputs}
    members = set(nodes)
    found = {
        "enters": any(_enters(place, members, outputs) for place in context.step.places),
        "leaves": not outputs.isdisjoint(context.unscalings),
        "missed": not members.isdisjoint(context.step.coverage.missed),
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
