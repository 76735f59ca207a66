"""telemetry: count steps and skips, and tell why a step was skipped and whether the scale is too low."""

from __future__ import annotations

import dataclasses

import numpy as np
import onnx_ir as ir

from graphscale.analysis.report import TELEMETRY
from graphscale.errors import InvalidLossScaleError
from graphscale.passes.nodes.gradient_statistics import find_offender, zero_fraction
from graphscale.passes.rewrite import Carried, Rewrite, RewritePass
from graphscale.passes.update_loss_scale import UpdateLossScale

__all__ = ["AddTelemetry"]

NAME = "telemetry"


@dataclasses.dataclass(frozen=True)
class AddTelemetry(RewritePass):
    """Add counters to the carried state, and outputs that say what happened.

    After:  `steps.next = Add(steps, 1); skipped_steps.next = Add(skipped_steps, Cast(Not(all_finite)))`
            `consecutive_skips.next = Where(all_finite, 0, Add(consecutive_skips, 1))`
            `last_skip_step.next = Where(all_finite, last_skip_step, steps.next)`
            `skip_cause, first_offender = If <then: 0, -1; else: ...> (all_finite)`
            `zero_fraction = 1 - nonzero elements / elements`, over all gradients that are checked

    `steps` counts every step, applied or not. Counters are int64; float32 where the target writes them in place, exact
    to 2**24 steps. The cause is 0 for none, 1 for NaN, 2 for infinity; the offender is an index into the gradients.
    """

    name = NAME
    sign = "#"
    optional = True
    after = UpdateLossScale

    def rewrite(self, rewrite: Rewrite) -> bool:
        finite, applies, gradients = rewrite.all_finite, rewrite.applies, rewrite.checked
        if finite is None or applies is None:
            raise InvalidLossScaleError(
                "telemetry tells of skipped steps, and a fixed loss scale skips none; add skip_nonfinite "
                "(--skip-nonfinite), or choose a dynamic one"
            )
        editor = rewrite.bound.editor
        _count(rewrite, applies)
        if gradients:
            found = find_offender(editor, gradients, finite, rewrite.bound.target, NAME)
            for role, value in zip(("cause", "offender"), found, strict=True):
                _tell(rewrite, role, value)
            _tell(rewrite, "zero_fraction", zero_fraction(editor, gradients, NAME))
        return True


def _tell(rewrite: Rewrite, role: str, value: ir.Value) -> None:
    rewrite.bound.editor.output(value, value.name or role)
    rewrite.telemetry[role] = value


def _count(rewrite: Rewrite, applies: ir.Value) -> None:
    bound = rewrite.bound
    editor = bound.editor
    dtype = np.float32 if bound.target.in_place else np.int64
    kind = ir.DataType.FLOAT if bound.target.in_place else ir.DataType.INT64
    roles = ("steps", "skipped_steps", "consecutive_skips", "last_skip_step")
    states = {role: editor.state(role, np.asarray(0, dtype=dtype)) for role in roles}
    one, zero = (editor.constant(f"graphscale/count.{n}", np.asarray(n, dtype=dtype)) for n in (1, 0))

    build = editor.builder(NAME, dtype=kind, shape=())
    # Either way it is one, but it waits for the decision, as all other writes do.
    counted = build.op("Where", [applies, one, one], name="count")
    steps = build.op("Add", [states["steps"], counted], name="steps.next")
    skipped = build.op("Where", [applies, zero, one], name="count")
    following = {
        "steps": steps,
        "skipped_steps": build.op("Add", [states["skipped_steps"], skipped], name="skipped_steps.next"),
        "consecutive_skips": build.op(
            "Where",
            [applies, zero, build.op("Add", [states["consecutive_skips"], one], name="count")],
            name="consecutive_skips.next",
        ),
        "last_skip_step": build.op("Where", [applies, states["last_skip_step"], steps], name="last_skip_step.next"),
    }
    for role, value in following.items():
        state = states[role]
        editor.output(value, f"{state.name}.next")
        if bound.target.in_place:
            bound.write_in_place(state, value, NAME)
        rewrite.carried.append(Carried(state, value, bound.target.in_place, TELEMETRY, guarded=False))
        rewrite.telemetry[role] = state
