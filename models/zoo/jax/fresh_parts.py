"""Parts of the fresh kinds by JAX: decorators that make a kind of a loss, or of a function that advances a tree."""

from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from models.zoo.arrays import normal
from models.zoo.jax.problems import Problem, dense
from models.zoo.jax.training import named_leaves, train
from models.zoo.steps import Arrays, Inputs, Outputs, Step, Style, kind

STYLES = {
    "plain": Style(),
    "scrambled": Style(names="scrambled", order="shuffled", shapes="interface"),
    "initializers": Style(states="initializers"),
    "exporter": Style(names="exporter", order="reversed"),
}
Advanced = tuple[Any, Arrays, Any]
"""The loss or losses by name, metrics, and the next tree."""


def carried(name: str, make: Callable[[], tuple[Any, Arrays]], *styles: str, kept: Iterable[str] = ()) -> Callable:
    """Register a kind that carries the leaves of a tree, made with a batch, by the function that advances it."""

    def register(advance: Callable[[Arrays, Any], Advanced]) -> Callable:
        @kind(name, "jax")
        def steps() -> Iterable[Step]:
            for style in styles or ("plain",):
                tree, batch = make()
                tree = jax.tree.map(jnp.asarray, tree)
                leaves, structure = named_leaves(tree), jax.tree.structure(tree)

                def run(values: Arrays, leaves: Arrays = leaves, structure: Any = structure) -> Outputs:
                    tree = jax.tree.unflatten(structure, [values[name] for name in leaves])
                    losses, metrics, after = advance(values, tree)
                    following = dict(zip(leaves, jax.tree.leaves(after), strict=True))
                    advancing = {name: following.pop(name) for name in kept}
                    losses = losses if isinstance(losses, dict) else {"loss": losses}
                    return Outputs(losses, metrics, states=following, kept=advancing)

                yield Step(style, Inputs(batch, leaves), run, STYLES[style], warm=3)

        return advance

    return register


def fit(name: str, make: Callable[[], tuple[Arrays, Arrays]], *styles: str, tx: Any = None) -> Callable:
    """Register a kind that fits weights, made with a batch, to a loss of both."""

    def register(loss: Callable[[Arrays, Arrays], jax.Array]) -> Callable:
        rule, forms = tx or optax.adam(1e-2), styles or ("plain",)
        return kind(name, "jax")(lambda: (train(Problem(*make(), loss), rule, form, STYLES[form]) for form in forms))

    return register


def data(*rows: int, wide: int = 5, out: int = 3) -> Arrays:
    return {"x": normal(*(rows or (4,)), wide), "y": normal(*(rows or (4,)), out)}


@jax.custom_vjp
def product(x: jax.Array, w: jax.Array) -> jax.Array:
    """Return `x @ w`, whose gradients can be differentiated again and still be exported (`problems.matmul` cannot)."""
    return x @ w


product.defvjp(lambda x, w: (product(x, w), (x, w)), lambda saved, g: (product(g, saved[1].T), product(saved[0].T, g)))


def linear(w: jax.Array, v: Arrays) -> jax.Array:
    return jnp.mean((product(v["x"], jnp.tanh(w)) - v["y"]) ** 2)


def squares(weights: Arrays, values: Arrays) -> jax.Array:
    return jnp.mean(jnp.square(dense(weights, values["x"]) - values["y"]))


def start(tx: optax.GradientTransformation, params: Any, **more: Any) -> dict[str, Any]:
    return {"params": params, "opt": tx.init(jax.tree.map(jnp.asarray, params)), **more}


def descend(tx: optax.GradientTransformation, grads: Any, tree: dict[str, Any]) -> dict[str, Any]:
    updates, state = tx.update(grads, tree["opt"], tree["params"])
    return tree | {"params": optax.apply_updates(tree["params"], updates), "opt": state}


def shrink(params: Any, grads: Any, rate: Any = 0.05) -> Any:
    return jax.tree.map(lambda weight, grad: weight - rate * grad, params, grads)


def mix(old: Any, new: Any, rate: Any) -> Any:
    return jax.tree.map(lambda before, after: (1 - rate) * before + rate * after, old, new)


def zeros(tree: Any) -> Any:
    return jax.tree.map(np.zeros_like, tree)
