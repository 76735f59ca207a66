"""Damage to the models of a folder or of a split step."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import numpy_helper

import graphscale as gs
from tests.conftest import MODELS

FOLDERS = MODELS / "ort" / "artifacts"
SOURCE = FOLDERS / "digits_adamw"
TRAINING, EVAL, OPTIMIZER = "training_model.onnx", "eval_model.onnx", "optimizer_model.onnx"
STRANGER = "is neither the original's nor an inserted piece"

Edit = Callable[[onnx.ModelProto], object]


def faults_of(subject: str, original: Path, scaled: Path | tuple[Path, ...]) -> str:
    """Return the checks that do not hold, in words; empty if the folder, or the halves, are verified."""
    report = gs.verify(original, scaled)
    found = [check for check in report.checks if check.status not in ("holds", "skipped")]
    assert report.ok == (not found) and (report.verdict == f"verified ({subject})") == (not found)
    assert report.runs == 0 and "no model was run" in report.notes[0]
    return "; ".join(f"{check.name} {check.status}: {check.detail}" for check in found)


def faults(folder: Path, source: Path = SOURCE) -> str:
    """Return what is wrong with a scaled folder."""
    return faults_of("folder", source, folder)


def edit(path: Path, change: Edit) -> None:
    model = onnx.load(path)
    change(model)
    onnx.save(model, path)


def node(model: onnx.ModelProto, op_type: str, index: int = 0) -> onnx.NodeProto:
    return [node for node in model.graph.node if node.op_type == op_type][index]


def constant(name: str, value: Any) -> Edit:
    def change(model: onnx.ModelProto) -> None:
        tensor = next(tensor for tensor in model.graph.initializer if tensor.name == name)
        held = numpy_helper.to_array(tensor)
        tensor.CopyFrom(numpy_helper.from_array(np.full(held.shape, value, held.dtype), name))

    return change


def inputs_exchanged(one: int, other: int) -> Edit:
    def change(model: onnx.ModelProto) -> None:
        held = list(model.graph.input)
        held[one], held[other] = held[other], held[one]
        del model.graph.input[:]
        model.graph.input.extend(held)

    return change


def rename_inside(model: onnx.ModelProto) -> None:
    graph = model.graph
    kept = {value.name for value in (*graph.input, *graph.output, *graph.initializer)}
    results = (name for _, node in all_nodes(graph) for name in node.output if name not in kept)
    renamed = {name: f"v{i}" for i, name in enumerate(results)}
    for i, (body, node) in enumerate(all_nodes(graph)):
        node.name = f"n{i}"
        for names in (node.input, node.output):
            found = [renamed.get(name, name) for name in names]
            del names[:]
            names.extend(found)
        for value in body.output if body is not graph else ():
            value.name = renamed.get(value.name, value.name)
        del body.value_info[:]


def all_nodes(graph: onnx.GraphProto) -> list[tuple[onnx.GraphProto, onnx.NodeProto]]:
    """Return the nodes of a graph and of all bodies, each with the graph that holds it."""
    found = [(graph, node) for node in graph.node]
    return found + [pair for node in graph.node for a in node.attribute if a.HasField("g") for pair in all_nodes(a.g)]


def reorder(model: onnx.ModelProto) -> None:
    """Put every node as late as its readers allow."""
    nodes, placed = list(model.graph.node), list[onnx.NodeProto]()
    while nodes:
        read = {name for node in nodes for name in (*node.input, *captured(node))}
        free = next(node for node in nodes if not read.intersection(filter(None, node.output)))
        nodes.remove(free)
        placed.insert(0, free)
    assert [node.name for node in placed] != [node.name for node in model.graph.node]
    del model.graph.node[:]
    model.graph.node.extend(placed)


def captured(node: onnx.NodeProto) -> set[str]:
    """Return the names that the bodies of a node read."""
    bodies = [attribute.g for attribute in node.attribute if attribute.HasField("g")]
    return {name for body in bodies for _, inner in all_nodes(body) for name in inner.input}


def in_metadata(key: str, change: Callable[[Any], object]) -> Edit:
    def apply(model: onnx.ModelProto) -> None:
        entry = next(entry for entry in model.metadata_props if entry.key == f"graphscale.{key}")
        held = json.loads(entry.value)
        change(held)
        entry.value = json.dumps(held)

    return apply


def other_operands(model: onnx.ModelProto) -> Iterator[onnx.ModelProto]:
    """Yield the model with each operand of each node in turn replaced by an input or a result of a node before it."""
    random = np.random.default_rng(0)
    for i, reader in enumerate(model.graph.node):
        before = [value.name for value in model.graph.input]
        before += [name for other in list(model.graph.node)[:i] for name in other.output if name]
        for at, name in enumerate(reader.input):
            changed = onnx.ModelProto()
            changed.CopyFrom(model)
            changed.graph.node[i].input[at] = str(random.choice([other for other in before if other != name]))
            yield changed
