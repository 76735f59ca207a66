"""Fresh kinds about losses: several of them, parts of them, and numbers that look like them."""

from collections.abc import Iterator
from functools import partial

import torch
import torch.nn.functional as F

from models.zoo.pytorch import kinds_fresh_parts as p
from models.zoo.pytorch.problems import dense, layers, matrix, one_hot
from models.zoo.steps import Outputs, Step, kind

relu = torch.relu


@kind("fresh-linear-probe")
def linear_probe() -> Iterator[Step]:
    """A linear probe on the detached feature: both losses, or their sum beside both, or the network's loss alone."""
    net = layers(5, 7, 4) | {"probe": matrix(7, 4)}

    def objective(w, v):
        hidden = torch.tanh(v["x"] @ w["w1"] + w["b1"])
        loss, probe = (F.cross_entropy(z, v["y"]) for z in (hidden @ w["w2"] + w["b2"], hidden.detach() @ w["probe"]))
        return loss + probe, {"loss": loss, "probe_loss": probe}

    def alone(total, parts):
        return total, {"loss": parts["loss"]}

    yield from p.trained("both:plain numbered", p.labelled(), net, objective, "sgd", "loss probe_loss")
    yield from p.trained("sum:new", p.labelled(), net, objective, "heavy", "total")
    yield from p.trained("alone:plain", p.labelled(), net, lambda w, v: alone(*objective(w, v)), "sgd", "loss")


@p.trains(
    "fresh-heads-on-frozen-feature",
    "plain embedded scrambled",
    lambda: (
        {"x": torch.randn(6, 5), "colours": torch.randint(3, (6,)), "shapes": torch.randint(3, (6,))},
        {"colour": matrix(8, 3), "shape": matrix(8, 3)},
        {},
        layers(5, 8),
    ),
    rule="heavy",
    losses="colour_loss shape_loss",
)
def heads_on_frozen_feature(w, v):
    """Two heads of one shape on a frozen network, whose weights are constants: a loss each, no total."""
    feature = relu(dense(v, v["x"]))
    each = {f"{name}_loss": F.cross_entropy(feature @ w[name], v[f"{name}s"]) for name in w}
    return sum(each.values()), each


@kind("fresh-twin-critics")
def twin_critics() -> Iterator[Step]:
    """TD3: two critics, the least of two targets, slow targets; each critic's loss, or the sum of both."""
    nets = layers(5, 6, 1, prefix="q1_") | layers(5, 6, 1, prefix="q2_")
    data = {"seen": torch.randn(7, 5), "reward": torch.randn(7), "after": torch.randn(7, 5), "done": torch.zeros(7)}

    def objective(w, v):
        slow = p.pick(v, nets, "target_{}")
        best = torch.minimum(*(dense(slow, v["after"], relu, q)[:, 0] for q in ("q1_", "q2_")))
        goal = v["reward"] + 0.99 * (1 - v["done"]) * best
        each = {f"{q}loss": F.mse_loss(dense(w, v["seen"], relu, q)[:, 0], goal) for q in ("q1_", "q2_")}
        return sum(each.values()), each

    def targets(v, states, _):
        return p.tag(p.blend(p.pick(v, nets, "target_{}"), states, 0.995), "target_{}")

    for names, losses in (("each:plain", "q1_loss q2_loss"), ("sum:out", "critic_loss")):
        carried = p.clones(nets, "target_{}")
        yield from p.trained(names, data, nets, objective, "adam", losses, carried, targets)


@p.runs(
    "fresh-hinge-gan",
    "plain numbered",
    lambda: (
        {"real": torch.randn(6, 4), "z": torch.randn(6, 3)},
        layers(3, 5, 4, prefix="g_") | layers(4, 5, 1, prefix="d_"),
    ),
)
def hinge_gan(v):
    """A GAN with the hinge loss and an output for each loss, both from the same weights; no total."""
    judge = partial(dense, activation=relu, prefix="d_")
    g, d = ({k: v[k] for k in v if k.startswith(part)} for part in ("g_", "d_"))
    fake = dense(v, v["z"], prefix="g_")
    d_loss, slopes = p.slope(lambda w: relu(1 - judge(w, v["real"])).mean() + relu(1 + judge(w, fake)).mean(), d)
    g_loss, grads = p.slope(lambda w: -judge(v, dense(w, v["z"], prefix="g_")).mean(), g)
    return Outputs({"d_loss": d_loss, "g_loss": g_loss}, states=p.sgd(d, slopes) | p.sgd(g, grads, 0.02))


@kind("fresh-micro-batches")
def micro_batches() -> Iterator[Step]:
    """Two micro-batches, their gradients averaged; both losses, the last one alone, or their mean are given out."""
    net = layers(4, 6, 3)
    for variant in ("both", "last", "mean"):

        def run(v, variant=variant):
            pairs = [p.slope(lambda w, i=i: F.mse_loss(dense(w, v["x"][i]), v["y"][i]), p.pick(v, net)) for i in (0, 1)]
            grads = {name: (pairs[0][1][name] + pairs[1][1][name]) / 2 for name in net}
            one, two = pairs[0][0], pairs[1][0]
            given = {"both": {"loss_0": one, "loss_1": two}, "last": {"loss_1": two}, "mean": {"loss": (one + two) / 2}}
            return Outputs(given[variant], states=p.heavy(v, p.pick(v, net), grads))

        data = {"x": torch.randn(2, 5, 4), "y": torch.randn(2, 5, 3)}
        yield from p.steps(f"{variant}:plain", data, p.slots("heavy", net), run)


@kind("fresh-loss-by-where")
def loss_by_where() -> Iterator[Step]:
    """Huber by Where for each element with a fed width, or a Where of two scalars: absolute or squared error."""

    def elements(w, v):
        error = dense(w, v["x"]) - v["y"]
        big = v["delta"] * (error.abs() - v["delta"] / 2)
        return torch.where(error.abs() < v["delta"], error**2 / 2, big).mean()

    def scalars(w, v):
        error = dense(w, v["x"]) - v["y"]
        return torch.where(v["delta"] > 0.5, error.abs().mean(), (error**2).mean())

    for names, objective in (("elements:plain", elements), ("scalars:plain scalars-bare:bare", scalars)):
        delta = {"delta": torch.tensor(0.7)}
        yield from p.trained(names, p.measured(), layers(5, 6, 3), objective, "adam", hyperparameters=delta)


@kind("fresh-loss-in-cond")
def loss_in_cond() -> Iterator[Step]:
    """An If by a counter: loss and gradients of the one or the other criterion come out of it."""
    net = layers(5, 6, 3)

    def branch(loss):
        def compute(x, y, *weights):
            value, grads = p.slope(lambda w: loss(dense(w, x), y), dict(zip(net, weights, strict=True)))
            return value, *grads.values()

        return compute

    def run(v):
        given = (v["x"], v["y"], *p.pick(v, net).values())
        loss, *grads = torch.cond(v["done"] > 10, branch(F.l1_loss), branch(F.mse_loss), given)
        states = p.sgd(p.pick(v, net), dict(zip(net, grads, strict=True)))
        return Outputs({"loss": loss}, states=states | {"done": v["done"] + 1})

    yield from p.steps("plain bare", p.measured(), net | {"done": torch.tensor(0)}, run)


@p.trains(
    "fresh-linear-chain-crf",
    "plain new",
    lambda: (
        {"feats": torch.randn(3, 5, 6), "tags": torch.randint(4, (3, 5)), "mask": torch.ones(3, 5).tril(2)},
        {"emit": matrix(6, 4), "trans": 0.1 * torch.randn(4, 4), "start": torch.zeros(4), "end": torch.zeros(4)},
    ),
    losses="nll",
)
def linear_chain_crf(w, v):
    """A tagger whose transitions, start and end scores are learnt; the forward algorithm, with a mask."""
    scores, hot = v["feats"] @ w["emit"], one_hot(v["tags"], 4)
    alpha = w["start"] + scores[:, 0]
    gold = (hot[:, 0] * alpha).sum(1) + hot[:, 4] @ w["end"]
    for t in range(1, 5):
        keep = v["mask"][:, t, None]
        moved = torch.logsumexp(alpha[:, :, None] + w["trans"], 1) + scores[:, t]
        alpha = keep * moved + (1 - keep) * alpha
        passed = (hot[:, t - 1] @ w["trans"] * hot[:, t]).sum(1) + (hot[:, t] * scores[:, t]).sum(1)
        gold = gold + keep[:, 0] * passed
    return (torch.logsumexp(alpha + w["end"], 1) - gold).mean()


@kind("fresh-direct-preference")
def direct_preference() -> Iterator[Step]:
    """DPO and IPO with a frozen reference; rewards, margin and accuracy are logged."""
    net = {"embed": torch.randn(9, 5), "head": matrix(5, 9)}
    data = {name: torch.randint(9, (4, 6)) for name in ("chosen", "rejected")}

    def reward(w, v, k):
        def logp(weights):
            scores = torch.log_softmax(torch.tanh(weights["embed"][v[k][:, :-1]]) @ weights["head"], -1)
            return scores.gather(2, v[k][:, 1:, None])[..., 0].sum(1)

        return 0.1 * (logp(w) - logp(p.pick(v, net, "ref_{}")))

    def objective(w, v, squared=False):
        good, bad = reward(w, v, "chosen"), reward(w, v, "rejected")
        logged = {"chosen_reward": good.mean(), "margin": (good - bad).mean(), "accuracy": (good > bad).float().mean()}
        return ((good - bad - 0.5) ** 2).mean() if squared else -F.logsigmoid(good - bad).mean(), logged

    reference = p.clones(net, "ref_{}")
    yield from p.trained("dpo:plain dpo-bare:bare", data, net, objective, constants=reference)
    yield from p.trained("ipo:out", data, net, lambda w, v: objective(w, v, True), constants=reference)


@p.trains(
    "fresh-clip-temperature",
    "plain primed",
    lambda: (
        {"pixels": torch.randn(5, 6), "words": torch.randn(5, 5)},
        {"image": matrix(6, 4), "text": matrix(5, 4), "logit_scale": torch.tensor(2.0)},
    ),
    extra=lambda v, states, _: {"logit_scale": states["logit_scale"].clamp(0.0, 4.6)},
)
def clip_temperature(w, v):
    """CLIP: two towers and a learnt, clamped temperature; both directions are logged, their mean is the loss."""
    a, b = (F.normalize(x, dim=1) for x in (v["pixels"] @ w["image"], v["words"] @ w["text"]))
    logits = torch.exp(w["logit_scale"]) * a @ b.T
    parts = {k: -(torch.log_softmax(logits, i) * torch.eye(5)).sum() / 5 for i, k in enumerate(("t2i", "i2t"))}
    return (parts["i2t"] + parts["t2i"]) / 2, parts | {"scale": torch.exp(w["logit_scale"])}


@kind("fresh-logged-penalty")
def logged_penalty() -> Iterator[Step]:
    """Decoupled decay with a penalized loss that is not differentiated; or the penalty is part of the loss."""

    def objective(w, v, coupled=False):
        task = F.mse_loss(dense(w, v["x"]), v["y"])
        total = task + 0.005 * sum((value**2).sum() for value in w.values())
        return (total if coupled else task), {"task_loss": task, "loss": total}

    net = layers(5, 6, 3)
    yield from p.trained("decoupled:plain", p.measured(), net, objective, "adamw", "task_loss")
    yield from p.trained("coupled:plain", p.measured(), net, lambda w, v: objective(w, v, True), "adam", "loss")


@p.trains(
    "fresh-constant-apart",
    "plain bare",
    lambda: ({"x": torch.randn(6, 5), "y": torch.softmax(torch.randn(6, 4), 1)}, layers(5, 6, 4)),
    rule="sgd",
    losses="cross_entropy kl",
)
def constant_apart(w, v):
    """Either loss is right: soft-label cross-entropy, and the divergence, less by the entropy of the labels."""
    loss = -(v["y"] * torch.log_softmax(dense(w, v["x"]), 1)).sum(1).mean()
    return loss, {"cross_entropy": loss, "kl": loss + (v["y"] * torch.log(v["y"])).sum(1).mean()}
