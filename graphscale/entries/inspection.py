"""The analysis of a training graph that changes nothing: its report, and the roles of its inputs and outputs."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from graphscale.analysis.hints import Hints
from graphscale.analysis.report import Report
from graphscale.analysis.roles.role_table import RoleTable
from graphscale.collector import paused_collector
from graphscale.errors import AlreadyScaledError
from graphscale.graph.damage import name_damage
from graphscale.graph.stamp import is_scaled
from graphscale.passes.preparation import prepare
from graphscale.pipeline import Model, open_copy, own_scale_of
from graphscale.step.understanding import make_report, understand

__all__ = ["inspect", "roles"]


@name_damage
@paused_collector()
def inspect(
    model: Model,
    *,
    loss: str | Sequence[str] | None = None,
    seed: str | None = None,
    gradients: Sequence[str] | None = None,
    updates: Mapping[str, str] | None = None,
    roles: Any = None,
) -> Report:
    """Analyse a training graph without changing it. Of a scaled model, return the report of its scaling.

    The arguments and errors are those of `scale`, but an open role is reported as a proposal, and a scaled model with
    arguments other than roles is an AlreadyScaledError.
    """
    work, name = open_copy(model)
    if is_scaled(work):
        if loss or seed or gradients or updates:
            raise AlreadyScaledError(
                f"{name} is scaled, and shows the report of its scaling; pass the original where you name a "
                "loss, a seed edge, gradients or updates"
            )
        from graphscale.analysis.report_reading import read_report
        from graphscale.graph.stamp_reading import read_stamp

        return read_report(read_stamp(work.metadata_props, name), name)
    hints = Hints(loss, seed, gradients or (), updates, roles)
    warnings = prepare(work, hints)
    own = own_scale_of(work, hints)
    warnings += [] if own is None else [own.warn()]
    report = make_report(understand(work, hints, asking=False))
    count = len(work.graph)
    return dataclasses.replace(report, warnings=(*warnings, *report.warnings), nodes_before=count, nodes_after=count)


def roles(model: Model, answers: Any = None) -> RoleTable:
    """Return the role of each input and output of a training graph, with its evidence.

    Args:
        model: a path, an onnx_ir model or a ModelProto; of a scaled model, the roles in its original are returned.
        answers: known roles: the content of a roles file, or None.

    Raises:
        GraphscaleError: the input is not acceptable, or an answer contradicts the graph.
    """
    return RoleTable(inspect(model, roles=answers).roles)
