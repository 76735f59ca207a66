"""Checkpoints: their content, their number, damage; a resumed run equals the run without a break."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import graphscale as gs
from graphscale.errors import GraphscaleError, TrainingError
from graphscale.training.checkpoints import Checkpoints, Position
from graphscale.training.metrics import read_metrics
from graphscale.training.run import Options, Run
from graphscale.training.schedules import LearningRate
from tests.conftest import assert_all_same_bits
from tests.training.runs import checkpoints, make_digits, make_step, options, read_checkpoint, train

pytestmark = pytest.mark.sample(1)


def digits_run(folder: Path, **more: Any) -> Options:
    rate, kept = LearningRate(0.05, "linear"), folder / "checkpoints"
    more = {"batch_size": 16, "checkpoint_dir": kept, "checkpoint_every": 2, "keep": 2, **more}
    return options(folder, learning_rate=rate, **more)


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of digits that stopped at step 5 of 19."""
    folder = tmp_path_factory.mktemp("stopped")
    make_digits(folder)
    train(digits_run(folder), stop_after=5)
    return folder


@pytest.fixture
def begun(stopped: Path, tmp_path: Path) -> Options:
    """A copy of that run, with what resumes it."""
    shutil.copytree(stopped, tmp_path, dirs_exist_ok=True)
    return digits_run(tmp_path, resume=True)


def test_the_newest_checkpoints_stay(begun: Options) -> None:
    names = [path.name for path in checkpoints(begun.checkpoint_dir)]
    assert names == ["step-00000004.safetensors", "step-00000005.safetensors"]
    train(begun)
    names = [path.name for path in checkpoints(begun.checkpoint_dir)]
    assert names == ["step-00000018.safetensors", "step-00000019.safetensors"]


def test_a_checkpoint_is_the_state_and_the_position(begun: Options, tmp_path: Path) -> None:
    path = checkpoints(begun.checkpoint_dir)[-1]
    _, state = train(dataclasses.replace(begun, checkpoint_dir=tmp_path / "other", resume=False), stop_after=5)
    assert_all_same_bits(read_checkpoint(path), state)
    session = gs.Session(begun.step, state=dict(np.load(str(begun.state))))
    noted = json.loads(session.load_state(path)["graphscale.train"])
    assert noted["position"] == {"steps": 5, "applied": 5, "metrics_bytes": None}
    assert noted["settings"]["--seed"] == 0


@pytest.mark.full
def test_without_the_first_values_a_resumed_run_has_those_of_the_checkpoint(begun: Options) -> None:
    _, expected = train(dataclasses.replace(begun, checkpoint_dir=None, checkpoint_every=None, resume=False))
    _, state = train(dataclasses.replace(begun, state=None))
    assert_all_same_bits(state, expected)


@pytest.mark.full
def test_the_length_may_grow_where_the_learning_rate_does_not_depend_on_it(begun: Options) -> None:
    with pytest.raises(TrainingError, match="the run would be another: --decay-steps was 19, is 38"):
        Run(dataclasses.replace(begun, epochs=2))
    fixed = LearningRate(0.05, "linear", decay_steps=19)
    records, _ = train(dataclasses.replace(begun, epochs=2, learning_rate=fixed))
    assert [record.step for record in records] == list(range(6, 39))
    assert Run(dataclasses.replace(begun, epochs=2, learning_rate=fixed)).resumed == Position(38, 34)


def damage_truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def damage_text(path: Path) -> None:
    path.write_text("weights")


def foreign(path: Path) -> None:
    from safetensors.numpy import save_file

    save_file(read_checkpoint(path), path)


def by_hand(path: Path) -> None:
    """A state that a session wrote, but not a run."""
    folder = path.parents[1]
    gs.Session(folder / "step.onnx", state=dict(np.load(folder / "state.npz"))).save_state(path)


@pytest.mark.parametrize("with_state", [True, False])
@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (damage_truncate, "damaged, truncated, or no safetensors file"),
        (damage_text, "is no safetensors file: it seems to be text"),
        (foreign, "no state file"),
        (by_hand, "graphscale train has not written it"),
    ],
)
def test_a_bad_checkpoint_is_named(
    damage: Callable[[Path], None], message: str, with_state: bool, begun: Options
) -> None:
    older, newest = checkpoints(begun.checkpoint_dir)
    damage(newest)
    chosen = begun if with_state else dataclasses.replace(begun, state=None)
    with pytest.raises(GraphscaleError, match=message) as error:
        Run(chosen)
    assert str(newest) in str(error.value)
    newest.unlink()
    assert Run(chosen).resumed == Position(4, 4), "the one before is good"
    older.unlink()
    assert Run(begun).resumed is None


def test_what_a_killed_process_left_is_cleared_away(begun: Options) -> None:
    folder = begun.checkpoint_dir
    left = folder / ".graphscale-abc.tmp"
    left.mkdir()
    (left / "step-00000006.safetensors").write_bytes(b"half")
    other = folder / "notes.tmp"
    other.write_text("of the user")
    train(begun)
    assert not left.exists()
    assert other.exists()


@pytest.mark.full
def test_two_runs_do_not_write_to_one_folder(begun: Options) -> None:
    run = Run(begun)
    with run.opened(), pytest.raises(TrainingError, match="another run is writing its checkpoints to"):
        train(begun)
    train(begun)


@pytest.mark.full
@pytest.mark.parametrize("resume", [False, True])
def test_a_run_that_another_one_has_overtaken_writes_nothing(resume: bool, tmp_path: Path) -> None:
    """Both looked at the empty folder before the first of them locked it."""
    make_digits(tmp_path)
    chosen = digits_run(tmp_path, resume=resume)
    late = Run(chosen)
    train(chosen, stop_after=4)
    before = {path: path.read_bytes() for path in checkpoints(chosen.checkpoint_dir)}
    with (
        pytest.raises(TrainingError, match=r"another run has written checkpoints to .* while this one started"),
        late.opened(),
    ):
        raise AssertionError("it is open")
    assert {path: path.read_bytes() for path in checkpoints(chosen.checkpoint_dir)} == before


@pytest.mark.full
def test_metrics_of_the_resumed_run(begun: Options, tmp_path: Path) -> None:
    """A run that had none may get some; one that had some needs the same file."""
    first = dataclasses.replace(begun, metrics=tmp_path / "run.csv")
    train(first, stop_after=7)
    assert [record.step for record in read_metrics(tmp_path / "run.csv")] == [6, 7]
    with pytest.raises(TrainingError, match=r"cannot go on with the metrics in .*other\.csv: No such file"):
        Run(dataclasses.replace(first, metrics=tmp_path / "other.csv"))
    train(dataclasses.replace(first, metrics=None), stop_after=9)
    train(dataclasses.replace(first, metrics=tmp_path / "other.csv"))
    assert read_metrics(tmp_path / "other.csv")[0].step == 10


def test_links_out_of_the_folder(begun: Options, tmp_path: Path) -> None:
    newest = checkpoints(begun.checkpoint_dir)[-1]
    (tmp_path / "elsewhere").mkdir()
    newest.rename(tmp_path / "elsewhere" / newest.name)
    newest.symlink_to(tmp_path / "elsewhere" / newest.name)
    with pytest.raises(TrainingError, match=f"{newest.name}: it leads out of its folder; copy the file there"):
        Run(begun)
    newest.unlink()
    lock = newest.with_name(".lock")
    lock.unlink()
    lock.symlink_to(tmp_path / "elsewhere" / "lock")
    with pytest.raises(GraphscaleError, match="lock is no regular file"):
        train(begun)
    assert not (tmp_path / "elsewhere" / "lock").exists()


def test_folders_that_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(GraphscaleError, match="file is a file, not a folder"):
            Checkpoints(path)
    with pytest.raises(TrainingError, match="--keep-checkpoints 0: expected 1 or more"):
        Checkpoints(tmp_path, keep=0)


# --- a resumed run ----------------------------------------------------------------------------------------------------

STEPS: dict[str, tuple[Callable[[Path], None], dict[str, Any]]] = {
    "digits": (make_digits, {"learning_rate": LearningRate(0.05, "cosine", 5), "batch_size": 16}),
    "momentum": (lambda folder: make_step(folder, "pytorch/mlp_momentum", 100), {}),
    "adamw": (lambda folder: make_step(folder, "pytorch/attention_adamw_clip", 100), {}),
    "jax-adam": (lambda folder: make_step(folder, "jax/mlp_adam", 100), {}),
    "telemetry": (
        lambda folder: make_digits(folder, telemetry=True),
        {"learning_rate": LearningRate(0.05), "batch_size": 16},
    ),
    "in-place": (
        lambda folder: make_digits(folder, target="ort-training"),
        {"learning_rate": LearningRate(0.05), "batch_size": 16},
    ),
}
NEEDS_TRAINING = ("in-place",)


@pytest.mark.full
@pytest.mark.parametrize("suffix", ["jsonl", "csv"])
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.training if n in NEEDS_TRAINING else ()) for n in STEPS]
)
def test_a_resumed_run_is_the_same_bit_for_bit(name: str, suffix: str, tmp_path: Path) -> None:
    make, more = STEPS[name]
    make(tmp_path)
    common = options(tmp_path, epochs=3, seed=11, **more)
    whole = dataclasses.replace(common, metrics=tmp_path / f"whole.{suffix}")
    _, expected = train(whole)
    cut = dataclasses.replace(
        common,
        metrics=tmp_path / f"cut.{suffix}",
        checkpoint_dir=tmp_path / "checkpoints",
        checkpoint_every=4,
        resume=True,
    )
    total = Run(common).total
    steps: list[int] = []
    for stop in (1, 6, 7, total - 1, total):
        records, state = train(cut, stop_after=stop)
        steps += [record.step for record in records]
        _log_more(tmp_path / f"cut.{suffix}")
    assert steps == list(range(1, total + 1))
    assert_all_same_bits(state, expected)
    again, state = train(cut)
    assert again == [], "nothing is left to train"
    assert_all_same_bits(state, expected)
    assert (tmp_path / f"cut.{suffix}").read_bytes() == (tmp_path / f"whole.{suffix}").read_bytes()
    assert len(read_metrics(tmp_path / f"whole.{suffix}")) == total
    first = np.load(tmp_path / "state.npz")
    assert not any(np.array_equal(expected[name], first[name]) for name in first.files), "it did train"


def _log_more(path: Path) -> None:
    """Leave lines in the file as a run does that is killed after its checkpoint."""
    with path.open("ab") as file:
        file.write(b'{"step": 1000, "ep')


def _change_data(chosen: Options) -> Options:
    stored = dict(np.load(chosen.data))
    stored["images"][0, 0] += 1
    np.savez(chosen.data, **stored)
    return chosen


def _fewer_samples(chosen: Options) -> Options:
    stored = np.load(chosen.data)
    np.savez(chosen.data, **{name: stored[name][:-1] for name in stored.files})
    return chosen


def _remake(*policy: gs.LossScale, **scaling: Any) -> Callable[[Options], Options]:
    def remake(chosen: Options) -> Options:
        make_digits(chosen.step.parent, *policy, **scaling)
        return chosen

    return remake


def _other_version(chosen: Options) -> Options:
    import onnx

    model = onnx.load(chosen.step)
    model.doc_string = "another"
    onnx.save(model, chosen.step)
    return chosen


def changed(**more: Any) -> Callable[[Options], Options]:
    return lambda chosen: dataclasses.replace(chosen, **more)


CHANGES: dict[str, tuple[Callable[[Options], Options], str]] = {
    "seed": (changed(seed=1), "--seed was 0, is 1"),
    "batch-size": (
        changed(batch_size=8, learning_rate=LearningRate(0.05, "linear", decay_steps=19)),
        "--batch-size was 16, is 8",
    ),
    "order": (changed(shuffle=False), "shuffling was True, is False"),
    "rate": (changed(learning_rate=LearningRate(0.1, "linear")), "--learning-rate was 0.05, is 0.1"),
    "schedule": (
        changed(learning_rate=LearningRate(0.05)),
        "--schedule was linear, is constant; --decay-steps was 19, is not given",
    ),
    "constant": (
        changed(learning_rate=None, feeds=["learning_rate=0.05"]),
        "--learning-rate-input was learning_rate, is not given; --learning-rate was 0.05, is not given",
    ),
    "content": (_change_data, "the content of the data is another"),
    "samples": (_fewer_samples, "the data was images float32[300, 64], labels int64[300], is images float32[299, 64]"),
    "version": (_other_version, "the step is another"),
    "step": (_remake(expose_scaled_loss=True), "its inputs and outputs are not those of this one"),
    "policy": (_remake(gs.DynamicLossScale(2.0**12, increment_period=6)), "increment_period"),
    "shorter": (
        changed(max_steps=3, learning_rate=LearningRate(0.05, "linear", decay_steps=19)),
        "the newest checkpoint in .* is at step 5, past the end of this run of 3 steps",
    ),
}


@pytest.mark.parametrize("case", CHANGES)
def test_another_run_is_not_resumed(case: str, begun: Options) -> None:
    change, message = CHANGES[case]
    with pytest.raises(TrainingError) as error:
        Run(change(begun))
    assert re.search(message.replace("[", r"\["), str(error.value)), error.value
