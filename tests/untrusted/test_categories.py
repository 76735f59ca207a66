"""Cases of every category of fuzz/hostile, the same each time, and a check that broken promises are noticed."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import os
import shutil
import signal
import time
import typing
from collections.abc import Callable
from pathlib import Path

import pytest

from fuzz.hostile import bench, bombs, disclosure, loss, processes, terminal
from fuzz.hostile.categories import CATEGORIES
from fuzz.hostile.runner import Category, Tally, try_many
from graphscale.cli import COMMANDS, load_command, protection, show
from graphscale.files import external_data
from graphscale.process import streams
from tests.process.test_child import left_session

pytestmark = pytest.mark.static

TRIES = {"disclosure": 45, "terminal": 45, "bombs": 28, "slow": 8, "tracebacks": 44, "loss": 15, "state": 30}


def runnable(category: Category) -> Category:
    """Leave out the kinds that need strace where there is none."""
    kinds = {name: kind for name, kind in category.kinds.items() if shutil.which("strace") or "system" not in name}
    return dataclasses.replace(category, kinds=kinds)


def last(category: Category, tries: int, kind: str | None = None) -> Tally:
    chosen = category if kind is None else dataclasses.replace(category, kinds={kind: category.kinds[kind]})
    *_, tally = try_many(chosen, 0, tries)
    return tally


def test_every_category_is_tried() -> None:
    assert {*TRIES} == {*CATEGORIES}


@pytest.mark.full
@pytest.mark.parametrize("name", CATEGORIES)
def test_a_category(name: str) -> None:
    tally = last(runnable(CATEGORIES[name]), TRIES[name])
    assert not tally.faults, tally.faults
    assert tally.tries == TRIES[name]


# --- the bench --------------------------------------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.parametrize("call", bench.CALLS)
def test_calls_succeed_on_good_files(call: str, tmp_path: Path) -> None:
    bench.fill(tmp_path)
    assert processes.hold(bench.words_of(call), tmp_path, codes=(0,)) is None


def test_every_file_of_every_command_is_named() -> None:
    """Of all commands but two, which read no file."""
    missing = []
    for command in (name for name in COMMANDS if name not in ("demo", "doctor")):
        function = load_command(command)
        given = [word for call in bench.CALLS for word in bench.words_of(call) if bench.words_of(call)[0] == command]
        for name, hint in typing.get_type_hints(function, include_extras=True).items():
            kind, *info = typing.get_args(hint) or (hint,)
            if kind in (Path, Path | None) and info and hasattr(info[0], "param_decls"):
                names = [text for text in (info[0].default, *(info[0].param_decls or ())) if isinstance(text, str)]
                is_option = type(info[0]).__name__ == "OptionInfo"
                if is_option and not {*names, f"--{name.replace('_', '-')}"} & {*given}:
                    missing.append(f"{command} {name}")
    # Where graphscale may read or write folders beside these, and the log of TensorBoard, which it only writes.
    allowed = {"external_data_root", "logdir", "save_counterexample"}
    assert not [each for each in missing if each.split()[1] not in allowed]


# --- the attacks are noticed where nothing is checked -----------------------------------------------------------------


@pytest.mark.full
def test_a_disclosure_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(external_data, "confine_external_data", lambda *_, **__: None)
    faults = last(disclosure.CATEGORY, 36, "initializers").faults
    assert len(faults) >= 6
    assert not last(disclosure.CATEGORY, 2, "permitted").faults  # where the mark is found


@pytest.mark.full
def test_raw_characters_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (show, streams):
        monkeypatch.setattr(module, "printable", str)
    faults = [*last(terminal.CATEGORY, 36, "names in models").faults.values()]
    assert len(faults) >= 4
    assert any("raw characters on" in fault for fault in faults)


@pytest.mark.full
def test_a_lost_file_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protection, "protecting", lambda _: contextlib.nullcontext())
    assert len(last(loss.CATEGORY, 8, "its own input").faults) >= 4


def wait_for_nobody() -> None:
    os.read(os.pipe()[0], 1)


def compute() -> None:
    end = time.process_time() + 30
    while time.process_time() < end:
        pass


def grow() -> None:
    held = [bytearray(2**26) for _ in range(31)]
    for part in held:
        part[::4096] = b"1" * (len(part) // 4096)


def say(text: str) -> Callable[[], None]:
    return lambda: os.write(2, text.encode()) and None


@pytest.mark.parametrize(
    ("prepare", "fault"),
    [
        pytest.param(wait_for_nobody, "it waits", id="waiting", marks=pytest.mark.full),
        pytest.param(compute, "too much CPU time", id="computing", marks=pytest.mark.full),
        pytest.param(grow, "MiB of memory", id="growing", marks=pytest.mark.full),
        pytest.param(lambda: 1 / 0, "a trace", id="an error"),
        pytest.param(lambda: os.kill(os.getpid(), signal.SIGSEGV), "exit code -11", id="a crash"),
        pytest.param(say("\u202e\n"), "raw characters", id="a bidirectional mark"),
        pytest.param(say("\x9b31m\n"), "raw characters", id="C1"),
        pytest.param(say("graphscale: one more line\n"), "no single line", id="two lines"),
    ],
)
def test_the_limits_are_noticed(prepare: Callable[[], None], fault: str, tmp_path: Path) -> None:
    found = processes.hold(["scale", "missing.onnx", "-o", "out.onnx"], tmp_path, prepare=prepare)
    assert found is not None and fault in found


def test_a_session_that_nobody_holds_does_not_end_a_command(tmp_path: Path) -> None:
    """Its threads are in this process alone."""
    words = ["scale", "missing.onnx", "-o", "out.onnx"]
    with left_session():
        assert processes.hold(words, tmp_path, codes=(2,), prepare=lambda: gc.collect() and None) is None


def test_a_refusal_keeps_the_promise(tmp_path: Path) -> None:
    assert processes.hold(["scale", "missing.onnx", "-o", "out.onnx"], tmp_path, codes=(2,)) is None
    assert "archives" in bombs.CATEGORY.kinds
