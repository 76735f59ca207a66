"""Agreement of all replicas: on files and options before the start, and on a decision at the end of each step."""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

import numpy as np
import onnx_ir as ir

from graphscale.errors import ReplicaError
from graphscale.graph.stamp import Stamp
from graphscale.graph.values import value_label
from graphscale.replicas.collectives import Replicas

__all__ = ["agree", "decide", "facts_of", "means"]

Array = np.ndarray[Any, Any]

_SHOWN = 200  # characters
_FIRST_BIT, _BITS = 3, 32


def facts_of(model: ir.Model, stamp: Stamp, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the facts that replicas must share, in a user's words, the most important first."""
    graph = model.graph
    return {
        **settings,
        "the loss scale": stamp.policy,
        "the target": stamp.target,
        "the nodes of the step": len(graph),
        "the inputs of the step": [value_label(value) for value in graph.inputs],
        "the outputs of the step": [value.name for value in graph.outputs],
        "the graph of the step": f"sha256:{_digest(model, stamp.carried)}",
        "graphscale": version("graphscale"),
    }


def agree(replicas: Replicas, facts: Mapping[str, Any]) -> None:
    """Check that all replicas have the same facts.

    Raises:
        ReplicaError: the facts differ; all replicas raise the same error, with the first difference.
    """
    if (difference := _find_difference(replicas, facts, "the comparison of all replicas")) is not None:
        name, first, here, rank = difference
        raise ReplicaError(f"the replicas differ in {name}: {_show_difference(first, here, rank)}")


def _find_difference(replicas: Replicas, facts: Mapping[str, Any], what: str) -> tuple[str, Any, Any, int] | None:
    """Return the name of a fact, its value on rank 0, and that on the first rank with another value."""
    texts = replicas.exchange(json.dumps(facts), what)
    first = json.loads(texts[0])
    for rank, text in enumerate(texts):
        here = json.loads(text)
        for name in {**first, **here}:
            if first.get(name) != here.get(name):
                return name, first.get(name), here.get(name), rank
    return None


def _show_difference(first: Any, other: Any, rank: int) -> str:
    if isinstance(first, list) and isinstance(other, list):
        mine = [item for item in first if item not in other]
        yours = [item for item in other if item not in first]
        if mine or yours:
            first, other = mine or "none more", yours or "none more"
    if isinstance(first, dict) and isinstance(other, dict):
        keys = [key for key in [*first, *other] if first.get(key) != other.get(key)]
        first, other = ({key: side.get(key) for key in keys} for side in (first, other))
    return f"rank 0 has {_shown(first)}, rank {rank} has {_shown(other)}"


def _shown(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def _digest(model: ir.Model, states: frozenset[str]) -> str:
    """Return a digest of the graph without the initial values of its state, which rank 0 sends to all."""
    copy = model.clone()
    for name in states & set(copy.graph.initializers):
        del copy.graph.initializers[name]
    copy.metadata_props.clear()
    return hashlib.sha256(ir.to_proto(copy).SerializeToString(deterministic=True)).hexdigest()


def decide(
    replicas: Replicas, error: BaseException | None, finite: bool, common: Mapping[str, Any], stop: bool
) -> tuple[bool, bool]:
    """Decide whether all replicas have finite gradients, and whether one must stop, by one MPI_LAND of flags.

    The flags are: no error; all finite; no stop; and the bits of a checksum of common values, and of its complement.
    The checksums agree if each bit, or its complement, is true on all replicas.

    Args:
        replicas: the processes.
        error: the failure on this replica.
        finite: True if the reduced gradients are finite on this replica.
        common: operands of the second half on this replica that must be equal on all.
        stop: True if this replica must stop.

    Raises:
        ReplicaError: a replica has an error, or the replicas are not in step; all raise it.
    """
    sums = {} if error is not None else {name: _checksum(value) for name, value in common.items()}
    total = np.uint32(zlib.crc32(repr(sorted(sums.items())).encode()))
    bits = ((total >> np.arange(_BITS, dtype=np.uint32)) & np.uint32(1)).astype(np.bool_)
    flags = replicas.all_true(
        np.concatenate([[error is None, finite, not stop], bits, ~bits]), "the decision on a step"
    )
    if not flags[0]:
        replicas.raise_together(error, "the exchange of errors")
    if not (flags[_FIRST_BIT : _FIRST_BIT + _BITS] | flags[_FIRST_BIT + _BITS :]).all():
        if (difference := _find_difference(replicas, sums, "the comparison of what is common")) is not None:
            raise ReplicaError(
                f"{difference[0]!r} differs between rank 0 and rank {difference[3]}: the update reads it, and the "
                "weights would differ; it must be the same on all replicas"
            )
        raise ReplicaError("the replicas are not in step with each other")
    return bool(flags[1]), not flags[2]


def means(replicas: Replicas, arrays: Mapping[str, Array]) -> dict[str, Array]:
    """Return the means of small arrays over all replicas, in one operation on float64."""
    if not arrays or replicas.size == 1:
        return dict(arrays)
    flat = np.concatenate([array.astype(np.float64).reshape(-1) for array in arrays.values()])
    total = replicas.sums(flat, "the reduction of metrics")
    with np.errstate(all="ignore"):
        total /= replicas.size
        parts = np.split(total, np.cumsum([array.size for array in arrays.values()])[:-1])
        return {
            name: part.reshape(array.shape).astype(array.dtype)
            for (name, array), part in zip(arrays.items(), parts, strict=True)
        }


def _checksum(value: Any) -> int:
    """Return a checksum of a number, an array or a value of ONNX Runtime."""
    array = np.ascontiguousarray(value.numpy() if hasattr(value, "numpy") else value)
    return zlib.crc32(array.tobytes())
