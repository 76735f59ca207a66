"""Fed learning rates: divided by the scale in the place of the gradients, where the bits stay the same."""

from __future__ import annotations

import numpy as np
import pytest

import graphscale as gs
from tests.conftest import Arrays
from tests.lowering.test_products import (
    EXACT,
    KINDS,
    POLICIES,
    RATES,
    SGD,
    Kind,
    assert_read,
    assert_same_when_spoiled,
    both,
    feeds_of,
    model_of,
)
from tests.lowering.test_same_steps import assert_same_runs, plain_and_lowered

pytestmark = pytest.mark.sample(1)

PRODUCT = Kind("dw = MatMul(xt, dy)", read=2)
# The quotient has another reader than the product with the rate.
BETWEEN = {"another sign", "another sign of a table", "Gemm with an addend", "a table that is not zero"}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", [*KINDS, "a product"])
def test_the_same_steps(name: str, policy: str) -> None:
    kind = KINDS.get(name, PRODUCT)
    model = model_of(kind, is_rate_fed=True)
    feeds = feeds_of(kind, model)
    plain, lowered, nodes = both(model, POLICIES[policy], feeds.pop("w"))
    is_divided = policy in EXACT and name not in BETWEEN
    assert nodes["bound-gradients", "Equal"] == is_divided
    assert not is_divided or nodes["unscale-gradients", "Div"] == 0
    assert_read(kind, nodes)
    assert not all(assert_same_when_spoiled(plain, lowered, feeds))


@pytest.mark.parametrize("scale", [1.0, 2.0, 2.0**15, 2.0**100, 2.0**122, 2.0**126, 2.0**127, 3.0, 0.5])
@pytest.mark.parametrize("rate", [*RATES, 1e-3, 1e-20, 1.5 * 2.0**-126, 2.0**-149])
def test_rates_and_scales_of_any_size(rate: float, scale: float) -> None:
    """A subnormal quotient has lost digits, and is not used."""
    model = model_of(PRODUCT, is_rate_fed=True)
    feeds = {**feeds_of(PRODUCT, model), "rate": np.float32(rate)}
    # Of a weight of 0, the next one shows all bits of the step.
    plain, lowered, _ = both(model, gs.DynamicLossScale(1024.0, 50), np.zeros_like(feeds.pop("w")))
    state = {**plain.state_dict(), "current_loss_scale": np.float32(scale)}
    sizes = map(np.float32, (1.0, 1e-3, 1e10))
    batches = ({**feeds, "x": feeds["x"] * size, "t": feeds["t"] * size} for size in sizes)
    assert_same_runs(plain, lowered, ([batch, feeds] for batch in batches), state)


OTHERS = {
    "another reader in the branch": ("u = Mul(rate, dw) v = Add(u, dw) w_next = Sub(w, v)", "", ""),
    "a next value beside": ("u = Mul(rate, dw) w_next = Sub(w, u) m_next = Identity(dw)", "float[4,3] m", "m_next"),
    "an output": (SGD, "", "dw"),
    "a rate that is computed in the branch": ("r = Mul(rate, third) u = Mul(r, dw) w_next = Sub(w, u)", "", ""),
    "a rate for each column": ("u = Mul(rates, dw) w_next = Sub(w, u)", "float[3] rates", ""),
    "a rate with an axis": ("u = Mul(rates, dw) w_next = Sub(w, u)", "float[1] rates", ""),
    "a divisor": ("u = Div(dw, rate) w_next = Sub(w, u)", "", ""),
    "a square": ("u = Mul(dw, dw) w_next = Sub(w, u)", "", ""),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_updates_keep_their_quotient(name: str) -> None:
    optimizer, inputs, output = OTHERS[name]
    outputs = "float[4,3] w_next" + (f", float[4,3] {output}" if output else "")
    kind = PRODUCT._replace(inputs=inputs)
    model = model_of(kind, optimizer=optimizer, outputs=outputs, is_rate_fed=True)
    feeds = feeds_of(kind, model)
    state: Arrays = {key: feeds.pop(key) for key in ("w", "m") if key in feeds}
    updates = {f"{key}_next": key for key in state}
    result = gs.scale(model, POLICIES["powers of two"], updates=updates, gradients=["dw"])
    plain, lowered, nodes = plain_and_lowered(result, state)
    assert nodes["bound-gradients", "Equal"] == 0
    assert any(assert_same_when_spoiled(plain, lowered, feeds))
