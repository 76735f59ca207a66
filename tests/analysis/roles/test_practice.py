"""Additional outputs of real steps: present rates, thresholds, statistics of batches, the best step so far."""

from __future__ import annotations

import pytest

from tests.analysis.roles.steps import MOMENTUM, recurrent_step, roles_of, states, update_step
from tests.build import LINEAR, numbers
from tests.expressions import nodes

pytestmark = pytest.mark.static

RATE_IN_USE = "u = dw * shown; w_next = w - u\n"
# The condition depends on the batch, a counter does not.
PLATEAU = "flag = Less(loss, one); shown = lr * Where(flag, half, one)\n"
HALF = "float half = {0.5}"
NORMED = LINEAR.replace("MatMul(x, w)", "MatMul(z, w)")
SCALED = {
    "forward": nodes("z = (x - mean) / Sqrt(var)") + NORMED,
    "backward": nodes("dy = d * two_over_n; dw = z.T @ dy"),
}
WELFORD = """
    n_next = n + size; share = size / n_next; now = ReduceMean(x, axes, keepdims=0); off = now - mean
    mean_next = mean + off * share
    var_next = (var * n + ReduceMean(z * z, axes, keepdims=0) * size + off * off * n * share) / n_next
"""
RETURNS = {
    "forward": nodes("flow = ReduceSum(rewards, axes, keepdims=0); total = start + flow; off = x @ w")
    + "row = Unsqueeze(total, last)\n"
    + nodes("d = off - row; square = d * d; loss = ReduceMean(square, keepdims=0)"),
}
ONE_ELEMENT = {
    "forward": nodes("y = x @ w + b; d = y - t; loss = ReduceMean(d * d, keepdims=0)"),
    "backward": nodes(
        "c = d * two_over_n; dw = x.T @ c; db = ReduceSum(ReduceSum(c, keepdims=0), axis, keepdims=0)"
    ).replace("ReduceSum<keepdims = 0>(db_0, axis)", "Reshape(db_0, long)"),
}
QUANTIZED = "m = Cast(q, to=1) * size; m_next = m * beta + dw; u = m_next * rate; w_next = w - u\n"
FRESH = "fresh = ReduceMax(Abs(m_next), keepdims=0); q_next = Cast(Round(m_next / fresh), to=3)\n"
TWO_LOSSES_AGO = """
    now = ReduceMean(d * d, axes, keepdims=0); passed = Identity(before); k = ReduceSum(before * far, keepdims=0)
"""
STEPS = {
    # --- a fed rate, and the rate in use
    "a rate by a warm-up": (
        update_step(
            update="n_next = n + unit; shown = lr * Min(one, Cast(n_next, to=1) * rate)\n" + RATE_IN_USE,
            inputs="int64 n, float lr",
            outputs="float shown",
        ),
        {**states("w", "n"), "shown": "metric"},
    ),
    "a rate by a power of a counter": (
        update_step(
            update="n_next = n + unit; shown = lr * Pow(beta, Cast(n_next, to=1))\n" + RATE_IN_USE,
            inputs="int64 n, float lr",
            outputs="float shown",
        ),
        {**states("w", "n"), "shown": "metric"},
    ),
    "a rate between two fed ones": (
        update_step(
            update="n_next = n + unit; c = Cos(Cast(n, to=1)); shown = lr * c + low * (one - c)\n" + RATE_IN_USE,
            inputs="int64 n, float lr, float low",
            outputs="float shown",
        ),
        {**states("w", "n"), "shown": "metric"},
    ),
    "a rate that a plateau halves, in use": (
        update_step(update=PLATEAU + RATE_IN_USE, inputs="float lr", outputs="float shown", constants=HALF),
        {**states("w"), "shown": "next lr?"},
    ),
    "a rate that a plateau halves, for the next step": (
        update_step(
            update=PLATEAU + RATE_IN_USE.replace("shown", "lr"),
            inputs="float lr",
            outputs="float shown",
            constants=HALF,
        ),
        {**states("w"), "shown": "next lr?"},
    ),
    "a damping within bounds": (
        update_step(
            update=PLATEAU.replace("lr *", "(lr *").replace("one)\n", "one)); kept = Clip(shown, low, high)\n")
            + RATE_IN_USE.replace("shown", "lr"),
            inputs="float lr",
            outputs="float kept",
            constants=f"{HALF}, float low = {{0.1}}, float high = {{9}}",
        ),
        {**states("w"), "kept": "next lr?"},
    ),
    # --- counts and the best so far
    "a count that begins anew": (
        update_step("n_next = Where(Less(loss, rate), nought, n + one)", "float n", "", "float nought = {0}"),
        states("w", "n"),
    ),
    "a whole count that begins anew": (
        update_step("n_next = Where(Less(loss, rate), nought, n + unit)", "int64 n", "", "int64 nought = {0}"),
        states("w", "n"),
    ),
    "the least loss, beside the best weights": (
        update_step(
            "flag = Less(loss, least - rate); best_next = Where(flag, w_next, best); kept = Where(flag, loss, least)",
            "float[4,3] best, float least",
            "float kept",
        ),
        {**states("w", "best"), "kept": "next least"},
    ),
    "the least loss, beside other weights": (
        update_step(
            "best_next = Where(Less(loss, rate), w_next, best); kept = Where(Less(loss, least - rate), loss, least)",
            "float[4,3] best, float least",
            "float kept",
        ),
        {**states("w", "best"), "kept": "next least"},
    ),
    # --- statistics of batches that the network reads
    "means and variances of columns": (
        update_step(
            WELFORD, "float n, float[4] mean, float[4] var", constants="float size = {8}, float[4] now", **SCALED
        ),
        states("w", "n", "mean", "var"),
    ),
    "a sum over time": (
        update_step(
            inputs="float[8] start, float[5,8] rewards",
            outputs="float[8] total",
            constants="int64[1] axes = {0}, int64[1] last = {1}, float[8] flow",
            **RETURNS,
        ),
        {**states("w"), "total": "metric?"},
    ),
    # --- weights of one element
    "a bias of one element by a projection": (
        update_step(
            "b_next = (b - db * rate) / Sqrt(level)",
            "float[1] b, float level",
            constants="int64[1] long = {1}",
            **ONE_ELEMENT,
        ),
        states("w", "b"),
    ),
    "a stored bias of one element by a projection": (
        update_step(
            "shown = (b - db * rate) / Sqrt(level)",
            "float level",
            "float[1] shown",
            "int64[1] long = {1}, float[1] b = {0.3}",
            **ONE_ELEMENT,
        ),
        {**states("w"), "shown": "metric"},
    ),
    # --- quantized moments
    "the scale of a quantized moment": (
        update_step(update=QUANTIZED + FRESH, inputs="int8[4,3] q, float size", outputs="float fresh"),
        {**states("w", "q"), "fresh": "metric"},
    ),
    "a rate beside a moment": (
        update_step(
            "norm = ReduceL2(dw, keepdims=0)",
            "float[4,3] m, float rate",
            "float norm",
            update=MOMENTUM,
        ),
        {**states("w", "m"), "norm": "metric"},
    ),
    # --- constants that are no state
    "the mean of nothing": (
        update_step(
            "now = ReduceMean(x, axes, keepdims=0); v_next = v * share + Where(flag, now, none)",
            "float[4] v, float share, bool flag",
            "",
            "float[4] none = {nan, nan, nan, nan}",
        ),
        states("w", "v?"),
    ),
    "zeros whose squares are added": (
        update_step(
            "shown = dw * Min(one, one / Sqrt(ReduceSum(dw * dw + zeros * zeros, keepdims=0)))",
            outputs="float[4,3] shown",
            constants=f"float[4,3] zeros = {numbers(12)}",
        ),
        {**states("w"), "shown": "gradient"},
    ),
    "levels of columns beside a fed weight": (
        update_step(
            "shown = ReduceMean(d * levels, axes, keepdims=0)",
            outputs="float[3] shown",
            constants="float[3] levels = {0.1, 0.5, 0.9}",
        ),
        {**states("w"), "shown": "metric"},
    ),
    "levels of columns beside a stored weight": (
        update_step(
            "shown = ReduceMean(d * levels, axes, keepdims=0)",
            outputs="float[3] shown",
            constants="float[3] levels = {0.1, 0.5, 0.9}",
            stored=True,
        ),
        {**states("w"), "shown": "metric?"},
    ),
    "a constant beside an input with a fed share": (
        update_step(
            "v_next = v * share + filled",
            "float[4] v, float share",
            constants="float[4] filled = {0.1, 0.2, 0.3, 0.4}",
        ),
        states("w", "v?"),
    ),
    "a sum of terms that begins with a zero": (
        update_step(
            "late = (nought + ReduceMean(x * x, keepdims=0)) / six",
            outputs="float late",
            constants="float nought = {0}, float six = {6}",
        ),
        {**states("w"), "late": "metric"},
    ),
    "a large share of a stored number": (
        update_step("late = kept * beta + ReduceMean(x * x, keepdims=0)", "", "float late", "float kept = {0.3}"),
        {**states("w"), "late": "next kept?"},
    ),
    # --- predictions and labels
    "a prediction that is compared with a masked target": (
        update_step(
            inputs="float[8,3] m",
            outputs="float[8,3] p",
            constants="float[8,3] hidden",
            forward=nodes("y = x @ w; p = y * m; hidden = t * m; d = p - hidden; loss = ReduceMean(d * d, keepdims=0)"),
            backward=nodes("dy = d * two_over_n * m; dw = x.T @ dy"),
        ),
        {**states("w"), "p": "metric"},
    ),
    "a state that is compared with a computed one": (
        update_step(
            inputs="float[8,3] m",
            outputs="float[8,3] p",
            forward=nodes("y = x @ w; p = y + m; d = p - y * y; loss = ReduceMean(d * d, keepdims=0)"),
            backward=nodes("dy = d * two_over_n; dw = x.T @ dy"),
        ),
        {**states("w"), "p": "metric?"},
    ),
    "errors of examples beside rewards": (
        update_step(
            "e = ReduceMean(Abs(d * k), last, keepdims=0)",
            "float[8] r, float[8] m, float[3] k",
            "float[8] e",
            "int64[1] last = {1}",
            forward=nodes("y = x @ w; d = y - t - Unsqueeze(r * m, last); loss = ReduceMean(d * d, keepdims=0)"),
        ),
        {**states("w"), "e": "metric?"},
    ),
    # --- a loss scale of its own
    "a loss scale that a flag and a count choose factors of": (
        update_step(
            "bad = Greater(ReduceMax(Abs(dw), keepdims=0), high); many = Greater(n, four); n_next = n + unit\n"
            "size = k * Where(bad, half, Where(many, twice, one))",
            "float k, int64 n",
            "float size",
            "float high = {100}, int64 four = {4}, float half = {0.5}, float twice = {2}",
        ),
        {**states("w", "n"), "size": "metric"},
    ),
    "a factor that is computed": (
        update_step(
            "bad = Greater(ReduceMax(Abs(dw), keepdims=0), high); size = k * Where(bad, half, Where(bad, loss, one))",
            "float k",
            "float size",
            "float high = {100}, float half = {0.5}",
        ),
        {**states("w"), "size": "next k?"},
    ),
    # --- the losses of two steps
    "a register of losses": (
        update_step(TWO_LOSSES_AGO, "float[3] before, float[3] far", "float[3] now, float[3] passed, float k"),
        {**states("w"), "now": "metric?", "passed": "next before?", "k": "metric"},
    ),
    "a register of losses that weigh the loss": (
        update_step(
            "passed = Identity(before)",
            "float[3] before, float[3] far",
            "float[3] now, float[3] passed",
            forward=nodes(
                "d = x @ w - t; now = ReduceMean(d * d, axes, keepdims=0); q = before / far; "
                "loss = ReduceSum(now * q, keepdims=0)"
            ),
            backward=nodes("dy = d * two_over_n * before / far; dw = x.T @ dy"),
            constants="int64[1] axes = {0}",
        ),
        {**states("w"), "now": "metric", "passed": "next before?"},
    ),
    # --- parts of a loss
    "a part by a fed temperature": (
        update_step(
            outputs="float part",
            inputs="float heat",
            forward=nodes(
                "y = x @ w; p = y / heat; d = p - t; part = ReduceMean(d * d, keepdims=0) * heat; loss = part * two"
            ),
            backward=nodes("dy = d * two_over_n * two; dw = x.T @ dy"),
            constants="float two = {2}",
        ),
        {**states("w"), "part": "metric?"},
    ),
    "one number that is compared with a target": (
        update_step(
            outputs="float[1] mean",
            inputs="float[1] b, float[1] goal",
            forward=nodes(
                "y = x @ w + b; mean = Reshape(ReduceMean(y, keepdims=0), long); e = mean - goal; "
                "loss = ReduceSum(e * e, keepdims=0)"
            ),
            backward=nodes("dy = Expand(e * two_over_n, wide); dw = x.T @ dy"),
            constants="int64[1] long = {1}, int64[2] wide = {8, 3}",
        ),
        {**states("w"), "mean": "next b?"},
    ),
    # --- hidden states over two time steps
    "a hidden state": (
        recurrent_step("h1 = Tanh(x @ w + h @ u); h_out = Tanh(z @ w + h1 @ u)", "float[8,4] z", ""),
        {**states("w", "u"), "h_out": "next h?"},
    ),
    "a hidden state that a flag of each example resets": (
        recurrent_step(
            "h1 = Tanh(x @ w + (h * on) @ u); h_out = Tanh(z @ w + (h1 * on) @ u)", "float[8,4] z, float[8,1] on", ""
        ),
        {**states("w", "u"), "h_out": "next h?"},
    ),
    "the two states of a gated cell": (
        recurrent_step(
            "f1 = Sigmoid(x @ w + h @ u); c1 = c * f1 + f1; h1 = f1 * Tanh(c1)\n"
            "f2 = Sigmoid(z @ w + h1 @ u); c_out = c1 * f2 + f2; h_out = f2 * Tanh(c_out)",
            "float[8,5] c, float[8,4] z",
            "float[8,5] c_out",
        ),
        {**states("w", "u"), "h_out": "next h?", "c_out": "next c?"},
    ),
    "layers that share a weight": (
        recurrent_step("h1 = Tanh(h @ u); h_out = Tanh(h1 @ u)", "", ""),
        {**states("w", "u"), "h_out": "next h?"},
    ),
    "one time step": (
        recurrent_step("h1 = Tanh(x @ w); h_out = Tanh(h1 + h @ u)", "", ""),
        {**states("w", "u"), "h_out": "next h?"},
    ),
    # --- moments of weights that are projected
    "a moment beside a weight within a norm": (
        update_step(
            update="m_next = m + (dw - m) * tenth; v_next = v + (dw * dw - v) * tenth\n"
            "u = m_next / Sqrt(v_next) * rate; moved = w - u; w_next = moved * Min(one, one / ReduceL2(moved, axes))\n",
            inputs="float[4,3] m, float[4,3] v",
            constants="float tenth = {0.1}",
        ),
        states("w", "m", "v"),
    ),
}


@pytest.mark.sample(8)
@pytest.mark.parametrize("name", STEPS)
def test_roles(name: str) -> None:
    model, expected = STEPS[name]
    assert roles_of(model) == expected
