"""The rules of the exporter of JAX: each gives what the primitive that it replaces gives."""

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
from jax.interpreters import mlir  # noqa: E402

from graphscale.errors import ExportError  # noqa: E402
from graphscale.exporters.jax import tracing_steps  # noqa: E402, F401  # registers the rules
from graphscale.exporters.jax.onnx_primitives import PRIMITIVES  # noqa: E402
from graphscale.exporters.jax.rewriting import rewrite  # noqa: E402

pytestmark = [pytest.mark.jax, pytest.mark.static]

jax.config.update("jax_disable_most_optimizations", True)  # they take longer than the tests
for primitive in PRIMITIVES:  # the package lowers them to ONNX alone
    mlir.register_lowering(primitive, mlir.lower_fun(primitive.impl, multiple_results=False))

RNG = np.random.default_rng(0)


def real(*shape: int) -> np.ndarray[Any, Any]:
    return RNG.normal(size=shape).astype(np.float32)


def whole(end: int, *shape: int) -> np.ndarray[Any, Any]:
    return RNG.integers(0, end, shape, dtype=np.int32)


def primitives(jaxpr: Any) -> set[str]:
    return {equation.primitive.name for equation in jaxpr.eqns}


def check(function: Callable[..., Any], *values: Any, gone: str = "") -> None:
    """Compare a function with itself by the rules, and look for the primitives that are left."""
    closed = jax.make_jaxpr(function)(*values)
    ruled = jax.make_jaxpr(lambda *inner: [jnp.asarray(x) for x in rewrite(closed, *inner)])(*values)
    expected = jax.tree.leaves(jax.jit(function)(*values))
    for wanted, found in zip(expected, jax.jit(jaxpr_as_fun(ruled))(*values), strict=True):
        assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape)
        np.testing.assert_allclose(found, wanted, rtol=2e-5, atol=2e-5)
    assert gone not in primitives(ruled.jaxpr)


@pytest.mark.parametrize(
    ("left", "right", "numbers"),
    [
        ((5, 4), (5, 3), (((0,), (0,)), ((), ()))),
        ((4, 5), (3, 5), (((1,), (1,)), ((), ()))),
        ((2, 5, 4), (4, 3), (((2,), (0,)), ((), ()))),
        ((2, 5, 4), (2, 5, 3), (((0, 1), (0, 1)), ((), ()))),
        ((5, 2, 4), (3, 4, 2), (((2,), (1,)), ((1,), (2,)))),
        ((2, 3, 4, 5), (2, 6, 3, 5), (((3,), (3,)), ((0, 1), (0, 2)))),
        ((5,), (5,), (((0,), (0,)), ((), ()))),
        ((5,), (5, 3), (((0,), (0,)), ((), ()))),
        ((2, 3), (2, 4), (((), ()), ((0,), (0,)))),
    ],
)
def test_products(left: tuple[int, ...], right: tuple[int, ...], numbers: Any) -> None:
    check(lambda a, b: lax.dot_general(a, b, numbers), real(*left), real(*right), gone="dot_general")


def test_products_of_halves_with_a_wide_sum() -> None:
    halves = real(3, 4).astype(np.float16), real(4, 2).astype(np.float16)
    check(lambda a, b: lax.dot(a, b, preferred_element_type=np.float32), *halves)


@pytest.mark.parametrize(
    ("stride", "spread", "apart", "padding", "groups"),
    [
        (1, 1, 1, "SAME", 1),
        (2, 1, 1, "SAME", 2),
        (2, 1, 1, "VALID", 1),
        (1, 2, 1, [(2, 0), (-1, 1)], 1),
        (1, 1, 2, [(2, 0), (1, 1)], 2),
        (2, 2, 1, [(1, 1), (0, 3)], 2),
    ],
)
def test_convolutions_and_their_gradients(stride: int, spread: int, apart: int, padding: Any, groups: int) -> None:
    def convolve(x: Any, w: Any) -> Any:
        return lax.conv_general_dilated(
            *(x, w, (stride, stride), padding),
            *((spread, spread), (apart, apart)),
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
            feature_group_count=groups,
        )

    def gradients(x: Any, w: Any) -> Any:
        return jax.grad(lambda *both: jnp.sin(convolve(*both)).sum(), (0, 1))(x, w)

    values = real(2, 7, 6, 4), real(3, 3, 4 // groups, 6)
    check(convolve, *values)
    check(gradients, *values)


@pytest.mark.parametrize("padding", ["SAME", "VALID"])
@pytest.mark.parametrize(("size", "stride"), [(2, 2), (3, 1), (3, 2)])
def test_pools_and_their_gradients(size: int, stride: int, padding: str) -> None:
    def pool(x: Any, start: Any, combine: Any) -> Any:
        return lax.reduce_window(x, start, combine, (1, size, size, 1), (1, stride, stride, 1), padding)

    x = real(2, 7, 6, 3)
    check(lambda x: pool(x, -jnp.inf, lax.max), x, gone="reduce_window_max")
    check(lambda x: pool(x, jnp.inf, lax.min), x, gone="reduce_window_min")
    check(lambda x: pool(x, 0.0, lax.add), x, gone="reduce_window_sum")
    for start, combine in ((-jnp.inf, lax.max), (0.0, lax.add)):
        check(jax.grad(lambda x, s=start, c=combine: jnp.sin(pool(x, s, c)).sum()), x, gone="select_and_scatter_add")


def test_a_tie_in_a_pool_goes_to_the_first() -> None:
    def total(x: Any) -> Any:
        return lax.reduce_window(x, -jnp.inf, lax.max, (2, 2), (2, 2), "VALID").sum()

    check(jax.grad(total), np.zeros((4, 4), np.float32))


@pytest.mark.parametrize("mode", ["fill", "clip", "promise_in_bounds"])
def test_gathers_and_their_gradients(mode: str) -> None:
    table, rows = real(6, 3), whole(6, 4, 2)
    rows[0, 0], rows[1, 1] = 9, -9

    def take(table: Any) -> Any:
        return table.at[rows].get(mode=mode)

    check(take, table, gone="gather")
    check(jax.grad(lambda table: jnp.nansum(jnp.sin(take(table)))), table, gone="scatter-add")


@pytest.mark.parametrize(
    "choose",
    [
        lambda x, i: x[:, i],
        lambda x, i: x[i, :, i],
        lambda x, i: x[1:3, i, ::2],
        lambda x, i: jnp.take_along_axis(x, i[:, None, None] % 4, 1),
        lambda x, i: jax.vmap(lambda row, at: lax.dynamic_slice(row, (at, 1), (2, 2)))(x[: len(i)], i),
        lambda x, i: lax.dynamic_slice(x, (i[0], 0, 9), (2, 3, 2)),
        lambda x, i: lax.dynamic_slice(x, (1, 0, 9), (2, 3, 2)),
    ],
)
def test_choices(choose: Callable[..., Any]) -> None:
    x, places = real(4, 5, 4), np.array([3, 0, 1, 3], np.int32)
    check(choose, x, places, gone="gather")
    check(jax.grad(lambda x: jnp.sin(choose(x, places)).sum()), x, gone="scatter-add")


@pytest.mark.parametrize("method", ["set", "add", "multiply", "min", "max"])
def test_scatters(method: str) -> None:
    rows, updates = np.array([4, 1, 7], np.int32), real(3, 3)  # one is outside
    check(lambda x: getattr(x.at[rows], method)(updates), real(5, 3))
    check(lambda x: lax.dynamic_update_slice(x, updates[:2, :2], (rows[0], 0)), real(5, 3))


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("name", ["cumprod", "cummax", "cummin", "cumlogsumexp"])
def test_running(name: str, reverse: bool) -> None:
    check(lambda x: getattr(lax, name)(x, axis=1, reverse=reverse), real(2, 5), gone=name)


@pytest.mark.parametrize(
    "draw",
    [
        lambda key: jax.random.uniform(key, (3, 5)),
        lambda key: jax.random.normal(key, (2, 3)),
        lambda key: jax.random.bernoulli(key, 0.3, (7,)),
        lambda key: jax.random.randint(key, (6,), -3, 9),
        lambda key: jax.random.gumbel(jax.random.fold_in(key, 7), (4,)),
        lambda key: jax.random.key_data(jax.random.split(key, 3)),
        lambda key: jax.vmap(lambda inner: jax.random.uniform(inner, (2,)))(jax.random.split(key, 3)),
        lambda key: lax.scan(lambda k, _: (jax.random.split(k)[0], jax.random.uniform(k)), key, None, 2)[1],
    ],
)
def test_random_numbers(draw: Callable[[Any], Any]) -> None:
    """The same numbers, from words with all bits."""
    words = np.array([2**32 - 1, 2**31 + 123456789], np.uint32)
    check(lambda words: draw(jax.random.wrap_key_data(words)), words, gone="random_bits")


def test_bits_of_numbers() -> None:
    bits = real(40).view(np.uint32)
    check(lambda x: lax.bitcast_convert_type(x, np.float32), bits, gone="bitcast_convert_type")


@pytest.mark.parametrize(
    "function",
    [
        lambda x: lax.scan(lambda c, y: (jnp.tanh(c + y), c * y), x[0], x)[1],
        lambda x: lax.scan(lambda c, y: (jnp.tanh(c + y), c * y), x[0], x, reverse=True),
        lambda x: lax.scan(lambda c, y: (c + jnp.where(y > 0, y, jnp.sin(y)) ** 2, y), x[0], jnp.tile(x, (40, 1))),
        lambda x: lax.fori_loop(0, 4, lambda i, c: c * 0.5 + i, x),
        lambda x: lax.while_loop(lambda c: c.sum() < 50, lambda c: c + 1, x),
        lambda x: lax.cond(x[0, 0] > 0, jnp.sin, jnp.cos, x),
        lambda x: lax.switch(jnp.int32(x[0, 1] * 0) + 2, [jnp.sin, jnp.cos, jnp.tanh], x),
        jax.grad(lambda y: jax.checkpoint(lambda z: jnp.sin(z @ z.T))(y).sum()),
        lambda x: x**3 + jnp.abs(x) ** -2 + jnp.square(x) + x**0,
        lambda x: lax.pad(x, 1.5, [(1, -1, 2), (-1, 2, 0)]),
    ],
)
def test_control_and_numbers(function: Callable[[Any], Any]) -> None:
    check(function, real(4, 4))


def test_the_host_is_not_called() -> None:
    def shout(x: Any) -> Any:
        jax.debug.print("{x}", x=x)
        return x

    with pytest.raises(ExportError, match="calls the host"):
        check(shout, real(2))
