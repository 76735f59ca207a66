"""The state and gradients of a step in shares, one per replica (ZeRO, stage 1).

Tensors that the update combines have one owner: a weight, its gradient and its moments. Operands from other owners must
be single numbers, such as the parts of a norm, which are exchanged: there the second half of a replica is cut.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Collection, Mapping

import onnx_ir as ir

from graphscale.errors import SessionError, SplitError
from graphscale.graph.cones import nodes_above
from graphscale.graph.marks import PASS_KEY
from graphscale.graph.values import is_scalar, node_name, operands_of, values_by_name
from graphscale.passes import CheckFinite
from graphscale.replicas.buckets import Gradient
from graphscale.replicas.halves import MARK, REPLICAS_FINITE, extract, know_types
from graphscale.replicas.splitting import Halves
from graphscale.session.interface import InputSpec

__all__ = ["Shares", "cut_parts", "share_out", "specs_of", "trust_replicas"]


@dataclasses.dataclass(frozen=True)
class Shares:
    """The division of an update.

    Attributes:
        owners: `{name: rank}` of gradients and of carried inputs; other state consists of single numbers, which every
            replica updates for itself.
        rounds: the exchanged numbers, round by round: `{name: computing rank}`.
        nodes: for each node, its round, from 0, and its owner; None for all owners.
    """

    owners: dict[str, int]
    rounds: tuple[dict[str, int], ...]
    nodes: tuple[tuple[int, int | None], ...]


def trust_replicas(graph: ir.Graph, decision: str, name: str) -> None:
    """Replace the finite check of a second half by the decision of all replicas, since none has all gradients.

    Raises:
        SplitError: its own check reads other values than the gradients.
    """
    values = values_by_name(graph)
    common = values[decision].producer()
    assert common is not None and common.inputs[0] is not None
    for node in nodes_above(common.inputs[0]):
        if node.metadata_props.get(PASS_KEY) not in (CheckFinite.name, MARK):
            raise SplitError(
                f"{name} cannot be sharded: its finite check reads other values than the gradients, at "
                f"{node_name(node)!r}"
            )
    common.replace_input_with(0, values[REPLICAS_FINITE])
    for node in reversed(list(graph)):
        if CheckFinite.inserted(node) and not any(value.uses() for value in node.outputs):
            graph.remove(node, safe=True)


def share_out(
    graph: ir.Graph, gradients: Mapping[str, Gradient], pairs: Mapping[str, str], size: int, name: str
) -> Shares:
    """Divide an update, the second half of a step, among a number of replicas.

    Args:
        graph, name: the second half, and a name for messages.
        gradients: the gradients by their input.
        pairs: for each carried input, the output with its next value, if any.
        size: the number of replicas.

    Raises:
        SplitError: the update mixes all gradients.
    """
    groups = _groups(graph, pairs)
    weight: Counter[ir.Value] = Counter()
    for value, root in groups.items():
        if (gradient := gradients.get(value.name or "")) is not None:
            weight[root] += gradient.nbytes
    if len(weight) < min(size, len(gradients)) and len(weight) < 2:
        raise SplitError(f"{name} cannot be sharded: its update combines all gradients with one another")
    owner_of = _balance(groups, weight, size)
    return _rounds(graph, {value: owner_of[root] for value, root in groups.items() if value.is_graph_input()})


def _groups(graph: ir.Graph, pairs: Mapping[str, str]) -> dict[ir.Value, ir.Value]:
    """Return for each tensor in a group one member of the group."""
    parent = {value: value for value in graph.inputs if not is_scalar(value)}

    def find(value: ir.Value) -> ir.Value:
        while parent[value] is not value:
            parent[value] = value = parent[parent[value]]
        return value

    for node in graph:
        members = [value for value in operands_of(node) if value in parent]
        for member in members[1:]:
            parent[find(member)] = find(members[0])
        if members:
            parent.update((value, find(members[0])) for value in node.outputs if not is_scalar(value))
    values = values_by_name(graph)
    for source, target in pairs.items():
        state, new = values[source], values.get(target)
        if new is not None and state in parent and new in parent:
            parent[find(new)] = find(state)
    return {value: find(value) for value in parent}


def _balance(groups: Mapping[ir.Value, ir.Value], weight: Counter[ir.Value], size: int) -> dict[ir.Value, int]:
    """Choose an owner for each group, the largest first: the replica with the smallest share so far."""
    loads = [0] * size
    found = {}
    for root in sorted(dict.fromkeys(groups.values()), key=lambda root: -weight[root]):
        found[root] = rank = loads.index(min(loads))
        loads[rank] += weight[root]
    return found


def _rounds(graph: ir.Graph, inputs: Mapping[ir.Value, int]) -> Shares:
    """Choose the round and the owner of each node, which waits for its operands from other owners."""
    nodes = list(graph)
    owner: dict[ir.Value, int | None] = {**inputs}
    level: Counter[ir.Value] = Counter()
    exchanged: dict[ir.Value, int] = {}
    home_of: dict[ir.Node, int | None] = {}
    for node in nodes:
        operands = operands_of(node)
        found = {rank for value in operands if (rank := owner.get(value)) is not None}
        home = next(iter(found), None)
        joint = any(owner.get(v) is None and level[v] for v in operands)
        if len(found) > 1 or (joint and all(map(is_scalar, node.outputs))):
            # All replicas combine numbers that all know, which saves an exchange.
            home = next((owner[v] for v in operands if owner.get(v) is not None and not is_scalar(v)), None)
        foreign = [v for v in operands if owner.get(v) is not None and owner[v] != home]
        for value in foreign:
            exchanged[value] = level[value]
        after = [level[value] + (value in foreign) for value in operands]
        home_of[node] = home
        for value in node.outputs:
            owner[value], level[value] = home, max(after, default=0)
    for value in graph.outputs:
        rank = owner.get(value)
        if rank is not None and is_scalar(value):
            exchanged[value] = level[value]
    count = max(exchanged.values(), default=-1) + 1
    rounds: list[dict[str, int]] = []
    round_of: dict[ir.Node, int] = {}
    for number in range(count):
        values = [value for value, at in exchanged.items() if at == number]
        rounds.append({value.name or "": rank for value in values if (rank := owner[value]) is not None})
        for node in nodes_above(*values):
            round_of.setdefault(node, number)
    owners = {value.name or "": rank for value, rank in inputs.items()}
    return Shares(owners, tuple(rounds), tuple((round_of.get(node, count), home_of[node]) for node in nodes))


def cut_parts(
    halves: Halves, shares: Shares, rank: int, own: Collection[str]
) -> tuple[list[ir.Model], dict[str, str], dict[str, InputSpec]]:
    """Cut the second half for one rank's replica, which carries its own state.

    Returns:
        a model for each round of numbers, and the model that updates the state, stamped with the state of this replica
        alone; the renamed inputs of that model; dtype and shape of the exchanged numbers.

    Raises:
        SplitError: only one replica would know an output of the step.
    """
    graph = halves.update.graph
    last = len(shares.rounds)
    placed = enumerate(zip(graph, shares.nodes, strict=True))
    kept = [(i, node, at) for i, (node, (at, owner)) in placed if owner in (None, rank)]
    made = {value: at for _, node, at in kept for value in node.outputs}
    exchanged = {name for names in shares.rounds for name in names}
    outputs: list[dict[str, None]] = [{} for _ in range(last + 1)]
    for value, at in made.items():
        if value.name in exchanged and at < last:
            outputs[at][value.name or ""] = None
    for _, node, at in kept:
        for value in operands_of(node):
            if made.get(value, last) < at and value.name not in exchanged:
                outputs[made[value]][value.name or ""] = None
    for value in graph.outputs:
        if value.name in exchanged:
            continue
        if value in made or value.producer() is None:
            outputs[last][value.name or ""] = None
            if made.get(value, last) < last:
                outputs[made[value]][value.name or ""] = None
        elif value.name not in halves.stamp.state.values():
            raise SplitError(f"the step cannot be sharded: one replica alone would know its output {value.name!r}")
    names = {*exchanged, *(name for part in outputs for name in part)}
    know_types(halves.update, sorted(names))
    parts = []
    given: dict[str, str] = {}
    for at, wanted in enumerate(outputs):
        chosen = [i for i, _, of in kept if of == at]
        part, given = extract(halves.update, chosen, list(wanted), own, keep_states=at == last)
        parts.append(part)
    stamp = halves.stamp
    mine = [state for state in stamp.report["state"] if state["input"] in own]
    carried = {source: output for source, output in stamp.state.items() if source in own}
    dataclasses.replace(stamp, state=carried, report={**stamp.report, "state": mine}).write(parts[-1])
    numbers = {v.name or "": InputSpec.of(v) for node in graph for v in node.outputs if v.name in exchanged}
    return parts, given, numbers


def specs_of(graph: ir.Graph, states: Collection[str], *, carried: bool) -> dict[str, InputSpec]:
    """Return the specs of a second half's inputs: its carried state, or its feeds.

    Raises:
        SessionError: the shape of a state is unknown.
    """
    found = {}
    for value in graph.inputs:
        if (value.name in states) == carried:
            spec = InputSpec.of(value)
            if carried and not all(isinstance(axis, int) for axis in spec.shape):
                raise SessionError(
                    f"the shape of the state {value.name!r} is not known, and shares of it have fixed sizes"
                )
            is_optional = not carried and value.name in graph.initializers
            found[value.name or ""] = dataclasses.replace(spec, optional=is_optional)
    return found
