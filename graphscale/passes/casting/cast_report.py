"""The report of autocast, as data."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import Any

import onnx_ir as ir

from graphscale.graph.values import node_name, op_name, uses_of
from graphscale.passes.casting.precision_plan import PrecisionPlan
from graphscale.passes.casting.region import OPTIMIZER
from graphscale.process.summary import Row, Summary, few
from graphscale.step.training_step import Step

__all__ = ["AutocastReport", "OpReport", "make_cast_report"]


@dataclasses.dataclass(frozen=True)
class OpReport:
    """The result for one operator: the number of its nodes in the small type, and the reasons for the others."""

    op: str
    low: int
    kept: int
    reasons: dict[str, int]


@dataclasses.dataclass(frozen=True, repr=False)
class AutocastReport(Summary):
    """The report of `autocast`.

    Attributes:
        dtype: the small type, `float16` or `bfloat16`.
        emulate: True if the small type is emulated by rounding in float32.
        ops: the results for operators on float32 numbers, the most frequent first.
        low_nodes: number of nodes in the small type.
        kept_nodes: number of nodes of the forward and backward pass that stay float32.
        optimizer_nodes: number of nodes of the optimizer that stay float32; `ops` does not list them.
        casts: number of inserted casts; in emulation a rounding is two.
        constants: the constants that the small type cannot hold, whose nodes stay float32.
        activation_bytes_before: the bytes of activations of known shape that the backward pass reads; an axis of
            unknown size counts as 1.
        activation_bytes_after: these bytes in mixed precision.
        warnings: notes for the user, a sentence each.
    """

    dtype: str
    emulate: bool
    ops: tuple[OpReport, ...]
    low_nodes: int
    kept_nodes: int
    optimizer_nodes: int
    casts: int
    constants: tuple[str, ...]
    activation_bytes_before: int
    activation_bytes_after: int
    warnings: tuple[str, ...]

    def _summarize(self) -> tuple[str, Iterable[Row]]:
        how = "emulated in float32" if self.emulate else f"with {self.casts} casts"
        low = [f"{report.low} {report.op}" for report in self.ops if report.low]
        kept = [f"{report.kept} {report.op}" for report in self.ops if report.kept]
        before, after = self.activation_bytes_before, self.activation_bytes_after
        rows: list[Row] = [
            (self.dtype, few(low)),
            ("float32", few(kept)),
            ("activations", f"{before:,} bytes before, {after:,} after"),
        ]
        if self.warnings:
            rows.append(("warnings", few(self.warnings, 1)))
        nodes = self.low_nodes + self.kept_nodes
        return f"{self.low_nodes} of {nodes} nodes in {self.dtype}, {how}", rows

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain dicts, lists, strings and numbers."""
        return dataclasses.asdict(self)


def make_cast_report(step: Step, plan: PrecisionPlan, dtype: ir.DataType, emulate: bool) -> AutocastReport:
    """Report a plan before its execution; casts are counted later."""
    kept = defaultdict[str, Counter[str]](Counter)
    nodes = [node for node in plan.operators if plan.reasons.get(node) != OPTIMIZER]
    for node in nodes:
        if node not in plan.low:
            kept[op_name(node)][plan.reasons[node]] += 1
    low = Counter([op_name(node) for node in nodes if node in plan.low])
    ops = (OpReport(op, low[op], kept[op].total(), dict(kept[op])) for op in {*low, *kept})
    before, after = _activation_bytes(plan)
    constants = {plan.reasons[node] for node in plan.operators if node not in plan.low}
    return AutocastReport(
        dtype=dtype.name.lower(),
        emulate=emulate,
        ops=tuple(sorted(ops, key=lambda report: (-report.low - report.kept, report.op))),
        low_nodes=len(plan.low),
        kept_nodes=len(nodes) - len(plan.low),
        optimizer_nodes=len(plan.operators) - len(nodes),
        casts=0,
        constants=tuple(sorted(reason for reason in constants if reason.startswith("the constant "))),
        activation_bytes_before=before,
        activation_bytes_after=after,
        warnings=tuple(_warnings(step, plan, dtype)),
    )


def _warnings(step: Step, plan: PrecisionPlan, dtype: ir.DataType) -> list[str]:
    warnings = []
    if not plan.low:
        warnings.append("no node runs in the small type: no allowed operator computes on float32 numbers")
    small = {ir.DataType.FLOAT16, ir.DataType.BFLOAT16}
    values = {value for value, dtype in plan.typed.items() if dtype in small}
    already = [node for node in step.graph if not values.isdisjoint(node.outputs)] if values else []
    if already:
        warnings.append(
            f"{len(already)} nodes compute in a small type already, {node_name(already[0])!r} the first; "
            "they were left unchanged"
        )
    if dtype is ir.DataType.BFLOAT16:
        warnings.append("bfloat16 has the range of float32: no loss scale is needed")
    return warnings


def _activation_bytes(plan: PrecisionPlan) -> tuple[int, int]:
    """Return the bytes of the forward values that the backward pass reads, before and after."""
    forward, before, after = plan.forward, 0, 0
    for node in filter(forward.__contains__, plan.operators):
        low = set(plan.sides[node].outputs) if node in plan.low else ()
        for value in plan.floats.intersection(node.outputs):
            if value.shape is None or all(use.node in forward for use in uses_of(value)):
                continue
            count = math.prod(axis for axis in value.shape if isinstance(axis, int))
            before += 4 * count
            after += (2 if value in low else 4) * count
    return before, after
