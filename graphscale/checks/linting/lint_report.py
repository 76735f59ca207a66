"""The findings of lint, as data."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import onnx_ir as ir

from graphscale.checks.linting.codes import CODES, Severity
from graphscale.graph.values import node_name
from graphscale.process.summary import Row, Summary

_SHOWN = 6  # findings

__all__ = ["Finding", "LintReport", "report"]


@dataclasses.dataclass(frozen=True)
class Finding:
    """A certain or doubtful mistake in a graph.

    Attributes:
        code: the stable code, such as `GS201`; `graphscale.checks.linting.codes.CODES` has its meaning.
        message: the defect, with the names of nodes and values; one sentence.
        node: the name of the node; None for a finding on a value alone.
        value: the name of the value, if any.
    """

    code: str
    message: str
    node: str | None = None
    value: str | None = None

    @property
    def severity(self) -> Severity:
        """`error`, `warning` or `note`."""
        return CODES[self.code].severity

    @property
    def why(self) -> str:
        """The harm of the mistake."""
        return CODES[self.code].why

    @property
    def fix(self) -> str:
        """The remedy."""
        return CODES[self.code].fix

    def to_dict(self) -> dict[str, Any]:
        """Return the finding as JSON data, with the texts of its code."""
        own, code = dataclasses.asdict(self), CODES[self.code]
        first = {"code": own.pop("code"), "title": code.title, "severity": code.severity}
        return {**first, **own, "why": code.why, "fix": code.fix, "page": code.page}


@dataclasses.dataclass(frozen=True, repr=False)
class LintReport(Summary):
    """The findings on a model.

    Attributes:
        findings: in graph order, errors, warnings and notes alike.
        loss_scale: the name of the loss scale, or None.
        check: the name of the finite check's result, or None.
        states: number of carried states, without those of the loss scale.
        gradients: number of values that are divided by the loss scale.
        nodes: number of nodes of the main graph.
        hint: of a step that somebody else scaled, the option that would tell more; else empty.
    """

    findings: tuple[Finding, ...]
    loss_scale: str | None = None
    check: str | None = None
    states: int = 0
    gradients: int = 0
    nodes: int = 0
    hint: str = ""

    def _summarize(self) -> tuple[str, Iterable[Row]]:
        kinds: tuple[Severity, ...] = ("error", "warning", "note")
        counts = [f"{count} {kind}{'s' * (count > 1)}" for kind in kinds if (count := self.count(kind))]
        rows: list[Row] = [(finding.code, finding.message) for finding in self.findings[:_SHOWN]]
        if len(self.findings) > _SHOWN:
            rows.append(("...", f"and {len(self.findings) - _SHOWN} more"))
        return f"{', '.join(counts) or 'no findings'} in {self.nodes} nodes", rows

    @property
    def clean(self) -> bool:
        """True if there is no finding of severity error or warning."""
        return all(finding.severity == "note" for finding in self.findings)

    def count(self, severity: Severity) -> int:
        """Count the findings of a severity."""
        return sum(finding.severity == severity for finding in self.findings)

    def to_dict(self) -> dict[str, Any]:
        """Return the report as JSON data."""
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "findings"}
        return {"clean": self.clean, **fields, "findings": [finding.to_dict() for finding in self.findings]}


def report(code: str, message: str, node: ir.Node | None = None, value: ir.Value | None = None) -> Finding:
    """Make a finding at a node, about a value."""
    return Finding(code, message, None if node is None else node_name(node), None if value is None else value.name)
