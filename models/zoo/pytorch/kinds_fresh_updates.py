"""Fresh kinds about updates: what an optimizer, or a method around it, carries from step to step."""

from collections.abc import Iterator

import torch
import torch.nn.functional as F

from models.zoo.pytorch import kinds_fresh_parts as p
from models.zoo.pytorch.problems import dense, layers, matrix
from models.zoo.steps import Arrays, Outputs, Step, kind


def mse(w, v):
    return F.mse_loss(dense(w, v["x"]), v["y"])


def ce(w, v):
    return F.cross_entropy(dense(w, v["x"], torch.relu), v["y"])


def small(make, *patterns: str, classes: bool = False, **scalars: torch.Tensor) -> dict[str, Arrays]:
    """Return a small problem whose weights are carried with slots of their shapes, and with scalars."""
    net = layers(5, 6, 4 if classes else 3)
    data = p.labelled() if classes else p.measured()
    return {"data": data, "net": net, "carried": make(net, *patterns) | scalars}


@kind("fresh-nesterov-sequences")
def nesterov_sequences() -> Iterator[Step]:
    """Nesterov in two sequences: the gradient at y gives the next x, and y goes beyond it; both are carried."""
    net = layers(5, 6, 3)

    def run(v):
        y = p.pick(v, net, "{}_y")
        loss, grads = p.slope(lambda w: mse(w, v), y)
        x = p.sgd(y, grads, 0.1)
        ahead = {f"{name}_y": x[name] + 0.9 * (x[name] - v[name]) for name in net}
        return Outputs({"loss": loss}, states=x | ahead)

    yield from p.steps("plain numbered bare stored", p.measured(), net | p.clones(net, "{}_y"), run)


@p.updates("fresh-leapfrog", "plain new", lambda: small(p.clones, "{}_prev"), mse)
def leapfrog(w, g, v, _):
    """Leapfrog over two past weights: the gradient at the present one moves the previous one; both shift."""
    return {k: v[f"{k}_prev"] - 0.1 * g[k] for k in w} | p.tag({k: w[k].clone() for k in w}, "{}_prev")


@kind("fresh-gossip")
def gossip() -> Iterator[Step]:
    """Three workers with a batch each step alone, then average around a ring; a loss each."""
    nets = {name: layers(5, 4, 3, prefix=f"{name}_") for name in "abc"}
    everything = nets["a"] | nets["b"] | nets["c"]

    def run(v):
        losses, moved = {}, {}
        for i, (name, net) in enumerate(nets.items()):
            losses[f"{name}_loss"], grads = p.slope(
                lambda w, i=i, name=name: F.mse_loss(dense(w, v["x"][i], prefix=f"{name}_"), v["y"][i]), p.pick(v, net)
            )
            moved |= p.sgd(p.pick(v, net), grads)
        ring = {"a": "bc", "b": "ca", "c": "ab"}
        mixed = {k: 0.5 * moved[k] + 0.25 * sum(moved[n + k[1:]] for n in ring[k[0]]) for k in moved}
        return Outputs(losses, states=mixed)

    yield from p.steps("plain scrambled", {"x": torch.randn(3, 4, 5), "y": torch.randn(3, 4, 3)}, everything, run)


@kind("fresh-federated-round")
def federated_round() -> Iterator[Step]:
    """Two clients go two steps from the server's weights; the deltas are logged, their mean moves the server."""
    net = layers(5, 4, 3)

    def run(v):
        deltas, losses = [], []
        for i in (0, 1):
            local = p.pick(v, net)
            for _ in range(2):
                loss, grads = p.slope(lambda w, i=i: F.mse_loss(dense(w, v["x"][i]), v["y"][i]), local)
                local = p.sgd(local, grads)
                losses.append(loss)
            deltas.append({k: local[k] - v[k] for k in net})
        pull = {k: (deltas[0][k] + deltas[1][k]) / 2 for k in net}
        velocity = {f"{k}_mom": 0.9 * v[f"{k}_mom"] + pull[k] for k in net}
        states = velocity | {k: v[k] + velocity[f"{k}_mom"] for k in net}
        return Outputs({"loss": sum(losses) / 4}, p.tag(deltas[0], "delta_{}"), states=states)

    data = {"x": torch.randn(2, 4, 5), "y": torch.randn(2, 4, 3)}
    yield from p.steps("plain bare", data, p.zeros(net, "{}_mom") | net, run)


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


@kind("fresh-lookahead")
def lookahead() -> Iterator[Step]:
    """Lookahead every fifth step, by Where or by an If."""
    for variant, style in (("where", "plain"), ("if", "plain"), ("if-bare", "bare")):

        def update(w, g, v, _, variant=variant):
            fast, sync = p.sgd(w, g), (v["k"] + 1) % 5 == 0
            if variant == "where":
                slow = {
                    k: torch.where(sync, v[f"{k}_slow"] + 0.5 * (fast[k] - v[f"{k}_slow"]), v[f"{k}_slow"]) for k in w
                }
                fast = {k: torch.where(sync, slow[k], fast[k]) for k in w}
            else:
                flat = tuple(each for k in w for each in (fast[k], v[f"{k}_slow"]))
                flat = torch.cond(
                    sync,
                    lambda *a: tuple(0.5 * (x + y) for x, y in zip(a[::2], a[1::2], strict=True) for _ in "ab"),
                    lambda *a: tuple(x.clone() for x in a),
                    flat,
                )
                fast, slow = (dict(zip(w, flat[i::2], strict=True)) for i in (0, 1))
            return fast | p.tag(slow, "{}_slow") | {"k": v["k"] + 1}

        made = small(p.clones, "{}_slow", k=torch.tensor(0))
        yield from p.ruled(f"{variant}:{style}", objective=mse, update=update, **made)


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


@kind("fresh-two-point-estimate")
def two_point_estimate() -> Iterator[Step]:
    """MeZO: two forward passes, no backward pass, so a refusal is right; noise is fed, any of the losses is right."""
    net = layers(5, 6, 4)

    def run(v):
        plus, minus = (ce({k: v[k] + s * 1e-2 * v[f"z_{k}"] for k in net}, v) for s in (1, -1))
        slope = (plus - minus) / 2e-2
        states = {k: v[k] - 0.01 * slope * v[f"z_{k}"] for k in net}
        return Outputs({"loss": (plus + minus) / 2, "loss_plus": plus}, {"projected": slope}, states=states)

    noise = {f"z_{k}": torch.randn_like(x) for k, x in net.items()}
    yield from p.steps("plain numbered", p.labelled() | noise, net, run)


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
    yield from p.ruled("plain scrambled embedded", p.labelled(), net, objective, update, carried, constants=base)


@kind("fresh-schedule-free")
def schedule_free() -> Iterator[Step]:
    """Schedule-free SGD: the gradient at a mix of the base and averaged sequences; both are carried, the mix is not."""
    net = layers(5, 6, 3)

    def run(v):
        y = {k: 0.1 * v[f"z.{k}"] + 0.9 * v[f"x.{k}"] for k in net}
        loss, grads = p.slope(lambda w: mse(w, v), y)
        z = {k: v[f"z.{k}"] - 0.1 * grads[k] for k in net}
        share = 1 / (v["k"] + 1)
        x = {k: (1 - share) * v[f"x.{k}"] + share * z[k] for k in net}
        return Outputs({"loss": loss}, states=p.tag(z, "z.{}") | p.tag(x, "x.{}") | {"k": v["k"] + 1})

    states = p.clones(net, "z.{}", "x.{}") | {"k": torch.ones(())}
    yield from p.steps("plain numbered", p.measured(), states, run)


@p.updates(
    "fresh-adapted-distance",
    "plain scrambled",
    lambda: small(p.zeros, "{}_s", numerator=torch.zeros(()), d=torch.tensor(1e-2)),
    mse,
)
def adapted_distance(w, g, v, _):
    """D-Adaptation: an estimate of the distance, a scalar that never falls, scales the steps."""
    total = {f"{k}_s": v[f"{k}_s"] + v["d"] * g[k] for k in w}
    top = v["numerator"] + v["d"] * sum((g[k] * v[f"{k}_s"]).sum() for k in w)
    d = torch.maximum(v["d"], 2 * top / (p.norm(total) + 1e-8))
    return p.sgd(w, g, d) | total | {"numerator": top, "d": d}, {"rate": d}


@kind("fresh-factored-moments")
def factored_moments() -> Iterator[Step]:
    """Adafactor: second moments by row and column, clipped updates, steps relative to the weights."""
    net = layers(5, 6, 3, bias=False)

    def update(w, g, v, _):
        states = {}
        for k in w:
            row, col = (0.9 * v[f"{k}_{n}"] + 0.1 * (g[k] ** 2 + 1e-30).mean(d) for n, d in (("r", 1), ("c", 0)))
            step = g[k] / torch.sqrt(row[:, None] * col / row.mean())
            step = step / torch.clamp(torch.sqrt((step**2).mean()), min=1.0)
            size = 0.02 * torch.clamp(torch.sqrt((w[k] ** 2).mean()), min=1e-3)
            states |= {k: w[k] - size * step, f"{k}_r": row, f"{k}_c": col}
        return states

    carried = {f"{k}_{n}": torch.zeros(x.shape[i]) for k, x in net.items() for i, n in enumerate("rc")}
    yield from p.ruled("plain primed", p.measured(), net, mse, update, carried)


def inverse_root(a):
    """Return the inverse square root by coupled Newton iterations."""
    eye, size = torch.eye(a.shape[0]), torch.sqrt((a**2).sum())
    y, z = a / size, eye
    for _ in range(6):
        t = 1.5 * eye - 0.5 * z @ y
        y, z = y @ t, t @ z
    return z / torch.sqrt(size)


@kind("fresh-two-sided-preconditioner")
def two_sided_preconditioner() -> Iterator[Step]:
    """Shampoo: left and right statistics, their inverse roots by Newton iterations, the gradient's norm grafted."""
    net = layers(5, 6, 3, bias=False)

    def update(w, g, v, _):
        states = {}
        for k in w:
            left, right = v[f"{k}_L"] + g[k] @ g[k].T, v[f"{k}_R"] + g[k].T @ g[k]
            step = inverse_root(left) @ g[k] @ inverse_root(right)
            states |= {k: w[k] - 0.1 * step * p.norm({k: g[k]}) / p.norm({k: step}), f"{k}_L": left, f"{k}_R": right}
        return states

    carried = {f"{k}_{s}": 0.1 * torch.eye(n) for k, x in net.items() for s, n in zip("LR", x.shape, strict=True)}
    yield from p.ruled("plain new", p.measured(), net, mse, update, carried)


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
