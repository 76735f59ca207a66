"""Kinds from the field by JAX: credit, keywords, sentence pairs, intents from a teacher."""

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import optax

from models.zoo.arrays import normal
from models.zoo.jax.field_parts import apply, choice, global_norm, labels, linear, lookup, one_hot, one_step
from models.zoo.jax.problems import matmul
from models.zoo.steps import PLAIN, Arrays, Inputs, Outputs, Step, Style, kind

EXPORTER = Style(names="exporter")
Parts = tuple[jax.Array, tuple[Arrays, Arrays]]


def credit_network() -> tuple[Arrays, Arrays]:
    """Return the weights of a scorer, and a batch of applications."""
    weights = linear("hidden1", 17, 26) | linear("hidden2", 26, 11) | linear("score", 11, 3)
    return weights, {"application": normal(12, 17), "outcome": labels(3, 12)}


def accumulated(w: Arrays, name: str, x: jax.Array) -> jax.Array:
    """Apply a layer in the type of its weights, with a product that is summed in float32."""
    product = matmul(x.astype(jnp.float32), w[f"{name}_kernel"].astype(jnp.float32))
    return product.astype(x.dtype) + w[f"{name}_bias"]


def credit_loss(w: Arrays, values: Arrays) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the loss weighted by classes, the logits, and the one-hot outcome."""
    x = jax.nn.leaky_relu(accumulated(w, "hidden1", values["application"].astype(w["hidden1_kernel"].dtype)))
    x = jax.nn.leaky_relu(accumulated(w, "hidden2", x))
    logits = accumulated(w, "score", x).astype(jnp.float32)
    target = one_hot(values["outcome"], 3)
    each = jnp.sum(target * values["class_weights"], 1)
    return -jnp.sum(each * jnp.sum(target * jax.nn.log_softmax(logits), 1)) / jnp.sum(each), logits, target


def credit_in_half(variant: str, style: Style = PLAIN) -> Step:
    """Return float16 weights beside float32 masters, momentum, and a fed loss scale."""
    weights, batch = credit_network()
    masters = {f"{name}_master": weight.astype(np.float16).astype(np.float32) for name, weight in weights.items()}
    buffers = {f"{name}_momentum": np.zeros_like(weight) for name, weight in weights.items()}
    half = {name: weight.astype(np.float16) for name, weight in weights.items()}

    def run(values: Arrays) -> Outputs:
        def scaled(w: Arrays) -> tuple[jax.Array, jax.Array]:
            loss, _, _ = credit_loss(w, values)
            return loss * values["loss_scale"], loss

        (_, loss), grads = jax.value_and_grad(scaled, has_aux=True)({name: values[name] for name in weights})
        grads = {name: grad.astype(jnp.float32) / values["loss_scale"] for name, grad in grads.items()}
        norm, states, casts = global_norm(grads), {}, {}
        for name, grad in grads.items():
            grad = grad * jnp.minimum(1.0, 1.0 / (norm + 1e-6))
            buffer = 0.9 * values[f"{name}_momentum"] + grad
            master = values[f"{name}_master"] - values["lr"] * (buffer + 1e-3 * values[f"{name}_master"])
            states |= {f"{name}_master": master, f"{name}_momentum": buffer}
            casts[name] = master.astype(jnp.float16)
        return Outputs({"loss": loss}, {"grad_norm": norm}, states=casts | states)

    fed = {
        "class_weights": np.array([0.5, 1.0, 3.0], np.float32),
        "loss_scale": np.float32(128),
        "lr": np.float32(0.05),
    }
    return Step(variant, Inputs(batch, half | masters | buffers, fed), run, style, warm=3)


@kind("field-credit-scoring", "jax")
def credit_scoring() -> Iterator[Step]:
    """Outcomes of loans with class weights: masters in float32 with a fed scale; Adam after three micro-batches."""
    yield credit_in_half("masters")
    weights, batch = credit_network()

    def objective(w: Arrays, values: Arrays) -> Parts:
        loss, logits, target = credit_loss(w, values)
        said = one_hot(choice(logits), 3)
        return loss, ({"confusion": jnp.sum(target[:, :, None] * said[:, None, :], 0)}, {})

    several = optax.MultiSteps(
        optax.chain(optax.clip_by_global_norm(1.0), optax.adam(5e-3)), 3
    ).gradient_transformation()
    constants = {"class_weights": np.array([0.5, 1.0, 3.0], np.float32)}
    yield one_step("accumulated", weights, batch, objective, several, EXPORTER, constants=constants, warm=4)


@kind("field-keyword-spotting", "jax")
def keyword_spotting() -> Iterator[Step]:
    """Keywords in spectra by separable convolutions over time, smoothed labels: Lion with averages; Adadelta."""
    weights = {"depthwise1": normal(5, 10, scale=0.4), "depthwise2": normal(3, 16, scale=0.5)}
    weights |= linear("pointwise1", 10, 16) | linear("pointwise2", 16, 12) | linear("classes", 12, 6)
    batch = {"mfcc": normal(4, 15, 10), "keyword": labels(6, 4)}

    def separable(w: Arrays, index: int, x: jax.Array) -> jax.Array:
        kernel = w[f"depthwise{index}"]
        count, length = kernel.shape[0], x.shape[1] - kernel.shape[0] + 1
        x = sum(x[:, tap : tap + length] * kernel[tap] for tap in range(count))
        flat = apply(w, f"pointwise{index}", x.reshape(-1, x.shape[-1]))
        return jax.nn.relu(flat).reshape(x.shape[0], length, -1)

    def objective(w: Arrays, values: Arrays) -> Parts:
        x = jnp.mean(separable(w, 2, separable(w, 1, values["mfcc"])), 1)
        log_p = jax.nn.log_softmax(apply(w, "classes", x))
        target = 0.9 * one_hot(values["keyword"], 6) + 0.1 / 6
        right = jnp.mean((choice(log_p) == values["keyword"]).astype(jnp.float32))
        return -jnp.mean(jnp.sum(target * log_p, 1)), ({"accuracy": right}, {})

    signed = optax.lion(3e-4, weight_decay=0.1)
    yield one_step("lion", weights, batch, objective, signed, ema=0.98)
    slow = optax.adadelta(0.5, rho=0.95)
    style = Style(names="scrambled")
    yield one_step(
        "adadelta", weights, batch, objective, slow, style, report=lambda grads, _: {"norm": global_norm(grads)}
    )


@kind("field-sentence-pairs", "jax")
def sentence_pairs() -> Iterator[Step]:
    """Sentences that mean the same against all others of the batch, a learnt temperature: Adafactor; momentum."""
    weights = {"embedding": normal(25, 12, scale=0.3), "log_temperature": np.float32(2.0)}
    weights |= linear("project", 12, 10) | linear("output", 10, 8)
    batch = {"anchor": labels(25, 6, 5), "positive": labels(25, 6, 4)}
    batch |= {f"{name}_mask": (np.random.rand(*batch[name].shape) > 0.2).astype(np.float32) for name in list(batch)}
    for name in ("anchor", "positive"):
        batch[f"{name}_mask"][:, 0] = 1

    def encode(w: Arrays, values: Arrays, name: str) -> jax.Array:
        mask = values[f"{name}_mask"][..., None]
        words = lookup(w["embedding"], values[name]) * mask
        x = apply(w, "output", jax.nn.gelu(apply(w, "project", jnp.sum(words, 1) / jnp.sum(mask, 1))))
        return x / jnp.sqrt(jnp.sum(jnp.square(x), 1, keepdims=True) + 1e-6)

    def objective(w: Arrays, values: Arrays) -> Parts:
        cosine = matmul(encode(w, values, "anchor"), encode(w, values, "positive").T)
        scores, own = cosine * jnp.exp(w["log_temperature"]), jnp.eye(6, dtype=jnp.float32)
        forth = -jnp.sum(own * jax.nn.log_softmax(scores, 1)) / 6
        back = -jnp.sum(own * jax.nn.log_softmax(scores, 0)) / 6
        best = jnp.mean((jnp.sum(own * cosine, 1) >= jnp.max(cosine, 1)).astype(jnp.float32))
        return (forth + back) / 2, ({"recall_at_1": best, "cosine": cosine}, {})

    factored = optax.adafactor(0.02, min_dim_size_to_factor=8)
    yield one_step("adafactor", weights, batch, objective, factored, EXPORTER)
    fed = {"rate": np.float32(0.02)}

    def warm_up(values: Arrays) -> jax.Array:
        return -values["rate"] * jnp.minimum(1.0, (values["steps_done"] + 1) / 10.0)

    def counted(w: Arrays, values: Arrays) -> Parts:
        loss, (metrics, _) = objective(w, values)
        return loss, (
            {"recall_at_1": metrics["recall_at_1"], "lr": -warm_up(values)},
            {"steps_done": values["steps_done"] + 1},
        )

    states = {"steps_done": np.float32(0)}
    style = Style(states="initializers")
    yield one_step(
        "momentum", weights, batch, counted, optax.trace(0.9), style, states=states, fed=fed, rate=warm_up, warm=2
    )


@kind("field-distilled-intents", "jax")
def distilled_intents() -> Iterator[Step]:
    """Intents of messages, from labels and a frozen teacher at a fed temperature: NAdamW; centred RMSprop."""
    weights = {"embedding": normal(30, 8, scale=0.3)} | linear("dense", 8, 14) | linear("intent", 14, 7)
    teacher = {"teacher_embedding": normal(30, 16, scale=0.4)}
    teacher |= linear("teacher_dense", 16, 20) | linear("teacher_intent", 20, 7)
    batch = {"message": labels(30, 5, 6), "intent": labels(7, 5)}
    fed = {"temperature": np.float32(2.0), "alpha": np.float32(0.7)}

    def classify(w: Arrays, message: jax.Array, prefix: str = "") -> jax.Array:
        x = jnp.mean(lookup(w[f"{prefix}embedding"], message), 1)
        return apply(w, f"{prefix}intent", jnp.tanh(apply(w, f"{prefix}dense", x)))

    def objective(w: Arrays, values: Arrays) -> Parts:
        heat, logits = values["temperature"], classify(w, values["message"])
        soft = jax.nn.softmax(jax.lax.stop_gradient(classify(values, values["message"], "teacher_")) / heat)
        distance = jnp.sum(soft * (jnp.log(soft + 1e-6) - jax.nn.log_softmax(logits / heat)), 1)
        distilled = jnp.mean(distance) * heat * heat
        hard = -jnp.mean(jnp.sum(one_hot(values["intent"], 7) * jax.nn.log_softmax(logits), 1))
        loss = values["alpha"] * distilled + (1 - values["alpha"]) * hard
        return loss, ({"distillation_loss": distilled, "label_loss": hard, "predicted": choice(logits)}, {})

    ahead = optax.nadamw(2e-3, weight_decay=0.01)
    yield one_step("nadamw", weights, batch, objective, ahead, fed=fed, constants=teacher, loss_name="total_loss")
    centred = optax.rmsprop(1e-3, centered=True, momentum=0.9)
    yield one_step("rmsprop", weights, batch, objective, centred, EXPORTER, fed=fed, constants=teacher)
