"""Fresh kinds about methods: precision, counters, buffers, reinforcement."""

import torch
import torch.nn.functional as F

from models.zoo.pytorch import kinds_fresh_parts as p
from models.zoo.pytorch.kinds_fresh_parts import TWO, ce, mse, small, together
from models.zoo.pytorch.problems import dense, layers, matrix, one_hot
from models.zoo.steps import Outputs


def where(flag, new, old):
    return {k: torch.where(flag, new[k], old[k]) for k in new}


def half():
    net = layers(5, 6, 3)
    return {k: x.half() for k, x in p.measured().items()}, {f"{k}_half": w.half() for k, w in net.items()} | net


@p.runs("fresh-half-weights", "plain new scrambled", half)
def half_weights(v):
    """Float16 weights and their float32 masters are both carried; the loss is float32."""
    w = p.pick(v, TWO, "{}_half")
    loss, grads = p.slope(lambda w: (dense(w, v["x"]).float() - v["y"].float()).square().mean(), w)
    masters = p.sgd(p.pick(v, TWO), {k: g.float() for k, g in grads.items()})
    return Outputs({"loss": loss}, states=masters | {f"{k}_half": w.half() for k, w in masters.items()})


@p.runs(
    "fresh-own-scale", "plain bare", lambda: together(small(p.clones, scale=torch.tensor(1024.0), good=torch.tensor(3)))
)
def own_scale(v):
    """A dynamic loss scale of its own: the loss is multiplied, the gradients divided, the step perhaps skipped."""
    w = p.pick(v, TWO)
    loss, grads = p.slope(lambda w: mse(w, v) * v["scale"], w)
    grads = {k: g / v["scale"] for k, g in grads.items()}
    fine = torch.isfinite(p.norm(grads))
    good = torch.where(fine, v["good"] + 1, 0)
    scale = torch.where(fine, torch.where(good >= 200, v["scale"] * 2, v["scale"]), v["scale"] / 2)
    states = where(fine, p.sgd(w, grads), w) | {"scale": scale, "good": good % 200}
    return Outputs({"loss": loss / v["scale"]}, {"fine": fine.float()}, states=states)


def counted():
    scalars = {
        "notfinite_count": torch.tensor(0),
        "total_notfinite": torch.tensor(0),
        "last_finite": torch.tensor(True),
    }
    return together(small(p.clones, **scalars))


@p.runs("fresh-finite-counters", "plain scrambled", counted)
def finite_counters(v):
    """optax.apply_if_finite: two counters and a flag that advance on a skipped step, too."""
    w = p.pick(v, TWO)
    loss, grads = p.slope(lambda w: mse(w, v), w)
    fine = torch.isfinite(p.norm(grads))
    count = torch.where(fine, 0, v["notfinite_count"] + 1)
    kept = {"notfinite_count": count, "total_notfinite": v["total_notfinite"] + (~fine).long(), "last_finite": fine}
    return Outputs({"loss": loss}, states=where(fine | (count > 5), p.sgd(w, grads), w), kept=kept)


@p.updates("fresh-accumulated-four", "plain numbered", lambda: small(p.zeros, "{}_acc", mini_step=torch.tensor(0)), mse)
def accumulated_four(w, g, v, _):
    """Gradients are accumulated for four steps under a counter; the weights move on the fourth."""
    total, last = {k: v[f"{k}_acc"] + g[k] / 4 for k in w}, v["mini_step"] == 3
    held = {k: torch.where(last, 0.0, total[k]) for k in w}
    return where(last, p.sgd(w, total), w) | p.tag(held, "{}_acc") | {"mini_step": (v["mini_step"] + 1) % 4}


@p.updates(
    "fresh-best-so-far",
    "plain new bare dynamic",
    lambda: small(p.clones, "{}_best", best=torch.tensor(9.0), bad=torch.tensor(0)),
    mse,
)
def best_so_far(w, g, v, loss):
    """The best loss, the best weights, a counter of bad steps: carried; training stops after ten bad ones."""
    better = loss < v["best"] * 0.999
    kept = where(better, w, p.pick(v, w, "{}_best"))
    bad = torch.where(better, 0, v["bad"] + 1)
    states = where(bad < 10, p.sgd(w, g), w) | p.tag(kept, "{}_best")
    return states | {"best": torch.where(better, loss, v["best"]), "bad": bad}


@p.updates(
    "fresh-rates-handed-through",
    "plain numbered stored",
    lambda: small(p.zeros, "{}_vel", rate=torch.tensor(0.05), beta=torch.tensor(0.9)),
    mse,
)
def rates_handed_through(w, g, v, _):
    """inject_hyperparams: rate and decay are part of the state, and come out as they went in."""
    return p.heavy(v, w, g, v["rate"], v["beta"]) | {k: v[k].clone() for k in ("rate", "beta")}


@p.trains(
    "fresh-online-consolidation",
    "plain scrambled",
    lambda: (p.labelled(), (net := layers(5, 6, 4)), p.zeros(net, "{}_fisher"), p.clones(net, "{}_old")),
    extra=lambda v, _, g: {f"{k}_fisher": 0.9 * v[f"{k}_fisher"] + 0.1 * g[k] ** 2 for k in g},
)
def online_consolidation(w, v):
    """EWC: a penalty around old weights by a Fisher average that is carried; task and penalty are parts of the loss."""
    penalty = sum((v[f"{k}_fisher"] * (w[k] - v[f"{k}_old"]) ** 2).sum() for k in w)
    return ce(w, v) + 20 * penalty, {"task": ce(w, v), "penalty": penalty}


@p.updates("fresh-stashed-weights", "plain bare", lambda: small(p.clones, "{}_mid", "{}_new"), mse)
def stashed_weights(w, g, v, _):
    """PipeDream: the gradient at the oldest of three weights moves the newest; the history shifts; a soup is logged."""
    old, middle = p.pick(v, w, "{}_mid"), p.pick(v, w, "{}_new")
    new = p.sgd(middle, g)
    return old | p.tag(middle, "{}_mid") | p.tag(new, "{}_new"), {"soup": (new["w1"] + middle["w1"] + old["w1"]) / 3}


@p.trains(
    "fresh-contrast-queue",
    "plain scrambled",
    lambda: (
        {"x": torch.randn(4, 5), "other": torch.randn(4, 5)},
        (net := layers(5, 6, 3)),
        p.clones(net, "{}_key") | {"queue": F.normalize(torch.randn(8, 3), dim=1), "at": torch.tensor(0)},
    ),
    extra=lambda v, s, g: p.tag(p.blend(p.pick(v, g, "{}_key"), s, 0.99), "{}_key"),
)
def contrast_queue(w, v):
    """MoCo: a slow key encoder, and a queue of keys that is written at a carried position."""
    query, key = F.normalize(dense(w, v["x"]), dim=1), F.normalize(dense(p.pick(v, w, "{}_key"), v["other"]), dim=1)
    logits = torch.cat([(query * key).sum(1, keepdim=True), query @ v["queue"].T], 1) / 0.2
    rows = one_hot((v["at"] + torch.arange(4)) % 8, 8)
    queue = v["queue"] * (1 - rows.sum(0)[:, None]) + rows.T @ key
    return (torch.logsumexp(logits, 1) - logits[:, 0]).mean(), {"queue": queue.detach(), "at": (v["at"] + 4) % 8}


@p.trains(
    "fresh-averaged-codes",
    "plain numbered",
    lambda: (
        {"x": torch.randn(7, 6)},
        {"enc": matrix(6, 4), "dec": matrix(4, 6)},
        {"codes": (codes := torch.randn(5, 4)), "sizes": torch.ones(5), "sums": codes.clone()},
    ),
)
def averaged_codes(w, v):
    """VQ-VAE: codes by averages of sizes and sums; straight-through; reconstruction and commitment are parts."""
    z = v["x"] @ w["enc"]
    apart = (z.detach() ** 2).sum(1, keepdim=True) - 2 * z.detach() @ v["codes"].T + (v["codes"] ** 2).sum(1)
    hot = one_hot(apart.argmin(1), 5)
    sizes, sums = 0.9 * v["sizes"] + 0.1 * hot.sum(0), 0.9 * v["sums"] + 0.1 * hot.T @ z.detach()
    near = hot @ v["codes"]
    recon, commit = F.mse_loss((z + (near - z).detach()) @ w["dec"], v["x"]), F.mse_loss(z, near)
    carried = {"sizes": sizes, "sums": sums, "codes": sums / (sizes + 1e-3)[:, None]}
    return recon + 0.25 * commit, {"recon": recon, "commit": commit} | carried


@p.trains(
    "fresh-one-inner-step",
    "plain bare",
    lambda: (p.measured() | p.tag(p.measured(), "{}_query"), layers(5, 6, 3)),
    losses="query_loss",
)
def one_inner_step(w, v):
    """MAML: the loss on the query after one step on the support; the support's loss is logged: no loss."""
    before, grads = p.slope(lambda u: mse(u, v), w)
    return mse(p.sgd(w, grads, 0.1), p.pick(v, "xy", "{}_query")), {"support_loss": before}


@p.trains(
    "fresh-clipped-policy",
    "plain exporter",
    lambda: (
        p.labelled(8) | {"logp": -torch.rand(8) - 1, "adv": torch.randn(8), "ret": torch.randn(8)},
        layers(5, 6, 4) | {"value": matrix(5, 1)},
    ),
)
def clipped_policy(w, v):
    """PPO: policy, value and entropy in one loss; its parts, the clipped share and the divergence are logged."""
    logp = torch.log_softmax(dense(w, v["x"]), 1)
    change = logp.gather(1, v["y"][:, None])[:, 0] - v["logp"]
    policy = -torch.minimum(torch.exp(change) * v["adv"], torch.exp(change).clamp(0.8, 1.2) * v["adv"]).mean()
    value, entropy = F.mse_loss((v["x"] @ w["value"])[:, 0], v["ret"]), -(torch.exp(logp) * logp).sum(1).mean()
    logged = {"pg_loss": policy, "v_loss": value, "entropy": entropy, "approx_kl": -change.mean()}
    return policy + 0.5 * value - 0.01 * entropy, logged | {"clipped": (change.abs() > 0.2).float().mean()}


def replay():
    net = layers(3, 6, 2)
    memory = {"seen": torch.randn(9, 3), "after": torch.randn(9, 3), "gain": torch.randn(9), "acts": torch.zeros(9)}
    data = {"s": torch.randn(3), "s2": torch.randn(3), "r": torch.tensor(0.5), "a": torch.tensor(1.0)}
    states = net | p.clones(net, "{}_target") | memory | {"step": torch.tensor(0)}
    return data | {"drawn": torch.randint(9, (5,))}, states


@p.runs("fresh-replay-inside", "plain scrambled stored", replay)
def replay_inside(v):
    """DQN: a transition is written into the buffer, a fed draw is learnt; targets by a hard copy; errors are logged."""
    here = torch.arange(9) == v["step"] % 9
    pairs = {"seen": "s", "after": "s2", "gain": "r", "acts": "a"}
    memory = {k: torch.where(here[:, None] if v[k].dim() == 2 else here, v[x], v[k]) for k, x in pairs.items()}
    seen, after, gain, acts = (memory[k][v["drawn"]] for k in pairs)
    best = dense(p.pick(v, TWO, "{}_target"), after).max(1).values

    def objective(w):
        q = dense(w, seen)
        error = torch.where(acts > 0, q[:, 1], q[:, 0]) - gain - 0.9 * best
        return (error**2).mean(), {"errors": error}

    loss, grads, logged = p.slope_aux(objective, p.pick(v, TWO))
    states = p.sgd(p.pick(v, TWO), grads)
    target = where(v["step"] % 20 == 19, states, p.pick(v, TWO, "{}_target"))
    return Outputs(
        {"loss": loss}, logged, states=states | memory | p.tag(target, "{}_target") | {"step": v["step"] + 1}
    )


@p.trains(
    "fresh-carried-gru",
    "plain scrambled raw stored",
    lambda: (
        p.measured(4, 5, 2) | {"reset": torch.tensor([0.0, 1, 0, 0])},
        {"wx": matrix(5, 9), "wh": matrix(3, 9), "out": matrix(3, 2)},
        {"h": torch.zeros(4, 3), "score": torch.zeros(())},
    ),
)
def carried_gru(w, v):
    """A GRU cell whose state is carried, and reset by the batch; a smoothed loss is carried beside it."""
    h = v["h"] * (1 - v["reset"][:, None])
    (xr, xz, xn), (hr, hz, hn) = (v["x"] @ w["wx"]).chunk(3, 1), (h @ w["wh"]).chunk(3, 1)
    z = torch.sigmoid(xz + hz)
    h = (1 - z) * torch.tanh(xn + torch.sigmoid(xr + hr) * hn) + z * h
    loss = F.mse_loss(h @ w["out"], v["y"])
    return loss, {"h": h.detach(), "score": (0.95 * v["score"] + 0.05 * loss).detach()}


@p.trains(
    "fresh-normalized-batch",
    "plain bare",
    lambda: (
        p.labelled(),
        {"w1": matrix(5, 6), "gamma": torch.ones(6), "beta": torch.zeros(6), "w2": matrix(6, 4)},
        {"mean": torch.zeros(6), "var": torch.ones(6), "batches": torch.tensor(0)},
    ),
    rule="heavy",
)
def normalized_batch(w, v):
    """Batch normalization with running statistics and torch's counter of batches."""
    h = v["x"] @ w["w1"]
    mean, var = h.mean(0), h.var(0, unbiased=False)
    hidden = torch.relu((h - mean) * torch.rsqrt(var + 1e-5) * w["gamma"] + w["beta"])
    running = {k: (0.9 * v[k] + 0.1 * x).detach() for k, x in (("mean", mean), ("var", var * 6 / 5))}
    return F.cross_entropy(hidden @ w["w2"], v["y"]), running | {"batches": v["batches"] + 1}


@p.trains(
    "fresh-observed-quantizer",
    "plain numbered",
    lambda: (p.measured(), layers(5, 6, 3), {"low": torch.tensor(-1.0), "high": torch.ones(())}),
)
def observed_quantizer(w, v):
    """Quantization-aware training: weights by their largest, inputs by observed bounds that are carried."""
    low, high = 0.9 * v["low"] + 0.1 * v["x"].min(), 0.9 * v["high"] + 0.1 * v["x"].max()
    size = (high - low) / 255
    x = torch.clamp(torch.round((v["x"] - low) / size), 0, 255) * size + low
    step = w["w1"].abs().max().detach() / 127
    rounded = w["w1"] + (torch.round(w["w1"] / step) * step - w["w1"]).detach()
    return mse(w | {"w1": rounded}, v | {"x": x}), {"low": low, "high": high, "weight_scale": step}


@p.runs("fresh-logged-adversary", "plain scrambled", lambda: (p.labelled(), layers(5, 6, 4)))
def logged_adversary(v):
    """Adversarial training: the example by the sign of the clean loss' gradient is logged, its loss is trained."""
    grad = torch.func.grad(lambda x: ce(v, {**v, "x": x}))(v["x"])
    adversary = v["x"] + 0.1 * torch.sign(grad)
    loss, grads = p.slope(lambda w: ce(w, {**v, "x": adversary}), p.pick(v, TWO))
    return Outputs({"loss": loss}, {"adversary": adversary}, states=p.sgd(p.pick(v, TWO), grads))
