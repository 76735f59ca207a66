"""The values that a user names: a loss, a gradient, the edge where the scale enters, pairs of carried state."""

from __future__ import annotations

from collections.abc import Mapping

import onnx_ir as ir

from graphscale.analysis.loss import is_number
from graphscale.analysis.roles.answers import Answers
from graphscale.analysis.updates import Update, same_type
from graphscale.errors import GradientError, LossError, SeedNotFoundError, UpdateError, suggest
from graphscale.graph.values import Use, is_float, value_label

__all__ = ["resolve_gradient", "resolve_loss", "resolve_pairs", "resolve_seed"]


def resolve_loss(values: Mapping[str, ir.Value], name: str, label: str) -> ir.Value:
    """Return the named loss.

    Args:
        values: the values of the graph by name.
        name: the name of the loss.
        label: its origin, for messages.

    Raises:
        LossError: the value does not exist, is no scalar in a graph that returns one, or not floating point.
    """
    value = values.get(name)
    if value is None:
        raise LossError(f"{label}: the graph has no value of this name{suggest(name, values)}")
    if value.producer() is None:
        raise LossError(f"{label}: {value_label(value)} is an input; name a value that the graph computes")
    if value.dtype is not None and not value.dtype.is_floating_point():
        raise LossError(f"{label}: {value_label(value)} is not floating point, and a loss must be")
    # A step without a number among its outputs may return the losses of samples.
    if not is_number(value) and any(map(is_number, filter(ir.Value.is_graph_output, values.values()))):
        raise LossError(f"{label}: {value_label(value)} is not known to be a scalar; name the mean or sum of it")
    return value


def resolve_gradient(values: Mapping[str, ir.Value], name: str) -> ir.Value:
    """Return the named gradient.

    Raises:
        GradientError: the value does not exist, or is not computed by a floating-point node.
    """
    if name not in values:
        raise GradientError(f"--gradient {name}: the graph has no value of this name{suggest(name, values)}")
    if values[name].producer() is None or not is_float(values[name]):
        raise GradientError(f"--gradient {name}: {value_label(values[name])} is not computed by a floating-point node")
    return values[name]


def resolve_seed(graph: ir.Graph, seed: str) -> Use:
    """Return the edge where the scale enters, named `NODE:INDEX`.

    Raises:
        SeedNotFoundError: the name has another form, or the edge does not exist, or is not floating point.
    """
    name, _, index = seed.rpartition(":")
    if not (name and index.isascii() and index.isdecimal()):
        raise SeedNotFoundError(
            f"--seed-edge {seed}: expected NODE:INDEX, the name of a node and the index of its input"
        )
    node = next((node for node in graph if node.name == name), None)
    if node is None:
        names = [node.name for node in graph if node.name]
        hint = suggest(name, names, "there are") if names else "; the nodes of this graph have no names"
        raise SeedNotFoundError(f"--seed-edge {seed}: there is no node {name!r}{hint}")
    if int(index) >= len(node.inputs):
        raise SeedNotFoundError(f"--seed-edge {seed}: the node {name!r} has {len(node.inputs)} inputs, counted from 0")
    value = node.inputs[int(index)]
    if value is None or not is_float(value):
        raise SeedNotFoundError(f"--seed-edge {seed}: that input is not a floating-point value")
    return Use(node, int(index))


def resolve_pairs(graph: ir.Graph, answers: Answers) -> list[Update]:
    """Return the pairs of carried state that a user or the model names.

    Raises:
        UpdateError: a name does not exist, or shapes or dtypes differ, or an input is named twice.
    """
    outputs = {value.name: value for value in graph.outputs}
    inputs = {value.name: value for value in (*graph.inputs, *graph.initializers.values())}
    pairs: list[Update] = []
    for output_name, input_name in answers.states.items():
        label = answers.label(output_name, "--update") + f"={input_name}"
        for kind, name, known in (("output", output_name, outputs), ("input", input_name, inputs)):
            if name not in known:
                raise UpdateError(f"{label}: the graph has no {kind} {name!r}{suggest(name, known, 'there are')}")
        update = Update(outputs[output_name], inputs[input_name], answers.evidence(output_name))
        if not same_type(update.output, update.input):
            raise UpdateError(
                f"{label}: {value_label(update.output)} cannot be the next value of {value_label(update.input)}: "
                "dtypes and shapes must be the same"
            )
        if any(other.input is update.input for other in pairs):
            raise UpdateError(f"{label}: {input_name!r} is named for two outputs")
        pairs.append(update)
    return pairs
