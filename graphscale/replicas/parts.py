"""The second half of one replica out of that of all: its share of the nodes, cut where numbers are exchanged."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection

import onnx_ir as ir

from graphscale.errors import SessionError, SplitError
from graphscale.graph.values import operands_of
from graphscale.replicas.halves import extract, know_types
from graphscale.replicas.shares import Shares
from graphscale.replicas.splitting import Halves
from graphscale.session.interface import InputSpec

__all__ = ["Parts", "cut_parts", "specs_of"]


@dataclasses.dataclass(frozen=True)
class Parts:
    """What one replica runs.

    Attributes:
        before: a model for each round of numbers: what they are computed by.
        last: the model that updates the state; it says that it carries the state of this replica alone.
        given: inputs of the last model that are called otherwise than what they take.
        numbers: dtype and shape of what is exchanged.
    """

    before: tuple[ir.Model, ...]
    last: ir.Model
    given: dict[str, str]
    numbers: dict[str, InputSpec]


def cut_parts(halves: Halves, shares: Shares, rank: int, own: Collection[str]) -> Parts:
    """Cut the second half for one replica.

    Args:
        halves: the step.
        shares: how its update is divided.
        rank: the replica.
        own: the state that it carries.

    Raises:
        SplitError: the step has an output that one replica alone would know.
    """
    graph = halves.update.graph
    nodes, last = list(graph), len(shares.rounds)
    kept = [shares.nodes[i][1] in (None, rank) for i in range(len(nodes))]
    made = {v: shares.nodes[i][0] for i, node in enumerate(nodes) if kept[i] for v in node.outputs}
    exchanged = {name for names in shares.rounds for name in names}
    outputs: list[dict[str, None]] = [{} for _ in range(last + 1)]
    for value, at in made.items():
        if value.name in exchanged and at < last:
            outputs[at][value.name or ""] = None
    for i, node in enumerate(nodes):
        for value in operands_of(node) if kept[i] else ():
            if made.get(value, last) < shares.nodes[i][0] and value.name not in exchanged:
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
        chosen = [i for i in range(len(nodes)) if kept[i] and shares.nodes[i][0] == at]
        part, given = extract(halves.update, chosen, list(wanted), own, keep_states=at == last)
        parts.append(part)
    stamp = halves.stamp
    mine = [state for state in stamp.report["state"] if state["input"] in own]
    carried = {source: output for source, output in stamp.state.items() if source in own}
    dataclasses.replace(stamp, state=carried, report={**stamp.report, "state": mine}).write(parts[-1])
    numbers = {v.name or "": InputSpec.of(v) for node in nodes for v in node.outputs if v.name in exchanged}
    return Parts(tuple(parts[:-1]), parts[-1], given, numbers)


def specs_of(graph: ir.Graph, states: Collection[str], *, carried: bool) -> dict[str, InputSpec]:
    """Return the inputs of a second half: its carried state, or its feeds.

    Raises:
        SessionError: the shape of some state is not known.
    """
    found = {value.name or "": InputSpec.of(value) for value in graph.inputs if (value.name in states) == carried}
    for name, spec in found.items():
        if carried and not all(isinstance(axis, int) for axis in spec.shape):
            raise SessionError(f"the shape of the state {name!r} is not known, and shares of it have fixed sizes")
        if name in graph.initializers:
            found[name] = dataclasses.replace(spec, optional=not carried)
    return found
