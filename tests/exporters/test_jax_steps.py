"""Training steps of JAX as files: they compute what JAX computes, scale without a hint, and load back."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx
import pytest

import graphscale as gs
from tests.conftest import Arrays

jax = pytest.importorskip("jax", reason="needs jax")
pytest.importorskip("jax2onnx", reason="needs jax2onnx")
optax = pytest.importorskip("optax", reason="needs optax")

import jax.numpy as jnp  # noqa: E402
from jax import lax  # noqa: E402

from graphscale.errors import ExportError  # noqa: E402
from graphscale.exporters.jax import export_step, load_weights, rewriting  # noqa: E402

pytestmark = [pytest.mark.jax]

RNG = np.random.default_rng(0)
ADAM = optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(optax.cosine_decay_schedule(1e-2, 50)))


def real(*shape: int, scale: float = 0.5) -> np.ndarray[Any, Any]:
    return (scale * RNG.normal(size=shape)).astype(np.float32)


class TrainState(NamedTuple):
    step: Any
    params: Any
    opt_state: Any


def cross_entropy(logits: Any, labels: Any) -> Any:
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def dense(params: Any, x: Any) -> Any:
    hidden = jax.nn.gelu(x @ params["first"]["kernel"] + params["first"]["bias"])
    return hidden @ params["second"]["kernel"]


PARAMS = {"first": {"kernel": real(6, 8), "bias": np.zeros(8, np.float32)}, "second": {"kernel": real(8, 4)}}
BATCH = {"x": real(5, 6), "label": np.array([0, 3, 2, 2, 1], np.int32)}


@jax.jit
def train(state: TrainState, batch: Arrays) -> tuple[TrainState, Any]:
    def loss_of(params: Any) -> tuple[Any, Any]:
        logits = dense(params, batch["x"])
        return cross_entropy(logits, batch["label"]), (logits.argmax(-1) == batch["label"]).mean()

    (loss, accuracy), gradients = jax.value_and_grad(loss_of, has_aux=True)(state.params)
    updates, moments = ADAM.update(gradients, state.opt_state, state.params)
    following = TrainState(state.step + 1, optax.apply_updates(state.params, updates), moments)
    return following, {"loss": loss, "accuracy": accuracy}


def start() -> TrainState:
    return TrainState(0, PARAMS, ADAM.init(PARAMS))


def sgd(loss_of: Any, params: Any) -> Any:
    """A step of plain gradient descent."""

    def step(params: Any, batch: Any) -> Any:
        loss, gradients = jax.value_and_grad(loss_of)(params, batch)
        return jax.tree.map(lambda w, g: w - 0.1 * g, params, gradients), loss

    return step, params


def test_a_step_is_exported_scaled_verified_trained_and_loaded_back(tmp_path: Path) -> None:
    path, scaled = tmp_path / "step.onnx", tmp_path / "scaled.onnx"
    report = export_step(train, start(), BATCH, path)
    assert report.inputs == ("label", "x") and report.notes == () and report.largest_error < 1e-5
    assert "within" in str(report) and report.framework.startswith("JAX")
    model = onnx.load(path)
    names = {value.name for value in model.graph.initializer}
    assert {"step", "params.first.kernel", "opt_state.mu.first.bias", "opt_state.1.0.count"} <= names
    assert [value.name for value in model.graph.output][:3] == ["accuracy", "loss", "step.next"]
    assert {node.op_type for node in model.graph.node} & {"MatMul"} and "Gemm" not in {
        n.op_type for n in model.graph.node
    }

    gs.scale(path, gs.DynamicLossScale(256.0)).save(scaled)
    assert gs.verify(path, scaled).ok
    session, state = gs.Session(scaled), start()
    for count in (5, 5, 9, 2):  # a batch of any length
        rows = np.arange(count) % 5
        batch = {name: value[rows] for name, value in BATCH.items()}
        result, (state, expected) = session.step(batch), train(state, batch)
        np.testing.assert_allclose(result["loss"], expected["loss"], rtol=1e-4)
        np.testing.assert_allclose(result["accuracy"], expected["accuracy"])
    session.save_state(tmp_path / "trained.safetensors")
    for source in (session, session.state_dict(), tmp_path / "trained.safetensors"):
        back = load_weights(source, start())
        assert isinstance(back, TrainState) and back.step == 4
        for ours, theirs in zip(jax.tree.leaves(back), jax.tree.leaves(state), strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-3, atol=1e-5)


def conv_net(params: Any, batch: Any) -> Any:
    numbers = ("NHWC", "HWIO", "NHWC")
    x = jax.nn.relu(lax.conv_general_dilated(batch["image"], params["conv"], (1, 1), "SAME", dimension_numbers=numbers))
    x = lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
    return cross_entropy(x.reshape(x.shape[0], -1) @ params["out"], batch["label"])


def language_model(params: Any, batch: Any) -> Any:
    tokens = batch["tokens"]
    x = params["embedding"][tokens[:, :-1]]
    heads = (x @ params["qkv"]).reshape(*x.shape[:2], 3, 2, 4)
    x = x + jax.nn.dot_product_attention(*jnp.moveaxis(heads, 2, 0), is_causal=True).reshape(x.shape)
    return cross_entropy(x @ params["embedding"].T, tokens[:, 1:])


def recurrent(params: Any, batch: Any) -> Any:
    def cell(hidden: Any, x: Any) -> Any:
        hidden = jnp.tanh(x @ params["wx"] + hidden @ params["wh"])
        return hidden, hidden

    hidden, _ = lax.scan(cell, jnp.zeros((batch["x"].shape[0], 5)), batch["x"].swapaxes(0, 1))
    return jnp.mean((hidden - batch["y"]) ** 2)


def in_halves(params: Any, batch: Any) -> Any:
    halves = jax.tree.map(lambda w: w.astype(jnp.float16), params)
    return cross_entropy(dense(halves, batch["x"].astype(jnp.float16)).astype(jnp.float32), batch["label"])


def recurrent_in_halves(params: Any, batch: Any) -> Any:
    halves = jax.tree.map(lambda w: w.astype(jnp.float16), params)
    x = batch["x"].astype(jnp.float16)

    def cell(hidden: Any, x: Any) -> Any:
        hidden = jnp.tanh(x @ halves["wx"] + hidden @ halves["wh"])
        return hidden, hidden

    hidden, _ = lax.scan(cell, jnp.zeros((x.shape[0], 5), jnp.float16), x.swapaxes(0, 1))
    return jnp.mean((hidden.astype(jnp.float32) - batch["y"]) ** 2)


STEPS = {
    "conv_net": (
        *sgd(conv_net, {"conv": real(3, 3, 2, 4), "out": real(36, 3)}),
        {"image": real(3, 6, 6, 2), "label": np.array([0, 2, 1], np.int32)},
    ),
    "language_model": (
        *sgd(language_model, {"embedding": real(9, 8), "qkv": real(8, 24)}),
        {"tokens": RNG.integers(0, 9, (3, 6), dtype=np.int32)},
    ),
    "recurrent": (*sgd(recurrent, {"wx": real(3, 5), "wh": real(5, 5)}), {"x": real(4, 12, 3), "y": real(4, 5)}),
    "in_halves": (*sgd(in_halves, PARAMS), BATCH),
    "recurrent_in_halves": (
        *sgd(recurrent_in_halves, {"wx": real(3, 5), "wh": real(5, 5)}),
        {"x": real(4, 40, 3), "y": real(4, 5)},
    ),
}


@pytest.mark.parametrize("name", STEPS)
def test_steps_scale_without_a_hint(name: str, tmp_path: Path) -> None:
    step, state, batch = STEPS[name]
    path, scaled = tmp_path / "step.onnx", tmp_path / "scaled.onnx"
    report = export_step(step, state, batch, path)
    if "halves" in name:
        assert not any("length" in note for note in report.notes), "the batch has any length"
    else:
        assert not report.notes
    gs.scale(path, gs.FixedLossScale(128.0)).save(scaled)
    session, run = gs.Session(scaled), jax.jit(step)
    for _ in range(3):
        result = session.step(batch)
        state, loss = run(state, batch)
        np.testing.assert_allclose(result["loss"], loss, rtol=1e-2 if "halves" in name else 1e-4)
        assert result.applied
    if "recurrent" in name:
        assert {node.op_type for node in onnx.load(path).graph.node} & {"Scan", "Loop"}


def test_random_keys_and_a_fed_learning_rate(tmp_path: Path) -> None:
    """Dropout draws JAX's masks, a new one in each step."""

    def step(state: Any, batch: Any, learning_rate: Any) -> Any:
        key, here = jax.random.split(state["key"])

        def loss_of(w: Any) -> Any:
            kept = jax.random.bernoulli(here, 0.5, batch.shape)
            return jnp.mean((jnp.where(kept, 2 * batch, 0) @ w - 1) ** 2)

        loss, gradient = jax.value_and_grad(loss_of)(state["w"])
        return {"w": state["w"] - learning_rate * gradient, "key": key}, loss

    first = {"w": real(6, 2), "key": jax.random.key(3)}
    path = tmp_path / "step.onnx"
    report = export_step(step, first, BATCH["x"], path, hyperparameters={"learning_rate": 0.1})
    assert report.inputs == ("batch", "learning_rate")
    gs.scale(path, gs.FixedLossScale(8.0)).save(tmp_path / "scaled.onnx")
    session, state, seen = gs.Session(tmp_path / "scaled.onnx"), first, []
    for rate in (0.1, 0.05, 0.0):
        seen.append(float(session.step({"batch": BATCH["x"], "learning_rate": np.float32(rate)})["loss"]))
        state, loss = step(state, BATCH["x"], rate)
        np.testing.assert_allclose(seen[-1], loss, rtol=1e-4)
    assert len(set(seen)) == 3
    back = load_weights(session, first)
    assert (jax.random.key_data(back["key"]) == jax.random.key_data(state["key"])).all()


def plain(state: Any, batch: Any) -> Any:
    loss, gradient = jax.value_and_grad(lambda w: jnp.mean((batch @ w) ** 2))(state)
    return state - 0.1 * gradient, loss


def change_shape(state: Any, batch: Any) -> Any:
    return state[:3], plain(state, batch)[1]


def transform(state: Any, batch: Any) -> Any:
    return state, jnp.abs(jnp.fft.fft(batch @ state)).mean()


def attend(state: Any, batch: Any) -> Any:
    """Attention in float16, which JAX has for some GPUs alone."""
    heads = (batch @ state).astype(jnp.float16).reshape(1, -1, 1, 3)
    return state, jax.nn.dot_product_attention(heads, heads, heads).sum().astype(jnp.float32)


W = real(6, 3)
REFUSED = {
    "order": (lambda s, b: plain(s, b)[::-1], W, {}, r"return \(new state, loss\)"),
    "alone": (lambda s, b: plain(s, b)[0], W, {}, r"must return \(new state, loss\)"),
    "shape": (change_shape, W, {}, r"its next value is float32\[3, 3\]: a state keeps its type and shape"),
    "structure": (lambda s, b: ({"w": s}, b.sum()), W, {}, "another structure"),
    "vector": (lambda s, b: (s, b.sum(0)), W, {}, r"loss is float32\[6\]: a loss is one floating-point number"),
    "name": (lambda s, b: (s, {"total": b.sum()}), W, {}, "no loss 'loss', but total: name its losses"),
    "double": (
        lambda s, b: (s, {"loss": b.sum()}),
        {"loss": W},
        {},
        "two inputs or outputs of the step are named 'loss'",
    ),
    "python": (lambda s, b: (s, float(b.sum())), W, {}, "the step function fails: ConcretizationTypeError"),
    "primitive": (transform, W, {"dynamic_batch": False}, "no translation for fft, a primitive of the step"),
    "type": (
        lambda s, b: (s, (b.astype(jnp.bfloat16) @ s.astype(jnp.bfloat16)).sum().astype(jnp.float32)),
        *(W, {"dynamic_batch": False}, "the step computes in bfloat16"),
    ),
    "algorithm": (
        attend,
        W,
        {"dynamic_batch": False},
        "JAX cannot run the step on cpu: ValueError: The precision 'F16",
    ),
    "rows": (plain, W, {"dynamic_batch": ["y"]}, "dynamic_batch: 'y' is no array of the batch with an axis: batch"),
    "empty": (lambda s, b: ({}, b.sum()), {}, {}, "the state has no arrays"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals_are_one_line(name: str, tmp_path: Path) -> None:
    step, state, options, message = REFUSED[name]
    with pytest.raises(ExportError, match=message) as raised:
        export_step(step, state, BATCH["x"], tmp_path / "step.onnx", **options)
    assert "\n" not in str(raised.value)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("transform", [lambda step: step, jax.jit])
def test_python_values_that_a_step_changes_get_a_note(transform: Any, tmp_path: Path) -> None:
    calls = 0

    def step(w: Any, batch: Any) -> Any:
        nonlocal calls
        calls += 1
        loss, gradient = jax.value_and_grad(lambda w: jnp.mean((batch @ w) ** 2))(w)
        return w - (0.1 if calls < 1000 else 0.01) * gradient, loss

    (note,) = export_step(transform(step), W, BATCH["x"], tmp_path / "step.onnx").notes
    assert note == "each call changes calls in Python; the graph keeps the decisions that the export made by them"


def test_a_batch_of_a_fixed_length_is_noted_or_refused(tmp_path: Path) -> None:
    def step(w: Any, batch: Any) -> Any:
        loss, gradient = jax.value_and_grad(lambda w: jnp.mean((batch.reshape(5, -1) @ w) ** 2))(w)
        return w - gradient, loss

    (note,) = export_step(step, W, BATCH["x"], tmp_path / "step.onnx").notes
    assert note.startswith("the length of the batch is fixed, as by dynamic_batch=False: JAX cannot trace the step")
    assert "; pass" not in note
    with pytest.raises(ExportError, match="pass dynamic_batch=False"):
        export_step(step, W, BATCH["x"], tmp_path / "other.onnx", dynamic_batch=True)


def test_indices_out_of_range_do_what_they_do_in_jax(tmp_path: Path) -> None:
    def loss_of(params: Any, batch: Any) -> Any:
        taken = jnp.take(params["table"], batch["take"], axis=0)
        return cross_entropy((params["table"][batch["word"]] + taken) @ params["head"], batch["label"])

    params = {"table": real(11, 4), "head": real(4, 5)}
    batch = {name: np.arange(5, dtype=np.int32) for name in ("word", "take", "label")}
    step, _ = sgd(loss_of, params)
    export_step(step, params, batch, tmp_path / "step.onnx", dynamic_batch=False)
    scaled = gs.scale(tmp_path / "step.onnx", loss_scale=1)
    for name, number in itertools.product(batch, (-1, -12, 11, 100)):
        changed = batch | {name: batch[name].copy()}
        changed[name][0] = number
        following, loss = jax.jit(step)(params, changed)
        with gs.Session(scaled) as session:
            np.testing.assert_allclose(session.step(changed)["loss"], loss, 1e-5, err_msg=f"{name} {number}")
            found = session.state_dict()
        for key, value in following.items():
            np.testing.assert_allclose(found[key], value, 1e-5, 1e-6, err_msg=f"{name} {number}")


def test_a_wrong_file_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "step.onnx"
    path.write_text("before")
    monkeypatch.setitem(rewriting._RULES, "tanh", lambda x, **_: lax.sin(x))
    step, state = sgd(lambda w, x: jnp.mean(jnp.tanh(x @ w) ** 2), W)
    with pytest.raises(ExportError, match="computes another loss than JAX in step 1"):
        export_step(step, state, BATCH["x"], path)
    assert path.read_text() == "before"


def test_load_weights_wants_every_value() -> None:
    values = {"params.w": W, "count": np.int32(3)}
    back = load_weights(values, {"params": {"w": np.zeros_like(W)}, "count": 0})
    assert back["count"] == 3 and (back["params"]["w"] == W).all()
    with pytest.raises(ExportError, match=r"the state has no trained value of 'params\.b' \(1 of 2 .*'count'"):
        load_weights(values, {"params": {"w": W, "b": W}})
    with pytest.raises(ExportError, match=r"of 'count', 'w' \(2 of 2 .* but of 'params\.w', 'steps'"):
        load_weights({"params.w": W, "steps": np.int32(3)}, {"w": W, "count": 0})
    with pytest.raises(ExportError, match=r"'params.w' is float32\[6, 3\], in the state float32\[3, 6\]"):
        load_weights(values, {"params": {"w": W.T}})
    with pytest.raises(ExportError, match="pass a session"):
        load_weights(3, W)


def test_double_precision(tmp_path: Path) -> None:
    with jax.enable_x64(True):
        step, state = sgd(lambda w, x: jnp.mean(jnp.tanh(x @ w) ** 2), W.astype(np.float64))
        report = export_step(step, state, BATCH["x"].astype(np.float64), tmp_path / "step.onnx")
    assert report.largest_error < 1e-12


def test_functions_in_the_state_stay_and_large_states_get_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def step(state: Any, batch: Any) -> Any:
        def loss_of(w: Any) -> Any:
            return jnp.mean(state["model"][1](batch["inputs"][0] @ w) ** 2)

        loss, gradient = jax.value_and_grad(loss_of)(state["model"][0])
        return (
            {"model": (state["model"][0] - state["rate"] * gradient, *state["model"][1:]), "rate": 0.1},
            loss,
            loss / 2,
        )

    first = {"model": (real(6, 300), jnp.tanh, "a text"), "rate": 0.1}
    monkeypatch.setattr("graphscale.files.saving._LARGEST", 50)
    report = export_step(step, first, {"inputs": (BATCH["x"].astype(np.float64),)}, tmp_path / "step.onnx")
    assert report.inputs == ("inputs",) and report.states == 1
    assert report.notes == ("feed inputs as float32: JAX makes that of float64",)
    assert (tmp_path / "step.onnx.data").stat().st_size >= 6 * 300 * 4
    model = onnx.load(tmp_path / "step.onnx")
    assert [value.name for value in model.graph.output] == ["loss", "metric", "model.next"]
    gs.scale(tmp_path / "step.onnx").save(tmp_path / "scaled.onnx")
    session = gs.Session(tmp_path / "scaled.onnx")
    session.step({"inputs": BATCH["x"]})
    back = load_weights(session, first)
    assert back["model"][1:] == (jnp.tanh, "a text") and back["rate"] == 0.1
    np.testing.assert_allclose(back["model"][0], step(first, {"inputs": (BATCH["x"],)})[0]["model"][0], rtol=1e-4)
