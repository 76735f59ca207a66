"""Fresh kinds by optax and flax: wrappers around wrappers, train states, a flax DynamicScale."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from models.zoo.arrays import layers
from models.zoo.jax.fresh_parts import STYLES, Advanced, carried, data, descend, mix, shrink, squares, start, zeros
from models.zoo.jax.problems import classification, dense, regression, square
from models.zoo.jax.training import train
from models.zoo.steps import Arrays, Outputs, Step, kind

SCRAMBLED = STYLES["scrambled"]
ADAM = optax.adam(1e-2)


@kind("fresh-injected-if-finite", "jax")
def injected_if_finite() -> Iterator[Step]:
    """Optax applies if finite what inject_hyperparams wraps: rate, decay and counters are states."""
    injected = optax.inject_hyperparams(optax.adamw)(learning_rate=1e-3, weight_decay=1e-2)
    yield train(regression(), optax.apply_if_finite(injected, 3), "adamw")
    cooled = optax.inject_hyperparams(optax.sgd)(lambda count: 0.1 / (1.0 + 0.1 * count.astype(jnp.float32)))
    yield train(classification(), optax.chain(optax.clip(1.0), cooled), "schedule", SCRAMBLED)


@kind("fresh-accumulate-then-clip", "jax")
def accumulate_then_clip() -> Iterator[Step]:
    """MultiSteps of four around adaptive clipping and Adam: the accumulator and two counters are carried."""
    inner = optax.chain(optax.adaptive_grad_clip(0.1), optax.adam(1e-3))
    steps = optax.MultiSteps(inner, every_k_schedule=4).gradient_transformation()
    yield train(regression(4, 6, 2), steps, observe=lambda _, state: Outputs(metrics={"micro": state.mini_step * 1.0}))


@kind("fresh-labelled-rules", "jax")
def labelled_rules() -> Iterator[Step]:
    """multi_transform by labels: a head by Adam, biases by descent, an embedding that is frozen and handed through."""
    labels = {"w1": "frozen", "b1": "bias", "w2": "head", "b2": "bias"}
    rules = {"head": optax.adam(1e-2), "bias": optax.sgd(0.1), "frozen": optax.set_to_zero()}
    for name in ("plain", "scrambled"):
        yield train(regression(), optax.multi_transform(rules, labels), name, STYLES[name])


MATRICES = {"w1": True, "w2": True, "w3": False}
DECAYED = optax.chain(optax.ema(0.9), optax.masked(optax.add_decayed_weights(1e-2), MATRICES), optax.scale(-0.05))


@carried("fresh-masked-decay-ema", lambda: (start(DECAYED, (p := square()).weights, ema=zeros(p.weights)), p.batch))
def masked_decay_ema(v: Arrays, tree: Any) -> Advanced:
    """Decay of two matrices of three, an average of the updates, and one of the weights."""
    loss, grads = jax.value_and_grad(squares)(tree["params"], v)
    tree = descend(DECAYED, grads, tree)
    tree |= {"ema": mix(tree["ema"], tree["params"], 0.01)}
    return loss, {"averaged_norm": optax.global_norm(tree["ema"])}, tree


FREE = optax.contrib.schedule_free_adamw(0.01, warmup_steps=None, weight_decay=1e-3)


@carried("fresh-schedule-free-eval", lambda: (start(FREE, layers(5, 6, 3)), data()))
def schedule_free_eval(v: Arrays, tree: Any) -> Advanced:
    """Schedule-free: gradients at one point; the loss of the averaged weights is a metric, nothing differentiates it."""
    loss, grads = jax.value_and_grad(squares)(tree["params"], v)
    tree = descend(FREE, grads, tree)
    return loss, {"eval_loss": squares(optax.contrib.schedule_free_eval_params(tree["opt"], tree["params"]), v)}, tree


@kind("fresh-estimated-rates", "jax")
def estimated_rates() -> Iterator[Step]:
    """Rates that the rule estimates: Prodigy, D-Adaptation, the mechanic, Momo with its own mean of losses."""
    yield train(regression(), optax.contrib.prodigy(1.0), "prodigy")
    yield train(regression(), optax.contrib.dadapt_adamw(1.0), "dadapt", SCRAMBLED)
    yield train(regression(), optax.contrib.mechanize(optax.sgd(0.1, momentum=0.9)), "mechanic")
    yield train(regression(), optax.contrib.momo_adam(1e-2), "momo", STYLES["initializers"])


@carried("fresh-sharpness", lambda: (start(ADAM, layers(5, 6, 3)), data()))
def sharpness(v: Arrays, tree: Any) -> Advanced:
    """Sharpness-aware: gradients at the weights and at the worst point near them, in one step.

    Two-sided: the loss at the weights, and that at the worst point, whose gradient the update takes, are both right.
    """
    loss, grads = jax.value_and_grad(squares)(tree["params"], v)
    size = 0.05 / (optax.global_norm(grads) + 1e-9)
    worst, grads = jax.value_and_grad(squares)(shrink(tree["params"], grads, -size), v)
    return {"loss": loss, "worst_loss": worst}, {"gap": worst - loss}, descend(ADAM, grads, tree)


@kind("fresh-alternating-sharpness", "jax")
def alternating_sharpness() -> Iterator[Step]:
    """optax's own sam: every second step climbs, and keeps the weights to return to."""
    normalized = optax.chain(optax.contrib.normalize(), optax.sgd(0.05))
    rule = optax.contrib.sam(optax.sgd(0.1), normalized, sync_period=2)
    yield train(regression(), optax.GradientTransformation(rule.init, rule.update))


@kind("fresh-plateau", "jax")
def plateau() -> Iterator[Step]:
    """reduce_on_plateau after Adam: the loss goes into the state (best, mean, patience) and scales the rate."""
    rule = optax.contrib.reduce_on_plateau(factor=0.5, patience=2, accumulation_size=2)
    yield train(regression(), optax.chain(optax.adam(1e-2), rule))


def make_train_state() -> tuple[Any, Arrays]:
    sums = dict.fromkeys(("loss", "hits", "count"), np.float32(0))
    return start(ADAM, (p := classification()).weights, metrics=sums, step=np.int32(0)), p.batch


@carried("fresh-train-state", make_train_state, "plain", "scrambled")
def train_state(v: Arrays, tree: Any) -> Advanced:
    """A flax TrainState with the sums that its metrics carry: losses, hits, rows; their means are metrics."""

    def objective(params: Arrays) -> tuple[jax.Array, jax.Array]:
        logits = dense(params, v["x"], jax.nn.relu)
        hits = jnp.argmax(jax.lax.stop_gradient(logits), -1) == v["label"]
        hot = jax.nn.one_hot(v["label"], 5)
        return jnp.mean(optax.softmax_cross_entropy(logits, hot)), jnp.sum(hits.astype(jnp.float32))

    (loss, hits), grads = jax.value_and_grad(objective, has_aux=True)(tree["params"])
    sums = tree["metrics"]
    sums = {"loss": sums["loss"] + 6 * loss, "hits": sums["hits"] + hits, "count": sums["count"] + 6}
    tree = descend(ADAM, grads, tree) | {"metrics": sums, "step": tree["step"] + 1}
    return loss, {"mean_loss": sums["loss"] / sums["count"], "accuracy": sums["hits"] / sums["count"]}, tree


def make_scaled() -> tuple[Any, Arrays]:
    return start(ADAM, layers(5, 6, 3), scale=np.float32(1024), fin_steps=np.int32(0)), data()


@carried("fresh-flax-dynamic-scale", make_scaled, "plain", "scrambled", kept=("fin_steps", "scale"))
def flax_dynamic_scale(v: Arrays, tree: Any) -> Advanced:
    """flax's DynamicScale as its examples use it: the step scales its loss by itself. To be scaled no second time."""
    scale, count = tree["scale"], tree["fin_steps"]
    loss, grads = jax.value_and_grad(lambda p: squares(p, v) * scale)(tree["params"])
    grads = jax.tree.map(lambda grad: grad / scale, grads)
    finite = jnp.all(jnp.stack([jnp.all(jnp.abs(grad) < jnp.inf) for grad in jax.tree.leaves(grads)]))
    grown = jnp.where(count == 4, jnp.minimum(scale * 2.0, 2.0**24), scale)
    count = jnp.where(finite, jnp.where(count == 4, 0, count + 1), 0).astype(jnp.int32)
    tree = jax.tree.map(lambda new, old: jnp.where(finite, new, old), descend(ADAM, grads, tree), tree)
    tree |= {"scale": jnp.where(finite, grown, jnp.maximum(scale / 2.0, 1.0)), "fin_steps": count}
    return loss / scale, {"is_finite": finite}, tree


def make_rated() -> tuple[Any, Arrays]:
    return {"params": (p := layers(5, 6, 3)), "before": zeros(p), "rate": np.float32(0.05)}, data()


@carried("fresh-hypergradient-rate", make_rated, "plain", "exporter")
def hypergradient_rate(v: Arrays, tree: Any) -> Advanced:
    """The rate is learnt by the product of this gradient with the one before; both are carried."""
    loss, grads = jax.value_and_grad(squares)(tree["params"], v)
    product = sum(jnp.sum(grads[name] * tree["before"][name]) for name in grads)
    rate = jnp.maximum(tree["rate"] + 1e-4 * product, 1e-5)
    return loss, {"alignment": product}, {"params": shrink(tree["params"], grads, rate), "before": grads, "rate": rate}
