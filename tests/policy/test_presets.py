"""Each preset against an independent reimplementation of its peer, and each option: eager, and in the graph."""

from __future__ import annotations

import copy
import inspect
import itertools
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import graphscale as gs
from graphscale.errors import InvalidLossScaleError
from graphscale.policy import presets
from tests.policy.cases import DEFAULTS, DRAWS, Case, draw_case, random_steps
from tests.policy.forms import BAD, GraphForm, Trajectory, eager_trajectory, peer_trajectory
from tests.policy.peers import FLOAT32_MAX, FLOAT32_TINY, Peer

pytestmark = pytest.mark.static

NAMES = presets.NAMES
SEQUENCES, CONFIGURATIONS = 10_000, 8
GRAPHS = [
    pytest.param({"target": "onnx"}, id="onnx"),
    pytest.param({"target": "onnx", "ir_version": 7}, id="onnx-without-functions"),
    pytest.param({"target": "ort-training"}, id="ort-training", marks=pytest.mark.training),
]
each_graph = pytest.mark.parametrize("graph", GRAPHS)


def cases(name: str) -> list[Case]:
    random = np.random.default_rng(sum(name.encode()))
    return [draw_case(name, random, index) for index in range(CONFIGURATIONS)]


class Drawn:
    """Ten thousand sequences of steps for one peer, with what the peer makes of them."""

    def __init__(self, name: str) -> None:
        self.name = name
        random = np.random.default_rng(len(name))
        self.sequences: list[tuple[Case, list[list[bool]], list[Trajectory]]] = []
        for case in cases(name):
            steps = list(random_steps(random, SEQUENCES // CONFIGURATIONS))
            expected = [peer_trajectory(case.peer(), sequence) for sequence in steps]
            # A peer that gives up ends its sequence there.
            shortened = [sequence[: len(run.scales)] for sequence, run in zip(steps, expected, strict=True)]
            self.sequences.append((case, shortened, expected))


@pytest.fixture(scope="module", params=DRAWS)
def drawn(request: pytest.FixtureRequest) -> Drawn:
    return Drawn(request.param)


def check(actual: Trajectory, expected: Trajectory, case: Case, steps: list[bool]) -> None:
    if actual != expected:
        raise AssertionError(f"{case.preset} {case.options} on {steps}:\n{actual}\ninstead of\n{expected}")


# --- ten thousand sequences -------------------------------------------------------------------------------------------


@pytest.mark.full
def test_random_sequences_eager(drawn: Drawn) -> None:
    for case, sequences, trajectories in drawn.sequences:
        unused = case.policy()
        for steps, expected in zip(sequences, trajectories, strict=True):
            check(eager_trajectory(copy.copy(unused), steps), expected, case, steps)


@pytest.mark.full
@each_graph
def test_random_sequences_in_the_graph(drawn: Drawn, graph: dict[str, Any]) -> None:
    for case, sequences, trajectories in drawn.sequences:
        form = GraphForm(case.policy(), **graph)
        for steps, expected in zip(sequences, trajectories, strict=True):
            check(form.trajectory(steps), expected, case, steps)


# Events that the sequences of each peer must meet, besides growths and decreases.
MET = {
    "tensorflow": {"floor", "limit"},
    "torch": {"zero", "limit"},
    "apex": {"floor", "limit"},
    "deepspeed": {"floor", "held", "stuck"},
    "megatron": {"floor", "held"},
    "paddle": {"floor", "held", "limit"},
    "mindspore": {"floor"},
    "mindspore.amp.DynamicLossScaler": {"floor", "limit"},
    "flax": {"floor", "limit"},
    "keras": set(),
}


@pytest.mark.full
def test_the_sequences_meet_everything(drawn: Drawn) -> None:
    """Growths, decreases, floors, limits and hysteresis: without them the tests above would prove nothing."""
    assert sum(len(sequences) for _, sequences, _ in drawn.sequences) == SEQUENCES
    seen = dict.fromkeys(("grown", "lowered", "held", "floor", "limit", "zero", "stuck"), 0)
    for case, sequences, trajectories in drawn.sequences:
        policy = case.policy().rule
        floor = float(np.float32(policy.min_loss_scale))
        limit = min(policy.max_loss_scale or math.inf, float(FLOAT32_MAX))
        for steps, run in zip(sequences, trajectories, strict=True):
            assert all(math.isfinite(scale) for scale in run.scales)
            for finite, before, after in zip(steps[1:], run.scales, run.scales[1:], strict=False):
                seen["grown"] += after > before
                seen["lowered"] += after < before
                seen["held"] += not finite and floor < after == before
                seen["floor"] += not finite and 0 < floor == after < before
                seen["limit"] += after >= limit / policy.growth
                seen["zero"] += after == 0
            seen["stuck"] += run.stuck[-1]
    assert all(seen[event] >= 50 for event in {"grown", "lowered", *MET[drawn.name]}), (drawn.name, seen)


# --- the defaults -----------------------------------------------------------------------------------------------------


def long_run() -> list[bool]:
    """Finite steps in rows as long as a growth takes, one less, one more and twice, with overflows between them."""
    rows = (3, 1, 999, 1000, 5, 1001, 1, 1999, 2000, 2, 2001, 2, 4002, 1)
    return [finite for index, row in enumerate(rows) for finite in [*[True] * row, *[False] * (1 + index % 2)]]


@pytest.mark.full
@pytest.mark.parametrize("name", DEFAULTS)
def test_the_defaults(name: str) -> None:
    case, steps = DEFAULTS[name], long_run()
    expected = peer_trajectory(case.peer(), steps)
    assert len(expected.scales) == len(steps)
    assert any(after > before for before, after in zip(expected.scales, expected.scales[1:], strict=False))
    check(eager_trajectory(case.policy(), steps), expected, case, steps)
    check(GraphForm(case.policy()).trajectory(steps), expected, case, steps)


# --- what is peculiar to each, by hand --------------------------------------------------------------------------------

SMALLEST = float(np.finfo(np.float32).smallest_subnormal)
TINY, MAX = float(FLOAT32_TINY), float(FLOAT32_MAX)
BY_HAND = [
    pytest.param("torch", [1, 3], {}, "FFTTT", [0.5, 0.25, 0.25, 0.25, 0.5], id="torch-has-no-floor"),
    pytest.param("torch", [SMALLEST, 1], {}, "FTF", [0, 0, 0], id="torch-stays-at-zero"),
    pytest.param("torch", [MAX / 2, 1], {}, "TTT", [MAX, MAX, MAX], id="torch-leaves-out-what-overflows"),
    pytest.param("torch", [9, 1], {"backoff_factor": 0.7}, "F", [6.300000190734863], id="torch-falls-in-float64"),
    pytest.param("flax", [9, 1], {"backoff_factor": 0.7}, "F", [6.299999713897705], id="flax-falls-in-float32"),
    pytest.param("torch", [3, 1], {"growth_factor": 1.1}, "T", [3.299999952316284], id="torch-grows-in-float64"),
    pytest.param("megatron", [3, 1], {"growth_factor": 1.1}, "T", [3.300000190734863], id="megatron-in-float32"),
    pytest.param("apex", [2**23, 1], {}, "TTF", [2**24, 2**24, 2**23], id="apex-ends-at-its-maximum"),
    pytest.param("apex", [1.5 * 2**23, 1], {}, "TF", [2**24, 2**23], id="apex-grows-by-less-to-its-maximum"),
    pytest.param("apex", [1, 9], {}, "FFF", [0.5, 0.25, 0.125], id="apex-has-no-floor"),
    pytest.param("deepspeed", [4, 3], {}, "TTTTTTT", [4, 4, 4, 8, 8, 8, 16], id="deepspeed-first-growth-later"),
    pytest.param("deepspeed", [4, 1], {}, "TTFTTT", [4, 8, 8, 8, 16, 32], id="deepspeed-later-after-each-overflow"),
    pytest.param("deepspeed", [64, 9], {}, "FFTFTF", [64, 32, 32, 16, 16, 8], id="deepspeed-hysteresis-stays-used-up"),
    pytest.param("deepspeed", [64, 1], {}, "FTTFF", [64, 64, 128, 128, 64], id="deepspeed-growth-refills-hysteresis"),
    pytest.param(
        "deepspeed", [64, 9], {"hysteresis_refill": "good"}, "FTFTFFF", [64] * 5 + [32, 16], id="deepspeed-good"
    ),
    pytest.param("megatron", [64, 3], {}, "TTTTTT", [64, 64, 128, 128, 128, 256], id="megatron-grows-on-time"),
    pytest.param("megatron", [64, 9], {}, "FTFTF", [64, 64, 32, 32, 16], id="megatron-not-only-consecutive"),
    pytest.param("megatron", [64, 2], {}, "FTTFF", [64, 64, 128, 128, 64], id="megatron-growth-refills"),
    pytest.param("megatron", [2, 9], {}, "FFFF", [2, 1, 1, 1], id="megatron-does-not-give-up"),
    pytest.param("megatron", [MAX, 1], {}, "TT", [MAX, MAX], id="megatron-without-its-infinity"),
    pytest.param("paddle", [8, 9], {"hysteresis": 2}, "FFFTFF", [8, 4, 4, 4, 4, 2], id="paddle-n-more-for-the-next"),
    pytest.param("paddle", [3, 9], {}, "FFF", [1.5, 1, 1], id="paddle-has-a-floor"),
    pytest.param("paddle", [MAX, 1], {}, "TT", [MAX, MAX], id="paddle-leaves-out-what-overflows"),
    pytest.param("mindspore", [5, 9], {"multiplier": 3}, "F", [1.6666667461395264], id="mindspore-by-the-reciprocal"),
    pytest.param("mindspore", [5, 9], {"multiplier": 3, "backoff_factor": None}, "F", [5 / 3], id="mindspore-divides"),
    pytest.param("flax", [4, 2], {}, "TTTTTT", [4, 4, 8, 8, 8, 16], id="flax-takes-one-more-each-time"),
    pytest.param("flax", [4, 2], {}, "TTFTTT", [4, 4, 2, 2, 2, 4], id="flax-overflow-at-the-growth"),
    pytest.param("flax", [MAX / 1.5, 1], {}, "TTTF", [MAX / 1.5, MAX, MAX, MAX / 2], id="flax-ends-at-the-maximum"),
    pytest.param("flax", [1.5 * TINY, 9], {}, "FF", [TINY, TINY], id="flax-ends-at-the-smallest-normal"),
    pytest.param("keras", [1, 2], {}, "FFTT", [0.5, 0.25, 0.25, 0.5], id="keras-has-no-floor"),
    pytest.param("keras", [MAX, 1], {}, "TF", [MAX, MAX / 2], id="keras-without-its-infinity"),
]


@pytest.mark.parametrize(("preset", "start", "options", "steps", "scales"), BY_HAND)
def test_by_hand(preset: str, start: list[float], options: dict[str, Any], steps: str, scales: list[float]) -> None:
    initial, period = start
    case = Case(Peer, preset, {"initial_loss_scale": initial, "increment_period": period, **options})
    finite = [step == "T" for step in steps]
    rounded = [float(np.float32(scale)) for scale in scales]
    expected = Trajectory(rounded, finite, [False] * len(steps))
    check(eager_trajectory(case.policy(), finite), expected, case, finite)
    check(GraphForm(case.policy()).trajectory(finite), expected, case, finite)


@each_graph
def test_deepspeed_says_where_it_would_give_up(graph: dict[str, Any]) -> None:
    policy = presets.deepspeed(initial_loss_scale=2, increment_period=9)
    finite = [step == "T" for step in "FFTFF"]
    expected = Trajectory([2, 1, 1, 1, 1], finite, [False, False, False, True, True])
    assert GraphForm(policy, **graph).trajectory(finite) == expected
    assert eager_trajectory(policy, finite) == expected


# --- as functions -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
class TestEachPreset:
    def test_it_is_a_policy_like_others(self, name: str) -> None:
        policy = getattr(presets, name)()
        assert isinstance(policy, gs.DynamicLossScale)
        again = gs.DynamicLossScale.from_config(policy.get_config())
        assert again.get_config() == policy.get_config()
        assert repr(again) == repr(policy)

    def test_every_option_can_be_overridden(self, name: str) -> None:
        options = {**OPTIONS[35], "multiplier": 3.0}
        assert getattr(presets, name)(**options).get_config() == gs.DynamicLossScale(**options).get_config()
        assert set(options) == set(inspect.signature(gs.DynamicLossScale).parameters)

    def test_what_is_wrong_is_refused(self, name: str) -> None:
        preset = getattr(presets, name)
        for options in ({"increment_period": 0}, {"multiplier": 0}, {"initial_loss_scale": math.nan}):
            with pytest.raises(ValueError, match=next(iter(options))):
                preset(**options)
        with pytest.raises(TypeError, match="growth_interval"):
            preset(growth_interval=3)

    def test_it_says_where_it_comes_from(self, name: str) -> None:
        documentation = inspect.getdoc(getattr(presets, name)) or ""
        assert "Source: " in documentation and "Raises:" in documentation


def test_a_preset_is_not_changed_by_its_use() -> None:
    before = presets.torch().get_config()
    presets.torch(increment_period=3, growth_factor=1.5).update([BAD[0]])
    assert presets.torch().get_config() == before
    options: presets.PolicyOptions = {"multiplier": 3.0}
    presets.mindspore(**options)
    assert options == {"multiplier": 3.0}


# --- every option: the graph does what the eager form does, bit for bit -----------------------------------------------


def combinations() -> Iterator[dict[str, Any]]:
    kinds = itertools.product(
        ("none", "always", "first"), ("growth", "good", "decrease"), ("hold", "flag", "stop", "reset", "accept")
    )
    rng = np.random.default_rng(0)
    for i, (delay, refill, on_stuck) in enumerate(kinds):
        floor = float(rng.choice([0.0, 1.0, 3.5]))
        yield {
            "initial_loss_scale": float(rng.choice([4.0, 64.0, 1000.0])),
            "increment_period": int(rng.integers(1, 5)),
            "multiplier": float(rng.choice([2.0, 3.0, 1.1])),
            "growth_factor": [None, 4.0, 1.3][i % 3],
            "backoff_factor": [None, 0.5, 0.7][i // 3 % 3],
            "min_loss_scale": floor,
            "max_loss_scale": [None, 4096.0, MAX][i // 2 % 3],
            "growth_delay": delay,
            "hysteresis": int(rng.integers(1, 4)),
            "hysteresis_refill": refill,
            "max_consecutive_skips": [None, 3, 5][i // 4 % 3],
            "on_stuck": on_stuck,
            "arithmetic": ["float32", "float64"][i % 2],
        }


OPTIONS = list(combinations())


@pytest.mark.sample(3)
@pytest.mark.parametrize("options", OPTIONS, ids=range(len(OPTIONS)))
@pytest.mark.parametrize(
    ("target", "ir_version"), [("onnx", 10), ("onnx", 7), pytest.param("ort-training", 10, marks=pytest.mark.training)]
)
def test_the_graph_agrees_with_the_eager_form(options: dict[str, Any], target: str, ir_version: int) -> None:
    rng = np.random.default_rng(1)
    eager = gs.DynamicLossScale(**options)
    form = GraphForm(gs.DynamicLossScale(**options), target, ir_version)
    state = form.start
    kinds_of_steps = set()
    for probability in (0.2, 0.9, 0.5, 0.05, 0.8, 1.0, 0.0):
        for finite in rng.random(60) > probability:
            gradient = np.asarray(1.0 if finite else np.nan, dtype=np.float32)
            _, applied = eager.update(gradient)
            state, applies, stuck = form.step(state, bool(finite))
            assert (*state[:2], applies) == (eager(), eager.num_good_steps, applied)
            assert stuck == (eager.stuck and options["on_stuck"] != "hold")
            kinds_of_steps.add((bool(finite), applied, eager.stuck))
    assert {(True, True, False), (False, False, False)} <= kinds_of_steps or options["on_stuck"] == "accept"


def test_the_options_at_their_defaults_are_not_in_the_config() -> None:
    assert list(gs.DynamicLossScale().get_config()) == ["initial_loss_scale", "increment_period", "multiplier"]
    policy = gs.DynamicLossScale(hysteresis=2, on_stuck="flag")
    assert policy.get_config()["hysteresis"] == 2
    assert policy.get_config()["on_stuck"] == "flag"
    assert len(policy.get_config()) == 5
    again = gs.get({"class_name": "DynamicLossScale", "config": policy.get_config()})
    assert again is not None and again.get_config() == policy.get_config()
    assert repr(policy).endswith("multiplier=2.0, hysteresis=2, on_stuck='flag')")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"growth_factor": 1.0}, "growth_factor must be a finite float32 number above 1, such as 2; got 1.0"),
        ({"backoff_factor": 1.0}, "backoff_factor must be a number above 0 and below 1, such as 0.5; got 1.0"),
        ({"backoff_factor": 0.0}, "backoff_factor must be a number above 0 and below 1, such as 0.5; got 0.0"),
        ({"min_loss_scale": -1.0}, "min_loss_scale must be a finite float32 number of at least 0; got -1.0"),
        (
            {"min_loss_scale": 2.0**16},
            "initial_loss_scale must be a finite float32 number of at least 65536; got 32768",
        ),
        ({"max_loss_scale": 100.0}, "max_loss_scale must be a finite float32 number of at least 32768; got 100.0"),
        ({"hysteresis": 0}, "hysteresis must be from 1 to 2**24 steps; got 0"),
        ({"hysteresis": 1.5}, "hysteresis must be a whole number of steps; got 1.5"),
        ({"max_consecutive_skips": 0}, "max_consecutive_skips must be from 1 to 2**24 steps; got 0"),
        ({"growth_delay": "late"}, "growth_delay must be one of 'none', 'always', 'first'; got 'late'"),
        ({"hysteresis_refill": 1}, "hysteresis_refill must be one of 'growth', 'good', 'decrease'; got 1"),
        ({"on_stuck": None}, "on_stuck must be one of 'hold', 'flag', 'stop', 'reset', 'accept'; got None"),
        ({"arithmetic": "float16"}, "arithmetic must be one of 'float32', 'float64'; got 'float16'"),
        (
            {"min_loss_scale": 0, "initial_loss_scale": 0},
            "initial_loss_scale must be a finite float32 number above 0, such as 1; got 0",
        ),
    ],
)
def test_what_is_out_of_range_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidLossScaleError) as caught:
        gs.DynamicLossScale(**options)
    assert str(caught.value) == message
