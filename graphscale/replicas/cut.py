"""The cut of a scaled step at its gradients, by the marks of its nodes and the dependences of its values.

The first half computes the gradients, and all other values that depend on the batch: the loss, metrics. The second half
computes all values that depend on the gradients, and values that are the same on every replica: bias corrections, a
learning rate.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Mapping

import onnx_ir as ir

from graphscale.analysis.report import STATE_OF_SCALE, TELEMETRY
from graphscale.errors import SplitError
from graphscale.graph.cones import descendants, nodes_above, producers_of
from graphscale.graph.values import is_float, is_scalar, is_source, main_node, main_nodes, node_name, operands_of
from graphscale.graph.walks import ancestors, reach
from graphscale.operators import Trait, has_trait
from graphscale.passes import CheckFinite, OrderWrites
from graphscale.policy.names import ScaledValue
from graphscale.step.training_step import Step

__all__ = ["Cut", "find_cut"]

_NEAR = 64  # limit of values between a part of a gradient and the whole


@dataclasses.dataclass(frozen=True)
class Cut:
    """The two halves of a step, with nodes by their position in the graph, and values by their name.

    Attributes:
        gradients: the cut values, in the order of the backward pass.
        first: the nodes of the first half.
        second: the nodes of the second half; nodes for both halves without values of the batch are in both.
        average: operands of the second half from the first, or outputs, that replicas average.
        local: other operands of the second half from the first, unchanged.
        outputs: the outputs of the graph that the first half computes.
        kept: the outputs of the graph that the second half computes.
    """

    gradients: tuple[str, ...]
    first: frozenset[int]
    second: frozenset[int]
    average: tuple[str, ...]
    local: tuple[str, ...]
    outputs: tuple[str, ...]
    kept: tuple[str, ...]

    def renamed(self, names: Mapping[str, str]) -> Cut:
        """Return the cut with other names for the values between the halves."""
        parts = (self.gradients, self.average, self.local)
        gradients, average, local = (tuple(names.get(value, value) for value in values) for values in parts)
        return dataclasses.replace(self, gradients=gradients, average=average, local=local)


def find_cut(step: Step, name: str) -> Cut:
    """Find the cut of a scaled step; messages contain its name.

    Raises:
        SplitError: the step has no updates, or cannot be cut.
    """
    return _Finder(step, name).cut()


class _Finder:
    def __init__(self, step: Step, name: str) -> None:
        self.step, self.graph, self.name = step, step.graph, name
        self.nodes = list(self.graph)
        self.owners = main_nodes(self.graph)
        self.operands = {node: operands_of(node) for node in self.nodes}
        self.states = {each.input for each in step.carried}
        self.next = {each.next for each in step.carried if not each.in_place}
        # Nodes for their side effects.
        self.sinks = [node for node in self.nodes if not any(v.is_graph_output() or v.uses() for v in node.outputs)]
        if ScaledValue.ACTIVATION in step.telemetry:
            raise SplitError(
                f"{name} cannot be split: its telemetry of activations reads the forward pass after the gradients; "
                "scale it without"
            )
        if all(each.how in (STATE_OF_SCALE, TELEMETRY) for each in step.carried):
            raise SplitError(
                f"{name} has no updates: its gradients leave it as outputs, and nothing in it applies them; split a "
                "step with its optimizer inside (graphscale fuse puts an artifact folder into one)"
            )
        if step.accumulators:
            raise SplitError(
                f"{name} adds its gradients up in accumulators, for an optimizer in another graph; graphscale fuse "
                "makes one step of both"
            )

    def cut(self) -> Cut:
        gradients = self._gradients()
        before = nodes_above(*gradients)
        self._refuse_early_writes(before)
        late = self._after(gradients)
        stray = before & late
        if stray:
            raise SplitError(f"{self.name} cannot be cut: the gradients depend on one another at {_first_of(stray)}")
        read = {value for node in before for value in self.operands[node]}
        batch = {value for value in read if value.is_graph_input() and value not in self.states}
        local = self._local(batch, late)
        first = nodes_above(*gradients, *local)
        second, crossing = self._second(gradients, late, local)
        self._refuse_random(second | first - before)
        reaching = self._reaching_state(second)
        average = [v for v in crossing if is_float(v) and (v in reaching or is_scalar(v))]
        strays = [v for v in crossing if v in reaching and v not in average and not _orders(v)]
        if strays:
            node = strays[0].producer()
            raise SplitError(
                f"{self.name} cannot be cut: the next state depends on {strays[0].name!r} of "
                f"{'an input' if node is None else node_name(node)!r}, which is no gradient, differs from replica to "
                "replica, and is no floating-point number, which has a mean"
            )
        outputs = [v for v in self.graph.outputs if v in local and v not in self.next and v not in gradients]
        metrics = [v for v in outputs if is_float(v) and is_scalar(v)]
        depth = self._depths(before)
        return Cut(
            tuple(_named(sorted(gradients, key=depth.__getitem__))),
            frozenset(i for i, node in enumerate(self.nodes) if node in first),
            frozenset(i for i, node in enumerate(self.nodes) if node in second),
            tuple(dict.fromkeys(_named((*average, *metrics)))),
            tuple(_named(v for v in crossing if v not in average)),
            tuple(_named(outputs)),
            tuple(_named(v for v in self.graph.outputs if v not in outputs)),
        )

    def _gradients(self) -> list[ir.Value]:
        """Find the unscaled gradients in the form for their readers: the whole gradient for a sum of parts."""
        found = [quotient.value for quotient in self.step.quotients]
        if not found:
            raise SplitError(f"{self.name} cannot be cut: none of its nodes is marked as one that unscales a gradient")
        after = self._after(found)
        found = [value for value in found if value.producer() not in after]
        wholes = [
            value
            for node in self.nodes
            if CheckFinite.inserted(node)
            for value in self.operands[node]
            if (producer := value.producer()) in after and not CheckFinite.inserted(producer)
        ]
        for whole in dict.fromkeys(wholes):
            shares = [value for value in found if self._leads_only_to(value, whole)]
            if shares:
                found = [value for value in found if value not in shares] + [whole]
        after = self._after(found)
        return [value for value in found if value.producer() not in after]

    def _leads_only_to(self, share: ir.Value, whole: ir.Value) -> bool:
        def results(value: ir.Value) -> list[ir.Value]:
            return [v for reader in self._readers(value) for v in reader.outputs if v is not whole]

        near = list(itertools.islice(reach([share], results), _NEAR + 1))
        return len(near) <= _NEAR and all(self._readers(value) and not value.is_graph_output() for value in near)

    def _readers(self, value: ir.Value) -> list[ir.Node]:
        return [main_node(self.owners, node) for node, _ in value.uses()]

    def _after(self, values: Iterable[ir.Value]) -> set[ir.Node]:
        """Find the nodes that depend on some values."""
        reached = descendants(self.nodes, values, operands=self.operands.__getitem__)
        return {node for node in self.nodes if not reached.isdisjoint(self.operands[node])}

    def _local(self, batch: set[ir.Value], late: set[ir.Node]) -> set[ir.Value]:
        """Find the values that differ from replica to replica before the gradients are reduced."""
        early = [node for node in self.nodes if node not in late]
        drawn = [value for node in early if _is_random(node) for value in node.outputs]
        return descendants(early, [*batch, *drawn], operands=self.operands.__getitem__)

    def _second(
        self, gradients: list[ir.Value], late: set[ir.Node], local: set[ir.Value]
    ) -> tuple[set[ir.Node], list[ir.Value]]:
        """Find the nodes of the second half, and its operands from the first beside the gradients."""
        roots = [v for node in (*late, *self.sinks) if local.isdisjoint(node.outputs) for v in node.outputs]
        roots += [v for v in self.graph.outputs if v not in local or v in self.next]
        whole = set(gradients)

        def crosses(value: ir.Value) -> bool:
            return value in whole or (value in local and value.producer() not in late)

        found = ancestors(roots, stop=crosses, operands=self.operands.__getitem__)
        second = producers_of(value for value in found if not crosses(value))
        crossing = found - whole
        return second, [v for node in self.nodes for v in node.outputs if v in crossing and crosses(v)]

    def _reaching_state(self, second: set[ir.Node]) -> set[ir.Value]:
        """Find the values above the next state, up to the beginning of the second half."""
        pending = [v for v in self.graph.outputs if v in self.next]
        pending += [v for node in self.sinks if node in second for v in node.outputs]
        return ancestors(pending, stop=lambda v: v.producer() not in second, operands=self.operands.__getitem__)

    def _refuse_early_writes(self, before: set[ir.Node]) -> None:
        for node in before:
            state = node.inputs[0] if node.inputs else None
            if has_trait(node, Trait.WRITES_INPUT) and state is not None and is_source(state):
                raise SplitError(
                    f"{self.name} cannot be cut: {node_name(node)!r} writes {state.name!r} in place before the "
                    "gradients are whole; scale it for the target onnx, or without accumulation"
                )

    def _refuse_random(self, nodes: set[ir.Node]) -> None:
        drawn = [node for node in nodes if _is_random(node)]
        if drawn:
            raise SplitError(
                f"{self.name} cannot be cut: {_first_of(drawn)} draws random numbers in the update, and each replica "
                "would draw others; feed them instead"
            )

    def _depths(self, before: set[ir.Node]) -> dict[ir.Value, int]:
        depth: dict[ir.Value, int] = {}
        for node in self.nodes:
            if node in before:
                own = 1 + max((depth.get(operand, 0) for operand in self.operands[node]), default=0)
                depth.update((value, own) for value in node.outputs)
        return depth


def _orders(value: ir.Value) -> bool:
    """Return whether a flag only orders the execution, and always has the same value."""
    node = value.producer()
    return node is not None and OrderWrites.inserted(node)


def _is_random(node: ir.Node) -> bool:
    # Dropout draws random numbers if an operand switches to training.
    return has_trait(node, Trait.RANDOM) and (node.op_type != "Dropout" or len(node.inputs) > 2)


def _first_of(nodes: Iterable[ir.Node]) -> str:
    return repr(min(node_name(node) for node in nodes))


def _named(values: Iterable[ir.Value]) -> list[str]:
    return [value.name or "" for value in values]
