"""Forms of an exported graph that do not depend on the exporter: names, initializers, missing shapes."""

import importlib
import random
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime

from models.zoo.steps import Style, Truth

Feeds = dict[str, np.ndarray]


def permute(names: list[str], order: str, seed: str) -> list[str]:
    """Return the names in the order of a style."""
    if order == "reversed":
        return names[::-1]
    if order == "shuffled":
        return random.Random(seed).sample(names, len(names))
    return names


def apply(style: Style, model: ir.Model, truth: Truth, feeds: Feeds) -> tuple[Truth, Feeds]:
    """Give the model the style's form; return the truth and the feeds under its final names."""
    if style.states != "inputs":
        embed(model, {name: feeds[name] for name in truth.states.values()}, keep=style.states == "overridable")
    if style.embedded_constants:
        embed(model, {name: feeds[name] for name in truth.constants}, keep=False)
        truth = replace(truth, constants=[])
    if style.names == "scrambled":
        names = scramble(model)
        truth = truth.renamed(names)
        feeds = {names[name]: value for name, value in feeds.items()}
    elif style.names == "numbered" or "{}" in style.names:
        names = rename_interface(model, truth, style.names)
        truth = truth.renamed(names)
        feeds = {names[name]: value for name, value in feeds.items()}
    if style.shapes != "all":
        forget_shapes(model, outputs=style.shapes == "inputs")
    return truth, feeds


def embed(model: ir.Model, states: Feeds, *, keep: bool) -> None:
    """Make initializers of inputs, which remain inputs if asked for.

    Not left to an exporter: one that takes states for constants merges those that are equal, and folds zeros.
    """
    graph = model.graph
    for value in list(graph.inputs):
        if value.name in states:
            value.const_value = ir.tensor(states[value.name], name=value.name)
            if not keep:
                graph.inputs.remove(value)
            graph.initializers.add(value)


def simplify(model: ir.Model) -> ir.Model:
    """Return the model after onnxsim's optimizations; raise a ValueError if it computes other numbers."""
    simplified, agrees = importlib.import_module("onnxsim").simplify(ir.to_proto(model))
    if not agrees:
        raise ValueError("the model computes other numbers after onnxsim")
    return ir.from_proto(simplified)


def optimize_by_runtime(model: ir.Model, level: str) -> ir.Model:
    """Return the model as ONNX Runtime writes it after its optimizations of that level."""
    with tempfile.TemporaryDirectory() as folder:
        before, after = Path(folder, "before.onnx"), Path(folder, "after.onnx")
        ir.save(model, before)
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 4
        options.graph_optimization_level = getattr(onnxruntime.GraphOptimizationLevel, f"ORT_ENABLE_{level.upper()}")
        options.optimized_model_filepath = str(after)
        onnxruntime.InferenceSession(before, options, providers=["CPUExecutionProvider"])
        return ir.serde.deserialize_model(onnx.load(after))


def scramble(model: ir.Model) -> dict[str, str]:
    """Rename all values and nodes to numbers in a random order; return the new names of the interface."""
    graph = model.graph
    values = {value.name: value for value in [*graph.inputs, *graph.initializers.values()]}
    for node in graph.all_nodes():
        values |= {value.name: value for value in node.outputs if value.name}
    numbers = random.Random(len(values)).sample(range(len(values)), len(values))
    names = {name: f"t{number}" for name, number in zip(values, numbers, strict=True)}
    initializers = list(graph.initializers.values())
    graph.initializers.clear()
    for name, value in values.items():
        value.name = names[name]
        if value.const_value is not None:
            value.const_value.name = value.name
    for value in initializers:
        graph.initializers[value.name] = value
    for number, node in enumerate(graph.all_nodes()):
        node.name = f"n{number}"
    return names


def rename_interface(model: ir.Model, truth: Truth, names: str) -> dict[str, str]:
    """Number the inputs and outputs, or name each next value by a pattern; return all names of the interface."""
    graph = model.graph
    new = {value.name: value.name for value in [*graph.inputs, *graph.outputs, *graph.initializers.values()]}
    if names == "numbered":
        new |= {value.name: f"in_{index}" for index, value in enumerate(graph.inputs)}
        new |= {value.name: f"out_{index}" for index, value in enumerate(graph.outputs)}
    else:
        new |= {output: names.format(state) for output, state in truth.states.items()}
    inner = {value.name for node in graph.all_nodes() for value in node.outputs if not value.is_graph_output()}
    if inner & set(new.values()) or len(set(new.values())) < len(new):
        raise ValueError(f"names of the style {names} are taken")
    for value in [*graph.inputs, *graph.outputs]:
        value.name = new[value.name]
    return new


def separate_outputs(graph: ir.Graph) -> None:
    """Put an Identity before each output that is an input or another output: exporters give them one value."""
    seen: set[int] = set()
    for index, value in enumerate(graph.outputs):
        if value.is_graph_input() or value.is_initializer() or id(value) in seen:
            copy = ir.node("Identity", [value])
            copy.outputs[0].name = f"out_{index}"
            copy.outputs[0].type, copy.outputs[0].shape = value.type, value.shape
            graph.append(copy)
            graph.outputs[index] = copy.outputs[0]
        seen.add(id(value))


def name_interface(graph: ir.Graph, inputs: list[str], outputs: list[str]) -> None:
    """Name the inputs and outputs, not left to exporters: some refuse states that are handed through."""
    wanted = {id(value): name for value, name in zip([*graph.inputs, *graph.outputs], [*inputs, *outputs], strict=True)}
    taken = set(wanted.values())
    values = {id(value): value for value in [*graph.inputs, *graph.initializers.values()]}
    values |= {id(value): value for node in graph.all_nodes() for value in node.outputs}
    initializers = list(graph.initializers.values())
    graph.initializers.clear()
    for identity, value in values.items():
        value.name = wanted.get(identity) or (f"{value.name}_inner" if value.name in taken else value.name)
    for value in initializers:
        graph.initializers[value.name] = value


def forget_shapes(model: ir.Model, *, outputs: bool) -> None:
    """Forget the shapes and types of inner values, and the shapes of the outputs if asked for."""
    for node in model.graph.all_nodes():
        for value in node.outputs:
            if not value.is_graph_output():
                value.shape = value.type = None
            elif outputs:
                value.shape = None
