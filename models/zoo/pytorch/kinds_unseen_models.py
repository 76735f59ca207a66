"""Steps `unseen-*` by PyTorch: generative and sequence models, continual learning; some without their optimizer."""

import torch
import torch.nn.functional as F

from models.zoo.pytorch.kinds_unseen_methods import clone, method, unit
from models.zoo.pytorch.unseen_parts import R, fit, mlp, net
from models.zoo.pytorch.unseen_rules import RULES, dot, sub, tag, zipped
from models.zoo.steps import Inputs, Outputs

I = torch.randint  # noqa: E741
ADAM, SGD, MOMENTUM = RULES["adam"], RULES["sgd"], RULES["momentum"]


@method
def vqvae_ema_restart():
    """inout new"""
    w = mlp(5, 3, p="enc") | mlp(3, 5, p="dec")
    states = {"codebook": R(4, 3), "cluster_size": torch.ones(4), "embed_avg": R(4, 3)}

    def loss(w, v):
        z = net(w, v["x"], "enc")
        code = ((z[:, None] - v["codebook"]) ** 2).sum(2).argmin(1)
        a = (code[:, None] == torch.arange(4)).float()
        q = a @ v["codebook"]
        rec = net(w, z + (q - z).detach(), "dec")
        size = 0.9 * v["cluster_size"] + 0.1 * a.sum(0)
        avg = 0.9 * v["embed_avg"] + 0.1 * a.T @ z.detach()
        total = size.sum()
        smooth = (size + 1e-3) / (total + 4e-3) * total
        use = a.mean(0)
        commit = F.mse_loss(z, q.detach())
        new = {"codebook": avg / smooth[:, None], "cluster_size": size, "embed_avg": avg}
        metrics = {"perplexity": torch.exp(-(use * (use + 1e-6).log()).sum()), "commit": commit}
        return F.mse_loss(rec, v["x"]) + 0.25 * commit, Outputs(metrics=metrics, states=new)

    return fit(w, {"x": R(6, 5)}, loss, ADAM, states=states)


@method
def vae_beta_freebits():
    """camel x0"""
    w = mlp(5, 6, 4, p="e") | mlp(2, 6, 5, p="d")

    def loss(w, v):
        mu, lv = net(w, v["x"], "e").chunk(2, 1)
        x = net(w, mu + torch.exp(0.5 * lv) * v["eps"], "d")
        kl = (-0.5 * (1 + lv - mu**2 - lv.exp())).mean(0)
        beta = (v["it"].float() / 20).clamp(max=1.0)
        rec = ((x - v["x"]) ** 2).sum(1).mean()
        terms = {"elbo": -(rec + kl.sum()), "kl": kl.sum(), "beta": beta}
        return rec + beta * kl.clamp(min=0.05).sum(), Outputs(metrics=terms, states={"it": v["it"] + 1})

    return fit(w, {"x": R(6, 5), "eps": R(6, 2)}, loss, RULES["radam"], states={"it": torch.tensor(4)})


@method
def ddpm_min_snr():
    """next serving"""
    w = mlp(5, 8, 4)

    def loss(w, v):
        a = torch.cos(1.5 * v["t"])[:, None] ** 2
        x = a.sqrt() * v["x0"] + (1 - a).sqrt() * v["noise"]
        out = net(w, torch.cat([x, v["t"][:, None]], 1), act=F.silu)
        goal = a.sqrt() * v["noise"] - (1 - a).sqrt() * v["x0"]
        snr = a / (1 - a + 1e-3)
        weight = snr.clamp(max=5) / (snr + 1)
        return (weight * (out - goal) ** 2).mean()

    def after(new, v):
        decay = torch.minimum(torch.tensor(0.999), (1 + v["step"]) / (10 + v["step"]))
        return {f"ema.{n}": v[f"ema.{n}"] - (1 - decay) * (v[f"ema.{n}"] - new[n]) for n in w}

    batch = {"x0": R(6, 4), "noise": R(6, 4), "t": torch.rand(6)}
    return fit(w, batch, loss, ADAM, states=clone(w, "ema"), after=after)


@method
def consistency_two_times():
    """donated"""
    w = mlp(4, 7, 3)

    def f(w, x, s):
        skip = 0.25 / (s**2 + 0.25)
        return skip * x + (1 - skip).sqrt() * s * net(w, torch.cat([x, s.log()], 1))

    def loss(w, v):
        s0, s1 = v["sigma"][:, None], v["sigma"][:, None] * 1.3
        near = f(sub(v, "teacher"), v["x"] + s0 * v["n"], s0).detach()
        d = (f(w, v["x"] + s1 * v["n"], s1) - near).square().sum(1)
        return ((d + 0.01).sqrt() - 0.1).mean()

    def after(new, v):
        return {f"teacher.{n}": 0.95 * v[f"teacher.{n}"] + 0.05 * new[n] for n in w}

    batch = {"x": R(5, 3), "n": R(5, 3), "sigma": torch.rand(5) + 0.2}
    return fit(w, batch, loss, RULES["radam"], states=clone(w, "teacher"), after=after)


@method
def realnvp_actnorm():
    """mixed"""
    w = mlp(2, 5, 4, p="a") | mlp(2, 5, 4, p="b") | {"logs": torch.zeros(4), "loc": torch.zeros(4)}

    def loss(w, v):
        z, logdet = (v["x"] + w["loc"]) * w["logs"].exp(), w["logs"].sum()
        for p in "ab":
            one, two = z.chunk(2, 1)
            s, t = net(w, one, p).chunk(2, 1)
            s = 0.8 * torch.tanh(s)
            z, logdet = torch.cat([two * s.exp() + t, one], 1), logdet + s.sum(1)
        nll = 0.5 * (z**2).sum(1) + 2 * 1.8378771 - logdet
        return nll.mean(), Outputs(metrics={"bits_per_dim": nll.mean() / (4 * 0.6931472), "logdet": logdet.mean()})

    return fit(w, {"x": R(6, 4)}, loss, RULES["adamw-int"])


@method
def wgan_gp_both():
    """x0 next"""
    g, d = mlp(2, 5, 3, p="G"), mlp(3, 6, 1, p="D", bias=False)

    def run(v):
        wg, wd = {n: v[n] for n in g}, {n: v[n] for n in d}

        def critic(w):
            fake = net(wg, v["z"], "G")
            x = v["eps"] * v["real"] + (1 - v["eps"]) * fake
            slope = torch.func.grad(lambda x: net(w, x, "D").sum())(x)
            gp = ((slope.square().sum(1) + 1e-6).sqrt() - 1).square().mean()
            return net(w, fake, "D").mean() - net(w, v["real"], "D").mean() + 10 * gp, gp

        gd, (ld, gp) = torch.func.grad_and_value(critic, has_aux=True)(wd)
        gg, lg = torch.func.grad_and_value(lambda w: -net(wd, net(w, v["z"], "G"), "D").mean())(wg)
        s = zipped(lambda s, g: 0.9 * s + 0.1 * g * g, sub(v, "sq"), gd | gg)
        new = zipped(lambda p, g, s: p - 0.01 * g / (s.sqrt() + 1e-5), wd | wg, gd | gg, s)
        return Outputs({"loss_D": ld, "loss_G": lg}, {"gradient_penalty": gp}, {}, new | tag("sq", s))

    squares = tag("sq", {n: torch.ones_like(x) for n, x in (d | g).items()})
    batch = {"z": R(5, 2), "real": R(5, 3), "eps": torch.rand(5, 1)}
    return Inputs(batch, g | d | squares), run, [*g, *d]


@method
def ctc_forward():
    """exporter"""
    w = {"w_in": R(4, 6) / 2} | mlp(6, 4, p="out")

    def loss(w, v):
        logp = F.log_softmax(net(w, torch.tanh(v["audio"] @ w["w_in"]), "out"), -1)
        y = torch.tensor([0, 1, 0, 2, 0])
        skip = torch.tensor([0.0, 0.0, 0.0, 1.0, 0.0])
        alpha = logp[:, 0, y] + torch.tensor([0.0, 0.0, -1e4, -1e4, -1e4])
        low = torch.full((3, 1), -1e4)
        for t in range(1, 5):
            one, two = torch.cat([low, alpha[:, :-1]], 1), torch.cat([low, low, alpha[:, :-2]], 1)
            two = torch.where(skip > 0, two, torch.tensor(-1e4))
            alpha = torch.logsumexp(torch.stack([alpha, one, two]), 0) + logp[:, t, y]
        return -torch.logsumexp(alpha[:, -2:], 1).mean() / 2

    return fit(w, {"audio": R(3, 5, 4)}, loss, RULES["nesterov"])


@method
def arcface_center_loss():
    """old x0"""
    w = mlp(5, 4, p="f") | {"W": R(3, 4)}

    def loss(w, v):
        f = net(w, v["x"], "f")
        c = (unit(f) @ unit(w["W"]).T).clamp(-0.99, 0.99)
        hot = (v["y"][:, None] == torch.arange(3)).float()
        margin = c * 0.95 - (1 - c * c).sqrt() * 0.3
        own = v["centers"][v["y"]]
        pull = (f - own).square().sum(1).mean()
        count = hot.sum(0)[:, None]
        moved = v["centers"] - 0.5 * (hot.T @ (own - f.detach())) / (1 + count)
        ce = F.cross_entropy(8 * torch.where(hot > 0, margin, c), v["y"])
        return ce + 0.01 * pull, Outputs(metrics={"center_loss": pull}, states={"centers": moved})

    return fit(w, {"x": R(6, 5), "y": I(0, 3, (6,))}, loss, MOMENTUM, states={"centers": torch.zeros(3, 4)})


@method
def triplet_batch_hard():
    """arg"""
    w = mlp(5, 6, 4)

    def loss(w, v):
        e = unit(net(w, v["x"]))
        d = (2 - 2 * e @ e.T).clamp(min=1e-4).sqrt()
        same = (v["y"][:, None] == v["y"][None]).float()
        far, near = (d * same).max(1).values, (d + 10 * same).min(1).values
        return F.softplus(far - near).mean(), Outputs(metrics={"active": (far > near).float().mean()})

    return fit(w, {"x": R(6, 5), "y": torch.tensor([0, 0, 1, 1, 2, 2])}, loss, RULES["adamw-int"])


@method
def node_rk4_kinetic():
    """updated"""
    w = mlp(3, 6, 2)

    def loss(w, v):
        x, h, kinetic = v["x0"], 0.25, 0.0
        f = lambda x, t: net(w, torch.cat([x, torch.full((5, 1), t)], 1))  # noqa: E731
        for i in range(2):
            t = i * h
            a = f(x, t)
            b = f(x + h / 2 * a, t + h / 2)
            c = f(x + h / 2 * b, t + h / 2)
            d = f(x + h * c, t + h)
            x, kinetic = x + h / 6 * (a + 2 * b + 2 * c + d), kinetic + h * a.square().mean()
        return F.mse_loss(x, v["x1"]) + 0.01 * kinetic, Outputs(
            metrics={"endpoint": x, "nfe": torch.tensor(8.0) + 0 * x.sum()}
        )

    return fit(w, {"x0": R(5, 2), "x1": R(5, 2)}, loss, RULES["adan"])


@method
def si_path_integral():
    """t mixed"""
    w = mlp(4, 5, 3)
    states = {f"omega.{n}": torch.zeros_like(x) for n, x in w.items()}

    def loss(w, v):
        anchor = sum((v[f"big.{n}"] * (x - v[f"old.{n}"]) ** 2).sum() for n, x in w.items())
        return F.cross_entropy(net(w, v["x"]), v["y"]) + 0.1 * anchor, Outputs(metrics={"surrogate": anchor})

    def hook(g, v):
        return g, Outputs(states={f"omega.{n}": v[f"omega.{n}"] + 0.1 * x * x for n, x in g.items()})

    fixed = clone(w, "old") | {f"big.{n}": torch.rand(x.shape) for n, x in w.items()}
    return fit(w, {"x": R(5, 4), "y": I(0, 3, (5,))}, loss, SGD, states=states, constants=fixed, hook=hook)


@method
def der_reservoir():
    """slash next"""
    w = mlp(4, 6, 3)
    states = {"buf_x": R(6, 4), "buf_y": I(0, 3, (6,)), "buf_logits": R(6, 3), "seen": torch.tensor(9)}

    def loss(w, v):
        p, q = net(w, v["x"]), net(w, v["buf_x"])
        ce, replay = F.cross_entropy(p, v["y"]), F.mse_loss(q, v["buf_logits"])
        again = F.cross_entropy(q, v["buf_y"])
        at = (v["slots"],)
        new = {"buf_x": v["buf_x"].index_put(at, v["x"]), "buf_y": v["buf_y"].index_put(at, v["y"])}
        new |= {"buf_logits": v["buf_logits"].index_put(at, p.detach()), "seen": v["seen"] + 2}
        return ce + 0.2 * replay + 0.3 * again, Outputs(states=new, metrics={"replay_mse": replay})

    return fit(w, {"x": R(2, 4), "y": I(0, 3, (2,)), "slots": torch.tensor([4, 1])}, loss, SGD, states=states)


@method
def agem_projection():
    """bare x0"""
    w = mlp(4, 5, 3)

    def run(v):
        p = {n: v[n] for n in w}
        each = lambda p, k: F.cross_entropy(net(p, v[f"x{k}"]), v[f"y{k}"])  # noqa: E731
        g, loss = torch.func.grad_and_value(lambda p: each(p, ""))(p)
        r, memory = torch.func.grad_and_value(lambda p: each(p, "_mem"))(p)
        part = dot(g, r).clamp(max=0) / (dot(r, r) + 1e-6)
        return Outputs(
            {"loss": loss, "memory_loss": memory}, {}, {}, zipped(lambda p, g, r: p - 0.1 * (g - part * r), p, g, r)
        )

    batch = {"x": R(5, 4), "y": I(0, 3, (5,)), "x_mem": R(4, 4), "y_mem": I(0, 3, (4,))}
    return Inputs(batch, w), run, list(w)


@method
def fixmatch_adaptive():
    """inout"""
    w = mlp(4, 6, 3)

    def loss(w, v):
        q = F.softmax(net(w, v["weak"]), -1).detach()
        conf, y = q.max(1)
        tau = 0.9 * v["tau"] + 0.1 * conf.mean()
        each = F.cross_entropy(net(w, v["strong"]), y, reduction="none")
        mask = (conf > tau).float()
        sup = F.cross_entropy(net(w, v["x"]), v["y"])
        total = sup + (mask * each).mean()
        return total, Outputs(metrics={"sup_loss": sup, "mask_rate": mask.mean()}, states={"tau": tau})

    batch = {"x": R(3, 4), "y": I(0, 3, (3,)), "weak": R(6, 4), "strong": R(6, 4)}
    return fit(w, batch, loss, RULES["nesterov"], states={"tau": torch.tensor(0.34)})


@method
def lightgcn_bpr():
    """camel"""
    w = {"user": 0.3 * R(5, 4), "item": 0.3 * R(6, 4)}

    def loss(w, v):
        e, total = torch.cat([w["user"], w["item"]]), 0.0
        for _ in range(2):
            total = total + e
            e = v["adj"] @ e
        u, i = ((total + e) / 3)[:5], ((total + e) / 3)[5:]
        gap = (u[v["u"]] * (i[v["pos"]] - i[v["neg"]])).sum(1)
        reg = sum(x.square().sum() for x in w.values()) / 8
        return F.softplus(-gap).mean() + 1e-3 * reg, Outputs(metrics={"auc": (gap > 0).float().mean()})

    a = (torch.rand(11, 11) > 0.6).float()
    batch = {"u": I(0, 5, (4,)), "pos": I(0, 6, (4,)), "neg": I(0, 6, (4,))}
    return fit(w, batch, loss, ADAM, constants={"adj": (a + a.T) / 11})


@method
def deepfm_focal_rows():
    """new"""
    w = {"emb": 0.3 * R(10, 3), "lin": 0.1 * R(10), "bias": torch.zeros(())} | mlp(9, 5, 1)

    def loss(w, v):
        e = w["emb"][v["ids"]]
        fm = 0.5 * (e.sum(1) ** 2 - (e**2).sum(1)).sum(1)
        z = w["bias"] + w["lin"][v["ids"]].sum(1) + fm + net(w, e.flatten(1))[:, 0]
        p = torch.sigmoid(z)
        ce = F.binary_cross_entropy_with_logits(z, v["click"], reduction="none")
        seen = 0.9 * v["ctr"] + 0.1 * v["click"].mean()
        return ((p - v["click"]).abs() ** 2 * ce).mean(), Outputs(metrics={"pred": p}, states={"ctr": seen})

    return fit(
        w,
        {"ids": I(0, 10, (6, 3)), "click": torch.tensor([1.0, 0, 0, 1, 0, 0])},
        loss,
        RULES["ftrl"],
        states={"ctr": torch.tensor(0.2)},
    )


@method
def forward_gradient_jvp():
    """donated; refuse"""
    w = mlp(4, 5, 2)

    def run(v):
        p, d = {n: v[n] for n in w}, {n: v[f"dir.{n}"] for n in w}
        h = torch.tanh(F.linear(v["x"], p["fc0.weight"], p["fc0.bias"]))
        dh = (1 - h * h) * F.linear(v["x"], d["fc0.weight"], d["fc0.bias"])
        e = F.linear(h, p["fc1.weight"], p["fc1.bias"]) - v["y"]
        de = F.linear(dh, p["fc1.weight"]) + F.linear(h, d["fc1.weight"], d["fc1.bias"])
        loss, slope = (e * e).mean(), (2 * e * de).mean()
        return Outputs({"loss": loss}, {"directional": slope}, {}, zipped(lambda p, d: p - 0.05 * slope * d, p, d))

    batch = {"x": R(5, 4), "y": R(5, 2)} | {f"dir.{n}": torch.randn_like(x) for n, x in w.items()}
    return Inputs(batch, w), run, list(w)


@method
def spsa_two_points():
    """x0; refuse"""
    w = mlp(4, 5, 2)

    def run(v):
        p, d = {n: v[n] for n in w}, {n: v[f"delta.{n}"] for n in w}
        up, down = (F.mse_loss(net(zipped(lambda p, d, s=s: p + s * d, p, d), v["x"]), v["y"]) for s in (0.01, -0.01))
        slope = (up - down) / 0.02
        return Outputs({"loss_plus": up, "loss_minus": down}, {}, {}, zipped(lambda p, d: p - 0.02 * slope * d, p, d))

    batch = {"x": R(5, 4), "y": R(5, 2)} | {f"delta.{n}": torch.randn_like(x).sign() for n, x in w.items()}
    return Inputs(batch, w), run, list(w)


@method
def hamiltonian_net():
    """serving"""
    w = mlp(2, 7, 1)

    def loss(w, v):
        g = torch.func.grad(lambda x: net(w, x).sum())(v["qp"])
        field = torch.stack([g[:, 1], -g[:, 0]], 1)
        return (field - v["dqp"]).square().sum(1).mean(), Outputs(metrics={"energy": net(w, v["qp"])})

    return fit(w, {"qp": R(6, 2), "dqp": R(6, 2)}, loss, RULES["yogi"])


@method
def segment_memory_attention():
    """next x0"""
    w = {k: R(4, 4) / 2 for k in ("q", "k", "v")} | {"emb": R(8, 4), "out": R(4, 8) / 2}

    def loss(w, v):
        h = w["emb"][v["tokens"]]
        full = torch.cat([v["mems"], h], 1)
        s = (h @ w["q"]) @ (full @ w["k"]).transpose(1, 2) / 2
        later = torch.arange(8)[None] > torch.arange(4)[:, None] + 4
        a = torch.softmax(torch.where(later, torch.tensor(-1e4), s), -1) @ (full @ w["v"])
        value = F.cross_entropy(((h + a) @ w["out"]).flatten(0, 1), v["labels"].flatten())
        return value, Outputs(states={"mems": full[:, -4:].detach()}, metrics={"ppl": value.exp()})

    batch = {"tokens": I(0, 8, (3, 4)), "labels": I(0, 8, (3, 4))}
    return fit(w, batch, loss, ADAM, states={"mems": torch.zeros(3, 4, 4)})
