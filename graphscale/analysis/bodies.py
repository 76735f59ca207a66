"""A graph whose bodies run once, as nodes of the main graph, for the search for places in Loop, Scan and If.

A Loop or Scan becomes its body on the first carried values; an If becomes both branches, with a `Where` for each of its
outputs. The places of the copy hold in the original if all degrees follow there as well, in any number of rounds.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from graphscale.analysis.edits import Place, Plan, Unscaling
from graphscale.analysis.roles.role_table import Assigned, Roles
from graphscale.analysis.training_result import Coverage, TrainingGraph
from graphscale.errors import GraphscaleError, LossError, UnsupportedModelError
from graphscale.flow.degree import ZERO, Conflict
from graphscale.graph.builder import Names
from graphscale.graph.values import (
    Use,
    inner_nodes,
    is_float,
    is_known_zero,
    is_scalar,
    main_nodes,
    node_name,
    op_name,
    operand_at,
    operands_of,
    subgraphs,
    uses_of,
    value_label,
)
from graphscale.operators import rule_of

__all__ = ["Unrolled", "unroll_bodies"]

_REMEDY = "let the gradients leave the body, and export their readers behind it, one step per run"


def unroll_bodies(graph: ir.Graph) -> Unrolled | None:
    """Return a copy of the graph whose bodies run once; None if no body may hold a part of a backward pass."""
    nodes = [each for node in graph if subgraphs(node) for each in (node, *inner_nodes(node))]
    if any(subgraphs(each) and op_name(each) not in ("If", "Loop", "Scan") for each in nodes):
        return None
    rules = (rule_of(each) for each in nodes)
    return Unrolled(graph) if any(r is not None and (r.contraction or r.gradient) for r in rules) else None


class Unrolled:
    """A copy of a main graph whose bodies run once.

    Args:
        original: the main graph; it is not changed.

    Attributes:
        graph: the copy, which holds no bodies.
    """

    def __init__(self, original: ir.Graph) -> None:
        self.original = original
        self._owners = main_nodes(original)
        self._copies: dict[ir.Value, ir.Value] = {}
        self._originals: dict[ir.Value, ir.Value] = {}
        self._nodes: dict[ir.Node, ir.Node] = {}  # the original of each node that has one
        self._joints: set[ir.Node] = set()
        self._added: list[ir.Node] = []
        self._constants: list[ir.Value] = []
        self._names = Names(value.name or "" for value in (*original.inputs, *original.initializers.values()))
        self._names.update(value.name or "" for node in original for value in node.outputs)
        inputs = [self._copy(value) for value in original.inputs]
        stored = [self._copy(value) for value in original.initializers.values()]
        for node in original:
            self._add(node)
        self.graph = ir.Graph(
            inputs,
            [self._copies[value] for value in original.outputs],
            nodes=self._added,
            initializers=[*stored, *self._constants],
            opset_imports=original.opset_imports,
            name=original.name,
        )

    # --- the copy -----------------------------------------------------------------------------------------------------

    def _copy(self, value: ir.Value, *, inner: bool = False) -> ir.Value:
        copy = self._copies.get(value)
        if copy is None:
            name = self._names.reserve(value.name or "inner") if inner else value.name
            shape = None if value.shape is None else value.shape.copy()
            copy = ir.Value(name=name, type=value.type, shape=shape, const_value=value.const_value)
            self._copies[value] = copy
            self._originals[copy] = value
        return copy

    def _constant(self, name: str, array: np.ndarray[Any, Any]) -> ir.Value:
        name = self._names.reserve(name)
        value = ir.val(name, const_value=ir.tensor(array, name=name))
        self._constants.append(value)
        return value

    def _add(self, node: ir.Node, *, inner: bool = False) -> None:
        """Add the copy of a node, or of its bodies."""
        outputs = [self._copy(value, inner=inner) for value in node.outputs]
        inputs = [None if value is None else self._copies[value] for value in node.inputs]
        if not subgraphs(node):
            attributes, props = list(node.attributes.values()), dict(node.metadata_props)
            copy = ir.Node(
                node.domain, node.op_type, inputs, attributes, outputs=outputs, name=node.name, metadata_props=props
            )
            self._added.append(copy)
            self._nodes[copy] = node
        elif node.op_type == "If":
            branches = subgraphs(node)
            for branch in branches:
                self._enter(branch, [])
            for i, output in enumerate(outputs):
                self._join(
                    node, "Where", [inputs[0], *(self._copies[branch.outputs[i]] for branch in branches)], output
                )
        elif node.op_type == "Loop":
            self._add_loop(node, inputs, outputs)
        else:
            self._add_scan(node, inputs, outputs)

    def _add_loop(self, node: ir.Node, inputs: Sequence[ir.Value | None], outputs: Sequence[ir.Value]) -> None:
        body = subgraphs(node)[0]
        # The number of the round is an unknown number.
        rounds = ir.val(self._names.reserve("rounds"), ir.DataType.INT64, [])
        self._join(node, "Size", [next(value for value in inputs if value is not None)], rounds)
        going = inputs[1] if len(inputs) > 1 else None
        start = self._starts(node, inputs[2:])
        self._enter(body, [rounds, going or self._constant("going", np.asarray(True)), *start])
        self._leave(node, body.outputs[1:], outputs, len(inputs[2:]))

    def _add_scan(self, node: ir.Node, inputs: Sequence[ir.Value | None], outputs: Sequence[ir.Value]) -> None:
        body, scanned = subgraphs(node)[0], node.attributes["num_scan_inputs"].as_int()
        count = len(inputs) - scanned
        first = self._constant("first", np.asarray(0, dtype=np.int64))
        parts = [self._copy(value, inner=True) for value in body.inputs[count:]]
        for value, axis, part in zip(inputs[count:], _axes(node, "scan_input_axes", scanned), parts, strict=True):
            self._join(node, "Gather", [value, first], part, axis=axis)
        self._enter(body, [*self._starts(node, inputs[:count]), *parts])
        self._leave(node, body.outputs, outputs, count)

    def _starts(self, node: ir.Node, values: Sequence[ir.Value | None]) -> Iterator[ir.Value | None]:
        """Yield the first carried values; new zeros stand for an initializer of zeros, which might be a state."""
        for value in values:
            zeros = value
            if value is not None and is_known_zero(self._originals[value]):
                shape = ir.val(self._names.reserve("shape"), ir.DataType.INT64)
                zeros = ir.Value(name=self._names.reserve("zeros"), type=value.type, shape=value.shape)
                self._originals[zeros] = self._originals[value]
                self._join(node, "Shape", [value], shape)
                self._join(node, "ConstantOfShape", [shape], zeros)
            yield zeros

    def _leave(self, node: ir.Node, leaving: Sequence[ir.Value], outputs: Sequence[ir.Value], count: int) -> None:
        """Give the outputs of a Loop or Scan that carries `count` values."""
        axes = iter(_axes(node, "scan_output_axes", len(outputs) - count))
        for i, (value, output) in enumerate(zip(leaving, outputs, strict=True)):
            if i < count:
                self._join(node, "Identity", [self._copies[value]], output)
            else:
                axis = self._constant("axis", np.asarray([next(axes)], dtype=np.int64))
                self._join(node, "Unsqueeze", [self._copies[value], axis], output)

    def _enter(self, body: ir.Graph, values: Sequence[ir.Value | None]) -> None:
        """Add the nodes of a body, with some values as its inputs."""
        for value, outer in zip(body.inputs, values, strict=True):
            assert outer is not None
            self._copies[value] = outer
        self._constants += [self._copy(value, inner=True) for value in body.initializers.values()]
        for node in body:
            self._add(node, inner=True)

    def _join(
        self, node: ir.Node, op_type: str, inputs: Sequence[ir.Value | None], output: ir.Value, **attributes: int
    ) -> None:
        """Add a node between the main graph and a body."""
        joint = ir.node(op_type, list(inputs), attributes=attributes, outputs=[output], name=node.name)
        self._added.append(joint)
        self._joints.add(joint)

    # --- back to the original -----------------------------------------------------------------------------------------

    def restore(self, result: TrainingGraph) -> TrainingGraph:
        """Translate the analysis of the copy to the original.

        Raises:
            UnsupportedModelError: the scale would enter or come out at a place for no node, or does not cancel in later
                rounds of a body.
        """
        values, plan = self._originals, Plan()
        places = [self._restore_place(place) for place in result.places]
        for place in places:
            plan.add(place)
        for unscaling in self._restore_unscalings(result.unscalings):
            plan.unscale(unscaling.value).merge(unscaling)
        self._evaluate(plan)
        if not self._is_main(values[result.loss]):
            raise self._refuse(values[result.loss], "holds the loss alone; let the loss leave the body")
        return dataclasses.replace(
            result,
            graph=self.original,
            reads={node: operands_of(node) for node in self.original},
            owners=self._owners,
            loss=values[result.loss],
            places=tuple(dict.fromkeys(places)),
            unscalings=tuple(plan.unscaled.values()),
            roles=Roles(self._restore_roles(result.roles.inputs), self._restore_roles(result.roles.outputs)),
            updates=tuple(
                dataclasses.replace(update, output=values[update.output], input=values[update.input])
                for update in result.updates
            ),
            accumulators=self._restore_nodes(result.accumulators),
            coverage=Coverage(*map(self._restore_nodes, (result.coverage.nodes, result.coverage.missed))),
            degrees=plan.degrees(),
        )

    def explain(self, error: GraphscaleError) -> GraphscaleError | None:
        """Return the refusal of a graph whose body gives a loss for each round; None for any other graph."""
        for value in self.original.outputs if isinstance(error, LossError) else ():
            node = value.producer()
            copy = self._copies[value].producer()
            if node is None or copy is None or copy.op_type != "Unsqueeze" or copy not in self._joints:
                continue
            inner = copy.inputs[0]
            if inner is not None and is_float(inner) and is_scalar(inner):
                return LossError(
                    f"no output is one number that could be the loss; {value_label(value)} has one for each round of "
                    f"the body of {op_name(node)} node {node_name(node)!r}: export their mean beside it, and {_REMEDY}"
                )
        return None

    def _restore_nodes(self, nodes: Iterable[ir.Node]) -> tuple[ir.Node, ...]:
        return tuple(self._nodes[node] for node in nodes)

    def _restore_roles(self, roles: Mapping[ir.Value, Assigned]) -> dict[ir.Value, Assigned]:
        values = self._originals
        return {
            values[value]: dataclasses.replace(each, pair=None if each.pair is None else values[each.pair])
            for value, each in roles.items()
        }

    def _restore_place(self, place: Place) -> Place:
        reader = None if place.edge is None else place.edge.node
        if place.edge is not None and reader in self._nodes:
            use = Use(self._nodes[reader], place.edge.idx)
            return Place(operand_at(use), use)
        value = self._originals[place.value]
        if reader is not None and reader.op_type in ("Identity", "Unsqueeze"):
            # The reader is the end of the body: the scale enters behind the body.
            return Place(self._originals[reader.outputs[0]])
        if reader is not None or (value.producer() is None and not self._is_main(value)):
            raise self._refuse(value, f"reads or gives {value.name!r}, which the scale cannot enter at; {_REMEDY}")
        return Place(value)

    def _restore_unscalings(self, unscalings: Iterable[Unscaling]) -> Iterator[Unscaling]:
        """Yield the unscalings in the original; a value that only leaves its body is unscaled at the output."""
        pending = list(unscalings)
        for unscaling in pending:
            value = self._originals[unscaling.value]
            uses = [use for use in uses_of(unscaling.value) if unscaling.covers(use)]
            reader = next((use.node for use in uses if use.node not in self._joints), None)
            if self._is_main(value) and (unscaling.everywhere or all(use.node in self._nodes for use in uses)):
                edges = {Use(self._nodes[use.node], use.idx) for use in unscaling.edges}
                wholes = {self._originals[whole] for whole in unscaling.wholes}
                inner = next((whole for whole in wholes if not self._is_main(whole)), None)
                if inner is not None:
                    raise self._refuse(inner, f"adds to the gradient {value.name!r}; {_REMEDY}")
                yield dataclasses.replace(unscaling, value=value, edges=edges, wholes=wholes)
            elif reader is not None or self._is_main(value):
                where = "" if reader is None else f" at node {node_name(reader)!r}"
                what = f"uses the gradient {value.name!r} itself{where}, where no step can be skipped; {_REMEDY}"
                raise self._refuse(value, what)
            else:
                pending += [
                    Unscaling(use.node.outputs[0], everywhere=True, reason=unscaling.reason, wholes=unscaling.wholes)
                    for use in uses
                ]

    def _refuse(self, value: ir.Value, what: str) -> UnsupportedModelError:
        """Return the refusal of the body around a value, or of the body with this output."""
        owner = self._owners.get(value.graph) if isinstance(value.graph, ir.Graph) else None
        owner = owner or value.producer()
        name = "a body" if owner is None else f"the body of {op_name(owner)} node {node_name(owner)!r}"
        return UnsupportedModelError(f"{name} {what}")

    def _is_main(self, value: ir.Value) -> bool:
        return value.graph is self.original

    def _evaluate(self, plan: Plan) -> None:
        """Evaluate the degrees of all values of the original under a plan, in any number of rounds of each body."""
        for node in self.original:
            result = plan.evaluate(node)
            if isinstance(result, Conflict):
                raise self._refuse(node.outputs[0], f"{_describe(node, result)}; {_REMEDY}")
            for value, degree in zip(node.outputs, result, strict=True):
                plan.flow.elements[value] = plan.write(value, degree)
        for value in self.original.outputs:
            if plan.output(value) not in (0, ZERO):
                raise UnsupportedModelError(f"output {value.name!r} would be scaled by a body; {_REMEDY}")


def _describe(node: ir.Node, conflict: Conflict) -> str:
    """Describe a conflict in a node from rounds after the first, or from branches."""
    if conflict.node is not node:
        return f"does not keep the loss scale: {conflict}"
    if node.op_type == "If":
        return "gives a scaled gradient by one branch, and by the other one numbers that do not scale"
    return "carries a scaled gradient in a value that does not begin with zeros"


def _axes(node: ir.Node, name: str, count: int) -> list[int]:
    return [*node.attributes.get_ints(name, ()), *[0] * count][:count]
