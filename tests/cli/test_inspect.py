"""`graphscale inspect`: the results of the analysis, and the metadata of a scaled model."""

from __future__ import annotations

import json
from pathlib import Path

import onnx
import pytest

import graphscale as gs
from tests.cli.command import contents, graphscale, succeed
from tests.cli.test_scale import rows
from tests.conftest import MODELS

pytestmark = pytest.mark.static

ARTIFACTS = MODELS / "ort" / "artifacts" / "digits_sgd"
CLIPPED = MODELS / "pytorch" / "attention_adamw_clip.onnx"


def test_a_folder_of_artifacts(tmp_path: Path) -> None:
    gs.scale_artifacts(ARTIFACTS, tmp_path / "scaled")
    names = ["training_model.onnx", "eval_model.onnx", "optimizer_model.onnx"]
    printed = succeed(tmp_path, "inspect", ARTIFACTS)
    assert [line.strip() for line in printed.splitlines() if line.startswith(str(ARTIFACTS))] == [
        str(ARTIFACTS / name) for name in names
    ]
    assert len(rows(printed)["inputs (2)"]) == 2, "parameters are the session's"
    assert "│ 1 SGDOptimizerV2" in printed
    once = succeed(tmp_path, "inspect", "scaled")
    assert once.splitlines()[0] == ", ".join(f"scaled/{name}" for name in names)
    assert once.count("coverage") == 1
    for folder, policy in ((ARTIFACTS, None), (tmp_path / "scaled", "DynamicLossScale")):
        found = json.loads(succeed(tmp_path, "inspect", folder, "--json"))["models"]
        assert list(found) == [str(folder / name) for name in names]
        report = found[str(folder / "training_model.onnx")]
        assert (report["policy"] and report["policy"]["class_name"], report["coverage"]) == (policy, 1.0)
        assert ("operators" in found[str(folder / "eval_model.onnx")]) == (policy is None)


def test_the_table() -> None:
    printed = succeed(None, "inspect", CLIPPED)
    table = rows(printed)
    assert printed.splitlines()[0].strip() == str(CLIPPED)
    assert table["coverage"][0].startswith("100 % (")
    assert len(table["gradients (13)"]) == 13
    assert "carried state (40)" in table
    assert not {"loss scale", "target", "nodes"} & set(table)


@pytest.mark.parametrize("name", ["pytorch/label_smoothing", "ort/transformer", "ort/conv"])
def test_json_is_the_report(name: str) -> None:
    path = MODELS / f"{name}.onnx"
    found = json.loads(succeed(None, "inspect", path, "--json"))
    assert found == json.loads(json.dumps(gs.inspect(path).to_dict()))
    assert (found["coverage"], found["missed"], found["policy"], found["proved"]) == (1.0, [], None, False)
    assert found["nodes_before"] == found["nodes_after"] > 0


def test_options_reach_the_analysis() -> None:
    printed = succeed(None, "inspect", CLIPPED, "--json", "--loss=loss", "--seed-edge=node_div_1:0")
    assert [(p["node"], p["input"]) for p in json.loads(printed)["places"]] == [("node_div_1", 0)]


def test_a_scaled_model_says_what_was_done(tmp_path: Path) -> None:
    scaled = tmp_path / "scaled.onnx"
    report = gs.scale(CLIPPED, {"class_name": "FixedLossScale", "config": {"loss_scale_value": 256}}).report
    gs.scale(CLIPPED, 256).save(scaled)
    before = contents(tmp_path)
    assert json.loads(succeed(None, "inspect", scaled, "--json")) == json.loads(json.dumps(report.to_dict()))
    table = rows(succeed(None, "inspect", scaled))
    assert table["loss scale"] == ["FixedLossScale", "loss_scale_value=256.0"]
    assert table["nodes"] == [f"{report.nodes_before} before, {report.nodes_after} after"]
    assert contents(tmp_path) == before


class TestGradients:
    MODEL, FEEDS = MODELS / "pytorch" / "mse_tanh.onnx", MODELS / "pytorch" / "mse_tanh.npz"

    def test_the_table_and_json(self) -> None:
        printed = succeed(None, "inspect", self.MODEL, "--check-gradients", "--feeds", self.FEEDS)
        lines = rows(printed)["derivatives (float64)"]
        assert [line.split(",")[0] for line in lines] == [
            f"{name}: agrees" for name in ("fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias")
        ]
        assert printed.splitlines()[-1] == "gradients against the loss 'loss': 4 agrees"
        found = json.loads(succeed(None, "inspect", self.MODEL, "--check-gradients", "--feeds", self.FEEDS, "--json"))
        checked = found.pop("gradient_check")
        assert checked == json.loads(json.dumps(gs.check_gradients(self.MODEL, self.FEEDS).to_dict()))
        assert found == json.loads(json.dumps(gs.inspect(self.MODEL).to_dict()))

    def test_sizes_of_axes(self) -> None:
        printed = succeed(None, "inspect", self.MODEL, "--check-gradients", "--dim", "batch=7")
        assert "note" not in printed

    @pytest.mark.parametrize("more", [(), ("--json",)])
    def test_a_gradient_that_disagrees(self, tmp_path: Path, more: tuple[str, ...]) -> None:
        model = onnx.load(self.MODEL)
        node = next(node for node in model.graph.node if "grad.fc1.bias" in node.output)
        node.output[0] = "half"
        model.graph.node.append(onnx.helper.make_node("Add", ["half", "half"], ["grad.fc1.bias"]))
        onnx.save(model, tmp_path / "wrong.onnx")
        result = graphscale("inspect", "wrong.onnx", "--check-gradients", *more, folder=tmp_path)
        assert result.returncode == 1
        assert "it is 2 times the derivative" in " ".join(result.stdout.replace("│", " ").split())

    def test_hints_reach_the_check(self, tmp_path: Path) -> None:
        model = onnx.load(self.MODEL)
        model.graph.output.remove(next(value for value in model.graph.output if value.name == "loss"))
        onnx.save(model, tmp_path / "inner.onnx")
        options = ("--check-gradients", "--feeds", self.FEEDS, "--loss", "loss")
        printed = succeed(tmp_path, "inspect", "inner.onnx", *options)
        assert printed.splitlines()[-1] == "gradients against the loss 'loss': 4 agrees"

    @pytest.mark.parametrize("options", [("--feeds", FEEDS), ("--dim", "batch=3")])
    def test_options_without_the_check(self, options: tuple[str, ...]) -> None:
        result = graphscale("inspect", self.MODEL, *options)
        assert (result.returncode, f"{options[0]} goes with --check-gradients" in result.stderr) == (2, True)
