"""Trained values back into a tree."""

from __future__ import annotations

from typing import Any

from graphscale.errors import ExportError
from graphscale.exporters.requirements import require
from graphscale.exporters.trained_state import read_trained
from graphscale.process.summary import few

__all__ = ["load_weights"]

_SHOWN = 3  # names in a message


def load_weights(step_or_state: Any, state: Any) -> Any:
    """Return the state of a step with its trained values: weights, moments, counters, random keys.

    Args:
        step_or_state: a gs.Session, its `state_dict()`, a file of it (.npz, .safetensors), or a step whose initializers
            hold trained values.
        state: the state that the step was exported with, or another one of its structure. It is not changed.

    Returns:
        The same tree, with arrays of JAX.

    Raises:
        ExportError: a value is missing, or has another shape or dtype.
        ModelFileError: the file is missing, or of another format.
    """
    require("jax", ("jax", "jax"))
    import jax.numpy as jnp

    from graphscale.exporters.jax.state_tree import Tree

    trained, tree = read_trained(step_or_state), Tree.make(state, "state")
    values = trained.arrays
    missing = [name for name in tree.names if name not in values]
    if missing:
        lacking = few([repr(name) for name in missing], _SHOWN)
        unread = few([repr(name) for name in values if name not in tree.names] or ["nothing else"], _SHOWN)
        raise ExportError(
            f"{trained.name} has no trained value of {lacking} ({len(missing)} of {len(tree.leaves)} arrays of the "
            f"state), but of {unread}: pass a state in the containers that export_step got"
        )
    for leaf in tree.leaves:
        found = values[leaf.name]
        if (found.shape, found.dtype) != (leaf.value.shape, leaf.value.dtype):
            raise ExportError(
                f"{leaf.name!r} is {found.dtype}{list(found.shape)}, in the state "
                f"{leaf.value.dtype}{list(leaf.value.shape)}"
            )
    return tree.build([jnp.asarray(values[name]) for name in tree.names])
