"""Lint: findings on any training graph, scaled or not, by graphscale or by hand."""

from graphscale.linting.lint import lint
from graphscale.linting.report import Finding, LintReport

__all__ = ["Finding", "LintReport", "lint"]
