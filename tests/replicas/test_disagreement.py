"""Replicas that differ, fail, hang or die: all get the same message, or end, and never hang."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.replicas.mpi import mpiexec, needs_mpi, program

pytestmark = [needs_mpi, pytest.mark.mpi]


def told(folder: Path, scenario: str, count: int = 2) -> str:
    """Return the message that all ranks get in a scenario that ends well."""
    done = mpiexec(count, program("scenarios", str(folder), scenario))
    assert done.returncode == 0, done.stderr
    texts = {path.read_text() for path in folder.glob("said-*")}
    assert len(texts) == 1 and len(list(folder.glob("said-*"))) == count
    return texts.pop()


@pytest.mark.parametrize(
    ("scenario", "text"),
    [
        ("policies", "differ in the loss scale: rank 0 has .*4096.*, rank 1 has .*1024"),
        ("kinds_of_policy", "differ in the loss scale: rank 0 has .*DynamicLossScale.* has .*FixedLossScale"),
        ("graphs", "differ in the nodes of the step: rank 0 has [0-9]+, rank 1 has [0-9]+"),
        ("bucket_sizes", "differ in the bucket size: rank 0 has 2000, rank 1 has 1000"),
        ("stages", "differ in the number of stages: rank 0 has 1, rank 1 has 2"),
        ("world_sizes", "differ in the number of replicas: rank 0 has 2, rank 1 has 5"),
        ("too_few", "replicas=3, but 2 take part: start as many with mpiexec -n 3"),
    ],
)
def test_replicas_that_differ_are_refused_at_the_start(tmp_path: Path, scenario: str, text: str) -> None:
    said = told(tmp_path, scenario)
    assert said.startswith("ReplicaError") and re.search(text, said), said


@pytest.mark.parametrize(
    ("scenario", "text"),
    [
        ("bad_argument_on_one", "rank 1: the bucket size 'none' is no size"),
        ("missing_file_on_one", "rank 1: cannot read missing.onnx"),
        ("unscaled", "rank 0: models/pytorch/mlp_momentum.onnx carries no loss scale"),
        ("no_state", "rank 0: the carried inputs .* have no initializer"),
        ("no_state_in_shares", "rank 0: the carried inputs .* have no initializer"),
        ("telemetry_in_shares", "rank 0: the step cannot be sharded: its telemetry reads all gradients"),
        ("missing_feed", "rank 1: the step needs a feed for 'images'"),
        ("misshapen_feed", r"rank 1: the feed 'images' has shape \[8, 63\]"),
        ("failing_step", "rank 1: the step could not run"),
        ("failing_stage", "rank 1: the step could not run"),
        ("other_learning_rate", "'learning_rate' differs between rank 0 and rank 1"),
        ("other_outputs", "rank 1: the step has no output 'los'"),
        ("unreadable_state", "rank 0: cannot read missing.safetensors"),
        ("scale_that_is_none", "rank 0: the state given: the loss scale 'current_loss_scale' is nan"),
        ("scale_that_is_none_in_shares", "rank 0: the state given: the loss scale 'current_loss_scale' is nan"),
        ("state_of_another", "rank 0: the state given: 'w' is not carried"),
    ],
)
def test_an_error_on_one_replica_is_raised_on_all(tmp_path: Path, scenario: str, text: str) -> None:
    assert re.search(text, told(tmp_path, scenario))


@pytest.mark.parametrize(
    ("scenario", "text"),
    [
        ("one_after_the_other", "2 sessions side by side, never closed"),
        ("late_start", "all have come"),
        ("duplicated", "a ReplicatedSession cannot be copied or pickled: .*made in the process PID, and a fork of it"),
        ("second_thread", "another thread is using the session, whose calls must come in the same order"),
    ],
)
def test_sessions_that_are_closed_copied_and_shared(tmp_path: Path, scenario: str, text: str) -> None:
    assert re.search(text, told(tmp_path, scenario, 3))


@pytest.mark.parametrize(
    ("scenario", "text"),
    [
        ("exception_on_one", "graphscale: rank 2: LookupError: the data of this rank is gone"),
        ("hang_on_one", "waited 3 s for the reduction of gradients: another replica hangs, is slow, or has left"),
        ("died_on_one", "signal 9|Killed|has died"),
    ],
)
def test_what_one_replica_alone_knows_of_ends_all(tmp_path: Path, scenario: str, text: str) -> None:
    done = mpiexec(3, program("scenarios", str(tmp_path), scenario))
    assert done.returncode != 0
    assert re.search(text, done.stdout + done.stderr), done.stderr


def test_a_launcher_of_another_mpi_is_refused(tmp_path: Path) -> None:
    # The variables of a process that the mpiexec of another MPI has started: not its own, and no others.
    sizes = {"OMPI_COMM_WORLD_SIZE": "4", "MV2_COMM_WORLD_SIZE": "4"}
    subprocess.run(
        program("scenarios", str(tmp_path), "policies"),
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), **sizes},
        check=True,
    )
    assert "mpiexec has started 4 processes, but MPI sees this one alone" in (tmp_path / "said-0").read_text()


@pytest.mark.parametrize("comm", ["None", "MPI.COMM_NULL", "42", "'world'"])
def test_what_is_no_communicator_is_refused(comm: str) -> None:
    code = (
        "import graphscale as gs\nfrom mpi4py import MPI\nfrom tests.replicas.steps import DIGITS, scaled\n"
        f"try:\n    gs.ReplicatedSession(scaled(DIGITS), {comm})\n"
        "except gs.GraphscaleError as error:\n    print(type(error).__name__, error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("ReplicaError comm is") and "MPI" in done.stdout
