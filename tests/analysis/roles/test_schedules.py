"""Numbers computed from counters and stored numbers: rates of a schedule, counts, metrics plus a constant."""

from __future__ import annotations

import pytest

from tests.analysis.roles.steps import MOMENTUM, SGD, roles_of, states, update_step
from tests.build import numbers
from tests.expressions import nodes

pytestmark = pytest.mark.static

RATE = "lr = start * Pow(decay, Cast(n_next, to=1))"
COUNTED = f"n_next = n + unit; {RATE}"
NUMBERS = "float start = {0.5}, float decay = {0.9}"
TABLE = "float[4] table = {0.4, 0.3, 0.2, 0.1}"
BOUNDED = "int64 n = {5}, int64 most = {9}"
# One number times the prediction.
GAIN = {
    "forward": nodes("p = x @ w; y = p * k; d = y - t; loss = ReduceMean(d * d, keepdims=0)"),
    "backward": nodes("dy = d * two_over_n; dw = x.T @ (dy * k); dk = ReduceSum(dy * p, keepdims=0)"),
}
STEPS = {
    # --- schedules
    # Named `rate`, one of the numbers that it does not follow from would be likelier.
    "a rate by a formula": (
        update_step(COUNTED.replace("lr =", "rate_now ="), "int64 n", "float rate_now", NUMBERS, stored=True),
        {**states("n", "w"), "rate_now": "metric"},
    ),
    "a rate by a formula, named after a whole number": (
        update_step(COUNTED.replace("lr =", "unit_rate ="), "int64 n", "float unit_rate", NUMBERS, stored=True),
        {**states("n", "w"), "unit_rate": "metric"},
    ),
    "a rate by a table": (
        update_step(
            "n_next = n + unit; lr = start * Gather(table, n_next)", "int64 n", "float lr", f"{TABLE}, {NUMBERS}"
        ),
        {**states("w", "n"), "lr": "metric"},
    ),
    "a rate by a table beside one that is fed": (
        update_step(
            "n_next = n + unit; planned = Gather(table, n_next)",
            "int64 n, float lr",
            "float planned",
            TABLE,
            update=SGD.replace("rate", "lr"),
        ),
        {**states("w", "n"), "planned": "metric"},
    ),
    "a rate by a counter beside a gain": (
        update_step(
            "n_next = n + unit; lr = Cast(n, to=1) * rate", "int64 n, float k", "float lr", stored=True, **GAIN
        ),
        {**states("n", "w"), "lr": "metric"},
    ),
    # --- constants beside weights that are inputs
    "a rate by a formula beside a weight that is fed": (
        update_step(COUNTED, "int64 n", "float lr", NUMBERS),
        {**states("w", "n"), "lr": "metric"},
    ),
    # Unlike those of all next values, its name makes a metric likelier.
    "a rate by a formula beside a moment that is stored": (
        update_step(COUNTED, "int64 n", "float lr", f"{NUMBERS}, float[4,3] m = {numbers(12)}", update=MOMENTUM),
        {**states("w", "n", "m"), "lr": "metric"},
    ),
    "one less a score": (
        update_step("score = ReduceMean(y, keepdims=0); other = one - score", outputs="float other"),
        {**states("w"), "other": "metric"},
    ),
    "a rate that one number alone gives": (
        update_step("lr = k * low", outputs="float lr", constants="float k = {0.5}, float low = {0.9}"),
        {**states("w"), "lr": "next k?"},
    ),
    "an average with a number": (
        update_step(
            "mean = k * high + loss * low",
            outputs="float mean",
            constants="float k = {0}, float high = {0.9}, float low = {0.1}",
        ),
        {**states("w"), "mean": "next k?"},
    ),
    # --- stored numbers
    "a number that shrinks or begins at a norm": (
        update_step(
            "k_next = Where(flag, k * low, ReduceL2(dw, keepdims=0))",
            "bool flag",
            "",
            "float k = {2}, float low = {0.3}",
        ),
        states("w", "k?"),
    ),
    "a mean over the steps so far": (
        update_step(
            "n_next = n + unit; mean = (k * Cast(n, to=1) + loss) / Cast(n_next, to=1)",
            "int64 n",
            "float mean",
            "float k = {0}",
            stored=True,
        ),
        {**states("n", "w"), "mean": "metric"},
    ),
    "a sum that begins anew, less a norm": (
        update_step("k_next = k * Cast(flag, to=1) - ReduceL2(dw, keepdims=0)", "bool flag", "", "float k = {2}"),
        states("w", "k?"),
    ),
    "a sum that begins anew, of many": (
        update_step("k_next = Sum(k * Cast(flag, to=1), ReduceL2(dw, keepdims=0))", "bool flag", "", "float k = {2}"),
        states("w", "k?"),
    ),
    "a constant that counts now and then, plus one": (
        update_step("shown = k * Cast(flag, to=1) + one", "bool flag", "float shown", "float k = {2}"),
        {**states("w"), "shown": "metric"},
    ),
    "a gain that moves by signs": (
        update_step("k_next = k - Sign(dk) * rate", constants="float k = {2}", **GAIN),
        states("w", "k?"),
    ),
    "a number with an axis": (
        update_step(
            "k_next = k + Reshape(ReduceSum(dw * dw, keepdims=0), long)",
            "",
            "",
            "float[1] k = {2}, int64[1] long = {1}",
        ),
        states("w", "k?"),
    ),
    "a constant plus a norm": (
        update_step("size = c + ReduceSum(dw * dw, keepdims=0)", outputs="float size", constants="float c = {2}"),
        {**states("w"), "size": "metric"},
    ),
    "a gain plus a share of hits": (
        update_step(
            "hits = Cast(Less(Abs(d), one), to=1); size = k + ReduceMean(hits, keepdims=0)",
            outputs="float size",
            constants="float k = {2}",
            **GAIN,
        ),
        {**states("w"), "size": "metric"},
    ),
    "a rate by a formula, named half after a stored number": (
        update_step(
            "n_next = n + unit; start_lr = start_rate * Pow(decay_rate, Cast(n_next, to=1))",
            "int64 n",
            "float start_lr",
            "float decay_rate = {0.9}, float start_rate = {0.5}",
            stored=True,
        ),
        {**states("n", "w"), "start_lr": "metric"},
    ),
    # --- whole numbers
    # Counters add one.
    "a counter under another name": (
        update_step("after = n + unit", "", "int64 after", "int64 n = {5}"),
        {**states("w"), "after": "next unit?"},
    ),
    "a counter with a bound": (
        update_step("n_next = Min(n + unit, most)", constants="int64 n = {0}, int64 most = {9}"),
        states("w", "n?"),
    ),
    "a number that begins elsewhere with a bound, compared elsewhere": (
        update_step("n_next = Min(n + unit, most); is_late = Less(n, most)", "", "bool is_late", BOUNDED),
        {**states("w", "n?"), "is_late": "metric"},
    ),
    "a sum with a bound": (
        update_step("k_next = Min(k + one, most)", constants="float k = {0}, float most = {9}"),
        states("w", "k?"),
    ),
    **{
        f"a counter that begins elsewhere, by {comparison}": (
            update_step(f"n_next = Where({comparison}(n, most), {chosen})", constants=BOUNDED),
            states("w", "n?"),
        )
        for comparison, chosen in (
            ("Less", "n + unit, most"),
            ("LessOrEqual", "n + unit, most"),
            ("Greater", "most, n + unit"),
            ("GreaterOrEqual", "most, n + unit"),
        )
    },
    "a counter that starts again": (
        update_step("n_next = Mod(n, period)", constants="int64 n = {5}, int64 period = {3}"),
        states("w", "n?"),
    ),
    "a whole number that is doubled": (
        update_step(
            "n_next = Where(Less(n, most), n * two, most)", "", "", "int64 n = {0}, int64 most = {9}, int64 two = {2}"
        ),
        states("w", "n?"),
    ),
    "a sum of whole errors": (
        update_step("n_next = n + Cast(ReduceSum(Abs(d), keepdims=0), to=7)", constants="int64 n = {0}"),
        states("w", "n"),
    ),
    "a counter beside two more": (
        update_step("n_next = n + unit; ahead = n + two", "", "int64 ahead", "int64 n = {0}, int64 two = {2}"),
        {**states("w", "n?"), "ahead": "metric?"},
    ),
}


@pytest.mark.sample(6)
@pytest.mark.parametrize("name", STEPS)
def test_roles(name: str) -> None:
    model, expected = STEPS[name]
    assert roles_of(model) == expected
