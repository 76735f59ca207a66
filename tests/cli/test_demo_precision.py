"""`graphscale demo --precision` as a user runs it: the command, its table and its picture."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.cli.test_demo import demo_marks, finish, run_demo
from tests.training.test_plot import near

# The emulated formats are those of tests/passes/casting, on every build.
pytestmark = [*demo_marks, pytest.mark.static]

NAMES = ("float32", "float16, not scaled", "float16, fixed scale 1024", "float16, dynamic scale")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    return finish(tmp_path_factory.mktemp("precision"), "--precision")


def row(output: str, task: str, way: str) -> dict[str, float]:
    """The numbers of a row of the table: loss, share of right answers and of zero gradients in percent, skips."""
    lines = output[output.index("What happened") :].splitlines()
    begin = next(i for i, line in enumerate(lines) if line.startswith(task))
    line = next(line for line in lines[begin:] if line.startswith(f"  {way} "))
    _, loss, right, zeros, _, skipped = (cell.strip().removesuffix(" %") for cell in line.split("│"))
    return {"loss": float(loss), "right": float(right), "zeros": float(zeros), "skipped": float(skipped or 0)}


def test_digits_are_learned_in_every_way(finished: tuple[Path, str]) -> None:
    rows = [row(finished[1], "digits", name) for name in NAMES]
    for found in rows:
        assert found["right"] > 95
        assert found["loss"] == pytest.approx(rows[0]["loss"], rel=0.1)
    exact, unscaled, _, dynamic = (found["zeros"] for found in rows)
    assert unscaled > exact + 2, "float16 loses gradients that are not zero in float32"
    assert dynamic <= exact + 1, "with a scale it does not"
    assert rows[3]["skipped"] >= 1, "the scale grows until a step overflows"


def test_the_transformer_needs_a_loss_scale(finished: tuple[Path, str]) -> None:
    exact, unscaled, fixed, dynamic = (row(finished[1], "reversal", name) for name in NAMES)
    assert exact["right"] == dynamic["right"] == 100
    assert unscaled["right"] < 10
    assert unscaled["zeros"] > 90
    assert exact["zeros"] == dynamic["zeros"] == 0
    assert dynamic["loss"] == pytest.approx(exact["loss"], rel=0.01)
    assert fixed["loss"] > 1.5 * exact["loss"], "a fixed scale that was guessed too low loses some"


def test_the_picture_shows_all_of_it(finished: tuple[Path, str]) -> None:
    folder, _ = finished
    assert [path.name for path in folder.iterdir()] == ["precision.png"]
    path = folder / "precision.png"
    assert 20_000 < path.stat().st_size < 150_000
    from matplotlib import image

    pixels = image.imread(path)[..., :3]
    height, width, _ = pixels.shape
    red, orange, blue = "#c2352b", "#d97a1a", "#2f6db5"
    losses, scales = (0.07, 0.44), (0.7, 0.95)  # rows of the panels, as shares of the height
    # In the loss of the digits the last line hides the others.
    left = {(losses, blue): 0.4, (scales, red): 0.4, (scales, orange): 0.4, (scales, blue): 0.4}
    right = {**left, (losses, red): 0.35, (losses, orange): 0.25}
    for half, lines in ((pixels[:, : width // 2], left), (pixels[:, width // 2 :], right)):
        for ((first, last), colour), share in lines.items():
            _, columns = np.nonzero(near(half[int(first * height) : int(last * height)], colour))
            assert np.ptp(columns) > share * width, f"{colour} goes through the rows {first} to {last}"
    # The transformer's loss without a scale ends above its start, that of the dynamic scale at the panel's bottom.
    panel = pixels[: int(0.42 * height), int(0.95 * width) :]
    above, below = (np.nonzero(near(panel, colour))[0].mean() for colour in (red, blue))
    assert above < 0.4 * len(panel) < 0.7 * len(panel) < below


def test_other_options(tmp_path: Path) -> None:
    """A seed, an output, and a narrow terminal, where rows are whole."""
    result = run_demo(tmp_path, "--precision", "--steps", "100", "--seed", "3", "-o", "all.svg", COLUMNS="80")
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "all.svg").read_text().count("</svg>") == 1
    assert row(result.stdout, "reversal", NAMES[1])["zeros"] > 90
    assert all(len(line) <= 80 for line in result.stdout.splitlines())
    for task in ("digits", "reversal"):
        for name in NAMES:
            assert 0 <= row(result.stdout, task, name)["right"] <= 100
