"""Statistics of a step's gradients: the first non-finite one, the cause, and the share of zeros."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np
import onnx_ir as ir

from graphscale.graph.builder import Builder, Editor
from graphscale.graph.types import dtype_of
from graphscale.passes.nodes.flat_values import flatten
from graphscale.policy.names import ScaledValue
from graphscale.targets import Target

__all__ = ["find_offender", "zero_fraction"]

_FLAG, _REAL, _INDEX = ir.DataType.BOOL, ir.DataType.FLOAT, ir.DataType.INT64
_NAN, _INF = 1, 2  # the causes; 0 is none
_FOUND = (ScaledValue.CAUSE, ScaledValue.OFFENDER)


def zero_fraction(build: Builder, gradients: Sequence[ir.Value]) -> ir.Value:
    """Add the share of gradient elements that are zero, a float32 scalar from 0 to 1."""
    build = dataclasses.replace(build, prefix="zeros", dtype=_REAL, shape=())

    def count(flags: ir.Value) -> ir.Value:
        return build.op("ReduceSum", [build.cast(flags, _REAL)], keepdims=0)

    # A cast to bool gives true for all numbers but zero, and for NaN.
    flags = [build.cast(gradient, _FLAG) for gradient in gradients]
    nonzero = build.op("Sum", [count(flag) for flag in flags])
    total = _known_total(build.editor, gradients)
    if total is None:
        zeros = [count(build.op("Not", [flag], like=flag, dtype=_FLAG)) for flag in flags]
        total = build.op("Sum", [nonzero, *zeros])
    share = build.op("Div", [nonzero, total])
    one = build.editor.constant("graphscale/telemetry.one", np.asarray(1, dtype=np.float32))
    return build.op("Sub", [one, share], name=ScaledValue.ZERO_FRACTION.wanted)


def _known_total(editor: Editor, gradients: Sequence[ir.Value]) -> ir.Value | None:
    """Add the number of elements, at least 1, as a constant, if all shapes are known."""
    known = [g.shape for g in gradients if g.shape is not None and g.shape.is_static()]
    if len(known) < len(gradients):
        return None
    total = max(1, sum(int(np.prod(shape.numpy(), dtype=np.int64)) for shape in known))
    return editor.constant("graphscale/telemetry.elements", np.asarray(total, dtype=np.float32))


def find_offender(
    build: Builder,
    gradients: Sequence[ir.Value],
    all_finite: ir.Value,
    target: Target,
    activations: Mapping[ir.Value, ir.DataType],
) -> tuple[ir.Value, ...]:
    """Add nodes that find the first non-finite gradient, and the first non-finite value of some others.

    On the CPU, an `If` limits the search to non-finite steps. On CUDA, where an `If` waits for the host, every step
    includes the search.

    Args:
        build: the builder of the nodes.
        gradients: the gradients.
        all_finite: the result of the finite check, a scalar bool value.
        target: the target, for the choice between an `If` and standard nodes.
        activations: floating-point values of the forward pass with their dtypes; none on CUDA.

    Returns:
        int64 scalars: the cause, 0 none, 1 NaN, 2 infinity and no NaN in that gradient; the gradient's index, -1 for
        none; and, with activations, the index of the first non-finite one, -1 for none.
    """
    if target.cuda:
        return _on_device(build, gradients, all_finite)
    finite = dataclasses.replace(build, prefix="finite").within(f"{build.mark}.finite")
    offender = dataclasses.replace(build, prefix="offender", dtype=_REAL, shape=()).within(f"{build.mark}.offender")
    names = [role.wanted for role in (*_FOUND, ScaledValue.ACTIVATION)[: 3 if activations else 2]]
    found = _search(offender, gradients)
    found += (_first_bad(offender, activations),) if activations else ()
    branches = {
        "then_branch": finite.closed([finite.number(0, _INDEX), *(finite.number(-1, _INDEX) for _ in names[1:])]),
        "else_branch": offender.closed(found),
    }
    return tuple(build.node("If", [all_finite], [(n, _INDEX, ()) for n in names], attributes=branches).outputs)


def _on_device(build: Builder, gradients: Sequence[ir.Value], all_finite: ir.Value) -> tuple[ir.Value, ...]:
    build = dataclasses.replace(build, prefix="telemetry", dtype=_REAL, shape=())
    values = _search(build, gradients)
    results = []
    for role, value in zip(_FOUND, values, strict=True):
        nothing = np.asarray(role.default, dtype=np.int64)
        constant = build.editor.constant(f"graphscale/telemetry.no_{role.wanted}", nothing)
        results.append(build.op("Where", [all_finite, constant, value], name=role.wanted, dtype=_INDEX))
    return tuple(results)


def _first_bad(build: Builder, values: Mapping[ir.Value, ir.DataType]) -> ir.Value:
    """Add the index of the first non-finite value, -1 for none."""
    row, nothing = build.number([-1], _INDEX), build.number(0, _REAL)
    flags = [build.op("IsNaN", [_probe(build, value, dtype, row)[1]], dtype=_FLAG) for value, dtype in values.items()]
    bad = [build.op("Where", [flag, build.number(len(values) - i, _REAL), nothing]) for i, flag in enumerate(flags)]
    weight = build.op("Max", bad)
    position = build.cast(build.op("Sub", [build.number(len(values), _REAL), weight]), _INDEX)
    found = build.op("Greater", [weight, nothing], dtype=_FLAG)
    return build.op("Where", [found, position, build.number(-1, _INDEX)], dtype=_INDEX)


def _probe(build: Builder, value: ir.Value, dtype: ir.DataType, row: ir.Value) -> tuple[ir.Value, ir.Value]:
    """Add a value as a vector of float32 or float64, and a scalar: NaN if the value is not finite."""
    flat, products, _, wide = flatten(build, value, dtype, row)
    return flat, build.op("ReduceSum", [products], dtype=wide, keepdims=0)


def _search(build: Builder, gradients: Sequence[ir.Value]) -> tuple[ir.Value, ...]:
    """Add the cause and the index of the first non-finite gradient, if any."""
    row = build.number([-1], _INDEX)
    count = len(gradients)
    nothing = build.number(0, _REAL)
    bad, nan = [], []
    for i, gradient in enumerate(gradients):
        flat, probe = _probe(build, gradient, dtype_of(gradient), row)
        own = build.number(count - i, _REAL)
        bad.append(build.op("Where", [build.op("IsNaN", [probe], dtype=_FLAG), own, nothing]))
        flags = build.cast(build.op("IsNaN", [flat], like=flat, dtype=_FLAG), _REAL)
        nan.append(build.op("ReduceSum", [flags], shape=[1], keepdims=1))
    # The first non-finite gradient has the largest weight. ArgMax and ReduceMax lack CUDA kernels in some opsets and
    # releases.
    weight = build.op("Max", bad)
    number = build.number(count, _REAL)
    # If all gradients are finite, the result is the last position, which is a valid index.
    position = build.op("Min", [build.op("Sub", [number, weight]), build.number(count - 1, _REAL)])
    index = build.cast(position, _INDEX)
    nans = build.op("Gather", [build.op("Concat", nan, shape=[count], axis=0), index], axis=0)
    has_nan = build.op("Greater", [nans, nothing], dtype=_FLAG)
    causes = [build.number(cause, _INDEX) for cause in (_NAN, _INF)]
    return build.op("Where", [has_nan, *causes], dtype=_INDEX), index
