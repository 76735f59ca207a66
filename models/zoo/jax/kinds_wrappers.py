"""Kinds that are optax's wrappers of optimizers and transformations of gradients."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from optax import contrib

from models.zoo.arrays import normal
from models.zoo.jax.kinds_optax import form_of
from models.zoo.jax.problems import Problem, classification, regression, square
from models.zoo.jax.training import train
from models.zoo.steps import PLAIN, STYLES, Arrays, Outputs, Step, Style, kind


def chain(*transformations: optax.GradientTransformation) -> Callable[[], dict[str, optax.GradientTransformation]]:
    """Return the transformations before SGD with momentum, and before Adam."""
    return lambda: {
        "momentum": optax.chain(*transformations, optax.sgd(0.05, momentum=0.9)),
        "adam": optax.chain(*transformations, optax.adam(0.01)),
    }


def around(
    wrap: Callable[[optax.GradientTransformation], optax.GradientTransformation],
) -> Callable[[], dict[str, optax.GradientTransformation]]:
    """Return a wrapper around SGD, SGD with momentum, and Adam."""
    return lambda: {
        "sgd": wrap(optax.sgd(0.05)),
        "momentum": wrap(optax.sgd(0.05, momentum=0.9)),
        "adam": wrap(optax.adam(0.01)),
    }


def scheduled(make: Callable[..., optax.Schedule], *options: Any, **more: Any) -> optax.Schedule:
    """Return a schedule of the count as float32: jax2onnx multiplies integers by floats without a cast."""
    schedule = make(*options, **more)
    return lambda count: schedule(jnp.asarray(count, jnp.float32))


def started(optimizer: optax.GradientTransformation) -> optax.GradientTransformation:
    """Return an optimizer whose state has all its leaves from the start."""

    def init(weights: Arrays) -> object:
        zeros = jax.tree.map(jnp.zeros_like, weights)
        return optimizer.update(zeros, optimizer.init(weights), weights)[1]

    return optax.GradientTransformation(init, optimizer.update)


def is_matrix(weights: Arrays) -> dict[str, bool]:
    """Return for each weight whether it is a matrix."""
    return jax.tree.map(lambda weight: jnp.ndim(weight) > 1, weights)


def is_first(weights: Arrays) -> dict[str, bool]:
    """Return for each weight whether it is in the first layer."""
    return {name: name.endswith("1") for name in weights}


def labels(weights: Arrays) -> dict[str, str]:
    """Return the group of each weight: the first layer, and the others."""
    return {name: "first" if name.endswith("1") else "rest" for name in weights}


GROUPS = {"first": optax.adam(0.01), "rest": optax.sgd(0.05, momentum=0.9)}
WRAPPERS = {
    "clip-global-norm": chain(optax.clip_by_global_norm(0.5)),
    "clip": chain(optax.clip(0.1)),
    "clip-block-rms": chain(optax.clip_by_block_rms(0.1)),
    "adaptive-grad-clip": chain(optax.adaptive_grad_clip(0.1)),
    "decayed-weights": chain(optax.add_decayed_weights(0.01)),
    "decayed-matrices": chain(optax.add_decayed_weights(0.01, mask=is_matrix)),
    "zero-nans": chain(optax.zero_nans()),
    "centralize": chain(optax.centralize()),
    "gradient-ema": chain(optax.ema(0.9)),
    "trust-ratio": chain(optax.scale_by_trust_ratio()),
    "block-norm": chain(optax.scale_by_param_block_norm()),
    "block-rms": chain(optax.scale_by_param_block_rms()),
    "update-norm": chain(optax.normalize_by_update_norm()),
    "stddev": chain(optax.scale_by_stddev()),
    "accumulated": chain(optax.apply_every(3)),
    "schedule": chain(optax.scale_by_schedule(scheduled(optax.cosine_decay_schedule, 1.0, 100))),
    "warm-up": chain(optax.scale_by_schedule(scheduled(optax.warmup_cosine_decay_schedule, 0.0, 1.0, 5, 100))),
    "piecewise": chain(optax.scale_by_schedule(scheduled(optax.piecewise_constant_schedule, 1.0, {3: 0.5, 9: 0.1}))),
    "exponential": chain(optax.scale_by_schedule(scheduled(optax.exponential_decay, 1.0, 10, 0.9, staircase=True))),
    "apply-if-finite": around(lambda inner: optax.apply_if_finite(inner, 5)),
    "multi-steps": around(lambda inner: optax.MultiSteps(inner, 3).gradient_transformation()),
    "multi-steps-skipping": around(
        lambda inner: optax.MultiSteps(inner, 3, should_skip_update_fn=optax.skip_not_finite).gradient_transformation()
    ),
    "skip-large": around(
        lambda inner: optax.MultiSteps(
            inner, 2, should_skip_update_fn=lambda updates, step, _: optax.skip_large_updates(updates, step, None, 10.0)
        ).gradient_transformation()
    ),
    "freeze": around(lambda inner: optax.chain(inner, optax.freeze(is_first))),
    "masked": around(lambda inner: optax.masked(inner, is_matrix)),
    "flatten": around(optax.flatten),
    "conditionally-transform": around(lambda inner: optax.conditionally_transform(inner, lambda count: count % 2 == 0)),
    "conditionally-mask": around(lambda inner: optax.conditionally_mask(inner, lambda count: count % 2 == 0)),
    "non-negative": around(lambda inner: optax.chain(inner, optax.keep_params_nonnegative())),
    "snapshot": around(lambda inner: optax.chain(inner, optax.snapshot("seen", lambda updates: updates))),
    "monitor": around(lambda inner: started(optax.chain(inner, optax.monitor({"norm": optax.tree.norm})))),
    "measured": around(
        lambda inner: started(optax.chain(inner, optax.monitor({"norm": optax.measure_with_ema(optax.tree.norm, 0.9)})))
    ),
    "plateau": around(lambda inner: optax.chain(inner, contrib.reduce_on_plateau(patience=2))),
    "schedule-free-around": around(lambda inner: contrib.schedule_free(inner, 0.05)),
    "mechanize": around(contrib.mechanize),
    "partition": lambda: {
        "two": optax.partition(GROUPS, labels),
        "frozen": optax.partition({**GROUPS, "first": optax.set_to_zero()}, labels),
    },
    "named-chain": lambda: {
        "adam": optax.named_chain(("clip", optax.clip_by_global_norm(0.5)), ("adam", optax.adam(0.01))),
    },
    "lion-schedule": lambda: {"cosine": optax.lion(scheduled(optax.cosine_decay_schedule, 0.01, 50))},
    "adam-schedule": lambda: {
        "cosine": optax.adam(scheduled(optax.cosine_decay_schedule, 0.01, 50)),
        "polynomial": optax.adam(scheduled(optax.polynomial_schedule, 0.01, 1e-4, 2, 50)),
        "restarts": optax.adam(
            scheduled(
                optax.sgdr_schedule,
                [{"init_value": 0.0, "peak_value": 0.01, "decay_steps": 10, "warmup_steps": 2, "end_value": 1e-4}] * 2,
            )
        ),
    },
    "moments-float16": lambda: {
        "adam": optax.adam(0.01, mu_dtype=jnp.float16),
        "momentum": optax.sgd(0.05, momentum=0.9, accumulator_dtype=jnp.float16),
    },
    "everything": lambda: {
        "clip-adamw-multi": optax.MultiSteps(
            optax.chain(optax.zero_nans(), optax.clip_by_global_norm(0.5), optax.adamw(0.01)), 2
        ).gradient_transformation(),
        "finite-lamb": optax.apply_if_finite(optax.chain(optax.clip(1.0), optax.lamb(0.01)), 3),
    },
}


def in_forms(make: Callable[[], dict[str, optax.GradientTransformation]], form: str) -> Iterator[Step]:
    """Yield a wrapper's variants, the first one on all problems."""
    for index, (variant, optimizer) in enumerate(make().items()):
        yield train(regression(), optimizer, variant)
        if index == 0:
            yield train(square(), optimizer, "square", Style(names="scrambled", order="shuffled"))
            yield train(classification(), optimizer, form, STYLES[form])


for name, made in WRAPPERS.items():
    kind(f"wrap-{name}", "jax")(partial(in_forms, made, form_of(name)))


@kind("wrap-inject-hyperparams", "jax")
def injected() -> Iterator[Step]:
    """Yield steps whose rate is part of the state: carried, made by a schedule, or fed anew."""
    yield train(regression(), optax.inject_hyperparams(optax.adam)(learning_rate=0.01), "carried")
    yield train(square(), optax.inject_hyperparams(optax.sgd)(learning_rate=0.01, momentum=0.9), "square")
    decay = scheduled(optax.cosine_decay_schedule, 0.01, 50)
    yield train(regression(), optax.inject_hyperparams(optax.adamw)(learning_rate=decay), "schedule")
    yield train(classification(), optax.inject_hyperparams(optax.rmsprop)(0.01), "initializers", STYLES["initializers"])


def with_fed_rate(problem: Problem, optimizer: str, variant: str, style: Style = PLAIN) -> Step:
    """Return a step whose rate is an input; the optimizer's own carries no rate."""
    move = {"adam": optax.scale_by_adam(), "momentum": optax.trace(0.9), "lion": optax.scale_by_lion()}[optimizer]

    def make(rate: jax.Array) -> optax.GradientTransformation:
        return optax.chain(move, optax.scale_by_learning_rate(rate))

    rate = jnp.float32(0.01)
    fed = optax.GradientTransformationExtraArgs(
        make(rate).init, lambda grads, state, weights, **extra: make(extra["rate"]).update(grads, state, weights)
    )
    return train(problem, fed, variant, style, hyperparameters={"rate": rate})


@kind("optax-fed-rate", "jax")
def fed_rates() -> Iterator[Step]:
    """Yield steps whose rate is fed."""
    yield with_fed_rate(regression(), "adam", "adam")
    yield with_fed_rate(square(), "momentum", "momentum", Style(names="scrambled"))
    yield with_fed_rate(classification(), "lion", "lion", STYLES["shuffled"])


@kind("optax-metrics", "jax")
def metrics() -> Iterator[Step]:
    """Yield steps with the gradients' norm, and with the gradients themselves, beside the next state."""

    def norm(grads: Arrays, _: object) -> Outputs:
        return Outputs(metrics={"grad_norm": optax.global_norm(grads)})

    def own(grads: Arrays, _: object) -> Outputs:
        return Outputs(gradients={f"grad_{name}": grad for name, grad in grads.items()})

    yield train(regression(), optax.adam(0.01), "norm", observe=norm)
    yield train(regression(), optax.sgd(0.05, momentum=0.9), "gradients", observe=own)
    yield train(square(), optax.adam(0.01), "gradients-square", STYLES["scrambled"], observe=own)


@kind("optax-lookahead", "jax")
def lookahead() -> Iterator[Step]:
    """Yield lookahead: fast and slow weights, both carried."""
    for variant, inner in {"sgd": optax.sgd(0.05), "adam": optax.adam(0.01)}.items():
        yield lookahead_step(regression(), inner, variant)
    yield lookahead_step(square(), optax.sgd(0.05), "square", STYLES["scrambled"])


def lookahead_step(problem: Problem, inner: optax.GradientTransformation, variant: str, style: Style = PLAIN) -> Step:
    """Return a step with lookahead around an optimizer; the gradients are taken at the fast weights."""
    names = list(problem.weights)
    pair = {f"fast_{name}": weight for name, weight in problem.weights.items()}
    pair |= {f"slow_{name}": weight * 0.9 for name, weight in problem.weights.items()}

    def of(weights: Arrays) -> optax.LookaheadParams:
        return optax.LookaheadParams(
            *({name: weights[f"{part}_{name}"] for name in names} for part in ("fast", "slow"))
        )

    def flat(params: optax.LookaheadParams) -> Arrays:
        return {f"{part}_{name}": value for part in ("fast", "slow") for name, value in getattr(params, part).items()}

    around = optax.lookahead(inner, 3, 0.5)

    def update(grads: Arrays, state: object, weights: Arrays) -> tuple[Arrays, object]:
        updates, state = around.update(of(grads).fast, state, of(weights))
        return flat(updates), state

    both = optax.GradientTransformation(lambda weights: around.init(of(weights)), update)
    made = Problem(
        pair, problem.batch, lambda weights, values: problem.loss(of(weights).fast, values), problem.constants
    )
    return train(made, both, variant, style)


@kind("optax-weight-ema", "jax")
def averaged() -> Iterator[Step]:
    """Yield optimizers with a moving average of the weights beside them."""
    for variant, inner in {"sgd": optax.sgd(0.05), "adam": optax.adam(0.01)}.items():
        yield averaged_step(regression(), inner, variant)
    yield averaged_step(square(), optax.adam(0.01), "square", STYLES["scrambled"])


def averaged_step(problem: Problem, inner: optax.GradientTransformation, variant: str, style: Style = PLAIN) -> Step:
    """Return a step that carries an average of the weights, by `optax.incremental_update`."""

    def init(weights: Arrays) -> dict:
        return {"inner": inner.init(weights), "average": weights}

    def update(grads: Arrays, state: dict, weights: Arrays) -> tuple[Arrays, dict]:
        updates, moved = inner.update(grads, state["inner"], weights)
        following = optax.apply_updates(weights, updates)
        return updates, {"inner": moved, "average": optax.incremental_update(following, state["average"], 0.1)}

    return train(problem, optax.GradientTransformation(init, update), variant, style)


@kind("optax-noise", "jax")
def noise() -> Iterator[Step]:
    """Yield gradients with noise that is fed."""
    problem, momentum = regression(), optax.sgd(0.05, momentum=0.9)
    fed = {f"noise_{name}": normal(*weight.shape) for name, weight in problem.weights.items()}

    def update(grads: Arrays, state: object, weights: Arrays, **extra: Any) -> tuple[Arrays, object]:
        noisy = {name: grad + 0.01 * extra[f"noise_{name}"] for name, grad in grads.items()}
        return momentum.update(noisy, state, weights)

    made = Problem(problem.weights, problem.batch | fed, problem.loss)
    noisy = optax.GradientTransformationExtraArgs(momentum.init, update)
    yield train(made, noisy, "momentum", given=tuple(fed))
