"""mpiexec -n N graphscale train: the run of one process, in any number of them, also when they die."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.replicas.mpi import COMMAND, mpiexec, needs_mpi, start, wait_until
from tests.training.runs import make_digits

pytestmark = [needs_mpi, pytest.mark.mpi]

# 300 samples, two with an overflow: the batch size divides neither them nor what is left of them.
TRAIN = (*COMMAND, "train", "step.onnx", "--data", "data.npz", "--state", "state.npz", "--learning-rate", "0.05")
ALONE = (*TRAIN, "--batch-size", "24")
RUN = (*ALONE, "--timeout", "60")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_digits(tmp_path)
    return tmp_path


def train(folder: Path, count: int, *options: str) -> subprocess.CompletedProcess[str]:
    done = mpiexec(count, (*RUN, *options), cwd=folder)
    assert done.returncode == 0, done.stderr
    return done


def alone(folder: Path, *options: str) -> None:
    subprocess.run([*ALONE, *options], cwd=folder, check=True, capture_output=True)


def rows(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def newest(folder: Path) -> Path:
    return sorted(folder.glob("step-*.safetensors"))[-1]


def assert_same_state(found: Path, expected: Path) -> None:
    state, other = load_file(found), load_file(expected)
    assert found.name == expected.name and set(state) == set(other)
    for name in state:
        np.testing.assert_allclose(state[name], other[name], rtol=0, atol=1e-5, err_msg=name)


def test_four_processes_train_as_one_does(folder: Path) -> None:
    alone(folder, "--epochs", "2", "--checkpoint-dir", "one", "--metrics", "one.jsonl")
    done = train(
        folder, 4, "--epochs", "2", "--checkpoint-dir", "four", "--metrics", "four.jsonl", "-o", "trained.onnx"
    )
    told, expected = rows(folder / "four.jsonl"), rows(folder / "one.jsonl")
    for name in ("step", "epoch", "loss_scale", "applied", "good_steps"):
        assert [row[name] for row in told] == [row[name] for row in expected]
    assert sum(not row["applied"] for row in told) == 4
    assert_same_state(newest(folder / "four"), newest(folder / "one"))
    assert done.stdout.count("What happened") == 1 and "26 in " in done.stdout
    assert (folder / "trained.onnx").exists()


def test_a_run_is_resumed_with_another_number_of_processes(folder: Path) -> None:
    alone(folder, "--epochs", "4", "--checkpoint-dir", "one", "--metrics", "one.jsonl")
    shared = ("--checkpoint-dir", "many", "--metrics", "many.jsonl", "--resume")
    for epochs, count, more in ((1, 4, ()), (2, 3, ("--sharded",)), (3, 2, ("--stages", "2"))):
        train(folder, count, "--epochs", str(epochs), *shared, *more)
    alone(folder, "--epochs", "4", *shared)
    assert_same_state(newest(folder / "many"), newest(folder / "one"))
    scales = [[row["loss_scale"] for row in rows(folder / name)] for name in ("many.jsonl", "one.jsonl")]
    assert scales[0] == scales[1]


def ranks_of(folder: Path) -> list[int]:
    """The processes that train in a folder."""
    found = []
    for path in Path("/proc").iterdir():
        if path.name.isdecimal():
            try:
                command = (path / "cmdline").read_bytes().split(b"\0")
                if path.joinpath("cwd").resolve() == folder and command[0] == sys.executable.encode():
                    found.append(int(path.name))
            except OSError:  # it has ended
                continue
    return sorted(found)


def begin(folder: Path, count: int, *options: str) -> subprocess.Popen[str]:
    """A long run that has written a checkpoint."""
    run = (*RUN, "--epochs", "4000", "--checkpoint-dir", "kept", "--checkpoint-every", "20", "--quiet")
    process = start(count, (*run, *options), cwd=folder)
    wait_until(lambda: len(list((folder / "kept").glob("step-*"))) > 1 or process.poll() is not None)
    assert process.poll() is None
    return process


@pytest.mark.parametrize("victim", [0, 2])
def test_a_process_that_is_killed_ends_all_and_the_last_checkpoint_is_whole(folder: Path, victim: int) -> None:
    process = begin(folder, 4)
    killed = ranks_of(folder)[victim]
    os.kill(killed, signal.SIGKILL)
    out, err = process.communicate(timeout=60)
    assert process.returncode != 0
    assert re.search(f"PID {killed}.*|process {killed} .*has died|signal 9", out + err)
    wait_until(lambda: not ranks_of(folder))
    steps = int(newest(folder / "kept").stem.removeprefix("step-"))
    train(folder, 3, "--max-steps", str(steps + 5), "--checkpoint-dir", "kept", "--resume")
    alone(folder, "--max-steps", str(steps + 5), "--checkpoint-dir", "one", "--checkpoint-every", "1000")
    assert_same_state(newest(folder / "kept"), newest(folder / "one"))


def test_a_process_that_is_stopped_ends_all_with_a_line_that_says_so(folder: Path) -> None:
    process = begin(folder, 3, "--timeout", "3")
    stopped = ranks_of(folder)[1]
    os.kill(stopped, signal.SIGSTOP)
    _, err = process.communicate(timeout=60)
    assert process.returncode != 0
    assert re.search(r"graphscale: rank \d: waited 3 s for .+: another replica hangs", err), err
    wait_until(lambda: not ranks_of(folder))


def test_a_process_that_ends_before_mpi_has_started_ends_all(folder: Path) -> None:
    done = mpiexec(2, (sys.executable, "-c", "raise SystemExit(3)"), (*RUN, "--timeout", "4"), cwd=folder)
    assert done.returncode != 0
    # MPICH waits, and is ended; Open MPI's launcher sees it by itself.
    assert "import_mpi" in done.stderr or "exited" in done.stderr or "exit code" in done.stderr.lower()


def test_a_signal_to_one_process_saves_and_stops_all(folder: Path) -> None:
    process = begin(folder, 3)
    os.kill(ranks_of(folder)[1], signal.SIGTERM)
    _, err = process.communicate(timeout=60)
    assert process.returncode != 0
    said = re.search(r"graphscale: interrupted at step (\d+) of \d+, which is saved in kept/step-(\d+)", err)
    assert said is not None and int(said[1]) == int(said[2]), err
    assert newest(folder / "kept").name == f"step-{said[2]}.safetensors"


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (("--batch-size", "32"), "--batch-size 32 cannot be divided among 3 replicas; take 30 or 33"),
        (("--replicas", "4"), "replicas=4, but 3 take part: start as many with mpiexec -n 4"),
        (("--bucket-size", "big"), "the bucket size 'big' is no size"),
        (("--stages", "7"), "7 stages do not fit: the step has 6 gradients"),
        (("--timeout", "0"), "timeout=0.0: expected seconds, more than 0"),
        (("--data", "missing.npz"), "cannot read missing.npz"),
        (("--resume",), "--resume goes with --checkpoint-dir"),
    ],
)
def test_bad_input_is_one_line_of_rank_0_and_exit_code_2(folder: Path, options: tuple[str, ...], text: str) -> None:
    done = mpiexec(3, (*RUN, *options), cwd=folder)
    lines = [line for line in done.stderr.splitlines() if line.startswith("graphscale:")]
    assert done.returncode == 2, done.stderr
    assert len(lines) == 1 and text in lines[0]
    assert not list(folder.glob("*.jsonl"))


def test_what_rank_0_cannot_write_ends_all_with_exit_code_2(folder: Path) -> None:
    (folder / "kept").mkdir()
    (folder / "kept" / ".lock").mkdir()
    done = mpiexec(2, (*RUN, "--checkpoint-dir", "kept"), cwd=folder)
    assert done.returncode == 2, done.stderr
    assert "graphscale: rank 0: cannot write to kept" in done.stderr


def test_processes_with_other_data_are_refused(folder: Path) -> None:
    np.savez(folder / "other.npz", images=np.zeros((9, 64), np.float32), labels=np.zeros(9, np.int64))
    second = ["other.npz" if part == "data.npz" else part for part in RUN]
    done = mpiexec(2, RUN, second, cwd=folder)
    assert done.returncode == 2
    assert "the replicas differ in the data: rank 0 has images float32[300, 64]" in done.stderr


def test_processes_with_other_options_are_refused(folder: Path) -> None:
    done = mpiexec(2, RUN, (*RUN, "--seed", "3"), cwd=folder)
    assert done.returncode == 2
    assert "the replicas differ in --seed: rank 0 has 0, rank 1 has 3" in done.stderr
