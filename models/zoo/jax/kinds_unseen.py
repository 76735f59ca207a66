"""Steps `unseen-*` by JAX: optax and its contrib, losses of rlax, flax and haiku examples, two players, states."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax

from models.zoo.arrays import layers, normal
from models.zoo.jax.problems import matmul
from models.zoo.jax.training import named_leaves
from models.zoo.steps import Inputs, Outputs
from models.zoo.unseen import add

F32, I32 = np.float32, np.int32


def twice(x, w):  # which can be differentiated forwards, too
    return (x[..., None] * w).sum(-2)


def dense(w, x, p="", act=jnp.tanh, product=matmul):
    i = 1
    while f"{p}w{i}" in w:
        x = product(act(x) if i > 1 else x, w[f"{p}w{i}"])
        x = x + w[f"{p}b{i}"] if f"{p}b{i}" in w else x
        i += 1
    return x


def lay(p, *sizes):
    return {f"{p}{n}": x for n, x in layers(*sizes).items()}


def ints(high, *shape):
    return np.random.randint(0, high, shape).astype(I32)


def fit(
    weights,
    batch,
    loss,
    tx,
    *,
    states=None,
    constants=None,
    hyper=None,
    after=lambda new, v: {},
    shown=None,
    extra=False,
):
    """Put a step together; `loss(w, v)` gives a scalar, or that, metrics and next states."""
    tx = optax.with_extra_args_support(tx)
    opt = tx.init({n: jnp.asarray(x) for n, x in weights.items()})
    leaves, tree = {f"opt.{n}": x for n, x in named_leaves(opt).items()}, jax.tree.structure(opt)

    def run(v):
        def objective(w):
            found = loss(w, v)
            return (found[0], found[1:]) if isinstance(found, tuple) else (found, ({}, {}))

        w = {n: v[n] for n in weights}
        (value, (metrics, moved)), g = jax.value_and_grad(objective, has_aux=True)(w)
        more = {"value": value, "grad": g, "value_fn": lambda w: objective(w)[0]} if extra else {}
        updates, state = tx.update(g, jax.tree.unflatten(tree, [v[n] for n in leaves]), w, **more)
        new = optax.apply_updates(w, updates) | dict(zip(leaves, jax.tree.leaves(state), strict=True)) | moved
        metrics = metrics | (shown(g, updates) if shown else {})
        return Outputs({"loss": value}, metrics, states=new | after(new, v))

    return Inputs(batch, weights | leaves | (states or {}), hyper or {}, constants or {}), run, list(weights)


def regression(tx, sizes=(4, 6, 3), loss=lambda p, y: ((p - y) ** 2).mean(), **more):
    w = layers(*sizes)
    batch = {"x": normal(5, sizes[0]), "y": normal(5, sizes[-1])}
    return fit(w, batch, lambda w, v: loss(dense(w, v["x"]), v["y"]), tx(), **more)


def classifier(tx, sizes=(4, 6, 3), **more):
    def loss(w, v):
        p = dense(w, v["x"], act=jax.nn.relu)
        each = optax.softmax_cross_entropy(p, jax.nn.one_hot(v["label"], 3))
        return each.mean(), {"accuracy": (p.argmax(-1) == v["label"]).astype(F32).mean()}, {}

    return fit(layers(*sizes), {"x": normal(6, 4), "label": ints(3, 6)}, loss, tx(), **more)


def norms(g, u):
    return {"grad_norm": optax.global_norm(g), "update_norm": optax.global_norm(u)}


C = optax.contrib
OPTAX = {
    "contrib-acprop": (classifier, lambda: C.acprop(1e-2), "next", {}),
    "contrib-ademamix": (regression, lambda: C.ademamix(1e-2), "x0", {}),
    "contrib-simplified-ademamix": (regression, lambda: C.simplified_ademamix(1e-3), "inout", {}),
    "contrib-adopt": (classifier, lambda: C.adopt(1e-2), "donated", {}),
    "contrib-cocob": (regression, C.cocob, "exporter", {}),
    "contrib-dadapt-adamw": (regression, lambda: C.dadapt_adamw(1.0, estim_lr0=1e-2), "arg", {}),
    "contrib-dog": (classifier, lambda: C.dog(1.0), "new", {}),
    "contrib-dowg": (regression, lambda: C.dowg(1.0), "mixed", {}),
    "contrib-madgrad": (classifier, lambda: C.madgrad(1e-2), "old", {}),
    "contrib-mechanize": (regression, lambda: C.mechanize(optax.sgd(1e-2), s_init=0.1), "serving", {}),
    "contrib-momo": (regression, lambda: C.momo(1e-1), "t", {"extra": True}),
    "contrib-momo-adam": (classifier, lambda: C.momo_adam(1e-2), "x0", {"extra": True}),
    "contrib-schedule-free-adamw": (classifier, lambda: C.schedule_free_adamw(1e-2), "updated", {}),
    "contrib-sam-mixed": (
        regression,
        lambda: C.sam(optax.sgd(0.05), optax.chain(C.normalize(), optax.sgd(0.01)), sync_period=2),
        "bare",
        {},
    ),
    "chain-clip-noise-decay": (
        classifier,
        lambda: optax.chain(
            optax.clip_by_global_norm(0.5), optax.scale_by_adam(), optax.add_decayed_weights(1e-3), optax.scale(-1e-2)
        ),
        "camel new",
        {"shown": norms},
    ),
    "adaptive-grad-clip-nesterov": (
        classifier,
        lambda: optax.chain(optax.adaptive_grad_clip(0.05), optax.sgd(0.05, 0.9, nesterov=True)),
        "slash",
        {},
    ),
    "zero-nans-rprop": (regression, lambda: optax.chain(optax.zero_nans(), optax.rprop(1e-2)), "anyorder", {}),
    "amsgrad-centered": (
        classifier,
        lambda: optax.chain(optax.centralize(), optax.amsgrad(1e-2)),
        "exporter mixed",
        {},
    ),
    "optimistic-adam": (regression, lambda: optax.optimistic_adam_v2(1e-2), "next", {}),
    "polyak-step": (regression, lambda: optax.polyak_sgd(1.0), "x0 t", {"extra": True}),
    "partition-two-rates": (
        regression,
        lambda: optax.partition(
            {"matrix": optax.adamw(1e-2), "vector": optax.sgd(0.1)},
            lambda w: {n: "matrix" if x.ndim > 1 else "vector" for n, x in w.items()},
        ),
        "donated",
        {},
    ),
    "sm3-rows": (classifier, lambda: optax.sm3(0.05), "inout", {}),
    "trust-ratio-fromage": (regression, lambda: optax.fromage(0.02), "arg", {}),
    "noisy-novograd": (classifier, lambda: optax.novograd(1e-2), "old", {}),
    "ema-debias-lion": (
        regression,
        lambda: optax.chain(optax.ema(0.9), optax.scale_by_lion(), optax.scale(-1e-2)),
        "mixed",
        {},
    ),
}
for name, (base, tx, faces, more) in OPTAX.items():
    add(f"optax-{name}", "jax", partial(base, tx, **more), faces)


def kind(faces, right="scale"):
    return lambda f: add(f.__name__.replace("_", "-"), "jax", f, faces, right)


def unit(x):
    return x / jnp.sqrt((x * x).sum(-1, keepdims=True) + 1e-6)


def gaussian(mean, logstd, x):
    return (-0.5 * ((x - mean) / jnp.exp(logstd)) ** 2 - logstd - 0.9189).sum(-1)


@kind("x0 next")
def jax_ppo_value_clip():
    w = lay("pi_", 4, 6, 3) | lay("vf_", 4, 5, 1)
    batch = {"obs": normal(6, 4), "action": ints(3, 6), "old_logp": normal(6) * 0.1 - 1, "adv": normal(6)}
    batch |= {"ret": normal(6), "old_value": normal(6)}

    def loss(w, v):
        logits = jax.nn.log_softmax(dense(w, v["obs"], "pi_"))
        logp = (logits * jax.nn.one_hot(v["action"], 3)).sum(-1)
        ratio, adv = jnp.exp(logp - v["old_logp"]), (v["adv"] - v["adv"].mean()) / (v["adv"].std() + 1e-6)
        pg = -jnp.minimum(ratio * adv, jnp.clip(ratio, 0.8, 1.2) * adv).mean()
        value = dense(w, v["obs"], "vf_")[:, 0]
        near = v["old_value"] + jnp.clip(value - v["old_value"], -0.2, 0.2)
        vf = 0.5 * jnp.maximum((value - v["ret"]) ** 2, (near - v["ret"]) ** 2).mean()
        ent = -(jnp.exp(logits) * logits).sum(-1).mean()
        kl = ((ratio - 1) - jnp.log(ratio)).mean()
        return pg + 0.5 * vf - 0.01 * ent, {"pg_loss": pg, "v_loss": vf, "entropy": ent, "approx_kl": kl}, {}

    return fit(w, batch, loss, optax.chain(optax.clip_by_global_norm(0.5), optax.adam(1e-2, eps=1e-5)))


@kind("serving")
def rlax_double_q_lambda():
    w = lay("q_", 4, 6, 3)
    target = {f"target_{n}": x.copy() for n, x in w.items()}
    batch = {"s": normal(5, 4), "a": ints(3, 5), "r": normal(5), "discount": np.full(5, 0.9, F32), "s1": normal(5, 4)}

    def loss(w, v):
        q = (dense(w, v["s"], "q_") * jax.nn.one_hot(v["a"], 3)).sum(-1)
        pick = jax.nn.one_hot(dense(w, v["s1"], "q_").argmax(-1), 3)
        goal = v["r"] + v["discount"] * (dense(v, v["s1"], "target_q_") * pick).sum(-1)
        td = jax.lax.stop_gradient(goal) - q
        return optax.huber_loss(td).mean(), {"priorities": jnp.abs(td)}, {}

    def after(new, v):
        return {n: optax.incremental_update(new[n[7:]], v[n], 0.05) for n in target}

    return fit(w, batch, loss, optax.adam(1e-2), states=target, after=after)


@kind("mixed new")
def mpo_temperature_duals():
    w = lay("pi_", 4, 5, 2) | {"log_temperature": F32(0.5), "log_alpha": F32(0.1)}
    batch = {"obs": normal(5, 4), "actions": normal(3, 5, 2), "q": normal(3, 5)}

    def loss(w, v):
        eta, alpha = jax.nn.softplus(w["log_temperature"]) + 1e-3, jax.nn.softplus(w["log_alpha"])
        weight = jax.lax.stop_gradient(jax.nn.softmax(v["q"] / eta, 0))
        dual = eta * (0.1 + (jax.nn.logsumexp(v["q"] / eta, 0) - jnp.log(3.0)).mean())
        mean = dense(w, v["obs"], "pi_")
        policy = -(weight * gaussian(mean, 0.0, v["actions"])).sum(0).mean()
        kl = 0.5 * ((mean - dense(v, v["obs"], "old_pi_")) ** 2).sum(-1).mean()
        stop = jax.lax.stop_gradient
        return dual + policy + stop(alpha) * kl + alpha * (0.01 - stop(kl)), {"kl": kl, "eta": eta}, {}

    old = {f"old_{n}": x.copy() for n, x in w.items() if n.startswith("pi_")}

    def after(new, v):
        due = v["steps"] % 10 == 0
        return {n: jnp.where(due, new[n[4:]], v[n]) for n in old} | {"steps": v["steps"] + 1}

    return fit(w, batch, loss, optax.adam(1e-2), states=old | {"steps": I32(3)}, after=after)


@kind("donated x0")
def haiku_gan_two_states():
    g, d = lay("gen_", 3, 5, 4), lay("disc_", 4, 6, 1)
    tx = optax.adam(1e-2, b1=0.5)
    gs, ds = (tx.init({n: jnp.asarray(x) for n, x in w.items()}) for w in (g, d))
    tree = jax.tree.structure(gs), jax.tree.structure(ds)
    gl, dl = ({f"{p}.{n}": x for n, x in named_leaves(s).items()} for p, s in (("g_opt", gs), ("d_opt", ds)))

    def run(v):
        wg, wd = {n: v[n] for n in g}, {n: v[n] for n in d}
        fake = lambda w: dense(w, v["z"], "gen_")  # noqa: E731
        bce = lambda p, y: optax.sigmoid_binary_cross_entropy(p, jnp.full_like(p, y)).mean()  # noqa: E731
        gen = lambda w: bce(dense(wd, fake(w), "disc_"), 1.0)  # noqa: E731
        dis = lambda w: bce(dense(w, v["real"], "disc_"), 0.9) + bce(dense(w, fake(wg), "disc_"), 0.0)  # noqa: E731
        (lg, gg), (ld, gd) = jax.value_and_grad(gen)(wg), jax.value_and_grad(dis)(wd)
        new = {}
        for w, grads, leaves, t in ((wg, gg, gl, tree[0]), (wd, gd, dl, tree[1])):
            u, s = tx.update(grads, jax.tree.unflatten(t, [v[n] for n in leaves]), w)
            new |= optax.apply_updates(w, u) | dict(zip(leaves, jax.tree.leaves(s), strict=True))
        ema = {n: 0.99 * v[n] + 0.01 * new[n[4:]] for n in v if n.startswith("ema_")}
        return Outputs({"g_loss": lg, "d_loss": ld}, {}, states=new | ema)

    states = g | d | gl | dl | {f"ema_{n}": x.copy() for n, x in g.items()}
    return Inputs({"z": normal(5, 3), "real": normal(5, 4)}, states), run, [*g, *d]


@kind("inout exporter")
def nnx_dropout_batch_stats():
    w = layers(4, 6, 3) | {"bn_scale": np.ones(6, F32)}
    w["bn_bias"] = w.pop("b1")
    states = {"bn_mean": np.zeros(6, F32), "bn_var": np.ones(6, F32)}

    def loss(w, v):
        h = matmul(v["x"], w["w1"])
        mean, var = h.mean(0), (h * h).mean(0) - h.mean(0) ** 2
        h = jax.nn.relu((h - mean) * jax.lax.rsqrt(var + 1e-4) * w["bn_scale"] + w["bn_bias"]) * v["keep"] / 0.8
        p = matmul(h, w["w2"]) + w["b2"]
        value = optax.softmax_cross_entropy(p, jax.nn.one_hot(v["y"], 3)).mean()
        return (
            value,
            {"logits": p},
            {"bn_mean": 0.99 * v["bn_mean"] + 0.01 * mean, "bn_var": 0.99 * v["bn_var"] + 0.01 * var},
        )

    batch = {"x": normal(6, 4), "y": ints(3, 6), "keep": (np.random.rand(6, 6) < 0.8).astype(F32)}
    return fit(w, batch, loss, optax.sgd(0.05, 0.9), states=states)


@kind("t mixed")
def truncated_bptt_gru():
    w = {"wx": normal(3, 12, scale=0.4), "wh": normal(4, 12, scale=0.4)} | lay("out_", 4, 3)

    def loss(w, v):
        h, total = v["carry"], 0.0
        for t in range(3):
            zx, zh = jnp.split(matmul(v["x"][:, t], w["wx"]), 3, -1), jnp.split(matmul(h, w["wh"]), 3, -1)
            r, z = jax.nn.sigmoid(zx[0] + zh[0]), jax.nn.sigmoid(zx[1] + zh[1])
            h = (1 - z) * jnp.tanh(zx[2] + r * zh[2]) + z * h
            total = total + ((dense(w, h, "out_") - v["y"][:, t]) ** 2).mean()
        return total / 3, {}, {"carry": jax.lax.stop_gradient(h) * (1 - v["reset"])[:, None]}

    batch = {"x": normal(4, 3, 3), "y": normal(4, 3, 3), "reset": np.array([0, 1, 0, 0], F32)}
    return fit(w, batch, loss, optax.rmsprop(1e-2), states={"carry": np.zeros((4, 4), F32)})


@kind("arg")
def score_matching_sliced():
    w = layers(3, 6, 3)

    def loss(w, v):
        score = lambda x: dense(w, x, act=jax.nn.softplus, product=twice)  # noqa: E731
        s, ds = jax.jvp(score, (v["x"],), (v["v"],))
        return ((ds * v["v"]).sum(-1) + 0.5 * (s * v["v"]).sum(-1) ** 2).mean()

    return fit(w, {"x": normal(6, 3), "v": normal(6, 3)}, loss, optax.adam(1e-2))


@kind("new x0")
def energy_langevin_buffer():
    w = layers(3, 6, 1)

    def loss(w, v):
        e = lambda w, x: dense(w, x, act=jax.nn.swish)[:, 0]  # noqa: E731
        x = v["buffer"]
        for _ in range(2):
            x = x - 0.1 * jax.grad(lambda x: e(w, x).sum())(x) + 0.01 * v["noise"]
        x = jax.lax.stop_gradient(jnp.clip(x, -2.0, 2.0))
        pos, neg = e(w, v["x"]), e(w, x)
        value = pos.mean() - neg.mean() + 0.1 * (pos**2 + neg**2).mean()
        return value, {"pos": pos.mean(), "neg": neg.mean()}, {"buffer": x}

    batch = {"x": normal(5, 3), "noise": normal(5, 3)}
    return fit(w, batch, loss, optax.adam(1e-2, b1=0.0), states={"buffer": normal(5, 3)})


@kind("slash anyorder")
def kmeans_and_encoder():
    w = lay("enc_", 5, 6, 3)
    states = {"centroids": normal(4, 3), "counts": np.ones(4, F32)}

    def loss(w, v):
        z = dense(w, v["x"], "enc_")
        d = ((z[:, None] - v["centroids"][None]) ** 2).sum(-1)
        a = jax.nn.one_hot(jax.lax.stop_gradient(d).argmin(-1), 4)
        counts = v["counts"] + a.sum(0)
        moved = v["centroids"] + matmul(a.T, jax.lax.stop_gradient(z) - matmul(a, v["centroids"])) / counts[:, None]
        return (a * d).sum(-1).mean(), {"assignments": d.argmin(-1)}, {"centroids": moved, "counts": counts}

    return fit(w, {"x": normal(7, 5)}, loss, optax.adamw(1e-2), states=states)


@kind("old")
def deq_damped_iteration():
    w = {"w": normal(5, 5, scale=0.2), "u": normal(4, 5), "out": normal(5, 2)}

    def loss(w, v):
        z = v["z_warm"]
        for _ in range(5):
            z = 0.5 * z + 0.5 * jnp.tanh(matmul(z, w["w"]) + matmul(v["x"], w["u"]))
        residual = jnp.abs(jnp.tanh(matmul(z, w["w"]) + matmul(v["x"], w["u"])) - z).max()
        value = ((matmul(z, w["out"]) - v["y"]) ** 2).mean()
        return value, {"residual": residual}, {"z_warm": jax.lax.stop_gradient(z)}

    batch = {"x": normal(4, 4), "y": normal(4, 2)}
    return fit(w, batch, loss, optax.sgd(0.05), states={"z_warm": np.zeros((4, 5), F32)})


@kind("camel stored")
def pinn_poisson_collocation():
    w = layers(1, 8, 1)

    def loss(w, v):
        u = lambda x: dense(w, x, product=twice)  # noqa: E731
        du = lambda x: jax.jvp(u, (x,), (jnp.ones_like(x),))[1]  # noqa: E731
        d2u = jax.jvp(du, (v["x"],), (jnp.ones_like(v["x"]),))[1]
        pde = ((d2u + 9.87 * jnp.sin(3.1416 * v["x"])) ** 2).mean()
        edge = (u(v["edge"]) ** 2).mean()
        return pde + v["weight"] * edge, {"pde": pde, "bc": edge}, {"weight": v["weight"] + 0.1 * edge}

    batch = {"x": normal(6, 1), "edge": np.array([[0.0], [1.0]], F32)}
    return fit(w, batch, loss, optax.adam(1e-2), states={"weight": F32(1)})


@kind("updated")
def swav_sinkhorn_prototypes():
    w = lay("f_", 5, 4) | {"prototypes": normal(4, 6)}

    def loss(w, v):
        a, b = (matmul(unit(dense(w, v[k], "f_")), w["prototypes"]) for k in ("a", "b"))

        def codes(s):
            q = jnp.exp(jax.lax.stop_gradient(s) / 0.5)
            for _ in range(3):
                q = q / q.sum(0, keepdims=True)
                q = q / q.sum(1, keepdims=True)
            return q

        cross = lambda q, s: -(q * jax.nn.log_softmax(s / 0.1)).sum(-1).mean()  # noqa: E731
        return 0.5 * (cross(codes(a), b) + cross(codes(b), a))

    def after(new, v):
        p = new["prototypes"]
        return {"prototypes": p / jnp.sqrt((p * p).sum(0, keepdims=True))}

    return fit(w, {"a": normal(6, 5), "b": normal(6, 5)}, loss, optax.sgd(0.05, 0.9), after=after)
