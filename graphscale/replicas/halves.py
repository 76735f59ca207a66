"""The parts of a step as models of some of its nodes, which read each other's results."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedFunctionsPass

from graphscale.errors import SplitError, UnsupportedModelError
from graphscale.graph.builder import Editor, behind, replace_reads
from graphscale.graph.cones import nodes_above
from graphscale.graph.inference import infer_types
from graphscale.graph.types import dtypes_of
from graphscale.graph.values import inner_nodes, operands_of, uses_of, values_by_name
from graphscale.replicas.buckets import Gradient
from graphscale.replicas.cut import Cut

__all__ = ["MARK", "REPLICAS_FINITE", "add_common_decision", "cut_stages", "extract", "gradients_of", "know_types"]

# The mark of the nodes that splitting inserts.
MARK = "split"
# The input of the second half for a bool value: true if the gradients of all replicas are finite.
REPLICAS_FINITE = "replicas_finite"


def know_types(model: ir.Model, names: Collection[str]) -> None:
    """Add missing dtypes and shapes to values.

    Raises:
        UnsupportedModelError: the dtype of a value is unknown.
    """
    values = values_by_name(model.graph)
    if all(values[name].dtype is not None and values[name].shape is not None for name in names):
        return
    inferred = model.clone()
    infer_types(inferred)
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
    """Return the gradients with some names.

    Raises:
        SplitError: the shape of a gradient is unknown.
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
    """Extract a model of some nodes of a step. Their operands from other nodes become inputs of the same name.

    Args:
        model: the step, which is not changed.
        nodes: the positions of the nodes.
        outputs: the outputs of the model: results of its nodes, or operands.
        states: the carried inputs.
        keep_states: True if carried state keeps its initial values, and is an input even without readers.

    Returns:
        the model, and the new names of inputs, where outputs have the names of the values.
    """
    work = model.clone()
    graph = work.graph
    everything = list(graph)
    kept = {everything[i] for i in nodes}
    values = values_by_name(graph)
    graph.outputs.clear()
    lacking = dict.fromkeys(
        value for node in everything if node in kept for value in operands_of(node) if _is_foreign(value, kept)
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
            values[name] = ir.Value(name=name, type=new.type, shape=new.shape)
            graph.append(ir.node("Identity", [new], outputs=[values[name]], name=f"graphscale/{MARK}/{name}"))
    graph.outputs.extend(values[name] for name in outputs)
    removed = [node for node in everything if node not in kept]
    for inner in (inner for node in removed for inner in inner_nodes(node)):
        inner.resize_inputs(0)  # A removed body must not read values.
    graph.remove(removed, safe=True)
    _drop_unread(graph, states, keep_states)
    RemoveUnusedFunctionsPass()(work)  # type: ignore[no-untyped-call]
    return work, renamed


def cut_stages(
    model: ir.Model, cut: Cut, groups: Sequence[Sequence[Gradient]], states: Collection[str]
) -> tuple[ir.Model, ...]:
    """Return the models of the first half, one for each group of gradients.

    A node belongs to the first stage that needs it; a node for no gradient, such as a metric's, to the first possible
    stage.
    """
    nodes = list(model.graph)
    stage_of = _stages(nodes, cut, groups)
    producers = {value.name or "": node for node in nodes for value in node.outputs}
    outputs: list[dict[str, None]] = [{} for _ in groups]
    for name in (*cut.gradients, *cut.outputs, *cut.average, *cut.local):
        outputs[stage_of[producers[name]]][name] = None
    crossing: dict[str, None] = {}
    for node, stage in stage_of.items():
        for value in operands_of(node):
            producer = value.producer()
            if producer is not None and stage_of[producer] < stage:
                outputs[stage_of[producer]][value.name or ""] = None
                crossing[value.name or ""] = None
    know_types(model, list(crossing))
    models = []
    for stage, names in enumerate(outputs):
        own = [i for i, node in enumerate(nodes) if stage_of.get(node) == stage]
        part, renamed = extract(model, own, list(names), states, keep_states=False)
        assert not renamed
        models.append(part)
    return tuple(models)


def add_common_decision(graph: ir.Graph, name: str) -> None:
    """Apply the step only if the gradients of all replicas are finite, by an input, true by default.

    Before: `all_finite = Not(any_nonfinite)`
    After:  `all_finite.own = Not(any_nonfinite); all_finite = And(all_finite.own, replicas_finite)`
    """
    editor = Editor(graph)
    own = values_by_name(graph)[name]
    assert own.producer() is not None
    uses = uses_of(own)
    flag = editor.state(REPLICAS_FINITE, np.asarray(True))
    build = editor.builder(MARK, at=behind(own), dtype=ir.DataType.BOOL, shape=())
    common = build.op("And", [own, flag], name=f"{name}.common")
    editor.replace(own, common, uses, "own")
    if common.name != name:  # not a graph output
        own.name, common.name = editor.unique(f"{name}.own"), name


def _is_foreign(value: ir.Value, kept: Collection[ir.Node]) -> bool:
    producer = value.producer()
    return producer is not None and producer not in kept


def _drop_unread(graph: ir.Graph, states: Collection[str], keep_states: bool) -> None:
    kept = states if keep_states else ()
    used = {*graph.outputs, *(value for node in graph for value in operands_of(node))}
    for value in tuple(graph.inputs):
        is_unread = value not in used and value.name not in kept
        if is_unread:
            graph.inputs.remove(value)
        if is_unread or (value.name in states and not keep_states):
            graph.initializers.pop(value.name or "", None)
            value.const_value = None
    used.update(graph.inputs)
    for name, value in tuple(graph.initializers.items()):
        if value not in used and name not in kept:
            del graph.initializers[name]


def _stages(nodes: Sequence[ir.Node], cut: Cut, groups: Sequence[Sequence[Gradient]]) -> dict[ir.Node, int]:
    values = {value.name: value for node in nodes for value in node.outputs}
    found: dict[ir.Node, int] = {}
    for stage, group in enumerate(groups):
        needed = nodes_above(*(values[gradient.name] for gradient in group))
        new = [node for node in needed if node not in found]
        if not new:
            names = ", ".join(gradient.name for gradient in group)
            raise SplitError(
                f"{len(groups)} stages do not fit: the gradients {names} exist after stage {stage}; take fewer"
            )
        found.update((node, stage) for node in new)
    for i in sorted(cut.first):
        node = nodes[i]
        if node not in found:
            before = [found[p] for value in operands_of(node) if (p := value.producer()) is not None]
            found[node] = max(before, default=0)
    return {node: found[node] for node in nodes if node in found}
