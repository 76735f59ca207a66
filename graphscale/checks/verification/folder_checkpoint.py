"""The comparison of a checkpoint with the one that scaling writes."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np
import onnx_ir as ir

from graphscale.checks.translation.tensor_bits import tensor_difference
from graphscale.checks.verification.translated import state_faults
from graphscale.files.ort_checkpoint import Checkpoint
from graphscale.graph.stamp import Stamp
from graphscale.ort.artifacts.training_scaling import initial_states
from graphscale.policy.loss_scale import LossScale

__all__ = ["checkpoint_differences", "trained_differences"]


def checkpoint_differences(found: Checkpoint, expected: Checkpoint) -> Iterator[str]:
    """Yield the differences between two checkpoints, a sentence each."""
    mine, theirs = dict(_entries(found)), dict(_entries(expected))
    for what in dict.fromkeys((*mine, *theirs)):
        if what not in theirs:
            yield f"{what} is neither the original's nor the loss scale's"
        elif what not in mine:
            yield f"{what} is missing"
        else:
            problem = _difference(mine[what], theirs[what])
            if problem is not None:
                yield f"{what} {problem}"


def _entries(checkpoint: Checkpoint) -> Iterator[tuple[str, Any]]:
    """Yield all that a checkpoint holds, with what it is."""
    yield from ((f"the trainable parameter {name!r}", array) for name, array in checkpoint.trainable.items())
    yield from ((f"the frozen parameter {name!r}", array) for name, array in checkpoint.frozen.items())
    yield from ((f"the property {name!r}", value) for name, value in checkpoint.properties.items())
    yield "the version", checkpoint.version
    yield "the nominal state", checkpoint.nominal
    for key, group in checkpoint.groups.items():
        yield f"the step of the optimizer group {key!r}", group.step
        yield f"the learning rate of the optimizer group {key!r}", group.initial_learning_rate
        for parameter, moments in group.moments.items():
            yield f"the moments of {parameter!r}", len(moments)
            yield from ((f"the moment {name!r} of {parameter!r}", array) for name, array in moments.items())


def _difference(found: Any, expected: Any) -> str | None:
    if hasattr(found, "dtype") and hasattr(expected, "dtype"):
        return tensor_difference(ir.tensor(found), ir.tensor(expected))
    return None if repr(found) == repr(expected) else f"is {found!r}, and should be {expected!r}"


def trained_differences(found: Checkpoint, expected: Checkpoint, stamp: Stamp, policy: LossScale) -> Iterator[str]:
    """Yield what training cannot have made of a checkpoint: other parameters, or a state that no run reaches.

    Args:
        found: the checkpoint.
        expected: the one that training began with.
        stamp: the metadata that its models should have.
        policy: the loss scale.
    """
    bare = [_without_values(checkpoint) for checkpoint in (found, expected)]
    yield from checkpoint_differences(*bare)
    held = {
        role: found.frozen[stamp.names[role]] for role in initial_states(policy) if stamp.names[role] in found.frozen
    }
    fault = stamp.find_wrong_number(found.frozen)
    yield from state_faults(policy, held) if fault is None else (fault,)
    for role, numbers in (("window_finite", (-1, 0, 1)), ("stuck", (0, 1))):
        if role in held and not all(number in numbers for number in held[role].reshape(-1)):
            yield f"{stamp.names[role]!r} is {held[role]}, and should be one of {', '.join(map(str, numbers))}"


def _without_values(checkpoint: Checkpoint) -> Checkpoint:
    kinds = (checkpoint.trainable, checkpoint.frozen)
    zeros = [{name: np.zeros_like(array) for name, array in kind.items()} for kind in kinds]
    return dataclasses.replace(checkpoint, trainable=zeros[0], frozen=zeros[1], properties={}, groups={})
