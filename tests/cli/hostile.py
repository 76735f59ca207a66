"""A training step with names and texts hostile to a terminal, and further files for commands."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import onnx

import graphscale as gs
from tests.cli.bad_graphs import sgd
from tests.conftest import MODELS

# A title for the window, a carriage return, line breaks of all kinds, C1, text from right to left, invisible
# characters, a tag, a selector, markup and an emoji of rich, mathematics of matplotlib.
HOSTILE = (
    "\x1b]0;owned\x07\x1b[2J\r\n\x08\x7f\x9b31m\x85\u202e\u2066\u2069\u200e\u200f\u061c\u2028\u2029\u200b\u2060\ufeff"
    "\U000e0041\ufe0f\u3164[red][/][link=x:y]:boom:$x^{<b>&\"'"
)
# As part of a path: with a byte that is no UTF-8.
FILE = HOSTILE.replace("[/]", "") + "\udcff"
ARTIFACTS = MODELS / "ort" / "artifacts" / "digits_sgd"


def make_hostile_step() -> onnx.ModelProto:
    """A step with SGD whose values, nodes, axes, domains and texts are all hostile."""
    model = sgd()
    graph = model.graph

    def rename(name: str) -> str:
        return name and HOSTILE + name

    for value in (*graph.input, *graph.output, *graph.value_info):
        value.name, value.doc_string = rename(value.name), HOSTILE
        for dim in value.type.tensor_type.shape.dim:
            if dim.dim_value == 8:
                dim.dim_param = HOSTILE
    for tensor in graph.initializer:
        tensor.name, tensor.doc_string = rename(tensor.name), HOSTILE
    for index, node in enumerate(graph.node):
        node.name, node.doc_string = f"{HOSTILE}{index}", HOSTILE
        for names in (node.input, node.output):
            names[:] = [rename(name) for name in names]
    graph.name, graph.doc_string = HOSTILE, HOSTILE
    model.producer_name = model.producer_version = model.domain = model.doc_string = HOSTILE
    model.metadata_props.add(key=HOSTILE, value=HOSTILE)
    model.opset_import.add(domain=HOSTILE, version=1)
    return model


def make_unknown_operator() -> onnx.ModelProto:
    """The same with an operator, of a domain, that nothing knows."""
    model = make_hostile_step()
    node = model.graph.node[4]
    node.domain, node.op_type = HOSTILE, HOSTILE
    return model


def fill(folder: Path) -> None:
    """Write the step, the scaled step, first weights, data, metrics and artifacts into a folder."""
    model = make_hostile_step()
    model_file = folder / f"{FILE}model.onnx"
    model_file.write_bytes(model.SerializeToString())
    gs.scale(model).save(folder / f"{FILE}scaled.onnx")
    gs.autocast(model).save(folder / f"{FILE}cast.onnx")
    (folder / f"{FILE}unknown.onnx").write_bytes(make_unknown_operator().SerializeToString())
    (folder / f"{FILE}broken.onnx").write_bytes(model.SerializeToString()[:900])
    random = np.random.default_rng(0)
    shapes = {"x": (64, 4), "t": (64, 3), "w1": (4, 5), "w2": (5, 3)}
    arrays = {HOSTILE + name: random.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    for name, keys in (("data", "xt"), ("state", ("w1", "w2"))):
        np.savez(folder / f"{FILE}{name}.npz", **{HOSTILE + key: arrays[HOSTILE + key] for key in keys})
    row = '{"step": 1, "epoch": 1, "loss": 1.0, "loss_scale": 2.0, "next_loss_scale": 2.0, "applied": true, '
    row += f'"good_steps": 0, {json.dumps(HOSTILE)}: 1.0}}\n'
    (folder / f"{FILE}run.jsonl").write_text(row + row)
    shutil.copytree(ARTIFACTS, folder / f"{FILE}artifacts")
