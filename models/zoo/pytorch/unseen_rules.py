"""Update rules of the steps `unseen-*` by PyTorch, written from their papers."""

from collections.abc import Callable

import torch
from torch import Tensor

from models.zoo.pytorch.unseen_parts import FLOAT, INT, R, Rule, per
from models.zoo.steps import Arrays


def adamw(w, g, m, u, t, lr=0.01, b1=0.9, b2=0.99, wd=0.01):
    m, u = m.lerp(g, 1 - b1), b2 * u + (1 - b2) * g * g
    return w * (1 - lr * wd) - lr * (m / (1 - b1**t)) / ((u / (1 - b2**t)).sqrt() + 1e-7), m, u


def adan(w, g, m, d, n, before, t):
    diff = torch.where(t > 1, g - before, torch.zeros_like(g))
    m, d = 0.98 * m + 0.02 * g, 0.92 * d + 0.08 * diff
    n = 0.99 * n + 0.01 * (g + 0.92 * diff) ** 2
    denom = (n / (1 - 0.99**t)).sqrt() + 1e-7
    return (w - 0.01 * (m / (1 - 0.98**t) + 0.92 * d / (1 - 0.92**t)) / denom) / (1 + 0.01 * 0.02), m, d, n, g


def yogi(w, g, m, u, t):
    m = 0.9 * m + 0.1 * g
    u = u - 0.001 * torch.sign(u - g * g) * g * g
    return w - 0.01 * (m / (1 - 0.9**t)) / ((u / (1 - 0.999**t)).clamp(min=0).sqrt() + 1e-3), m, u


def adabelief(w, g, m, s, t):
    m = 0.9 * m + 0.1 * g
    s = 0.999 * s + 0.001 * (g - m).pow(2) + 1e-7
    return w - 0.01 * (m / (1 - 0.9**t)) / ((s / (1 - 0.999**t)).sqrt() + 1e-3), m, s


def radam(w, g, m, u, t, lr=0.01, top=999.0):
    m, u = 0.9 * m + 0.1 * g, 0.998 * u + 0.002 * g * g
    rho = top - 2 * t * 0.998**t / (1 - 0.998**t)
    rect = (((rho - 4) * (rho - 2) * top) / ((top - 4) * (top - 2) * rho).clamp(min=1e-3)).clamp(min=0).sqrt()
    moved = m / (1 - 0.9**t)
    return w - lr * torch.where(rho > 5, rect * moved / ((u / (1 - 0.998**t)).sqrt() + 1e-7), moved), m, u


def adopt(w, g, m, u, t):
    m = torch.where(t > 1, 0.9 * m + 0.1 * (g / u.sqrt().clamp(min=1e-6)).clamp(-(t**0.25), t**0.25), m)
    return w - 0.01 * m, m, torch.where(t > 1, 0.999 * u + 0.001 * g * g, g * g)


def cautious(w, g, m, u, t):
    m, u = 0.9 * m + 0.1 * g, 0.99 * u + 0.01 * g * g
    mask = (m * g > 0).to(g.dtype)
    mask = mask / mask.mean().clamp(min=1e-3)
    return w - 0.01 * mask * (m / (1 - 0.9**t)) / ((u / (1 - 0.99**t)).sqrt() + 1e-7), m, u


def mars(w, g, m, u, last, t):
    c = g + 0.025 * (0.95 / 0.05) * (g - last)
    c = c / torch.linalg.vector_norm(c).clamp(min=1.0)
    m, u = 0.95 * m + 0.05 * c, 0.99 * u + 0.01 * c * c
    return w - 0.003 * (m / (1 - 0.95**t) / ((u / (1 - 0.99**t)).sqrt() + 1e-7) + 0.01 * w), m, u, g


def qhadam(w, g, m, u, t):
    m, u = 0.995 * m + 0.005 * g, 0.999 * u + 0.001 * g * g
    top = 0.3 * g + 0.7 * m / (1 - 0.995**t)
    return w - 0.01 * top / ((0.001 * g * g + 0.999 * u / (1 - 0.999**t)).sqrt() + 1e-7), m, u


def adabound(w, g, m, u, t):
    m, u = 0.9 * m + 0.1 * g, 0.999 * u + 0.001 * g * g
    size = 0.01 * (1 - 0.999**t).sqrt() / (1 - 0.9**t) / (u.sqrt() + 1e-7)
    return (
        w - torch.minimum(torch.maximum(size, 0.1 * (1 - 1 / (0.001 * t + 1))), 0.1 * (1 + 1 / (0.001 * t))) * m,
        m,
        u,
    )


def tiger(w, g, m):
    m = 0.965 * m + 0.035 * g
    return w - 0.003 * (m.sign() + 0.01 * w), m


def lion(w, g, m):
    return w - 0.003 * (torch.sign(0.9 * m + 0.1 * g) + 0.1 * w), 0.99 * m + 0.01 * g


def adamp(w, g, m, u, t):
    m, u = 0.9 * m + 0.1 * g, 0.999 * u + 0.001 * g * g
    move = (0.9 * m + 0.1 * g) / ((u / (1 - 0.999**t)).sqrt() + 1e-7)
    cosine = (w * g).sum() / (w.norm() * g.norm()).clamp(min=1e-7)
    unit = w / w.norm().clamp(min=1e-7)
    return w - 0.01 * torch.where(cosine.abs() < 0.1 / w.numel() ** 0.5, move - unit * (unit * move).sum(), move), m, u


def lars(w, g, b):
    g = g + 1e-4 * w
    trust = 0.02 * w.norm() / (g.norm() + 1e-7)
    b = 0.9 * b + torch.where(w.norm() > 0, trust, torch.ones_like(trust)) * g
    return w - b, b


def lamb(w, g, m, u, t):
    m, u = 0.9 * m + 0.1 * g, 0.999 * u + 0.001 * g.square()
    r = (m / (1 - 0.9**t)) / ((u / (1 - 0.999**t)).sqrt() + 1e-6) + 0.01 * w
    ratio = (w.norm().clamp(0, 10) / r.norm()).nan_to_num(1.0)
    return w - 0.01 * ratio * r, m, u


def ftrl(w, g, z, n):
    grown = n + g * g
    z = z + g - (grown.sqrt() - n.sqrt()) / 0.1 * w
    w = torch.where(z.abs() > 0.001, -(z - z.sign() * 0.001) / ((1.0 + grown.sqrt()) / 0.1), torch.zeros_like(z))
    return w, z, grown


def rprop(w, g, last, size):
    same = g * last
    size = torch.where(same > 0, size * 1.2, torch.where(same < 0, size * 0.5, size)).clamp(1e-6, 0.05)
    g = torch.where(same < 0, torch.zeros_like(g), g)
    return w - g.sign() * size, g, size


def novograd(w, g, m, u, t):
    square = g.square().sum().expand_as(g)
    u = torch.where(t > 1, 0.98 * u + 0.02 * square, square)
    m = 0.95 * m + (g / (u.sqrt() + 1e-7) + 0.001 * w)
    return w - 0.01 * m, m, u


def apollo(w, g, m, b, d, t):
    alpha, change = 0.1 / (1 - 0.9**t), g - m
    norm = d.pow(4).sum().pow(0.25) + 1e-4
    d = d / norm
    delta = -alpha * (change / norm * d).sum() - (b * d * d).sum()
    b, m = b + d * d * delta, m + alpha * change
    move = m / b.abs().clamp(min=0.5)
    return w - 0.01 * move, m, b, move


def adashift(w, g, old, older, u, t):
    u = 0.99 * u + 0.01 * older.square().max()
    return w - 0.01 * (0.6 * g + 0.3 * old + 0.1 * older) / ((u / (1 - 0.99**t)).sqrt() + 1e-2), g, old, u


def orthogonal(g: Tensor, rounds: int = 3) -> Tensor:
    """Run the Newton-Schulz iteration of Muon."""
    x = g / (g.norm() + 1e-7)
    x = x.T if g.shape[0] > g.shape[1] else x
    for _ in range(rounds):
        a = x @ x.T
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return x.T if g.shape[0] > g.shape[1] else x


def muon(w, g, b):
    b = 0.95 * b + g
    if w.dim() < 2:
        return w - 0.01 * b, b
    return w - 0.02 * max(1, w.shape[0] / w.shape[1]) ** 0.5 * orthogonal(g + 0.95 * b), b


def whole(init: Callable[[Arrays], Arrays], f: Callable[..., tuple[Arrays, Arrays]]) -> Rule:
    return init, f


def zeros(w: Arrays, *keys: str) -> Arrays:
    return {f"{k}.{n}": torch.zeros_like(x) for k in keys for n, x in w.items()}


def sub(s: Arrays, key: str) -> Arrays:
    return {n[len(key) + 1 :]: x for n, x in s.items() if n.startswith(f"{key}.")}


def tag(key: str, a: Arrays) -> Arrays:
    return {f"{key}.{n}": x for n, x in a.items()}


def dot(a: Arrays, b: Arrays) -> Tensor:
    return torch.stack([(a[n] * b[n]).sum() for n in a]).sum()


def zipped(f: Callable[..., Tensor], *trees: Arrays) -> Arrays:
    return {n: f(*[t[n] for t in trees]) for n in trees[0]}


def prodigy(w, g, s, v):
    """Estimate the distance D as Prodigy does."""
    k, d = s["k"] + 1, s["d"]
    m = zipped(lambda m, g: 0.9 * m + 0.1 * d * g, sub(s, "exp_avg"), g)
    u = zipped(lambda u, g: 0.99 * u + 0.01 * d * d * g * g, sub(s, "exp_avg_sq"), g)
    acc = zipped(lambda a, g: 0.995 * a + 0.005 * d * d * g, sub(s, "s"), g)
    top = 0.995 * s["r"] + 0.005 * d * d * dot(g, zipped(torch.sub, sub(s, "p0"), w))
    bottom = torch.stack([a.abs().sum() for a in acc.values()]).sum()
    new = zipped(lambda w, m, u: w - d * m / (u.sqrt() + d * 1e-7), w, m, u)
    after = tag("exp_avg", m) | tag("exp_avg_sq", u) | tag("s", acc) | tag("p0", sub(s, "p0"))
    return new, after | {"r": top, "d": torch.maximum(d, top / (bottom + 1e-7)), "k": k}


def dadapt(w, g, s, v):
    """Run D-adaptation of SGD: the estimate of the distance grows."""
    norm = torch.where(s["k"] > 0, s["g0"], dot(g, g).sqrt())
    rate = s["d"] / norm
    acc = zipped(lambda a, g: a + rate * g, sub(s, "s"), g)
    top = s["num"] + rate * dot(g, sub(s, "s"))
    d = torch.maximum(s["d"], 2 * top / (dot(acc, acc).sqrt() + 1e-7))
    z = zipped(lambda z, g: z - rate * g, sub(s, "z"), g)
    new = zipped(lambda w, z: 0.9 * w + 0.1 * z, w, z)
    return new, tag("s", acc) | tag("z", z) | {"num": top, "d": d, "g0": norm, "k": s["k"] + 1}


def dog(w, g, s, v):
    """Take steps of the distance over the gradients (DoG), with its weighted average."""
    away = zipped(torch.sub, w, sub(s, "init"))
    far = torch.maximum(s["rbar"], dot(away, away).sqrt())
    total = s["G"] + dot(g, g)
    new = zipped(lambda w, g: w - far / (total + 1e-7).sqrt() * g, w, g)
    share = (8 + 1) / (s["t"] + 1 + 8)
    mean = zipped(lambda a, w: (1 - share) * a + share * w, sub(s, "avg"), new)
    return new, tag("init", sub(s, "init")) | tag("avg", mean) | {"rbar": far, "G": total, "t": s["t"] + 1}


def schedulefree(w, g, s, v):
    z = zipped(lambda z, g: z - 0.1 * g, sub(s, "z"), g)
    c = 1 / (s["k"] + 1)
    x = zipped(lambda x, z: (1 - c) * x + c * z, sub(s, "x"), z)
    return zipped(lambda x, z: 0.9 * x + 0.1 * z, x, z), tag("z", z) | tag("x", x) | {"k": s["k"] + 1}


def galore(w, g, s, v):
    """Project gradients of matrices on a basis that one power iteration a step renews."""
    new, after, t = {}, {}, s["t"] + 1
    for n in w:
        if w[n].dim() < 2:
            new[n] = w[n] - 0.05 * g[n]
            continue
        basis = orthogonal(g[n] @ (g[n].T @ s[f"P.{n}"]) + 1e-4 * s[f"P.{n}"], 2)
        low = basis.T @ g[n]
        m, u = 0.9 * s[f"m.{n}"] + 0.1 * low, 0.99 * s[f"v.{n}"] + 0.01 * low * low
        new[n] = w[n] - 0.01 * 0.25 * basis @ ((m / (1 - 0.9**t)) / ((u / (1 - 0.99**t)).sqrt() + 1e-7))
        after |= {f"P.{n}": basis, f"m.{n}": m, f"v.{n}": u}
    return new, after | {"t": t}


def galore_start(w):
    two = {n: x for n, x in w.items() if x.dim() == 2}
    low = {n: torch.zeros(2, x.shape[1]) for n, x in two.items()}
    return (
        tag("P", {n: R(x.shape[0], 2) for n, x in two.items()}) | tag("m", low) | tag("v", low) | {"t": torch.zeros(())}
    )


def shampoo(w, g, s, v):
    """Precondition matrices by inverse fourth roots from coupled Newton iterations."""
    new, after = {}, {}
    for n in w:
        if w[n].dim() < 2:
            new[n], after[f"acc.{n}"] = (
                w[n] - 0.1 * g[n] / (s[f"acc.{n}"] + g[n] ** 2 + 1e-4).sqrt(),
                s[f"acc.{n}"] + g[n] ** 2,
            )
            continue
        left, right = s[f"L.{n}"] + g[n] @ g[n].T, s[f"R.{n}"] + g[n].T @ g[n]
        new[n] = w[n] - 0.1 * fourth(left) @ g[n] @ fourth(right)
        after |= {f"L.{n}": left, f"R.{n}": right}
    return new, after


def fourth(a: Tensor, rounds: int = 4) -> Tensor:
    eye = torch.eye(a.shape[0])
    z = (1 + 4) / (2 * a.norm())
    x, m = eye * z**0.25, a * z
    for _ in range(rounds):
        t = 1.25 * eye - 0.25 * m
        x, m = x @ t, (t @ t) @ (t @ t) @ m
    return x


def shampoo_start(w):
    two = {n: x for n, x in w.items() if x.dim() == 2}
    s = tag("L", {n: 0.1 * torch.eye(x.shape[0]) for n, x in two.items()})
    s |= tag("R", {n: 0.1 * torch.eye(x.shape[1]) for n, x in two.items()})
    return s | tag("acc", {n: torch.zeros_like(x) for n, x in w.items() if n not in two})


def came(w, g, s, v):
    """Factor second moments, and weigh the update by its confidence (CAME)."""
    new, after = {}, {}
    for n in w:
        if w[n].dim() < 2:
            u = 0.999 * s[f"u.{n}"] + 0.001 * (g[n] ** 2 + 1e-7)
            new[n], after[f"u.{n}"] = w[n] - 0.005 * g[n] / u.sqrt().clamp(min=1e-3), u
            continue
        r = 0.99 * s[f"row.{n}"] + 0.01 * (g[n] ** 2 + 1e-7).mean(1)
        c = 0.99 * s[f"col.{n}"] + 0.01 * (g[n] ** 2 + 1e-7).mean(0)
        move = g[n] * (r / r.mean()).rsqrt()[:, None] * c.rsqrt()[None]
        move = move / (move.square().mean().sqrt()).clamp(min=1.0)
        m = 0.9 * s[f"m.{n}"] + 0.1 * move
        q = 0.999 * s[f"res.{n}"] + 0.001 * (move - m).square().mean(1)
        new[n] = w[n] - 0.003 * m * (q / q.mean()).rsqrt()[:, None]
        after |= {f"row.{n}": r, f"col.{n}": c, f"m.{n}": m, f"res.{n}": q}
    return new, after


def came_start(w):
    s = {}
    for n, x in w.items():
        if x.dim() < 2:
            s[f"u.{n}"] = torch.ones_like(x)
        else:
            s |= {f"row.{n}": torch.ones(len(x)), f"col.{n}": torch.ones(x.shape[1]), f"m.{n}": torch.zeros_like(x)}
            s[f"res.{n}"] = torch.ones(len(x))
    return s


sgd = per("", lambda w, g: w - 0.1 * g)
RULES: dict[str, Rule] = {
    "sgd": sgd,
    "momentum": per("mom", lambda w, g, b: (w - 0.05 * (0.9 * b + g), 0.9 * b + g)),
    "nesterov": per("buf", lambda w, g, b: (w - 0.05 * (g + 0.9 * (0.9 * b + g)), 0.9 * b + g)),
    "rmsprop": per(
        "sq", lambda w, g, s: (w - 0.01 * g / ((0.95 * s + 0.05 * g * g).sqrt() + 1e-5), 0.95 * s + 0.05 * g * g)
    ),
    "adam": per("exp_avg exp_avg_sq", adamw, FLOAT),
    "adamw-int": per("mu nu", adamw, INT),
    "adan": per("m d n prev", adan, FLOAT),
    "yogi": per("m v", yogi, INT),
    "adabelief": per("m s", adabelief, FLOAT),
    "radam": per("m v", radam, FLOAT),
    "adopt": per("m v", adopt, FLOAT),
    "cautious": per("m v", cautious, INT),
    "mars": per("m v last_grad", mars, FLOAT),
    "qhadam": per("m v", qhadam, FLOAT),
    "adabound": per("m v", adabound, FLOAT),
    "tiger": per("m", tiger),
    "lion": per("exp_avg", lion),
    "adamp": per("m v", adamp, FLOAT),
    "lars": per("mom", lars),
    "lamb": per("m v", lamb, FLOAT),
    "ftrl": per("z n", ftrl, start=0.1),
    "rprop": per("prev lr", rprop, start=0.01),
    "novograd": per("m v", novograd, FLOAT),
    "apollo": per("m B d", apollo, FLOAT, start=0.01),
    "adashift": per("g1 g2 v", adashift, FLOAT),
    "muon": per("buf", muon),
    "prodigy": whole(
        lambda w: (
            zeros(w, "exp_avg", "exp_avg_sq", "s")
            | tag("p0", w)
            | {"r": torch.zeros(()), "d": torch.tensor(1e-2), "k": torch.tensor(0)}
        ),
        prodigy,
    ),
    "dadapt": whole(
        lambda w: (
            zeros(w, "s")
            | tag("z", w)
            | {k: torch.tensor(x) for k, x in {"num": 0.0, "d": 0.05, "g0": 0.0, "k": 0.0}.items()}
        ),
        dadapt,
    ),
    "dog": whole(
        lambda w: (
            tag("init", w) | tag("avg", w) | {k: torch.tensor(x) for k, x in {"rbar": 0.01, "G": 0.0, "t": 0.0}.items()}
        ),
        dog,
    ),
    "schedulefree": whole(lambda w: tag("z", w) | tag("x", w) | {"k": torch.tensor(0.0)}, schedulefree),
    "galore": whole(galore_start, galore),
    "shampoo": whole(shampoo_start, shampoo),
    "came": whole(came_start, came),
}
