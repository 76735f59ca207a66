"""Damage to the pieces that the passes insert: the scale, the check, the guards, the rule, its state, telemetry."""

from __future__ import annotations

import json

import numpy as np
import onnx_ir as ir

from benchmarks.mutation import sites as at
from benchmarks.mutation.damaged import Damaged
from benchmarks.mutation.kinds import kind

BOOL = ir.DataType.BOOL


# --- the scale --------------------------------------------------------------------------------------------------------


@kind("drop an unscaling", at.quotients)
def _drop_unscale(d: Damaged, site: str) -> None:
    node = d.nodes[site]
    d.replace(node.outputs[0], node.inputs[0])  # type: ignore[arg-type]


@kind("unscale twice", at.quotients)
def _unscale_twice(d: Damaged, site: str) -> None:
    node = d.nodes[site]
    d.around(node.outputs[0], "Div", node.inputs[1])  # type: ignore[arg-type]


@kind("multiply instead of unscaling", at.quotients)
def _multiply(d: Damaged, site: str) -> None:
    d.nodes[site].op_type = "Mul"


@kind("unscale after clipping", at.clipped)
def _unscale_after_clip(d: Damaged, site: str) -> None:
    node = d.nodes[site]
    quotient, raw, scale = node.outputs[0], node.inputs[0], node.inputs[1]
    for use in quotient.uses():
        if use.node.op_type in ("Clip", "Max", "Min"):
            use.node.replace_input_with(use.idx, raw)
            d.around(use.node.outputs[0], "Div", scale)  # type: ignore[arg-type]


@kind("divide by the next scale", at.outputs_only)
def _next_scale(d: Damaged, site: str) -> None:
    node = d.nodes[site]
    call = next(n for n in d.by("update-loss-scale") if n.op_type == "UpdateLossScale")
    old = node.outputs[0]
    new = d.make("Div", [node.inputs[0], call.outputs[0]], None, old.dtype)  # type: ignore[list-item]
    d.editor.take_over_output(old, new, "present")


@kind("scale twice", at.products)
def _scale_twice(d: Damaged, site: str) -> None:
    d.around(d.nodes[site].outputs[0], "Mul", d.scale)


@kind("scale at one place less", at.several)
def _one_place_less(d: Damaged, site: str) -> None:
    node = d.nodes[site]
    d.replace(node.outputs[0], node.inputs[0])  # type: ignore[arg-type]


def _sizes_alone(d: Damaged, site: str) -> str | None:
    node = d.nodes[site]
    constant = node.inputs[0]
    assert constant is not None
    others = {use.node.op_type for use in constant.uses() if use.node is not node}
    return "all other readers use its size alone" if others <= {"Shape", "Size"} else None


@kind("scale a shared constant for all readers", at.shared_constants, harmless=_sizes_alone)
def _shared(d: Damaged, site: str) -> None:
    node = d.nodes[site]
    constant, product = node.inputs[0], node.outputs[0]
    d.graph.remove(node)
    d.graph.insert_before(d.graph[0], node)
    d.replace(constant, product, keep=(node,))  # type: ignore[arg-type]


@kind("unscale where the scale enters", at.products)
def _at_once(d: Damaged, site: str) -> None:
    """Right, and worthless: nothing of the backward pass is protected."""
    for name in list(at.products(d)):
        d.around(d.nodes[name].outputs[0], "Div", d.scale)
    for name in list(at.quotients(d)):
        node = d.nodes[name]
        d.replace(node.outputs[0], node.inputs[0])  # type: ignore[arg-type]


@kind("scale the loss output", at.loss)
def _scaled_loss(d: Damaged, site: str) -> None:
    d.around(d.values[site], "Mul", d.scale)


# --- the check --------------------------------------------------------------------------------------------------------


@kind("leave a gradient out of the check", at.several_probes)
def _uncheck(d: Damaged, site: str) -> None:
    probe = d.nodes[site].outputs[0].uses()[0].node.outputs[0]
    while probe.uses()[0].node.op_type == "Cast":
        probe = probe.uses()[0].node.outputs[0]
    _leave_out(d, probe)


@kind("leave a product out of a sum of the check", at.summed_rows)
def _unsum(d: Damaged, site: str) -> None:
    _leave_out(d, d.nodes[site].outputs[0])


def _leave_out(d: Damaged, probe: ir.Value) -> None:
    total = probe.uses()[0].node
    kept = [value for value in total.inputs if value is not probe]
    new = d.make("Sum", kept, total)  # type: ignore[arg-type]
    d.replace(total.outputs[0], new)


@kind("a one among the zeros of a product", at.rows)
def _one(d: Damaged, site: str) -> None:
    zeros = d.nodes[site].inputs[0]
    assert zeros is not None and zeros.const_value is not None
    array = zeros.const_value.numpy().copy()
    array[-1] = 1
    d.nodes[site].replace_input_with(0, d.constant(array))


@kind("check products after clipping", at.rows)
def _rows_clipped(d: Damaged, site: str) -> None:
    node = d.nodes[site]
    gradient = node.inputs[1]
    assert gradient is not None
    bounds = [d.number(bound) for bound in (-1e4, 1e4)]
    node.replace_input_with(1, d.make("Clip", [gradient, *bounds], gradient.producer(), gradient.dtype))


@kind("leave a gradient out of IsAllFinite", at.kernels)
def _uncheck_kernel(d: Damaged, site: str) -> None:
    d.nodes[site].resize_inputs(len(d.nodes[site].inputs) - 1)


@kind("check by ReduceMax of Abs", at.probes)
def _reduce_max(d: Damaged, site: str) -> None:
    node = d.nodes[site]
    gradient, probe = node.inputs[0], node.outputs[0].uses()[0].node
    size = d.make("Abs", [gradient], node, gradient.dtype)  # type: ignore[list-item,union-attr]
    largest = d.make("ReduceMax", [size], size.producer(), gradient.dtype, keepdims=0)  # type: ignore[union-attr]
    zero = node.inputs[1]
    new = d.make("Mul", [largest, zero], largest.producer(), gradient.dtype)  # type: ignore[list-item,union-attr]
    d.replace(probe.outputs[0], new)


@kind("check after clipping", at.probes)
def _check_clipped(d: Damaged, site: str) -> None:
    node = d.nodes[site]
    gradient = node.inputs[0]
    assert gradient is not None and gradient.dtype is not None
    dtype = gradient.dtype.numpy()
    bounds = [d.constant(np.asarray(bound, dtype=dtype)) for bound in (-1e4, 1e4)]
    node.replace_input_with(0, d.make("Clip", [gradient, *bounds], gradient.producer(), gradient.dtype))


@kind("check one element", at.probes)
def _check_first(d: Damaged, site: str) -> None:
    node = d.nodes[site]
    gradient = node.inputs[0]
    assert gradient is not None
    row, zero, one = (d.constant(np.asarray([n], dtype=np.int64)) for n in (-1, 0, 1))
    flat = d.make("Reshape", [gradient, row], gradient.producer(), gradient.dtype)
    node.replace_input_with(0, d.make("Slice", [flat, zero, one], flat.producer(), gradient.dtype))


@kind("check for NaN alone", at.probes)
def _nan_alone(d: Damaged, site: str) -> None:
    node = d.nodes[site]
    d.replace(node.outputs[0], node.inputs[0])  # type: ignore[arg-type]


@kind("invert the check", at.flag)
def _invert(d: Damaged, site: str) -> None:
    flag = d.role(site)
    d.around(flag, "Not", dtype=BOOL)  # type: ignore[arg-type]


@kind("a check that always holds", at.flag)
def _always(d: Damaged, site: str) -> None:
    flag = d.role(site)
    true = d.constant(np.asarray(True))
    new = d.make("Or", [flag, true], flag.producer(), BOOL)  # type: ignore[list-item,union-attr]
    d.replace(flag, new, keep=(new.producer(),))  # type: ignore[arg-type]


# --- the guards -------------------------------------------------------------------------------------------------------


def _unguard(d: Damaged, site: str) -> None:
    node = d.nodes[site]
    d.replace(node.outputs[0], node.inputs[1])  # type: ignore[arg-type]


for _what in ("weight", "moment", "counter"):
    kind(f"unguard a {_what}", lambda d, wanted=_what: at.guards_of(d, wanted))(_unguard)


@kind("swap the branches of a guard", at.applied_guards)
def _swap(d: Damaged, site: str) -> None:
    node = d.nodes[site]
    chosen, old = node.inputs[1], node.inputs[2]
    node.replace_input_with(1, old)
    node.replace_input_with(2, chosen)


@kind("guard by a constant", at.applied_guards)
def _constant_guard(d: Damaged, site: str) -> None:
    d.nodes[site].replace_input_with(0, d.constant(np.asarray(True)))


@kind("guard by the negated flag", at.applied_guards)
def _negated_guard(d: Damaged, site: str) -> None:
    node = d.nodes[site]
    flag = node.inputs[0]
    assert flag is not None
    node.replace_input_with(0, d.make("Not", [flag], flag.producer(), BOOL))


@kind("guard by the flag of the step before", at.stale_guards)
def _stale_guard(d: Damaged, site: str) -> None:
    node, good = d.nodes[site], d.role("good_steps")
    assert good is not None and good.dtype is not None
    zero = d.constant(np.asarray(0, dtype=good.dtype.numpy()))
    node.replace_input_with(0, d.make("Greater", [good, zero], None, BOOL))


@kind("never take the next value", at.applied_guards)
def _never(d: Damaged, site: str) -> None:
    d.nodes[site].replace_input_with(1, d.nodes[site].inputs[2])


@kind("unguard an accumulator", at.accumulators)
def _unguard_accumulator(d: Damaged, site: str) -> None:
    node = d.nodes[site]
    guard = node.inputs[1].producer()  # type: ignore[union-attr]
    node.replace_input_with(1, guard.inputs[1])  # type: ignore[union-attr]


@kind("add 0.0 on a skipped step", at.zero_adders)
def _plus_zero(d: Damaged, site: str) -> None:
    node = d.nodes[site]
    kept = node.inputs[2]
    assert kept is not None and kept.dtype is not None
    node.replace_input_with(2, d.constant(np.asarray(0.0, dtype=kept.dtype.numpy())))


# --- the update rule and its state ------------------------------------------------------------------------------------


def _rule_output(d: Damaged, index: int) -> tuple[ir.Function, ir.Value, ir.Node]:
    rule = d.rule
    assert rule is not None
    value = rule.outputs[index]
    node = value.producer()
    assert node is not None
    return rule, value, node


@kind("grow on overflow", at.function)
def _grow_on_overflow(d: Damaged, site: str) -> None:
    _, _, node = _rule_output(d, 0)
    grown, lowered = node.inputs[1], node.inputs[2]
    node.replace_input_with(1, lowered)
    node.replace_input_with(2, grown)


@kind("do not reset the good steps", at.function)
def _no_reset(d: Damaged, site: str) -> None:
    _, _, node = _rule_output(d, 1)
    inner = node.inputs[1].producer()  # type: ignore[union-attr]
    node.replace_input_with(1, inner.inputs[1])  # type: ignore[union-attr]


@kind("keep the good steps on a skipped step", at.function)
def _keep_count(d: Damaged, site: str) -> None:
    rule, _, node = _rule_output(d, 1)
    node.replace_input_with(2, rule.inputs[1])


@kind("grow beyond float32", at.function)
def _grow_beyond(d: Damaged, site: str) -> None:
    """Lose the test whether the grown scale is finite."""
    _, _, node = _rule_output(d, 0)
    select = node.inputs[1].producer()  # type: ignore[union-attr]
    either = select.inputs[0].producer()  # type: ignore[union-attr]
    select.replace_input_with(0, either.inputs[0])  # type: ignore[union-attr]


@kind("drop the floor of the scale", at.function)
def _no_floor(d: Damaged, site: str) -> None:
    _, _, node = _rule_output(d, 0)
    floor = node.inputs[2].producer()  # type: ignore[union-attr]
    node.replace_input_with(2, floor.inputs[0])  # type: ignore[union-attr]


@kind("another period", at.function)
def _period(d: Damaged, site: str) -> None:
    call = next(n for n in d.graph if n.op_type == "UpdateLossScale")
    period = call.attributes["increment_period"].as_int()
    call.attributes["increment_period"] = ir.AttrInt64("increment_period", period + 1)


@kind("another multiplier", at.function)
def _multiplier(d: Damaged, site: str) -> None:
    call = next(n for n in d.graph if n.op_type == "UpdateLossScale")
    call.attributes["multiplier"] = ir.AttrFloat32("multiplier", 4.0)


@kind("do not carry the scale on", at.dynamic)
def _frozen_scale(d: Damaged, site: str) -> None:
    output = d.stamp.state.get(d.scale.name or "")
    if output is not None:
        d.replace(d.values[output], d.scale, keep=())
        return
    write = next(n for n in d.graph if n.op_type == "InPlaceAccumulatorV2" and n.inputs[0] is d.scale)
    write.replace_input_with(1, d.scale)


@kind("write a state before its readers", at.ordered)
def _unordered(d: Damaged, site: str) -> None:
    node = d.nodes[site]
    d.replace(node.outputs[0], node.inputs[2])  # type: ignore[arg-type]


@kind("add to a state instead of assigning", at.writes)
def _add(d: Damaged, site: str) -> None:
    d.nodes[site].resize_inputs(2)


@kind("forget a state in the metadata", at.explicit_state)
def _forget(d: Damaged, site: str) -> None:
    state = {name: output for name, output in d.stamp.state.items() if name != site}
    d.model.metadata_props["graphscale.state"] = json.dumps(state)


@kind("another policy in the metadata", at.dynamic)
def _policy(d: Damaged, site: str) -> None:
    policy = json.loads(d.model.metadata_props["graphscale.policy"])
    policy["config"]["multiplier"] = 3.0
    d.model.metadata_props["graphscale.policy"] = json.dumps(policy)


# --- telemetry --------------------------------------------------------------------------------------------------------


@kind("count applied steps as skipped", at.telemetry("Where", "count"), scaling="telemetry")
def _miscount(d: Damaged, site: str) -> None:
    _swap(d, site)


@kind("tell the share of gradients that are not zero", at.telemetry("Sub", "zero_fraction"), scaling="telemetry")
def _not_zero(d: Damaged, site: str) -> None:
    node = d.nodes[site]
    d.replace(node.outputs[0], node.inputs[1])  # type: ignore[arg-type]


@kind("tell another gradient", at.telemetry("If", "skip_cause"), scaling="telemetry")
def _offender(d: Damaged, site: str) -> None:
    one = d.constant(np.asarray(1, dtype=np.int64))
    d.around(d.nodes[site].outputs[1], "Add", one)
