"""Counters of steps and of skips."""

from __future__ import annotations

import dataclasses

import numpy as np
import onnx_ir as ir

from graphscale.graph.builder import Builder

__all__ = ["add_counters"]


def add_counters(build: Builder, applies: ir.Value, kind: ir.DataType) -> dict[str, tuple[ir.Value, ir.Value]]:
    """Add counters, and return `{role: (present value, next value)}`, scalars: int64, or float32, exact to 2**24 steps.

    `applies` is the scalar bool value that decides whether the step is applied.
    """
    dtype, editor = kind.numpy(), build.editor
    roles = ("steps", "skipped_steps", "consecutive_skips", "last_skip_step")
    states = {role: editor.state(role, np.asarray(0, dtype=dtype)) for role in roles}
    one, zero = (editor.constant(f"graphscale/count.{n}", np.asarray(n, dtype=dtype)) for n in (1, 0))

    build = dataclasses.replace(build, dtype=kind, shape=())
    # Both alternatives are 1, but this write waits for the decision, like all others.
    counted = build.op("Where", [applies, one, one], name="count")
    steps = build.op("Add", [states["steps"], counted], name="steps.next")
    skipped = build.op("Where", [applies, zero, one], name="count")
    all_skipped = build.op("Add", [states["skipped_steps"], skipped], name="skipped_steps.next")
    more = build.op("Add", [states["consecutive_skips"], one], name="count")
    in_a_row = build.op("Where", [applies, zero, more], name="consecutive_skips.next")
    last = build.op("Where", [applies, states["last_skip_step"], steps], name="last_skip_step.next")
    return dict(zip(roles, zip(states.values(), (steps, all_skipped, in_a_row, last), strict=True), strict=True))
