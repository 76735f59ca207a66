"""Steps `unseen-*` by PyTorch: preferences and reinforcement."""

import torch
import torch.nn.functional as F

from models.zoo.pytorch.kinds_unseen_methods import clone, method
from models.zoo.pytorch.unseen_parts import R, fit, mlp, net
from models.zoo.pytorch.unseen_rules import RULES, sub, zipped
from models.zoo.steps import Inputs, Outputs

I = torch.randint  # noqa: E741
ADAM, SGD, MOMENTUM = RULES["adam"], RULES["sgd"], RULES["momentum"]


def lm(w, tokens, p=""):
    """Return the log likelihood of each row under a small causal model."""
    h = torch.cumsum(w[f"{p}emb"][tokens], 1) / torch.arange(1, tokens.shape[1] + 1)[None, :, None]
    logp = F.log_softmax(torch.tanh(h @ w[f"{p}mid"]) @ w[f"{p}head"], -1)[:, :-1]
    return logp.gather(2, tokens[:, 1:, None]).squeeze(2)


def lm_weights(p=""):
    return {f"{p}emb": R(9, 4), f"{p}mid": R(4, 5) / 2, f"{p}head": R(5, 9) / 2}


def pairs():
    return {"chosen": I(0, 9, (4, 6)), "rejected": I(0, 9, (4, 6))}


def frozen_ref(w):
    return {f"ref.{n}": x + 0.1 * R(x.shape) for n, x in w.items()}


def margins(w, v):
    gap = [lm(w, v[k]).sum(1) - lm(v, v[k], "ref.").sum(1) for k in ("chosen", "rejected")]
    return gap, {"rewards/chosen": 0.1 * gap[0].mean(), "rewards/accuracy": (gap[0] > gap[1]).float().mean()}


@method
def trl_dpo_smoothed():
    """inout x0"""

    def loss(w, v):
        (a, b), metrics = margins(w, v)
        z = 0.1 * (a - b)
        return (-0.9 * F.logsigmoid(z) - 0.1 * F.logsigmoid(-z)).mean(), Outputs(metrics=metrics)

    w = lm_weights()
    return fit(w, pairs(), loss, RULES["rmsprop"], constants=frozen_ref(w))


@method
def trl_ipo():
    """exporter"""

    def loss(w, v):
        (a, b), metrics = margins(w, v)
        return ((a - b - 1 / (2 * 0.1)) ** 2).mean(), Outputs(metrics=metrics)

    w = lm_weights()
    return fit(w, pairs(), loss, ADAM, constants=frozen_ref(w))


@method
def trl_kto():
    """donated"""

    def loss(w, v):
        r = lm(w, v["tokens"]).sum(1) - lm(v, v["tokens"], "ref.").sum(1)
        kl = r.mean().clamp(min=0).detach()
        good = 1 - torch.sigmoid(0.1 * (r - kl))
        bad = 1 - torch.sigmoid(0.1 * (kl - r))
        return torch.where(v["desirable"], good, 1.3 * bad).mean(), Outputs(metrics={"kl": kl})

    w = lm_weights()
    batch = {"tokens": I(0, 9, (4, 6)), "desirable": torch.tensor([True, False, True, False])}
    return fit(w, batch, loss, RULES["adamw-int"], constants=frozen_ref(w))


@method
def trl_orpo_simpo():
    """mixed"""

    def loss(w, v):
        a, b = lm(w, v["chosen"]).mean(1), lm(w, v["rejected"]).mean(1)
        odds = (a - b) - (torch.log1p(-a.exp().clamp(max=0.99)) - torch.log1p(-b.exp().clamp(max=0.99)))
        nll = -a.mean()
        return nll - 0.1 * F.logsigmoid(odds).mean(), Outputs(metrics={"nll_loss": nll, "odds": odds.mean()})

    return fit(lm_weights(), pairs(), loss, RULES["lion"])


@method
def grpo_group_advantage():
    """new arg"""

    def loss(w, v):
        logp, ref = lm(w, v["tokens"]), lm(v, v["tokens"], "ref.")
        r = v["reward"].reshape(2, 3)
        adv = ((r - r.mean(1, keepdim=True)) / (r.std(1, keepdim=True) + 1e-4)).reshape(6, 1)
        ratio = torch.exp(logp - v["old"])
        kl = torch.exp(ref - logp) - (ref - logp) - 1
        each = -torch.minimum(ratio * adv, ratio.clamp(0.8, 1.2) * adv) + 0.04 * kl
        mask = v["mask"]
        return (each * mask).sum() / mask.sum(), Outputs(metrics={"kl": (kl * mask).sum() / mask.sum()})

    w = lm_weights()
    batch = {"tokens": I(0, 9, (6, 5)), "reward": R(6), "old": -2 + 0.1 * R(6, 4), "mask": torch.ones(6, 4)}
    return fit(w, batch, loss, RULES["adamw-int"], constants=frozen_ref(w))


@method
def reward_model_margin():
    """updated"""
    w = {"emb": R(9, 4)} | mlp(4, 5, 1)

    def loss(w, v):
        a, b = (net(w, w["emb"][v[k]].mean(1))[:, 0] for k in ("chosen", "rejected"))
        return -F.logsigmoid(a - b - v["margin"]).mean() + 0.01 * ((a + b) ** 2).mean(), Outputs(
            metrics={"gap": (a - b).mean()}
        )

    return fit(w, pairs() | {"margin": torch.rand(4)}, loss, ADAM)


@method
def td3_delayed_where():
    """x0 next"""
    a, q = mlp(3, 5, 2, p="actor"), mlp(5, 6, 1, p="qa") | mlp(5, 6, 1, p="qb")
    batch = {
        "s": R(6, 3),
        "u": R(6, 2).tanh(),
        "r": R(6, 1),
        "s1": R(6, 3),
        "done": torch.zeros(6, 1),
        "noise": 0.2 * R(6, 2),
    }
    targets = clone(a | q, "target")

    def run(v):
        old = sub(v, "target")
        u1 = (torch.tanh(net(old, v["s1"], "actor")) + v["noise"].clamp(-0.5, 0.5)).clamp(-1, 1)
        x1 = torch.cat([v["s1"], u1], 1)
        y = v["r"] + 0.99 * (1 - v["done"]) * torch.minimum(net(old, x1, "qa"), net(old, x1, "qb"))
        x = torch.cat([v["s"], v["u"]], 1)
        wq, wa = {n: v[n] for n in q}, {n: v[n] for n in a}
        gq, lq = torch.func.grad_and_value(lambda p: sum(F.mse_loss(net(p, x, k), y) for k in ("qa", "qb")))(wq)
        new = zipped(lambda p, g: p - 0.05 * g, wq, gq)
        act = lambda p: -net(new, torch.cat([v["s"], torch.tanh(net(p, v["s"], "actor"))], 1), "qa").mean()  # noqa: E731
        ga, la = torch.func.grad_and_value(act)(wa)
        due = v["it"] % 2 == 0
        new = new | zipped(lambda p, g: torch.where(due, p - 0.02 * g, p), wa, ga)
        moved = {f"target.{n}": torch.where(due, v[f"target.{n}"].lerp(new[n], 0.05), v[f"target.{n}"]) for n in new}
        return Outputs({"critic_loss": lq, "actor_loss": la}, {}, {}, new | moved | {"it": v["it"] + 1})

    return Inputs(batch, a | q | targets | {"it": torch.tensor(0)}), run, [*a, *q]


@method
def sac_discrete_alpha():
    """serving exporter"""
    w = mlp(3, 5, 4, p="pi") | mlp(3, 6, 4, p="q") | {"log_alpha": torch.tensor(-1.0)}
    target = {n.replace("q", "tq"): x.clone() for n, x in w.items() if n.startswith("q")}

    def loss(w, v):
        p = F.log_softmax(net(w, v["s"], "pi"), -1)
        p1 = F.log_softmax(net(w, v["s1"], "pi"), -1).detach()
        alpha = w["log_alpha"].exp()
        v1 = (p1.exp() * (net(v, v["s1"], "tq") - alpha.detach() * p1)).sum(1)
        q = net(w, v["s"], "q")
        lq = F.smooth_l1_loss(q.gather(1, v["a"][:, None])[:, 0], v["r"] + 0.95 * v1)
        lp = (p.exp() * (alpha.detach() * p - q.detach())).sum(1).mean()
        la = (-alpha * ((p.detach().exp() * p.detach()).sum(1) + 0.7)).mean()
        return lq + lp + la, Outputs(metrics={"q_loss": lq, "pi_loss": lp, "alpha_loss": la})

    def after(new, v):
        return {n: 0.98 * v[n] + 0.02 * new[n.replace("tq", "q")] for n in target}

    batch = {"s": R(6, 3), "a": I(0, 4, (6,)), "r": R(6), "s1": R(6, 3)}
    return fit(w, batch, loss, ADAM, states=target, after=after)


@method
def c51_projection():
    """t"""
    w = mlp(3, 6, 10)
    z = torch.linspace(-2, 2, 5)

    def loss(w, v):
        p1 = F.softmax(net(sub(v, "old"), v["s1"]).reshape(5, 2, 5), -1)
        best = (p1 * z).sum(2).argmax(1)
        p1 = torch.where(best[:, None] == 0, p1[:, 0], p1[:, 1])
        tz = (v["r"][:, None] + 0.9 * v["live"][:, None] * z).clamp(-2, 2)
        share = (1 - (tz[:, None, :] - z[None, :, None]).abs()).clamp(min=0)
        m = (share * p1[:, None, :]).sum(2).detach()
        logp = F.log_softmax(net(w, v["s"]).reshape(5, 2, 5), -1)
        logp = torch.where(v["a"][:, None] == 0, logp[:, 0], logp[:, 1])
        each = -(m * logp).sum(1)
        return (v["weight"] * each).mean(), Outputs(metrics={"priority": each})

    batch = {
        "s": R(5, 3),
        "a": I(0, 2, (5,)),
        "r": R(5),
        "s1": R(5, 3),
        "live": torch.ones(5),
        "weight": torch.rand(5) + 0.5,
    }

    def after(new, v):
        due = v["step"] % 4 == 3
        return {f"old.{n}": torch.where(due, new[n], v[f"old.{n}"]) for n in w}

    return fit(w, batch, loss, ADAM, states=clone(w, "old"), after=after)


@method
def dqn_ring_buffer():
    """old mixed"""
    w = mlp(3, 6, 2)
    states = {
        "obs": R(8, 3),
        "act": I(0, 2, (8,)),
        "rew": R(8),
        "nxt": R(8, 3),
        "ptr": torch.tensor([2]),
        "seen": torch.tensor(2),
    }

    def loss(w, v):
        rows = {k: v[k].index_put((v["ptr"],), v[f"new_{k}"]) for k in ("obs", "act", "rew", "nxt")}
        pick = {k: rows[k][v["sample"]] for k in rows}
        y = pick["rew"] + 0.9 * net(w, pick["nxt"]).max(1).values.detach()
        q = net(w, pick["obs"]).gather(1, pick["act"][:, None])[:, 0]
        return F.mse_loss(q, y), Outputs(
            states=rows | {"ptr": (v["ptr"] + 1) % 8, "seen": (v["seen"] + 1).clamp(max=8)}
        )

    batch = {"new_obs": R(1, 3), "new_act": I(0, 2, (1,)), "new_rew": R(1), "new_nxt": R(1, 3), "sample": I(0, 8, (4,))}
    return fit(w, batch, loss, RULES["rmsprop"], states=states)


@method
def impala_vtrace():
    """slash"""
    w = mlp(3, 5, p="t") | {"pi": R(5, 3), "v": R(5, 1)}

    def loss(w, v):
        h = torch.tanh(net(w, v["obs"], "t"))
        logp, value = F.log_softmax(h @ w["pi"], -1), (h @ w["v"])[:, 0]
        own = logp[:-1].gather(1, v["a"][:, None])[:, 0]
        rho = torch.exp(own.detach() - v["mu"]).clamp(max=1)
        fixed, acc, targets = value.detach(), torch.zeros(()), []
        for t in range(3, -1, -1):
            acc = rho[t] * (v["r"][t] + 0.9 * fixed[t + 1] - fixed[t]) + 0.9 * rho[t] * acc
            targets.insert(0, fixed[t] + acc)
        vs = torch.stack(targets)
        adv = rho * (v["r"] + 0.9 * torch.cat([vs[1:], fixed[-1:]]) - fixed[:-1])
        pg, base = -(adv * own).sum(), 0.5 * ((vs - value[:-1]) ** 2).sum()
        ent = (logp.exp() * logp).sum()
        return pg + 0.5 * base + 0.01 * ent, Outputs(metrics={"pg": pg, "baseline": base, "entropy": -ent})

    return fit(w, {"obs": R(5, 3), "a": I(0, 3, (4,)), "r": R(4), "mu": -1 + 0.1 * R(4)}, loss, RULES["rmsprop"])


@method
def redq_ensemble():
    """anyorder"""
    w = {"w1": R(3, 4, 6) / 2, "b1": torch.zeros(3, 1, 6), "w2": R(3, 6, 1) / 2}

    def q(w, x):
        return torch.relu(x[None] @ w["w1"] + w["b1"]) @ w["w2"]

    def loss(w, v):
        y = v["r"] + 0.9 * q(sub(v, "slow"), v["x1"]).min(0).values
        return ((q(w, v["x"]) - y.detach()) ** 2).mean((1, 2)).sum(), Outputs(
            metrics={"spread": q(w, v["x"]).std(0).mean()}
        )

    def after(new, v):
        return {f"slow.{n}": 0.9 * v[f"slow.{n}"] + 0.1 * new[n] for n in w}

    return fit(w, {"x": R(5, 4), "r": R(5, 1), "x1": R(5, 4)}, loss, ADAM, states=clone(w, "slow"), after=after)
