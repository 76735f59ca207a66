"""Counters of steps and of skips."""

from __future__ import annotations

import dataclasses

import numpy as np
import onnx_ir as ir

from graphscale.graph.builder import Builder
from graphscale.policy.names import COUNTERS, ScaledValue

__all__ = ["add_counters"]


def add_counters(build: Builder, applies: ir.Value, *, in_place: bool) -> dict[ScaledValue, tuple[ir.Value, ir.Value]]:
    """Add counters, and return `{role: (present value, next value)}`, scalars.

    Args:
        build: the builder of the nodes.
        applies: the scalar bool value that decides whether the step is applied.
        in_place: True for a target that writes state in place: its counters are float32, exact to 2**24 steps.
    """
    editor, dtype = build.editor, ScaledValue.STEPS.dtype(in_place=in_place)
    states = {role: editor.state(role.wanted, np.asarray(role.default, dtype=dtype)) for role in COUNTERS}
    one, zero = (editor.constant(f"graphscale/count.{n}", np.asarray(n, dtype=dtype)) for n in (1, 0))
    build = dataclasses.replace(build, dtype=ir.DataType.from_numpy(dtype), shape=())
    following: dict[ScaledValue, ir.Value] = {}

    def add_next(role: ScaledValue, op_type: str, *operands: ir.Value) -> None:
        following[role] = build.op(op_type, operands, name=f"{role}.next")

    # Both alternatives are 1, but this write waits for the decision, like all others.
    counted = build.op("Where", [applies, one, one], name="count")
    add_next(ScaledValue.STEPS, "Add", states[ScaledValue.STEPS], counted)
    skipped = build.op("Where", [applies, zero, one], name="count")
    add_next(ScaledValue.SKIPPED_STEPS, "Add", states[ScaledValue.SKIPPED_STEPS], skipped)
    more = build.op("Add", [states[ScaledValue.CONSECUTIVE_SKIPS], one], name="count")
    add_next(ScaledValue.CONSECUTIVE_SKIPS, "Where", applies, zero, more)
    last, steps = states[ScaledValue.LAST_SKIP_STEP], following[ScaledValue.STEPS]
    add_next(ScaledValue.LAST_SKIP_STEP, "Where", applies, last, steps)
    return {role: (state, following[role]) for role, state in states.items()}
