"""Steps `unseen-*` by TensorFlow: examples of keras.io with their own training loops."""

import numpy as np
import tensorflow as tf

from models.zoo.arrays import normal
from models.zoo.steps import Inputs, Outputs
from models.zoo.unseen import add

F32 = np.float32


def dense(name, a, b):
    return {f"{name}/kernel": normal(a, b, scale=a**-0.5), f"{name}/bias": np.zeros(b, F32)}


def on(w, name, x):
    return tf.matmul(x, w[f"{name}/kernel"]) + w[f"{name}/bias"]


def adam(w, g, v, t):
    new = {}
    for n, x in w.items():
        m, u = v[f"m/{n}"] * 0.9 + g[n] * 0.1, v[f"v/{n}"] * 0.99 + tf.square(g[n]) * 0.01
        rate = 0.01 * tf.sqrt(1.0 - tf.pow(0.99, t)) / (1.0 - tf.pow(0.9, t))
        new |= {n: x - rate * m / (tf.sqrt(u) + 1e-5), f"m/{n}": m, f"v/{n}": u}
    return new


def fit(w, batch, loss, *, states=None, constants=None, after=lambda new, v: {}, clip=None):
    states = (
        {f"{k}/{n}": np.zeros_like(x) for k in "mv" for n, x in w.items()}
        | {"iterations": np.int64(0)}
        | (states or {})
    )

    def run(v):
        p = {n: v[n] for n in w}
        with tf.GradientTape() as tape:
            tape.watch(list(p.values()))
            value, metrics, moved = loss(p, v)
        g = [tf.convert_to_tensor(x) for x in tape.gradient(value, list(p.values()))]
        if clip:
            size = tf.sqrt(tf.add_n([tf.reduce_sum(tf.square(x)) for x in g]))
            g = [x * clip / tf.maximum(size, clip) for x in g]
            metrics = metrics | {"global_norm": size}
        count = v["iterations"] + 1
        new = adam(p, dict(zip(w, g, strict=True)), v, tf.cast(count, tf.float32)) | {"iterations": count} | moved
        return Outputs({"loss": value}, metrics, states=new | after(new, v))

    return Inputs(batch, w | states, {}, constants or {}), run, list(w)


def distiller():
    def loss(p, v):
        s, t = on(p, "s2", tf.nn.relu(on(p, "s1", v["x"]))), on(v, "teacher", v["x"])
        soft = tf.nn.softmax(t / 3.0)
        kd = tf.reduce_mean(tf.reduce_sum(soft * (tf.math.log(soft + 1e-6) - tf.nn.log_softmax(s / 3.0)), 1)) * 9.0
        hard = tf.reduce_mean(-tf.reduce_sum(v["y"] * tf.nn.log_softmax(s), 1))
        return 0.1 * hard + 0.9 * kd, {"student_loss": hard, "distillation_loss": kd}, {}

    w = dense("s1", 4, 5) | dense("s2", 5, 3)
    batch = {"x": normal(6, 4), "y": np.eye(3, dtype=F32)[np.random.randint(0, 3, 6)]}
    return fit(w, batch, loss, constants=dense("teacher", 4, 3))


def simsiam():
    def unit(x):
        return x * tf.math.rsqrt(tf.reduce_sum(tf.square(x), 1, keepdims=True) + 1e-5)

    def loss(p, v):
        z = [on(p, "enc", tf.tanh(on(p, "stem", v[k]))) for k in ("one", "two")]
        h = [on(p, "pred", x) for x in z]
        near = lambda h, z: -tf.reduce_mean(tf.reduce_sum(unit(h) * unit(tf.stop_gradient(z)), 1))  # noqa: E731
        return 0.5 * near(h[0], z[1]) + 0.5 * near(h[1], z[0]), {}, {}

    return fit(
        dense("stem", 4, 6) | dense("enc", 6, 3) | dense("pred", 3, 3), {k: normal(5, 4) for k in ("one", "two")}, loss
    )


def ddpg_noise():
    w = dense("actor", 3, 2) | dense("critic", 5, 1)
    target = {f"target/{n}": x.copy() for n, x in w.items()}

    def loss(p, v):
        old = {n[7:]: v[n] for n in target}
        q = lambda w, s, a: on(w, "critic", tf.concat([s, a], 1))  # noqa: E731
        y = v["r"] + 0.99 * q(old, v["s1"], tf.tanh(on(old, "actor", v["s1"])))
        critic = tf.reduce_mean(tf.square(tf.stop_gradient(y) - q(p, v["s"], v["a"])))
        fixed = {n: tf.stop_gradient(x) for n, x in p.items()}
        actor = -tf.reduce_mean(q(fixed, v["s"], tf.tanh(on(p, "actor", v["s"]))))
        noise = v["ou"] + 0.15 * -v["ou"] * 0.01 + 0.02 * v["gauss"]
        return critic + actor, {"critic_loss": critic, "actor_loss": actor}, {"ou": noise}

    def after(new, v):
        return {n: new[n[7:]] * 0.05 + v[n] * 0.95 for n in target}

    batch = {"s": normal(5, 3), "a": normal(5, 2), "r": normal(5, 1), "s1": normal(5, 3), "gauss": normal(2)}
    return fit(w, batch, loss, states=target | {"ou": np.zeros(2, F32)}, after=after)


def tracked_means():
    w = dense("h", 4, 6) | dense("out", 6, 1)

    def loss(p, v):
        y = on(p, "out", tf.nn.elu(on(p, "h", v["x"])))
        value = tf.reduce_mean(tf.square(y - v["y"]))
        total, count = v["total"] + value, v["count"] + 1.0
        mae = tf.reduce_mean(tf.abs(y - v["y"]))
        return value, {"loss_tracker": total / count, "mae": mae}, {"total": total, "count": count}

    return fit(w, {"x": normal(6, 4), "y": normal(6, 1)}, loss, states={"total": F32(0), "count": F32(0)}, clip=1.0)


def wide_embedding_drop():
    w = {"table": normal(8, 3)} | dense("deep", 6, 4) | dense("head", 4, 1)

    def loss(p, v):
        hot = tf.one_hot(v["ids"], 8)
        e = tf.reshape(tf.reshape(hot, [-1, 8]) @ p["table"], [-1, 6]) * v["keep"] * 1.25
        z = on(p, "head", tf.nn.relu(on(p, "deep", e)))
        ce = tf.reduce_mean(tf.nn.softplus(z) - z * v["y"])
        return ce + 1e-3 * tf.reduce_sum(tf.square(p["table"])), {"log_loss": ce, "prediction": tf.sigmoid(z)}, {}

    batch = {
        "ids": np.random.randint(0, 8, (5, 2)).astype(np.int32),
        "keep": np.ones((5, 6), F32),
        "y": np.ones((5, 1), F32),
    }
    return fit(w, batch, loss)


add("keras-distiller", "tensorflow", distiller, "serving exporter")
add("keras-simsiam", "tensorflow", simsiam, "x0")
add("keras-ddpg-noise", "tensorflow", ddpg_noise, "exporter next")
add("keras-tracked-means", "tensorflow", tracked_means, "serving new")
add("keras-wide-embedding", "tensorflow", wide_embedding_drop, "exporter mixed")
