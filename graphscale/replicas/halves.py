"""Taking parts of a step out of it: models that have some of its nodes, and read from each other what they lack."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import ShapeInferencePass

from graphscale.errors import SplitError, UnsupportedModelError
from graphscale.graph.builder import Editor, behind, replace_reads
from graphscale.graph.types import dtypes_of
from graphscale.graph.values import operands_of, subgraphs, uses_of, values_by_name
from graphscale.replicas.buckets import Gradient

__all__ = ["MARK", "REPLICAS_FINITE", "add_common_decision", "extract", "gradients_of", "know_types"]

# The mark of the nodes that splitting inserts.
MARK = "split"
# The input of the second half that says whether the gradients of all replicas are finite.
REPLICAS_FINITE = "replicas_finite"


def know_types(model: ir.Model, names: Collection[str]) -> None:
    """Give values the dtype and shape that they have, where the model does not say.

    Raises:
        UnsupportedModelError: the dtype of one of them cannot be told.
    """
    values = values_by_name(model.graph)
    if all(values[name].dtype is not None and values[name].shape is not None for name in names):
        return
    inferred = model.clone()
    ShapeInferencePass(check_type=False, strict_mode=False)(inferred)
    found = values_by_name(inferred.graph)
    dtypes = {value.name: dtype for value, dtype in dtypes_of(inferred.graph.all_nodes()).items()}
    for name in names:
        value = values[name]
        dtype = value.dtype or found[name].dtype or dtypes.get(name)
        if dtype is None:
            raise UnsupportedModelError(f"the dtype of value {name!r} is not known; run shape inference on the model")
        value.dtype = dtype
        value.shape = value.shape if value.shape is not None else found[name].shape


def gradients_of(model: ir.Model, names: Iterable[str]) -> list[Gradient]:
    """Return the gradients of these names.

    Raises:
        SplitError: the shape of one is not known.
    """
    values, found = values_by_name(model.graph), []
    for name in names:
        value = values[name]
        if value.shape is None or not value.shape.is_static() or value.dtype is None:
            raise SplitError(
                f"the shape of the gradient {name!r} is not known before the step runs, and a bucket has a fixed size; "
                "run shape inference on the model before scaling it"
            )
        found.append(Gradient(name, value.dtype, tuple(int(axis) for axis in value.shape.numpy())))
    return found


def extract(
    model: ir.Model, nodes: Collection[int], outputs: Sequence[str], states: Collection[str], *, keep_states: bool
) -> tuple[ir.Model, dict[str, str]]:
    """Extract a model of some nodes of a step. A value of other nodes that they read becomes an input of its name.

    Args:
        model: the step, which is not changed.
        nodes: the positions of the nodes.
        outputs: what it gives: values of its nodes, or what it reads.
        states: the carried inputs.
        keep_states: whether carried state keeps its initial values, and is an input though nothing reads it.

    Returns:
        the model, and the names of inputs that are not those of the values, because outputs have them.
    """
    work = model.clone()
    graph = work.graph
    everything = list(graph)
    kept = {everything[i] for i in nodes}
    values = values_by_name(graph)
    graph.outputs.clear()
    lacking = dict.fromkeys(
        value
        for node in everything
        if node in kept
        for value in operands_of(node)
        if (producer := value.producer()) is not None and producer not in kept
    )
    lacking.update((values[name], None) for name in outputs if _is_foreign(values[name], kept))
    renamed = {}
    for old in lacking:
        name, uses = old.name or "", uses_of(old)
        new = ir.Value(name=name, type=old.type, shape=None if old.shape is None else old.shape.copy())
        old.name = f"{name}.before"
        replace_reads(old, new, uses)
        graph.inputs.append(new)
        values[name] = new
        if name in outputs:
            new.name = renamed[name] = f"{name}.given"
            values[name] = _handed_on(graph, new, name)
    graph.outputs.extend(values[name] for name in outputs)
    graph.remove([node for node in everything if node not in kept], safe=True)
    _drop_unread(graph, states, keep_states)
    _drop_functions(work)
    return work, renamed


def add_common_decision(graph: ir.Graph, name: str) -> None:
    """Let the step be applied only if the gradients of all replicas are finite: an input says so, true by default.

    Before: `all_finite = Not(any_nonfinite)`
    After:  `all_finite.own = Not(any_nonfinite); all_finite = And(all_finite.own, replicas_finite)`

    Args:
        graph: the second half, which is changed.
        name: the name of the decision, a scalar bool value.
    """
    editor = Editor(graph)
    own = values_by_name(graph)[name]
    assert own.producer() is not None
    uses = uses_of(own)
    flag = editor.state(REPLICAS_FINITE, np.asarray(True))
    build = editor.builder(MARK, at=behind(own), dtype=ir.DataType.BOOL, shape=())
    common = build.op("And", [own, flag], name=f"{name}.common")
    replace_reads(own, common, uses)
    if own.is_graph_output():
        editor.take_over_output(own, common, "own")
    else:
        own.name, common.name = editor.unique(f"{name}.own"), name


def _is_foreign(value: ir.Value, kept: Collection[ir.Node]) -> bool:
    producer = value.producer()
    return producer is not None and producer not in kept


def _handed_on(graph: ir.Graph, value: ir.Value, name: str) -> ir.Value:
    """Return an output of this name that hands an input through."""
    result = ir.Value(name=name, type=value.type, shape=value.shape)
    graph.append(ir.node("Identity", [value], outputs=[result], name=f"graphscale/{MARK}/{name}"))
    return result


def _drop_unread(graph: ir.Graph, states: Collection[str], keep_states: bool) -> None:
    read = {value for node in graph for value in operands_of(node)}
    outputs = set(graph.outputs)
    for value in tuple(graph.inputs):
        held = (value.name or "") in states
        if value not in read and value not in outputs and not (held and keep_states):
            graph.inputs.remove(value)
            graph.initializers.pop(value.name or "", None)
        elif held and not keep_states:
            graph.initializers.pop(value.name or "", None)
            value.const_value = None
    inputs = set(graph.inputs)
    for name, value in tuple(graph.initializers.items()):
        if value not in read and value not in outputs and value not in inputs and not (name in states and keep_states):
            del graph.initializers[name]


def _drop_functions(model: ir.Model) -> None:
    called: set[tuple[str, str, str]] = set()

    def walk(nodes: Iterable[ir.Node]) -> None:
        for node in nodes:
            called.add(node.op_identifier())
            for body in subgraphs(node):
                walk(body)

    walk(model.graph)
    for identifier, function in tuple(model.functions.items()):
        if identifier in called:
            walk(function)
    for identifier in tuple(model.functions):
        if identifier not in called:
            del model.functions[identifier]
