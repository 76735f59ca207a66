"""The loss-scale policies on their own: TensorFlow's behaviour, on numpy gradients."""

from __future__ import annotations

import json
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import graphscale as gs
from graphscale.errors import InvalidLossScaleError
from tests.conftest import FLOAT32_MAX, Sequence, each_sequence

pytestmark = pytest.mark.static

GOOD, BAD = [np.ones((2, 3), np.float32)], [np.array([1, np.nan], np.float32)]


def assert_float32(value: Any, expected: float) -> None:
    assert isinstance(value, np.float32)
    assert value == np.float32(expected)


@each_sequence
@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf])
def test_dynamic_follows_each_sequence(sequence: Sequence, wrong: float) -> None:
    loss_scale = gs.DynamicLossScale(**sequence.config)
    assert_float32(loss_scale(), sequence.config["initial_loss_scale"])
    for finite, scale, good_steps in sequence:
        update_op, should_apply = loss_scale.update([np.array([0.5, 1.0 if finite else wrong], np.float32)])
        assert update_op is None
        assert should_apply is finite
        assert_float32(loss_scale(), scale)
        assert loss_scale.num_good_steps == good_steps


@pytest.mark.parametrize(
    "gradients",
    [None, [], {}, (), [None], [None, [None, {"w": None}]]],
    ids=repr,
)
def test_no_gradients_are_finite(gradients: Any) -> None:
    loss_scale = gs.DynamicLossScale(increment_period=2)
    assert loss_scale.update(gradients) == (None, True)
    assert loss_scale.num_good_steps == 1


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64, ml_dtypes.bfloat16])
@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf])
def test_each_gradient_is_looked_at_however_deep_it_is(dtype: Any, wrong: float) -> None:
    def nested(last: float) -> Any:
        deep = np.array([[0, 1], [2, last]], dtype=dtype)
        return {"layers": [(np.ones(3, np.float32), None), {"kernel": [None, [deep]]}], "bias": None}

    loss_scale = gs.DynamicLossScale(initial_loss_scale=8)
    assert loss_scale.update(nested(3)) == (None, True)
    assert loss_scale.update(np.full(1000, ml_dtypes.finfo(dtype).max, dtype)) == (None, True)
    assert loss_scale.update(nested(wrong)) == (None, False)
    assert_float32(loss_scale(), 4)


@pytest.mark.parametrize("scalar", [1.5, np.float32(1.5), np.array(1.5)], ids=["float", "float32", "0-d"])
def test_a_gradient_may_be_a_scalar(scalar: Any) -> None:
    assert gs.DynamicLossScale().update(scalar) == (None, True)
    assert gs.DynamicLossScale().update({"b": scalar * np.inf}) == (None, False)


def test_gradients_of_whole_numbers_are_refused() -> None:
    with pytest.raises(TypeError, match="floating-point dtype; got int64"):
        gs.DynamicLossScale().update([np.arange(3)])


@pytest.mark.parametrize("gradients", [GOOD, BAD, [np.array(np.inf)], None, {"w": [None, BAD]}])
def test_fixed_never_changes_and_always_applies(gradients: Any) -> None:
    loss_scale = gs.FixedLossScale(1024)
    assert_float32(loss_scale(), 1024)
    for _ in range(3):
        assert loss_scale.update(gradients) == (None, True)
        assert_float32(loss_scale(), 1024)


# --- validation -------------------------------------------------------------------------------------------------------

NOT_A_SCALE = [0, 0.5, -1, 1 - 1e-9, float("nan"), float("inf"), -np.inf, 1e39, 10**400, "8", None, True, [8], 2 + 0j]


OUT_OF_RANGE: list[tuple[Any, str, str, list[Any]]] = [
    (gs.FixedLossScale, "loss_scale_value", "a (finite float32 )?number of at least 1", NOT_A_SCALE),
    (gs.DynamicLossScale, "initial_loss_scale", "a (finite float32 )?number of at least 1", NOT_A_SCALE),
    (gs.DynamicLossScale, "increment_period", r"from 1 to 2\*\*24 steps", [0, -3, 2**24 + 1, 10**30]),
    (gs.DynamicLossScale, "increment_period", "a whole number of steps", [2000.0, 1.5, "2000", None, True, np.nan]),
    (
        gs.DynamicLossScale,
        "multiplier",
        "a .*number above 1.*",
        [1, 1.0, 0.5, 0, -2, np.nan, np.inf, 1e39, 1 + 1e-12, "2", None, True],
    ),
]


@pytest.mark.parametrize(
    ("loss_scale", "argument", "kind", "value"), [(*row[:3], value) for row in OUT_OF_RANGE for value in row[3]]
)
def test_arguments_out_of_range_are_refused(loss_scale: Any, argument: str, kind: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"{argument} must be {kind}; got "):
        loss_scale(**{argument: value})


def test_the_limits_themselves_are_accepted() -> None:
    assert gs.FixedLossScale(1)() == 1
    assert gs.FixedLossScale(FLOAT32_MAX)() == np.float32(FLOAT32_MAX)
    limits = gs.DynamicLossScale(initial_loss_scale=1, increment_period=2**24, multiplier=1 + 2**-23)
    assert (limits(), limits.increment_period) == (1, 2**24)


def test_one_more_step_than_float32_counts_is_refused() -> None:
    """`good_steps` is float32 in graphs that are written in place: the scale would never grow."""
    with pytest.raises(InvalidLossScaleError, match=r"growth_delay='always' needs an increment_period below 2\*\*24"):
        gs.DynamicLossScale(increment_period=2**24, growth_delay="always")
    assert gs.DynamicLossScale(increment_period=2**24 - 1, growth_delay="always").increment_period == 2**24 - 1


def test_an_error_is_a_value_error_and_a_graphscale_error() -> None:
    assert issubclass(InvalidLossScaleError, ValueError)
    assert issubclass(InvalidLossScaleError, gs.GraphscaleError)
    with pytest.raises(InvalidLossScaleError):
        gs.FixedLossScale(0.5)


@pytest.mark.parametrize("number", [np.float16(128), np.float32(128), np.float64(128), np.int32(128), np.uint8(128)])
def test_numbers_of_numpy_are_numbers(number: Any) -> None:
    assert repr(gs.FixedLossScale(number)) == "FixedLossScale(128.0)"
    dynamic = gs.DynamicLossScale(number, np.int64(3), np.float32(2))
    config = json.loads(dynamic.to_json())["config"]
    assert config == {"initial_loss_scale": 128.0, "increment_period": 3, "multiplier": 2.0}


def test_the_base_class_is_abstract() -> None:
    with pytest.raises(TypeError, match="abstract"):
        gs.LossScale()  # type: ignore[abstract]


# --- config and repr --------------------------------------------------------------------------------------------------


def test_repr() -> None:
    assert repr(gs.FixedLossScale(123)) == "FixedLossScale(123.0)"
    loss_scale = gs.DynamicLossScale(initial_loss_scale=4, increment_period=2, multiplier=2)
    assert repr(loss_scale) == (
        "DynamicLossScale(current_loss_scale=4.0, num_good_steps=0, initial_loss_scale=4.0, "
        "increment_period=2, multiplier=2.0)"
    )
    for _ in range(3):
        loss_scale.update(GOOD)
    assert repr(loss_scale) == (
        "DynamicLossScale(current_loss_scale=8.0, num_good_steps=1, initial_loss_scale=4.0, "
        "increment_period=2, multiplier=2.0)"
    )


@pytest.mark.parametrize("form", [repr, str])
def test_the_current_scale_is_printed_as_a_float32_number_and_the_arguments_as_given(form: Any) -> None:
    loss_scale = gs.DynamicLossScale(initial_loss_scale=5.1874860123, increment_period=1, multiplier=1.5)
    loss_scale.update(GOOD)
    assert form(loss_scale) == (
        "DynamicLossScale(current_loss_scale=7.781229, num_good_steps=0, initial_loss_scale=5.1874860123, "
        "increment_period=1, multiplier=1.5)"
    )
    assert form(gs.FixedLossScale(7.7812290191)) == "FixedLossScale(7.7812290191)"


def test_dynamic_config_round_trip_leaves_the_state_behind() -> None:
    loss_scale = gs.DynamicLossScale(initial_loss_scale=4, increment_period=1, multiplier=3)
    loss_scale.update(GOOD)
    assert loss_scale() == 12
    config = loss_scale.get_config()
    assert config == {"initial_loss_scale": 4.0, "increment_period": 1, "multiplier": 3.0}
    again = gs.DynamicLossScale.from_config(config)
    assert (again(), again.num_good_steps, again.get_config()) == (4, 0, config)


@pytest.mark.parametrize("loss_scale", [gs.FixedLossScale(8), gs.DynamicLossScale(8, 3, 4)], ids=repr)
def test_json_round_trip(loss_scale: gs.LossScale) -> None:
    again = gs.get(json.loads(loss_scale.to_json()))
    assert repr(again) == repr(loss_scale)
    assert gs.FixedLossScale(123).get_config() == {"loss_scale_value": 123.0}


@pytest.mark.parametrize(
    ("loss_scale", "config", "said"),
    [
        (gs.FixedLossScale, {}, "loss_scale_value"),
        (gs.FixedLossScale, {"loss_scale_value": 8, "period": 3}, "period"),
        (gs.DynamicLossScale, {"increment_periods": 3}, "increment_periods"),
        (gs.DynamicLossScale, {"increment_period": 0}, "from 1 to"),
    ],
)
def test_a_bad_config_is_a_value_error_that_names_the_key(loss_scale: Any, config: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        loss_scale.from_config(config)


# --- get --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [2, 2.0, np.float32(2), np.int64(2)])
def test_get_of_a_number_is_fixed(number: Any) -> None:
    assert repr(gs.get(number)) == "FixedLossScale(2.0)"


def test_get_of_the_rest() -> None:
    assert gs.get(None) is None
    assert repr(gs.get("dynamic")) == repr(gs.DynamicLossScale())
    for instance in (gs.FixedLossScale(2), gs.DynamicLossScale()):
        assert gs.get(instance) is instance
    assert repr(gs.get({"class_name": "DynamicLossScale", "config": {"multiplier": 3}})) == repr(
        gs.DynamicLossScale(multiplier=3)
    )
    assert repr(gs.get({"class_name": "DynamicLossScale"})) == repr(gs.DynamicLossScale())


class Tripled(gs.FixedLossScale):
    def __call__(self) -> np.float32:
        return np.float32(3) * super().__call__()


def test_get_of_an_instance_of_a_subclass() -> None:
    tripled = Tripled(2)
    assert gs.get(tripled) is tripled
    assert tripled() == 6


@pytest.mark.parametrize(
    "identifier",
    [
        "fixed",
        "Dynamic",
        "",
        "8",
        True,
        0.99,
        float("nan"),
        [8],
        gs.DynamicLossScale,
        {},
        {"class_name": "LossScale", "config": {}},
        {"class_name": "FixedLossScale", "config": 8},
        {"class_name": "FixedLossScale", "config": {"loss_scale_value": 8}, "more": 1},
        {"loss_scale_value": 8},
        {"class_name": ["FixedLossScale"], "config": {}},
    ],
    ids=repr,
)
def test_get_refuses_everything_else(identifier: Any) -> None:
    with pytest.raises(ValueError, match=r"loss.scale"):
        gs.get(identifier)
