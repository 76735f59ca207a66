"""Steps `unseen-*` by PyTorch that are a network, a loss, an update rule and a face: a table."""

import torch
import torch.nn.functional as F

from models.zoo.pytorch.unseen_parts import FLOAT, R, fit, mlp, net, per
from models.zoo.pytorch.unseen_rules import RULES, adamw
from models.zoo.steps import Outputs
from models.zoo.unseen import add

I = torch.randint  # noqa: E741


def conv(n, o, i, k):
    return {f"{n}.weight": R(o, i, k, k) / (i * k * k) ** 0.5, f"{n}.bias": 0.1 * R(o)}


def plain(w, x):
    return net(w, x)


def gelu(w, x):
    return net(w, x, act=F.gelu)


def siren(w, x):
    return net(w, x, act=lambda x: torch.sin(3 * x))


def residual(w, x):
    h = F.linear(x, w["stem.weight"])
    for i in range(2):
        h = h + F.silu(F.layer_norm(h, (6,), w[f"ln{i}.weight"], w[f"ln{i}.bias"]) @ w[f"block{i}.weight"])
    return net(w, h)


def residual_weights(inner, outer):
    w = {"stem.weight": R(6, inner) / inner**0.5}
    for i in range(2):
        w |= {f"ln{i}.weight": torch.ones(6), f"ln{i}.bias": torch.zeros(6), f"block{i}.weight": R(6, 6) / 3}
    return w | mlp(6, outer)


def convnet(w, x):
    x = F.relu(F.conv2d(x, w["c1.weight"], w["c1.bias"], padding=1))
    x = F.relu(F.conv2d(x, w["c2.weight"], w["c2.bias"], stride=2))
    return net(w, x.flatten(1))


def attention(w, x):
    q, k, v = (x @ w[f"{n}_proj"] for n in "qkv")
    x = x + torch.softmax(q @ k.transpose(1, 2) / 2.0, -1) @ v
    return net(w, x.mean(1))


def rnn(w, x):
    h = torch.zeros(x.shape[0], 5)
    for t in range(x.shape[1]):
        h = torch.tanh(x[:, t] @ w["w_ih"] + h @ w["w_hh"] + w["b_h"])
    return net(w, h)


def mixer(w, x):
    x = x + F.gelu(x.transpose(1, 2) @ w["tok.weight"]).transpose(1, 2)
    return net(w, (x + F.gelu(x @ w["chan.weight"])).mean(1))


def deepset(w, x):
    return net(w, net(w, x, "phi", F.elu).sum(1), "fc", F.elu)


def highway(w, x):
    gate = torch.sigmoid(x @ w["T.weight"] - 1)
    return net(w, gate * F.relu(x @ w["H.weight"]) + (1 - gate) * x)


def swiglu(w, x):
    return (F.silu(x @ w["gate"]) * (x @ w["up"])) @ w["down"]


def words(w, x):
    e = w["emb"][x]
    return net(w, torch.cat([e.mean(1), e.max(1).values], 1))


def kan(w, x):
    centres = torch.linspace(-1, 1, 4)
    basis = torch.exp(-((x[..., None] - centres) ** 2) * 4)
    return torch.einsum("bik,iko->bo", basis, w["spline"]) + F.silu(x) @ w["base"]


def graph(w, v):
    a = v["adj"] + torch.eye(6)
    d = a.sum(1).rsqrt()
    a = d[:, None] * a * d[None]
    return a @ torch.relu(a @ v["x"] @ w["gc1"]) @ w["gc2"]


NETS = {
    "mlp": lambda i, o: (mlp(i, 7, o), R(5, i), plain),
    "deep": lambda i, o: (mlp(i, 6, 8, o), R(4, i), gelu),
    "siren": lambda i, o: (mlp(i, 9, o), R(6, i), siren),
    "resnorm": lambda i, o: (residual_weights(i, o), R(5, i), residual),
    "conv": lambda i, o: (conv("c1", 3, 2, 3) | conv("c2", 4, 3, 3) | mlp(16, o), R(3, 2, 6, 6), convnet),
    "attn": lambda i, o: ({f"{n}_proj": R(4, 4) / 2 for n in "qkv"} | mlp(4, o), R(3, 5, 4), attention),
    "rnn": lambda i, o: (
        {"w_ih": R(i, 5) / 2, "w_hh": R(5, 5) / 3, "b_h": torch.zeros(5)} | mlp(5, o),
        R(3, 4, i),
        rnn,
    ),
    "mixer": lambda i, o: ({"tok.weight": R(5, 5) / 2, "chan.weight": R(i, i) / 2} | mlp(i, o), R(4, 5, i), mixer),
    "sets": lambda i, o: (mlp(i, 6, 4, p="phi") | mlp(4, o), R(4, 3, i), deepset),
    "highway": lambda i, o: ({"T.weight": R(i, i) / 2, "H.weight": R(i, i) / 2} | mlp(i, o), R(6, i), highway),
    "swiglu": lambda i, o: ({"gate": R(i, 7) / 2, "up": R(i, 7) / 2, "down": R(7, o) / 2}, R(5, i), swiglu),
    "words": lambda i, o: ({"emb": R(11, 4)} | mlp(8, o), I(0, 11, (5, 6)), words),
    "kan": lambda i, o: ({"spline": R(i, 4, o) / 4, "base": R(i, o) / 2}, R(6, i), kan),
}


def onehot(y, n):
    return (y[..., None] == torch.arange(n)).float()


def focal(p, y):
    ce = F.cross_entropy(p, y, reduction="none")
    return ((1 - torch.exp(-ce)) ** 2 * ce).mean()


def poly1(p, y):
    ce = F.cross_entropy(p, y, reduction="none")
    return (ce + 1.0 * (1 - torch.exp(-ce))).mean()


def smooth(p, y):
    logp = F.log_softmax(p, -1)
    return (-0.9 * logp.gather(1, y[:, None]).squeeze(1) - 0.1 * logp.mean(1)).mean()


def dice(p, y):
    p = torch.sigmoid(p)
    return 1 - ((2 * (p * y).sum(1) + 1) / (p.sum(1) + y.sum(1) + 1)).mean()


def tversky(p, y):
    p = torch.sigmoid(p)
    tp, fp, fn = (p * y).sum(), (p * (1 - y)).sum(), ((1 - p) * y).sum()
    return (1 - (tp + 1) / (tp + 0.3 * fp + 0.7 * fn + 1)) ** 0.75


def asymmetric(p, y):
    p = torch.sigmoid(p)
    low = (p - 0.05).clamp(min=0)
    return -(y * torch.log(p.clamp(min=1e-6)) + (1 - y) * low**2 * torch.log((1 - low).clamp(min=1e-6))).sum()


def gaussian(p, y):
    mean, logvar = p.chunk(2, 1)
    return 0.5 * (logvar + (y - mean) ** 2 / logvar.exp()).mean()


def pinball(p, y):
    q = torch.tensor([0.1, 0.5, 0.9])
    e = y - p
    return torch.maximum(q * e, (q - 1) * e).mean()


def barron(p, y):
    x = (p - y) / 0.5
    return (2.0 / 1.5 * ((x**2 / 1.0 + 1) ** 0.75 - 1)).mean()


def hinge(p, y):
    right = p.gather(1, y[:, None])
    return ((p - right + 1).clamp(min=0) * (1 - onehot(y, p.shape[1]))).sum() / len(p)


def correlation(p, y):
    p, y = p - p.mean(0), y - y.mean(0)
    return 1 - ((p * y).sum(0) / (p.square().sum(0).sqrt() * y.square().sum(0).sqrt() + 1e-6)).mean()


def ordinal(p, y):
    levels = (y[:, None] > torch.arange(p.shape[1])).float()
    return F.binary_cross_entropy_with_logits(p, levels)


def cox(p, y):
    risk = p.squeeze(1)
    later = (y[None, :, 0] >= y[:, None, 0]).float()
    return -(y[:, 1] * (risk - (torch.exp(risk)[None] * later).sum(1).log())).sum() / y[:, 1].sum()


REAL, CLASS, FLAG = "real", "class", "flag"
LOSSES = {
    "mse": (F.mse_loss, REAL),
    "huber": (lambda p, y: F.huber_loss(p, y, delta=0.7), REAL),
    "logcosh": (lambda p, y: (F.softplus(2 * (p - y)) - (p - y) - 0.6931472).mean(), REAL),
    "poisson": (lambda p, y: (p.exp() - y.abs() * p).mean(), REAL),
    "ce": (F.cross_entropy, CLASS),
    "focal": (focal, CLASS),
    "poly1": (poly1, CLASS),
    "smooth": (smooth, CLASS),
    "hinge": (hinge, CLASS),
    "ordinal": (ordinal, CLASS),
    "bce": (F.binary_cross_entropy_with_logits, FLAG),
    "dice": (dice, FLAG),
    "tversky": (tversky, FLAG),
    "asl": (asymmetric, FLAG),
    "gaussian": (gaussian, "half"),
    "pinball": (pinball, "one"),
    "barron": (barron, REAL),
    "corr": (correlation, REAL),
    "cox": (cox, "survival"),
    "sum": (lambda p, y: (p - y).square().sum(), REAL),
}


def target(sort, p):
    n, o = p.shape
    return {
        REAL: lambda: R(n, o),
        CLASS: lambda: I(0, o, (n,)),
        FLAG: lambda: I(0, 2, (n, o)).float(),
        "half": lambda: R(n, o // 2),
        "one": lambda: R(n, 1),
        "survival": lambda: torch.stack([torch.rand(n), torch.ones(n)], 1),
    }[sort]()


def norm_of(g):
    return torch.stack([x.square().sum() for x in g.values()]).sum().sqrt()


def clip(g, v):
    scale = (0.5 / (norm_of(g) + 1e-6)).clamp(max=1.0)
    return {n: x * scale for n, x in g.items()}, Outputs(metrics={"grad_norm": norm_of(g)})


def clip_value(g, v):
    return {n: x.clamp(-0.2, 0.2) for n, x in g.items()}, Outputs()


def agc(g, v):
    def one(w, x):
        axes = tuple(range(1, w.dim())) or (0,)
        big, size = w.square().sum(axes, True).sqrt().clamp(min=1e-3), x.square().sum(axes, True).sqrt()
        return torch.where(size > 0.05 * big, x * (0.05 * big / size.clamp(min=1e-6)), x)

    return {n: one(v[n], x) for n, x in g.items()}, Outputs()


def centralize(g, v):
    return {n: x - x.mean(tuple(range(1, x.dim())), True) if x.dim() > 1 else x for n, x in g.items()}, Outputs()


def guard(g, v):
    ok = torch.isfinite(norm_of(g))
    found = {n: torch.where(ok, x, torch.zeros_like(x)) for n, x in g.items()}
    return found, Outputs(metrics={"skipped": 1.0 - ok.float()}, states={"bad_steps": v["bad_steps"] + (~ok).long()})


def noisy(g, v):
    size = 0.01 / (1 + v["t_noise"]) ** 0.275
    grown = {n: x + size * v[f"noise.{n}"] for n, x in g.items()}
    return grown, Outputs(states={"t_noise": v["t_noise"] + 1})


def shown(g, v):
    return g, Outputs(gradients={f"grad.{n}": x for n, x in g.items()}, metrics={"gnorm": norm_of(g)})


HOOKS = {"clip": clip, "clipv": clip_value, "agc": agc, "gc": centralize, "nan": guard, "noise": noisy, "show": shown}


def build(network, loss, rule, hook="", more=""):
    """Compose a step; `more` are metrics and averages that examples log."""
    outs = {"ordinal": 3, "class": 4, "half": 4, "one": 3, "survival": 1}
    f, sort = LOSSES[loss]
    w, x, apply = NETS[network](4, outs.get(loss, outs.get(sort, 3)))
    y = target(sort, apply(w, x))
    if loss == "ordinal":
        y = I(0, 4, (len(y),))
    states = {}

    def objective(w, v):
        p = apply(w, v["x"])
        value = f(p, v["y"])
        metrics, after = {}, {}
        if "acc" in more:
            metrics["accuracy"] = (p.argmax(1) == v["y"]).float().mean()
        if "mae" in more:
            metrics["mae"] = (p - v["y"]).abs().mean()
        if "logits" in more:
            metrics["logits"] = p
        if "avg" in more:
            after["running_loss"] = 0.98 * v["running_loss"] + 0.02 * value.detach()
        if "l2" in more:
            value = value + 1e-3 * sum(x.square().sum() for x in w.values())
        return value, Outputs(metrics=metrics, states=after)

    if "avg" in more:
        states["running_loss"] = torch.tensor(1.0)
    if hook == "nan":
        states["bad_steps"] = torch.tensor(0)
    if hook == "noise":
        states["t_noise"] = torch.tensor(0.0)

    def after(new, v):
        return {f"ema.{n}": v[f"ema.{n}"].lerp(new[n], 0.05) for n in w} if "ema" in more else {}

    if "ema" in more:
        states |= {f"ema.{n}": x.clone() for n, x in w.items()}
    batch = {"x": x, "y": y} | ({f"noise.{n}": torch.randn_like(x) for n, x in w.items()} if hook == "noise" else {})
    chosen = {"hook": HOOKS[hook]} if hook else {}
    return fit(w, batch, objective, RULES[rule], states=states, after=after, **chosen)


# name: network, loss, rule, hook, further values, faces
TABLE = """
adan-swiglu: swiglu mse adan - mae x0 next
yogi-resnorm: resnorm ce yogi - acc inout
adabelief-siren: siren huber adabelief - - new
radam-warm: mlp smooth radam - acc,avg exporter
adopt-mixer: mixer poly1 adopt - acc donated
cautious-sets: sets logcosh cautious clip - arg
mars-deep: deep mse mars - mae old
qhadam-words: words ce qhadam - acc,logits serving
adabound-conv: conv focal adabound - acc x0
tiger-attn: attn ce tiger clip acc updated
lion-rnn: rnn barron lion - avg t
adamp-conv: conv smooth adamp - - bare
lars-ema-conv: conv ce lars - acc,ema slash
lamb-attn: attn ce lamb clip avg camel
ftrl-clicks: words bce ftrl - - next mixed
rprop-small: mlp logcosh rprop - mae anyorder
novograd-tone: rnn ce novograd - acc x0
apollo-kan: kan mse apollo clip - inout
adashift-mlp: mlp pinball adashift - - new
muon-resnorm: resnorm ce muon - acc donated
prodigy-mlp: mlp mse prodigy - mae next x0
dadapt-kan: kan huber dadapt - - arg
dog-sets: sets mse dog - - mixed
schedulefree-deep: deep ce schedulefree - acc serving
galore-deep: deep mse galore - - old
shampoo-highway: highway poisson shampoo - - exporter
came-swiglu: swiglu mse came - mae t
agc-nfnet: conv ce nesterov agc acc slash
gradient-centralization: conv focal momentum gc - updated
nan-guard-own: mlp gaussian adam nan avg camel
annealed-noise: mlp hinge sgd noise - anyorder
value-clip-rnn: rnn mse rmsprop clipv mae x0
grads-also-out: deep ordinal adamw-int show - inout
dice-segmenter: mlp dice adam - - raw
tversky-ema: highway tversky adamw-int - ema next
asl-multilabel: words asl adam clip ema stored
cox-survival: deep cox adam - l2 donated
plain-sum-loss: siren sum sgd clip - arg
"""
for line in TABLE.strip().splitlines():
    kind, row = line.split(":")
    *parts, faces = row.strip().split(" ", 5)
    parts = ["" if part == "-" else part for part in parts]
    add(kind, "pytorch", lambda parts=parts: build(*parts), faces)


def gcn():
    w = {"gc1": R(4, 5) / 2, "gc2": R(5, 3) / 2}
    a = (torch.rand(6, 6) > 0.5).float()
    batch = {"x": R(6, 4), "y": I(0, 3, (6,)), "train_mask": torch.tensor([1.0, 1, 0, 1, 0, 1])}

    def loss(w, v):
        each = F.cross_entropy(graph(w, v), v["y"], reduction="none")
        return (each * v["train_mask"]).sum() / v["train_mask"].sum(), Outputs(metrics={"all_nodes": each})

    return fit(w, batch, loss, RULES["adam"], constants={"adj": ((a + a.T) > 0).float()})


add("gcn-masked-nodes", "pytorch", gcn, "new bare")
add(
    "warm-restarts",
    "pytorch",
    lambda: fit(
        mlp(4, 6, 2),
        {"x": R(5, 4), "y": R(5, 2)},
        lambda w, v: F.mse_loss(net(w, v["x"]), v["y"]),
        per(
            "m v",
            lambda w, g, m, u, t: adamw(w, g, m, u, t, lr=0.001 + 0.005 * (1 + torch.cos(3.1416 * (t % 10) / 10))),
            FLOAT,
        ),
    ),
    "x0 next",
)
