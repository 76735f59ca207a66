"""Fresh kinds about updates: what an optimizer, or a method around it, carries from step to step."""

from collections.abc import Iterator
from functools import partial

import torch
import torch.nn.functional as F

from models.zoo.pytorch import kinds_fresh_parts as p
from models.zoo.pytorch.kinds_fresh_parts import TWO, ce, mse, small, together
from models.zoo.pytorch.problems import dense, layers, matrix
from models.zoo.steps import Outputs, Step, kind


@p.runs("fresh-nesterov-sequences", "plain numbered bare stored", lambda: together(small(p.clones, "{}_y")))
def nesterov_sequences(v):
    """Nesterov in two sequences: the gradient at y gives the next x, and y goes beyond it; both are carried."""
    y = p.pick(v, TWO, "{}_y")
    loss, grads = p.slope(lambda w: mse(w, v), y)
    x = p.sgd(y, grads, 0.1)
    ahead = {f"{name}_y": x[name] + 0.9 * (x[name] - v[name]) for name in TWO}
    return Outputs({"loss": loss}, states=x | ahead)


@p.updates("fresh-leapfrog", "plain new", lambda: small(p.clones, "{}_prev"), mse)
def leapfrog(w, g, v, _):
    """Leapfrog over two past weights: the gradient at the present one moves the previous one; both shift."""
    return {k: v[f"{k}_prev"] - 0.1 * g[k] for k in w} | p.tag({k: w[k].clone() for k in w}, "{}_prev")


@p.runs(
    "fresh-gossip",
    "plain scrambled",
    lambda: (
        {"x": torch.randn(3, 4, 5), "y": torch.randn(3, 4, 3)},
        {k: w for name in "abc" for k, w in layers(5, 4, 3, prefix=f"{name}_").items()},
    ),
)
def gossip(v):
    """Three workers with a batch each step alone, then average around a ring; a loss each."""
    losses, moved = {}, {}
    for i, name in enumerate("abc"):
        w = {k: v[k] for k in v if k.startswith(f"{name}_")}
        objective = partial(lambda x, y, prefix, w: F.mse_loss(dense(w, x, prefix=prefix), y), v["x"][i], v["y"][i])
        losses[f"{name}_loss"], grads = p.slope(partial(objective, f"{name}_"), w)
        moved |= p.sgd(w, grads)
    ring = {"a": "bc", "b": "ca", "c": "ab"}
    return Outputs(losses, states={k: 0.5 * moved[k] + 0.25 * sum(moved[n + k[1:]] for n in ring[k[0]]) for k in moved})


@p.runs(
    "fresh-federated-round",
    "plain bare",
    lambda: ({"x": torch.randn(2, 4, 5), "y": torch.randn(2, 4, 3)}, p.slots("heavy", layers(5, 4, 3))),
)
def federated_round(v):
    """Two clients go two steps from the server's weights; the deltas are logged, their mean moves the server."""
    deltas, losses = [], []
    for i in (0, 1):
        local = p.pick(v, TWO)
        for _ in range(2):
            loss, grads = p.slope(lambda w, i=i: F.mse_loss(dense(w, v["x"][i]), v["y"][i]), local)
            local = p.sgd(local, grads)
            losses.append(loss)
        deltas.append({k: local[k] - v[k] for k in TWO})
    pull = {k: (deltas[0][k] + deltas[1][k]) / 2 for k in TWO}
    velocity = {f"{k}_vel": 0.9 * v[f"{k}_vel"] + pull[k] for k in TWO}
    states = velocity | {k: v[k] + velocity[f"{k}_vel"] for k in TWO}
    return Outputs({"loss": sum(losses) / 4}, p.tag(deltas[0], "delta_{}"), states=states)


@p.updates(
    "fresh-averaged-evaluation",
    "plain scrambled",
    lambda: small(p.clones, "{}_swa", "{}_vel", classes=True, n=torch.tensor(0)),
    ce,
)
def averaged_evaluation(w, g, v, _):
    """Stochastic weight averaging with a counter; the averaged model's loss on the batch is logged: no loss."""
    states = p.heavy(v, w, g)
    mean = {f"{k}_swa": v[f"{k}_swa"] + (states[k] - v[f"{k}_swa"]) / (v["n"] + 1) for k in w}
    return states | mean | {"n": v["n"] + 1}, {"swa_loss": ce(p.pick(mean, w, "{}_swa"), v)}


@p.updates("fresh-lookahead", "plain bare overridable", lambda: small(p.clones, "{}_slow", k=torch.tensor(0)), mse)
def lookahead(w, g, v, _):
    """Lookahead: an If by a counter, every fifth step, puts fast and slow weights at their middle."""
    fast = p.sgd(w, g)

    def meet(*flat):
        return tuple(0.5 * (x + y) for x, y in zip(flat[::2], flat[1::2], strict=True) for _ in "ab")

    flat = tuple(each for k in w for each in (fast[k], v[f"{k}_slow"]))
    flat = torch.cond((v["k"] + 1) % 5 == 0, meet, lambda *flat: tuple(x.clone() for x in flat), flat)
    fast, slow = (dict(zip(w, flat[i::2], strict=True)) for i in (0, 1))
    return fast | p.tag(slow, "{}_slow") | {"k": v["k"] + 1}


@kind("fresh-ascent-then-descent")
def ascent_then_descent() -> Iterator[Step]:
    """SAM: the gradient of the loss places the perturbed weights; both losses are differentiated, one or both shown."""
    net = layers(5, 6, 4)
    for variant in ("both", "first", "second"):

        def run(v, variant=variant):
            w = p.pick(v, net)
            loss, grads = p.slope(lambda w: ce(w, v), w)
            far = {k: w[k] + 0.05 * grads[k] / (p.norm(grads) + 1e-6) for k in w}
            perturbed, grads = p.slope(lambda w: ce(w, v), far)
            both = {"loss": loss, "sam_loss": perturbed}
            given = {"both": both, "first": {"loss": loss}, "second": {"loss": perturbed}}
            return Outputs(given[variant], states=p.heavy(v, w, grads))

        yield from p.steps(f"{variant}:plain", p.labelled(), p.slots("heavy", net), run)


@kind("fresh-snapshot-gradient")
def snapshot_gradient() -> Iterator[Step]:
    """SVRG: less the gradient at a snapshot on the same batch, more the snapshot's full gradient, a constant."""
    net = layers(5, 6, 4)
    for variant in ("one", "two"):

        def run(v, variant=variant):
            loss, grads = p.slope(lambda w: ce(w, v), p.pick(v, net))
            old, past = p.slope(lambda w: ce(w, v), p.pick(v, net, "{}_snap"))
            direction = {k: grads[k] - past[k] + v[f"{k}_full"] for k in net}
            losses = {"loss": loss} | ({"snapshot_loss": old} if variant == "two" else {})
            return Outputs(losses, states=p.sgd(p.pick(v, net), direction))

        constants = p.clones(net, "{}_snap") | {f"{k}_full": 0.01 * torch.randn_like(x) for k, x in net.items()}
        yield from p.steps(f"{variant}:plain", p.labelled(), net, run, constants=constants)


@p.runs(
    "fresh-two-point-estimate", "plain numbered", lambda: (p.labelled() | p.clones(net := layers(5, 6, 4), "z_{}"), net)
)
def two_point_estimate(v):
    """MeZO: two forward passes, no backward pass, so a refusal is right; noise is fed, any of the losses is right."""
    plus, minus = (ce({k: v[k] + s * 1e-2 * v[f"z_{k}"] for k in TWO}, v) for s in (1, -1))
    slope = (plus - minus) / 2e-2
    states = {k: v[k] - 0.01 * slope * v[f"z_{k}"] for k in TWO}
    return Outputs({"loss": (plus + minus) / 2, "loss_plus": plus}, {"projected": slope}, states=states)


@kind("fresh-merged-adapter")
def merged_adapter() -> Iterator[Step]:
    """LoRA: two factors are trained; the merged weight after the step is logged. The base is a constant."""
    net, base = {"down": matrix(5, 2), "up": torch.zeros(2, 4)}, {"base": matrix(5, 4)}

    def objective(w, v):
        return F.cross_entropy(v["x"] @ v["base"] + 2 * (v["x"] @ w["down"]) @ w["up"], v["y"])

    def update(w, g, v, _):
        states = p.adam(v, w, g)
        return states, {"merged": v["base"] + 2 * states["down"] @ states["up"]}

    carried = {k: x for k, x in p.slots("adam", net).items() if k not in net}
    yield from p.ruled("plain scrambled embedded", p.labelled(), net, carried, objective, update, constants=base)


@p.runs(
    "fresh-schedule-free",
    "plain numbered",
    lambda: (p.measured(), p.clones(layers(5, 6, 3), "z.{}", "x.{}") | {"k": torch.ones(())}),
)
def schedule_free(v):
    """Schedule-free SGD: the gradient at a mix of the base and averaged sequences; both are carried, the mix is not."""
    y = {k: 0.1 * v[f"z.{k}"] + 0.9 * v[f"x.{k}"] for k in TWO}
    loss, grads = p.slope(lambda w: mse(w, v), y)
    z = {k: v[f"z.{k}"] - 0.1 * grads[k] for k in TWO}
    share = 1 / (v["k"] + 1)
    x = {k: (1 - share) * v[f"x.{k}"] + share * z[k] for k in TWO}
    return Outputs({"loss": loss}, states=p.tag(z, "z.{}") | p.tag(x, "x.{}") | {"k": v["k"] + 1})


@p.updates(
    "fresh-adapted-distance",
    "plain scrambled",
    lambda: small(p.zeros, "{}_s", numerator=torch.zeros(()), d=torch.tensor(0.01)),
    mse,
)
def adapted_distance(w, g, v, _):
    """D-Adaptation: an estimate of the distance, a scalar that never falls, scales the steps."""
    total = {f"{k}_s": v[f"{k}_s"] + v["d"] * g[k] for k in w}
    top = v["numerator"] + v["d"] * sum((g[k] * v[f"{k}_s"]).sum() for k in w)
    d = torch.maximum(v["d"], 2 * top / (p.norm(total) + 1e-8))
    return p.sgd(w, g, d) | total | {"numerator": top, "d": d}, {"rate": d}


@kind("fresh-kronecker-curvature")
def kronecker_curvature() -> Iterator[Step]:
    """K-FAC: averages of the activations' and the slopes' covariances, damped inverses by Newton iterations."""
    net = layers(5, 6, 4, bias=False)

    def invert(a):
        eye = torch.eye(a.shape[0])
        a = a + 0.1 * eye
        x = eye / torch.sqrt((a**2).sum())
        for _ in range(7):
            x = x @ (2 * eye - a @ x)
        return x

    def run(v):
        def objective(w):
            hidden = torch.tanh(v["x"] @ w["w1"] + w["e1"])
            return F.cross_entropy(hidden @ w["w2"] + w["e2"], v["y"]), {"w1": v["x"], "w2": hidden}

        probes = {"e1": torch.zeros(6, 6), "e2": torch.zeros(6, 4)}
        loss, grads, seen = p.slope_aux(objective, p.pick(v, net) | probes)
        states = {}
        for k in net:
            slopes = 6 * grads[f"e{k[1]}"]
            a, s = (0.9 * v[f"{k}_{n}"] + 0.1 * x.T @ x / 6 for n, x in (("A", seen[k]), ("S", slopes)))
            states |= {k: v[k] - 0.05 * invert(a) @ grads[k] @ invert(s), f"{k}_A": a, f"{k}_S": s}
        return Outputs({"loss": loss}, states=states)

    carried = {f"{k}_{s}": torch.eye(n) for k, x in net.items() for s, n in zip("AS", x.shape, strict=True)}
    yield from p.steps("plain bare", p.labelled(), net | carried, run)


@p.updates("fresh-learnt-rate", "plain numbered", lambda: small(p.zeros, "{}_past", rate=torch.tensor(0.05)), mse)
def learnt_rate(w, g, v, _):
    """Hypergradient descent: the rate grows by the product of this gradient and the last, which is carried."""
    rate = v["rate"] + 0.01 * sum((g[k] * v[f"{k}_past"]).sum() for k in w)
    return p.sgd(w, g, rate) | p.clones(g, "{}_past") | {"rate": rate}


@p.updates("fresh-slow-gradients", "plain old", lambda: small(p.zeros, "{}_slow", "{}_vel", classes=True), ce)
def slow_gradients(w, g, v, _):
    """Grokfast: an average of the gradients is carried, and added to them before the optimizer."""
    slow = p.blend(p.pick(v, w, "{}_slow"), g, 0.98)
    return p.heavy(v, w, {k: g[k] + 2 * slow[k] for k in w}) | p.tag(slow, "{}_slow")
