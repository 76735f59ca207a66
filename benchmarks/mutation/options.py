"""Damage to state and its writes, bodies, telemetry, and the pieces of options: policies, scaled loss, autocast."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import onnx_ir as ir

from benchmarks.mutation import sites as at
from benchmarks.mutation.damaged import FLOAT, Damaged
from benchmarks.mutation.kinds import kind
from graphscale.graph.builder import PASS_KEY
from graphscale.graph.marks import AUTOCAST
from graphscale.graph.values import subgraphs

BOOL, HALF = ir.DataType.BOOL, ir.DataType.FLOAT16

# --- writes and readers of state --------------------------------------------------------------------------------------


def _all_writes(d: Damaged) -> Iterator[str]:
    yield from (n.name or "" for n in d.graph if n.op_type.startswith("InPlaceAccumulator"))


def _write_pairs(d: Damaged) -> Iterator[str]:
    if len([*at.writes(d)]) > 1:
        yield from [*at.writes(d)][:1]


@kind("drop a write in place", _all_writes)
def _drop_write(d: Damaged, site: str) -> None:
    node = d.nodes[site]
    for value in node.outputs:
        if value.is_graph_output() or value.uses():
            assert node.inputs[1] is not None
            d.replace(value, node.inputs[1])
    d.graph.remove(node, safe=True)


@kind("write in place twice", _all_writes)
def _write_twice(d: Damaged, site: str) -> None:
    node = d.nodes[site]
    outputs = [ir.Value(name=f"{value.name}.twice", type=value.type) for value in node.outputs]
    twin = ir.node(node.op_type, node.inputs, dict(node.attributes), domain=node.domain, outputs=outputs, name="twice")
    d.graph.append(twin)


@kind("write a state into the buffer of another", _write_pairs)
def _other_buffer(d: Damaged, site: str) -> None:
    one, other = (d.nodes[name] for name in [*at.writes(d)][:2])
    buffers = one.inputs[0], other.inputs[0]
    one.replace_input_with(0, buffers[1])
    other.replace_input_with(0, buffers[0])


@kind("read a state after it is written", at.writes)
def _read_late(d: Damaged, site: str) -> None:
    d.graph.outputs.append(d.make("Cast", [d.nodes[site].outputs[0]], None, to=FLOAT))


def _kept(d: Damaged) -> Iterator[str]:
    guarded = {value for node in d.by("guard-updates") for value in node.outputs}
    fed = (name for name in at.original_states(d) if name in d.stamp.state)
    yield from (name for name in fed if d.values[d.stamp.state[name]] not in guarded)


@kind("guard a state that is kept", _kept, scaling="kept")
def _guard_kept(d: Damaged, site: str) -> None:
    flag = d.role("all_finite")
    assert flag is not None
    old = d.values[site]
    d.wrap(d.values[d.stamp.state[site]], lambda new: d.make("Where", [flag, new, old], new.producer(), new.dtype))


@kind("keep one more state", lambda d: iter([n.name or "" for n in at.guards(d)][:1]), scaling="kept")
def _keep_more(d: Damaged, site: str) -> None:
    node = d.nodes[site]
    assert node.inputs[1] is not None
    d.replace(node.outputs[0], node.inputs[1])


# --- bodies -----------------------------------------------------------------------------------------------------------


def _branching(d: Damaged) -> Iterator[str]:
    yield from (node.name or "" for node in d.graph if node.op_type == "If")


def _inner_nodes(node: ir.Node) -> Iterator[ir.Node]:
    for body in subgraphs(node):
        for inner in body:
            yield inner
            yield from _inner_nodes(inner)


def _captures(d: Damaged) -> Iterator[str]:
    """Branches that read two different values of one type from outside."""
    for name in _branching(d):
        if len(_captured(d.nodes[name])) > 1:
            yield name


def _captured(node: ir.Node) -> list[tuple[ir.Node, int]]:
    """Two operands that inner nodes take from outside, of two values of one type."""
    inner = [*_inner_nodes(node)]
    inside = {value for each in inner for value in each.outputs}
    found: dict[ir.Value, tuple[ir.Node, int]] = {}
    for each in inner:
        for i, value in enumerate(each.inputs):
            if value is not None and value not in inside and not value.is_initializer():
                found.setdefault(value, (each, i))
    for one, place in found.items():
        for other, second in found.items():
            if one is not other and one.dtype == other.dtype:
                return [place, second]
    return []


@kind("exchange captured values", _captures, scaling="telemetry")
def _exchange_captured(d: Damaged, site: str) -> None:
    (one, i), (other, j) = _captured(d.nodes[site])
    values = one.inputs[i], other.inputs[j]
    one.replace_input_with(i, values[1])
    other.replace_input_with(j, values[0])


@kind("exchange the branches", _branching, scaling="telemetry")
def _exchange_branches(d: Damaged, site: str) -> None:
    attributes = d.nodes[site].attributes
    one, other = attributes["then_branch"].as_graph(), attributes["else_branch"].as_graph()
    attributes["then_branch"] = ir.AttrGraph("then_branch", other)
    attributes["else_branch"] = ir.AttrGraph("else_branch", one)


def _inner(op_types: tuple[str, ...]) -> Callable[[Damaged], Iterator[str]]:
    def sites(d: Damaged) -> Iterator[str]:
        yield from (name for name in _branching(d) if any(n.op_type in op_types for n in _inner_nodes(d.nodes[name])))

    return sites


@kind("another constant in a body", _inner(("Constant",)), scaling="telemetry")
def _inner_constant(d: Damaged, site: str) -> None:
    for node in _inner_nodes(d.nodes[site]):
        if node.op_type == "Constant" and "value" in node.attributes:
            array = node.attributes["value"].as_tensor().numpy()
            node.attributes["value"] = ir.AttrTensor("value", ir.tensor(array + array.dtype.type(1)))
            return


@kind("exchanged outputs of a body", _branching, scaling="telemetry")
def _inner_outputs(d: Damaged, site: str) -> None:
    body = d.nodes[site].attributes["else_branch"].as_graph()
    body.outputs[0], body.outputs[1] = body.outputs[1], body.outputs[0]


# --- telemetry --------------------------------------------------------------------------------------------------------


@kind("exchange two counters", at.next_value("steps"), scaling="telemetry")
def _exchange_counters(d: Damaged, site: str) -> None:
    other = d.values[d.stamp.state[d.stamp.names["skipped_steps"]]]
    one = d.values[site]
    first, second = ([value is each for value in d.graph.outputs].index(True) for each in (one, other))
    d.graph.outputs[first], d.graph.outputs[second] = other, one
    one.name, other.name = other.name, one.name


for _role, _number in {"steps": 1, "skipped_steps": 1, "consecutive_skips": 1, "last_skip_step": 1}.items():

    @kind(f"a {_role.replace('_', ' ')} that is one too large", at.next_value(_role), scaling="telemetry")
    def _one_more(d: Damaged, site: str, number: int = _number) -> None:
        value = d.values[site]
        d.wrap(value, lambda old: d.make("Add", [old, d.number(number, old.dtype)], old.producer(), old.dtype))


@kind("forget consecutive skips", at.next_value("consecutive_skips"), scaling="telemetry")
def _no_skips(d: Damaged, site: str) -> None:
    value = d.values[site]
    d.wrap(value, lambda old: d.make("Min", [old, d.number(5, old.dtype)], old.producer(), old.dtype))


# --- other policies ---------------------------------------------------------------------------------------------------


def _attribute(d: Damaged, name: str, value: ir.Attr) -> None:
    call = next(n for n in d.graph if n.op_type == "UpdateLossScale")
    call.attributes[name] = value


kind("another hysteresis", at.role("hysteresis_left"), scaling="megatron")(
    lambda d, site: _attribute(d, "hysteresis", ir.AttrInt64("hysteresis", 3))
)
kind("a hysteresis that is not carried", at.next_value("hysteresis_left"), scaling="megatron")(
    lambda d, site: d.replace(d.values[site], d.values[d.stamp.names["hysteresis_left"]])
)


@kind("another factor of the rule", at.function, scaling="torch")
def _factor(d: Damaged, site: str) -> None:
    assert d.rule is not None
    for node in d.rule:
        if node.op_type == "Constant" and node.outputs[0].uses()[0].node.op_type == "Mul":
            node.attributes["value"] = ir.AttrTensor("value", ir.tensor(np.float64(2.000001)))


@kind("a flag of a stuck scale that is never set", at.role("stuck"), scaling="deepspeed")
def _never_stuck(d: Damaged, site: str) -> None:
    d.wrap(d.values[d.stamp.names["stuck"]], lambda old: d.make("And", [old, d.number(False, BOOL)], None, BOOL))


@kind("a flag of a stuck scale that is negated", at.role("stuck"), scaling="deepspeed")
def _not_stuck(d: Damaged, site: str) -> None:
    d.wrap(d.values[d.stamp.names["stuck"]], lambda old: d.make("Not", [old], None, BOOL))


@kind("another fixed scale", at.anywhere, scaling="fixed")
def _fixed(d: Damaged, site: str) -> None:
    old = d.scale.const_value
    assert old is not None
    d.scale.const_value = ir.tensor(np.full_like(old.numpy(), 512), name=d.scale.name)


@kind("no guard at a fixed scale", at.applied_guards, scaling="fixed")
def _fixed_guard(d: Damaged, site: str) -> None:
    node = d.nodes[site]
    assert node.inputs[1] is not None
    d.replace(node.outputs[0], node.inputs[1])


# --- the scaled loss --------------------------------------------------------------------------------------------------


def _scaled_losses(d: Damaged) -> Iterator[str]:
    yield from (v.name or "" for v in d.graph.outputs if (v.name or "").startswith("scaled_loss"))


@kind("a scaled loss without the scale", _scaled_losses, scaling="scaled loss")
def _bare_loss(d: Damaged, site: str) -> None:
    d.around(d.values[site], "Div", d.scale)


@kind("a scaled loss of another scale", _scaled_losses, scaling="scaled loss")
def _other_scale(d: Damaged, site: str) -> None:
    d.producer(site).replace_input_with(1, d.number(32768.0))


@kind("a scaled loss that is capped", _scaled_losses, scaling="scaled loss")
def _capped_loss(d: Damaged, site: str) -> None:
    d.around(d.values[site], "Min", d.number(1e30))


# --- mixed precision --------------------------------------------------------------------------------------------------


def _casts(d: Damaged, to: ir.DataType) -> Iterator[str]:
    for node in d.by(AUTOCAST, "Cast"):
        if node.attributes["to"].as_int() == to and node.outputs[0].uses():
            yield node.outputs[0].name or ""


def _pairs(d: Damaged) -> Iterator[str]:
    """The second casts of the pairs that round."""
    for name in _casts(d, FLOAT):
        first = d.producer(name).inputs[0]
        before = None if first is None else first.producer()
        if before is not None and before.op_type == "Cast":
            yield name


@kind("drop a cast of autocast", lambda d: _casts(d, HALF), scaling="float16")
def _drop_cast(d: Damaged, site: str) -> None:
    d.replace(d.values[site], d.producer(site).inputs[0])  # type: ignore[arg-type]


@kind("bfloat16 in place of float16", lambda d: _casts(d, HALF), scaling="float16")
def _other_small(d: Damaged, site: str) -> None:
    d.producer(site).attributes["to"] = ir.AttrInt64("to", int(ir.DataType.BFLOAT16))


@kind("a gradient rounded once more", at.gradients, scaling="float16")
def _round_more(d: Damaged, site: str) -> None:
    small = d.make("Cast", [d.values[site]], None, HALF, to=HALF)
    large = d.make("Cast", [small], None, to=FLOAT)
    d.replace(d.values[site], large, keep=(small.producer(),))  # type: ignore[arg-type]


@kind("drop an emulated rounding", _pairs, scaling="emulated")
def _no_rounding(d: Damaged, site: str) -> None:
    first = d.producer(site).inputs[0]
    assert first is not None
    d.replace(d.values[site], first.producer().inputs[0])  # type: ignore[union-attr, arg-type]


@kind("emulate bfloat16 in place of float16", _pairs, scaling="emulated")
def _emulate_other(d: Damaged, site: str) -> None:
    first = d.producer(site).inputs[0]
    assert first is not None
    first.producer().attributes["to"] = ir.AttrInt64("to", int(ir.DataType.BFLOAT16))  # type: ignore[union-attr]
    first.type = ir.TensorType(ir.DataType.BFLOAT16)


@kind("emulate a rounding of a weight's gradient", at.gradients, scaling="emulated")
def _emulate_more(d: Damaged, site: str) -> None:
    _round_more(d, site)


# --- marks and nodes that nothing reads -------------------------------------------------------------------------------


@kind("an original's node marked as a pass's", at.of("Mul", "MatMul", "Gemm"))
def _marked(d: Damaged, site: str) -> None:
    d.producer(site).metadata_props[PASS_KEY] = "guard-updates"


@kind("a node marked as another pass's", at.quotients)
def _other_mark(d: Damaged, site: str) -> None:
    d.nodes[site].metadata_props[PASS_KEY] = "guard-updates"


@kind("a node that nothing reads", at.loss, harmless=lambda d, site: "no output and no state depends on the node")
def _unread(d: Damaged, site: str) -> None:
    outputs = [ir.Value(name="unread", type=ir.TensorType(FLOAT))]
    d.graph.append(ir.node("Neg", [d.values[site]], outputs=outputs, name="unread"))
