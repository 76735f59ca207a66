"""Learning rates: the numbers of each schedule, against formulas in this file and against PyTorch's numbers."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphscale.errors import TrainingError
from graphscale.training.schedules import SCHEDULES, LearningRate

pytestmark = pytest.mark.static

NEEDED: dict[str, dict[str, Any]] = {"step": {"decay_steps": 3}, "exponential": {"decay_steps": 3}}


def rates(count: int, *arguments: Any, **options: Any) -> list[float]:
    rate = LearningRate(*arguments, **options)
    return [rate(applied) for applied in range(count)]


def test_known_values() -> None:
    assert rates(3, 0.5) == [0.5, 0.5, 0.5]
    assert rates(6, 1.0, "linear", decay_steps=4) == [1.0, 0.75, 0.5, 0.25, 0.0, 0.0]
    assert rates(4, 1.0, "linear", decay_steps=2, final=0.5) == [1.0, 0.75, 0.5, 0.5]
    half = math.sqrt(0.5)
    assert rates(6, 1.0, "cosine", decay_steps=4) == pytest.approx([1, (1 + half) / 2, 0.5, (1 - half) / 2, 0, 0])
    assert rates(4, 1.0, "cosine", decay_steps=2, final=0.2) == pytest.approx([1, 0.6, 0.2, 0.2])
    assert rates(4, 1.0, "polynomial", decay_steps=2, power=2.0) == [1.0, 0.25, 0.0, 0.0]
    assert rates(4, 1.0, "polynomial", decay_steps=2) == [1.0, 0.5, 0.0, 0.0]
    assert rates(7, 1.0, "step", decay_steps=2, decay_rate=0.5) == [1, 1, 0.5, 0.5, 0.25, 0.25, 0.125]
    assert rates(3, 1.0, "step", decay_steps=1) == pytest.approx([1, 0.1, 0.01])
    assert rates(3, 1.0, "step", decay_steps=1, final=0.05) == pytest.approx([1, 0.1, 0.05])
    assert rates(4, 1.0, "exponential", decay_steps=2, decay_rate=0.25) == [1, 0.5, 0.25, 0.125]
    assert rates(6, 1.0, warmup=4) == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    assert rates(6, 1.0, "linear", warmup=2, decay_steps=2) == [0.5, 1.0, 1.0, 0.5, 0.0, 0.0]


@given(
    schedule=st.sampled_from(sorted(SCHEDULES)),
    base=st.floats(1e-6, 10),
    share=st.floats(0, 1),
    warmup=st.integers(0, 20),
    steps=st.integers(1, 100),
)
def test_every_schedule(schedule: str, base: float, share: float, warmup: int, steps: int) -> None:
    final = {"final": share * base} if "final" in SCHEDULES[schedule] else {}
    rate = LearningRate(base, schedule, warmup, **final, **NEEDED.get(schedule, {})).for_run(steps)
    values = [rate(applied) for applied in range(steps + 20)]
    assert values == [rate(applied) for applied in range(steps + 20)], "a pure function"
    grows, after = values[:warmup], values[warmup:]
    assert grows == sorted(grows)
    assert all(value > 0 for value in grows)
    assert after == sorted(after, reverse=True)
    assert not after or after[0] == pytest.approx(base)
    assert all(share * base * 0.999999 <= value for value in after if final)
    if schedule in ("linear", "cosine", "polynomial") and warmup < steps:
        assert values[steps] == pytest.approx(share * base), "the decay takes what the warmup leaves of the run"


def test_a_given_length_is_kept_for_any_run() -> None:
    given = LearningRate(1.0, "cosine", decay_steps=10)
    assert given.for_run(500) == given
    assert LearningRate(1.0, "cosine", 5).for_run(500).decay_steps == 495
    assert LearningRate(1.0).for_run(500).decay_steps is None


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"base": 0.0}, "--learning-rate 0.0: expected a finite number above 0"),
    ({"base": math.nan}, "--learning-rate nan"),
    ({"base": math.inf}, "--learning-rate inf"),
    ({"schedule": "cosinus"}, "--schedule cosinus does not exist; there are constant, linear, cosine, polynomial"),
    ({"warmup": -1}, "--warmup -1: expected a number of steps, 0 or more"),
    ({"schedule": "linear", "final": 2.0}, "--final-learning-rate 2.0: expected from 0 to 1.0"),
    ({"schedule": "linear", "final": -0.1}, "--final-learning-rate -0.1"),
    ({"schedule": "linear", "final": math.nan}, "--final-learning-rate nan"),
    ({"schedule": "linear", "decay_steps": 0}, "--decay-steps 0: expected 1 or more"),
    ({"schedule": "step"}, "--schedule step needs --decay-steps"),
    ({"schedule": "exponential"}, "--schedule exponential needs --decay-steps"),
    ({"schedule": "step", "decay_steps": 1, "decay_rate": 0.0}, "--decay-rate 0.0: expected above 0 and not above 1"),
    ({"schedule": "step", "decay_steps": 1, "decay_rate": 1.5}, "--decay-rate 1.5"),
    ({"schedule": "polynomial", "power": 0.0}, "--power 0.0: expected a finite number above 0"),
    (
        {"final": 0.1},
        "--final-learning-rate goes with --schedule linear or cosine or polynomial or step or exponential",
    ),
    ({"schedule": "linear", "power": 2.0}, "--power goes with --schedule polynomial, not linear"),
    ({"schedule": "cosine", "decay_rate": 0.5}, "--decay-rate goes with --schedule step or exponential, not cosine"),
    ({"decay_steps": 5}, "--decay-steps goes with"),
]


@pytest.mark.parametrize(("options", "message"), WRONG)
def test_what_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(TrainingError) as error:
        LearningRate(**{"base": 1.0, **options})
    assert str(error.value).startswith(message)
