"""`graphscale verify`: exit codes, the table, JSON, the counterexample file and running it again."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import numpy as np
import onnx
import pytest

import graphscale as gs
from fuzz.hostile.bench import fill
from tests.checks.verification.test_counterexamples import damaged
from tests.cli.bad_graphs import squared_moment_without_decay
from tests.cli.command import contents, graphscale, refuse, succeed
from tests.conftest import MODELS, load_example

ARTIFACTS = MODELS / "ort" / "artifacts" / "digits_sgd"
ORIGINAL = MODELS / "pytorch" / "mlp_momentum.onnx"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sound scaled graph, and damaged ones."""
    made = tmp_path_factory.mktemp("verify")
    gs.scale(ORIGINAL).save(made / "sound.onnx")
    for name, kind in (("weight", "unguard a weight"), ("proof", "unscale where the scale enters")):
        gs.ScaledModel(damaged(kind), gs.inspect(ORIGINAL)).save(made / f"{name}.onnx")
    gs.scale_artifacts(ARTIFACTS, made / "artifacts")
    return made


@pytest.mark.full
def test_a_sound_graph(folder: Path) -> None:
    before = contents(folder)
    lines = succeed(None, "verify", ORIGINAL, folder / "sound.onnx", "--runs=1").splitlines()
    assert [line.split()[0] for line in lines[1:17]] == ["proof"] * 12 + ["measure"] * 4
    assert all(" holds: " in line for line in lines[1:17])
    assert lines[-1].startswith("verified, exact (")
    assert contents(folder) == before


def test_a_narrow_terminal(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.cli.command.TERMINAL", {"COLUMNS": "80", "NO_COLOR": "1"})
    lines = succeed(None, "verify", ORIGINAL, folder / "sound.onnx", "--runs=1").splitlines()
    assert "proof    carried state guarded: holds: 8 states" in [line.rstrip() for line in lines]
    assert max(map(len, lines[1:])) <= 80


def test_checks_that_failed_and_those_without_a_proof_are_counted(folder: Path, tmp_path: Path) -> None:
    model = onnx.load(ORIGINAL)
    next(node for node in model.graph.node if node.op_type == "Relu").op_type = "Tanh"
    onnx.save(model, tmp_path / "another.onnx")
    scaled = tmp_path / "scaled.onnx"
    scaled.write_bytes((folder / "sound.onnx").read_bytes())
    done = graphscale("verify", "another.onnx", scaled, "--runs=1", folder=tmp_path)
    assert done.returncode == 1
    assert "3 checks failed, 3 not proved (" in done.stdout


@pytest.mark.full
def test_a_counterexample_is_written_and_its_command_runs_it_again(folder: Path, tmp_path: Path) -> None:
    scaled = tmp_path / "a step.onnx"
    scaled.write_bytes((folder / "weight.onnx").read_bytes())
    result = graphscale("verify", ORIGINAL, scaled, "--runs=1")
    assert (result.returncode, result.stderr) == (1, "")
    written = tmp_path / "a step.onnx.counterexample.npz"
    assert set(contents(tmp_path)) == {scaled.name, written.name}
    command = result.stdout.splitlines()[-1].partition(": ")[2]
    words = shlex.split(command)
    assert words == ["graphscale", "verify", str(ORIGINAL), str(scaled), "--replay", str(written)]

    again = graphscale(*words[1:])
    assert (again.returncode, again.stderr) == (1, "")
    table = again.stdout.splitlines()
    assert any("expected" in line and "got" in line for line in table)
    assert any("fc" in line and "as before the step" in line for line in table)
    shown = succeed(None, "verify", ORIGINAL, folder / "sound.onnx", "--replay", written)
    assert shown.splitlines()[-1] == "numbers agree on 1 run; nothing is proved"


@pytest.mark.full
def test_the_command_repeats_the_hints(tmp_path: Path) -> None:
    original = squared_moment_without_decay()
    onnx.save(original, tmp_path / "original.onnx")
    model = gs.scale(original, updates={"squared": "v"}).model
    assert isinstance(model, onnx.ModelProto)
    guard = next(node for node in model.graph.node if node.op_type == "Where")
    guard.input[1], guard.input[2] = guard.input[2], guard.input[1]
    onnx.save(model, tmp_path / "scaled.onnx")
    words = ("verify", "original.onnx", "scaled.onnx", "--update", "squared=v")
    command = graphscale(*words, "--runs=1", folder=tmp_path).stdout.splitlines()[-1].partition(": ")[2]
    assert command == shlex.join(["graphscale", *words, "--replay", "scaled.onnx.counterexample.npz"])
    assert graphscale(*shlex.split(command)[1:], folder=tmp_path).returncode == 1


def test_an_input_that_the_original_lacks(tmp_path: Path) -> None:
    fill(tmp_path)
    done = graphscale("verify", "original.onnx", "rated.onnx", folder=tmp_path)
    assert done.returncode == 1
    assert "the scaled graph needs the input 'rate', which the original does not have" in " ".join(done.stdout.split())
    assert "--replay" not in done.stdout


def test_a_failed_proof_has_no_counterexample(folder: Path) -> None:
    before = contents(folder)
    result = graphscale("verify", ORIGINAL, folder / "proof.onnx", "--runs=0", folder=folder)
    assert (result.returncode, result.stderr) == (1, "")
    assert "the loss scale does not reach" in " ".join(result.stdout.split())
    assert "--replay" not in result.stdout
    assert contents(folder) == before


def test_json(folder: Path, tmp_path: Path) -> None:
    case = tmp_path / "case.npz"
    result = graphscale(
        "verify", ORIGINAL, folder / "weight.onnx", "--json", "--save-counterexample", case, folder=tmp_path
    )
    assert (result.returncode, result.stderr) == (1, "")
    found = json.loads(result.stdout)
    assert found["ok"] is False
    assert {check["status"] for check in found["checks"]} == {"holds", "fails", "not proved"}
    assert found["counterexample"]["kind"] == "skip"
    assert found["replay"].endswith(f"--replay {case}")
    assert case.exists()
    assert json.loads(succeed(None, "verify", ORIGINAL, folder / "sound.onnx", "--json", "--runs=1"))["ok"]


def test_feeds_seed_and_dims_reach_the_runs(tmp_path: Path) -> None:
    original = MODELS / "pytorch" / "mse_tanh.onnx"
    gs.scale(original).save(tmp_path / "scaled.onnx")
    zeros = {"x": np.zeros_like(load_example("pytorch/mse_tanh").feeds["x"][:2])}
    np.savez(tmp_path / "zeros.npz", **zeros)
    common = ("verify", original, "scaled.onnx", "--runs=1", "--seed=3")
    assert "is zero" in succeed(tmp_path, *common, "--feeds=zeros.npz")
    assert "batch=4" not in succeed(tmp_path, *common, "--dim=batch=7")


BAD = {
    "no-original": (["missing.onnx", "sound.onnx"], ["missing.onnx"]),
    "no-scaled": (["ORIGINAL", "missing.onnx"], ["missing.onnx"]),
    "not-a-model": (["ORIGINAL", "text.npz"], ["text.npz", "not an ONNX model"]),
    "not-scaled": (["ORIGINAL", "ORIGINAL"], ["carries no loss scale"]),
    "no-functions": (["ORIGINAL", "functions.onnx", "--numeric"], ["lost the function graphscale::UpdateLossScale"]),
    "wrong-order": (["sound.onnx", "ORIGINAL"], ["the original comes first"]),
    "another-original": (["OTHER", "sound.onnx"], ["is not", "pass the original"]),
    "a-folder": (["ORIGINAL", "."], ["is a folder", "two single graphs"]),
    "a-model-of-artifacts": (["ARTIFACT", "artifacts/training_model.onnx"], ["artifact folder"]),
    "another-of-artifacts": (["OPTIMIZER", "artifacts/optimizer_model.onnx"], ["artifact folder"]),
    "runs": (["ORIGINAL", "sound.onnx", "--runs=-1"], ["--runs"]),
    "tolerance": (["ORIGINAL", "sound.onnx", "--tolerance=-1"], ["tolerance"]),
    "tolerance-nan": (["ORIGINAL", "sound.onnx", "--tolerance=nan"], ["tolerance"]),
    "provider": (["ORIGINAL", "sound.onnx", "--provider=GPUProvider"], ["GPUProvider"]),
    "dim": (["ORIGINAL", "sound.onnx", "--dim=batch"], ["--dim batch", "NAME=SIZE"]),
    "no-such-dim": (["ORIGINAL", "sound.onnx", "--dim=rows=2"], ["--dim rows"]),
    "no-feeds": (["ORIGINAL", "sound.onnx", "--feeds=missing.npz"], ["missing.npz"]),
    "feeds-not-npz": (["ORIGINAL", "sound.onnx", "--feeds=text.npz"], ["text.npz"]),
    "one-array": (["ORIGINAL", "sound.onnx", "--feeds=one.npy"], ["one.npy", "by name"]),
    "pickled": (["ORIGINAL", "sound.onnx", "--feeds=pickled.npz"], ["pickled.npz"]),
    "replay-not-a-case": (["ORIGINAL", "sound.onnx", "--replay=other.npz"], ["other.npz", "no counterexample"]),
    "replay-damaged": (["ORIGINAL", "sound.onnx", "--replay=damaged.npz"], ["damaged.npz", "damaged"]),
    "replay-of-other-graphs": (["ORIGINAL", "sound.onnx", "--replay=elsewhere.npz"], ["of other graphs"]),
    "nowhere": (["ORIGINAL", "weight.onnx", "--save-counterexample=nowhere/case.npz"], ["nowhere", "does not exist"]),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input(case: str, folder: Path) -> None:
    arguments, words = BAD[case]
    (folder / "text.npz").write_bytes(b"no arrays here, and no model")
    without = onnx.load(folder / "sound.onnx")
    del without.functions[:]
    onnx.save(without, folder / "functions.onnx")
    np.save(folder / "one.npy", np.zeros(3))
    np.savez(folder / "pickled.npz", x=np.asarray([{}], dtype=object))
    np.savez(folder / "other.npz", x=np.zeros(3))
    np.savez(folder / "damaged.npz", **{"graphscale.case": np.asarray("{}")})
    told = {"kind": "step", "gradient": None, "number": None, "position": None, "finite": True, "tolerance": 0.0}
    np.savez(folder / "elsewhere.npz", **{"graphscale.case": np.asarray(json.dumps({**told, "bfloat16": []}))})
    names = {
        "ORIGINAL": str(ORIGINAL),
        "OTHER": str(MODELS / "pytorch" / "mse_tanh.onnx"),
        "ARTIFACT": str(ARTIFACTS / "training_model.onnx"),
        "OPTIMIZER": str(ARTIFACTS / "optimizer_model.onnx"),
    }
    refuse(folder, "verify", *(names.get(word, word) for word in arguments), words=words)
