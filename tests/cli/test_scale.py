"""`graphscale scale`: texts and files."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sysconfig
from collections import Counter
from pathlib import Path
from typing import Any

import onnx
import onnx.parser
import pytest

import graphscale as gs
from graphscale.passes import AddTelemetry
from graphscale.targets import TARGETS
from tests.build import FORWARD, step
from tests.cli import bad_graphs
from tests.cli.command import EARLIER, contents, graphscale, succeed
from tests.conftest import MODELS

MOMENTUM = MODELS / "pytorch" / "mlp_momentum.onnx"
CARRIED = {"current_loss_scale": "current_loss_scale.next", "good_steps": "good_steps.next"}


def scale(folder: Path, *options: str, model: Path = MOMENTUM) -> onnx.ModelProto:
    """Scale a model with these options, and load what was written."""
    succeed(folder, "scale", model, "-o", "scaled.onnx", *options)
    written = onnx.load(folder / "scaled.onnx")
    onnx.checker.check_model(written)
    return written


def properties(model: onnx.ModelProto) -> dict[str, str]:
    return {entry.key: entry.value for entry in model.metadata_props}


def rows(table: str) -> dict[str, list[str]]:
    """The rows of a printed table: `{first column: lines of the second}`."""
    found: dict[str, list[str]] = {}
    for line in table.splitlines():
        name, separator, value = line.partition("│")
        if separator and name.strip():
            found[name.strip()] = []
        if separator:
            found[list(found)[-1]].append(value.strip())
    return found


def test_the_table(tmp_path: Path) -> None:
    printed = succeed(tmp_path, "scale", MOMENTUM, "-o", "scaled.onnx", "--verbose")
    table, original = rows(printed), onnx.load(MOMENTUM)
    written = onnx.load(tmp_path / "scaled.onnx")
    assert " ".join(printed.partition("loss  ")[0].split()) == f"{MOMENTUM} scaled -> scaled.onnx"
    assert table["loss"][0].startswith("loss (")
    assert table["scale enters"] == ["ones_like at node_div_1:0"]
    assert table["coverage"] == ["100 % (3 of 3 backward contractions)"]
    assert len(table["gradients (4)"]) == 4
    names = [tensor.name for tensor in original.graph.input]
    state = [re.fullmatch(r"(\S+) -> (\S+)", line) for line in table["carried state (10)"]]
    assert {match[1] for match in state if match} == {*CARRIED, *(n for n in names if re.search("fc|momentum", n))}
    assert {match[2] for match in state if match} == {o.name for o in written.graph.output} - {"loss", "all_finite"}
    assert table["loss scale"] == [
        "DynamicLossScale",
        "initial_loss_scale=32768.0, increment_period=2000, multiplier=2.0",
    ]
    assert table["target"] == ["onnx"]
    assert table["nodes"] == [f"{len(original.graph.node)} before, {len(written.graph.node)} after"]
    counts: dict[str, Counter[str]] = {}
    for node in written.graph.node:
        for entry in node.metadata_props:
            if entry.key == "graphscale.pass":
                counts.setdefault(entry.value, Counter())[node.op_type] += 1
    assert set(counts) == {"scale-loss", "unscale-gradients", "check-finite", "update-loss-scale", "guard-updates"}
    for name, counter in counts.items():
        assert table[name] == [", ".join(f"{count} {op}" for op, count in counter.items())]
    assert counts["unscale-gradients"] == {"Div": 4}
    assert counts["guard-updates"] == {"Where": 8}


def test_three_lines_by_default(tmp_path: Path) -> None:
    *lines, trial = succeed(tmp_path, "scale", MOMENTUM, "-o", "scaled.onnx").splitlines()
    assert lines == [
        f"{MOMENTUM} scaled -> scaled.onnx",
        "coverage: 100 % (3 of 3 backward contractions); proof: every output and carried state is free of the scale",
    ]
    assert trial.startswith("trial: tried on ONNX Runtime ")


def test_a_long_table_is_cut_and_says_where_the_rest_is(tmp_path: Path) -> None:
    path = MODELS / "pytorch" / "attention_sgd.onnx"
    assert rows(succeed(None, "inspect", path))["gradients (15)"][12:] == ["... and 3 more (-v shows all)"]
    assert len(rows(succeed(None, "inspect", path, "-v"))["gradients (15)"]) == 15


@pytest.mark.parametrize("name", ["pytorch/mlp_momentum", "jax/mlp_adam", "ort/gradbuilder_regression"])
def test_json_is_the_report(name: str, tmp_path: Path) -> None:
    path, output = MODELS / f"{name}.onnx", tmp_path / "scaled.onnx"
    printed = succeed(None, "scale", path, "-o", output, "--json")
    expected = json.loads(json.dumps(gs.scale(path, trial=True).report.to_dict()))
    assert json.loads(printed) == expected
    assert expected.pop("trial").startswith("tried on ONNX Runtime ")
    assert json.loads(json.dumps(gs.inspect(output).to_dict())) == expected


def test_a_dry_run_writes_nothing(tmp_path: Path) -> None:
    (tmp_path / "scaled.onnx").write_bytes(EARLIER)
    before = contents(tmp_path)
    for options in ([], ["-o", "scaled.onnx"], ["-o", "new.onnx", "--json"]):
        printed = succeed(tmp_path, "scale", MOMENTUM, "--dry-run", *options)
        assert "100" in printed or json.loads(printed)["coverage"] == 1
        assert contents(tmp_path) == before


def test_telemetry_before_the_model_does_not_take_it_for_a_form(tmp_path: Path) -> None:
    succeed(tmp_path, "scale", "--telemetry", MOMENTUM, "-o", "scaled.onnx")
    gs.scale(MOMENTUM, telemetry=True).save(tmp_path / "expected.onnx")
    assert (tmp_path / "scaled.onnx").read_bytes() == (tmp_path / "expected.onnx").read_bytes()


@pytest.mark.parametrize(
    ("options", "arguments"),
    [
        (["--loss-scale=128"], {"loss_scale": 128}),
        (["--loss-scale=1e3"], {"loss_scale": 1000}),
        (
            ["--loss-scale=dynamic", "--initial-loss-scale=8", "--increment-period=5", "--multiplier=4"],
            {"loss_scale": gs.DynamicLossScale(8, 5, 4)},
        ),
        (["--loss-scale=policy.json"], {"loss_scale": gs.DynamicLossScale(64, 10)}),
        (["--loss-scale=policy.json", "--increment-period=3"], {"loss_scale": gs.DynamicLossScale(64, 3)}),
        (["--loss-scale=fixed.json"], {"loss_scale": 16}),
        (["--loss-scale=64", "--skip-nonfinite"], {"loss_scale": 64, "skip_nonfinite": True}),
        (["--expose-scaled-loss"], {"expose_scaled_loss": True}),
        (["--telemetry"], {"telemetry": True}),
        (["--telemetry", "--target=onnx"], {"telemetry": True}),
        (["--telemetry", "ranges"], {"telemetry": "ranges"}),
        (["--telemetry=ranges", "--telemetry-every=7"], {"telemetry": AddTelemetry(ranges=True, every=7)}),
        (["--telemetry", "ranges,activations"], {"telemetry": AddTelemetry(ranges=True, activations=True)}),
        *(([f"--target={target}"], {"target": target}) for target in TARGETS),
    ],
    ids=str,
)
def test_it_writes_what_python_returns(options: list[str], arguments: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "policy.json").write_text(gs.DynamicLossScale(64, 10).to_json())
    (tmp_path / "fixed.json").write_text('{"class_name": "FixedLossScale", "config": {"loss_scale_value": 16}}')
    scale(tmp_path, *options)
    gs.scale(MOMENTUM, **arguments).save(tmp_path / "expected.onnx")
    assert (tmp_path / "scaled.onnx").read_bytes() == (tmp_path / "expected.onnx").read_bytes()


def test_naming_state_and_places(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    onnx.save(bad_graphs.ambiguous_ema(), path)
    written = scale(tmp_path, "--update=ema_next=ema", "--update=w1_next=w1", model=path)
    assert json.loads(properties(written)["graphscale.state"]) == {
        **CARRIED,
        "ema": "ema_next",
        "w1": "w1_next",
        "w2": "w2_next",
    }
    onnx.save(bad_graphs.moment_without_decay(), path)
    written = scale(tmp_path, "--update=m_next=m", model=path)
    assert json.loads(properties(written)["graphscale.state"])["m"] == "m_next"
    written = scale(tmp_path, "--gradient=m_next", model=path)
    assert "m" not in json.loads(properties(written)["graphscale.state"])
    onnx.save(bad_graphs.named_seed(), path)
    scale(tmp_path, "--seed-edge=seed:0", "--loss=loss", model=path)
    assert [(p.node, p.input) for p in gs.inspect(tmp_path / "scaled.onnx").places] == [("seed", 0)]


def test_an_existing_file_is_replaced(tmp_path: Path) -> None:
    output = tmp_path / "scaled.onnx"
    output.write_bytes(EARLIER)
    scale(tmp_path)
    assert set(contents(tmp_path)) == {"scaled.onnx"}
    onnx.checker.check_model(onnx.load(output))
    mask = os.umask(0)
    os.umask(mask)
    assert output.stat().st_mode & 0o777 == 0o666 & ~mask


def test_a_backward_pass_without_contractions_has_nothing_to_protect(tmp_path: Path) -> None:
    model = onnx.parser.parse_model("""
        <ir_version: 10, opset_import: ["" : 20]>
        step (float[8] x, float[8] t, float[8] w) => (float loss, float[8] dw) <float quarter = {0.25}>
        {
            y = Mul(x, w)
            d = Sub(y, t)
            square = Mul(d, d)
            loss = ReduceMean<keepdims = 0>(square)
            dy = Mul(d, quarter)
            dw = Mul(dy, x)
        }
    """)
    onnx.save(model, tmp_path / "model.onnx")
    inspected = succeed(tmp_path, "inspect", "model.onnx", "--html", "page.html")
    scaled = succeed(tmp_path, "scale", "model.onnx", "-o", "scaled.onnx")
    said = "nothing to protect (no contraction and no gradient operator in the backward pass)"
    assert rows(inspected)["coverage"] == [said]
    assert f"coverage: {said}; proof: " in scaled
    assert said in (tmp_path / "page.html").read_text()
    assert json.loads(succeed(tmp_path, "inspect", "scaled.onnx", "--json"))["coverage"] is None
    verified = succeed(tmp_path, "verify", "model.onnx", "scaled.onnx", "--runs=1")
    assert "backward contractions scaled holds: there is nothing to protect" in " ".join(verified.split())


def test_a_model_is_replaced_by_its_scaled_self(tmp_path: Path) -> None:
    path = tmp_path / "scaled.onnx"
    onnx.save(step(), path)
    scale(tmp_path, "--force", model=path)
    assert gs.inspect(path).policy is not None


def test_a_warning_goes_to_stderr(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    functions = '<domain: "nets", opset_import: ["" : 20]> activate (v) => (r) { r = Tanh(v) }'
    onnx.save(step(forward=FORWARD.replace("Tanh(h)", "nets.activate(h)"), domains=["nets"], functions=functions), path)
    result = graphscale("scale", path, "-o", tmp_path / "scaled.onnx")
    assert result.returncode == 0
    assert result.stderr == "warning: the model-local functions nets::activate were inlined\n"
    as_json = graphscale("scale", path, "--dry-run", "--json")
    assert json.loads(as_json.stdout)["warnings"] == ["the model-local functions nets::activate were inlined"]


@pytest.mark.full
def test_the_console_script_is_the_same(tmp_path: Path) -> None:
    command = Path(sysconfig.get_path("scripts"), "graphscale")
    as_script = subprocess.run(
        [command, "inspect", MOMENTUM, "--json"], capture_output=True, text=True, timeout=60, check=True
    )
    assert as_script.stdout == graphscale("inspect", MOMENTUM, "--json").stdout
