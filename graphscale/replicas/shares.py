"""Who updates what: the state and gradients of a step in as many shares as there are replicas (ZeRO, stage 1).

Tensors that the update combines with one another have one owner: a weight, its gradient and its moments. What it takes
from those of other owners must be single numbers, the parts of a norm, which are exchanged.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import onnx_ir as ir

from graphscale.errors import SplitError
from graphscale.graph.marks import PASS_KEY
from graphscale.graph.values import is_scalar, node_name, operands_of
from graphscale.graph.walks import nodes_above
from graphscale.passes import CheckFinite
from graphscale.replicas.buckets import Gradient
from graphscale.replicas.halves import MARK, REPLICAS_FINITE

__all__ = ["Shares", "share_out", "trust_replicas"]


@dataclasses.dataclass(frozen=True)
class Shares:
    """How an update is divided.

    Attributes:
        owners: `{name: rank}` of gradients and of carried inputs; state that is not in it is single numbers, which
            every replica updates for itself.
        rounds: the numbers that are exchanged, after one another: `{name: rank that computes it}`.
        nodes: for each node its round, from 0, and its owner; None for all.
    """

    owners: dict[str, int]
    rounds: tuple[dict[str, int], ...]
    nodes: tuple[tuple[int, int | None], ...]


def trust_replicas(graph: ir.Graph, decision: str, name: str) -> None:
    """Let the decision of a second half be that of all replicas alone: none of them sees all gradients.

    Raises:
        SplitError: its own check looks at more than the gradients.
    """
    common = next(v for node in graph for v in node.outputs if v.name == decision).producer()
    assert common is not None and common.inputs[0] is not None
    for node in nodes_above(common.inputs[0]):
        if node.metadata_props.get(PASS_KEY) not in (CheckFinite.name, MARK):
            raise SplitError(
                f"{name} cannot be sharded: its finite check looks at more than the gradients, at {node_name(node)!r}"
            )
    common.replace_input_with(0, next(value for value in graph.inputs if value.name == REPLICAS_FINITE))
    for node in reversed(list(graph)):
        if CheckFinite.inserted(node) and not any(value.uses() for value in node.outputs):
            graph.remove(node, safe=True)


def share_out(
    graph: ir.Graph, gradients: Mapping[str, Gradient], pairs: Mapping[str, str], size: int, name: str
) -> Shares:
    """Divide an update.

    Args:
        graph: the second half.
        gradients: the gradients by the input that takes them.
        pairs: the output that gives the next value of each carried input, where an output does.
        size: how many replicas there are.
        name: what to call the step in messages.

    Raises:
        SplitError: it mixes all gradients.
    """
    nodes = list(graph)
    groups = _groups(graph, nodes, pairs)
    weight: dict[ir.Value, int] = {}
    for value, root in groups.items():
        gradient = gradients.get(value.name or "")
        if gradient is not None:
            weight[root] = weight.get(root, 0) + gradient.nbytes
    if len(weight) < min(size, len(gradients)) and len(weight) < 2:
        raise SplitError(f"{name} cannot be sharded: its update combines all gradients with one another")
    owner_of = _balance(groups, weight, size)
    owners = {value.name or "": owner_of[root] for value, root in groups.items() if value.is_graph_input()}
    return _rounds(graph, nodes, groups, owner_of, owners)


def _groups(graph: ir.Graph, nodes: Sequence[ir.Node], pairs: Mapping[str, str]) -> dict[ir.Value, ir.Value]:
    """For each tensor that belongs to a group, the group: told by one of its members."""
    parent: dict[ir.Value, ir.Value] = {}

    def find(value: ir.Value) -> ir.Value:
        while parent[value] is not value:
            parent[value] = value = parent[parent[value]]
        return value

    for value in graph.inputs:
        if not is_scalar(value):
            parent[value] = value
    for node in nodes:
        members = [value for value in operands_of(node) if value in parent]
        for member in members[1:]:
            parent[find(member)] = find(members[0])
        if members:
            parent.update((value, find(members[0])) for value in node.outputs if not is_scalar(value))
    outputs = {value.name: value for value in graph.outputs}
    inputs = {value.name: value for value in graph.inputs}
    for source, target in pairs.items():
        state, new = inputs[source], outputs.get(target)
        if new is not None and state in parent and new in parent:
            parent[find(new)] = find(state)
    return {value: find(value) for value in parent}


def _balance(groups: Mapping[ir.Value, ir.Value], weight: Mapping[ir.Value, int], size: int) -> dict[ir.Value, int]:
    """Choose an owner for each group: the largest first, to the replica that has the least."""
    order = {root: i for i, root in enumerate(dict.fromkeys(groups.values()))}
    loads = [0] * size
    found = {}
    for root in sorted(order, key=lambda root: (-weight.get(root, 0), order[root])):
        found[root] = rank = loads.index(min(loads))
        loads[rank] += weight.get(root, 0)
    return found


def _rounds(
    graph: ir.Graph,
    nodes: Sequence[ir.Node],
    groups: Mapping[ir.Value, ir.Value],
    owner_of: Mapping[ir.Value, int],
    owners: dict[str, int],
) -> Shares:
    """In which round each node runs, and where: a node waits for the numbers of other owners that it reads."""
    owner: dict[ir.Value, int | None] = {v: owner_of[root] for v, root in groups.items() if v.is_graph_input()}
    level: dict[ir.Value, int] = {}
    exchanged: dict[ir.Value, int] = {}
    home_of: dict[ir.Node, int | None] = {}
    for node in nodes:
        operands = operands_of(node)
        found = {rank for value in operands if (rank := owner.get(value)) is not None}
        home = next(iter(found), None)
        joint = any(owner.get(v) is None and level.get(v, 0) for v in operands)
        if len(found) > 1 or (joint and all(map(is_scalar, node.outputs))):
            # Numbers that are known to all already are best combined by all: that saves an exchange.
            home = next((owner[v] for v in operands if owner.get(v) is not None and not is_scalar(v)), None)
        foreign = [v for v in operands if owner.get(v) is not None and owner[v] != home]
        for value in foreign:
            exchanged[value] = level.get(value, 0)
        after = [level.get(value, 0) + (value in foreign) for value in operands]
        home_of[node] = home
        for value in node.outputs:
            owner[value], level[value] = home, max(after, default=0)
    for value in graph.outputs:
        rank = owner.get(value)
        if rank is not None and is_scalar(value):
            exchanged[value] = level.get(value, 0)
    count = max(exchanged.values(), default=-1) + 1
    rounds: list[dict[str, int]] = [{} for _ in range(count)]
    round_of: dict[ir.Node, int] = {}
    for number in range(count):
        values = [value for value, at in exchanged.items() if at == number]
        rounds[number] = {value.name or "": rank for value in values if (rank := owner[value]) is not None}
        for node in nodes_above(*values):
            round_of.setdefault(node, number)
    return Shares(owners, tuple(rounds), tuple((round_of.get(node, count), home_of[node]) for node in nodes))
