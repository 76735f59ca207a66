"""Rules of primitives without structure: numbers, comparisons, running sums."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from graphscale.errors import ExportError
from graphscale.exporters.jax.rewriting import rule

__all__: list[str] = []

_ERF_INV_NEAR = (
    *(2.81022636e-08, 3.43273939e-07, -3.5233877e-06, -4.39150654e-06, 0.00021858087, -0.00125372503, -0.00417768164),
    *(0.246640727, 1.50140941),
)
_ERF_INV_FAR = (
    *(-0.000200214257, 0.000100950558, 0.00134934322, -0.00367342844, 0.00573950773, -0.0076224613, 0.00943887047),
    *(1.00167406, 2.83297682),
)


@rule("copy", "copy_p", "stop_gradient", "sharding_constraint", "name", "reduce_precision_identity")
def _copy(x: Any, **_: Any) -> Any:
    return x


@rule("optimization_barrier")
def _barrier(*values: Any, **_: Any) -> Any:
    return values


@rule("square")
def _square(x: Any, **_: Any) -> Any:
    return lax.mul(x, x)


@rule("integer_pow")
def _integer_pow(x: Any, y: int, **_: Any) -> Any:
    """Multiply: ONNX Runtime's Pow is slower, and some of its types are missing."""
    if y < 0:
        return lax.div(np.ones((), x.dtype) if np.ndim(x) == 0 else jnp.ones_like(x), _integer_pow(x, -y))
    result, power = None, x
    while y:
        if y & 1:
            result = power if result is None else lax.mul(result, power)
        y >>= 1
        power = lax.mul(power, power) if y else power
    return jnp.ones_like(x) if result is None else result


@rule("pow")
def _pow(x: Any, y: Any, **_: Any) -> Any:
    """Give both operands one type."""
    if jnp.issubdtype(y.dtype, np.integer):
        y = lax.convert_element_type(y, x.dtype)
    return lax.pow_p.bind(x, y)


@rule("add_any")
def _add_any(x: Any, y: Any, **_: Any) -> Any:
    return lax.add(x, y)


@rule("erf_inv")
def _erf_inv(x: Any, **_: Any) -> Any:
    """Evaluate the polynomials of M. Giles, Approximating the erfinv function (2010), as XLA does."""
    wide = x.dtype if x.dtype == np.float64 else np.float32
    value = lax.convert_element_type(x, wide)
    if wide == np.float64:
        raise ExportError("jax2onnx has no translation for erf_inv of float64: draw the noise in float32")
    w = -jnp.log((1 - value) * (1 + value))
    near, far = w - 2.5, jnp.sqrt(w) - 3
    small = _polynomial(
        near,
        _ERF_INV_NEAR,
    )
    large = _polynomial(
        far,
        _ERF_INV_FAR,
    )
    inside = jnp.where(w < 5, small, large) * value
    return lax.convert_element_type(jnp.where(jnp.abs(value) == 1, value * np.inf, inside), x.dtype)


def _polynomial(x: Any, coefficients: tuple[float, ...]) -> Any:
    result = jnp.full_like(x, coefficients[0])
    for coefficient in coefficients[1:]:
        result = result * x + np.asarray(coefficient, x.dtype)
    return result


@rule("cumprod")
def _cumprod(x: Any, axis: int, reverse: bool) -> Any:
    return _running(x, axis, reverse, lax.mul, 1)


@rule("cummax")
def _cummax(x: Any, axis: int, reverse: bool) -> Any:
    return _running(x, axis, reverse, lax.max, _least(x.dtype))


@rule("cummin")
def _cummin(x: Any, axis: int, reverse: bool) -> Any:
    return _running(x, axis, reverse, lax.min, _most(x.dtype))


@rule("cumlogsumexp")
def _cumlogsumexp(x: Any, axis: int, reverse: bool) -> Any:
    return _running(x, axis, reverse, jnp.logaddexp, -np.inf)


def _least(dtype: Any) -> Any:
    return -np.inf if jnp.issubdtype(dtype, np.floating) else np.iinfo(dtype).min


def _most(dtype: Any) -> Any:
    return np.inf if jnp.issubdtype(dtype, np.floating) else np.iinfo(dtype).max


def _running(x: Any, axis: int, reverse: bool, combine: Any, neutral: Any) -> Any:
    """Combine each element with those before it, at distances of 1, 2, 4 and so on (Hillis and Steele, 1986)."""
    size = x.shape[axis]
    if not isinstance(size, int):
        raise ExportError("a running product or maximum goes along the batch: pass dynamic_batch=False")
    distance = 1
    while distance < size:
        kept = (distance, size) if reverse else (0, size - distance)
        part = lax.slice_in_dim(x, *kept, axis=axis)
        filling = jnp.full_like(lax.slice_in_dim(x, 0, distance, axis=axis), neutral)
        shifted = lax.concatenate([part, filling] if reverse else [filling, part], axis)
        x = combine(x, shifted)
        distance *= 2
    return x


# --- unsigned integers: some builds of ONNX Runtime add, multiply and compare signed ones alone -------------------


def _signed(x: Any) -> Any:
    return lax.convert_element_type(x, np.int32)


def _by_signed(name: str, operator: Any) -> None:
    primitive = getattr(lax, f"{name}_p")

    @rule(name)
    def compute(x: Any, y: Any, **params: Any) -> Any:
        if x.dtype != np.uint32:
            return primitive.bind(x, y, **params)
        return lax.convert_element_type(operator(_signed(x), _signed(y)), np.uint32)


for _name, _operator in (("add", lax.add), ("sub", lax.sub), ("mul", lax.mul)):
    _by_signed(_name, _operator)


def _compare(name: str, operator: Any) -> None:
    primitive = getattr(lax, f"{name}_p")

    @rule(name)
    def compute(x: Any, y: Any, **params: Any) -> Any:
        if x.dtype != np.uint32:
            return primitive.bind(x, y, **params)
        half = np.int32(-(2**31))
        return operator(lax.add(_signed(x), half), lax.add(_signed(y), half))


for _name, _operator in (
    ("lt", lax.lt),
    ("le", lax.le),
    ("gt", lax.gt),
    ("ge", lax.ge),
    ("eq", lax.eq),
    ("ne", lax.ne),
):
    _compare(_name, _operator)


@rule("select_n")
def _select_n(which: Any, *cases: Any, **_: Any) -> Any:
    if jax.tree.leaves(cases)[0].dtype == np.uint32:
        signed = [jax.tree.map(_signed, case) for case in cases]
        chosen = jax.tree.map(lambda *words: lax.select_n(which, *words), *signed)
        return jax.tree.map(lambda word: lax.convert_element_type(word, np.uint32), chosen)
    if len(cases) > 2:
        chosen = cases[0]
        for number, case in enumerate(cases[1:], start=1):
            chosen = jnp.where(lax.ge(which, jnp.full_like(which, number)), case, chosen)
        return chosen
    return lax.select_n_p.bind(which, *cases)
