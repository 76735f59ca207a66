"""Limits of commands that run models, and `scale` with a trial."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

import graphscale as gs
from fuzz.hostile.growth import _loop
from graphscale.cli import running
from tests.build import feeds_for
from tests.checks.verification.trial_steps import BEHIND, PENALTY, free, give, slow, write
from tests.cli.bad_graphs import sgd
from tests.cli.command import contents, graphscale, graphscale_process, succeed

FEED = ["--feed", "anchor=anchor.npy"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    onnx.save(free(), tmp_path / "right.onnx")
    onnx.save(write(PENALTY + BEHIND["behind the update"]), tmp_path / "wrong.onnx")
    onnx.save(slow(2**50), tmp_path / "slow.onnx")
    gs.scale(slow(2**50)).save(tmp_path / "scaled.onnx")
    return tmp_path


def test_scale_tries_itself(folder: Path) -> None:
    lines = succeed(folder, "scale", "right.onnx", "-o", "out.onnx").splitlines()
    assert lines[2].startswith("trial: tried on ONNX Runtime ") and len(lines) == 3
    lines = succeed(folder, "scale", "right.onnx", "-o", "out.onnx", "--no-try").splitlines()
    assert len(lines) == 2
    assert "trial  " in succeed(folder, "scale", "right.onnx", "--dry-run", "-v")


def test_a_failed_trial_writes_nothing(folder: Path) -> None:
    before = contents(folder)
    done = graphscale("scale", "wrong.onnx", "-o", "out.onnx", folder=folder)
    assert done.returncode == 2 and contents(folder) == before
    assert done.stderr.count("\n") == 1 and "fails its trial: with anchor = inf at element 3" in done.stderr
    assert "--no-try" in done.stderr
    succeed(folder, "scale", "wrong.onnx", "-o", "out.onnx", "--no-try")
    assert (folder / "out.onnx").exists()


def test_no_try_is_for_a_graph(folder: Path) -> None:
    from tests.conftest import MODELS

    artifacts = MODELS / "ort" / "artifacts" / "digits_sgd"
    done = graphscale("scale", artifacts, "-o", "out", "--no-try", folder=folder)
    assert done.returncode == 2 and "--no-try is for a single graph" in done.stderr


@pytest.mark.parametrize(
    "words",
    [
        ["verify", "slow.onnx", "scaled.onnx", "--runs", "1"],
        ["inspect", "slow.onnx", "--check-gradients"],
        ["train", "scaled.onnx", "--data", "data.npz", "--max-steps", "1", "--state", "state.npz", *FEED],
    ],
    ids=lambda words: words[0],
)
def test_slow_models_end(words: list[str], folder: Path) -> None:
    np.savez(folder / "data.npz", x=np.ones((4, 3), np.float32), t=np.ones((4, 2), np.float32))
    np.save(folder / "anchor.npy", np.ones((3, 2), np.float32))
    np.savez(folder / "state.npz", w=np.ones((3, 2), np.float32))
    done = graphscale_process(*words, "--max-seconds", "1", folder=folder)
    assert (done.returncode, done.stderr) == (
        2,
        "graphscale: the model takes more than 1 s of CPU time to run (--max-seconds)\n",
    )


def test_large_values_end(folder: Path) -> None:
    model = free()
    model.graph.initializer.append(numpy_helper.from_array(np.int64([2**26]), "many"))
    model.graph.node.insert(8, helper.make_node("Expand", ["fit", "many"], ["wide"]))
    model.graph.node.insert(9, helper.make_node("ReduceMean", ["wide"], ["mean"], keepdims=0))
    give(model, "loss", "Identity", "mean")
    onnx.save(model, folder / "large.onnx")
    succeed(folder, "scale", "large.onnx", "-o", "out.onnx", "--no-try")
    words = ("verify", "large.onnx", "out.onnx", "--runs", "1")
    done = graphscale_process(*words, "--max-memory", str(2**27), folder=folder)
    assert done.returncode == 2
    assert done.stderr == f"graphscale: the model takes more than {2**27} bytes of memory to run (--max-memory)\n"


def test_the_limit_of_memory_ends_with_the_runs(folder: Path) -> None:
    import resource

    before = resource.getrlimit(resource.RLIMIT_AS)
    with running.running([folder / "right.onnx"]):
        assert resource.getrlimit(resource.RLIMIT_AS) != before
    assert resource.getrlimit(resource.RLIMIT_AS) == before


@pytest.mark.parametrize(
    "words", [["inspect"], ["lint"], ["scale", "--no-try", "--dry-run"]], ids=lambda words: words[0]
)
def test_a_command_that_runs_nothing_needs_no_limit(words: list[str], folder: Path) -> None:
    """Rounds and sizes that no machine has, in one file."""
    model = sgd()
    model.graph.initializer.append(numpy_helper.from_array(np.int64(2**50), "rounds"))
    model.graph.initializer.append(numpy_helper.from_array(np.asarray(True), "yes"))
    model.graph.initializer.append(numpy_helper.from_array(np.int64([2**30]), "many"))
    model.graph.initializer.append(numpy_helper.from_array(np.zeros((), np.float32), "none"))
    read = next(node for node in model.graph.node if "x" in node.input)
    at = [*model.graph.node].index(read)
    made = [
        _loop("slow", [helper.make_node("Neg", ["k"], ["k2"])], ["none"], ["k"], ["k2"]),
        helper.make_node("Expand", ["slow0", "many"], ["wide"]),
        helper.make_node("ReduceMean", ["wide"], ["mean"], keepdims=0),
        helper.make_node("Add", ["x", "mean"], ["x.moved"]),
    ]
    for node in model.graph.node:
        node.input[:] = ["x.moved" if name == "x" else name for name in node.input]
    for node in reversed(made):
        model.graph.node.insert(at, node)
    onnx.save(model, folder / "both.onnx")
    assert feeds_for(model)
    done = graphscale_process(words[0], "both.onnx", *words[1:], folder=folder)
    assert done.returncode in (0, 1), done.stderr
