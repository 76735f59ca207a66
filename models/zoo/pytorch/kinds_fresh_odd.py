"""Fresh kinds that no list has."""

import torch
import torch.nn.functional as F

from models.zoo.pytorch import kinds_fresh_parts as p
from models.zoo.pytorch.kinds_fresh_parts import TWO, ce, mse, small
from models.zoo.pytorch.problems import dense, layers, matrix
from models.zoo.steps import Outputs


@p.trains(
    "fresh-forward-forward",
    "plain scrambled",
    lambda: ({"good": torch.randn(6, 5), "bad": torch.randn(6, 5)}, {"w1": matrix(5, 6), "w2": matrix(6, 6)}),
    losses="layer1_loss layer2_loss",
)
def forward_forward(w, v):
    """Each layer has its own loss on real and false data, its inputs detached: two losses, no total."""
    seen, losses = [v["good"], v["bad"]], {}
    for i in "12":
        seen = [torch.relu(F.normalize(x.detach(), dim=1) @ w[f"w{i}"]) for x in seen]
        good, bad = ((x**2).mean(1) - 0.5 for x in seen)
        losses[f"layer{i}_loss"] = (F.softplus(-good) + F.softplus(bad)).mean()
    return sum(losses.values()), losses


@p.runs(
    "fresh-eligibility-traces",
    "plain numbered",
    lambda: (p.measured(1, 5, 1) | {"after": torch.randn(1, 5)}, (net := layers(5, 6, 1)) | p.zeros(net, "{}_trace")),
)
def eligibility_traces(v):
    """TD(lambda): the value is what is differentiated, no loss; its slope decays in traces. A refusal is right, too."""
    value, grads = p.slope(lambda w: dense(w, v["x"]).sum(), p.pick(v, TWO))
    error = v["y"].sum() + 0.9 * dense(v, v["after"]).sum() - value
    traces = {f"{k}_trace": 0.8 * v[f"{k}_trace"] + grads[k] for k in TWO}
    states = {k: v[k] + 0.02 * error * traces[f"{k}_trace"] for k in TWO}
    return Outputs({"value": value}, {"squared_error": error**2}, states=states | traces)


@p.runs(
    "fresh-contrastive-divergence",
    "plain",
    lambda: (
        {"x": torch.rand(7, 5), "u": torch.rand(7, 4)},
        {"w": matrix(5, 4), "seen": torch.zeros(5), "hidden": torch.zeros(4), "w_vel": torch.zeros(5, 4)},
    ),
)
def contrastive_divergence(v):
    """A restricted Boltzmann machine by CD-1: products of data, no loss and no backward pass; a refusal is right."""
    first = torch.sigmoid(v["x"] @ v["w"] + v["hidden"])
    again = torch.sigmoid((v["u"] < first).float() @ v["w"].T + v["seen"])
    second = torch.sigmoid(again @ v["w"] + v["hidden"])
    velocity = 0.5 * v["w_vel"] + (v["x"].T @ first - again.T @ second) / 7
    biases = {
        "seen": v["seen"] + 0.1 * (v["x"] - again).mean(0),
        "hidden": v["hidden"] + 0.1 * (first - second).mean(0),
    }
    states = biases | {"w": v["w"] + 0.1 * velocity, "w_vel": velocity}
    return Outputs(metrics={"recon_error": ((v["x"] - again) ** 2).mean()}, states=states)


@p.runs(
    "fresh-feedback-alignment",
    "plain bare",
    lambda: (p.measured(), {"w1": matrix(5, 6), "w2": matrix(6, 3)}, {"back": matrix(3, 6)}),
)
def feedback_alignment(v):
    """The error goes back through a fixed random matrix: the first weight gets no gradient of the loss."""
    hidden = torch.tanh(v["x"] @ v["w1"])
    error = hidden @ v["w2"] - v["y"]
    back = (error @ v["back"]) * (1 - hidden**2)
    grads = {"w1": v["x"].T @ back / 6, "w2": hidden.T @ error / 6}
    return Outputs({"loss": (error**2).sum() / 12}, states=p.sgd(p.pick(v, grads), grads))


@p.trains(
    "fresh-controlled-multiplier",
    "plain scrambled",
    lambda: (p.labelled(), layers(5, 6, 4), {"integral": torch.tensor(0.3), "last": torch.tensor(0.1)}),
)
def controlled_multiplier(w, v):
    """A constraint's multiplier by a PID controller: integral and last violation are carried scalars."""
    cost = torch.sigmoid(dense(w, v["x"])).mean() - 0.4
    now = cost.detach()
    integral = torch.relu(v["integral"] + 0.1 * now)
    multiplier = torch.relu(integral + now + 0.5 * (now - v["last"]))
    loss = (ce(w, v) + multiplier * cost) / (1 + multiplier)
    return loss, {"integral": integral, "last": now, "multiplier": multiplier}


@p.trains(
    "fresh-learnt-filter",
    "plain numbered",
    lambda: (
        {"seen": torch.randn(5, 4)},
        {"drift": torch.tensor(0.9), "log_q": torch.tensor(-1.0), "log_r": torch.zeros(())},
        {"mean": torch.zeros(5), "var": torch.ones(5)},
    ),
    losses="nll",
)
def learnt_filter(w, v):
    """A Kalman filter whose three scalar weights are learnt by likelihood; its belief is carried."""
    mean, var, nll = v["mean"], v["var"], 0.0
    for t in range(4):
        mean, var = w["drift"] * mean, w["drift"] ** 2 * var + torch.exp(w["log_q"])
        total, error = var + torch.exp(w["log_r"]), v["seen"][:, t] - mean
        nll = nll + 0.5 * (torch.log(total) + error**2 / total).mean()
        mean, var = mean + var / total * error, var * (1 - var / total)
    return nll, {"mean": mean.detach(), "var": var.detach()}


@p.runs("fresh-rotated-models", "plain", lambda: (p.labelled(), p.clones(layers(5, 6, 4), "{}_a", "{}_b")))
def rotated_models(v):
    """Two models change places each step: the one that was trained becomes the teacher, the teacher the student."""
    teacher, student = p.pick(v, TWO, "{}_b"), p.pick(v, TWO, "{}_a")
    soft = torch.softmax(dense(teacher, v["x"], torch.relu), 1)
    loss, grads = p.slope(lambda w: ce(w, v) - (soft * torch.log_softmax(dense(w, v["x"]), 1)).sum(1).mean(), student)
    return Outputs({"loss": loss}, states=p.tag(p.sgd(student, grads), "{}_b") | p.clones(teacher, "{}_a"))


@p.updates("fresh-generated-noise", "plain new", lambda: small(p.zeros, "{}_vel", seed=torch.tensor(7)), mse)
def generated_noise(w, g, v, _):
    """Langevin dynamics with friction; the noise comes from a congruential seed that is carried."""
    seed = (v["seed"] * 1103515245 + 12345) % 2147483648
    phase = seed.float() / 2147483648
    noise = {k: torch.sin(torch.arange(w[k].numel()).view(w[k].shape) * 12.9 + 78.2 * phase) for k in w}
    return p.heavy(v, w, {k: g[k] + 0.01 * noise[k] for k in w}) | {"seed": seed}


@p.runs(
    "fresh-architecture-weights",
    "plain scrambled",
    lambda: (p.measured() | p.tag(p.measured(), "val_{}"), layers(5, 6, 3) | {"alpha": torch.zeros(2)}),
)
def architecture_weights(v):
    """DARTS: the mix of activations learns from the validation batch, the weights from the other: two losses."""

    def loss(w, x, y):
        mix, (hidden, out) = torch.softmax(w["alpha"], 0), (v[x] @ w["w1"] + w["b1"], w["w2"])
        return F.mse_loss((mix[0] * torch.tanh(hidden) + mix[1] * torch.relu(hidden)) @ out + w["b2"], v[y])

    train, grads = p.slope(lambda w: loss(v | w, "x", "y"), p.pick(v, TWO))
    held, slopes = p.slope(lambda w: loss(v | w, "val_x", "val_y"), {"alpha": v["alpha"]})
    states = p.sgd(p.pick(v, TWO), grads) | p.sgd({"alpha": v["alpha"]}, slopes)
    return Outputs({"train_loss": train, "val_loss": held}, states=states)


@p.updates("fresh-loss-sized-rate", "plain bare", lambda: small(p.zeros), mse)
def loss_sized_rate(w, g, v, loss):
    """Polyak's rate: the value of the loss over the squared norm of the gradient; the rate is logged."""
    rate = torch.clamp(loss / (p.norm(g) ** 2 + 1e-6), max=0.5)
    return p.sgd(w, g, rate), {"rate": rate}


@p.runs("fresh-influence-score", "plain", lambda: (p.labelled() | p.tag(p.labelled(), "val_{}"), layers(5, 6, 4)))
def influence_score(v):
    """The product of the training and the validation gradient is logged; the validation loss trains nothing."""
    loss, grads = p.slope(lambda w: ce(w, v), p.pick(v, TWO))
    held, slopes = p.slope(lambda w: ce(w, p.pick(v, "xy", "val_{}")), p.pick(v, TWO))
    score = sum((grads[k] * slopes[k]).sum() for k in TWO)
    return Outputs({"loss": loss}, {"val_loss": held, "influence": score}, states=p.sgd(p.pick(v, TWO), grads))


@p.runs("fresh-flat-gradient", "plain bare", lambda: (p.labelled(), {}, layers(5, 6, 4)))
def flat_gradient(v):
    """No optimizer: all gradients in one vector, for a server; the norm is logged."""
    loss, grads = p.slope(lambda w: ce(w, v), p.pick(v, TWO))
    flat = torch.cat([grads[k].flatten() for k in TWO])
    return Outputs({"loss": loss}, {"norm": torch.sqrt((flat**2).sum())}, {"flat": flat})
