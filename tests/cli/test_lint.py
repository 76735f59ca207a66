"""`graphscale lint`: findings as a table, as JSON and as SARIF, and the exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import onnx
import pytest

import graphscale as gs
from graphscale.checks.linting.codes import CODES
from graphscale.errors import DOCS_URL
from tests.build import parse
from tests.checks.linting.hand import GRADIENTS, STEP, changed
from tests.checks.linting.test_sarif import check_log
from tests.cli.command import graphscale, refuse, succeed
from tests.conftest import MODELS

pytestmark = pytest.mark.static

FLOAT16 = MODELS / "pytorch" / "mlp_float16.onnx"
CLEAN = MODELS / "pytorch" / "mse_tanh.onnx"
ARTIFACTS = MODELS / "ort" / "artifacts" / "digits_sgd"


@pytest.fixture
def wrong(tmp_path: Path) -> Path:
    """A graph with two mistakes, alone in its folder."""
    text = changed(STEP, w_next="w_next = Where(finite, w, w_new)", zeroed="zeroed = Identity(dw)")
    path = tmp_path / "model" / "wrong.onnx"
    path.parent.mkdir()
    onnx.save(parse(text), path)
    return path


def test_nothing_found() -> None:
    first, last = succeed(None, "lint", CLEAN).splitlines()
    assert first.strip() == str(CLEAN)
    assert last.startswith("nothing found (27 nodes, no loss scale")


def test_the_table(wrong: Path) -> None:
    result = graphscale("lint", wrong)
    assert (result.returncode, result.stderr) == (1, "")
    lines = [line.strip() for line in result.stdout.splitlines()]
    for code in ("GS303", "GS403"):
        (start,) = (i for i, line in enumerate(lines) if line.startswith(code))
        text = " ".join(" ".join(lines[start:]).replace("│", " ").split())
        assert f"{CODES[code].severity}: {CODES[code].title}" in text
        assert f"why: {CODES[code].why} fix: {CODES[code].fix}" in text
    assert lines[-1] == "2 errors (25 nodes, loss scale scale, finite check finite, 1 state)"


def test_warnings_count_and_notes_do_not(tmp_path: Path) -> None:
    assert graphscale("lint", FLOAT16, folder=tmp_path).returncode == 1
    scaled = tmp_path / "scaled.onnx"
    gs.scale(CLEAN, autocast="bfloat16", target="ort-cuda").save(scaled)
    printed = succeed(tmp_path, "lint", scaled)
    assert "GS606" in printed and "1 note (" in printed


def test_json_is_the_report(wrong: Path, tmp_path: Path) -> None:
    result = graphscale("lint", wrong, "--json", folder=tmp_path)
    assert (result.returncode, result.stderr) == (1, "")
    found = json.loads(result.stdout)
    assert found == json.loads(json.dumps(gs.lint(wrong).to_dict()))
    assert (found["clean"], found["loss_scale"], found["check"], found["states"]) == (False, "scale", "finite", 1)
    assert {finding["code"] for finding in found["findings"]} == {"GS303", "GS403"}
    for finding in found["findings"]:
        assert set(finding) == {"code", "title", "severity", "message", "node", "value", "why", "fix", "page"}


def test_sarif(wrong: Path) -> None:
    folder = wrong.parent
    result = graphscale("lint", wrong.name, "--sarif", "out.sarif", folder=folder)
    assert (result.returncode, result.stderr) == (1, "")
    run = check_log(json.loads((folder / "out.sarif").read_text(encoding="utf-8")))
    assert [found["ruleId"] for found in run["results"]] == [finding.code for finding in gs.lint(wrong).findings]
    uris = {found["locations"][0]["physicalLocation"]["artifactLocation"]["uri"] for found in run["results"]}
    assert uris == {"wrong.onnx"}


def test_codes_are_chosen(wrong: Path, tmp_path: Path) -> None:
    for options, code, expected in (
        (("--select", "GS4"), 1, ["GS403"]),
        (("--ignore", "GS403", "--ignore", "GS303"), 0, []),
        (("--select", "GS3", "--select", "GS4", "--ignore", "GS403"), 1, ["GS303"]),
    ):
        result = graphscale("lint", wrong, "--json", *options, folder=tmp_path)
        assert (result.returncode, result.stderr) == (code, "")
        assert [finding["code"] for finding in json.loads(result.stdout)["findings"]] == expected


def test_the_scale_can_be_named(tmp_path: Path) -> None:
    path = tmp_path / "named.onnx"
    onnx.save(parse(changed(GRADIENTS, dw="dw = Neg(dw_scaled)", db="db = Neg(db_scaled)")), path)
    assert graphscale("lint", path, folder=tmp_path).returncode == 0
    result = graphscale("lint", path, "--scale", "scale", folder=tmp_path)
    assert result.returncode == 1 and "GS201" in result.stdout


def test_a_folder_of_artifacts(tmp_path: Path) -> None:
    gs.scale_artifacts(ARTIFACTS, tmp_path / "scaled")
    for folder, check in ((ARTIFACTS, None), (tmp_path / "scaled", "all_finite")):
        titles = [line.strip() for line in succeed(tmp_path, "lint", folder).splitlines()[::2]]
        left_out = f"{folder / 'eval_model.onnx'} is an inference graph, and left out"
        assert titles == [str(folder / "training_model.onnx"), str(folder / "optimizer_model.onnx"), left_out]
        found = json.loads(succeed(tmp_path, "lint", folder, "--json", "--sarif", "out.sarif"))["models"]
        assert [report["check"] for report in found.values()] == [check, check]
        check_log(json.loads((tmp_path / "out.sarif").read_text(encoding="utf-8")))


def test_a_folder_with_a_mistake(tmp_path: Path) -> None:
    gs.scale_artifacts(ARTIFACTS, tmp_path / "scaled")
    path = tmp_path / "scaled" / "optimizer_model.onnx"
    model = onnx.load(path)
    (node,) = (node for node in model.graph.node if node.op_type == "SGDOptimizerV2")
    model.graph.initializer.append(onnx.helper.make_tensor("always", onnx.TensorProto.BOOL, [1], [True]))
    node.input[3] = "always"
    onnx.save(model, path)
    result = graphscale("lint", tmp_path / "scaled", "--json", folder=tmp_path)
    found = json.loads(result.stdout)["models"]
    assert result.returncode == 1, found
    assert [report["clean"] for report in found.values()] == [True, False]


BAD = {
    "unknown code": (("{model}", "--select", "GS2001"), "there is no lint code 'GS2001'; did you mean GS201?"),
    "nothing near": (("{model}", "--select", "ZZ"), f"there is no lint code 'ZZ' ({DOCS_URL}lint/ lists them)"),
    "unknown name": (("{model}", "--ignore", "swapped-guard"), "there is no lint code 'swapped-guard'; did you mean"),
    "unknown scale": (("{model}", "--scale", "nothing"), "--scale nothing: the graph has no value of this name"),
    "no file": (("missing.onnx",), "cannot read missing.onnx: No such file or directory"),
    "a folder": (("{folder}",), "is a folder; pass an ONNX file"),
    "no model": (("{text}", "--sarif", "out.sarif"), "is not an ONNX model"),
    "no folder for the log": (("{model}", "--sarif", "nowhere/out.sarif"), "does not exist"),
    "a folder as the log": (("{model}", "--sarif", "."), "is a folder"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input(name: str, wrong: Path) -> None:
    folder = wrong.parent
    (folder / "text.onnx").write_text("no model\n" * 20, encoding="utf-8")
    words, message = BAD[name]
    names = {"model": wrong, "folder": folder, "text": folder / "text.onnx"}
    refuse(folder, "lint", *(word.format(**names) for word in words), words=(message,))
