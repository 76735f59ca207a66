"""Kinds from laboratories by JAX: batteries, galaxies, proteins, topics, loans, springs."""

from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from models.zoo.arrays import normal
from models.zoo.jax.problems import matmul
from models.zoo.jax.training import named_leaves
from models.zoo.steps import PLAIN, Arrays, Inputs, Outputs, Step, Style, kind

Tree = dict[str, Any]
Objective = Callable[[Tree, Arrays], tuple[jax.Array, tuple[Arrays, Arrays]]]


def dense(rows: int, columns: int) -> Tree:
    return {"kernel": normal(rows, columns, scale=rows**-0.5), "bias": normal(columns, scale=0.02)}


def through(layer: Tree, x: jax.Array) -> jax.Array:
    return matmul(x, layer["kernel"]) + layer["bias"]


def onehot(index: jax.Array, count: int) -> jax.Array:
    return (index[..., None] == jnp.arange(count, dtype=index.dtype)).astype(jnp.float32)


def classes(count: int, *shape: int) -> np.ndarray:
    return np.random.randint(0, count, shape).astype(np.int32)


def by_float(schedule: optax.Schedule) -> optax.Schedule:
    return lambda count: schedule(jnp.asarray(count, jnp.float32))


def train_state(
    variant: str,
    params: Tree,
    batch: Arrays,
    objective: Objective,
    tx: optax.GradientTransformation,
    style: Style = PLAIN,
    *,
    fed: Mapping[str, Any] = MappingProxyType({}),
    constants: Arrays | None = None,
    others: Arrays | None = None,
    polyak: float = 0.0,
    step_name: str = "",
    norms: bool = False,
) -> Step:
    """Return a step of a TrainState: parameters and the optimizer's state as trees, whose leaves are inputs."""
    arrays = jax.tree.map(jnp.asarray, params)
    leaves, structure = named_leaves(arrays), jax.tree.structure(arrays)
    weights = {f"params_{name}": value for name, value in leaves.items()}
    begun = tx.init(arrays)
    slots = {f"opt_state_{name}": value for name, value in named_leaves(begun).items()}
    shape = jax.tree.structure(begun)
    averages = {f"ema_{name}": jnp.array(value) for name, value in leaves.items()} if polyak else {}
    number = {step_name: np.int32(0)} if step_name else {}

    def run(values: Arrays) -> Outputs:
        present = jax.tree.unflatten(structure, [values[name] for name in weights])
        (loss, (metrics, more)), grads = jax.value_and_grad(objective, has_aux=True)(present, values)
        state = jax.tree.unflatten(shape, [values[name] for name in slots])
        updates, state = tx.update(grads, state, present)
        moved = jax.tree.leaves(optax.apply_updates(present, updates))
        following = dict(zip([*weights, *slots], [*moved, *jax.tree.leaves(state)], strict=True))
        if polyak:
            pairs = zip(averages, moved, strict=True)
            following |= {name: optax.incremental_update(new, values[name], 1 - polyak) for name, new in pairs}
        if step_name:
            following[step_name] = values[step_name] + 1
        if norms:
            metrics = metrics | {"grad_norm": optax.global_norm(grads), "update_norm": optax.global_norm(updates)}
        return Outputs({"loss": loss}, metrics, states=following | more)

    states = weights | slots | averages | number | (others or {})
    return Step(variant, Inputs(batch, states, dict(fed), constants or {}), run, style, warm=4)


@kind("lab-jax-battery-health", "jax")
def battery_health() -> Iterator[Step]:
    """The capacity of batteries over their cycles, which should not grow: warm-up and cosine, AdamW; Adabelief."""
    params = {"cycle_encoder": dense(11, 18), "hidden": dense(18, 14), "capacity": dense(14, 1)}
    batch = {"cycles": normal(4, 5, 11), "capacity": (0.8 + 0.1 * np.random.rand(4, 5)).astype(np.float32)}

    def objective(p: Tree, values: Arrays) -> tuple[jax.Array, tuple[Arrays, Arrays]]:
        x = jax.nn.gelu(through(p["cycle_encoder"], values["cycles"].reshape(20, 11)))
        x = jax.nn.gelu(through(p["hidden"], x))
        guess = through(p["capacity"], x).reshape(4, 5)
        error = guess - values["capacity"]
        size = jnp.abs(error)
        huber = jnp.mean(jnp.where(size < 0.1, 0.5 * jnp.square(error), 0.1 * (size - 0.05)))
        growth = jnp.mean(jax.nn.relu(guess[:, 1:] - guess[:, :-1]))
        return huber + 0.1 * growth, ({"huber": huber, "monotonicity": growth, "mae": jnp.mean(size)}, {})

    schedule = by_float(optax.warmup_cosine_decay_schedule(0.0, 3e-3, 20, 500, 1e-5))
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, weight_decay=1e-3))
    yield train_state("adamw", params, batch, objective, tx, step_name="step", norms=True)
    style = Style(names="scrambled", order="shuffled")
    yield train_state("adabelief", params, batch, objective, optax.adabelief(2e-3, eps=1e-8), style, polyak=0.99)


@kind("lab-jax-galaxy-votes", "jax")
def galaxy_votes() -> Iterator[Step]:
    """Votes of people on galaxies as distributions, from patches of images: momentum, averages, batch statistics."""
    params = {"patch": dense(27, 16), "token_mix": dense(9, 9), "channel": dense(16, 20), "out": dense(20, 6)}
    params["norm"] = {"scale": np.ones(20, np.float32), "bias": np.zeros(20, np.float32)}
    votes = np.random.dirichlet(np.ones(6), 5).astype(np.float32)
    batch = {"image": normal(5, 3, 9, 9), "votes": votes}
    stats = {"batch_stats_mean": np.zeros(20, np.float32), "batch_stats_var": np.ones(20, np.float32)}

    def objective(p: Tree, values: Arrays) -> tuple[jax.Array, tuple[Arrays, Arrays]]:
        x = values["image"].reshape(5, 3, 3, 3, 3, 3).transpose(0, 2, 4, 1, 3, 5).reshape(45, 27)
        x = jax.nn.relu(through(p["patch"], x)).reshape(5, 9, 16)
        mixed = through(p["token_mix"], x.transpose(0, 2, 1).reshape(80, 9)).reshape(5, 16, 9).transpose(0, 2, 1)
        x = through(p["channel"], (x + mixed).reshape(45, 16))
        mean = jnp.mean(x, 0)
        var = jnp.mean(jnp.square(x - mean), 0)
        x = (x - mean) / jnp.sqrt(var + 1e-5) * p["norm"]["scale"] + p["norm"]["bias"]
        logits = through(p["out"], jnp.mean(jax.nn.relu(x).reshape(5, 9, 20), 1))
        log_p = jax.nn.log_softmax(logits)
        loss = jnp.mean(jnp.sum(values["votes"] * (jnp.log(values["votes"] + 1e-6) - log_p), 1))
        best = jnp.sum(onehot(jnp.argmax(jax.lax.stop_gradient(logits), 1).astype(jnp.int32), 6) * values["votes"], 1)
        following = {"batch_stats_mean": 0.9 * values["batch_stats_mean"] + 0.1 * jax.lax.stop_gradient(mean)}
        following["batch_stats_var"] = 0.9 * values["batch_stats_var"] + 0.1 * jax.lax.stop_gradient(var)
        return loss, ({"share_of_chosen": jnp.mean(best)}, following)

    stepped = by_float(optax.exponential_decay(0.05, 50, 0.9, staircase=True))
    tx = optax.chain(optax.add_decayed_weights(5e-4), optax.sgd(stepped, momentum=0.9))
    yield train_state("momentum", params, batch, objective, tx, Style(names="exporter"), others=stats, polyak=0.995)
    style = Style(states="initializers")
    yield train_state("yogi", params, batch, objective, optax.yogi(5e-3), style, others=stats)


@kind("lab-jax-protein-contacts", "jax")
def protein_contacts() -> Iterator[Step]:
    """Contacts of residues from attention over a chain: positives weighted; Adam in groups, gradients shown."""
    width, length = 12, 7
    params: Tree = {"embed": normal(21, width, scale=0.3), "position": normal(length, width, scale=0.1)}
    for name in ("query", "key", "value", "out"):
        params[name] = normal(width, width, scale=width**-0.5)
    params |= {"left": normal(width, 9, scale=0.3), "right": normal(width, 9, scale=0.3)}
    params |= {"pair_scale": np.float32(0.5), "pair_bias": np.float32(-0.5)}
    contact = np.random.rand(3, length, length) > 0.7
    batch = {"residues": classes(21, 3, length), "contact": (contact | contact.transpose(0, 2, 1)).astype(np.float32)}
    apart = np.abs(np.arange(length)[:, None] - np.arange(length)) >= 2
    constants = {"pair_mask": apart.astype(np.float32)}

    def objective(p: Tree, values: Arrays) -> tuple[jax.Array, tuple[Arrays, Arrays]]:
        x = onehot(values["residues"], 21) @ p["embed"] + p["position"]
        q, k, v = (x @ p[name] for name in ("query", "key", "value"))
        weights = jax.nn.softmax(q @ k.transpose(0, 2, 1) / width**0.5)
        x = x + (weights @ v) @ p["out"]
        pair = (x @ p["left"]) @ (x @ p["right"]).transpose(0, 2, 1)
        logit = p["pair_scale"] * (pair + pair.transpose(0, 2, 1)) + p["pair_bias"]
        near, mask = values["contact"], values["pair_mask"]
        each = 3.0 * near * jax.nn.softplus(-logit) + (1 - near) * jax.nn.softplus(logit)
        said = (logit > 0).astype(jnp.float32) * mask
        precision = jnp.sum(said * near) / jnp.maximum(jnp.sum(said), 1.0)
        return jnp.sum(each * mask) / (3 * jnp.sum(mask)), ({"precision": precision}, {})

    def group(params: Tree) -> Tree:
        return {name: "slow" if name in ("embed", "position") else "fast" for name in params}

    tx = optax.multi_transform({"slow": optax.sgd(1e-2, momentum=0.9), "fast": optax.adam(3e-3)}, group)
    style = Style(states="initializers")
    yield train_state("groups", params, batch, objective, tx, style, constants=constants, norms=True)

    def gradients(values: Arrays) -> Outputs:
        present = {name: values[name] for name in params}
        (loss, (metrics, _)), grads = jax.value_and_grad(objective, has_aux=True)(present, values)
        return Outputs({"loss": loss}, metrics, {f"grads_{name}": grad for name, grad in grads.items()})

    yield Step("gradients", Inputs(batch, constants=constants | params), gradients, Style(names="exporter"))


@kind("lab-jax-news-topics", "jax")
def news_topics() -> Iterator[Step]:
    """Topics of news by a variational autoencoder of counts of words: a divergence phased in by a counter; Adam."""
    params = {"encoder": dense(24, 16), "mean": dense(16, 5), "log_var": dense(16, 5)}
    params["topics"] = normal(5, 24, scale=0.4)
    batch = {"counts": np.random.poisson(1.0, (6, 24)).astype(np.float32), "noise": normal(6, 5)}

    def objective(p: Tree, values: Arrays) -> tuple[jax.Array, tuple[Arrays, Arrays]]:
        total = jnp.sum(values["counts"], 1, keepdims=True)
        x = jax.nn.softplus(through(p["encoder"], jnp.log1p(values["counts"])))
        mean, log_var = through(p["mean"], x), through(p["log_var"], x)
        mixture = jax.nn.softmax(mean + jnp.exp(0.5 * log_var) * values["noise"])
        log_words = jax.nn.log_softmax(matmul(mixture, p["topics"]))
        rebuilt = -jnp.mean(jnp.sum(values["counts"] * log_words, 1))
        divergence = -0.5 * jnp.mean(jnp.sum(1 + log_var - jnp.square(mean) - jnp.exp(log_var), 1))
        beta = jnp.minimum(values["annealing_step"].astype(jnp.float32) / 20.0, 1.0)
        metrics = {"reconstruction": rebuilt, "kl": divergence, "beta": beta}
        metrics["perplexity"] = jnp.exp(jnp.mean(-jnp.sum(values["counts"] * log_words, 1) / total[:, 0]))
        return rebuilt + beta * divergence, (metrics, {})

    yield train_state("adam", params, batch, objective, optax.adam(2e-3, b1=0.99), step_name="annealing_step")
    style = Style(names="exporter", order="shuffled")
    tx = optax.chain(optax.clip(1.0), optax.rmsprop(1e-3, decay=0.95, momentum=0.9))
    yield train_state("rmsprop", params, batch, objective, tx, style, step_name="annealing_step")


@kind("lab-jax-fair-loans", "jax")
def fair_loans() -> Iterator[Step]:
    """Loans with equal rates for two groups: a multiplier that ascends beside the weights, or a fed penalty."""
    params = {"hidden": dense(12, 15), "out": dense(15, 1)}
    batch = {"applicant": normal(14, 12), "repaid": (np.random.rand(14) > 0.4).astype(np.float32)}
    batch["protected"] = (np.arange(14) % 3 == 0).astype(np.float32)

    def parts(p: Tree, values: Arrays) -> tuple[jax.Array, jax.Array, Arrays]:
        logit = through(p["out"], jax.nn.relu(through(p["hidden"], values["applicant"])))[:, 0]
        fit = jnp.mean(jax.nn.softplus(logit) - values["repaid"] * logit)
        granted, group = jax.nn.sigmoid(logit), values["protected"]
        rates = [jnp.sum(granted * g) / jnp.sum(g) for g in (group, 1 - group)]
        right = (logit > 0) == (values["repaid"] > 0.5)
        return fit, rates[0] - rates[1], {"accuracy": jnp.mean(right.astype(jnp.float32))}

    def ascending(p: Tree, values: Arrays) -> tuple[jax.Array, tuple[Arrays, Arrays]]:
        fit, gap, metrics = parts(p, values)
        excess = jnp.abs(gap) - 0.02
        loss = fit + values["multiplier"] * excess
        multiplier = jnp.maximum(values["multiplier"] + 0.1 * jax.lax.stop_gradient(excess), 0.0)
        return loss, (metrics | {"bce": fit, "parity_gap": gap}, {"multiplier": multiplier})

    tx = optax.adamw(2e-3, weight_decay=0.01)
    dual = {"multiplier": np.float32(0.5)}
    yield train_state("ascending", params, batch, ascending, tx, Style(names="exporter"), others=dual)

    def penalised(p: Tree, values: Arrays) -> tuple[jax.Array, tuple[Arrays, Arrays]]:
        fit, gap, metrics = parts(p, values)
        penalty = values["fairness_weight"] * jnp.square(gap)
        return fit + penalty, (metrics | {"bce": fit, "fairness_penalty": penalty}, {})

    fed = {"fairness_weight": np.float32(2.0)}
    style = Style(shapes="inputs")
    yield train_state("penalised", params, batch, penalised, optax.nadam(2e-3), style, fed=fed)


@kind("lab-jax-spring-energy", "jax")
def spring_energy() -> Iterator[Step]:
    """Springs by an energy whose derivatives move them: one loss of the derivatives, one of a path of several steps."""
    params = {"first": dense(6, 16), "second": dense(16, 10), "energy": dense(10, 1)}

    def energy(p: Tree, state: jax.Array) -> jax.Array:
        x = jnp.tanh(through(p["second"], jnp.tanh(through(p["first"], state))))
        return jnp.sum(through(p["energy"], x))

    def flow(p: Tree, state: jax.Array) -> jax.Array:
        """Return the change of positions and momenta; the derivative is written out, layer by layer."""
        first = jnp.tanh(through(p["first"], state))
        second = jnp.tanh(through(p["second"], first))
        back = matmul((1 - jnp.square(second)) * p["energy"]["kernel"][:, 0], p["second"]["kernel"].T)
        grad = matmul((1 - jnp.square(first)) * back, p["first"]["kernel"].T)
        return jnp.concatenate([grad[:, 3:], -grad[:, :3]], 1)

    def derivatives(p: Tree, values: Arrays) -> tuple[jax.Array, tuple[Arrays, Arrays]]:
        moved = flow(p, values["state"])
        error = jnp.mean(jnp.square(moved - values["velocity"]))
        drift = jnp.square(energy(p, values["origin"]))
        return error + 0.01 * drift, ({"derivative_mse": error, "energy_at_rest": drift}, {})

    batch = {"state": normal(8, 6), "velocity": normal(8, 6)}
    tx = optax.chain(
        optax.clip_by_global_norm(5.0), optax.adam(by_float(optax.polynomial_schedule(5e-3, 1e-4, 2.0, 400)))
    )
    rest = {"origin": np.zeros((1, 6), np.float32)}
    yield train_state("derivatives", params, batch, derivatives, tx, constants=rest)

    def path(p: Tree, values: Arrays) -> tuple[jax.Array, tuple[Arrays, Arrays]]:
        state, errors = values["path"][0], []
        for index in range(1, 4):
            half = state + 0.05 * flow(p, state)
            state = state + 0.1 * flow(p, half)
            errors.append(jnp.mean(jnp.square(state - values["path"][index])))
        return sum(errors) / 3, ({"last_error": errors[-1]}, {})

    batch = {"path": np.cumsum(normal(4, 5, 6, scale=0.2), 0).astype(np.float32)}
    style = Style(names="scrambled", order="shuffled", shapes="interface")
    scaled = optax.chain(optax.scale_by_adam(b2=0.99), optax.scale(-2e-3))
    del params["energy"]["bias"]
    yield train_state("path", params, batch, path, scaled, style)
