"""`graphscale diff`, and the pages that it and `graphscale inspect` write."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import graphscale as gs
from graphscale.files import saving
from tests.cli.command import contents, graphscale, refuse, succeed
from tests.cli.test_scale import rows
from tests.conftest import MODELS

pytestmark = pytest.mark.static

MOMENTUM = MODELS / "pytorch" / "mlp_momentum.onnx"


@pytest.fixture(scope="module")
def scaled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("diff") / "scaled.onnx"
    gs.scale(MOMENTUM).save(path)
    return path


def test_the_table(scaled: Path) -> None:
    printed = succeed(None, "diff", MOMENTUM, scaled)
    lines = printed.splitlines()
    assert lines[0] == f"{MOMENTUM} -> {scaled}"
    cells = [[cell.strip() for cell in line.split("│")] for line in lines]
    assert ["Div", "2", "7", "+5"] in cells
    assert ["all nodes", "60", "104", "+44"] in cells
    table = rows(printed)
    assert table["scale-loss (1)"] == ["Mul graphscale/scale-loss/ones_like.scaled"]
    assert len(table["unscale-gradients (4)"]) == 4
    assert "node_div_1:0: ones_like -> ones_like.scaled" in table["edges rewired (13)"]
    assert table["functions added (1)"] == ["graphscale::UpdateLossScale"]
    assert "removed" not in " ".join(table)


def test_json_is_the_report(scaled: Path, tmp_path: Path) -> None:
    assert json.loads(succeed(tmp_path, "diff", MOMENTUM, scaled, "--json")) == json.loads(
        json.dumps(gs.diff(MOMENTUM, scaled).to_dict())
    )


def test_exit_codes(scaled: Path) -> None:
    assert graphscale("diff", MOMENTUM, scaled, "--exit-code").returncode == 1
    assert succeed(None, "diff", MOMENTUM, MOMENTUM, "--exit-code").splitlines()[1:] == ["no difference"]
    unrelated = succeed(None, "diff", MOMENTUM, MODELS / "ort" / "conv.onnx")
    assert "the models have little to do with each other" in unrelated


class TestPages:
    def test_of_diff(self, scaled: Path, tmp_path: Path) -> None:
        printed = succeed(tmp_path, "diff", MOMENTUM, scaled, "--html", "diff.html", "--json")
        assert json.loads(printed)["different"]
        page = (tmp_path / "diff.html").read_text(encoding="utf-8")
        assert f"What changed from {MOMENTUM.name}" in page
        assert 'class="box node backward pass-scale-loss multiple"' in page

    @pytest.mark.parametrize("with_scale", [True, False])
    def test_of_inspect(self, scaled: Path, tmp_path: Path, with_scale: bool) -> None:
        model = scaled if with_scale else MOMENTUM
        printed = succeed(tmp_path, "inspect", model, "--html", "page.html")
        assert printed.splitlines()[0] == f"{model} drawn -> page.html"
        page = (tmp_path / "page.html").read_text(encoding="utf-8")
        assert ("pass-scale-loss multiple" in page) == with_scale
        assert ('class="badge enters"' in page) != with_scale

    def test_options_reach_the_drawing(self, tmp_path: Path) -> None:
        clipped = MODELS / "pytorch" / "attention_adamw_clip.onnx"
        succeed(tmp_path, "inspect", clipped, "--html", "page.html", "--loss=loss", "--seed-edge=node_div_1:0")
        page = (tmp_path / "page.html").read_text(encoding="utf-8")
        assert "node_div_1</button>" in page

    def test_an_inference_graph_is_drawn_by_diff(self, tmp_path: Path) -> None:
        evaluated = MODELS / "ort" / "artifacts" / "digits_sgd" / "eval_model.onnx"
        succeed(tmp_path, "diff", evaluated, evaluated, "--html", "page.html")
        assert "Drawn without phases and degrees" in (tmp_path / "page.html").read_text(encoding="utf-8")

    @pytest.mark.full
    def test_each_node_on_demand(self, tmp_path: Path) -> None:
        model = MODELS / "pytorch" / "attention_tied.onnx"
        counts = []
        for options in ((), ("--whole",)):
            succeed(tmp_path, "inspect", model, "--html", "page.html", "--force", *options)
            page = (tmp_path / "page.html").read_text(encoding="utf-8")
            counts.append(page.count('id="box-'))
            assert ("With --whole each node is drawn." in page) == (not options)
        succeed(tmp_path, "diff", model, model, "--html", "page.html", "--whole", "--force")
        counts.append((tmp_path / "page.html").read_text(encoding="utf-8").count('id="box-'))
        assert counts[0] < 120
        assert counts[1] == counts[2] > 200

    def test_a_page_is_replaced(self, scaled: Path, tmp_path: Path) -> None:
        page = tmp_path / "page.html"
        page.write_text('<meta name="generator" content="graphscale">')
        succeed(tmp_path, "inspect", scaled, "--html", page)
        assert page.read_text(encoding="utf-8").startswith("<!DOCTYPE html>")
        assert set(contents(tmp_path)) == {"page.html"}


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["diff", "{model}", "missing.onnx"], "cannot read missing.onnx"),
        (["diff", "missing.onnx", "{model}"], "cannot read missing.onnx"),
        (["diff", "{model}", "."], "is a folder"),
        (["diff", "{model}", "text.onnx"], "text.onnx is not an ONNX model"),
        (["diff", "{model}", "cut.onnx"], "cut.onnx is not an ONNX model"),
        (["diff", "{model}"], "B is missing"),
        (["diff", "{model}", "{model}", "--html", "no/page.html"], "does not exist; create it"),
        (["diff", "{model}", "{model}", "--html", "."], "is a folder; name the file"),
        (["diff", "{model}", "{model}", "--whole"], "--whole goes with --html"),
        (["inspect", "{model}", "--whole"], "--whole goes with --html"),
        (["diff", "{model}", "copy.onnx", "--html", "copy.onnx"], "copy.onnx is read"),
        (["diff", "{model}", "missing.onnx", "--html", "page.html"], "cannot read missing.onnx"),
        (["inspect", "copy.onnx", "--html", "./copy.onnx"], "copy.onnx is read"),
        (["inspect", "text.onnx", "--html", "page.html"], "text.onnx is not an ONNX model"),
        (["inspect", "{eval}", "--html", "page.html"], "inference"),
        (["inspect", "{model}", "--html", "no/page.html"], "does not exist; create it"),
        (["inspect", "{model}", "--html", "page.html", "--loss", "nothing"], "--loss nothing"),
        (["inspect", "stamped.onnx", "--html", "page.html"], "damaged graphscale metadata"),
        (["diff", "{model}", "stamped.onnx", "--html", "page.html", "--loss", "x"], "there is no option --loss"),
    ],
)
def test_bad_input(arguments: list[str], told: str, tmp_path: Path) -> None:
    (tmp_path / "text.onnx").write_text("this is no model, whatever its name says")
    (tmp_path / "cut.onnx").write_bytes(MOMENTUM.read_bytes()[:5000])
    (tmp_path / "copy.onnx").write_bytes(MOMENTUM.read_bytes())
    model = gs.scale(MOMENTUM).model
    model.metadata_props["graphscale.names"] = "{"
    saving.save(model, tmp_path / "stamped.onnx")
    evaluated = MODELS / "ort" / "artifacts" / "digits_sgd" / "eval_model.onnx"
    refuse(tmp_path, *(word.format(model=MOMENTUM, eval=evaluated) for word in arguments), words=(told,))
