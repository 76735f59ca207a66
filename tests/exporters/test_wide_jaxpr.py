"""A jaxpr in another floating-point type: it computes what the function computes in that type."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax", reason="needs jax")
pytest.importorskip("jax2onnx", reason="needs jax2onnx")

import jax.numpy as jnp  # noqa: E402
from jax import lax  # noqa: E402
from jax.extend.core import jaxpr_as_fun  # noqa: E402

from graphscale.exporters.jax.wide_jaxpr import _Widening, widen_jaxpr  # noqa: E402

pytestmark = [pytest.mark.jax, pytest.mark.static]

jax.config.update("jax_disable_most_optimizations", True)  # they take longer than the tests

X = np.random.default_rng(0).normal(size=(2, 6, 6, 4)).astype(np.float16)
ROWS = np.array([3, 0, 3, 5], np.int32)


def convolve(x: Any) -> Any:
    kernel = jnp.ones((3, 3, 4, 2), x.dtype) / 8
    y = lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
    return lax.reduce_window(y, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")


def pick(x: Any) -> Any:
    return x.at[:, ROWS].add(1)[:, ROWS] * jnp.sort(x.ravel())[:4]


def loop(x: Any) -> Any:
    carried, stacked = lax.scan(lambda c, row: (jnp.tanh(c + row), c.sum()), x[0, 0], x[1])
    return lax.fori_loop(0, 3, lambda _, c: c * c.dtype.type(0.75), carried) + stacked[:, None]


def branch(x: Any) -> Any:
    return lax.cond(x.sum() > 0, jnp.sin, lambda y: y * 2, x) + jax.nn.relu(x) + jax.checkpoint(jnp.exp)(x)


def attend(x: Any) -> Any:
    """Attention asks for products by an algorithm of its own for float16."""
    return jax.nn.dot_product_attention(x, x, x, is_causal=True)


def draw(x: Any) -> Any:
    key = jax.random.key(1)
    return jnp.where(jax.random.bernoulli(key, 0.5, x.shape), x, 0) + jax.random.normal(key, x.shape).astype(x.dtype)


@pytest.mark.parametrize("function", [convolve, pick, loop, branch, attend, draw])
def test_results_and_gradients(function: Callable[[Any], Any]) -> None:
    run = jax.value_and_grad(lambda x: jnp.sin(function(x)).sum())
    with jax.enable_x64(True):
        wide = widen_jaxpr(jax.make_jaxpr(run)(X), np.float64, [np.float16, np.float32])
        assert "f16[" not in str(wide)
        found = jax.jit(jaxpr_as_fun(wide))(X.astype(np.float64))
        expected = jax.jit(run)(X.astype(np.float64))
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.dtype == np.float64
        np.testing.assert_allclose(ours, theirs, rtol=1e-6, atol=1e-6)  # constants keep their rounding


def test_bits_and_constants_keep_their_type() -> None:
    bits = X[0, 0].astype(np.float32).view(np.uint32)

    def function(bits: Any) -> Any:
        return lax.bitcast_convert_type(bits, np.float32) * (jnp.float16(0.1) * jnp.float16(3)).astype(np.float32)

    with jax.enable_x64(True):
        (found,) = jaxpr_as_fun(widen_jaxpr(jax.make_jaxpr(function)(bits), np.float64, [np.float16, np.float32]))(bits)
    tenths = np.float64(np.float16(0.1) * np.float16(3))
    np.testing.assert_allclose(found, bits.view(np.float32).astype(np.float64) * tenths, rtol=1e-12)


def test_a_function_inside_a_primitive_keeps_no_constants() -> None:
    body = jax.make_jaxpr(lambda x: x + lax.iota(np.float16, 4))(X[0, 0, 0]).jaxpr
    with pytest.raises(NotImplementedError, match="an array that depends on no operand"):
        _Widening(np.float32, [np.float16])._param(body)
