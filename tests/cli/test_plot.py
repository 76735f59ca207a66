"""graphscale plot: from the metrics of a run to its picture."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest

from graphscale.training.metrics import MetricsFile
from graphscale.training.record import StepRecord
from tests.cli.command import refuse, succeed

pytestmark = pytest.mark.static

pytest.importorskip("matplotlib", reason="draws with matplotlib")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Metrics of 30 steps, two of them skipped, in both formats."""
    for suffix in ("jsonl", "csv"):
        file = MetricsFile(tmp_path / f"run.{suffix}")
        scale = 1024.0
        for step in range(1, 31):
            applied = step not in (11, 21)
            after = scale if applied else scale / 2
            loss = 1 / step if applied else float("inf")
            file.write(StepRecord(step, 1, loss, scale, after, applied, outputs={"accuracy": step / 30}))
            scale = after
        file.close()
    return tmp_path


@pytest.mark.full
@pytest.mark.parametrize("suffix", ["jsonl", "csv"])
def test_the_command(suffix: str, folder: Path) -> None:
    words = ("plot", f"run.{suffix}", "-o", "run.svg", "--title", "Digits", "--column", "accuracy")
    assert succeed(folder, *words) == "30 steps, 2 of them skipped -> run.svg\n"
    root = ElementTree.parse(folder / "run.svg").getroot()
    texts = [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]
    assert {"Digits", "accuracy", "training loss", "loss scale", "halved (2)", "skipped (2)"} <= set(texts)


@pytest.mark.full
def test_both_formats_give_one_picture(folder: Path) -> None:
    for suffix in ("jsonl", "csv"):
        succeed(folder, "plot", f"run.{suffix}", "-o", f"{suffix}.png")
    assert (folder / "jsonl.png").read_bytes() == (folder / "csv.png").read_bytes()


ROW = """{"step": %d, "epoch": 1, "loss": %g, "loss_scale": %g, "next_loss_scale": 8, "applied": true, "good_steps": 1}
"""
REFUSED = {
    "missing": (["nothing.jsonl", "-o", "a.png"], "cannot read nothing.jsonl: No such file or directory"),
    "suffix": (["run.txt", "-o", "a.png"], "run.txt: expected a metrics file, a name that ends in .jsonl or .csv"),
    "empty": (["empty.csv", "-o", "a.png"], "empty.csv holds no step yet"),
    "damaged": (["bad.jsonl", "-o", "a.png"], "bad.jsonl, line 1 is no row of metrics: step is missing"),
    "scale": (["zero.jsonl", "-o", "a.png"], "zero.jsonl, line 1 is no row of metrics: loss_scale is 0"),
    "number": (["huge.jsonl", "-o", "a.png"], "huge.jsonl, line 1 is no row of metrics: step is 1000"),
    "twice": (["twice.jsonl", "-o", "a.png"], "twice.jsonl, line 1 is no row of metrics: it has 'step' twice"),
    "far": (["far.jsonl", "-o", "a.png"], "the steps cannot be drawn, their numbers are too far apart"),
    "picture": (["run.csv", "-o", "a.jpg"], "a.jpg: expected a name that ends in .png, .svg or .pdf"),
    "folder": (["run.csv", "-o", "nowhere/a.png"], "does not exist; create it"),
    "column": (
        ["run.csv", "-o", "a.png", "--column", "norm"],
        "--column norm: run.csv does not have it; there are accuracy",
    ),
    "no-output": (["run.csv"], "-o/--output is missing"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused(case: str, folder: Path) -> None:
    arguments, message = REFUSED[case]
    (folder / "empty.csv").touch()
    (folder / "zero.jsonl").write_text(ROW % (1, 1, 0))
    (folder / "huge.jsonl").write_text(ROW % (10**400, 1, 8))
    (folder / "twice.jsonl").write_text((ROW % (1, 1, 8)).replace("{", '{"step": 2, '))
    (folder / "far.jsonl").write_text(ROW % (1, -1.7e308, 8) + ROW % (2, 1.7e308, 8))
    (folder / "run.txt").touch()
    (folder / "bad.jsonl").write_text("{}\n")
    refuse(folder, "plot", *arguments, words=(message,))


@pytest.mark.full
def test_a_picture_is_replaced_only_by_a_whole_one(folder: Path) -> None:
    (folder / "run.png").write_bytes(b"tEXtSoftware\0graphscale")
    (folder / "empty.csv").touch()
    refuse(folder, "plot", "empty.csv", "-o", "run.png")
    succeed(folder, "plot", "run.csv", "-o", "run.png")
    assert (folder / "run.png").read_bytes().startswith(b"\x89PNG")
