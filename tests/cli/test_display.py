"""Progress on stderr: a bar in a terminal, a line every ten seconds elsewhere, nothing by default in Python."""

from __future__ import annotations

import io
import re
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

import graphscale as gs
from graphscale.cli.display import Display, hide, showing, silence
from graphscale.cli.show import say
from graphscale.process.stages import listening, report_stage
from tests.cli.command import graphscale
from tests.conftest import MODELS

pytestmark = pytest.mark.static

STEP = MODELS / "pytorch" / "mse_tanh.onnx"


class Clock:
    """A clock that waits by the number of a thread's waits, not by time: the thread ends after some."""

    def __init__(self, waits: int) -> None:
        self.seconds, self._waits, self.over = 0.0, waits, threading.Event()

    def wait(self, end: threading.Event, seconds: float) -> bool:
        """Let time pass at once, but once all waits are over."""
        if self._waits == 0:
            self.over.set()
            return end.wait(30)
        self._waits -= 1
        self.seconds += seconds
        return end.is_set()

    def __call__(self) -> float:
        return self.seconds


def shown(console: Console, waits: int, work: Callable[[], None]) -> None:
    """Do some work while a display shows it, for some waits of the display."""
    clock = Clock(waits)
    with showing(Display(console, clock.wait, clock)):
        work()
        assert clock.over.wait(30)


def test_a_line_every_ten_seconds(capsys: pytest.CaptureFixture[str]) -> None:
    shown(Console(stderr=True, force_terminal=False), 3, lambda: report_stage("reading a\nb.onnx"))
    lines = capsys.readouterr().err.splitlines()
    assert lines == [f"graphscale: {seconds} s: reading a\\nb.onnx" for seconds in (10, 20, 30)]


def test_parts_are_counted(capsys: pytest.CaptureFixture[str]) -> None:
    shown(Console(stderr=True, force_terminal=False), 1, lambda: report_stage("training", 3, 8))
    assert capsys.readouterr().err == "graphscale: 10 s, 3 of 8: training\n"


def test_a_bar_in_a_terminal_leaves_nothing_behind() -> None:
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=80, color_system=None)
    shown(console, 4, lambda: report_stage("proving", 2, 4))
    text = screen.getvalue()
    assert "2 s, 2 of 4: proving" in text
    assert text.endswith("\x1b[2K"), "the line is erased"


def test_short_work_shows_nothing_in_a_terminal() -> None:
    screen = io.StringIO()
    with showing(Display(Console(file=screen, force_terminal=True))):
        report_stage("reading")
    assert screen.getvalue() == ""


def test_results_are_printed_without_a_bar(capsys: pytest.CaptureFixture[str]) -> None:
    threads = threading.active_count()
    with showing(Display(Console(stderr=True, force_terminal=False))):
        report_stage("reading")
        assert threading.active_count() == threads + 1
        say("done")
        assert threading.active_count() == threads
        report_stage("writing")
        hide()
        silence()
        report_stage("writing more")
        assert threading.active_count() == threads
    assert capsys.readouterr().out == "done\n"


def test_python_is_silent_and_tells_a_listener(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    stages: list[tuple[str, int, int]] = []
    with listening(lambda *stage: stages.append(stage)):
        gs.scale(STEP).save(tmp_path / "scaled.onnx")
    names = [name for name, _, _ in stages]
    for begin in ("reading", "looking for the loss", "rewriting the graph (scale-loss)", "proving", "writing"):
        assert any(name.startswith(begin) for name in names), names
    gs.scale(STEP)
    assert (capsys.readouterr(), len(stages)) == (("", ""), len(names))


@pytest.mark.parametrize("option", ["--quiet", "--json"])
def test_options_that_silence(option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reports: list[str] = []
    monkeypatch.setattr(Display, "report", lambda self, stage, done, total: reports.append(stage))
    graphscale("inspect", STEP, option, folder=tmp_path)
    assert reports == []
    graphscale("inspect", STEP, folder=tmp_path)
    assert any(re.match("reading .*mse_tanh", stage) for stage in reports)
