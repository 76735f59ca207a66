"""Damaged files of the other kinds: artifact folders, checkpoints, state files, training data, metrics, JSON."""

from __future__ import annotations

import collections
import dataclasses
import functools
import json
import os
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import onnx
import pytest

import graphscale as gs
from graphscale.training.metrics import read_metrics
from tests.build import feeds_for
from tests.cli.bad_graphs import sgd
from tests.cli.command import graphscale
from tests.conftest import MODELS
from tests.fuzzing import seeds
from tests.fuzzing.damage_bytes import damage_bytes
from tests.fuzzing.holding import Broken, choices_for, hold, keep, limited, summary
from tests.fuzzing.test_bad_files import TIMES, assert_nothing, damaged

pytestmark = pytest.mark.static

Run = Callable[[Path, str], tuple[int | None, list[Broken]]]


@dataclasses.dataclass(frozen=True)
class Kind:
    """A kind of file.

    Attributes:
        files: number of damaged files to try.
        good: a folder where all is well.
        damage: the names of the files to damage, one at a time.
        run: reads them, and says how it went: see `holding.hold`.
    """

    files: int
    good: Callable[[Path], Path]
    damage: tuple[str, ...]
    run: Run


def command(text: str) -> Run:
    return lambda folder, where: hold(text.split(), folder, where)


def calling(function: Callable[[Path], object]) -> Run:

    def run(folder: Path, where: str) -> tuple[int | None, list[Broken]]:
        try:
            with limited():
                function(folder)
        except gs.GraphscaleError as error:
            lines = str(error).splitlines()
            return 2, [] if len(lines) == 1 else [Broken(f"{len(lines)} lines: {error}", where)]
        except Exception as error:
            keep(folder, where, [], summary(error))
            return None, [Broken(summary(error), where)]
        return 0, []

    return run


# --- folders where all is well ----------------------------------------------------------------------------------------


def artifacts(name: str) -> Callable[[Path], Path]:
    """An artifact folder of models/, as `in`."""

    def make(folder: Path) -> Path:
        shutil.copytree(MODELS / "ort" / "artifacts" / name, folder / "in")
        return folder

    return make


def scaled_artifacts(folder: Path) -> Path:
    gs.scale_artifacts(MODELS / "ort" / "artifacts" / "digits_adamw", folder / "in")
    return folder


def training(folder: Path) -> Path:
    """A scaled step, data, first values, a checkpoint and metrics of two steps, JSON options, an original."""
    scaled = gs.scale(sgd())
    scaled.save(folder / "step.onnx")
    onnx.save(sgd(), folder / "original.onnx")
    arrays = feeds_for(sgd())
    np.savez(folder / "state.npz", **{name: arrays[name] for name in ("w1", "w2")})
    np.savez(folder / "data.npz", **{name: np.concatenate([arrays[name]] * 2) for name in ("x", "t")})
    session = gs.Session(scaled, state={name: arrays[name] for name in ("w1", "w2")})
    session.step({name: arrays[name] for name in ("x", "t")})
    session.save_state(folder / "state.safetensors", {"epoch": "1"})
    for metrics in ("run.jsonl", "run.csv"):
        done = graphscale(*TRAIN.split(), "--state=state.npz", f"--metrics={metrics}", folder=folder)
        assert done.returncode == 0, done.stderr
    done = graphscale(*TRAIN.split(), "--state=state.npz", "--checkpoint-dir=kept", folder=folder)
    assert done.returncode == 0, done.stderr
    (folder / "scale.json").write_text(gs.presets.deepspeed().to_json())
    (folder / "lists.json").write_text(json.dumps({"allow": ["MatMul"], "deny": ["Exp", "Log"], "infer": ["Add"]}))
    return folder


TRAIN = "train step.onnx --data=data.npz --max-steps=2 --quiet"
_MODELS = ("in/training_model.onnx", "in/eval_model.onnx", "in/optimizer_model.onnx")
_FOLDER = (*_MODELS, "in/checkpoint", "in/checkpoint")


def load_state(folder: Path) -> None:
    """Load a state file; a session that refuses it is unchanged."""
    session = _session()
    before = session.state_dict()
    try:
        session.load_state(folder / "state.safetensors")
    except gs.GraphscaleError:
        after = session.state_dict()
        assert all(before[name].tobytes() == after[name].tobytes() for name in before)
        raise


@functools.cache
def _session() -> gs.Session:
    arrays = feeds_for(sgd())
    return gs.Session(gs.scale(sgd()), state={name: arrays[name] for name in ("w1", "w2")})


KINDS = {
    "scale artifacts": Kind(150, artifacts("digits_adamw"), _FOLDER, command("scale in -o out")),
    "scale artifacts of SGD": Kind(50, artifacts("digits_sgd"), _FOLDER, command("scale in -o out")),
    "autocast artifacts": Kind(40, artifacts("digits_adamw_clip"), _FOLDER, command("autocast in -o out")),
    "fuse": Kind(60, artifacts("digits_adamw"), _FOLDER, command("fuse in -o out.onnx")),
    "strip artifacts": Kind(80, scaled_artifacts, _FOLDER, command("strip in -o out")),
    "resume": Kind(
        100,
        scaled_artifacts,
        ("in/checkpoint", "in/checkpoint", "in/training_model.onnx"),
        calling(lambda folder: gs.resume_artifacts(folder / "in", folder / "in" / "checkpoint")),
    ),
    "export weights": Kind(
        100,
        training,
        ("state.safetensors", "state.npz", "original.onnx"),
        command("export-weights state.safetensors original.onnx -o out.onnx --partial"),
    ),
    "load state": Kind(300, training, ("state.safetensors",), calling(load_state)),
    "train on data": Kind(80, training, ("data.npz",), command(f"{TRAIN} --state=state.npz")),
    "train from npz": Kind(60, training, ("state.npz",), command(f"{TRAIN} --state=state.npz")),
    "train from safetensors": Kind(60, training, ("state.safetensors",), command(f"{TRAIN} --state=state.safetensors")),
    "resume training": Kind(
        80,
        training,
        ("kept/step-00000002.safetensors",),
        command("train step.onnx --data=data.npz --max-steps=3 --quiet --checkpoint-dir=kept --resume"),
    ),
    "metrics in JSON": Kind(100, training, ("run.jsonl",), calling(lambda folder: read_metrics(folder / "run.jsonl"))),
    "metrics in CSV": Kind(100, training, ("run.csv",), calling(lambda folder: read_metrics(folder / "run.csv"))),
    "a loss scale": Kind(
        100, training, ("scale.json",), command("scale original.onnx --dry-run --loss-scale=scale.json")
    ),
    "lists": Kind(100, training, ("lists.json",), command("autocast original.onnx --dry-run --lists=lists.json")),
}


@pytest.fixture(scope="module")
def goods(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Each folder where all is well, made once."""

    @functools.cache
    def made(make: Callable[[Path], Path]) -> Path:
        return make(tmp_path_factory.mktemp("good"))

    return lambda name: made(KINDS[name].good)


def bad_bytes(path: Path, choices: random.Random) -> bytes:
    """A damaged copy of a file, by what kind of file it is."""
    data = path.read_bytes()
    if path.suffix == ".onnx" and choices.random() < 0.8:
        return damaged(onnx.ModelProto.FromString(data), choices.choice(seeds.rewritten()), choices)
    return damage_bytes(data, choices.choice((data, os.fsencode(path) * 9)), choices)


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", KINDS)
def test_a_bad_file(name: str, goods: Callable[[str], Path], tmp_path: Path) -> None:
    kind, good = KINDS[name], goods(name)
    codes, broken = collections.Counter[int | None](), list[Broken]()
    for number, choices in _numbered(name, kind.files * TIMES):
        folder, where = tmp_path / "work", f"{name.replace(' ', '-')}-{number}"
        shutil.copytree(good, folder)
        if number > 0:
            file = folder / choices.choice(kind.damage)
            file.write_bytes(bad_bytes(file, choices))
        code, found = kind.run(folder, where)
        assert number > 0 or (code, found) == (0, [])
        codes[code] += 1
        broken += found
        shutil.rmtree(folder)
    assert_nothing(broken)
    assert codes[2] > 0.2 * codes.total(), codes


def _numbered(name: str, count: int) -> Iterator[tuple[int, random.Random]]:
    for number in range(count):
        yield number, choices_for(name, number)
