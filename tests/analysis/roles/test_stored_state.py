"""State in initializers that are no inputs: weights, moments, counters, rates."""

from __future__ import annotations

import onnx
import pytest

from tests.analysis.roles.steps import MOMENTUM, roles_of, states, update_step
from tests.build import LINEAR, numbers, ramp
from tests.expressions import nodes

pytestmark = pytest.mark.static

FIRST = "u = dw * rate; w_next = Where(first, w - u - u, w - u)\n"
MASTERS = {
    "constants": f"float16[4,3] half = {numbers(12, '14336')}, float top = {{1}}",
    "forward": "wide = Cast<to = 1>(half)\n" + LINEAR.replace("x, w", "x, wide"),
}
SIGNS = {
    "constants": f"float[4,3] k = {ramp(12)}",
    "forward": LINEAR.replace("x, w", "x, k"),
}
# One number times the prediction.
GAIN = {
    "forward": nodes("p = x @ w; y = p * k; d = y - t; loss = ReduceMean(d * d, keepdims=0)"),
    "backward": nodes("dy = d * two_over_n; dw = x.T @ (dy * k); dk = ReduceSum(dy * p, keepdims=0)"),
}


def means_beside(read: str, number: str) -> onnx.ModelProto:
    """A step that shows the means of its batch, whose type a filled tensor `level` has that something reads."""
    return update_step(
        f"shown = ReduceMean(x, axes, keepdims=0); size = ReduceL2({read}, keepdims=0)",
        outputs="float size, float[4] shown",
        constants=f"float[4] level = {numbers(4, number)}",
    )


STEPS = {
    "a sum of what is fed": (
        update_step("s_next = s + counts", "float[4] counts", constants=f"float[4] s = {numbers(4)}"),
        states("w", "s?"),
    ),
    "a count of what is fed": (
        update_step("n_next = n + count", "int64 count", constants="int64 n = {0}"),
        states("w", "n?"),
    ),
    "a square that replaces zeros": (
        update_step(
            constants=f"float[4,3] v = {numbers(12)}",
            update="w_next = w - dw / (Sqrt(v) + one) * rate; v_next = dw * dw",
        ),
        states("w", "v?"),
    ),
    # --- weights that are computed from their masters
    "float16 weights cast from the next masters": (
        update_step("half_next = Cast(w_next, to=10)", **MASTERS),
        states("w", "half"),
    ),
    "float16 weights cast ahead of a bound": (
        update_step(
            update="ahead = w - dw * rate; w_next = Min(ahead, top); half_next = Cast(ahead, to=10)", **MASTERS
        ),
        states("w", "half?"),
    ),
    "the signs of masters": (update_step("k_next = Sign(w_next)", **SIGNS), states("w", "k?")),
    "a momentum of zeros": (update_step(constants=f"float[4,3] m = {numbers(12)}", update=MOMENTUM), states("w", "m")),
    "a sum of squares that begins at a tenth": (
        update_step(
            constants=f"float[4,3] sum = {numbers(12, '0.1')}",
            update="sum_next = sum + dw * dw; w_next = w - dw / Sqrt(sum_next) * rate",
        ),
        states("w", "sum"),
    ),
    "a gradient that the next step is compared with": (
        update_step(
            constants=f"float[4,3] prev = {numbers(12)}, float nought = {{0}}",
            update="turned = Less(dw * prev, nought); prev_next = Identity(dw)\n"
            "w_next = w - Sign(dw) * Where(turned, rate, one)",
        ),
        {**states("w"), "prev_next": "gradient?"},
    ),
    "a counter that begins at zero": (update_step("n_next = n + unit", constants="int64 n = {0}"), states("w", "n?")),
    # A constant plus a constant has the same form.
    "a counter that stops at the largest number": (
        update_step("n_next = Where(Less(n, most), n + unit, most)", constants="int64 n = {0}, int64 most = {9}"),
        states("w", "n?"),
    ),
    "a counter that begins elsewhere": (update_step("n_next = n + unit", constants="int64 n = {5}"), states("w", "n?")),
    "a number that is kept from falling below zero": (
        update_step("k_next = Relu(k + ReduceMean(w, keepdims=0) * rate)", constants="float k = {0.3}"),
        states("w", "k?"),
    ),
    # Python's sum begins with a zero, too.
    "a sum that begins at zero": (
        update_step("k_next = k + ReduceSum(dw * dw, keepdims=0)", constants="float k = {0}"),
        states("w", "k?"),
    ),
    "a sum of squares of one number": (
        update_step("k_next = k + ReduceSum(dw * dw, keepdims=0); root = Sqrt(k_next)", constants="float k = {2}"),
        states("w", "k?"),
    ),
    "a second moment of one number": (
        update_step(
            "k_next = k * low + ReduceSum(dw * dw, keepdims=0) * one", constants="float k = {2}, float low = {0.3}"
        ),
        states("w", "k?"),
    ),
    "a few numbers with a decay each": (
        update_step(
            "k_next = k * decays + ReduceSum(dw * dw, keepdims=0)",
            constants=f"float[2] k = {numbers(2, '2')}, float[2] decays = {{0.9, 0.99}}",
        ),
        states("w", "k?"),
    ),
    "a stored gradient that the next one is compared with": (
        update_step(
            constants=f"float[4,3] prev = {ramp(12)}",
            update="prev_next = Identity(dw); w_next = w - (dw - prev) * rate",
        ),
        states("w", "prev?"),
    ),
    "a stored pair of numbers that nothing reads": (
        update_step("k_next = Identity(nought)", constants="float[2] k = {1, 2}, float[2] nought = {0, 1}"),
        states("w", "k?"),
    ),
    # --- zeros that a condition chooses
    "an activation beside zeros in place of gradients that are no numbers": (
        update_step(
            update="w_next = w - Where(IsNaN(dw), nought, dw) * rate; p = Tanh(w_next)",
            outputs="float[4,3] p",
            constants=f"float[4,3] nought = {numbers(12)}",
        ),
        {**states("w"), "p": "metric"},
    ),
    "an activation, or zeros": (
        update_step(
            "p = Where(IsNaN(dw), nought, Tanh(dw))",
            outputs="float[4,3] p",
            constants=f"float[4,3] nought = {numbers(12)}",
        ),
        {**states("w"), "p": "metric"},
    ),
    "a moment that a flag keeps": (
        update_step("m_next = Where(flag, m, m * beta + dw)", "bool flag", "", f"float[4,3] m = {numbers(12)}"),
        states("w", "m"),
    ),
    "a tensor that a flag keeps": (
        update_step("v_next = Where(flag, v, Tanh(dw))", "bool flag", constants=f"float[4,3] v = {ramp(12)}"),
        states("w", "v"),
    ),
    "zeros that nothing reads": (
        update_step("k_next = Identity(other)", constants="float[2] k = {0, 0}, float[2] other = {0, 1}"),
        states("w", "k?"),
    ),
    # --- a weight of one number
    "a weight of one number": (
        update_step("k_next = k - dk * rate", constants="float k = {2}", **GAIN),
        states("w", "k"),
    ),
    "a weight of one number, with a share": (
        update_step("k_next = k * low - dk * rate", constants="float k = {2}, float low = {0.3}", **GAIN),
        {**states("w", "k?"), "loss": "loss?"},
    ),
    # Constants beside a metric have this form.
    "a number that the loss reads, and no gradient changes": (
        update_step("k_next = k * beta", constants="float k = {2}", **GAIN),
        states("w", "k?"),
    ),
    "a number that is added to the gradient of another one": (
        update_step("sum = c + dk", outputs="float sum", constants="float k = {2}, float c = {3}", **GAIN),
        {**states("w"), "sum": "metric", "loss": "loss?"},
    ),
    # --- counters
    "a counter that a flag sets back": (
        update_step(
            "n_next = Where(flag, nought, n + unit)", "bool flag", constants="int64 n = {0}, int64 nought = {0}"
        ),
        states("w", "n?"),
    ),
    # --- tensors that an output has the type of, and does not depend on
    "sums in place of a tensor that nothing reads": (
        update_step("k_next = ReduceSum(w_next, axes, keepdims=0)", constants="float[3] k = {1, 2, 3}"),
        states("w", "k?"),
    ),
    "means in place of a tensor that a metric reads": (
        update_step(
            "mean_next = ReduceMean(x, axes, keepdims=0); size = ReduceL2(mean, keepdims=0)",
            outputs="float size",
            constants=f"float[4] mean = {ramp(4)}",
        ),
        {**states("w", "mean?"), "size": "metric"},
    ),
    "means beside ones": (means_beside("w_next.T * level", "1"), {**states("w"), "shown": "metric", "size": "metric"}),
    "means beside zeros": (
        means_beside("Max(w_next.T, level)", "0"),
        {**states("w"), "shown": "metric", "size": "metric"},
    ),
    "an activation of a gradient beside a frozen weight": (
        update_step(
            "p = Tanh(dw)",
            outputs="float[4,3] p",
            constants=f"float[4,3] v = {ramp(12)}",
            forward=nodes("y = x @ (w + v); d = y - t; loss = ReduceMean(d * d, keepdims=0)"),
        ),
        {**states("w"), "p": "metric"},
    ),
    "a product of the network beside a tensor that a metric reads": (
        update_step(
            "size = ReduceL2(kept, keepdims=0)",
            outputs="float size, float[8,3] h",
            constants=f"float[8,3] kept = {ramp(24)}",
            forward=nodes("h = x @ w; y = Tanh(h); d = y - t; loss = ReduceMean(d * d, keepdims=0)"),
        ),
        {**states("w"), "size": "metric", "h": "metric"},
    ),
    "flags of each column": (
        update_step(
            "done_next = Or(done, Less(ReduceMax(w_next, axes, keepdims=0), limit))",
            constants="bool[3] done = {0, 0, 0}, float limit = {1}",
        ),
        states("w", "done?"),
    ),
    # Weights are fed, so nothing that is stored is state.
    "means of the type of a stored table, beside gradients that leave": (
        update_step(
            "size = ReduceL2(table * table, keepdims=0); shown = ReduceMean(x, axes, keepdims=0)",
            update="",
            outputs="float[4,3] dw, float size, float[4] shown",
            constants=f"float[4] table = {ramp(4)}",
        ),
        {"dw": "gradient", "size": "metric", "shown": "metric"},
    ),
    "a stored rate": (
        update_step("rate_next = Identity(rate)", outputs="float rate_next"),
        {**states("w"), "rate_next": "constant"},
    ),
}


@pytest.mark.sample(8)
@pytest.mark.parametrize("name", STEPS)
def test_roles(name: str) -> None:
    model, expected = STEPS[name]
    assert roles_of(model) == expected


def test_a_momentum_of_ones() -> None:
    model = update_step(constants=f"float[4,3] m = {numbers(12, '1')}", update=MOMENTUM)
    assert roles_of(model)["m_next"] in ("next m", "next m?")
