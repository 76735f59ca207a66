"""State that does not fit, in memory and in files: one clear line, and an unchanged session."""

from __future__ import annotations

import functools
import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

import graphscale as gs
from graphscale.errors import SessionError
from graphscale.files.tensor_files import write_safetensors
from tests.analysis.roles.steps import hidden_state_step
from tests.build import feeds_for, linear_step
from tests.conftest import Arrays, assert_all_same_bits
from tests.session.dangerous import CASES
from tests.session.digits import SCALED, batch, first_state, make, refused

BAD_STATE: dict[str, tuple[Callable[[Arrays], Any], tuple[str, ...]]] = {
    "missing": (lambda state: {name: value for name, value in state.items() if name != "fc1.bias"}, ("fc1.bias",)),
    "empty": (lambda state: {}, ("current_loss_scale",)),
    "unknown": (lambda state: {**state, "zebra": np.ones(1)}, ("zebra",)),
    "dtype": (lambda state: {**state, "fc3.bias": np.ones(10)}, ("fc3.bias", "float64", "float32")),
    "shape": (lambda state: {**state, "fc3.bias": np.ones(9, np.float32)}, ("fc3.bias", "[9]", "[10]")),
    "rank": (lambda state: {**state, "good_steps": np.zeros(1, np.int64)}, ("good_steps", "1 ax")),
    "None": (lambda state: None, ("NoneType",)),
    "a list": (lambda state: list(state.items()), ("list",)),
    "a state that is None": (lambda state: {**state, "fc3.bias": None}, ("fc3.bias",)),
    **{
        f"a scale of {scale:g}": (
            lambda state, scale=scale: {**state, "current_loss_scale": np.float32(scale)},
            (f"the loss scale 'current_loss_scale' is {scale:g}; it must be finite and above 0",),
        )
        for scale in (0.0, -2.0, np.inf, np.nan)
    },
    "a count of -1": (lambda state: {**state, "good_steps": np.int64(-1)}, ("'good_steps' is -1; it must be a whole",)),
    "a count of 2**63 - 1": (lambda state: {**state, "good_steps": np.int64(2**63 - 1)}, ("from 0 to 2**53",)),
    "a name that is no text": (lambda state: {**state, 5: np.ones(1)}, ("5",)),
    "ragged lists": (lambda state: {**state, "fc3.bias": [[1.0], [1.0, 2.0]]}, ("fc3.bias",)),
}


@functools.cache
def stepped() -> gs.Session:
    """The session that refuses bad state, a step on at least: each refusal leaves it unchanged."""
    session = make()
    session.step(batch())
    return session


@pytest.mark.parametrize("case", BAD_STATE)
def test_a_bad_dictionary_changes_nothing(case: str) -> None:
    spoil, fragments = BAD_STATE[case]
    session = stepped()
    before = session.state_dict()
    other = {name: np.full_like(value, 2) for name, value in before.items()}
    with refused(SessionError, fragments):
        session.load_state_dict(spoil(other))
    assert_all_same_bits(session.state_dict(), before)


@pytest.mark.parametrize(
    "case",
    ["unknown", "dtype", "shape", "a scale of nan", "a count of -1", "a list", "a state that is None", "ragged lists"],
)
def test_a_bad_first_state(case: str) -> None:
    spoil, fragments = BAD_STATE[case]
    with refused(SessionError, fragments):
        gs.Session(SCALED, state=spoil(first_state()))


def test_a_first_state_that_is_incomplete() -> None:
    state = first_state()
    del state["fc1.weight"], state["fc2.bias.momentum"]
    with refused(SessionError, ("fc1.weight, fc2.bias.momentum", "state")):
        gs.Session(SCALED, state=state)


def test_a_first_state_that_is_no_state_by_the_roles() -> None:
    result = gs.scale(hidden_state_step(), roles={"metrics": ["h_next"]})
    state = {name: array for name, array in feeds_for(hidden_state_step()).items() if name in ("w", "r", "h")}
    with refused(SessionError, ("'h' is not carried", "its role is batch: no output", "--update OUT=h")):
        gs.Session(result, state=state)


# --- files ------------------------------------------------------------------------------------------------------------


def assert_refused(path: Path, *fragments: str) -> None:
    """The file is refused in one line that names it, and the session is unchanged."""
    session = stepped()
    good_steps = session.good_steps
    assert_refused_by(session, path, *fragments)
    assert session.step(batch()).applied
    assert session.good_steps == good_steps + 1


def assert_refused_by(session: gs.Session, path: Path, *fragments: str) -> None:
    before = session.state_dict()
    with refused(SessionError, (str(path), *fragments)):
        session.load_state(path)
    assert_all_same_bits(session.state_dict(), before)


def parts(path: Path) -> tuple[int, bytes]:
    """The length of the header, and the whole file."""
    data = path.read_bytes()
    return struct.unpack("<Q", data[:8])[0], data


def test_a_truncated_file(saved: Path) -> None:
    header, data = parts(saved)
    # In the length of the header, in the header, at its end, and in the arrays.
    for length in (0, 5, 8, 8 + header // 2, 7 + header, 8 + header, 9 + header, len(data) // 2, len(data) - 1):
        saved.write_bytes(data[:length])
        assert_refused(saved, "truncated")


def test_a_file_that_goes_on(saved: Path) -> None:
    saved.write_bytes(saved.read_bytes() + b"\0")
    assert_refused(saved)


def test_a_bit_that_flipped(saved: Path) -> None:
    """Refused; never a half of the state, or one array for another."""
    (_, data), session = parts(saved), make()
    first, random = session.state_dict(), np.random.default_rng(1)
    for _ in range(100):
        damaged = bytearray(data)
        damaged[random.integers(len(data))] ^= 1 << random.integers(8)
        saved.write_bytes(bytes(damaged))
        with refused(SessionError, (str(saved),)):
            session.load_state(saved)
    assert_all_same_bits(session.state_dict(), first)


def test_a_file_of_the_version_without_checksums(saved: Path) -> None:
    """Read, with a check of the numbers of the loss scale; with the mark of the newer version it has lost something."""
    arrays = load_file(saved)
    with safe_open(saved, framework="np") as file:
        told = {key: value for key, value in file.metadata().items() if key != "graphscale.checksum"}
    save_file(arrays, saved, told)
    assert_refused(saved, "has lost its checksum")
    told["graphscale.format"] = "state/1"
    save_file(arrays, saved, told)
    assert make().load_state(saved) == {"epoch": "3"}
    save_file({**arrays, "current_loss_scale": np.array(np.inf, np.float32)}, saved, told)
    assert_refused(saved, "the loss scale 'current_loss_scale' is inf; it must be finite and above 0")


def changed(saved: Path, arrays: dict[str, Any], **metadata: str | None) -> Path:
    """The state file with other arrays or metadata, and a checksum that fits; None takes one away."""
    whole: dict[str, Any] = {**load_file(saved), **arrays}
    with safe_open(saved, framework="np") as file:
        told = {**file.metadata(), **{f"graphscale.{key}": value for key, value in metadata.items()}}
    write_safetensors(
        saved,
        {name: array for name, array in whole.items() if array is not None},
        {key: value for key, value in told.items() if value is not None},
    )
    return saved


WRONG: dict[str, tuple[dict[str, Any], dict[str, str | None], tuple[str, ...]]] = {
    "a state missing": ({"fc1.bias": None}, {}, ("fc1.bias",)),
    "a state too many": ({"zebra": np.ones(3)}, {}, ("zebra",)),
    "a shape": ({"fc1.bias": np.ones(3, np.float32)}, {}, ("fc1.bias", "[3]", "[128]")),
    "a dtype": ({"fc1.bias": np.ones(128)}, {}, ("fc1.bias", "float64", "float32")),
    "a rank": ({"current_loss_scale": np.ones(1, np.float32)}, {}, ("current_loss_scale",)),
    "the interface": ({}, {"interface": "0" * 64}, ("another graph",)),
    "no interface": ({}, {"interface": None}, ("another graph",)),
    "the target": ({}, {"target": "ort-cuda"}, ("ort-cuda", "onnx")),
    "the policy": (
        {},
        {"policy": json.dumps({"class_name": "FixedLossScale"})},
        ("FixedLossScale", "DynamicLossScale"),
    ),
    "the format": ({}, {"format": "state/0"}, ("no state file",)),
    "no format": ({}, {"format": None}, ("no state file",)),
    "extra texts that are none": ({}, {"extra": "{"}, ()),
    "extra texts of another kind": ({}, {"extra": "[1]"}, ()),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_file_with_something_wrong(case: str, saved: Path) -> None:
    arrays, metadata, fragments = WRONG[case]
    assert_refused(changed(saved, arrays, **metadata), *fragments)


def test_a_file_that_is_right_after_all(saved: Path) -> None:
    """The way to change a file that these tests go by does not spoil it."""
    session = make()
    assert session.load_state(changed(saved, {})) == {"epoch": "3"}
    assert session.good_steps == 2


@pytest.mark.full
def test_files_of_another_kind(tmp_path: Path) -> None:
    arrays = {"fc1.bias": np.ones(128, np.float32)}
    save_file(arrays, tmp_path / "weights.safetensors")
    np.savez(tmp_path / "state.npz", **arrays)
    SCALED.save(tmp_path / "model.onnx")
    (tmp_path / "text").write_text("state\n" * 1000)
    (tmp_path / "zeros").write_bytes(bytes(100_000))
    (tmp_path / "huge header").write_bytes(struct.pack("<Q", 2**63) + bytes(1000))
    (tmp_path / "folder").mkdir()
    for name in (*os.listdir(tmp_path), "missing", "missing folder/state"):
        assert_refused(tmp_path / name)


def metric(policy: gs.LossScale | str = "dynamic", target: str = "onnx", case: str = "metric") -> gs.ScaledModel:
    return gs.scale(CASES[case].model(), policy, updates=CASES[case].updates, target=target)


OTHERS: dict[str, tuple[Callable[[], gs.ScaledModel], tuple[str, ...]]] = {
    "another network": (lambda: SCALED, ("another graph",)),
    "without weights": (
        lambda: gs.scale(linear_step("m = Exp(loss)", outputs="float[4,3] dw, float m")),
        ("another graph",),
    ),
    # A hash of all inputs and outputs: state of the same names and shapes need not mean the same.
    "another output": (lambda: metric(case="rows backwards"), ("another graph",)),
    "another period": (lambda: metric(gs.DynamicLossScale(increment_period=7)), ()),
    "another way when stuck": (lambda: metric(gs.DynamicLossScale(on_stuck="accept")), ()),
    "a fixed scale": (lambda: metric(gs.FixedLossScale(8)), ()),
}


@pytest.mark.parametrize("other", OTHERS)
def test_the_state_of_another_step(other: str, tmp_path: Path) -> None:
    make_result, fragments = OTHERS[other]
    result, path = make_result(), tmp_path / "state.safetensors"
    gs.Session(result, state=first_state() if result is SCALED else {}).save_state(path)
    assert_refused_by(gs.Session(metric()), path, *fragments)


@pytest.mark.training
def test_the_state_of_another_target(tmp_path: Path) -> None:
    """Counts are whole numbers on the one and floats on the other."""
    path = tmp_path / "state.safetensors"
    gs.Session(metric()).save_state(path)
    assert_refused_by(gs.Session(metric(target="ort-training")), path, "'onnx'", "'ort-training'")
