"""Saved and loaded state: dictionaries, files and exported models, from which training continues bit for bit."""

from __future__ import annotations

import functools
import itertools
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file

import graphscale as gs
from graphscale.errors import OutputError, SessionError
from tests.conftest import ROOT, TARGETS, Arrays, assert_all_same_bits, load_example, with_initializers
from tests.session import digits
from tests.session.dangerous import CASES
from tests.session.dangerous import batches as linear_batches
from tests.session.digits import refused
from tests.session.plain import batches, carried_inputs, first_state
from tests.session.test_against_plain_loop import MIXED

pytestmark = pytest.mark.sample(1)

AFTER = 6
# Counts of bad steps and of what is left of the hysteresis are state too.
POLICY = gs.presets.deepspeed(initial_loss_scale=2.0**20, increment_period=2)


@functools.cache
def scaled(graph: str, target: str) -> gs.ScaledModel:
    """A step: its weights bare inputs, or with initial values, or in two buffers that take turns."""
    if graph == "two buffers":
        return CASES["metric"].scaled(POLICY, target)
    example = load_example(MIXED)
    model = example.model()
    if graph == "initial values":
        carried = carried_inputs(gs.scale(model)) & set(example.feeds)
        model = with_initializers(model, {name: example.feeds[name] for name in sorted(carried)})
    return gs.scale(model, POLICY, target=target, telemetry=True)


def make(graph: str, target: str) -> gs.Session:
    """A session from the very beginning."""
    result = scaled(graph, target)
    return gs.Session(result, state={} if graph == "two buffers" else first_state(result, load_example(MIXED).feeds))


def steps(graph: str, count: int, skip: int = 0) -> Iterator[Arrays]:
    """Batches, with an overflow among the first and one among the last."""
    if graph == "two buffers":
        found = linear_batches(count, bad=[3, 10])
    else:
        found = batches(load_example(MIXED), carried_inputs(scaled(graph, "onnx")), count)
    return itertools.islice(found, skip, None)


def advance(session: gs.Session, feeds: Iterable[Arrays]) -> None:
    for batch in feeds:
        session.step(batch)


Way = Callable[[gs.Session, str, str, Path], gs.Session]


def by_dictionary(session: gs.Session, graph: str, target: str, folder: Path) -> gs.Session:
    other = make(graph, target)
    other.load_state_dict(session.state_dict())
    return other


def by_file(session: gs.Session, graph: str, target: str, folder: Path) -> gs.Session:
    session.save_state(folder / "state.safetensors")
    other = make(graph, target)
    assert other.load_state(folder / "state.safetensors") == {}
    return other


def by_export(session: gs.Session, graph: str, target: str, folder: Path) -> gs.Session:
    session.export(folder / "step.onnx")
    return gs.Session(folder / "step.onnx")


def by_first_state(session: gs.Session, graph: str, target: str, folder: Path) -> gs.Session:
    return gs.Session(scaled(graph, target), state=session.state_dict())


def by_file_into_exported(session: gs.Session, graph: str, target: str, folder: Path) -> gs.Session:
    """State files fit the exported model and the original alike."""
    make(graph, target).export(folder / "first.onnx")
    session.save_state(folder / "state.safetensors")
    other = gs.Session(folder / "first.onnx")
    other.load_state(folder / "state.safetensors")
    return other


def by_detour(session: gs.Session, graph: str, target: str, folder: Path) -> gs.Session:
    """Through a session that is somewhere else by then, an odd number of steps away."""
    other = make(graph, target)
    advance(other, steps(graph, 3))
    other.load_state_dict(session.state_dict())
    return other


WAYS: list[Way] = [by_dictionary, by_file, by_export, by_first_state, by_file_into_exported, by_detour]


@pytest.mark.full
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("graph", ["bare inputs", "initial values", "two buffers"])
@pytest.mark.parametrize("before", [4, 5])
def test_training_goes_on_bit_for_bit(graph: str, target: str, way: Way, before: int, tmp_path: Path) -> None:
    """After an even or odd number of steps: where two buffers take turns, the present one is the first or second."""
    session = make(graph, target)
    assert {session.step(feeds).applied for feeds in steps(graph, before)} == {True, False}
    other, applied = way(session, graph, target, tmp_path), set()
    assert_same_state(other, session)
    for feeds in steps(graph, before + AFTER + 1, skip=before):
        ours, theirs = session.step(feeds), other.step(feeds)
        assert list(ours) == list(theirs)
        assert_all_same_bits(theirs, ours)
        assert (ours.applied, ours.stuck, ours.cause) == (theirs.applied, theirs.stuck, theirs.cause)
        assert_same_state(other, session)
        applied.add(ours.applied)
    assert applied == {True, False}
    assert session.loss_scale != 2.0**20 and session.state_dict()["hysteresis_left"] != 2


def assert_same_state(one: gs.Session, other: gs.Session) -> None:
    ours, theirs = one.state_dict(), other.state_dict()
    assert list(ours) == list(theirs)
    assert_all_same_bits(ours, theirs)
    assert one.loss_scale == other.loss_scale
    assert one.good_steps == other.good_steps
    assert one.counters == other.counters


def test_what_state_there_is() -> None:
    session = make("bare inputs", "onnx")
    state = session.state_dict()
    assert set(state) == {s.input for s in scaled("bare inputs", "onnx").report.state}
    assert {"fc1.weight", "mu.fc1.weight", "count", "current_loss_scale", "good_steps", "hysteresis_left"} <= set(state)
    assert {"steps", "skipped_steps", "consecutive_skips", "last_skip_step"} <= set(state)
    assert session.counters == {"steps": 0, "skipped_steps": 0, "consecutive_skips": 0, "last_skip_step": 0}


@pytest.mark.full
@pytest.mark.parametrize("target", TARGETS)
def test_state_dictionaries_are_copies(target: str) -> None:
    """In both directions."""
    session = make("initial values", target)
    taken = session.state_dict()
    kept = {name: value.copy() for name, value in taken.items()}
    session.load_state_dict(taken)
    advance(session, steps("initial values", 2))
    assert_all_same_bits(taken, kept)
    now = session.state_dict()
    for value in session.state_dict().values():
        value[...] = 0
    for value in taken.values():
        value[...] = 1
    assert_all_same_bits(session.state_dict(), now)


@pytest.mark.full
@pytest.mark.parametrize("target", TARGETS)
def test_first_state_is_copied(target: str) -> None:
    given = {name: value.copy() for name, value in make("bare inputs", target).state_dict().items()}
    kept = {name: value.copy() for name, value in given.items()}
    session = gs.Session(scaled("bare inputs", target), state=given)
    session.step(next(iter(steps("bare inputs", 1))))
    assert_all_same_bits(given, kept)
    assert any((session.state_dict()[name] != value).any() for name, value in kept.items())


@pytest.mark.full
def test_any_array_that_fits_can_be_loaded() -> None:
    session, other = make("bare inputs", "onnx"), make("bare inputs", "onnx")
    advance(session, steps("bare inputs", 2))
    state: dict[str, Any] = {
        name: np.array(value.astype(value.dtype.newbyteorder(">")), order="F")
        for name, value in session.state_dict().items()
    }
    other.load_state_dict({**state, "count": session.state_dict()["count"][()]})
    assert_same_state(session, other)


# --- files ------------------------------------------------------------------------------------------------------------


@pytest.mark.full
def test_what_is_in_a_file(tmp_path: Path) -> None:
    """A plain safetensors file, whose weights other programs can read."""
    session, path = make("bare inputs", "onnx"), tmp_path / "state.safetensors"
    session.save_state(path)
    advance(session, steps("bare inputs", 3))
    session.save_state(path, {"epoch": "3", "note": "größer \n { } \" '"})
    assert os.listdir(tmp_path) == [path.name]
    arrays = load_file(path)
    assert set(arrays) == set(session.state_dict())
    assert_all_same_bits(arrays, session.state_dict())
    with safe_open(path, framework="np") as file:
        metadata = file.metadata()
    assert '"class_name": "DynamicLossScale"' in metadata["graphscale.policy"]
    assert '"hysteresis": 2' in metadata["graphscale.policy"]
    assert metadata["graphscale.target"] == "onnx"
    # A state file moves from one version of ONNX Runtime to another: recorded on 1.19.2.
    interface = "cdee21fece7e45b9c0b611de3bde7360e1b9066a51a81ffd7f1b4ff3cf573e97"
    assert metadata["graphscale.interface"] == interface
    other = make("bare inputs", "onnx")
    assert other.load_state(str(path)) == {"epoch": "3", "note": "größer \n { } \" '"}
    assert_same_state(session, other)


# --- exported models --------------------------------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("graph", ["bare inputs", "initial values"])
def test_an_exported_model(graph: str, target: str, tmp_path: Path) -> None:
    """It needs no state any more, its metadata is that of the scaled model, and the session goes on undisturbed."""
    session, twin, path = make(graph, target), make(graph, target), tmp_path / "step.onnx"
    for feeds in steps(graph, 3):
        session.step(feeds)
        twin.step(feeds)
    session.export(path)
    session.export(path)
    assert os.listdir(tmp_path) == [path.name]
    model = onnx.load(path)
    onnx.checker.check_model(model) if target == "onnx" else None
    initial = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    assert_all_same_bits(initial, session.state_dict())
    original = scaled(graph, target).model
    assert [node.name for node in model.graph.node] == [node.name for node in original.graph.node]
    assert {p.key: p.value for p in model.metadata_props} == {p.key: p.value for p in original.metadata_props}
    for feeds in steps(graph, 6, skip=3):
        assert_all_same_bits(session.step(feeds), twin.step(feeds))
    assert_same_state(session, twin)


@pytest.mark.full
def test_an_exported_model_is_stripped_and_inspected_as_any_other(tmp_path: Path) -> None:
    session, path = make("bare inputs", "onnx"), tmp_path / "step.onnx"
    session.export(path)
    assert gs.inspect(path).coverage == 1.0
    again = gs.Session(path)
    again.export(path)
    assert_same_state(gs.Session(path), session)


# --- places that cannot be written ------------------------------------------------------------------------------------


def writers(session: gs.Session) -> dict[str, Callable[[Path], None]]:
    return {"save_state": session.save_state, "export": session.export}


@pytest.mark.full
@pytest.mark.parametrize("how", ["save_state", "export"])
@pytest.mark.parametrize("where", ["a folder", "no folder", "a file for a folder", "/proc", "a long name"])
def test_a_place_that_cannot_be_written(where: str, how: str, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_bytes(b"kept")
    places = {
        "a folder": tmp_path / "folder",
        "no folder": tmp_path / "missing" / "state.safetensors",
        "a file for a folder": tmp_path / "file" / "state.safetensors",
        "/proc": Path("/proc", "state.safetensors"),
        "a long name": tmp_path / ("x" * 300),
    }
    session = digits.make()
    session.step(digits.batch())
    with refused(OutputError, (str(places[where].parent),)):
        writers(session)[how](places[where])
    assert sorted(os.listdir(tmp_path)) == ["file", "folder"]
    assert (tmp_path / "file").read_bytes() == b"kept"
    assert os.listdir(tmp_path / "folder") == []
    assert session.step(digits.batch()).applied


FULL_DISK = """
import resource, sys
from pathlib import Path
from graphscale.errors import OutputError
from tests.session.digits import batch, make
path, how, room = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
session = make()
session.step(batch())
resource.setrlimit(resource.RLIMIT_FSIZE, (room, room))
try:
    getattr(session, how)(path)
except OutputError as error:
    print(error)
assert session.step(batch()).applied
"""


@pytest.mark.full
@pytest.mark.skipif(os.name != "posix", reason="needs limits on the size of files")
@pytest.mark.parametrize("room", [0, 100, 5000, 100_000])
@pytest.mark.parametrize("how", ["save_state", "export"])
def test_a_full_disk_leaves_the_old_file(how: str, room: int, tmp_path: Path) -> None:
    path = tmp_path / "file"
    writers(digits.make())[how](path)
    before = path.read_bytes()
    assert len(before) > room
    command = [sys.executable, "-c", FULL_DISK, str(path), how, str(room)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=ROOT, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    (line,) = done.stdout.splitlines()
    assert str(path) in line
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["file"]


BAD_EXTRA: dict[str, Any] = {"number": {"epoch": 3}, "object": {"epoch": object()}, "text": "abc", "key": {3: "epoch"}}


@pytest.mark.parametrize("name", ["state.npz", "state.npy", "step.onnx"])
def test_a_name_of_another_kind_of_file(name: str, tmp_path: Path) -> None:
    with refused(SessionError, (name, "name it state.safetensors")):
        digits.make().save_state(tmp_path / name)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("case", BAD_EXTRA)
def test_extra_that_is_no_texts(case: str, saved: Path) -> None:
    before = saved.read_bytes()
    with refused(SessionError, ("extra",)):
        digits.make().save_state(saved, BAD_EXTRA[case])
    assert saved.read_bytes() == before
