"""Findings in SARIF 2.1.0, the format of CI systems for notes beside the code (OASIS standard, sections as cited)."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any
from urllib.parse import quote

from graphscale.checks.linting.codes import CODES, Code
from graphscale.checks.linting.lint_report import Finding, LintReport
from graphscale.errors import DOCS_URL
from graphscale.files.writing import write_file

__all__ = ["to_sarif", "write_sarif"]

_SCHEMA = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"


def to_sarif(reports: Mapping[Path, LintReport]) -> dict[str, Any]:
    """Return the findings on files, by their paths, as a SARIF log (section 3.13) of one run."""
    codes = list(CODES)
    driver = {
        "name": "graphscale",
        "version": version("graphscale"),
        "informationUri": DOCS_URL,
        "rules": [_rule(code) for code in CODES.values()],
    }
    results = [
        _result(finding, codes.index(finding.code), path) for path, each in reports.items() for finding in each.findings
    ]
    run = {"tool": {"driver": driver}, "columnKind": "unicodeCodePoints", "results": results}
    return {"$schema": _SCHEMA, "version": "2.1.0", "runs": [run]}


def write_sarif(reports: Mapping[Path, LintReport], out: str | os.PathLike[str]) -> None:
    """Write a SARIF log atomically.

    Raises:
        OutputError: the folder does not exist, or cannot be written.
    """
    text = json.dumps(to_sarif(reports), indent=2, ensure_ascii=False)
    with write_file(out) as temporary:
        temporary.write_text(f"{text}\n", encoding="utf-8")


def _rule(code: Code) -> dict[str, Any]:
    """Return a reportingDescriptor (section 3.49)."""
    return {
        "id": code.code,
        "name": "".join(part.capitalize() for part in code.name.split("-")),
        "shortDescription": {"text": code.title},
        "fullDescription": {"text": code.why},
        "help": {"text": f"{code.why} {code.fix}", "markdown": f"{code.why}\n\n**Fix:** {code.fix}"},
        "helpUri": code.url,
        "defaultConfiguration": {"level": code.severity},
    }


def _result(finding: Finding, index: int, file: Path) -> dict[str, Any]:
    """Return a result (section 3.27), with the node or the value as its logical location (section 3.33)."""
    names = ((finding.node, "element"), (finding.value, "variable"))
    logical = [{"name": name, "fullyQualifiedName": name, "kind": kind} for name, kind in names if name]
    uri = file.as_uri() if file.is_absolute() else quote(os.fsencode(file.as_posix()))
    location: dict[str, Any] = {"physicalLocation": {"artifactLocation": {"uri": uri}}}
    if logical:
        location["logicalLocations"] = logical
    return {
        "ruleId": finding.code,
        "ruleIndex": index,
        "level": finding.severity,
        "message": {"text": f"{finding.message}. {finding.fix}"},
        "locations": [location],
        "partialFingerprints": {"graphscale/v1": f"{finding.code}:{finding.node or ''}:{finding.value or ''}"},
    }
