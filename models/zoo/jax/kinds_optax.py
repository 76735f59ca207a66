"""Kinds that are the optimizers of optax."""

import zlib
from collections.abc import Callable, Iterator
from functools import partial

import optax
from optax import contrib

from models.zoo.jax.problems import classification, regression, square
from models.zoo.jax.training import gradients_only, train, unrolled
from models.zoo.steps import STYLES, Step, Style, kind

Maker = Callable[..., optax.GradientTransformation]
# Each optimizer with its settings.
OPTIMIZERS: dict[str, tuple[Maker, list[dict]]] = {
    "sgd": (optax.sgd, [{}, {"momentum": 0.9}, {"momentum": 0.9, "nesterov": True}]),
    "adam": (optax.adam, [{}, {"eps_root": 1e-6}, {"nesterov": True}]),
    "adamw": (optax.adamw, [{}]),
    "adamax": (optax.adamax, [{}]),
    "adamaxw": (optax.adamaxw, [{}]),
    "adan": (optax.adan, [{}]),
    "adagrad": (optax.adagrad, [{}]),
    "adadelta": (optax.adadelta, [{}, {"weight_decay": 0.01}]),
    "adabelief": (optax.adabelief, [{}]),
    "adafactor": (optax.adafactor, [{}, {"min_dim_size_to_factor": 4}, {"momentum": 0.9}]),
    "amsgrad": (optax.amsgrad, [{}]),
    "fromage": (optax.fromage, [{}]),
    "lamb": (optax.lamb, [{}]),
    "lars": (optax.lars, [{}]),
    "lion": (optax.lion, [{}]),
    "nadam": (optax.nadam, [{}]),
    "nadamw": (optax.nadamw, [{}]),
    "novograd": (optax.novograd, [{}]),
    "optimistic-gradient-descent": (optax.optimistic_gradient_descent, [{}]),
    "optimistic-adam": (optax.optimistic_adam_v2, [{}]),
    "polyak-sgd": (lambda rate, **options: optax.polyak_sgd(**options), [{}]),
    "radam": (optax.radam, [{}]),
    "rmsprop": (optax.rmsprop, [{}, {"centered": True}, {"momentum": 0.9}, {"bias_correction": True}]),
    "rprop": (optax.rprop, [{}]),
    "sign-sgd": (optax.sign_sgd, [{}]),
    "signum": (optax.signum, [{}]),
    "sm3": (optax.sm3, [{}]),
    "yogi": (optax.yogi, [{}]),
    "backtracking": (
        lambda rate: optax.chain(optax.sgd(rate), optax.scale_by_backtracking_linesearch(max_backtracking_steps=4)),
        [{}],
    ),
    "acprop": (contrib.acprop, [{}]),
    "ademamix": (contrib.ademamix, [{}]),
    "simplified-ademamix": (contrib.simplified_ademamix, [{}]),
    "adopt": (contrib.adopt, [{}]),
    "cocob": (lambda rate: contrib.cocob(), [{}]),
    "dadapt-adamw": (contrib.dadapt_adamw, [{}]),
    "dog": (lambda rate: contrib.dog(), [{}]),
    "dowg": (lambda rate: contrib.dowg(), [{}]),
    "madgrad": (contrib.madgrad, [{}]),
    "mechanic": (lambda rate: contrib.mechanize(optax.sgd(rate)), [{}]),
    "momo": (contrib.momo, [{}]),
    "momo-adam": (contrib.momo_adam, [{}]),
    "muon": (lambda rate: unrolled(contrib.muon(rate, consistent_rms=0.2)), [{}]),
    "prodigy": (contrib.prodigy, [{}]),
    "sam": (
        lambda rate: optax.GradientTransformation(
            *contrib.sam(optax.sgd(rate), optax.chain(contrib.normalize(), optax.sgd(0.05)), reset_state=False)
        ),
        [{}],
    ),
    "schedule-free-sgd": (contrib.schedule_free_sgd, [{}]),
    "schedule-free-adamw": (contrib.schedule_free_adamw, [{}]),
}
FORMS = (
    "exporter-names",
    "shuffled",
    "initializers",
    "scrambled",
    "overridable",
    "bare",
    "scrambled-bare",
    "scrambled-initializers",
)


def form_of(name: str) -> str:
    """Return the form of export that a kind takes, drawn by its name."""
    return FORMS[zlib.crc32(name.encode()) % len(FORMS)]


def on_problems(make: Maker, settings: list[dict], form: str) -> Iterator[Step]:
    """Yield an optimizer with each of its settings, and in some forms of export."""
    for index, options in enumerate(settings):
        tag = "-".join(options).replace("_", "-")
        yield train(regression(), make(0.01, **options), tag or "regression")
        if index == 0:
            yield train(square(), make(0.01, **options), "square", Style(names="scrambled", order="shuffled"))
            yield train(classification(), make(0.01, **options), form, STYLES[form])


for name, entry in OPTIMIZERS.items():
    kind(f"optax-{name}", "jax")(partial(on_problems, *entry, form_of(name)))


@kind("jax-gradients", "jax")
def bare_gradients() -> Iterator[Step]:
    """Yield steps without an optimizer."""
    yield gradients_only(regression(), "regression")
    yield gradients_only(square(), "square", Style(names="exporter"))
    yield gradients_only(classification(), "classification")


@kind("optax-lbfgs", "jax")
def lbfgs() -> Iterator[Step]:
    """Yield L-BFGS on the smallest network: its loops are unrolled, and the export takes a minute."""
    for variant, search in {"fixed": {"learning_rate": 0.05, "linesearch": None}, "zoom": {}}.items():
        yield train(regression(3, 2), unrolled(optax.lbfgs(memory_size=2, **search)), variant)
