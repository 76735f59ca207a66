"""The report of a scaling, read from a model's metadata."""

from __future__ import annotations

from graphscale.analysis.report import GradientReport, PlaceReport, Report, StateReport
from graphscale.analysis.roles.role_table import RoleEntry
from graphscale.errors import ModelFileError
from graphscale.graph.stamp import Stamp

__all__ = ["read_report"]


def read_report(stamp: Stamp, name: str) -> Report:
    """Read the report of a scaling from a model's metadata.

    Args:
        stamp: the metadata.
        name: the model's name in messages.

    Raises:
        ModelFileError: the report is damaged.
    """
    values = dict(stamp.report)
    try:
        for key, kind in (("places", PlaceReport), ("gradients", GradientReport), ("state", StateReport)):
            values[key] = tuple(kind(**item) for item in values[key])
        values["roles"] = tuple(RoleEntry(**item) for item in values.get("roles", ()))
        for key in ("missed", "accumulators", "warnings"):
            values[key] = tuple(values[key])
        report = Report(**values)
        texts = [report.loss_found, *report.warnings, *(state.how for state in report.state)]
        texts += [text for row in report.roles for text in (row.name, row.kind, row.role, row.evidence)]
        are_flags = all(type(row.certain) is bool for row in report.roles)
        if not (are_flags and all(isinstance(text, str) for text in texts)):
            raise TypeError("evidence is text")
        return report
    except (KeyError, TypeError) as error:
        raise ModelFileError(f"{name} has damaged graphscale metadata: its report is not one") from error
