"""Ctrl-C, SIGTERM, a full disk: one line each, without a loss; no loss by kill -9 at any moment, either."""

from __future__ import annotations

import os
import random
import resource
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from graphscale.training.metrics import read_metrics
from graphscale.training.run import Interruption
from tests.conftest import assert_all_same_bits
from tests.training.runs import (
    DIGITS_COMMAND,
    FILES,
    assert_same_run,
    checkpoints,
    make_digits,
    read_checkpoint,
    run_to_end,
    size_of,
    start,
    wait_for,
)

pytestmark = pytest.mark.static

LONG = (*DIGITS_COMMAND, "--epochs", "40", "--checkpoint-dir", "kept", "--checkpoint-every", "100")
TOTAL = 40 * 19


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run that was not interrupted."""
    folder = tmp_path_factory.mktemp("whole")
    make_digits(folder)
    run_to_end(folder, *LONG)
    return folder


def assert_goes_on(folder: Path, whole: Path) -> None:
    run_to_end(folder, *LONG, "--resume")
    assert_same_run(folder, whole)


@pytest.mark.full
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_saves_and_stops(number: signal.Signals, code: int, whole: Path, tmp_path: Path) -> None:
    make_digits(tmp_path)
    process = start(tmp_path, *LONG, *FILES)
    wait_for(process, lambda: size_of(tmp_path / "run.jsonl") > 3000)
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    steps = len(read_metrics(tmp_path / "run.jsonl"))
    assert 0 < steps < TOTAL
    saved = f"kept/step-{steps:08d}.safetensors"
    assert err == (
        f"graphscale: interrupted at step {steps} of {TOTAL}, which is saved in {saved}; give the same command with "
        "--resume to go on\n"
    )
    assert process.returncode == code
    assert read_checkpoint(tmp_path / saved)
    assert not (tmp_path / "trained.onnx").exists()
    assert_goes_on(tmp_path, whole)


@pytest.mark.full
def test_without_checkpoints_it_says_that_nothing_is_saved(tmp_path: Path) -> None:
    make_digits(tmp_path)
    process = start(tmp_path, *DIGITS_COMMAND, "--epochs", "1000", "--metrics", "run.jsonl")
    wait_for(process, lambda: size_of(tmp_path / "run.jsonl") > 3000)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    steps = len(read_metrics(tmp_path / "run.jsonl"))
    assert err == (
        f"graphscale: interrupted at step {steps} of 19000; nothing is saved: there is no --checkpoint-dir\n"
    )
    assert process.returncode == 130


def test_a_second_signal_does_what_it_does_elsewhere(request: pytest.FixtureRequest) -> None:
    # A shell lets what it runs in the background ignore SIGINT.
    found = signal.signal(signal.SIGINT, signal.default_int_handler)
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, found))
    before = signal.getsignal(signal.SIGINT)
    with Interruption() as interruption:
        os.kill(os.getpid(), signal.SIGINT)
        assert interruption.received is signal.SIGINT
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before
    with Interruption() as interruption:
        pass
    assert interruption.received is None
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.full
def test_a_second_run_is_held_apart_and_goes_on_where_the_first_one_is_killed(whole: Path, tmp_path: Path) -> None:
    make_digits(tmp_path)
    process = start(tmp_path, *LONG, *FILES)
    wait_for(process, lambda: bool(checkpoints(tmp_path / "kept")))
    process.send_signal(signal.SIGSTOP)  # or it would end before the second one has come
    second = start(tmp_path, *LONG, "-o", "other.onnx", "--quiet", "--resume")
    _, err = second.communicate(timeout=60)
    assert (second.returncode, err) == (
        2,
        "graphscale: another run is writing its checkpoints to kept; wait for its end\n",
    )
    assert not (tmp_path / "other.onnx").exists()
    process.kill()
    process.communicate()
    assert_goes_on(tmp_path, whole)


def _at_most(size: int) -> Callable[[], None]:
    """For a process that is to be started: a write beyond so many bytes of a file fails, as on a full disk."""
    return lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))


@pytest.mark.full
def test_a_full_disk_while_saving(whole: Path, tmp_path: Path) -> None:
    make_digits(tmp_path)
    run_to_end(tmp_path, *LONG, "--max-steps", "50")
    (old,) = checkpoints(tmp_path / "kept")
    (tmp_path / "trained.onnx").unlink()
    content = read_checkpoint(old)

    process = start(tmp_path, *LONG, *FILES, "--resume", preexec_fn=_at_most(100_000))
    _, err = process.communicate(timeout=60)
    assert process.returncode == 2
    assert err.startswith("graphscale: cannot write kept/step-00000100.safetensors: ")
    assert "File too large" in err
    assert err.count("\n") == 1
    assert checkpoints(tmp_path / "kept") == [old]
    assert_all_same_bits(read_checkpoint(old), content)
    assert sorted(path.name for path in (tmp_path / "kept").iterdir()) == [".lock", old.name], "nothing half-written"
    assert_goes_on(tmp_path, whole)


@pytest.mark.full
def test_a_full_disk_while_writing_metrics(whole: Path, tmp_path: Path) -> None:
    make_digits(tmp_path)
    late = ("--checkpoint-every", "1000")
    process = start(tmp_path, *LONG, *late, "--metrics", "run.jsonl", preexec_fn=_at_most(20_000))
    _, err = process.communicate(timeout=60)
    assert process.returncode == 2
    assert err == "graphscale: cannot write run.jsonl: File too large\n"
    assert_goes_on(tmp_path, whole)


# --- kill -9 at any moment --------------------------------------------------------------------------------------------

KILLS = 20
COMMAND = (
    *DIGITS_COMMAND,
    "--schedule",
    "cosine",
    "--warmup",
    "30",
    "--epochs",
    "50",
    "--seed",
    "3",
    "--checkpoint-dir",
    "kept",
)


def unfinished(folder: Path) -> set[Path]:
    """The checkpoints that are being written, or were when the process was killed."""
    return set((folder / "kept").glob(".graphscale-*.tmp"))


@pytest.mark.full
def test_killed_twenty_times(tmp_path: Path) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    for folder in (whole, killed):
        folder.mkdir()
        make_digits(folder)
    run_to_end(whole, *COMMAND, "--checkpoint-every", "100")
    size = size_of(whole / "run.jsonl")

    rng = random.Random(1)
    half_written = steps = 0
    for number in range(KILLS):
        # Of one launch nearly all the time is spent in saving, of another nearly all in training.
        every = rng.choice(["1", "1", "10", "50"]) if number < 0.7 * KILLS else "1"
        before = unfinished(killed)
        process = start(killed, *COMMAND, *FILES, "--resume", "--checkpoint-every", every)
        wanted = int(size * (number + rng.random()) / (KILLS + 2))
        wait_for(process, lambda wanted=wanted: size_of(killed / "run.jsonl") > wanted)
        if number >= 0.7 * KILLS:
            wait_for(process, lambda before=before: bool(unfinished(killed) - before))
        else:
            time.sleep(rng.random() * 0.01)
        assert process.poll() is None, f"it was to be killed, but it ended: {process.communicate()}"
        process.kill()
        process.communicate()
        assert process.returncode == -9
        found = checkpoints(killed / "kept")
        for path in found:
            assert read_checkpoint(path)["current_loss_scale"] >= 1
        half_written += bool(unfinished(killed) - before)
        reached = int(found[-1].stem.removeprefix("step-")) if found else 0
        assert reached >= steps
        steps = reached
    assert steps > 750, "the kills are spread over the whole run of 950 steps"
    assert half_written >= 3, "some came while a checkpoint was being written"

    run_to_end(killed, *COMMAND, "--resume", "--checkpoint-every", "100")
    assert_same_run(killed, whole)
    assert checkpoints(killed / "kept")[-1].name == "step-00000950.safetensors"
    assert not list((killed / "kept").glob(".step-*")), "what the kills left behind is cleared away"
