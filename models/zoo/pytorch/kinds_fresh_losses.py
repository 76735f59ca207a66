"""Fresh kinds about losses: several of them, parts of them, and numbers that look like them."""

from collections.abc import Iterator

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


@kind("fresh-baseline-beside")
def baseline_beside() -> Iterator[Step]:
    """A logistic regression is trained beside a network on the same batch: two losses; their gap is logged."""
    net, line = layers(5, 6, 4), {"line": matrix(5, 4)}

    def run(v):
        loss, grads = p.slope(lambda w: F.cross_entropy(dense(w, v["x"], relu), v["y"]), p.pick(v, net))
        other, slopes = p.slope(lambda w: F.cross_entropy(v["x"] @ w["line"], v["y"]), p.pick(v, line))
        states = p.adam(v, p.pick(v, net), grads) | p.sgd(p.pick(v, line), slopes, 0.1)
        return Outputs({"network": loss, "baseline": other}, {"gap": other - loss}, states=states)

    yield from p.steps("plain bare", p.labelled(), p.slots("adam", net) | line, run)


@kind("fresh-heads-on-frozen-feature")
def heads_on_frozen_feature() -> Iterator[Step]:
    """Two heads of one shape on a frozen network, whose weights are constants: a loss each, no total."""
    frozen, heads = layers(5, 8), {"colour": matrix(8, 3), "shape": matrix(8, 3)}
    data = {"x": torch.randn(6, 5), "colours": torch.randint(3, (6,)), "shapes": torch.randint(3, (6,))}

    def objective(w, v):
        feature = relu(dense(v, v["x"]))
        each = {f"{name}_loss": F.cross_entropy(feature @ w[name], v[f"{name}s"]) for name in w}
        return sum(each.values()), each

    names = "plain embedded scrambled"
    yield from p.trained(names, data, heads, objective, "heavy", "colour_loss shape_loss", constants=frozen)


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


@kind("fresh-actor-and-critic")
def actor_and_critic() -> Iterator[Step]:
    """DDPG: the critic's loss, then the actor's through the next critic; two Adams with a counter each."""
    actor, critic = layers(4, 6, 2, prefix="pi_"), layers(6, 6, 1, prefix="q_")
    data = {"s": torch.randn(6, 4), "a": torch.randn(6, 2), "r": torch.randn(6), "s2": torch.randn(6, 4)}

    def value(w, s, a):
        return dense(w, torch.cat([s, a], 1), relu, "q_")[:, 0]

    def policy(w, s):
        return torch.tanh(dense(w, s, relu, "pi_"))

    def run(v):
        slow = p.pick(v, critic | actor, "{}_slow")
        goal = v["r"] + 0.9 * value(slow, v["s2"], policy(slow, v["s2"]))
        loss, grads = p.slope(lambda w: F.mse_loss(value(w, v["s"], v["a"]), goal), p.pick(v, critic))
        states = p.adam(v, p.pick(v, critic), grads, t="q_t")
        gain, grads = p.slope(lambda w: -value(states, v["s"], policy(w, v["s"])).mean(), p.pick(v, actor))
        states = states | p.adam(v, p.pick(v, actor), grads, t="pi_t")
        return Outputs({"critic": loss, "actor": gain}, states=states | p.tag(p.blend(slow, states, 0.99), "{}_slow"))

    states = p.slots("adam", critic, "q_t") | p.slots("adam", actor, "pi_t") | p.clones(critic | actor, "{}_slow")
    yield from p.steps("plain exporter", data, states, run)


@kind("fresh-hinge-gan")
def hinge_gan() -> Iterator[Step]:
    """A GAN with the hinge loss and an output for each loss, both from the same weights; no total."""
    g, d = layers(3, 5, 4, prefix="g_"), layers(4, 5, 1, prefix="d_")

    def run(v):
        def judge(w):
            fake = dense(w, dense(v, v["z"], prefix="g_").detach(), relu, "d_")
            return relu(1 - dense(w, v["real"], relu, "d_")).mean() + relu(1 + fake).mean()

        d_loss, slopes = p.slope(judge, p.pick(v, d))
        g_loss, grads = p.slope(lambda w: -dense(v, dense(w, v["z"], prefix="g_"), relu, "d_").mean(), p.pick(v, g))
        states = p.sgd(p.pick(v, d), slopes) | p.sgd(p.pick(v, g), grads, 0.02)
        return Outputs({"d_loss": d_loss, "g_loss": g_loss}, states=states)

    yield from p.steps("plain numbered", {"real": torch.randn(6, 4), "z": torch.randn(6, 3)}, g | d, run)


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
    "fresh-learnt-variances",
    "plain scrambled",
    lambda: {
        "data": {"x": torch.randn(6, 4), "y": torch.randn(6, 1), "c": torch.randint(3, (6,))},
        "net": layers(4, 8)
        | {"mean": matrix(8, 1), "spread": matrix(8, 1), "cls": matrix(8, 3), "log_var": torch.zeros(())},
    },
)
def learnt_variances(w, v):
    """A head for the log-variance, and a scalar log-variance that weighs a second task; the total is the loss."""
    h = relu(dense(w, v["x"]))
    spread = (h @ w["spread"]).clamp(-5, 5)
    nll = 0.5 * (spread + (h @ w["mean"] - v["y"]) ** 2 * torch.exp(-spread)).mean()
    ce = F.cross_entropy(h @ w["cls"], v["c"])
    return nll + torch.exp(-w["log_var"]) * ce + w["log_var"] / 2, {"nll": nll, "cross_entropy": ce}


@kind("fresh-linear-chain-crf")
def linear_chain_crf() -> Iterator[Step]:
    """A tagger whose transitions, start and end scores are learnt; the forward algorithm, with a mask."""
    net = {"emit": matrix(6, 4), "trans": 0.1 * torch.randn(4, 4), "start": torch.zeros(4), "end": torch.zeros(4)}
    data = {"feats": torch.randn(3, 5, 6), "tags": torch.randint(4, (3, 5)), "mask": torch.ones(3, 5)}
    data["mask"][1, 3:] = 0

    def objective(w, v):
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

    yield from p.trained("plain new", data, net, objective, "sgd", "nll")


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


@kind("fresh-clip-temperature")
def clip_temperature() -> Iterator[Step]:
    """CLIP: two towers and a learnt, clamped temperature; both directions are logged, their mean is the loss."""
    net = {"image": matrix(6, 4), "text": matrix(5, 4), "logit_scale": torch.tensor(2.0)}

    def objective(w, v):
        a, b = (F.normalize(x, dim=1) for x in (v["pixels"] @ w["image"], v["words"] @ w["text"]))
        logits = torch.exp(w["logit_scale"]) * a @ b.T
        parts = {k: -(torch.log_softmax(logits, i) * torch.eye(5)).sum() / 5 for i, k in enumerate(("t2i", "i2t"))}
        return (parts["i2t"] + parts["t2i"]) / 2, parts | {"scale": torch.exp(w["logit_scale"])}

    def clamp(v, states, _):
        return {"logit_scale": states["logit_scale"].clamp(0.0, 4.6)}

    data = {"pixels": torch.randn(5, 6), "words": torch.randn(5, 5)}
    yield from p.trained("plain", data, net, objective, extra=clamp)


@kind("fresh-deep-supervision")
def deep_supervision() -> Iterator[Step]:
    """Auxiliary classifiers at inner layers, weighed by 0.3: the total, or the three single losses without it."""
    net = layers(5, 6, 6, 4) | {"aux1": matrix(6, 4), "aux2": matrix(6, 4)}

    def objective(w, v):
        one = relu(v["x"] @ w["w1"] + w["b1"])
        two = relu(one @ w["w2"] + w["b2"])
        heads = {"main": two @ w["w3"] + w["b3"], "aux1": one @ w["aux1"], "aux2": two @ w["aux2"]}
        each = {f"{name}_loss": F.cross_entropy(head, v["y"]) for name, head in heads.items()}
        return each["main_loss"] + 0.3 * (each["aux1_loss"] + each["aux2_loss"]), each

    for names, losses in (("total:plain", "total_loss"), ("singles:raw", "main_loss aux1_loss aux2_loss")):
        yield from p.trained(names, p.labelled(), net, objective, "heavy", losses)


@p.trains(
    "fresh-mutual-learning",
    "plain scrambled",
    lambda: {"data": p.labelled(), "net": layers(5, 6, 4, prefix="a_") | layers(5, 6, 4, prefix="b_")},
    rule="sgd",
    losses="a_loss b_loss",
)
def mutual_learning(w, v):
    """Two students: cross-entropy and the divergence from the other's detached answer, a loss each, no total."""
    answers = {name: dense(w, v["x"], relu, name) for name in ("a_", "b_")}
    losses = {}
    for own, other in (("a_", "b_"), ("b_", "a_")):
        peer = torch.softmax(answers[other].detach(), 1)
        apart = F.kl_div(torch.log_softmax(answers[own], 1), peer, reduction="batchmean")
        losses[f"{own}loss"] = F.cross_entropy(answers[own], v["y"]) + apart
    return losses["a_loss"] + losses["b_loss"], losses


@kind("fresh-logged-penalty")
def logged_penalty() -> Iterator[Step]:
    """Decoupled decay with a penalized loss that nobody differentiates; or the penalty is part of the loss."""

    def objective(w, v, coupled=False):
        task = F.mse_loss(dense(w, v["x"]), v["y"])
        total = task + 0.005 * sum((value**2).sum() for value in w.values())
        return (total if coupled else task), {"task_loss": task, "loss": total}

    net = layers(5, 6, 3)
    yield from p.trained("decoupled:plain", p.measured(), net, objective, "adamw", "task_loss")
    yield from p.trained("coupled:plain", p.measured(), net, lambda w, v: objective(w, v, True), "adam", "loss")


@p.trains(
    "fresh-mixture-density",
    "plain",
    lambda: {"data": p.measured(6, 3, 1), "net": layers(3, 8, 12)},
    losses="nll",
)
def mixture_density(w, v):
    """A mixture density network; the responsibilities are an output."""
    weight, mean, spread = dense(w, v["x"]).chunk(3, 1)
    each = torch.log_softmax(weight, 1) - spread - 0.5 * ((v["y"] - mean) * torch.exp(-spread)) ** 2
    return -torch.logsumexp(each, 1).mean(), {"responsibility": torch.softmax(each, 1)}


@p.trains(
    "fresh-angular-margin",
    "plain old",
    lambda: {"data": p.labelled(), "net": layers(5, 6) | {"classes": matrix(6, 4)}},
    rule="heavy",
)
def angular_margin(w, v):
    """ArcFace: an additive margin on the angle, normalized class weights; the cosines are an output."""
    cosine = F.normalize(dense(w, v["x"]), dim=1) @ F.normalize(w["classes"], dim=0)
    cosine = cosine.clamp(-0.999, 0.999)
    moved = torch.where(cosine > -0.87, cosine * 0.8776 - torch.sqrt(1 - cosine**2) * 0.4794, cosine - 0.24)
    logits = 8 * torch.where(one_hot(v["y"], 4) > 0, moved, cosine)
    return F.cross_entropy(logits, v["y"]), {"cosine": cosine}
