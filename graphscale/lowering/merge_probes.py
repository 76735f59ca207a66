"""merge-probes: read large gradients once for the finite check, without writes, and merge the probes of small ones.

0 * x is 0 for a finite x and NaN otherwise, and so is the sum of all 0 * x, in any order of summation: a product of
matrices with zeros computes this sum without storing the products.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from graphscale.graph.builder import Builder, Editor, replace_inputs
from graphscale.graph.types import dtype_of
from graphscale.graph.values import Use, operand_at, uses_of
from graphscale.lowering.lowering_pass import LoweringPass
from graphscale.lowering.thresholds import count_elements
from graphscale.passes import CheckFinite
from graphscale.step.training_step import Step

__all__ = ["MergeProbes"]

_COLUMNS = 2**10  # limit for the matrix of a gradient with another rank


class MergeProbes(LoweringPass):
    """Probe gradients of at least some elements by a product with zeros, and all small ones together.

    Before: `dw.probe = ReduceSum(Mul(dw, 0)); db.probe = ReduceSum(Mul(db, 0)); dc.probe = ReduceSum(Mul(dc, 0))`
    After:  `dw.probe = ReduceSum(MatMul(zeros, dw)); small.probe = ReduceSum(Mul(Concat(db, dc), 0))`
    """

    name = "merge-probes"
    relies_on = "static shapes of gradients; others keep their probes"

    def lower(self, step: Step) -> bool:
        editor = Editor(step.graph)
        small: dict[ir.Node, list[tuple[ir.Node, ir.Node]]] = {}  # probes by the sum of all probes of a check
        is_changed = False
        for product in tuple(step.graph):
            total = _find_total(product)
            if total is None:
                continue
            if count_elements(_gradient(product)) >= self.thresholds.probe_elements:
                _probe(self.builder(editor, at=("before", product)), product, total)
                is_changed = True
            elif (reader := _only_sum(total)) is not None:
                small.setdefault(reader, []).append((product, total))
        several = [group for group in small.values() if len(group) > 1]
        for group in several:
            _probe_together(self.builder(editor, at=("before", group[-1][0])), group)
        return is_changed or bool(several)


def _gradient(product: ir.Node) -> ir.Value:
    return operand_at(Use(product, 0))


def _find_total(product: ir.Node) -> ir.Node | None:
    """Return the sum of a product with zero that the finite check has inserted."""
    if not CheckFinite.inserted(product) or product.op_type != "Mul":
        return None
    shape, uses = _gradient(product).shape, uses_of(product.outputs[0])
    if shape is None or not shape.is_static() or 0 in shape or len(uses) != 1:
        return None
    reader = uses[0].node
    return reader if reader.op_type == "ReduceSum" and len(reader.inputs) == 1 else None


def _only_sum(total: ir.Node) -> ir.Node | None:
    """Return the sum of all probes, if it is a probe's only reader: telemetry may be another."""
    uses = uses_of(total.outputs[0])
    is_only = len(uses) == 1 and uses[0].node.op_type == "Sum" and CheckFinite.inserted(uses[0].node)
    return uses[0].node if is_only else None


def _probe(build: Builder, product: ir.Node, total: ir.Node) -> None:
    """Probe a large gradient as a matrix."""
    gradient, dtype = _gradient(product), dtype_of(product.outputs[0])
    assert gradient.shape is not None
    size, is_matrix = count_elements(gradient), len(gradient.shape) == 2
    width = gradient.shape.numpy()[1] if is_matrix else min(_COLUMNS, size)
    columns = next(c for c in range(width, 0, -1) if size % c == 0)
    rows = size // columns
    gradient = build.reshape(gradient, [rows, columns], name=f"{gradient.name}.reshaped")
    name = f"graphscale/{build.mark}.zeros.{dtype.name.lower()}.{rows}"
    zeros = build.editor.shared_constant(name, np.zeros((1, rows), dtype.numpy()))
    sums = build.op("MatMul", [zeros, gradient], name=f"{gradient.name}.sums", dtype=dtype, shape=[1, columns])
    total.replace_input_with(0, sums)
    build.editor.graph.remove(product, safe=True)


def _probe_together(build: Builder, small: Sequence[tuple[ir.Node, ir.Node]]) -> None:
    """Probe small gradients as one vector."""
    product, total = small[-1]
    gradients = [_gradient(other) for other, _ in small]
    flat = [build.reshape(value, [count_elements(value)], name=f"{value.name}.reshaped") for value in gradients]
    count = sum(map(count_elements, gradients))
    joined = build.op("Concat", flat, name="small_gradients", dtype=ir.DataType.FLOAT, shape=[count], axis=0)
    product.replace_input_with(0, joined)
    product.outputs[0].shape = ir.Shape([count])
    others = [node for pair in small[:-1] for node in pair]
    reader = uses_of(total.outputs[0])[0].node
    replace_inputs(reader, [value for value in reader.inputs if value is not None and value.producer() not in others])
    build.editor.graph.remove(others, safe=True)
