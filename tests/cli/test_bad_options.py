"""Options of the command line that must be refused: config files, outputs, malformed pairs, wrong usage."""

from __future__ import annotations

from pathlib import Path

import pytest

import graphscale as gs
from tests.cli.command import EARLIER, contents, refuse
from tests.cli.test_bad_input import EXAMPLE
from tests.conftest import MODELS

pytestmark = pytest.mark.static

SCALE = ("scale", EXAMPLE, "-o", "scaled.onnx")
CONFIGS = {
    "not-json": (b"class_name: DynamicLossScale\n", "is not JSON"),
    "not-text": (b"\xff\xfe\x00{", "is not JSON"),
    "a-number": (b"1024", '"class_name"'),
    "a-list": (b'["DynamicLossScale"]', '"class_name"'),
    "no-class": (b'{"config": {}}', '"class_name"'),
    "unknown-class": (b'{"class_name": "AutoLossScale", "config": {}}', "AutoLossScale"),
    "class-is-a-list": (b'{"class_name": ["FixedLossScale"], "config": {}}', "FixedLossScale"),
    "config-is-a-number": (b'{"class_name": "FixedLossScale", "config": 8}', '"config"'),
    "more-keys": (b'{"class_name": "FixedLossScale", "config": {"loss_scale_value": 8}, "x": 1}', "'x'"),
    "wrong-key": (b'{"class_name": "DynamicLossScale", "config": {"initial": 8}}', "'initial'"),
    "missing-key": (b'{"class_name": "FixedLossScale", "config": {}}', "loss_scale_value"),
    "below-one": (b'{"class_name": "FixedLossScale", "config": {"loss_scale_value": 0.5}}', "0.5"),
    "huge": (b'{"class_name": "FixedLossScale", "config": {"loss_scale_value": 1' + b"0" * 400 + b"}}", "float32"),
    "key-twice": (b'{"class_name": "FixedLossScale", "class_name": "DynamicLossScale"}', "it has 'class_name' twice"),
    "deep": (b"[" * 100_000, "is not JSON"),
}
OPTIONS = {
    "no-config-file": (["--loss-scale=missing.json"], ["missing.json", "No such file"]),
    "config-is-a-folder": (["--loss-scale=folder.json"], ["folder.json", "directory"]),
    "initial-below-one": (["--initial-loss-scale=0.5"], ["initial_loss_scale", "at least 1", "0.5"]),
    "initial-word": (["--initial-loss-scale=big"], ["--initial-loss-scale", "number"]),
    "period-zero": (["--increment-period=0"], ["increment_period", "from 1 to 2**24"]),
    "period-half": (["--increment-period=2.5"], ["--increment-period", "integer"]),
    "multiplier-of-fixed": (["--loss-scale=8", "--multiplier=2"], ["--multiplier", "--loss-scale 8 is fixed"]),
    "update-without-input": (["--update=loss"], ["--update loss", "OUT=IN"]),
    "update-without-output": (["--update==x"], ["--update =x", "OUT=IN"]),
    "update-twice": (["--update=a=x", "--update=a=t"], ["--update a=t", "'a' is named twice"]),
    "telemetry-form": (["--telemetry=range"], ["expected 'ranges' or 'activations'", "got 'range'"]),
    "telemetry-period": (["--telemetry", "ranges", "--telemetry-every=0"], ["every 1 to 2**24 steps", "every=0"]),
    "telemetry-period-alone": (["--telemetry", "--telemetry-every=5"], ["--telemetry-every goes with", "ranges"]),
    "telemetry-on-cuda": (["--telemetry=ranges", "--target=ort-cuda"], ["'ort-cuda' has no control flow", "ort-cpu"]),
    "unknown-option": (["--loss-scaling=8"], ["--loss-scaling"]),
    "second-model": (["another.onnx"], ["another.onnx"]),
}
OUTPUTS = {
    "no-folder": ("nowhere/scaled.onnx", ["nowhere", "does not exist; create it"]),
    "a-folder": ("folder.json", ["folder.json", "is a folder; name the file"]),
    "below-a-file": ("config.json/scaled.onnx", ["config.json", "folder"]),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with an earlier result in it, and a folder with the name of a config file."""
    (tmp_path / "scaled.onnx").write_bytes(EARLIER)
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "folder.json").mkdir()
    return tmp_path


@pytest.mark.parametrize("name", CONFIGS)
def test_config_file(name: str, folder: Path) -> None:
    data, word = CONFIGS[name]
    (folder / "config.json").write_bytes(data)
    refuse(folder, *SCALE, "--loss-scale=config.json", words=("config.json", word))


@pytest.mark.parametrize("name", OPTIONS)
def test_option(name: str, folder: Path) -> None:
    options, words = OPTIONS[name]
    refuse(folder, *SCALE, *options, words=words)


@pytest.mark.parametrize("name", OUTPUTS)
def test_output(name: str, folder: Path) -> None:
    output, words = OUTPUTS[name]
    refuse(folder, "scale", EXAMPLE, "-o", output, words=words)
    before = contents(folder)
    with pytest.raises(gs.GraphscaleError, match="|".join(words)):
        gs.scale(EXAMPLE).save(folder / output)
    assert contents(folder) == before


def test_an_output_that_cannot_be_replaced(folder: Path) -> None:
    """A name that is too long for the file system: found out only when it is written."""
    refuse(folder, "scale", EXAMPLE, "-o", "scaled" * 50 + ".onnx", words=("cannot write", "too long"))


def test_no_output(tmp_path: Path) -> None:
    refuse(tmp_path, "scale", EXAMPLE, words=("-o", "--dry-run"))


@pytest.mark.parametrize(
    "arguments", [["scale"], ["inspect"], ["resize", "a.onnx"], ["inspect", EXAMPLE, "--seed-edge"]]
)
def test_usage(arguments: list[str], tmp_path: Path) -> None:
    refuse(tmp_path, *arguments)


def test_inspect_refuses_the_same(tmp_path: Path) -> None:
    sgd = MODELS / "pytorch" / "attention_sgd.onnx"
    for option, word in (
        ("--loss=nope", "--loss nope"),
        ("--gradient=nope", "--gradient nope"),
        ("--update=nope=x", "no output 'nope'"),
        ("--seed-edge=nope:0", "--seed-edge nope:0"),
    ):
        refuse(tmp_path, "inspect", sgd, option, words=(word,))
