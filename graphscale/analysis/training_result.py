"""The result of the analysis of a training graph, and its coverage."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping

import numpy as np
import onnx_ir as ir

from graphscale.analysis.edits import Place, Plan, Unscaling
from graphscale.analysis.roles.role_table import Roles
from graphscale.analysis.topology import Topology
from graphscale.analysis.updates import Update
from graphscale.flow.degree import Degree
from graphscale.graph.values import Use, constant_tensor, inner_nodes, node_name
from graphscale.operators import rule_of

__all__ = ["Coverage", "TrainingGraph", "copies_elements", "measure_coverage"]


_SMALL = 2**16  # elements of a weight that is read


@dataclasses.dataclass(frozen=True)
class Coverage:
    """The backward contractions and gradient operators, and those without a scaled operand.

    "Scale, then unscale at once" gives the right gradients and protects nothing, so this is the measure of quality.

    Attributes:
        nodes: all of them.
        missed: the nodes without a scaled operand.
    """

    nodes: tuple[ir.Node, ...]
    missed: tuple[ir.Node, ...]

    @property
    def total(self) -> int:
        """The number of nodes."""
        return len(self.nodes)

    @property
    def covered(self) -> int:
        """The number of nodes with a scaled operand."""
        return len(self.nodes) - len(self.missed)

    @property
    def share(self) -> float | None:
        """The covered share, from 0 to 1; None if there are none."""
        return self.covered / self.total if self.total else None

    def warnings(self) -> Iterator[str]:
        """Yield a sentence on the missed nodes, if any."""
        if self.missed:
            names = ", ".join(node_name(node) for node in self.missed[:10])
            more = f" and {len(self.missed) - 10} more" if len(self.missed) > 10 else ""
            share = 100 * self.covered / self.total
            yield (
                f"coverage is {share:.1f} %: the loss scale does not protect {names}{more}; "
                "their results may underflow in float16"
            )


@dataclasses.dataclass(frozen=True, eq=False)
class TrainingGraph:
    """The part of a step that the analysis of an original finds, as values and nodes of the graph.

    Attributes:
        graph: the main graph.
        loss: the loss, a scalar floating-point value; the first of several.
        loss_found: the way the loss was found.
        places: the places where the scale enters.
        unscalings: the places where the scale comes out; the gradients are the divided values.
        roles: the role of each input and output.
        updates: the certain pairs of carried state.
        accumulators: the in-place accumulators of gradients.
        coverage: the share of backward contractions and gradient operators that compute on a scaled operand.
        terms: values that move weights by a batch which reaches them past all gradients; they are checked.
        degrees: the future degree of each value in the loss scale, where it is not 0.
        topology: the dependences of each value of the original; None for a scaled file.
        warnings: notes for the user, a sentence each.
    """

    graph: ir.Graph
    loss: ir.Value
    loss_found: str = ""
    places: tuple[Place, ...] = ()
    unscalings: tuple[Unscaling, ...] = ()
    roles: Roles = dataclasses.field(default_factory=lambda: Roles({}, {}))
    updates: tuple[Update, ...] = ()
    accumulators: tuple[ir.Node, ...] = ()
    coverage: Coverage = dataclasses.field(default_factory=lambda: Coverage((), ()))
    terms: tuple[ir.Value, ...] = ()
    degrees: Mapping[ir.Value, Degree] = dataclasses.field(default_factory=dict)
    topology: Topology | None = None
    warnings: tuple[str, ...] = ()

    @property
    def gradients(self) -> tuple[ir.Value, ...]:
        """The values that are divided by the scale, in graph order."""
        return tuple(unscale.value for unscale in self.unscalings)


def measure_coverage(
    topology: Topology,
    plan: Plan,
    cotangents: Mapping[ir.Node, tuple[Use, ...]],
    optimizer: Iterable[ir.Node] = frozenset(),
) -> Coverage:
    """Measure the coverage of the scale.

    Args:
        topology: the graph.
        plan: the degree of every edge.
        cotangents: the backward contractions and gradient operators, with their known cotangents.
        optimizer: nodes of the optimizer, which do not count.
    """
    opaque = topology.flat.opaque
    certain = ((topology.propagating | opaque) & topology.backward).difference(optimizer)
    nodes = [
        inner
        for node in sorted(certain, key=topology.index.__getitem__)
        for inner in (node, *(inner_nodes(node) if node in opaque else ()))
        if _counts(topology, inner, node in cotangents)
    ]
    missed = [node for node in nodes if all(plan.edge(node, i) == 0 for i in range(len(node.inputs)))]
    return Coverage(tuple(nodes), tuple(missed))


def _counts(topology: Topology, node: ir.Node, certain: bool) -> bool:
    rule = rule_of(node)
    if rule is None or rule.gradient or not rule.contraction:
        return rule is not None and rule.gradient
    if copies_elements(node):
        return False
    # A contraction of weights or of inputs alone (a regularizer's) is no part of backpropagation.
    return certain or any(value in topology.activation_dependent for value in topology.operands(node))


def copies_elements(node: ir.Node) -> bool:
    """Return whether a node is a convolution that sums nothing: each result is one element of its image."""
    weight = node.inputs[1] if node.op_type == "Conv" and len(node.inputs) == 2 else None
    while weight is not None and (maker := weight.producer()) is not None and maker.op_type in ("Cast", "Tile"):
        weight = maker.inputs[0]
    tensor = constant_tensor(weight)
    if tensor is None or tensor.size > _SMALL:
        return False
    array = tensor.numpy().astype(np.float32)
    kernels = array.reshape(len(array), -1)
    return bool(np.isin(kernels, (0, 1)).all() and (kernels.sum(axis=1) == 1).all())
