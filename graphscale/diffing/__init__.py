"""What changed from one model to another."""

from graphscale.diffing.compare import diff
from graphscale.diffing.report import DiffReport

__all__ = ["DiffReport", "diff"]
