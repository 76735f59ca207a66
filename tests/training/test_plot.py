"""The picture of a run: its panels, its curves, its marks."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

import graphscale as gs
from graphscale.errors import TrainingError
from graphscale.training.record import StepRecord
from graphscale.training.run_plot import Curve, _figure, draw

pytestmark = pytest.mark.static

image = pytest.importorskip("matplotlib.image", reason="draws with matplotlib")

BLUE, GREEN, ORANGE = "#2f6db5", "#2c8a57", "#d97a1a"


def records_of(finite: str, **policy: float) -> list[StepRecord]:
    """A run of a dynamic loss scale: T for a finite step, F for one that is skipped."""
    scale = gs.DynamicLossScale(**{"initial_loss_scale": 1024.0, "increment_period": 20, **policy})
    found = []
    for step, letter in enumerate(finite, start=1):
        used = float(scale())
        scale.update([np.float32(0 if letter == "T" else np.inf)])
        loss = 1 / step if letter == "T" else float("nan")
        found.append(StepRecord(step, 1, loss, used, float(scale()), letter == "T", scale.num_good_steps, 0.1))
    return found


RUN = records_of("T" * 50 + "F" + "T" * 49)


def drawn_texts(folder: Path, records: list[StepRecord], **options: Any) -> list[str]:
    draw(records, folder / "run.svg", **options)
    root = ElementTree.parse(folder / "run.svg").getroot()
    return [element.text or "" for element in root.iter("{http://www.w3.org/2000/svg}text")]


def near(pixels: np.ndarray, colour: str) -> np.ndarray:
    wanted = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    return (np.abs(pixels[..., :3] - wanted) < 0.02).all(axis=-1)


@pytest.mark.full
def test_a_picture(tmp_path: Path) -> None:
    draw(RUN, tmp_path / "run.png", title="Digits")
    pixels = image.imread(tmp_path / "run.png")
    height, width = pixels.shape[:2]
    for colour, (top, bottom) in {BLUE: (0, 0.5), ORANGE: (0.45, 1)}.items():
        rows, columns = np.nonzero(near(pixels, colour))
        assert rows.min() >= top * height
        assert rows.max() <= bottom * height
        assert np.ptp(columns) > 0.8 * width, "through the whole panel"
    r, g, b = np.moveaxis(pixels[..., :3], -1, 0)
    red = ((r - g > 0.3) & (np.abs(g - b) < 0.1)).sum(axis=0)
    assert 0.45 < red.argmax() / width < 0.65, "the skipped step, a line in the middle of both panels"
    assert red.max() > 0.35 * height
    assert not near(pixels, GREEN).any(), "a learning rate that does not vary has no panel"


def rising(step: int) -> float:
    return float(np.exp(step / 40))


@pytest.mark.parametrize("loss", [rising, lambda step: 1 / rising(step), lambda step: 1.0, lambda step: float("nan")])
@pytest.mark.parametrize("finite", ["T" * 200, "F" * 30 + "T" * 170, "TTTF" * 50], ids=["good", "start", "often"])
def test_legends_are_where_no_curve_is(loss: Any, finite: str) -> None:
    records = [dataclasses.replace(record, loss=loss(record.step)) for record in records_of(finite)]
    figure = _figure(records, [], {})
    figure.canvas.draw()
    legends = [(axes.get_legend(), axes) for axes in figure.axes if axes.get_legend()]
    assert legends
    for legend, axes in legends:
        box = legend.get_window_extent()
        assert box.y0 >= axes.bbox.y1, "above its panel"
        assert figure.bbox.x0 <= box.x0 and box.x1 <= figure.bbox.x1 and box.y1 <= figure.bbox.y1
    assert len({axes.get_window_extent().x0 for axes in figure.axes}) == 1


@pytest.mark.full
def test_losses_that_are_not_finite_are_counted(tmp_path: Path) -> None:
    assert "not finite (1)" in drawn_texts(tmp_path, RUN)
    assert not any("not finite" in text for text in drawn_texts(tmp_path, records_of("T" * 30)))


def test_a_short_run_has_dots_and_whole_steps() -> None:
    figure = _figure(records_of("TTT"), [], {})
    figure.canvas.draw()
    assert figure.axes[0].lines[0].get_marker() == "o"
    ticks = [label.get_text() for label in figure.axes[-1].get_xticklabels()]
    assert ticks and all(text.lstrip("\N{MINUS SIGN}").isdigit() for text in ticks)
    assert figure.axes[0].get_legend() is None, "one curve needs no name"


@pytest.mark.full
def test_what_it_says(tmp_path: Path) -> None:
    found = drawn_texts(tmp_path, RUN, title="Digits", notes={51: "an Inf"})
    for text in ("Digits", "training loss", "loss scale", "training step", "doubled (4)", "halved (1)", "skipped (1)"):
        assert text in found
    assert "an Inf" in found
    assert "learning rate" not in found


@pytest.mark.full
def test_other_factors_are_not_called_doubled(tmp_path: Path) -> None:
    found = drawn_texts(tmp_path, records_of("T" * 50 + "F", multiplier=3))
    assert "grown (2)" in found
    assert "lowered (1)" in found


@pytest.mark.full
def test_what_was_recorded_has_its_panel(tmp_path: Path) -> None:
    varying = [
        dataclasses.replace(record, learning_rate=0.1 / record.step, zero_fraction=0.25, outputs={"accuracy": 0.5})
        for record in RUN
    ]
    curve = Curve("accuracy (%)", lambda record: 100 * record.outputs["accuracy"], (0, 100), "{:.1f} %")
    found = drawn_texts(tmp_path, varying, curves=[curve])
    for text in ("learning rate", "zero gradients (%)", "accuracy (%)", "50.0 %"):
        assert text in found


@pytest.mark.full
@pytest.mark.parametrize("suffix", ["png", "svg", "pdf"])
@pytest.mark.parametrize(
    "finite", ["T", "F", "FFFF", "TF" * 400, "T" * 3], ids=["one", "skipped", "all-skipped", "many-skips", "three"]
)
@pytest.mark.filterwarnings("error")
def test_every_run_can_be_drawn(finite: str, suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"run.{suffix}"
    draw(records_of(finite), path)
    start = {"png": b"\x89PNG", "svg": b"<?xml", "pdf": b"%PDF"}[suffix]
    assert path.read_bytes().startswith(start)
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name], "nothing else is left behind"


@pytest.mark.filterwarnings("error")
def test_losses_below_zero_and_a_fixed_scale(tmp_path: Path) -> None:
    records = [StepRecord(step, 1, 1 - step / 10, 8.0, 8.0, True) for step in range(1, 200)]
    assert not {"doubled (0)", "skipped (0)"} & set(drawn_texts(tmp_path, records))


@pytest.mark.full
def test_a_long_run(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    losses = np.exp(rng.standard_normal(200_000))
    records = [StepRecord(step, 1, float(loss), 8.0, 8.0, True) for step, loss in enumerate(losses, start=1)]
    draw(records, tmp_path / "run.png")
    assert near(image.imread(tmp_path / "run.png"), ORANGE).any()


def test_what_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TrainingError, match="there are no steps to draw"):
        draw([], tmp_path / "run.png")
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    with pytest.raises(TrainingError, match=r"drawing needs matplotlib.*pip install 'matplotlib>="):
        draw(RUN, tmp_path / "run.png")
    assert list(tmp_path.iterdir()) == []
