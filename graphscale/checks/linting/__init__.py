"""Lint: findings on any training graph, scaled or not, by graphscale or by hand."""

from graphscale.checks.linting.lint_report import Finding, LintReport
from graphscale.checks.linting.linter import lint

__all__ = ["Finding", "LintReport", "lint"]
