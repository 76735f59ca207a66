"""SARIF 2.1.0: the requirements of the schema and of CI systems."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

import pytest

import graphscale as gs
from graphscale.checks.linting.codes import CODES
from graphscale.checks.linting.sarif import to_sarif, write_sarif
from tests.checks.linting.hand import GRADIENTS, changed, report

pytestmark = pytest.mark.static

WRONG = changed(GRADIENTS, db="db = Identity(db_scaled)")
# Of the schema: for each kind of object, the properties that must be there, and the types of all that we write.
SCHEMA: dict[str, tuple[set[str], dict[str, type]]] = {
    "sarifLog": ({"version", "runs"}, {"$schema": str, "version": str, "runs": list}),
    "run": ({"tool"}, {"tool": dict, "results": list, "columnKind": str}),
    "tool": ({"driver"}, {"driver": dict}),
    "toolComponent": ({"name"}, {"name": str, "version": str, "informationUri": str, "rules": list}),
    "reportingDescriptor": (
        {"id"},
        {
            "id": str,
            "name": str,
            "shortDescription": dict,
            "fullDescription": dict,
            "help": dict,
            "helpUri": str,
            "defaultConfiguration": dict,
        },
    ),
    "result": (
        {"message"},
        {
            "ruleId": str,
            "ruleIndex": int,
            "level": str,
            "message": dict,
            "locations": list,
            "partialFingerprints": dict,
        },
    ),
    "location": (set(), {"physicalLocation": dict, "logicalLocations": list}),
    "logicalLocation": (set(), {"name": str, "fullyQualifiedName": str, "kind": str}),
}


def check(kind: str, found: dict[str, Any]) -> dict[str, Any]:
    required, types = SCHEMA[kind]
    assert required <= set(found) <= set(types)
    for key, value in found.items():
        assert type(value) is types[key], (kind, key)
    return found


def check_log(log: dict[str, Any]) -> dict[str, Any]:
    """Check a log against the schema, and return its run."""
    check("sarifLog", log)
    assert log["version"] == "2.1.0" and len(log["runs"]) == 1
    run = check("run", log["runs"][0])
    driver = check("toolComponent", check("tool", run["tool"])["driver"])
    assert urlparse(driver["informationUri"]).scheme == "https"
    rules = [check("reportingDescriptor", rule) for rule in driver["rules"]]
    for rule in rules:
        assert rule["shortDescription"]["text"] and rule["fullDescription"]["text"] and rule["help"]["text"]
        assert urlparse(rule["helpUri"]).scheme == "https" and rule["helpUri"].endswith(f"/{rule['id']}/")
        assert rule["defaultConfiguration"]["level"] in ("none", "note", "warning", "error")
    for result in run["results"]:
        check("result", result)
        assert rules[result["ruleIndex"]]["id"] == result["ruleId"]
        assert result["level"] == rules[result["ruleIndex"]]["defaultConfiguration"]["level"]
        for location in result["locations"]:
            check("location", location)
            assert location["physicalLocation"]["artifactLocation"]["uri"]
            for logical in location.get("logicalLocations", ()):
                check("logicalLocation", logical)
    return run


def test_the_rules_are_the_codes() -> None:
    run = check_log(to_sarif({Path("model.onnx"): report(GRADIENTS)}))
    assert run["results"] == []
    assert [rule["id"] for rule in run["tool"]["driver"]["rules"]] == list(CODES)


def test_a_finding() -> None:
    found = report(WRONG)
    (result,) = check_log(to_sarif({Path("some models/model.onnx"): found}))["results"]
    assert (result["ruleId"], result["level"]) == ("GS201", "error")
    assert found.findings[0].message in result["message"]["text"]
    (location,) = result["locations"]
    assert location["physicalLocation"]["artifactLocation"]["uri"] == "some%20models/model.onnx"
    assert [logical["name"] for logical in location["logicalLocations"]] == [found.findings[0].node, "db"]


def test_paths(tmp_path: Path) -> None:
    (result,) = check_log(to_sarif({tmp_path / "m.onnx": report(WRONG)}))["results"]
    assert result["locations"][0]["physicalLocation"]["artifactLocation"]["uri"] == (tmp_path / "m.onnx").as_uri()


def test_it_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    out = tmp_path / "out.sarif"
    write_sarif({Path("model.onnx"): report(WRONG)}, out)
    check_log(json.loads(out.read_text(encoding="utf-8")))
    assert [path.name for path in tmp_path.iterdir()] == ["out.sarif"]
    with pytest.raises(gs.GraphscaleError, match="does not exist"):
        write_sarif({Path("model.onnx"): report(WRONG)}, tmp_path / "nowhere" / "out.sarif")
