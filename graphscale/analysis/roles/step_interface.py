"""The interface of a step while roles are assigned: its inputs, stored values and outputs, and their contents."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import TypeVar

import numpy as np
import onnx_ir as ir

from graphscale.analysis.edits import Plan
from graphscale.analysis.roles.role_table import Assigned, Role
from graphscale.analysis.topology import Topology
from graphscale.analysis.updates import (
    NEXT_STATE,
    Factors,
    Type,
    find_coefficients,
    is_stored,
    known_factors,
    possible_factors,
    same_type,
    shares,
    type_of,
)
from graphscale.graph.values import constant_tensor, inputs_of, is_float, is_known_zero, is_scalar
from graphscale.graph.walks import producers_of, reach, source_by_trait
from graphscale.operators import Trait, has_trait

__all__ = ["VIEWS", "Dependence", "Interface", "eliminate"]

_Output = TypeVar("_Output")
_Input = TypeVar("_Input")

VIEWS = Trait.RESHAPE | Trait.CAST | Trait.PERMUTE
_HANDS_ON = VIEWS | Trait.REPEAT | Trait.BOUND | Trait.MOVE | Trait.PART
# Limit of values in a walk from one to the next; above it, a walk over the whole graph takes a row of bytes.
_NEAR = 100


class Interface:
    """The inputs and outputs of a main graph, with the roles assigned so far.

    Args:
        topology: the topology of the graph, for its loss.
        plan: the places of the loss scale, and of the divisions by it.

    Attributes:
        inputs: the roles of inputs, and of initializers that hold state.
        outputs: the roles of outputs.
        holders: the inputs, and the initializers that may hold state.
        is_gradient: returns whether a value is a gradient, viewed, clipped or times other values.
        doubtful: sums of a gradient and an unknown share of a weight: a next weight, or a gradient with decay.
        held: returns the inputs and initializers of an output's type in the output, with their coefficients.
        held_firmly: returns those whose coefficients are computed from constants alone.
        held_possibly: returns those in products that are terms of the output, with any other factors.
    """

    def __init__(self, topology: Topology, plan: Plan) -> None:
        self.topology, self.plan, self.graph = topology, plan, topology.graph
        self.factors = self.topology.factors
        self._shares = shares(self.factors)
        self.inputs: dict[ir.Value, Assigned] = {}
        self.outputs: dict[ir.Value, Assigned] = {}
        self.is_gradient: Callable[[ir.Value], bool] = lambda value: value in plan.unscaled
        self.doubtful: set[ir.Value] = set()
        self._sources = sources = {*self.graph.inputs, *self.graph.initializers.values()}
        self.held = functools.cache(functools.partial(self._find_held, self.factors))
        self.held_firmly = functools.cache(functools.partial(self._find_held, known_factors(self.factors.origins)))
        possible = possible_factors(self.factors)
        self.held_possibly = functools.cache(lambda output: find_coefficients(output, sources, possible, _HANDS_ON))
        self._by_type: dict[Type, list[ir.Value]] = {}
        self.holders = tuple(dict.fromkeys((*self.graph.inputs, *self._stored())))
        self._holding = {*self.holders}
        self._outputs = tuple(dict.fromkeys(self.graph.outputs))
        for value in self.holders:
            self._by_type.setdefault(type_of(value), []).append(value)
        self._untyped = [kind for kind in self._by_type if None in kind]

    def _stored(self) -> Iterator[ir.Value]:
        """Yield the initializers that may hold state; a number only with at most one reader."""
        for value in self.graph.initializers.values():
            if value.is_graph_input() or _is_selected_zero(value) or _is_not_a_number(value):
                continue
            if not is_scalar(value) or len(value.uses()) < 2:
                yield value

    @functools.cached_property
    def flags(self) -> list[ir.Value]:
        """The initializers that are flags."""
        return [value for value in self.graph.initializers.values() if value.dtype is ir.DataType.BOOL]

    @property
    def may_store_state(self) -> bool:
        """True if initializers may be state: False where weights and all other known states are inputs."""
        known = [value for value, assigned in self.inputs.items() if assigned.pair is not None]
        if not known:
            return self._stores_weights
        return any(map(is_stored, known)) or self.topology.forward.isdisjoint(known)

    @functools.cached_property
    def _stores_weights(self) -> bool:
        return self.topology.may_store_state(self.plan.unscaled.keys())

    # --- questions ------------------------------------------------------------------------------------------------

    def open_outputs(self) -> list[ir.Value]:
        """Return the outputs without a role, each once."""
        return [value for value in self._outputs if value not in self.outputs]

    def is_open(self, value: ir.Value) -> bool:
        """Return whether a value is an input, or an initializer that may hold state, and has no role yet."""
        return value in self._holding and value not in self.inputs

    def open_inputs_like(self, value: ir.Value) -> list[ir.Value]:
        """Return the inputs and initializers of a value's type without a role."""
        kind = type_of(value)
        kinds: Iterable[Type] = self._by_type if None in kind else (kind, *self._untyped)
        fitting = (each for kind in kinds for each in self._by_type.get(kind, ()))
        return [each for each in fitting if each not in self.inputs and same_type(value, each)]

    def _find_held(self, factors: Factors, output: ir.Value) -> Mapping[ir.Value, float]:
        held = find_coefficients(output, self._sources, factors, _HANDS_ON)
        return {value: c for value, c in held.items() if not self._is_number(value)}

    def _is_number(self, value: ir.Value) -> bool:
        """Return whether an initializer is filled with one number, but no weight or moment.

        A moment is multiplied by a constant; exporters would fold such a product of two constants.
        """
        if value.is_graph_input() or is_scalar(value) or value in self.topology.forward:
            return False
        return _is_selected_zero(value) or (self.factors[value] != 0 and not _is_scaled(value))

    def holds_one_of(self, output: ir.Value, values: Collection[ir.Value]) -> bool:
        """Return whether an output contains one of some values with a coefficient near one."""
        return any(c >= NEXT_STATE for c in find_coefficients(output, values, self.factors, _HANDS_ON).values())

    def holds_a_share(self, output: ir.Value, value: ir.Value) -> bool:
        """Return whether an output is a sum with any multiple of a value."""
        return value in find_coefficients(output, [value], self._shares, _HANDS_ON)

    def sources_of(self, value: ir.Value) -> list[ir.Value]:
        """Return the inputs and initializers that a value depends on."""
        flat = self.topology.flat
        near = [*itertools.islice(reach([value], flat.above), _NEAR + 1)]
        if len(near) > _NEAR or not producers_of(near) <= self.topology.index.keys():
            return [each for each in self.topology.ancestors([value]) if flat.is_source(each)]
        return sorted(filter(flat.is_source, near), key=self.topology.number)

    def views(self, value: ir.Value) -> list[ir.Value]:
        """Return a value and its sources through views, upwards."""
        values = [value]
        while (node := values[-1].producer()) is not None and has_trait(node, VIEWS) and node.inputs[0] is not None:
            values.append(node.inputs[0])
        return values

    def copied_input(self, output: ir.Value) -> ir.Value | None:
        """Return the input or initializer behind an output that is a view, else None."""
        source = source_by_trait(output, VIEWS)
        return source if source.producer() is None else None

    def may_be_shifted(self, output: ir.Value) -> bool:
        """Return whether an output is an input, and another input of its type is open.

        A step keeps the last step's weights in this way. The other input is no number that is itself an output, such as
        a rate, no constant, and no batch beside a value for comparison with weights.
        """
        source = self.copied_input(output)
        if source is None or not source.is_graph_input():
            return False
        others = [value for value in self.open_inputs_like(output) if value is not source]
        if others and (is_scalar(source) or self._is_anchor(source)):
            handed = {self.copied_input(each) for each in self.open_outputs()}
            others = [value for value in others if value not in handed]
            if is_scalar(source):
                others = [value for value in others if value.is_graph_input()]
            else:
                others = [v for v in others if v not in self.topology.forward and not self._is_number(v)]
        return bool(others)

    def _is_anchor(self, value: ir.Value) -> bool:
        """Return whether an input is added to or subtracted from weights or updates, and all weights have next values.

        The gradients show the number of weights of its type: no more than the paired inputs in the loss, without
        averages of other weights.
        """
        sums = (node for node in self.topology.consumers(value) if node.op_type in ("Add", "Sub"))
        others = {operand for node in sums for operand in inputs_of(node)} - {value}
        if not others or not self.is_ignored(value):
            return False
        weights = {v: each.pair for v, each in self.inputs.items() if v in self.topology.forward and each.certain}
        nexts = {pair for v, pair in weights.items() if pair is not None and same_type(v, value)}
        trained = [pair for pair in nexts if nexts & {*self.topology.ancestors([pair])} <= {pair}]
        gradients = [each for each in self.plan.unscaled if same_type(each, value)]
        return len(gradients) <= len(trained) and any(v in weights or v in self.behind_gradients for v in others)

    def may_predict(self, output: ir.Value, value: ir.Value) -> bool:
        """Return whether an output, such as a prediction, is computed by a contraction that a value reaches."""
        below, nodes = self.topology.descendants({value}), self.topology.contractions
        return any(each in below and each.producer() in nodes for each in self.topology.ancestors([output]))

    @functools.cached_property
    def _batches(self) -> Dependence:
        return self.dependence(value for value in self.graph.inputs if not is_scalar(value))

    def multiplies_batch(self, output: ir.Value, value: ir.Value) -> bool:
        """Return whether an output depends on another open input by contractions alone, like errors of predictions."""
        return any(v is not value and self.is_open(v) for v in self._batches.contracted(output))

    def has_gradient(self, value: ir.Value) -> bool:
        """Return whether a value is a weight: the loss reads it, and the graph has a gradient of its type."""
        if value not in self.topology.forward or value in self.topology.targets:
            return False
        return any(same_type(gradient, value) for gradient in self.plan.unscaled)

    def is_ignored(self, value: ir.Value) -> bool:
        """Return whether an input is for the update alone: the loss does not depend on it."""
        return value.is_graph_input() and value not in self.topology.forward

    @functools.cached_property
    def behind_gradients(self) -> Collection[ir.Value]:
        """The values that depend on a gradient."""
        return self.topology.descendants(self.plan.unscaled.keys())

    def dependence(self, values: Iterable[ir.Value]) -> Dependence:
        """Return the dependence of all values on some, on paths without gradients and the loss."""
        return Dependence(self.topology, dict.fromkeys(values), {*self.plan.unscaled, self.topology.loss})

    def gradients_like(self, value: ir.Value) -> list[ir.Value]:
        """Return the outputs that are gradients of the type of a value."""
        gradients = (output for output, assigned in self.outputs.items() if assigned.role is Role.GRADIENT)
        return [output for output in gradients if same_type(output, value)]

    def weights_like(self, value: ir.Value) -> list[ir.Value]:
        """Return the inputs of a type whose gradients may leave the graph: none in a graph that updates weights."""
        if any(each in self.topology.forward and is_float(each) and not is_scalar(each) for each in self.inputs):
            return []
        return [v for v in self.open_inputs_like(value) if v in self.topology.forward and v.is_graph_input()]

    # --- answers --------------------------------------------------------------------------------------------------

    def pair(self, output: ir.Value, value: ir.Value, evidence: str, certain: bool = True) -> None:
        """Pair an output with an input as its next value."""
        self.outputs[output] = Assigned(Role.STATE, evidence, value, certain)
        self.inputs[value] = Assigned(Role.STATE, evidence, output, certain)

    def settle(
        self,
        candidates: Mapping[ir.Value, Collection[ir.Value]],
        evidence: str,
        certain: Callable[[ir.Value, ir.Value], bool] = lambda output, value: True,
    ) -> dict[ir.Value, ir.Value]:
        """Pair outputs with candidates by elimination, and return the pairs.

        A pair is certain only if the pairs of its other candidates are.
        """
        pairs = dict(eliminate(candidates))
        for output, value in pairs.items():
            self.pair(output, value, evidence)
        for output, value in pairs.items():
            follows = all(self.inputs[other].certain for other in candidates[output])
            self.pair(output, value, evidence, certain(output, value) and follows)
        return pairs


class Dependence:
    """Evidence by dependence: the inputs that each value depends on, on paths without gradients and the loss.

    A number, without axes, counts only on a path of values of one element, since a learning rate is part of each next
    weight, and so reaches the norm of all weights.

    Args:
        topology: the topology of the graph.
        inputs: the inputs in question.
        cut: the values that end paths: gradients, and the loss.
    """

    def __init__(self, topology: Topology, inputs: Iterable[ir.Value], cut: Collection[ir.Value]) -> None:
        self._inputs = tuple(inputs)
        bits = {value: 1 << i for i, value in enumerate(self._inputs)}
        self._all = bits.copy()
        self._plain = bits.copy()
        singles = sum(bit for value, bit in bits.items() if is_scalar(value) and not value.shape)
        numbers: set[ir.Value] = set()  # of unknown shape, but computed from one-element values alone
        for node, results, reads in topology.parts if bits else ():
            untyped = [value for value in results if value.shape is None]
            if untyped and all(is_scalar(value) or value in numbers for value in reads):
                numbers.update(untyped)
            anywhere = plain = 0
            for value in reads:
                if value in self._all and value not in cut:
                    anywhere |= self._all[value]
                    plain |= self._plain.get(value, 0)
            if not anywhere:
                continue
            if node in topology.contractions:
                plain = 0
            for value in results:
                kept = ~0 if is_scalar(value) or value in numbers else ~singles
                self._all[value] = anywhere & kept
                self._plain[value] = plain & kept

    def of(self, value: ir.Value) -> list[ir.Value]:
        """Return the inputs that a value depends on."""
        return self._chosen(self._all.get(value, 0))

    def plain(self, value: ir.Value) -> list[ir.Value]:
        """Return the inputs that a value depends on by a path without a contraction."""
        return self._chosen(self._plain.get(value, 0))

    def contracted(self, value: ir.Value) -> list[ir.Value]:
        """Return the inputs that a value depends on by contractions alone."""
        return self._chosen(self._all.get(value, 0) & ~self._plain.get(value, 0))

    def _chosen(self, mask: int) -> list[ir.Value]:
        return [value for i, value in enumerate(self._inputs) if mask >> i & 1]


def _is_selected_zero(value: ir.Value) -> bool:
    """Return whether an initializer of zeros is only selected or squared, unlike a moment."""
    if is_scalar(value) or value.is_graph_input() or not is_known_zero(value):
        return False
    readers = [node for node, _ in value.uses()]
    return bool(readers) and all(
        n.op_type == "Where" or (n.op_type == "Mul" and {*n.inputs} == {value}) for n in readers
    )


def _is_not_a_number(value: ir.Value) -> bool:
    """Return whether an initializer holds only NaN and is only selected: the result of a gather out of bounds."""
    is_selected = bool(value.uses()) and all(node.op_type == "Where" for node, _ in value.uses())
    tensor = constant_tensor(value) if is_float(value) and is_selected else None
    return tensor is not None and tensor.size > 0 and bool(np.isnan(np.ravel(tensor.numpy())[:64]).all())


def _is_scaled(value: ir.Value) -> bool:
    """Return whether a node multiplies a value by a constant number."""
    products = (inputs_of(node) for node, _ in value.uses() if node.op_type == "Mul")
    return any(is_scalar(each) and constant_tensor(each) is not None for operands in products for each in operands)


def eliminate(candidates: Mapping[_Output, Collection[_Input]]) -> Iterator[tuple[_Output, _Input]]:
    """Yield the pairs that remain if every output with candidates gets one of its own.

    An output has no pair if its only candidate is also the only one of another output.

    Args:
        candidates: for each output, the inputs whose next value it may be.
    """
    left = {output: set(inputs) for output, inputs in candidates.items() if inputs}
    claimants: dict[_Input, set[_Output]] = {}
    for output, inputs in left.items():
        for value in inputs:
            claimants.setdefault(value, set()).add(output)
    leaves = [output for output, inputs in left.items() if len(inputs) == 1]
    while leaves:
        wanted: dict[_Input, list[_Output]] = {}
        for output in leaves:
            for value in left[output]:
                wanted.setdefault(value, []).append(output)
        leaves = []
        for value, outputs in wanted.items():
            if len(outputs) == 1:
                yield outputs[0], value
                for other in claimants[value]:
                    left[other].discard(value)
                    if len(left[other]) == 1:
                        leaves.append(other)
