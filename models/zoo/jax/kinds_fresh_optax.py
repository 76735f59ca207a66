"""Fresh kinds by optax and flax: wrappers around wrappers, train states, a flax DynamicScale."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from models.zoo.arrays import layers
from models.zoo.jax.fresh_parts import STYLES, Advanced, carried, data, descend, shrink, squares, start, zeros
from models.zoo.jax.problems import classification, dense, regression
from models.zoo.jax.training import train
from models.zoo.steps import Arrays, kind

ADAM = optax.adam(1e-2)


def sharp() -> optax.GradientTransformation:
    rule = optax.contrib.sam(optax.sgd(0.1), optax.chain(optax.contrib.normalize(), optax.sgd(0.05)), sync_period=2)
    return optax.GradientTransformation(rule.init, rule.update)


def several() -> optax.GradientTransformation:
    rules = {"head": ADAM, "bias": optax.sgd(0.1), "frozen": optax.set_to_zero()}
    return optax.multi_transform(rules, {"w1": "frozen", "b1": "bias", "w2": "head", "b2": "bias"})


COOLED = optax.inject_hyperparams(optax.sgd)(lambda count: 0.1 / (1.0 + 0.1 * count.astype(jnp.float32)))
INJECTED = optax.inject_hyperparams(optax.adamw)(learning_rate=1e-3, weight_decay=1e-2)
DECAY = optax.masked(optax.add_decayed_weights(1e-2), {"w1": True, "b1": False, "w2": True, "b2": False})
CLIPPED = optax.MultiSteps(optax.chain(optax.adaptive_grad_clip(0.1), ADAM), every_k_schedule=4)
PLATEAU = optax.contrib.reduce_on_plateau(factor=0.5, patience=2, accumulation_size=2)
RULES = {
    "fresh-injected-if-finite": {  # rate, decay and counters are states
        "plain": optax.apply_if_finite(INJECTED, 3),
        "scrambled": optax.chain(optax.clip(1.0), COOLED),
    },
    "fresh-accumulate-then-clip": {"plain": CLIPPED.gradient_transformation()},  # an accumulator, two counters
    "fresh-labelled-rules": {"plain": several(), "scrambled": several()},  # the frozen weight is handed through
    "fresh-masked-decay": {"exporter": optax.chain(optax.ema(0.9), DECAY, optax.scale(-0.05))},
    "fresh-estimated-rates": {  # the rate is a state; momo keeps a mean of losses besides
        "plain": optax.contrib.prodigy(1.0),
        "scrambled": optax.contrib.dadapt_adamw(1.0),
        "exporter": optax.contrib.mechanize(optax.sgd(0.1, momentum=0.9)),
        "initializers": optax.contrib.momo_adam(1e-2),
    },
    "fresh-alternating-sharpness": {"plain": sharp()},  # every second step climbs, and keeps where to return to
    "fresh-plateau": {"plain": optax.chain(ADAM, PLATEAU)},  # best loss, mean loss and patience are states
}
for name, forms in RULES.items():
    kind(name, "jax")(lambda forms=forms: [train(regression(), tx, key, STYLES[key]) for key, tx in forms.items()])


FREE = optax.contrib.schedule_free_adamw(0.01, warmup_steps=None, weight_decay=1e-3)


@carried("fresh-schedule-free-eval", lambda: (start(FREE, layers(5, 6, 3)), data()))
def schedule_free_eval(v: Arrays, tree: Any) -> Advanced:
    """Schedule-free: gradients at one point; the loss of the averaged weights is a metric without a gradient."""
    loss, grads = jax.value_and_grad(squares)(tree["params"], v)
    tree = descend(FREE, grads, tree)
    return loss, {"eval_loss": squares(optax.contrib.schedule_free_eval_params(tree["opt"], tree["params"]), v)}, tree


@carried("fresh-sharpness", lambda: (start(ADAM, layers(5, 6, 3)), data()))
def sharpness(v: Arrays, tree: Any) -> Advanced:
    """Sharpness-aware: gradients at the weights and at the worst point near them, in one step.

    Two-sided: the loss at the weights, and that at the worst point, whose gradient the update takes, are both right.
    """
    loss, grads = jax.value_and_grad(squares)(tree["params"], v)
    size = 0.05 / (optax.global_norm(grads) + 1e-9)
    worst, grads = jax.value_and_grad(squares)(shrink(tree["params"], grads, -size), v)
    return {"loss": loss, "worst_loss": worst}, {"gap": worst - loss}, descend(ADAM, grads, tree)


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
