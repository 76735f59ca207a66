"""The two pages: one model, and the differences between two."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

from graphscale.analysis.hints import NO_HINTS, Hints
from graphscale.analysis.report import Report, describe_policy
from graphscale.checks.diffing.compare import Comparison
from graphscale.checks.diffing.diff_report import Change, DiffReport, Entry, NodeEntry, Rewiring, ValueEntry
from graphscale.checks.drawing.drawing_context import make_context
from graphscale.checks.drawing.fitting import fit
from graphscale.checks.drawing.page import Cell, Jump, Table, render
from graphscale.checks.drawing.scene import Scene
from graphscale.collector import paused_collector
from graphscale.files import writing
from graphscale.graph.values import node_name
from graphscale.pipeline import Model, open_copy
from graphscale.process.stages import report_stage

__all__ = ["draw_comparison", "draw_inspection", "write_page"]

_LONGEST = 160


@paused_collector()
def draw_inspection(model: Model, report: Report, title: str, hints: Hints = NO_HINTS, *, whole: bool = False) -> str:
    """Draw the page of one model, as HTML.

    Args:
        model: a path, an onnx_ir model or a ModelProto.
        report: the result of `graphscale.inspect`, with the same hints.
        title: the name of the model.
        hints: names that the user gives.
        whole: draw each node, also where that does not fit a window.

    Raises:
        GraphscaleError: as for `graphscale.inspect`.
    """
    work, name = open_copy(model)
    report_stage("drawing the graph")
    context = make_context(work, name, hints=hints)
    layout = fit(context, whole=whole)
    scene = layout.scene
    notes = [*_notes(scene), *report.warnings]
    policy = "without a loss scale" if report.policy is None else f"with a {report.policy['class_name']}"
    lead = f"Training graph {policy}" + (f", for target {report.target}" if report.target else "")
    return render(layout, title, lead, _report_tables(scene, report), notes)


@paused_collector()
def draw_comparison(comparison: Comparison, before: str, after: str, *, whole: bool = False) -> str:
    """Draw the page of two models' differences, as HTML: the second one is drawn. This may change the second model.

    Args:
        comparison: the two models.
        before: the name of the first.
        after: the name of the second.
        whole: draw each node, also where that does not fit a window.
    """
    report = comparison.report
    context = make_context(comparison.after, after, added=comparison.added, strict=False)
    layout = fit(context, whole=whole)
    scene = layout.scene
    notes = list(_notes(scene))
    if not report.related:
        notes.insert(0, describe_unrelated(report.matched, report.nodes_before, report.nodes_after))
    return render(layout, after, f"What changed from {before}", _diff_tables(scene, report), notes)


def describe_unrelated(matched: int, before: int, after: int) -> str:
    """Return a sentence on two models that have less than half in common."""
    return f"the models have little to do with each other: {matched} nodes are in both, of {before} and {after}"


def _notes(scene: Scene) -> Iterator[str]:
    if scene.context.note is not None:
        yield f"Drawn without phases and degrees, since this is no training graph to the analysis: {scene.context.note}"
    drawn = sum(len(box.nodes) == 1 for box in scene.boxes)
    if drawn < len(scene.box_of):
        folded = sum(len(box.nodes) > 1 for box in scene.boxes)
        yield (
            f"To fit a window, {drawn} of {len(scene.box_of)} nodes are drawn one by one; the others are folded into "
            f"{folded} boxes. With --whole each node is drawn."
        )


def write_page(page: str, path: str | os.PathLike[str]) -> None:
    """Write a page atomically.

    Raises:
        OutputError: it cannot be written.
    """
    with writing.write_file(path) as temporary:
        temporary.write_text(page, encoding="utf-8")


# --- the tables beside a drawing -------------------------------------------------------------------------------------


class _Finder:
    """Finds the box of a node or of a value by its name."""

    def __init__(self, scene: Scene) -> None:
        self._nodes: dict[str, int] = {}
        self._values: dict[str, int] = {}
        for node, box in scene.box_of.items():
            self._nodes.setdefault(node_name(node), box)
            self._values.update((value.name, box) for value in node.outputs if value.name)
        graph = scene.context.step.graph
        constants = {value.name for value in (*graph.inputs, *graph.initializers.values()) if value.name}
        # An input or a constant has no box: its first reader is shown.
        for node, box in scene.box_of.items():
            for value in node.inputs:
                if value is not None and value.name in constants:
                    self._values.setdefault(value.name, box)

    def node(self, name: str) -> Cell:
        return Jump(name, self._nodes[name]) if name in self._nodes else name

    def value(self, name: str) -> Cell:
        return Jump(name, self._values[name]) if name in self._values else name


def _report_tables(scene: Scene, report: Report) -> Iterator[Table]:
    """Yield the report of an analysis or of a scaling."""
    find = _Finder(scene)
    rows: list[tuple[Cell, ...]] = [("loss", find.value(report.loss)), ("found as", report.loss_found)]
    for place in report.places:
        where = find.value(place.value) if place.node is None else find.node(place.node)
        rows.append(("scale enters at", where))
        if place.node is not None:
            rows.append(("", f"input {place.input}, which reads {place.value}"))
    rows += [("coverage", report.coverage_text), ("gradients", str(len(report.gradients)))]
    rows += [("carried state", str(len(report.state)))]
    if report.policy is not None:
        name, _, config = describe_policy(report.policy).partition("(")
        rows += [("loss scale", name), ("", config.removesuffix(")")), ("target", str(report.target))]
        rows.append(("nodes", f"{report.nodes_before} before, {report.nodes_after} after"))
        rows.append(("proof", "every output and carried state is free of the scale" if report.proved else "none"))
    else:
        rows.append(("nodes", str(report.nodes_after)))
    rows += [("renamed", f"{wanted} was taken: {given}") for wanted, given in report.renamed.items()]
    yield Table("Report", rows, is_open=True)
    missed = [(find.node(name),) for name in report.missed]
    yield Table("Not reached by the loss scale", missed, ("node",), is_open=True)
    gradients = [(find.value(g.value), g.type) for g in report.gradients]
    yield Table("Gradients", gradients, ("value", "type"), is_open=len(gradients) <= 8)
    states = [(find.value(s.input), find.value(s.output) if s.output else "in place", s.how) for s in report.state]
    yield Table("Carried state", states, ("input", "next value", "how it was found"))
    passes: dict[str, list[tuple[Cell, ...]]] = {}
    for node, mark in scene.context.passes.items():
        if node in scene.box_of:
            passes.setdefault(mark, []).append((node.op_type, Jump(node_name(node), scene.box_of[node])))
    for mark, rows in passes.items():
        yield Table(f"Inserted by {mark}" if mark != "added" else "Added", rows, ("operator", "node"))


def _diff_tables(scene: Scene, report: DiffReport) -> Iterator[Table]:
    """Yield the differences between two models."""
    find = _Finder(scene)
    new = sum(map(len, report.inserted.values())) + len(report.added)
    rows: list[tuple[Cell, ...]] = [
        ("nodes", f"{report.nodes_before} before, {report.nodes_after} after"),
        ("in both", str(report.matched)),
        ("new", str(new)),
        ("removed", str(len(report.removed))),
        ("edges rewired", str(len(report.rewired))),
        ("values renamed", str(len(report.renamed))),
    ]
    yield Table("Summary", rows, is_open=True)
    ops = [(op.op, op.before, op.after, f"{op.difference:+d}") for op in report.ops if op.difference]
    yield Table("Operators that changed in number", ops, ("operator", "before", "after", "change"), is_open=True)
    inserted = ((f"Inserted by {mark}", "operator", entries) for mark, entries in report.inserted.items())
    for title, column, entries in (*inserted, *report.sections()):
        found = [_cells(find, title, entry) for entry in entries]
        head = (column, *_HEADS.get(type(entries[0]), ())) if entries else ()
        if head[-1:] == ("in",) and not any(row[-1] for row in found):
            found, head = [row[:-1] for row in found], head[:-1]
        yield Table(title, found, head)


_HEADS: dict[type[object], tuple[str, ...]] = {
    NodeEntry: ("node", "in"),
    Rewiring: ("input", "before", "after"),
    Change: ("before", "after"),
    ValueEntry: ("type",),
}


def _cells(find: _Finder, title: str, entry: Entry) -> Sequence[Cell]:
    match entry:
        case NodeEntry():
            is_drawn = title != "Removed" and not entry.scope
            return entry.op, find.node(entry.name) if is_drawn else entry.name, entry.scope
        case Rewiring(input=None):
            return find.value(entry.reader), "output", entry.before, find.node(entry.after)
        case Rewiring():
            return find.node(entry.reader), entry.input or 0, entry.before, find.value(entry.after)
        case ValueEntry():
            return find.value(entry.name), entry.type
        case Change():
            name = find.node(entry.name) if title == "Values renamed" else entry.name
            return name, _short(entry.before), _short(entry.after)
    return (entry,)


def _short(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"
