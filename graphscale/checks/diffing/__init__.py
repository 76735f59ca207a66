"""The differences between two models."""

from graphscale.checks.diffing.compare import diff
from graphscale.checks.diffing.diff_report import DiffReport

__all__ = ["DiffReport", "diff"]
