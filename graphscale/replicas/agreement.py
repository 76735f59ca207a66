"""What all replicas must have in common, compared before they begin."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

import onnx_ir as ir

from graphscale.errors import ReplicaError
from graphscale.graph.stamp import Stamp
from graphscale.replicas.collectives import Replicas

__all__ = ["agree", "facts_of"]

_SHOWN = 200  # characters


def facts_of(model: ir.Model, stamp: Stamp, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the facts that replicas have in common, in a user's words, the most telling first.

    Args:
        model: the step.
        stamp: what it says of its scaling.
        settings: how it is trained.
    """
    states = {*stamp.state, *(state["input"] for state in stamp.report["state"])}
    graph = model.graph
    return {
        **settings,
        "the loss scale": stamp.policy,
        "the target": stamp.target,
        "the nodes of the step": len(graph),
        "the inputs of the step": [_told(value) for value in graph.inputs],
        "the outputs of the step": [value.name for value in graph.outputs],
        "the graph of the step": f"sha256:{_digest(model, states)}",
        "graphscale": version("graphscale"),
    }


def agree(replicas: Replicas, facts: Mapping[str, Any]) -> None:
    """Check that all replicas have the same facts.

    Raises:
        ReplicaError: they have not; all replicas raise the same, with the first difference.
    """
    texts = replicas.exchange(json.dumps(facts), "the comparison of all replicas")
    first = json.loads(texts[0])
    for rank, text in enumerate(texts):
        here = json.loads(text)
        for name in [*first, *(name for name in here if name not in first)]:
            if first.get(name) != here.get(name):
                raise ReplicaError(
                    f"the replicas differ in {name}: {_difference(first.get(name), here.get(name), rank)}"
                )


def _difference(first: Any, other: Any, rank: int) -> str:
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


def _told(value: ir.Value) -> str:
    shape = "?" if value.shape is None else ",".join(str(axis) for axis in value.shape)
    return f"{value.name} {'?' if value.dtype is None else value.dtype.name}[{shape}]"


def _digest(model: ir.Model, states: set[str]) -> str:
    """Return a digest of the graph without the initial values of its state, which rank 0 gives to all."""
    copy = model.clone()
    for name in states & set(copy.graph.initializers):
        del copy.graph.initializers[name]
    copy.metadata_props.clear()
    return hashlib.sha256(ir.to_proto(copy).SerializeToString(deterministic=True)).hexdigest()
