"""Recipes of reinforcement learning with statistics that are carried: returns, observations, priorities."""

import math
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.zoo.pytorch.recipes import (
    EXPORTER,
    SCRAMBLED,
    adam_state,
    adamw,
    call,
    clip_norm,
    copies_of,
    grads_of,
    keras_adam,
    parameters,
    select,
    zeros_of,
)
from models.zoo.steps import Arrays, Inputs, Outputs, Step, Style, kind

STEPS, ENVS = 4, 3


def merged(values: Arrays, name: str, x: Tensor) -> Arrays:
    """Return the next running mean, variance and count of rows (Chan's merge), as in OpenAI's baselines."""
    mean, variance, count = values[f"{name}_mean"], values[f"{name}_var"], values[f"{name}_count"]
    n = float(x.shape[0])
    delta, total = x.mean(0) - mean, count + n
    squares = variance * count + x.var(0, correction=0) * n + delta**2 * count * n / total
    return {f"{name}_mean": mean + delta * n / total, f"{name}_var": squares / total, f"{name}_count": total}


def advantages(reward: Tensor, done: Tensor, guess: Tensor, last: Tensor) -> Tensor:
    """Return generalised advantages over the steps of a roll-out."""
    made, running, following = [], torch.zeros_like(last), last
    for t in reversed(range(STEPS)):
        going = 1 - done[t]
        running = reward[t] + 0.99 * following * going - guess[t] + 0.99 * 0.95 * going * running
        following = guess[t]
        made.append(running)
    return torch.stack(made[::-1])


@kind("normalised-ppo")
def normalised_ppo() -> Iterator[Step]:  # noqa: PLR0915
    """PPO on rewards divided by the spread of a running return, observations by theirs; or PopArt's rescaled value."""
    actor = nn.Sequential(nn.Linear(5, 12), nn.Tanh(), nn.Linear(12, 10), nn.Tanh(), nn.Linear(10, 3))
    critic = nn.Sequential(nn.Linear(5, 14), nn.Tanh(), nn.Linear(14, 9), nn.Tanh(), nn.Linear(9, 1))
    params = parameters(actor, "actor.") | parameters(critic, "critic.")
    batch = {"obs": 2 + torch.randn(STEPS, ENVS, 5), "last_obs": 2 + torch.randn(ENVS, 5)}
    batch |= {"action": torch.randint(3, (STEPS, ENVS)), "old_logp": -0.8 - 0.5 * torch.rand(STEPS, ENVS)}
    batch |= {"reward": 5 * torch.randn(STEPS, ENVS), "done": (torch.rand(STEPS, ENVS) < 0.2).float()}
    fed = {"clip_range": torch.tensor(0.2), "ent_coef": torch.tensor(0.01)}

    def value_of(w: Arrays, x: Tensor) -> Tensor:
        return call(critic, w, x, prefix="critic.")[..., 0]

    def policy_terms(w: Arrays, x: Tensor, values: Arrays, gain: Tensor) -> tuple[Tensor, Arrays]:
        logp = torch.log_softmax(call(actor, w, x, prefix="actor."), -1)
        gap = logp.gather(-1, values["action"][..., None])[..., 0] - values["old_logp"]
        ratio, edge = torch.exp(gap), values["clip_range"]
        policy = -torch.minimum(ratio * gain, torch.clamp(ratio, 1 - edge, 1 + edge) * gain).mean()
        entropy = -(logp.exp() * logp).sum(-1).mean()
        clipped = ((ratio - 1).abs() > edge).float().mean()
        seen = {
            "policy_loss": policy,
            "entropy": entropy,
            "approx_kl": (ratio - 1 - gap).mean(),
            "clip_fraction": clipped,
        }
        return policy - values["ent_coef"] * entropy, seen

    def normalised(values: Arrays) -> Outputs:
        weights = select(values, params)
        states = merged(values, "obs", values["obs"].flatten(0, 1))
        spread = torch.sqrt(states["obs_var"] + 1e-4)
        x = ((values["obs"] - states["obs_mean"]) / spread).clamp(-10, 10)
        last = ((values["last_obs"] - states["obs_mean"]) / spread).clamp(-10, 10)
        ret, seen = values["ret"], []
        for t in range(STEPS):
            ret = ret * 0.99 + values["reward"][t]
            seen.append(ret)
            ret = ret * (1 - values["done"][t])
        states |= merged(values, "ret", torch.stack(seen).flatten()) | {"ret": ret}
        reward = (values["reward"] / torch.sqrt(states["ret_var"] + 1e-4)).clamp(-10, 10)
        guess, end = value_of(weights, x), value_of(weights, last)
        gain = advantages(reward, values["done"], guess, end)
        target = gain + guess
        gain = (gain - gain.mean()) / (gain.std() + 1e-4)

        def objective(w: Arrays) -> tuple[Tensor, Arrays]:
            policy, seen = policy_terms(w, x, values, gain)
            made = value_of(w, x)
            near = guess + (made - guess).clamp(-0.2, 0.2)
            value = 0.5 * torch.maximum((made - target) ** 2, (near - target) ** 2).mean()
            return policy + 0.5 * value, seen | {"value_loss": value}

        loss, metrics, grads = grads_of(objective, weights)
        grads, norm = clip_norm(grads, 0.5)
        lr = 3e-3 * (1 - values["update"].float() / 1000)
        states |= adamw(weights, grads, values, lr) | {"update": values["update"] + 1}
        metrics["explained_variance"] = 1 - (target - guess).var() / (target.var() + 1e-4)
        return Outputs({"loss": loss}, metrics | {"grad_norm": norm, "lr": lr}, states=states)

    def rescaled(values: Arrays) -> Outputs:
        x = (values["obs"] - 2.0) / 2.0
        old_mean, old_std = values["pop_mean"], (values["pop_sq"] - values["pop_mean"] ** 2).clamp(min=1e-3).sqrt()
        weights = select(values, params)
        guess = value_of(weights, x) * old_std + old_mean
        end = value_of(weights, (values["last_obs"] - 2.0) / 2.0) * old_std + old_mean
        gain = advantages(values["reward"], values["done"], guess, end)
        target = gain + guess
        mean = 0.99 * old_mean + 0.01 * target.mean()
        square = 0.99 * values["pop_sq"] + 0.01 * target.square().mean()
        std = (square - mean**2).clamp(min=1e-3).sqrt()
        weights["critic.4.weight"] = weights["critic.4.weight"] * old_std / std
        weights["critic.4.bias"] = (weights["critic.4.bias"] * old_std + old_mean - mean) / std

        def objective(w: Arrays) -> tuple[Tensor, Arrays]:
            policy, seen = policy_terms(w, x, values, gain / std)
            value = F.mse_loss(value_of(w, x), (target - mean) / std)
            return policy + value, seen | {"value_loss": value}

        loss, metrics, grads = grads_of(objective, weights)
        states = keras_adam(weights, grads, values, values["lr"]) | {"pop_mean": mean, "pop_sq": square}
        return Outputs({"loss": loss}, metrics | {"return_std": std}, states=states)

    carried = {"obs_mean": torch.full((5,), 1.5), "obs_var": torch.ones(5), "obs_count": torch.tensor(30.0)}
    carried |= {"ret": torch.randn(ENVS), "ret_mean": torch.tensor(0.5), "ret_var": torch.tensor(4.0)}
    carried |= {"ret_count": torch.tensor(30.0), "update": torch.tensor(12)}
    yield Step("running-returns", Inputs(batch, params | adam_state(params) | carried, fed), normalised, EXPORTER)
    states = params | zeros_of(params, "m", "v") | {"iterations": torch.tensor(0)}
    states |= {"pop_mean": torch.tensor(1.0), "pop_sq": torch.tensor(20.0)}
    yield Step("popart", Inputs(batch, states, fed | {"lr": torch.tensor(1e-3)}), rescaled)


@kind("prioritised-replay")
def prioritised_replay() -> Iterator[Step]:  # noqa: PLR0915
    """Priorities of a replay memory are carried, rows of them replaced by new errors; a dueling or a categorical Q."""
    size, actions, atoms = 40, 3, 7
    batch = {"index": torch.randperm(size)[:6], "seen": torch.randn(6, 5), "after": torch.randn(6, 5)}
    batch |= {"action": torch.randint(actions, (6,)), "reward": torch.randn(6), "done": (torch.rand(6) < 0.2).float()}
    trunk = nn.Sequential(nn.Linear(5, 14), nn.ReLU(), nn.Linear(14, 10), nn.ReLU())
    heads = {"value": nn.Linear(10, 1), "advantage": nn.Linear(10, actions)}
    wide = {"value": nn.Linear(10, atoms), "advantage": nn.Linear(10, actions * atoms)}
    support = torch.linspace(-3.0, 3.0, atoms)

    def q_of(w: Arrays, x: Tensor, own: dict[str, nn.Module]) -> Tensor:
        x = call(trunk, w, x, prefix="trunk.")
        value, gain = (call(own[name], w, x, prefix=f"{name}.") for name in ("value", "advantage"))
        gain = gain.reshape(6, actions, -1)
        return value[:, None] + gain - gain.mean(1, keepdim=True)

    def drawn(values: Arrays) -> tuple[Tensor, Tensor]:
        beta = (0.4 + 0.6 * values["frames"].float() / 1000).clamp(max=1.0)
        p = values["priorities"] ** 0.6
        chance = (p / p.sum())[values["index"]]
        weight = (size * chance) ** -beta
        return weight / weight.max(), beta

    def remembered(values: Arrays, error: Tensor) -> Arrays:
        new = error.abs() + 1e-3
        states = {"priorities": values["priorities"].index_copy(0, values["index"], new)}
        states["max_priority"] = torch.maximum(values["max_priority"], new.max())
        return states | {"frames": values["frames"] + 4}

    def dueling(values: Arrays, params: Arrays) -> Outputs:
        weights, (weight, beta) = select(values, params), drawn(values)
        best = q_of(weights, values["after"], heads)[..., 0].argmax(1, keepdim=True)
        ahead = q_of(select(values, params, "target."), values["after"], heads)[..., 0].gather(1, best)[:, 0]
        wanted = values["reward"] + 0.97 * (1 - values["done"]) * ahead

        def objective(w: Arrays) -> tuple[Tensor, tuple[Tensor, Tensor]]:
            q = q_of(w, values["seen"], heads)[..., 0].gather(1, values["action"][:, None])[:, 0]
            each = F.smooth_l1_loss(q, wanted, reduction="none")
            return (weight * each).mean(), ((q - wanted).detach(), q.mean())

        loss, (error, q), grads = grads_of(objective, weights)
        grads, _ = clip_norm(grads, 10.0)
        states = remembered(values, error) | adamw(weights, grads, values, values["lr"])
        for name in params:
            states[f"target.{name}"] = 0.99 * values[f"target.{name}"] + 0.01 * states[name]
        metrics = {"q_mean": q, "td_error": error.abs().mean(), "beta": beta}
        return Outputs({"loss": loss}, metrics, states=states)

    def categorical(values: Arrays, params: Arrays) -> Outputs:
        weights, (weight, _) = select(values, params), drawn(values)
        ahead = torch.softmax(q_of(select(values, params, "target."), values["after"], wide), -1)
        best = (ahead * support).sum(-1).argmax(1)
        chosen = ahead.gather(1, best[:, None, None].expand(6, 1, atoms))[:, 0]
        moved = (values["reward"][:, None] + 0.97 * (1 - values["done"][:, None]) * support).clamp(-3.0, 3.0)
        share = (1 - (moved[:, :, None] - support).abs()).clamp(min=0.0)
        target = (chosen[:, :, None] * share).sum(1)

        def objective(w: Arrays) -> tuple[Tensor, Tensor]:
            logits = q_of(w, values["seen"], wide)
            own = logits.gather(1, values["action"][:, None, None].expand(6, 1, atoms))[:, 0]
            each = -(target * torch.log_softmax(own, -1)).sum(-1)
            return (weight * each).mean(), each.detach()

        loss, each, grads = grads_of(objective, weights)
        states = remembered(values, each) | keras_adam(weights, grads, values, 1e-3)
        age = (values["since_copy"] + 1) % 50
        copy = age == 0
        for name in params:
            states[f"target.{name}"] = torch.where(copy, states[name], values[f"target.{name}"])
        entropy = math.log(atoms) + (target * torch.log(target + 1e-3)).sum(-1).mean()
        return Outputs({"loss": loss}, {"certainty": entropy}, states=states | {"since_copy": age})

    carried = {"priorities": 0.5 + torch.rand(size), "max_priority": torch.tensor(1.5), "frames": torch.tensor(200)}
    params = parameters(trunk, "trunk.")
    one = params | parameters(heads["value"], "value.") | parameters(heads["advantage"], "advantage.")
    states = one | copies_of(one, "target") | adam_state(one) | carried
    given = Inputs(batch, states, {"lr": torch.tensor(1e-3)})
    yield Step("dueling", given, lambda values: dueling(values, one), SCRAMBLED)
    two = params | parameters(wide["value"], "value.") | parameters(wide["advantage"], "advantage.")
    counts = {"iterations": torch.tensor(0), "since_copy": torch.tensor(10)}
    states = two | copies_of(two, "target") | zeros_of(two, "m", "v") | carried | counts
    yield Step("categorical", Inputs(batch, states), lambda values: categorical(values, two), Style(opset=21))
