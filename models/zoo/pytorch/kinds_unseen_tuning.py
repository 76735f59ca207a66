"""Steps `unseen-*` by PyTorch: distillation, adapters, sharpness, averages, buffers, masks, a scale of their own."""

from dataclasses import replace

import torch
import torch.nn.functional as F

from models.zoo.pytorch.kinds_unseen_methods import ce, classes, clone, method, mse, unit
from models.zoo.pytorch.unseen_parts import R, fit, mlp, net
from models.zoo.pytorch.unseen_rules import RULES, dot, orthogonal, sub, tag, zipped
from models.zoo.steps import Inputs, Outputs

I = torch.randint  # noqa: E741
grad = torch.func.grad


@method
def distill_hinton():
    """donated bare"""
    w, t = mlp(4, 5, 3), mlp(4, 9, 3, p="teacher")

    def loss(w, v):
        p, q = net(w, v["x"]), net(v, v["x"], "teacher")
        kd = F.kl_div(F.log_softmax(p / 4, 1), F.softmax(q / 4, 1), reduction="batchmean") * 16
        hard = F.cross_entropy(p, v["y"])
        return 0.9 * kd + 0.1 * hard, Outputs(metrics={"kd": kd, "hard": hard})

    return fit(w, classes(), loss, RULES["nesterov"], constants=t)


@method
def dkd_crd_memory():
    """new"""
    w = mlp(4, 5, 3, p="s")

    def loss(w, v):
        z = unit(net(w, v["x"], "s"))
        bank = v["bank"]
        pos = bank[v["index"]]
        s = torch.cat([(z * pos).sum(1, keepdim=True), z @ bank.T], 1) / 0.3
        new = unit(0.5 * pos + 0.5 * z.detach())
        return F.cross_entropy(s, torch.zeros(5, dtype=torch.int64)), Outputs(
            states={"bank": bank.index_put((v["index"],), new)}
        )

    batch = {"x": R(5, 4), "index": torch.tensor([7, 2, 0, 5, 8])}
    return fit(w, batch, loss, RULES["momentum"], states={"bank": unit(R(9, 3))})


@method
def lora_merge_each_step():
    """inout t"""
    w = {"lora_A": R(2, 6) / 2, "lora_B": 0.1 * R(5, 2)}

    def loss(w, v):
        full = v["base"] + 2.0 * w["lora_B"] @ w["lora_A"]
        return F.cross_entropy(v["x"] @ full.T, v["y"])

    def merged(new, v):
        return {"merged": v["base"] + 2.0 * new["lora_B"] @ new["lora_A"]}

    made = fit(w, {"x": R(6, 6), "y": I(0, 5, (6,))}, loss, RULES["adamw-int"], constants={"base": R(5, 6) / 3})

    def run(v):
        out = made[1](v)
        return replace(out, metrics={"merged": merged(out.states, v)["merged"]})

    return made[0], run, made[2]


@method
def qlora_dequantized():
    """mixed exporter"""
    w = {"A": R(2, 6) / 2, "B": 0.1 * R(8, 2)}

    def loss(w, v):
        base = (v["q"].float() - 8.0) * v["absmax"].repeat_interleave(6, 0).reshape(8, 6)
        h = v["x"] @ (base + w["B"] @ w["A"]).T
        return F.mse_loss(torch.tanh(h), v["y"])

    fixed = {"q": I(0, 16, (8, 6), dtype=torch.uint8), "absmax": torch.rand(8) * 0.1 + 0.02}
    return fit(w, {"x": R(4, 6), "y": R(4, 8)}, loss, RULES["lion"], constants=fixed)


@method
def dora_magnitude():
    """old"""
    w = {"A": R(2, 6) / 2, "B": 0.1 * R(5, 2), "m": torch.ones(5, 1)}

    def loss(w, v):
        d = v["W0"] + w["B"] @ w["A"]
        d = d / d.square().sum(1, keepdim=True).sqrt().detach()
        return F.mse_loss(v["x"] @ (w["m"] * d).T, v["y"])

    return fit(w, {"x": R(5, 6), "y": R(5, 5)}, loss, RULES["adam"], constants={"W0": R(5, 6)})


@method
def asam_adaptive():
    """arg serving"""
    w = mlp(4, 6, 3)

    def run(v):
        p = {n: v[n] for n in w}
        g, first = torch.func.grad_and_value(lambda p: ce(p, v))(p)
        scaled = zipped(lambda p, g: p.abs() * g, p, g)
        size = (dot(scaled, scaled)).sqrt() + 1e-6
        up = zipped(lambda p, g: p + 0.5 * p.square() * g / size, p, g)
        g, second = torch.func.grad_and_value(lambda p: ce(p, v))(up)
        m = zipped(lambda m, g: 0.9 * m + g, sub(v, "m"), g)
        return Outputs(
            {"loss": first, "perturbed_loss": second}, {}, {}, zipped(lambda p, m: p - 0.02 * m, p, m) | tag("m", m)
        )

    return Inputs(classes(), w | tag("m", zipped(torch.zeros_like, w))), run, list(w)


@method
def looksam_reused():
    """x0"""
    w = mlp(4, 6, 3)

    def run(v):
        p = {n: v[n] for n in w}
        g, loss = torch.func.grad_and_value(lambda p: ce(p, v))(p)
        size = dot(g, g).sqrt() + 1e-7
        gs = grad(lambda p: ce(p, v))(zipped(lambda p, g: p + 0.05 * g / size, p, g))
        unit_g = zipped(lambda g: g / size, g)
        along = dot(unit_g, gs)
        fresh = zipped(lambda s, u: s - along * u, gs, unit_g)
        due = v["k"] % 5 == 0
        gv = zipped(lambda f, o: torch.where(due, f, o), fresh, sub(v, "gv"))
        reuse = size / (dot(gv, gv).sqrt() + 1e-7)
        step = zipped(lambda s, g, o: torch.where(due, s, g + 0.7 * reuse * o), gs, g, gv)
        new = zipped(lambda p, s: p - 0.1 * s, p, step)
        return Outputs({"loss": loss}, {}, {}, new | tag("gv", gv) | {"k": v["k"] + 1})

    return Inputs(classes(), w | tag("gv", zipped(torch.zeros_like, w)) | {"k": torch.tensor(0)}), run, list(w)


@method
def esam_swa_bn():
    """updated"""
    w = mlp(4, 5, 3)
    states = {f"swa.{n}": x.clone() for n, x in w.items()} | {"n_averaged": torch.tensor(1)}

    def after(new, v):
        mean = {f"swa.{n}": v[f"swa.{n}"] + (new[n] - v[f"swa.{n}"]) / (v["n_averaged"] + 1) for n in w}
        return mean | {"n_averaged": v["n_averaged"] + 1}

    return fit(w, classes(), ce, RULES["momentum"], states=states, after=after)


@method
def lookahead_ranger():
    """slash x0"""
    w = mlp(4, 6, 2)
    states = clone(w, "slow")

    def after(new, v):
        due = (v["step"] + 1) % 6 == 0
        slow = {n: torch.where(due, v[f"slow.{n}"] + 0.5 * (new[n] - v[f"slow.{n}"]), v[f"slow.{n}"]) for n in w}
        return {n: torch.where(due, slow[n], new[n]) for n in w} | tag("slow", slow)

    def loss(w, v):
        return F.mse_loss(net(w, v["x"]), v["y"])

    return fit(w, {"x": R(5, 4), "y": R(5, 2)}, loss, RULES["radam"], states=states, after=after)


@method
def spectral_norm_buffers():
    """camel next"""
    w = {"conv.weight_orig": R(6, 5), "out.weight": R(1, 6)}

    def loss(w, v):
        u, m = v["u"], w["conv.weight_orig"]
        vec = unit(m.detach().T @ u)
        u = unit(m.detach() @ vec)
        sigma = u @ (m @ vec)
        f = lambda x: F.leaky_relu(x @ (m / sigma).T, 0.2) @ w["out.weight"].T  # noqa: E731
        return F.relu(1 - f(v["real"])).mean() + F.relu(1 + f(v["fake"])).mean(), Outputs(states={"u": u, "v": vec})

    return fit(w, {"real": R(4, 5), "fake": R(4, 5)}, loss, RULES["adam"], states={"u": unit(R(6)), "v": unit(R(5))})


# `v` of a spectral norm is written and never read: what it carries is known by its shape alone.


@method
def batchnorm_running():
    """mixed donated"""
    w = mlp(4, 6, p="a") | {"bn.weight": torch.ones(6), "bn.bias": torch.zeros(6)} | mlp(6, 3, p="b")

    def loss(w, v):
        h = net(w, v["x"], "a")
        mean, var = h.mean(0), h.var(0, unbiased=False)
        y = F.relu((h - mean) / (var + 1e-5).sqrt() * w["bn.weight"] + w["bn.bias"])
        after = {
            "bn.running_mean": 0.9 * v["bn.running_mean"] + 0.1 * mean.detach(),
            "bn.running_var": 0.9 * v["bn.running_var"] + 0.1 * h.var(0).detach(),
            "bn.num_batches_tracked": v["bn.num_batches_tracked"] + 1,
        }
        return F.cross_entropy(net(w, y, "b"), v["y"]), Outputs(states=after)

    states = {
        "bn.running_mean": torch.zeros(6),
        "bn.running_var": torch.ones(6),
        "bn.num_batches_tracked": torch.tensor(0),
    }
    return fit(w, classes(), loss, RULES["nesterov"], states=states)


@method
def qat_observer_lsq():
    """anyorder new"""
    w = mlp(4, 6, p="a") | mlp(6, 3, p="b") | {"scale_w": torch.tensor(0.05)}

    def fake(x, s, low, high):
        q = x / s
        q = q + (q.clamp(low, high).round() - q).detach()
        return q.clamp(low, high) * s

    def loss(w, v):
        h = F.relu(F.linear(v["x"], fake(w["a0.weight"], w["scale_w"], -8, 7), w["a0.bias"]))
        low = torch.minimum(v["min_val"], h.detach().min())
        high = 0.9 * v["max_val"] + 0.1 * h.detach().max()
        h = fake(h, ((high - low) / 255).clamp(min=1e-5), 0, 255)
        return F.cross_entropy(net(w, h, "b"), v["y"]), Outputs(states={"min_val": low, "max_val": high})

    states = {"min_val": torch.tensor(0.0), "max_val": torch.tensor(1.0)}
    return fit(w, classes(), loss, RULES["sgd"], states=states)


@method
def rigl_masks():
    """t arg"""
    w = mlp(6, 8, 3)

    def loss(w, v):
        m = {n: x * v.get(f"mask.{n}", torch.tensor(1.0)) for n, x in w.items()}
        return F.cross_entropy(net(m, v["x"]), v["y"])

    def after(new, v):
        found = {}
        for n in ("fc0.weight", "fc1.weight"):
            size = (new[n] * v[f"mask.{n}"]).abs()
            keep = (size >= size.flatten().sort().values[size.numel() // 4]).float()
            found[f"mask.{n}"] = torch.where(v["prune_now"] > 0, keep, v[f"mask.{n}"])
            found[n] = new[n] * found[f"mask.{n}"]
        return found

    masks = {f"mask.{n}": (torch.rand(x.shape) > 0.3).float() for n, x in w.items() if "weight" in n}
    batch = {"x": R(6, 6), "y": I(0, 3, (6,))}
    return fit(w, batch, loss, RULES["momentum"], states=masks, hyper={"prune_now": torch.tensor(0.0)}, after=after)


@method
def self_paced_curriculum():
    """x0"""
    w = mlp(4, 6, 3)

    def loss(w, v):
        each = F.cross_entropy(net(w, v["x"]), v["y"], reduction="none")
        weight = (each.detach() < v["threshold"]).float()
        return (weight * each).sum() / weight.sum().clamp(min=1), Outputs(
            states={"threshold": v["threshold"] * 1.01}, metrics={"used": weight.mean()}
        )

    return fit(w, classes(), loss, RULES["adam"], states={"threshold": torch.tensor(1.5)})


@method
def own_static_scale():
    """next mixed; either"""
    w = mlp(4, 6, 3)

    def loss(w, v):
        return 128.0 * ce(w, v)

    made = fit(w, classes(), loss, RULES["adam"], hook=lambda g, v: ({n: x / 128.0 for n, x in g.items()}, Outputs()))

    def run(v):
        out = made[1](v)
        return replace(out, losses={"loss": out.losses["loss"] / 128.0})

    return made[0], run, made[2]


@method
def accumulate_flush():
    """inout exporter"""
    w = mlp(4, 5, 2)
    states = {f"acc.{n}": torch.zeros_like(x) for n, x in w.items()} | {"micro": torch.tensor(0)}

    def run(v):
        p = {n: v[n] for n in w}
        g, loss = torch.func.grad_and_value(lambda p: mse(p, v) / 4)(p)
        acc = {n: v[f"acc.{n}"] + g[n] for n in w}
        due = (v["micro"] + 1) % 4 == 0
        new = {n: torch.where(due, p[n] - 0.1 * acc[n], p[n]) for n in w}
        return Outputs(
            {"loss": loss},
            {},
            {},
            new | {f"acc.{n}": torch.where(due, 0.0, x) for n, x in acc.items()} | {"micro": v["micro"] + 1},
        )

    return Inputs({"x": R(5, 4), "y": R(5, 2)}, w | states), run, list(w)


@method
def noisy_student_sgld():
    """old x0"""
    w = mlp(4, 5, 3)

    def hook(g, v):
        return {n: x + 0.5 * v[n] * 1e-2 + 0.3 * v[f"eps.{n}"] for n, x in g.items()}, Outputs()

    batch = classes() | {f"eps.{n}": torch.randn_like(x) for n, x in w.items()}
    return fit(w, batch, ce, RULES["rmsprop"], hook=hook)


@method
def muon_hybrid_ema():
    """serving"""
    w = {"emb": R(7, 4)} | {"hidden": R(4, 6) / 2, "head": R(6, 7) / 3}
    states = {
        "m.hidden": torch.zeros(4, 6),
        "v.emb": torch.ones(7, 4),
        "v.head": torch.ones(6, 7),
        "ema.hidden": w["hidden"].clone(),
    }

    def run(v):
        def loss(p):
            return F.cross_entropy((F.relu(p["emb"][v["tok"]] @ p["hidden"]) ** 2) @ p["head"], v["nxt"])

        p = {n: v[n] for n in w}
        g, value = torch.func.grad_and_value(loss)(p)
        m = 0.95 * v["m.hidden"] + 0.05 * g["hidden"]
        new = {"hidden": p["hidden"] - 0.02 * orthogonal(0.05 * g["hidden"] + 0.95 * m, 5)}
        for n in ("emb", "head"):
            s = 0.99 * v[f"v.{n}"] + 0.01 * g[n] ** 2
            new |= {n: p[n] - 0.01 * g[n] / (s.sqrt() + 1e-6), f"v.{n}": s}
        new |= {"m.hidden": m, "ema.hidden": v["ema.hidden"].lerp(new["hidden"], 0.01)}
        return Outputs({"loss": value}, {"bits": value / 0.6931472}, {}, new)

    return Inputs({"tok": I(0, 7, (9,)), "nxt": I(0, 7, (9,))}, w | states), run, list(w)
