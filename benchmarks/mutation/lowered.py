"""Damage to the pieces that lowering inserts: fences, probes, the branch of the update, bounds, exact branches."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import onnx_ir as ir

from benchmarks.mutation.damaged import Damaged
from benchmarks.mutation.kinds import kind

BOUND = "bound-gradients"
_Sites = Callable[[Damaged], Iterator[str]]


def _inserted(pass_name: str, *op_types: str) -> _Sites:
    """Sites: the nodes of a pass in the main graph."""

    def sites(d: Damaged) -> Iterator[str]:
        return (node.name or "" for node in d.by(pass_name) if node.op_type in op_types)

    return sites


def _branches(d: Damaged) -> list[tuple[ir.Node, ir.Graph, ir.Graph]]:
    """The If of the update, in the main graph or in an exact branch, with its branches."""
    return [
        (node, node.attributes["then_branch"].as_graph(), node.attributes["else_branch"].as_graph())
        for node in d.graph.all_nodes()
        if node.op_type == "If" and str(node.metadata_props.get("graphscale.pass")) in (BOUND, "select-update")
    ]


def _updates(d: Damaged) -> Iterator[str]:
    return (str(i) for i, _ in enumerate(_branches(d)))


def _exact(d: Damaged) -> Iterator[str]:
    return (str(i) for i, (node, _, _) in enumerate(_branches(d)) if node.graph is not d.graph)


@kind("a fence without effect", _inserted("delay-update", "And"))
def _fence(d: Damaged, site: str) -> None:
    node = d.nodes[site]
    d.replace(node.outputs[0], d.number(False, ir.DataType.BOOL))


@kind("a small gradient that no probe reads", _inserted("merge-probes", "Concat"))
def _unread(d: Damaged, site: str) -> None:
    node = d.nodes[site]
    node.replace_input_with(0, node.inputs[1])


@kind("a probe of ones", _inserted("merge-probes", "MatMul"))
def _ones(d: Damaged, site: str) -> None:
    node = d.nodes[site]
    assert node.inputs[0] is not None and node.inputs[0].const_value is not None
    node.replace_input_with(0, d.constant(np.ones_like(node.inputs[0].const_value.numpy())))


@kind("the update in the wrong branch", _updates)
def _swapped(d: Damaged, site: str) -> None:
    node, then, otherwise = _branches(d)[int(site)]
    node.attributes["then_branch"], node.attributes["else_branch"] = (
        ir.AttrGraph("then_branch", otherwise),
        ir.AttrGraph("else_branch", then),
    )


@kind("an update without a condition", _updates)
def _always(d: Damaged, site: str) -> None:
    node, _, _ = _branches(d)[int(site)]
    node.replace_input_with(0, d.number(True, ir.DataType.BOOL))


@kind("two states change places in a branch", _updates)
def _exchanged(d: Damaged, site: str) -> None:
    _, then, _ = _branches(d)[int(site)]
    last = then.outputs
    first = len(last) - 2
    last[first], last[first + 1] = last[first + 1], last[first]


@kind("an exact branch that never skips", _exact)
def _never_skips(d: Damaged, site: str) -> None:
    node, then, _ = _branches(d)[int(site)]
    node.attributes["else_branch"] = ir.AttrGraph("else_branch", then.clone(allow_outer_scope_values=True))


@kind("an exact branch that divides by another number", _exact)
def _other_divisor(d: Damaged, site: str) -> None:
    graph = _branches(d)[int(site)][0].graph
    assert graph is not None
    division = next(node for node in graph if node.op_type == "Div")
    division.replace_input_with(1, d.number(2.0**15))


@kind("a bound of another operand", _inserted(BOUND, "ReduceL1"))
def _other_operand(d: Damaged, site: str) -> None:
    d.nodes[site].replace_input_with(0, d.number(1.0))


@kind("a limit beyond float32", _inserted(BOUND, "Less"))
def _limit(d: Damaged, site: str) -> None:
    node = d.nodes[site]
    node.replace_input_with(1, d.number(np.inf))


@kind("a reciprocal of another scale", _inserted(BOUND, "Reciprocal"))
def _reciprocal(d: Damaged, site: str) -> None:
    d.replace(d.nodes[site].outputs[0], d.number(2.0**-14))


def _unscaled(d: Damaged) -> list[ir.Node]:
    """The products by which cotangents and rates are unscaled, in the main graph or in a branch."""
    marked = (node for node in d.graph.all_nodes() if node.metadata_props.get("graphscale.pass") == BOUND)
    return [node for node in marked if node.op_type == "Mul" and _producer_type(node.inputs[1]) == "Where"]


def _producer_type(value: ir.Value | None) -> str:
    producer = None if value is None else value.producer()
    return "" if producer is None else producer.op_type


@kind("a cotangent or a rate unscaled by another factor", lambda d: map(str, range(len(_unscaled(d)))))
def _factor(d: Damaged, site: str) -> None:
    _unscaled(d)[int(site)].replace_input_with(1, d.number(2.0**-14))


@kind("a bound that any gradient may exceed", _inserted(BOUND, "Add"))
def _fewer(d: Damaged, site: str) -> None:
    node = d.nodes[site]
    node.replace_input_with(1, node.inputs[0])


@kind("more states in one buffer than is safe", _updates)
def _in_place(d: Damaged, site: str) -> None:
    d.write("in_place", sorted({*d.read("in_place"), *d.stamp.state, "current_loss_scale"}))


@kind("no state in one buffer", _updates)
def _two_buffers(d: Damaged, site: str) -> None:
    d.write("in_place", [])
