"""Kinds by JAX as people export them, of what carries more: agents, networks against each other, annealed terms."""

from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
import optax

from models.zoo.arrays import layers, normal
from models.zoo.jax.kinds_mixed_models import Parts, begin, derive, glorot, integers, prefixed
from models.zoo.jax.problems import matmul
from models.zoo.steps import PLAIN, STYLES, Arrays, Inputs, Outputs, Step, kind

EXPORTER = STYLES["exporter-names"]


def perceptron(w: Arrays, x: jax.Array, prefix: str, activation: Callable = jax.nn.relu) -> jax.Array:
    """Apply the dense layers whose names have the prefix."""
    index = 1
    while f"{prefix}w{index}" in w:
        x = activation(x) if index > 1 else x
        x = matmul(x, w[f"{prefix}w{index}"]) + w[f"{prefix}b{index}"]
        index += 1
    return x


def bernoulli(target: jax.Array, logits: jax.Array) -> jax.Array:
    """Return the cross-entropy of numbers between 0 and 1."""
    return jax.nn.softplus(logits) - target * logits


@kind("jax-annealed-autoencoder", "jax")
def annealed_autoencoder() -> Iterator[Step]:
    """Yield a variational autoencoder whose divergence is weighed by a counter, or limited by free bits."""

    def loss(w: Arrays, values: Arrays) -> tuple[jax.Array, Parts]:
        mean, spread = jnp.split(perceptron(w, values["pixels"], "encoder_", jax.nn.gelu), 2, -1)
        code = mean + jnp.exp(0.5 * spread) * values["epsilon"]
        rebuilt = jnp.sum(bernoulli(values["pixels"], perceptron(w, code, "decoder_", jax.nn.gelu)), -1)
        each = 0.5 * (jnp.exp(spread) + jnp.square(mean) - 1 - spread)
        if "step" in values:
            beta = jnp.minimum(1.0, (values["step"] + 1) / 50)
            kl, metrics = jnp.mean(jnp.sum(each, -1)), {"beta": beta}
            total = jnp.mean(rebuilt) + beta * kl
        else:
            kl, metrics = jnp.sum(jnp.mean(each, 0)), {"active": jnp.mean((jnp.mean(each, 0) > 0.1) * 1.0)}
            total = jnp.mean(rebuilt) + jnp.sum(jnp.maximum(jnp.mean(each, 0), 0.1))
        return total, ({"reconstruction": jnp.mean(rebuilt), "kl": kl} | metrics, {})

    weights = prefixed("encoder_", layers(15, 24, 10)) | prefixed("decoder_", layers(5, 18, 15))
    batch = {"pixels": (np.random.rand(6, 15) < 0.5).astype(np.float32), "epsilon": normal(6, 5)}
    slots, update = begin(optax.amsgrad(3e-3), weights)

    def annealed(values: Arrays) -> Outputs:
        value, (metrics, _), grads = derive(loss, weights, values)
        moves, moved = update(grads, values)
        states = {name: values[name] + moves[name] for name in weights}
        return Outputs({"loss": value}, metrics, states=states | moved | {"step": values["step"] + 1})

    sums, learn = begin(optax.adagrad(0.05), weights)

    def free_bits(values: Arrays) -> Outputs:
        value, (metrics, _), grads = derive(loss, weights, values)
        moves, moved = learn(grads, values)
        states = {name: values[name] + moves[name] for name in weights}
        states["kl_average"] = 0.95 * values["kl_average"] + 0.05 * metrics["kl"]
        return Outputs({"loss": value}, metrics, states=states | moved)

    yield Step("annealed", Inputs(batch, weights | slots | {"step": np.float32(0)}), annealed, EXPORTER)
    yield Step("free-bits", Inputs(batch, weights | sums | {"kl_average": np.float32(1)}), free_bits)


@kind("jax-dilated-forecaster", "jax")
def dilated_forecaster() -> Iterator[Step]:
    """Yield causal convolutions of a series that is scaled by itself: AdaBelief, or Adam with a fed rate and skips."""
    shape = {"conv0": (4, 12, 1), "conv1": (12, 14, 2), "conv2": (14, 14, 4)}

    def loss(w: Arrays, values: Arrays) -> tuple[jax.Array, Parts]:
        series = values["series"]
        level = jnp.mean(series, 1, keepdims=True)
        size = jnp.std(series, 1, keepdims=True) + 1e-2
        x = (series - level) / size * w["gain"] + w["shift"]
        for name, (_, width, gap) in shape.items():
            past = jnp.pad(x, ((0, 0), (gap, 0), (0, 0)))[:, : x.shape[1]]
            y = jax.nn.relu(x @ w[f"{name}_now"] + past @ w[f"{name}_past"] + w[f"{name}_bias"])
            x = x + y if x.shape[-1] == width else y
        guess = (matmul(x[:, -1], w["head"]) + w["head_bias"]) * size[:, 0] + level[:, 0]
        gap = guess - values["following"]
        metrics = {"mae": jnp.mean(jnp.abs(gap)), "bias": jnp.mean(gap)}
        return jnp.mean(optax.huber_loss(gap / size[:, 0])), (metrics, {})

    weights = {"gain": np.ones(4, np.float32), "shift": np.zeros(4, np.float32)}
    for name, (inputs, outputs, _) in shape.items():
        weights |= {f"{name}_now": glorot(inputs, outputs), f"{name}_past": glorot(inputs, outputs)}
        weights[f"{name}_bias"] = np.zeros(outputs, np.float32)
    weights |= {"head": glorot(14, 4), "head_bias": np.zeros(4, np.float32)}
    batch = {"series": 3 + normal(5, 12, 4), "following": 3 + normal(5, 4)}
    slots, update = begin(optax.adabelief(2e-3), weights)

    def belief(values: Arrays) -> Outputs:
        value, (metrics, _), grads = derive(loss, weights, values)
        moves, moved = update(grads, values)
        return Outputs({"loss": value}, metrics, states={n: values[n] + moves[n] for n in weights} | moved)

    more, improve = begin(optax.scale_by_adam(), weights)

    def careful(values: Arrays) -> Outputs:
        value, (metrics, _), grads = derive(loss, weights, values)
        norm = optax.global_norm(grads)
        usual = norm < 5 * values["typical_norm"]
        moves, moved = improve(grads, values)
        states = {name: values[name] - values["rate"] * moves[name] for name in weights} | moved
        states = {name: jnp.where(usual, new, values[name]) for name, new in states.items()}
        kept = {"typical_norm": 0.98 * values["typical_norm"] + 0.02 * norm}
        kept["skipped"] = values["skipped"] + jnp.where(usual, 0, 1)
        return Outputs({"loss": value}, metrics | {"grad_norm": norm}, states=states, kept=kept)

    yield Step("adabelief", Inputs(batch, weights | slots), belief)
    carried = {"typical_norm": np.float32(1), "skipped": np.int32(0)}
    inputs = Inputs(batch, weights | more | carried, {"rate": np.float32(2e-3)})
    yield Step("careful-adam", inputs, careful, STYLES["exporter-names"])


@kind("jax-duelling-values", "jax")
def duelling_values() -> Iterator[Step]:
    """Yield double Q-learning with priorities as an output; the target is copied now and then, or follows slowly."""

    def value_of(w: Arrays, x: jax.Array, prefix: str = "") -> jax.Array:
        x = jax.nn.relu(matmul(x, w[f"{prefix}trunk1"]) + w[f"{prefix}trunk1_bias"])
        x = jax.nn.relu(matmul(x, w[f"{prefix}trunk2"]) + w[f"{prefix}trunk2_bias"])
        better = matmul(x, w[f"{prefix}advantage"])
        return matmul(x, w[f"{prefix}value"]) + better - jnp.mean(better, -1, keepdims=True)

    def loss(w: Arrays, values: Arrays) -> tuple[jax.Array, Parts]:
        choice = jnp.argmax(jax.lax.stop_gradient(value_of(w, values["next_state"])), -1)
        ahead = jnp.sum(jax.nn.one_hot(choice, 4) * value_of(values, values["next_state"], "target_"), -1)
        wanted = values["reward"] + 0.97 * values["not_done"] * ahead
        q = jnp.sum(jax.nn.one_hot(values["action"], 4) * value_of(w, values["state"]), -1)
        error = q - jax.lax.stop_gradient(wanted)
        metrics = {"priorities": jnp.abs(error) + 1e-3, "mean_q": jnp.mean(q), "mean_target": jnp.mean(wanted)}
        return jnp.mean(values["importance"] * optax.huber_loss(error)), (metrics, {})

    weights = {"trunk1": glorot(6, 24), "trunk1_bias": np.zeros(24, np.float32), "trunk2": glorot(24, 16)}
    weights |= {"trunk2_bias": np.zeros(16, np.float32), "advantage": glorot(16, 4), "value": glorot(16, 1)}
    batch = {"state": normal(8, 6), "next_state": normal(8, 6), "action": integers(4, 8), "reward": normal(8)}
    batch |= {"not_done": np.array([1, 1, 0, 1, 1, 1, 0, 1], np.float32)}
    batch["importance"] = np.random.rand(8).astype(np.float32)
    both = {
        "copied": optax.chain(optax.clip_by_global_norm(10.0), optax.adam(1e-3)),
        "followed": optax.rmsprop(1e-3, 0.95, 1e-4, centered=True),
    }
    for variant, optimizer in both.items():
        slots, update = begin(optimizer, weights)

        def run(values: Arrays, variant: str = variant, update: Callable = update) -> Outputs:
            value, (metrics, _), grads = derive(loss, weights, values)
            moves, moved = update(grads, values)
            states = {name: values[name] + moves[name] for name in weights}
            if variant == "copied":
                step = values["step"] + 1
                held = {n: jnp.where(step % 4 == 0, states[n], values[f"target_{n}"]) for n in weights}
                moved["step"] = step
            else:
                held = {n: optax.incremental_update(states[n], values[f"target_{n}"], 0.005) for n in weights}
            return Outputs({"loss": value}, metrics, states=states | moved | prefixed("target_", held))

        targets = prefixed("target_", {name: 0.9 * weight for name, weight in weights.items()})
        states = weights | slots | targets | ({"step": np.int32(0)} if variant == "copied" else {})
        yield Step(variant, Inputs(batch, states), run, PLAIN if variant == "copied" else STYLES["initializers"])


@kind("jax-normalised-control", "jax")
def normalised_control() -> Iterator[Step]:
    """Yield PPO of continuous actions: observations and returns by running statistics, rates annealed or fed."""

    def loss(w: Arrays, values: Arrays) -> tuple[jax.Array, Parts]:
        seen, count = values["observation"], values["obs_count"]
        total, gap = count + 10.0, jnp.mean(seen, 0) - values["obs_mean"]
        mean = values["obs_mean"] + gap * 10.0 / total
        variance = (values["obs_var"] * count + jnp.var(seen, 0) * 10.0 + gap**2 * count * 10.0 / total) / total
        spread = 0.95 * values["return_var"] + 0.05 * jnp.var(values["returns"])
        x = jnp.clip((seen - mean) * jax.lax.rsqrt(variance + 1e-4), -5.0, 5.0)
        action, size = perceptron(w, x, "actor_", jnp.tanh), w["log_std"]
        logp = -jnp.sum(0.5 * jnp.square((values["action"] - action) / jnp.exp(size)) + size, -1)
        change = logp - values["old_logp"]
        ratio, limit = jnp.exp(change), values["clip_range"]
        advantage = (values["advantage"] - jnp.mean(values["advantage"])) / (jnp.std(values["advantage"]) + 1e-6)
        policy = -jnp.mean(jnp.minimum(ratio * advantage, jnp.clip(ratio, 1 - limit, 1 + limit) * advantage))
        wanted, guess = values["returns"] * jax.lax.rsqrt(spread), perceptron(w, x, "critic_", jnp.tanh)[:, 0]
        value, entropy = 0.5 * jnp.mean(jnp.square(guess - wanted)), jnp.sum(size + 1.419)
        metrics = {"policy_loss": policy, "value_loss": value, "entropy": entropy}
        metrics |= {"approx_kl": jnp.mean(ratio - 1 - change)}
        metrics |= {"clip_fraction": jnp.mean((jnp.abs(ratio - 1) > limit) * 1.0)}
        metrics["explained_variance"] = 1 - jnp.var(wanted - guess) / (jnp.var(wanted) + 1e-6)
        stats = {"obs_mean": mean, "obs_var": variance, "obs_count": total, "return_var": spread}
        return policy + 0.5 * value - 0.01 * entropy, (metrics, stats)

    weights = prefixed("actor_", layers(5, 20, 14, 2)) | prefixed("critic_", layers(5, 22, 1))
    weights["log_std"] = np.full(2, -0.5, np.float32)
    stats = {"obs_mean": np.zeros(5, np.float32), "obs_var": np.ones(5, np.float32), "obs_count": np.float32(1)}
    stats["return_var"] = np.float32(1)
    batch = {"observation": normal(10, 5), "action": normal(10, 2), "old_logp": -1.5 + normal(10, scale=0.2)}
    batch |= {"advantage": normal(10), "returns": normal(10, scale=3.0)}
    chain = optax.chain(optax.clip_by_global_norm(0.5), optax.scale_by_adam(eps=1e-5))
    slots, update = begin(chain, weights)
    for variant, style in {"annealed": PLAIN, "fed": EXPORTER}.items():

        def run(values: Arrays, fed: bool = variant == "fed") -> Outputs:
            value, (metrics, following), grads = derive(loss, weights, values)
            moves, moved = update(grads, values)
            rate = values["rate"] if fed else 3e-3 * jnp.maximum(0.0, 1 - values["updates"] / 200)
            states = {name: values[name] - rate * moves[name] for name in weights} | moved | following
            if not fed:
                metrics, states["updates"] = metrics | {"learning_rate": rate}, values["updates"] + 1
            return Outputs({"loss": value}, metrics, states=states)

        carried = {} if variant == "fed" else {"updates": np.float32(0)}
        rates = {"clip_range": np.float32(0.2)} | ({"rate": np.float32(1e-3)} if variant == "fed" else {})
        yield Step(variant, Inputs(batch, weights | slots | stats | carried, rates), run, style)


@kind("jax-conditional-adversaries", "jax")
def conditional_adversaries() -> Iterator[Step]:
    """Yield a generator and a critic of labelled rows, each with its loss and its optimizer; an average generator."""

    def made(w: Arrays, values: Arrays) -> jax.Array:
        given = jnp.concatenate([values["z"], jax.nn.one_hot(values["label"], 3)], -1)
        return perceptron(w, given, "gen_", jax.nn.leaky_relu)

    def score(w: Arrays, rows: jax.Array, values: Arrays) -> jax.Array:
        given = jnp.concatenate([rows, jax.nn.one_hot(values["label"], 3)], -1)
        return perceptron(w, given, "critic_", jax.nn.leaky_relu)[:, 0]

    def critic_loss(w: Arrays, values: Arrays) -> tuple[jax.Array, Parts]:
        real, fake = score(w, values["real"], values), score(w, made(values, values), values)
        metrics = {"real_score": jnp.mean(real), "fake_score": jnp.mean(fake)}
        if "hinge" in values:
            value = jnp.mean(jax.nn.relu(values["hinge"] - real)) + jnp.mean(jax.nn.relu(values["hinge"] + fake))
        else:
            value = jnp.mean(fake) - jnp.mean(real)
        return value, (metrics, {})

    def generator_loss(w: Arrays, values: Arrays) -> tuple[jax.Array, Parts]:
        return -jnp.mean(score(values, made(w, values), values)), ({}, {})

    generator = prefixed("gen_", layers(9, 20, 16, 8))
    critic = prefixed("critic_", layers(11, 18, 12, 1))
    batch = {"real": normal(7, 8), "z": normal(7, 6), "label": integers(3, 7)}
    both = {"hinge": optax.adam(2e-3, b1=0.5), "clipped-critic": optax.rmsprop(1e-3)}
    for variant, optimizer in both.items():
        left, move_generator = begin(optimizer, generator, "gen_opt_")
        right, move_critic = begin(optimizer, critic, "critic_opt_")

        def run(
            values: Arrays,
            clip: bool = variant != "hinge",
            move_generator: Callable = move_generator,
            move_critic: Callable = move_critic,
        ) -> Outputs:
            lower, (metrics, _), grads = derive(critic_loss, critic, values)
            moves, moved = move_critic(grads, values)
            states = {name: values[name] + moves[name] for name in critic}
            states = {name: jnp.clip(new, -0.3, 0.3) for name, new in states.items()} if clip else states
            upper, _, grads = derive(generator_loss, generator, values)
            moves, more = move_generator(grads, values)
            states |= {name: values[name] + moves[name] for name in generator}
            states |= {f"ema_{n}": 0.995 * values[f"ema_{n}"] + 0.005 * states[n] for n in generator}
            losses = {"critic_loss": lower, "generator_loss": upper}
            return Outputs(losses, metrics, states=states | moved | more)

        rates = {"hinge": np.float32(1)} if variant == "hinge" else {}
        states = generator | critic | left | right | prefixed("ema_", generator)
        yield Step(variant, Inputs(batch, states, rates), run, EXPORTER if rates else STYLES["overridable"])
