"""Graphs to draw: scaled and unscaled ones of models/, a deep one, and one with hostile names."""

from __future__ import annotations

import functools
import re

import onnx
import onnx_ir as ir

import graphscale as gs
from graphscale.checks.drawing.drawing_context import make_context
from graphscale.checks.drawing.fitting import fit
from graphscale.checks.drawing.lanes import Layout
from graphscale.checks.drawing.scene import Scene
from tests.build import parse, step
from tests.conftest import MODELS

HOSTILE = "</script><img src=x onerror=\"document.title='owned'\"><svg onload=alert(1)>&amp;'`${1}\u2028"


@functools.cache
def scaled_model(name: str) -> ir.Model:
    """A graph of models/, scaled for the target that it is made for."""
    target = "ort-training" if name.startswith("ort/") else "onnx"
    model = gs.scale(MODELS / f"{name}.onnx", target=target).model
    assert isinstance(model, ir.Model)
    return model


def layout_of(name: str, *, scaled: bool, whole: bool = False) -> Layout:
    """Lay out a graph of models/."""
    model = scaled_model(name).clone() if scaled else ir.load(MODELS / f"{name}.onnx")
    return fit(make_context(model, name), whole=whole)


def scene_of(name: str, *, scaled: bool, whole: bool = False) -> Scene:
    """Make the scene of a graph of models/."""
    return layout_of(name, scaled=scaled, whole=whole).scene


def hostile_step() -> onnx.ModelProto:
    """A training step whose nodes, values and attributes have names that would break out of a careless page."""
    model = step()
    for i, node in enumerate(model.graph.node):
        node.name = f"{HOSTILE}{i}"
        node.doc_string = HOSTILE
    renamed = {name: f"{HOSTILE}{name}" for node in model.graph.node for name in node.output}
    for node in model.graph.node:
        for names in (node.input, node.output):
            names[:] = [renamed.get(name, name) for name in names]
    for value in (*model.graph.output, *model.graph.value_info):
        value.name = renamed.get(value.name, value.name)
    model.graph.name = HOSTILE
    return model


def deep_network(layers: int) -> onnx.ModelProto:
    """A tanh network of square layers: mean squared error, backward pass, momentum; 18 nodes a layer."""
    text = " ".join(f"h{i} = MatMul(x{i}, w{i}) x{i + 1} = Tanh(h{i})" for i in range(layers))
    text += f"d = Sub(x{layers}, t) square = Mul(d, d) loss = ReduceMean<keepdims = 0>(square)"
    text += f"dx{layers} = Mul(d, two_over_n)"
    for i in reversed(range(layers)):
        text += f"""
            sq{i} = Mul(x{i + 1}, x{i + 1}) slope{i} = Sub(one, sq{i}) dh{i} = Mul(dx{i + 1}, slope{i})
            xt{i} = Transpose<perm = [1, 0]>(x{i}) dw{i} = MatMul(xt{i}, dh{i})
            wt{i} = Transpose<perm = [1, 0]>(w{i}) dx{i} = MatMul(dh{i}, wt{i})
        """
    for i in range(layers):
        text += f"decayed{i} = Mul(beta, m{i}) m{i}_next = Add(decayed{i}, dw{i})"
        text += f"step{i} = Mul(rate, m{i}_next) w{i}_next = Sub(w{i}, step{i})"
    named = re.sub(r"(\w+) = (?=[A-Z])", r" [n_\1] \1 = ", text)
    states = [f"{state}{i}" for i in range(layers) for state in "wm"]
    model = parse(f"""
        <ir_version: 10, opset_import: ["" : 20]>
        deep ({", ".join(f"float[8,8] {name}" for name in ("x0", "t", *states))})
            => (float loss, {", ".join(f"float[8,8] {name}_next" for name in states)})
            <float two_over_n = {{0.03125}}, float rate = {{0.1}}, float beta = {{0.9}}, float one = {{1}}>
        {{ {named} }}
    """)
    return onnx.shape_inference.infer_shapes(model)
