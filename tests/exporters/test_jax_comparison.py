"""The comparison of an exported step with JAX: right steps pass, wrong ones are refused."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.conftest import Arrays

jax = pytest.importorskip("jax", reason="needs jax")
pytest.importorskip("jax2onnx", reason="needs jax2onnx")
optax = pytest.importorskip("optax", reason="needs optax")

import jax.numpy as jnp  # noqa: E402
from jax import lax  # noqa: E402
from jax.extend.core import jaxpr_as_fun  # noqa: E402

from graphscale.errors import ExportError  # noqa: E402
from graphscale.exporters.jax import export_step, rewriting, step_comparison  # noqa: E402

pytestmark = [pytest.mark.jax]

RNG = np.random.default_rng(0)
X, W = (RNG.normal(size=shape).astype(np.float32) for shape in ((5, 6), (6, 3)))


NEXT = [f"{kind}{name}.next" for kind in ("", "mu.", "nu.") for name in ("b1", "b2", "w1", "w2")]


def adam_in_halves() -> tuple[Any, Any, Arrays]:
    """A step whose gradients hold some numbers near zero, which float16 rounds to another sign."""
    optimizer, rng = optax.adam(1e-2), np.random.default_rng(5)

    def loss_of(params: Any, batch: Any) -> Any:
        halves = jax.tree.map(lambda w: w.astype(jnp.float16), params)
        hidden = jnp.tanh(batch["x"].astype(jnp.float16) @ halves["w1"] + halves["b1"])
        logits = (hidden @ halves["w2"] + halves["b2"]).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()

    def step(state: Any, batch: Any) -> Any:
        loss, gradients = jax.value_and_grad(loss_of)(state[0], batch)
        updates, moments = optimizer.update(gradients, state[1], state[0])
        return (optax.apply_updates(state[0], updates), moments), loss

    w1, w2 = (rng.normal(size=(16, 32), scale=0.25), rng.normal(size=(32, 10), scale=0.18))
    params = {"w1": w1, "b1": np.zeros(32), "w2": w2, "b2": np.zeros(10)}
    params = {name: value.astype(np.float32) for name, value in params.items()}
    batch = {"x": rng.normal(size=(8, 16)).astype(np.float32), "label": rng.integers(0, 10, 8, dtype=np.int32)}
    return step, (params, optimizer.init(params)), batch


def test_rounding_that_adam_magnifies_is_no_difference(tmp_path: Path) -> None:
    report = export_step(*adam_in_halves(), tmp_path / "step.onnx", dynamic_batch=False)
    found = re.fullmatch("with float32 in place of float16, .* are within (.*) of each other", report.notes[-1])
    assert found and float(found[1]) < 1e-5
    assert report.notes[0] == "decided by rounding, in JAX as well: 1 of 512 numbers of w1.next"
    assert set(report.errors) == {"loss", "count.next", *NEXT} - {"w1.next"}


def test_a_mistake_smaller_than_the_rounding_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rule = lambda x, **_: (lax.tanh(x).astype(np.float32) * np.float32(1.0003)).astype(x.dtype)  # noqa: E731
    monkeypatch.setitem(rewriting._RULES, "tanh", rule)
    with pytest.raises(ExportError, match="computes another"):
        export_step(*adam_in_halves(), tmp_path / "step.onnx", dynamic_batch=False)
    assert not list(tmp_path.iterdir())


def descend(state: Any, x: Any) -> Any:
    """A step with the best loss so far, which is infinite at first."""

    def loss_of(w: Any) -> Any:
        return jnp.mean(jnp.tanh(x @ w) ** 2)

    loss, gradient = jax.value_and_grad(loss_of)(state["w"])
    return {"w": state["w"] - 0.1 * gradient, "best": jnp.minimum(state["best"], loss), "least": state["least"]}, loss


FIRST = {"w": W, "best": np.float32(np.inf), "least": np.array([-np.inf, 0], np.float32)}


def test_states_that_are_infinite_from_the_start(tmp_path: Path) -> None:
    report = export_step(descend, FIRST, X, tmp_path / "step.onnx")
    assert report.largest_error < 1e-5 and set(report.errors) == {"loss", "w.next", "best.next", "least.next"}


def divide(state: Any, x: Any) -> Any:
    return state / x.sum(), (x @ state).mean()


@pytest.mark.parametrize(
    ("step", "state", "x", "message"),
    [
        (
            descend,
            FIRST,
            X * np.float32(np.nan),
            "step 1 makes loss infinite or NaN on the example batch; pass",
        ),
        (divide, W, 0 * X, r"step 1 makes state\.next infinite or NaN"),
    ],
)
def test_a_batch_that_gives_nan_is_refused(step: Any, state: Any, x: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=f"JAX's own {message}"):
        export_step(step, state, x, tmp_path / "step.onnx", dynamic_batch=False)
    assert not list(tmp_path.iterdir())


def spoil(widen: Callable[..., Any]) -> Callable[..., Any]:
    """Return a wrong replacement of types: all arrays are one too large."""

    def widen_wrong(closed: Any, *arguments: Any) -> Any:
        wide = widen(closed, *arguments)
        return jax.make_jaxpr(lambda *v: [x + 1 if x.ndim else x for x in jaxpr_as_fun(wide)(*v)])(*wide.in_avals)

    return widen_wrong


@pytest.mark.parametrize("half", [False, True])
def test_a_wrong_replacement_of_types_excuses_no_wrong_rule(
    half: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_comparison, "widen_jaxpr", spoil(step_comparison.widen_jaxpr))
    monkeypatch.setitem(rewriting._RULES, "sub", lambda x, y, **_: lax.sub_p.bind(x, 1.5 * y))

    def step(w: Any, x: Any) -> Any:
        x = x.astype(jnp.float16) if half else x
        loss, gradient = jax.value_and_grad(lambda w: jnp.mean((x @ w.astype(x.dtype)) ** 2))(w)
        return w - 0.1 * gradient, loss.astype(jnp.float32)

    with pytest.raises(ExportError, match=r"another state\.next than JAX in step 1"):
        export_step(step, W, X, tmp_path / "step.onnx", dynamic_batch=False)


def nearly_fitted(state: Any, x: Any) -> Any:
    """A step whose loss is the rounding of its numbers."""

    def loss_of(w: Any) -> Any:
        return jnp.mean((x["x"] @ w - x["y"]) ** 2)

    loss, gradient = jax.value_and_grad(loss_of)(state)
    return state - 1e-3 * gradient, loss


def test_a_step_of_nothing_but_noise_is_refused(tmp_path: Path) -> None:
    x = RNG.normal(size=(5, 999)).astype(np.float32)
    w = RNG.normal(size=(999, 3)).astype(np.float32)
    batch = {"x": x, "y": np.asarray(jnp.asarray(x) @ w) * np.float32(1 + 2e-7)}
    with pytest.raises(ExportError, match="rounding decides all numbers that the step computes"):
        export_step(nearly_fitted, w, batch, tmp_path / "step.onnx", dynamic_batch=False)
    assert not list(tmp_path.iterdir())


def test_a_step_that_float32_cannot_compute_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> Any:
        raise TypeError("square does not accept\nfloat32")

    monkeypatch.setattr(step_comparison, "widen_jaxpr", refuse)
    with pytest.raises(ExportError, match="with float32 in place of float16, for a comparison: TypeError: square") as e:
        export_step(*adam_in_halves(), tmp_path / "step.onnx", dynamic_batch=False)
    assert "\n" not in str(e.value) and not list(tmp_path.iterdir())
