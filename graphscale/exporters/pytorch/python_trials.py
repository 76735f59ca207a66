"""Trials of a module whose forward changes Python values: a step must not depend on them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from graphscale.errors import ExportError
from graphscale.exporters.python_state import JUMPS, Values, changed, names_of, notes_on, read_values, restore
from graphscale.exporters.pytorch.traced_step import Forward, ForwardResult

__all__ = ["read_state", "try_python_values"]

_INTERNAL = set(vars(torch.nn.Module()))
# More calls in a row: containers grow, and small counts are reached.
_FURTHER = 6


def read_state(module: Any, loss: Any) -> Values:
    """Read the Python values of a module and of a loss."""
    return read_values({"": module, "the loss": loss}, _attributes)


def _attributes(value: Any) -> Mapping[str, Any] | None:
    if not isinstance(value, torch.nn.Module):
        return None
    is_of_torch = type(value).__module__.startswith("torch.")
    own: dict[str, Any] = {}
    if not is_of_torch:
        own = {key: inner for key, inner in vars(value).items() if key not in _INTERNAL}
    hooks = {key: getattr(value, key) for key in ("_forward_hooks", "_forward_pre_hooks")}
    return {**own, **value._modules, **hooks}


def try_python_values(
    first: Values, after: Values, make: Callable[[], Forward], loss: Any, call: Callable[[Forward], Any]
) -> list[str]:
    """Try whether values that a call changes change the step.

    Calls on equal tensors must have equal results, with counters far ahead too.

    Args:
        first: the values before the first call.
        after: those after it, some of them others.
        make: makes the forward pass, with a fresh copy of the module.
        loss: the loss, which is not copied.
        call: calls it on the first tensors.

    Returns:
        notes for the user.

    Raises:
        ExportError: a result differs.
    """
    restore(first, after)
    forward = make()
    results, states = [], []

    def again() -> None:
        results.append(_bytes(call(forward)))
        states.append(read_state(forward.module, loss))

    try:
        again()
        again()
        notes = notes_on(states[0], states[1])
        if notes:
            for _ in range(_FURTHER):
                again()
            for jump in JUMPS:
                _set_counters(states[0], states[1], jump)
                with contextlib.suppress(ExportError):  # a number beyond the end of a list
                    again()
    finally:
        restore(first, read_state(forward.module, loss))
    # Kernels that add in another order each time prove nothing.
    if any(each != results[0] for each in results) and _bytes(call(make())) == results[0]:
        raise ExportError(
            f"the step depends on {names_of(changed(first, after))}, Python values that each call changes, and a graph "
            "would keep those of the export; put them into buffers as tensors (register_buffer), or pass them in the "
            "batch"
        )
    return notes


def _set_counters(first: Values, second: Values, calls: int) -> None:
    """Set each number that a call changes to its value after so many calls."""
    for key, each in second.items():
        before = first.get(key)
        if each.put is not None and before is not None and each != before and {each.kind, before.kind} == {"number"}:
            each.put(before.value + (calls - 1) * (each.value - before.value))


def _bytes(result: ForwardResult) -> list[bytes]:
    tensors = {"loss": result.loss, **result.metrics, **result.gradients, **result.buffers}
    return [np.ascontiguousarray(each.detach().numpy()).tobytes() for each in tensors.values()]
