"""Damage to telemetry in its larger forms: the ranges of the gradients, and the first forward value at fault."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import onnx_ir as ir

from benchmarks.mutation import sites as at
from benchmarks.mutation.damaged import FLOAT, Damaged
from benchmarks.mutation.kinds import kind
from graphscale.graph.builder import replace_reads

_Sites = Callable[[Damaged], Iterator[str]]
_MEASURED = "measured"


def _branching(d: Damaged, start: str) -> list[ir.Node]:
    """The If whose first result has such a name."""
    return [n for n in d.by("telemetry", "If") if (n.outputs[0].name or "").startswith(start)]


def _ranges(d: Damaged) -> ir.Graph:
    return _branching(d, "gradient_ranges")[0].attributes["then_branch"].as_graph()


def _search(d: Damaged) -> ir.Graph:
    return _branching(d, "skip_cause")[0].attributes["else_branch"].as_graph()


def _inside(body: Callable[[Damaged], ir.Graph], found: Callable[[ir.Node], bool], least: int = 1) -> _Sites:
    """Sites: the places in a body of the nodes that fulfil a condition, if there are so many."""

    def sites(d: Damaged) -> Iterator[str]:
        if not _branching(d, "gradient_ranges") or len(_branching(d, "skip_cause")[0].outputs) < 3:
            return
        places = [str(i) for i, node in enumerate(body(d)) if found(node)]
        yield from places if len(places) >= least else ()

    return sites


def _operator(op_type: str) -> Callable[[ir.Node], bool]:
    return lambda node: node.op_type == op_type


def _feeds(op_type: str, readers: str) -> Callable[[ir.Node], bool]:
    """A condition: nodes of one operator whose result an operator of the other kind reads."""
    return lambda n: n.op_type == op_type and any(use.node.op_type == readers for use in n.outputs[0].uses())


def _use(value: ir.Value, other: ir.Value | None) -> None:
    """Let the readers of a value read another one."""
    assert other is not None
    replace_reads(value, other, list(value.uses()))


def _wrap(value: ir.Value, op_type: str, *others: ir.Value) -> None:
    """Put an operator on a value of a body."""
    producer, uses = value.producer(), list(value.uses())
    outputs = [ir.Value(name=f"{value.name}.mutant", type=value.type, shape=value.shape)]
    node = ir.node(op_type, [value, *others], outputs=outputs)
    assert producer is not None
    assert producer.graph is not None
    producer.graph.insert_after(producer, node)
    replace_reads(value, node.outputs[0], uses)


# --- when the ranges are measured -------------------------------------------------------------------------------------


def _due(d: Damaged) -> Iterator[str]:
    yield from (node.name or "" for node in _branching(d, "gradient_ranges"))


for _number, _name in ((True, "every"), (False, "no")):

    @kind(f"measure ranges in {_name} step", _due, scaling=_MEASURED)
    def _always(d: Damaged, site: str, number: bool = _number) -> None:
        d.nodes[site].replace_input_with(0, d.number(number, ir.DataType.BOOL))


@kind("measure ranges in every other step", at.telemetry("Mod", ""), scaling=_MEASURED)
def _other_period(d: Damaged, site: str) -> None:
    d.nodes[site].replace_input_with(1, d.number(2, ir.DataType.INT64))


@kind("measure ranges one step later", at.telemetry("Mod", ""), scaling=_MEASURED)
def _later(d: Damaged, site: str) -> None:
    count = d.nodes[site].inputs[0]
    assert count is not None
    d.around(count, "Sub", d.number(1, ir.DataType.INT64))


@kind("ranges that begin with ones", _due, scaling=_MEASURED)
def _first(d: Damaged, site: str) -> None:
    state = next(value for value in d.values.values() if (value.name or "").startswith("gradient_ranges"))
    assert state.const_value is not None
    state.const_value = ir.tensor(np.ones_like(state.const_value.numpy()), name=state.name)


@kind("another period of ranges in the metadata", _due, scaling=_MEASURED)
def _claimed(d: Damaged, site: str) -> None:
    telemetry = d.read("telemetry")
    telemetry["ranges"]["every"] += 1
    d.write("telemetry", telemetry)


# --- what is measured -------------------------------------------------------------------------------------------------


@kind("the largest number, not the largest magnitude", _inside(_ranges, _operator("Abs")), scaling=_MEASURED)
def _signed(d: Damaged, site: str) -> None:
    node = _ranges(d)[int(site)]
    _use(node.outputs[0], node.inputs[0])


@kind("the largest magnitude, infinity too", _inside(_ranges, _operator("Where")), scaling=_MEASURED)
def _infinite(d: Damaged, site: str) -> None:
    node = _ranges(d)[int(site)]
    _use(node.outputs[0], node.inputs[2])


@kind("an overflow of NaN alone", _inside(_ranges, _operator("IsNaN")), scaling=_MEASURED)
def _nan_alone(d: Damaged, site: str) -> None:
    node = _ranges(d)[int(site)]
    assert node.inputs[0] is not None
    producer = node.inputs[0].producer()
    assert producer is not None
    node.replace_input_with(0, producer.inputs[0])


@kind("magnitudes of at most 60000", _inside(_ranges, _feeds("ReduceMax", "Concat")), scaling=_MEASURED)
def _capped(d: Damaged, site: str) -> None:
    value = _ranges(d)[int(site)].outputs[0]
    _wrap(value, "Min", d.number(60000.0, value.dtype))


def _largest_of_some(d: Damaged) -> Iterator[str]:
    if len(d.stamp.telemetry["gradients"]) > 1:
        yield from _inside(_ranges, _feeds("ReduceMax", "Concat"))(d)


@kind("the largest of all summed", _largest_of_some, scaling=_MEASURED)
def _summed(d: Damaged, site: str) -> None:
    _ranges(d)[int(site)].op_type = "ReduceSum"


@kind("zeros and overflow change places", _inside(_ranges, _feeds("Concat", "Reshape")), scaling=_MEASURED)
def _rows(d: Damaged, site: str) -> None:
    node = _ranges(d)[int(site)]
    one, other = node.inputs[1], node.inputs[2]
    node.replace_input_with(1, other)
    node.replace_input_with(2, one)


@kind("numbers in place of shares", _inside(_ranges, _operator("Div")), scaling=_MEASURED)
def _numbers(d: Damaged, site: str) -> None:
    _ranges(d)[int(site)].replace_input_with(1, d.number(1.0))


@kind("a gradient that is measured twice", _inside(_ranges, _operator("Reshape"), least=3), scaling=_MEASURED)
def _twice(d: Damaged, site: str) -> None:
    read = [n for n in _ranges(d) if n.op_type == "Reshape" and n is not _ranges(d)[int(site)]]
    node = _ranges(d)[int(site)]
    assert node.inputs[0] is not None
    same = [n for n in read if n.inputs[0] is not None and n.inputs[0].dtype == node.inputs[0].dtype]
    node.replace_input_with(0, same[0].inputs[0])


@kind("the share of zeros of the first gradient", at.telemetry("Gather", "zero_fraction"), scaling=_MEASURED)
def _one_share(d: Damaged, site: str) -> None:
    d.nodes[site].replace_input_with(1, d.number(0, ir.DataType.INT64))


# --- the first forward value that is not finite -----------------------------------------------------------------------


def _activations(d: Damaged) -> Iterator[str]:
    yield from (node.name or "" for node in _branching(d, "skip_cause") if len(node.outputs) > 2)


@kind("tell another forward value", _activations, scaling=_MEASURED)
def _another(d: Damaged, site: str) -> None:
    d.around(d.nodes[site].outputs[2], "Add", d.number(1, ir.DataType.INT64))


@kind("tell no forward value", _activations, scaling=_MEASURED)
def _none(d: Damaged, site: str) -> None:
    body = _search(d)
    last = body.outputs[2].producer()
    assert last is not None
    last.replace_input_with(1, last.inputs[2])


@kind("a forward value never at fault", _inside(_search, _feeds("IsNaN", "Where")), scaling=_MEASURED)
def _unread(d: Damaged, site: str) -> None:
    value = _search(d)[int(site)].outputs[0]
    _wrap(value, "And", d.number(False, ir.DataType.BOOL))


@kind("a sum of the values, not of their products", _inside(_search, _feeds("Mul", "ReduceSum")), scaling=_MEASURED)
def _plain_sum(d: Damaged, site: str) -> None:
    node = _search(d)[int(site)]
    _use(node.outputs[0], node.inputs[0])


@kind("a value capped at 65504 before it is looked at", _inside(_search, _feeds("Reshape", "Mul")), scaling=_MEASURED)
def _capped_value(d: Damaged, site: str) -> None:
    value = _search(d)[int(site)].outputs[0]
    _wrap(value, "Min", d.number(65504.0, value.dtype or FLOAT))


@kind("reorder the forward values of telemetry", _activations, scaling=_MEASURED)
def _reordered(d: Damaged, site: str) -> None:
    telemetry = d.read("telemetry")
    telemetry["activations"].reverse()
    d.write("telemetry", telemetry)
