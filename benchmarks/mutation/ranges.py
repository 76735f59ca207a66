"""Damage outside of the range of random feeds, or of the tried states."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import onnx_ir as ir

from benchmarks.mutation import sites as at
from benchmarks.mutation.damaged import FLOAT, Damaged
from benchmarks.mutation.kinds import kind

BOOL, HALF, INT64 = ir.DataType.BOOL, ir.DataType.FLOAT16, ir.DataType.INT64
_Sites = Callable[[Damaged], Iterator[str]]


def _clip(d: Damaged, site: str, bound: float) -> None:
    limits = [d.number(-bound), d.number(bound)]
    d.wrap(d.values[site], lambda value: d.make("Clip", [value, *limits], value.producer()))


_CLIPPED: dict[str, _Sites] = {
    "an activation": at.activations,
    "a gradient": at.gradients,
    "a weight": at.weights,
    "a moment": at.states("moment"),
}
for _what, _sites in _CLIPPED.items():
    for _bound in (1e3, 1e10, 1e30):
        kind(f"clip {_what} at {_bound:g}", _sites)(lambda d, site, bound=_bound: _clip(d, site, bound))


@kind("clip the global norm at 1e6", at.all_of(at.gradients))
def _global_norm(d: Damaged, site: str) -> None:
    found = [d.values[name] for name in at.gradients(d)]
    squares = [d.make("ReduceSumSquare", [value], None, keepdims=0) for value in found]
    norm = d.make("Sqrt", [d.make("Sum", squares, None)], None)
    factor = d.make("Min", [d.make("Div", [d.number(1e6), norm], None), d.number(1.0)], None)
    for value, square in zip(found, squares, strict=True):
        new = d.make("Mul", [value, factor], None)
        d.replace(value, new, keep=(square.producer(), new.producer()))  # type: ignore[arg-type]


def _through_half(d: Damaged, value: ir.Value, dtype: ir.DataType = HALF) -> ir.Value:
    small = d.make("Cast", [value], value.producer(), dtype, to=dtype)
    return d.make("Cast", [small], small.producer(), value.dtype, to=value.dtype)


_ROUNDED: dict[str, _Sites] = {
    "an activation": at.activations,
    "a gradient": at.gradients,
    "a weight": at.weights,
    "a moment": at.states("moment"),
    "the loss": at.loss,
}
for _what, _sites in _ROUNDED.items():

    @kind(f"round {_what} to float16", _sites)
    def _round(d: Damaged, site: str) -> None:
        d.wrap(d.values[site], lambda value: _through_half(d, value))


@kind("divide a gradient in float16", at.gradients)
def _divide_small(d: Damaged, site: str) -> None:
    node = d.producer(site)
    small = [d.make("Cast", [value], None, HALF, to=HALF) for value in node.inputs]  # type: ignore[list-item]
    quotient = d.make("Div", small, None, HALF)
    d.replace(node.outputs[0], d.make("Cast", [quotient], None, to=FLOAT))


@kind("cast the scale to float16 where it enters", at.products)
def _small_scale(d: Damaged, site: str) -> None:
    d.nodes[site].replace_input_with(1, _through_half(d, d.scale))


@kind("unscale by the scale in float16", at.gradients)
def _small_divisor(d: Damaged, site: str) -> None:
    node = d.producer(site)
    node.replace_input_with(1, _through_half(d, node.inputs[1]))  # type: ignore[arg-type]


@kind("a dead cast to float16, and a gradient off by one in a thousand", at.gradients)
def _loosen(d: Damaged, site: str) -> None:
    _dead_cast(d, d.values[site])
    d.around(d.values[site], "Mul", d.number(1.001))


@kind("a dead cast to float16", at.loss)
def _dead(d: Damaged, site: str) -> None:
    _dead_cast(d, d.values[site])


def _dead_cast(d: Damaged, value: ir.Value) -> None:
    outputs = [ir.Value(name="dead", type=ir.TensorType(HALF))]
    d.graph.append(ir.node("Cast", [value], attributes={"to": HALF}, outputs=outputs, name="dead"))


@kind("cap a learning rate", at.rates)
def _cap_rate(d: Damaged, site: str) -> None:
    d.wrap(d.values[site], lambda value: d.make("Min", [value, d.number(1e4)], None))


@kind("cap the counter of the optimizer", at.states("counter", dtype=None))
def _cap_counter(d: Damaged, site: str) -> None:
    dtype = d.values[site].dtype
    d.wrap(d.values[site], lambda value: d.make("Min", [value, d.number(1000000, dtype)], None, dtype))


@kind("a learning rate that ends after 1900 good steps", at.stale_guards)
def _schedule(d: Damaged, site: str) -> None:
    good, guard = d.role("good_steps"), d.nodes[site]
    assert good is not None
    is_late = d.make("Greater", [good, d.number(1900, good.dtype)], None, BOOL)
    guard.replace_input_with(1, d.make("Where", [is_late, guard.inputs[2], guard.inputs[1]], None))  # type: ignore[list-item]


# --- further conditions of a skip -------------------------------------------------------------------------------------


@kind("skip where a gradient reaches 1e4", at.gradients)
def _skip_large(d: Damaged, site: str) -> None:
    size = d.make("ReduceMax", [d.make("Abs", [d.values[site]], None)], None, keepdims=0)
    d.both(d.make("Less", [size, d.number(1e4)], None, BOOL))


@kind("skip where the loss is not finite", at.loss)
def _skip_loss(d: Damaged, site: str) -> None:
    zero = d.make("Mul", [d.make("ReduceSum", [d.values[site]], None, keepdims=0), d.number(0.0)], None)
    d.both(d.make("Not", [d.make("IsNaN", [zero], None, BOOL)], None, BOOL))


@kind("skip batches of 1000 samples", at.batches)
def _skip_batches(d: Damaged, site: str) -> None:
    size = d.make("Size", [d.values[site]], None, INT64)
    d.both(d.make("Less", [size, d.number(100000, INT64)], None, BOOL))


@kind("skip at a scale of 2**100", at.dynamic)
def _skip_scales(d: Damaged, site: str) -> None:
    d.both(d.make("Less", [d.scale, d.number(2.0**100)], None, BOOL))


@kind("apply a step after 1234 good ones in any case", at.dynamic)
def _apply(d: Damaged, site: str) -> None:
    good, flag = d.role("good_steps"), d.role("all_finite")
    assert good is not None and flag is not None
    condition = d.make("Equal", [good, d.number(1234, good.dtype)], None, BOOL)
    d.wrap(flag, lambda value: d.make("Or", [value, condition], value.producer(), BOOL))


# --- the check --------------------------------------------------------------------------------------------------------


def _check(d: Damaged, site: str, make: Callable[[ir.Value], ir.Value]) -> None:
    node = d.nodes[site]
    assert node.inputs[0] is not None
    node.replace_input_with(0, make(node.inputs[0]))


@kind("check gradients rounded to float16", at.probes)
def _check_rounded(d: Damaged, site: str) -> None:
    _check(d, site, lambda value: _through_half(d, value))


@kind("check squared gradients", at.probes)
def _check_squares(d: Damaged, site: str) -> None:
    _check(d, site, lambda value: d.make("Mul", [value, value], value.producer(), value.dtype))


def _keeps_finiteness(d: Damaged, site: str) -> str | None:
    return "Floor gives NaN for NaN, an infinity for an infinity, and a finite number for all others"


@kind("check gradients without their fractions", at.probes, harmless=_keeps_finiteness)
def _check_floor(d: Damaged, site: str) -> None:
    _check(d, site, lambda value: d.make("Floor", [value], value.producer(), value.dtype))


@kind("check a gradient tiled zero times", at.probes)
def _check_tiled(d: Damaged, site: str) -> None:
    def tile(value: ir.Value) -> ir.Value:
        rank = 0 if value.shape is None else len(value.shape)
        return d.make("Tile", [value, d.constant(np.zeros(rank, np.int64))], value.producer(), value.dtype)

    _check(d, site, tile)


@kind("check a gradient cast to int32", at.probes)
def _check_integers(d: Damaged, site: str) -> None:
    _check(d, site, lambda value: _through_half(d, value, ir.DataType.INT32))


def _modern_probes(d: Damaged) -> Iterator[str]:
    if d.model.opset_imports[""] >= 19:
        yield from at.probes(d)


@kind("check a gradient through a float8 that saturates", _modern_probes)
def _check_saturated(d: Damaged, site: str) -> None:
    _check(d, site, lambda value: _through_half(d, value, ir.DataType.FLOAT8E4M3FN))


@kind("check a product with an empty tensor", at.probes)
def _check_empty(d: Damaged, site: str) -> None:
    def multiply(value: ir.Value) -> ir.Value:
        column = d.make("Reshape", [value, d.constant(np.array([-1, 1]))], None, value.dtype)
        assert value.dtype is not None
        return d.make("Mul", [column, d.constant(np.zeros((1, 0), value.dtype.numpy()))], None, value.dtype)

    _check(d, site, multiply)


@kind("guard in float16", at.applied_guards)
def _small_guard(d: Damaged, site: str) -> None:
    node = d.nodes[site]
    dtype = node.outputs[0].dtype
    small = [d.make("Cast", [value], None, HALF, to=HALF) for value in node.inputs[1:]]  # type: ignore[list-item]
    chosen = d.make("Where", [node.inputs[0], *small], None, HALF)  # type: ignore[list-item]
    d.replace(node.outputs[0], d.make("Cast", [chosen], None, dtype, to=dtype))


# --- the rule and telemetry, between the states that are tried --------------------------------------------------------


@kind("another next scale at a scale of 12345", at.next_value("loss_scale"))
def _rule_at_scale(d: Damaged, site: str) -> None:
    condition = d.make("Equal", [d.scale, d.number(12345.0)], None, BOOL)
    d.wrap(d.values[site], lambda value: d.make("Where", [condition, d.number(1.0), value], value.producer()))


@kind("another next scale after 1234 good steps", at.next_value("loss_scale"))
def _rule_at_count(d: Damaged, site: str) -> None:
    good = d.role("good_steps")
    assert good is not None
    condition = d.make("Equal", [good, d.number(1234, good.dtype)], None, BOOL)
    d.wrap(d.values[site], lambda value: d.make("Where", [condition, d.number(1.0), value], value.producer()))


@kind("count no step after 1000", at.next_value("steps"), scaling="telemetry")
def _lying_steps(d: Damaged, site: str) -> None:
    value = d.values[site]
    d.wrap(value, lambda value: d.make("Min", [value, d.number(1000, value.dtype)], value.producer(), value.dtype))


@kind("report no share of zeros above 0.999", at.role("zero_fraction"), scaling="telemetry")
def _lying_zeros(d: Damaged, site: str) -> None:
    value = d.role(site)
    assert value is not None
    d.wrap(value, lambda value: d.make("Min", [value, d.number(0.999)], value.producer()))


# --- sizes ------------------------------------------------------------------------------------------------------------


@kind("the first four samples alone", at.symbolic_batches)
def _four_samples(d: Damaged, site: str) -> None:
    zero, four = d.constant(np.array([0])), d.constant(np.array([4]))
    d.wrap(d.values[site], lambda value: d.make("Slice", [value, zero, four, zero], None, value.dtype))


@kind("fold the size of a batch of four", at.symbolic_sizes)
def _fold(d: Damaged, site: str) -> None:
    operand = d.producer(site).inputs[0]
    assert operand is not None and operand.shape is not None
    sizes = [size if isinstance(size, int) else 4 for size in operand.shape]
    d.replace(d.values[site], d.constant(np.array(sizes)))
