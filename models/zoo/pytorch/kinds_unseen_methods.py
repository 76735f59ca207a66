"""Steps `unseen-*` by PyTorch: methods around a loss and an optimizer, as papers and libraries' examples have them."""

import torch
import torch.nn.functional as F

from models.zoo.pytorch.unseen_parts import R, fit, mlp, net
from models.zoo.pytorch.unseen_rules import RULES, dot, sub, tag, zipped
from models.zoo.steps import Inputs, Outputs
from models.zoo.unseen import add

I = torch.randint  # noqa: E741
grad = torch.func.grad


def clone(w, key):
    return {f"{key}.{n}": x.clone() for n, x in w.items()}


def ema_of(key, rate, names=None):
    return lambda new, v: {
        k: rate * x + (1 - rate) * new[k[len(key) + 1 :]] for k, x in v.items() if k.startswith(f"{key}.")
    }


def unit(x):
    return x / x.square().sum(-1, keepdim=True).add(1e-6).sqrt()


def mse(w, v):
    return F.mse_loss(net(w, v["x"]), v["y"])


def ce(w, v):
    return F.cross_entropy(net(w, v["x"]), v["y"])


def real():
    return {"x": R(5, 4), "y": R(5, 3)}


def classes():
    return {"x": R(6, 4), "y": I(0, 3, (6,))}


def method(f):
    """Register a function by its name; its docstring is the faces and its title."""
    faces, _, right = f.__doc__.partition(";")
    add(f.__name__.replace("_", "-"), "pytorch", f, faces.strip(), right.strip() or "scale")
    return f


@method
def fedprox_client():
    """x0 next"""
    w = mlp(4, 6, 3)

    def loss(w, v):
        near = sum(((x - v[f"global.{n}"]) ** 2).sum() for n, x in w.items())
        return ce(w, v) + 0.5 * v["mu"] * near, Outputs(metrics={"proximal": near})

    return fit(w, classes(), loss, RULES["sgd"], constants=clone(w, "global"), hyper={"mu": torch.tensor(0.1)})


@method
def scaffold_client():
    """inout"""
    w = mlp(4, 5, 3)
    c, ci = (
        {f"c.{n}": 0.01 * torch.randn_like(x) for n, x in w.items()},
        {f"ci.{n}": torch.zeros_like(x) for n, x in w.items()},
    )

    def hook(g, v):
        return {n: x - v[f"ci.{n}"] + v[f"c.{n}"] for n, x in g.items()}, Outputs()

    def after(new, v):
        return {f"ci.{n}": v[f"ci.{n}"] - v[f"c.{n}"] + (v[n] - new[n]) / 0.1 for n in w}

    return fit(w, real(), mse, RULES["sgd"], states=ci, constants=c, hook=hook, after=after)


@method
def fedavg_two_clients():
    """new mixed"""
    w = mlp(3, 5, 2)
    batch = {"xa": R(4, 3), "ya": R(4, 2), "xb": R(6, 3), "yb": R(6, 2), "share": torch.tensor([0.4, 0.6])}

    def run(v):
        w0 = {n: v[n] for n in w}
        losses, ends = [], []
        for k in "ab":
            own = w0
            for _ in range(2):
                g, value = torch.func.grad_and_value(lambda p, k=k: F.mse_loss(net(p, v[f"x{k}"]), v[f"y{k}"]))(own)
                own = zipped(lambda p, g: p - 0.1 * g, own, g)
                losses.append(value)
            ends.append(own)
        new = zipped(lambda a, b: v["share"][0] * a + v["share"][1] * b, *ends)
        return Outputs({"train_loss": torch.stack(losses).mean()}, {"client_b_first": losses[2]}, {}, new)

    return Inputs(batch, w), run, list(w)


@method
def reptile_outer():
    """t"""
    w = mlp(1, 8, 1)
    batch = {"xs": R(3, 5, 1), "ys": R(3, 5, 1)}

    def run(v):
        w0, moved, total = {n: v[n] for n in w}, [], []
        for i in range(3):
            p = w0
            for _ in range(2):
                g, value = torch.func.grad_and_value(lambda p, i=i: F.mse_loss(net(p, v["xs"][i]), v["ys"][i]))(p)
                p = zipped(lambda a, g: a - 0.05 * g, p, g)
            moved.append(p)
            total.append(value)
        mean = zipped(lambda *a: torch.stack(a).mean(0), *moved)
        eps = 0.5 * (1 - v["iteration"].float() / 1000)
        new = zipped(lambda a, b: a + eps * (b - a), w0, mean)
        return Outputs({"inner_loss": torch.stack(total).mean()}, {}, {}, new | {"iteration": v["iteration"] + 1})

    return Inputs(batch, w | {"iteration": torch.tensor(0)}), run, list(w)


@method
def maml_first_order():
    """mixed next"""
    w = mlp(1, 6, 1)
    batch = {k: R(2, 4, 1) for k in ("xs", "ys", "xq", "yq")}

    def loss(w, v):
        total = 0.0
        for i in range(2):
            g = grad(lambda p, i=i: F.mse_loss(net(p, v["xs"][i]), v["ys"][i]))(w)
            fast = {n: x - 0.1 * g[n].detach() for n, x in w.items()}
            total = total + F.mse_loss(net(fast, v["xq"][i]), v["yq"][i])
        return total / 2

    return fit(w, batch, loss, RULES["adam"])


@method
def anil_head():
    """donated"""
    w = mlp(4, 6, p="body") | {"head.weight": R(3, 6) / 3}
    batch = {"xs": R(5, 4), "ys": R(5, 3), "xq": R(4, 4), "yq": R(4, 3)}

    def loss(w, v):
        h = torch.tanh(net(w, v["xs"], "body"))
        head = w["head.weight"]
        for _ in range(2):
            head = head - 0.1 * (2.0 / 15) * (h @ head.T - v["ys"]).T @ h
        return F.mse_loss(torch.tanh(net(w, v["xq"], "body")) @ head.T, v["yq"])

    return fit(w, batch, loss, RULES["momentum"])


@method
def simclr_ntxent():
    """x0 exporter"""
    w = mlp(6, 8, p="enc") | mlp(8, 4, p="proj", bias=False)

    def loss(w, v):
        z = unit(net(w, F.relu(net(w, torch.cat([v["view1"], v["view2"]]), "enc")), "proj"))
        s = z @ z.T / 0.5 - 1e4 * torch.eye(8)
        y = torch.cat([torch.arange(4, 8), torch.arange(0, 4)])
        top = (s.argmax(1) == y).float().mean()
        return F.cross_entropy(s, y), Outputs(metrics={"top1": top})

    return fit(w, {"view1": R(4, 6), "view2": R(4, 6)}, loss, RULES["lars"])


@method
def moco_v3_momentum():
    """serving"""
    w = mlp(6, 5, 4, p="q")
    states = {n.replace("q", "k", 1): x.clone() for n, x in w.items()}

    def loss(w, v):
        q = unit(net(w, v["im_q"], "q"))
        k = unit(net({n: v[n] for n in states}, v["im_k"], "k")).detach()
        return 2 * 0.2 * F.cross_entropy(q @ k.T / 0.2, torch.arange(5))

    def after(new, v):
        m = 1 - 0.5 * (1 + torch.cos(3.1416 * v["progress"])) * 0.01
        return {k: m * v[k] + (1 - m) * v[k.replace("k", "q", 1)] for k in states}

    batch = {"im_q": R(5, 6), "im_k": R(5, 6), "progress": torch.tensor(0.3)}
    return fit(w, batch, loss, RULES["adamw-int"], states=states, after=after)


@method
def byol_two_views():
    """new mixed"""
    w = mlp(5, 6, 4, p="online") | mlp(4, 4, p="pred")
    states = {n.replace("online", "target"): x.clone() for n, x in w.items() if n.startswith("online")}

    def loss(w, v):
        total, t = 0.0, {n: v[n] for n in states}
        for a, b in (("v1", "v2"), ("v2", "v1")):
            p = unit(net(w, torch.tanh(net(w, v[a], "online")), "pred"))
            total = total + (2 - 2 * (p * unit(net(t, v[b], "target")).detach()).sum(1)).mean()
        return total

    def after(new, v):
        tau = 1 - (1 - 0.99) * (torch.cos(3.1416 * v["global_step"].float() / 500) + 1) / 2
        after = {n: tau * v[n] + (1 - tau) * new[n.replace("target", "online")] for n in states}
        return after | {"global_step": v["global_step"] + 1}

    states_all = states | {"global_step": torch.tensor(3)}
    return fit(w, {"v1": R(4, 5), "v2": R(4, 5)}, loss, RULES["nesterov"], states=states_all, after=after)


@method
def dino_multicrop():
    """old arg"""
    w = mlp(5, 6, 7, p="s")
    states = {n.replace("s", "t", 1): x.clone() for n, x in w.items()} | {"center": torch.zeros(1, 7)}

    def loss(w, v):
        t = net(v, torch.cat([v["g1"], v["g2"]]), "t").detach()
        p = F.softmax((t - v["center"]) / 0.07, -1).chunk(2)
        total, terms = 0.0, 0
        for i, crop in enumerate(("g1", "g2", "l1")):
            logp = F.log_softmax(net(w, v[crop], "s") / 0.1, -1)
            for j in range(2):
                if i != j:
                    total, terms = total - (p[j] * logp).sum(-1).mean(), terms + 1
        entropy = -(p[0] * (p[0] + 1e-6).log()).sum(-1).mean()
        return total / terms, Outputs(
            metrics={"teacher_entropy": entropy}, states={"center": 0.9 * v["center"] + 0.1 * t.mean(0, keepdim=True)}
        )

    def after(new, v):
        return {n: 0.99 * v[n] + 0.01 * new[n.replace("t", "s", 1)] for n in states if n != "center"}

    return fit(w, {k: R(3, 5) for k in ("g1", "g2", "l1")}, loss, RULES["adamw-int"], states=states, after=after)


@method
def vicreg_terms():
    """slash"""
    w = mlp(5, 6, 4, bias=False)

    def loss(w, v):
        a, b = net(w, v["a"]), net(w, v["b"])
        inv = F.mse_loss(a, b)
        a, b = a - a.mean(0), b - b.mean(0)
        var = sum(F.relu(1 - (x.square().sum(0) / 5 + 1e-4).sqrt()).mean() / 2 for x in (a, b))
        cov = sum((((x.T @ x / 5) * (1 - torch.eye(4))) ** 2).sum() / 4 for x in (a, b))
        return 25 * inv + 25 * var + cov, Outputs(metrics={"inv": inv, "var": var, "cov": cov})

    return fit(w, {"a": R(6, 5), "b": R(6, 5)}, loss, RULES["lars"])


@method
def clip_siglip():
    """camel"""
    w = mlp(5, 4, p="img") | mlp(6, 4, p="txt") | {"t_prime": torch.tensor(1.0), "bias": torch.tensor(-2.0)}

    def loss(w, v):
        s = unit(net(w, v["image"], "img")) @ unit(net(w, v["text"], "txt")).T * w["t_prime"].exp() + w["bias"]
        return -F.logsigmoid((2 * torch.eye(4) - 1) * s).sum() / 4, Outputs(metrics={"scale": w["t_prime"].exp()})

    return fit(w, {"image": R(4, 5), "text": R(4, 6)}, loss, RULES["adan"])


@method
def gradnorm_tasks():
    """updated next"""
    w = mlp(4, 5, p="trunk") | {"h0": R(5, 1), "h1": R(5, 2)}
    batch = {"x": R(6, 4), "y0": R(6, 1), "y1": R(6, 2)}

    def run(v):
        def each(w):
            h = torch.tanh(net(w, v["x"], "trunk"))
            return torch.stack([F.mse_loss(h @ w[f"h{i}"], v[f"y{i}"]) for i in range(2)])

        p, lw = {n: v[n] for n in w}, v["task_weights"]
        losses = each(p)
        g = grad(lambda p: (lw * each(p)).sum())(p)
        norms = torch.stack([grad(lambda p, i=i: each(p)[i])(p)["trunk0.weight"].norm() for i in range(2)])
        ratio = losses / v["initial_losses"]
        want = (lw * norms).mean() * (ratio / ratio.mean()) ** 1.5
        lw = lw - 0.02 * torch.sign(lw * norms - want) * norms
        new = zipped(lambda a, b: a - 0.1 * b, p, g) | {"task_weights": 2 * lw / lw.sum()}
        return Outputs({"loss": (v["task_weights"] * losses).sum()}, {"task_losses": losses}, {}, new)

    return (
        Inputs(batch, w | {"task_weights": torch.ones(2)}, {}, {"initial_losses": torch.tensor([1.2, 1.1])}),
        run,
        list(w),
    )


def conflict(combine):
    """Make a step of two tasks whose gradients are combined."""

    def make():
        w = mlp(4, 5, 3)
        batch = {"x": R(6, 4), "y": R(6, 3), "z": I(0, 3, (6,))}

        def run(v):
            p = {n: v[n] for n in w}
            found = [
                torch.func.grad_and_value(lambda p: F.mse_loss(net(p, v["x"]), v["y"]))(p),
                torch.func.grad_and_value(lambda p: F.cross_entropy(net(p, v["x"]), v["z"]))(p),
            ]
            g = combine(*[f[0] for f in found])
            new = zipped(lambda p, m, g: p - 0.05 * (0.9 * m + g), p, sub(v, "m"), g)
            moments = zipped(lambda m, g: 0.9 * m + g, sub(v, "m"), g)
            return Outputs({"loss_reg": found[0][1], "loss_cls": found[1][1]}, {}, {}, new | tag("m", moments))

        return Inputs(batch, w | tag("m", {n: torch.zeros_like(x) for n, x in w.items()})), run, list(w)

    return make


def mgda(a, b):
    d = zipped(torch.sub, b, a)
    alpha = (dot(d, b) / (dot(d, d) + 1e-7)).clamp(0, 1)
    return zipped(lambda a, b: alpha * a + (1 - alpha) * b, a, b)


def cagrad(a, b):
    mean = zipped(lambda a, b: (a + b) / 2, a, b)
    size = dot(mean, mean).sqrt()
    ways = [zipped(lambda a, b, s=s: s * a + (1 - s) * b, a, b) for s in (0.0, 0.25, 0.5, 0.75, 1.0)]
    score = torch.stack([dot(x, mean) + 0.5 * size * dot(x, x).sqrt() for x in ways])
    pick = (score == score.min()).float()
    best = zipped(lambda *x: sum(p * y for p, y in zip(pick, x, strict=True)), *ways)
    return zipped(lambda m, x: m + 0.5 * size / (dot(best, best).sqrt() + 1e-6) * x, mean, best)


def pcgrad(a, b):
    ab = dot(a, b)
    part = ab.clamp(max=0)
    return zipped(lambda x, y: x - part / (dot(b, b) + 1e-7) * y + y - part / (dot(a, a) + 1e-7) * x, a, b)


add("mgda-two-tasks", "pytorch", conflict(mgda), "x0")
add("cagrad-two-tasks", "pytorch", conflict(cagrad), "inout")
add("pcgrad-momentum", "pytorch", conflict(pcgrad), "exporter next")


@method
def rlw_dwa_weights():
    """anyorder"""
    w = mlp(4, 5, p="t") | {"a": R(5, 2), "b": R(5, 1)}

    def loss(w, v):
        h = F.relu(net(w, v["x"], "t"))
        each = torch.stack([F.mse_loss(h @ w["a"], v["ya"]), F.l1_loss(h @ w["b"], v["yb"])])
        share = 2 * torch.softmax(v["prev1"] / v["prev2"] / 2.0, 0)
        return (share * each).sum(), Outputs(
            states={"prev1": each.detach(), "prev2": v["prev1"]}, metrics={"weights": share}
        )

    batch = {"x": R(5, 4), "ya": R(5, 2), "yb": R(5, 1)}
    return fit(w, batch, loss, RULES["adam"], states={"prev1": torch.ones(2), "prev2": torch.ones(2)})


@method
def kendall_uncertainty():
    """stored x0"""
    w = mlp(4, 5, p="t") | {"seg": R(5, 3), "depth": R(5, 1), "log_vars": torch.zeros(2)}

    def loss(w, v):
        h = torch.tanh(net(w, v["x"], "t"))
        a, b = F.cross_entropy(h @ w["seg"], v["label"]), F.l1_loss(h @ w["depth"], v["d"])
        s = w["log_vars"]
        metrics = {"loss_seg": a, "loss_depth": b, "sigmas": (s / 2).exp()}
        return torch.exp(-s[0]) * a + s[0] + torch.exp(-s[1]) * b + s[1], Outputs(metrics=metrics)

    return fit(w, {"x": R(5, 4), "label": I(0, 3, (5,)), "d": R(5, 1)}, loss, RULES["yogi"])
