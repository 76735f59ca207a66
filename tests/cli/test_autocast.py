"""`graphscale autocast` and `graphscale scale --autocast`: texts, files and refusals."""

from __future__ import annotations

import json
import re
from pathlib import Path

import onnx
import pytest

import graphscale as gs
from graphscale.files.ort_checkpoint import read_checkpoint
from graphscale.ort.artifacts.autocast_folder import autocast_artifacts
from tests.build import step
from tests.cli import bad_graphs
from tests.cli.command import EARLIER, contents, graphscale, refuse, succeed
from tests.cli.test_scale import properties
from tests.conftest import MODELS, assert_all_same_bits, initial_values, load_example, run_once
from tests.ort.artifacts.training_session import FOLDERS
from tests.passes.casting.borders import assert_well_cast
from tests.passes.casting.test_constants import masked

MOMENTUM = MODELS / "pytorch" / "mlp_momentum.onnx"
FOLDER = FOLDERS / "digits_adamw"


def cast(folder: Path, *options: str, model: Path = MOMENTUM) -> onnx.ModelProto:
    """Cast a model with these options, and load what was written."""
    succeed(folder, "autocast", model, "-o", "out.onnx", *options)
    written = onnx.load(folder / "out.onnx")
    onnx.checker.check_model(written)
    return written


def test_the_table(tmp_path: Path) -> None:
    printed = succeed(tmp_path, "autocast", MOMENTUM, "-o", "out.onnx", "-v")
    report = gs.autocast(MOMENTUM).report
    lines = printed.splitlines()
    assert lines[0] == f"{MOMENTUM} in mixed precision -> out.onnx"
    rows = {}
    for line in lines:
        cells = [cell.strip() for cell in line.split("│")]
        if len(cells) == 4 and cells[0] and "operator" not in cells[0]:
            rows[cells[0]] = cells[1:]
    assert {op: (int(row[0] or 0), int(row[1] or 0)) for op, row in rows.items()} == {
        entry.op: (entry.low, entry.kept) for entry in report.ops
    }
    total = report.low_nodes + report.kept_nodes
    assert f"{report.low_nodes} of {total} nodes run in float16; {report.casts} casts" in printed
    assert f"{report.activation_bytes_before:,} -> {report.activation_bytes_after:,} bytes" in printed
    written = onnx.load(tmp_path / "out.onnx")
    assert_well_cast(onnx.load(MOMENTUM), gs.AutocastModel(written, report))


@pytest.mark.full
def test_it_writes_what_python_returns(tmp_path: Path) -> None:
    for options, arguments in (
        ([], {}),
        (["--emulate"], {"emulate": True}),
        (["--dtype=bfloat16", "--target=ort-cuda"], {"dtype": "bfloat16", "target": "ort-cuda"}),
        (["--deny=Gemm", "--deny=Relu", "--keep-node=node_mm"], {"deny": ["Gemm", "Relu"], "keep": ["node_mm"]}),
        (["--allow=ReduceMean", "--loss=loss"], {"allow": ["ReduceMean"], "loss": "loss"}),
        (["--loss-scale=dynamic"], {"loss_scale": "dynamic"}),
        (["--loss-scale=64", "--target=ort-training"], {"loss_scale": 64, "target": "ort-training"}),
        (["--loss-scale=torch", "--emulate"], {"loss_scale": gs.presets.torch(), "emulate": True}),
    ):
        assert graphscale("autocast", MOMENTUM, "-o", "out.onnx", *options, folder=tmp_path).returncode == 0
        expected = gs.autocast(MOMENTUM, **arguments)
        expected.save(tmp_path / "expected.onnx")
        assert (tmp_path / "out.onnx").read_bytes() == (tmp_path / "expected.onnx").read_bytes(), options


def test_json_is_the_report(tmp_path: Path) -> None:
    printed = succeed(tmp_path, "autocast", MOMENTUM, "-o", "out.onnx", "--json", "--emulate")
    assert json.loads(printed) == json.loads(json.dumps(gs.autocast(MOMENTUM, emulate=True).report.to_dict()))


def test_a_dry_run_writes_nothing(tmp_path: Path) -> None:
    (tmp_path / "out.onnx").write_bytes(EARLIER)
    for model in (MOMENTUM, FOLDER):
        for options in ([], ["-o", "out.onnx"], ["-o", "new", "--json"]):
            result = graphscale("autocast", model, "--dry-run", *options, folder=tmp_path)
            assert result.returncode == 0, result.stderr
            assert "float16" in result.stdout
            assert contents(tmp_path) == {"out.onnx": EARLIER}


def test_an_existing_file_is_replaced_and_a_model_by_itself(tmp_path: Path) -> None:
    path = tmp_path / "out.onnx"
    path.write_bytes(EARLIER)
    cast(tmp_path)
    assert set(contents(tmp_path)) == {"out.onnx"}
    path.write_bytes(MOMENTUM.read_bytes())
    cast(tmp_path, "--force", model=path)
    assert set(contents(tmp_path)) == {"out.onnx"}
    assert "graphscale.autocast" in properties(onnx.load(path))


def test_kept_constants_and_warnings(tmp_path: Path) -> None:
    """Constants that keep nodes in float32 are in the table's foot, warnings on stderr."""
    onnx.save(masked("big = Identity(number)", "float number = {-1e9}"), tmp_path / "model.onnx")
    printed = succeed(tmp_path, "autocast", "model.onnx", "-o", "out.onnx")
    assert "kept in float32: the constant 'number' holds -1e+09, which float16 cannot hold" in printed
    result = graphscale("autocast", MOMENTUM, "--dtype=bfloat16", "--emulate", "--dry-run")
    assert result.stderr == "warning: bfloat16 has the range of float32: no loss scale is needed\n"
    result = graphscale("autocast", MODELS / "pytorch" / "mlp_float16.onnx", "--dry-run")
    assert result.stderr.count("warning: ") == 2
    assert "small type already" in " ".join(result.stderr.split())


def test_scaled_at_once(tmp_path: Path) -> None:
    """`autocast --loss-scale` and `scale --autocast` write the same graph."""
    assert graphscale("autocast", MOMENTUM, "-o", "a.onnx", "--loss-scale=dynamic", folder=tmp_path).returncode == 0
    result = graphscale("scale", MOMENTUM, "-o", "b.onnx", "--autocast=float16", "--json", folder=tmp_path)
    assert result.returncode == 0
    assert (tmp_path / "a.onnx").read_bytes() == (tmp_path / "b.onnx").read_bytes()
    report = json.loads(result.stdout)
    assert report.pop("trial").startswith("tried on ")
    assert report["autocast"] == json.loads(json.dumps(gs.autocast(MOMENTUM).report.to_dict()))
    assert json.loads(json.dumps(gs.inspect(tmp_path / "b.onnx").to_dict())) == report
    assert initial_values(onnx.load(tmp_path / "b.onnx"))["current_loss_scale"] == 2**15


def test_the_table_of_scale_tells_of_it(tmp_path: Path) -> None:
    printed = succeed(tmp_path, "scale", MOMENTUM, "-o", "b.onnx", "--autocast=float16", "-v")
    assert re.search(rf"autocast +│ {gs.autocast(MOMENTUM).report.casts} Cast", printed)


# --- folders ----------------------------------------------------------------------------------------------------------


def test_a_folder(tmp_path: Path) -> None:
    printed = succeed(tmp_path, "autocast", FOLDER, "-o", "out", "--json")
    report = autocast_artifacts(FOLDER, tmp_path / "python")
    assert json.loads(printed) == json.loads(json.dumps(report.to_dict()))
    assert contents(tmp_path / "out") == contents(tmp_path / "python")
    assert set(contents(FOLDER)) == set(contents(tmp_path / "out"))
    for file in ("eval_model.onnx", "optimizer_model.onnx"):
        assert (tmp_path / "out" / file).read_bytes() == (FOLDER / file).read_bytes()
    before, after = (read_checkpoint(folder / "checkpoint") for folder in (FOLDER, tmp_path / "out"))
    assert before.trainable.keys() == after.trainable.keys()
    assert_all_same_bits(after.trainable, before.trainable)
    original = onnx.load(FOLDER / "training_model.onnx")
    assert_well_cast(original, gs.AutocastModel(onnx.load(tmp_path / "out" / "training_model.onnx"), report))


def test_a_folder_scaled_at_once(tmp_path: Path) -> None:
    for command in (
        ["autocast", FOLDER, "-o", "a", "--loss-scale=dynamic"],
        ["scale", FOLDER, "-o", "b", "--autocast=float16"],
    ):
        result = graphscale(*command, folder=tmp_path)
        assert result.returncode == 0, result.stderr
    assert contents(tmp_path / "a") == contents(tmp_path / "b")


def test_bad_folders(tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").write_bytes(EARLIER)
    for options, words in (
        (["-o", "full"], ("full", "--force")),
        (["-o", FOLDER], ("digits_adamw",)),
        (["-o", "new", "--seed-edge=a:0"], ("--seed-edge", "folder of artifacts")),
        (["-o", "new", "--target=onnx"], ("'onnx'", "ort-training")),
        (["-o", "new", "--dtype=bfloat16"], ("ort-training", "emulate")),
        (["-o", "new", "--deny=Nope"], ("'Nope'",)),
        (["-o", "new", "--keep-node=nope"], ("'nope'",)),
    ):
        refuse(tmp_path, "autocast", FOLDER, *options, words=words)
    assert graphscale("autocast", FOLDER, "-o", "full", "--force", folder=tmp_path).returncode == 0
    refuse(tmp_path, "autocast", "full", "-o", "twice", words=("original",))
    refuse(tmp_path, "scale", "full", "-o", "twice", "--autocast=float16", words=("original",))


# --- bad input --------------------------------------------------------------------------------------------------------

BAD_OPTIONS = {
    "bfloat16 on a CPU": (["--dtype=bfloat16"], ("'onnx'", "ort-cuda", "--emulate")),
    "an unknown target": (["--target=tpu"], ("'tpu'", "onnx, ort-cpu, ort-cuda")),
    "an unknown scale": (["--loss-scale=dynamite"], ("dynamite", "dynamic")),
    "a malformed update": (["--update=a"], ("--update a", "OUT=IN")),
    "a missing file": (["--lists=missing.json"], ("missing.json", "No such file")),
    "a folder for a file": (["--lists=folder.json"], ("folder.json", "directory")),
    "an unknown option": (["--alow=Exp"], ("--alow",)),
}
BAD_FILES = {
    "not JSON": (b"allow: [MatMul]\n", "is not JSON"),
    "deep": (b"[" * 100_000, "is not JSON"),
    "a list": (b'["MatMul"]', "must be an object"),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with an earlier result in it, and a folder with the name of a file of lists."""
    (tmp_path / "out.onnx").write_bytes(EARLIER)
    (tmp_path / "folder.json").mkdir()
    return tmp_path


@pytest.mark.parametrize("name", BAD_OPTIONS)
def test_bad_options(name: str, folder: Path) -> None:
    options, words = BAD_OPTIONS[name]
    refuse(folder, "autocast", MOMENTUM, "-o", "out.onnx", *options, words=words)


@pytest.mark.parametrize("name", BAD_FILES)
def test_bad_lists(name: str, folder: Path) -> None:
    data, words = BAD_FILES[name]
    (folder / "lists.json").write_bytes(data)
    refuse(folder, "autocast", MOMENTUM, "-o", "out.onnx", "--lists=lists.json", words=("lists.json", words))


def test_bad_models(folder: Path) -> None:
    graphs = {
        "scaled": (bad_graphs.scaled(), ("original",)),
        "cast": (gs.autocast(step()).model, ("mixed precision already", "original")),
        "float64": (in_float64(step()), ("float64", "float32")),
    }
    for name, (model, words) in graphs.items():
        (folder / f"{name}.onnx").write_bytes(model.SerializeToString())
        for command in (["autocast"], ["scale", "--autocast=float16"]):
            refuse(folder, *command, f"{name}.onnx", "-o", "out.onnx", words=words)


def in_float64(model: onnx.ModelProto) -> onnx.ModelProto:
    text = onnx.printer.to_text(model).replace("float", "double")
    return onnx.parser.parse_model(text)


def test_without_an_output(folder: Path) -> None:
    refuse(folder, "autocast", MOMENTUM, words=("-o", "--dry-run"))
    for output, word in (("nowhere/out.onnx", "nowhere"), ("folder.json", "is a folder")):
        refuse(folder, "autocast", MOMENTUM, "-o", output, words=(word,))
    refuse(folder, "autocast", "missing.onnx", "-o", "out.onnx", words=("missing.onnx",))


def test_what_is_written_computes(tmp_path: Path) -> None:
    example = load_example("pytorch/mlp_momentum")
    for options in ([], ["--emulate"], ["--emulate", "--dtype=bfloat16"]):
        result = graphscale("autocast", MOMENTUM, "-o", "out.onnx", *options, folder=tmp_path)
        assert result.returncode == 0
        outputs, _ = run_once(tmp_path / "out.onnx", example.feeds)
        assert outputs["loss"] == pytest.approx(float(example.expected["loss"]), rel=2e-2)
