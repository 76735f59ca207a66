"""The states that optimizers, accumulators and batch normalization write in place, as outputs of the graph.

The standard form returns the next value of such a state, which becomes an output of the graph.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import onnx_ir as ir

from graphscale.analysis.roles.answers import NO_ANSWERS, Answers
from graphscale.graph.builder import Editor
from graphscale.graph.stamp import ROLES_KEY
from graphscale.graph.values import is_source
from graphscale.operators import MICROSOFT, attribute
from graphscale.passes.lower_training_ops.writer import Writer

__all__ = ["check_states", "expose_states", "find_flags", "scalar", "stated_roles"]

# By operator, the inputs that its kernel writes, each with the output for the next value.
_WRITTEN: Mapping[str, Mapping[int, int]] = {
    "AdamOptimizer": {1: 0, 2: 3, 4: 1, 5: 2},
    "AdamWOptimizer": {2: 1, 4: 2, 5: 3},
    "BatchNormInternal": {3: 1, 4: 2},
    "InPlaceAccumulator": {0: 0},
    "InPlaceAccumulatorV2": {0: 1},
    "SGDOptimizer": {1: 0},
    "SGDOptimizerV2": {1: 1},
}
# By operator, the outputs that report whether the node has updated its states.
_FLAGS: Mapping[str, tuple[int, ...]] = {"AdamWOptimizer": (0,), "InPlaceAccumulatorV2": (0,), "SGDOptimizerV2": (0,)}
# Kernels that do not write without an output for the next value.
_OPTIONAL = frozenset(("AdamOptimizer", "SGDOptimizer"))


def expose_states(editor: Editor, node: ir.Node) -> dict[str, str]:
    """Add the next values of the states that a node writes to the outputs of the graph.

    A state that is only an initializer becomes an input, too.

    Returns:
        `{output: input}`.
    """
    found: dict[str, str] = {}
    for state, result in _states(node):
        node.resize_outputs(max(len(node.outputs), result + 1))
        output = node.outputs[result]
        if not output.name:
            output.name = editor.unique(f"{state.name}.next")
            output.type, output.shape = state.type, state.shape
        if not output.is_graph_output():
            editor.output(output, f"{state.name}.next")
        if not state.is_graph_input():
            editor.graph.inputs.append(state)
        found[output.name or ""] = state.name or ""
    return found


def check_states(f: Writer) -> None:
    """Refuse a state of the graph that a node in a body writes: only the main graph has outputs for it."""
    for state, _ in _states(f.node):
        if f.node.graph is not f.build.editor.graph:
            raise f.refusal(f"it writes {state.name!r} in place, in the body of another node")


def find_flags(node: ir.Node) -> list[str]:
    """Return the outputs of the graph that report whether a node has updated its states."""
    flags = (node.outputs[i] for i in _FLAGS.get(node.op_type, ()) if node.domain == MICROSOFT)
    return [flag.name or "" for flag in flags if flag.is_graph_output()]


def stated_roles(text: str | None, states: Mapping[str, str], metrics: Sequence[str]) -> str:
    """Return the stated roles of a model, in the form of its metadata, with these states and metrics added."""
    answers = (NO_ANSWERS if text is None else Answers.parse(text, ROLES_KEY)).merge(states=states)
    others = (name for name in metrics if name not in answers.outputs)
    return dataclasses.replace(answers, metrics=(*answers.metrics, *others)).to_json()


def _states(node: ir.Node) -> list[tuple[ir.Value, int]]:
    """Return the states of the graph that a node writes, each with the output for its next value."""
    if node.domain != MICROSOFT or not attribute(node, "training_mode", 1):
        return []
    found = []
    for index, result in _WRITTEN.get(node.op_type, {}).items():
        state = node.inputs[index] if index < len(node.inputs) else None
        is_given = result < len(node.outputs) and bool(node.outputs[result].name)
        if state is not None and is_source(state) and (is_given or node.op_type not in _OPTIONAL):
            found.append((state, result))
    return found


def scalar(f: Writer, value: ir.Value) -> ir.Value:
    """Return a value of one element as a scalar."""
    return value if f.shape(value) == () else f.reshape(value, ())
