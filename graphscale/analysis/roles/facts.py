"""Facts about the inputs and outputs of a step: their contents and dependences, without any role."""

from __future__ import annotations

import dataclasses
import enum
import functools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Set
from typing import TYPE_CHECKING

import onnx_ir as ir

from graphscale.analysis.edits import Plan
from graphscale.analysis.topology import Topology
from graphscale.analysis.updates import (
    NEXT_STATE,
    ByType,
    Factors,
    find_coefficients,
    known_factors,
    possible_factors,
    same_type,
    shares,
)
from graphscale.graph.values import inputs_of, is_float, is_known_zero, is_scalar, subgraphs
from graphscale.graph.walks import reach, source_by_trait
from graphscale.operators import Trait, has_trait

if TYPE_CHECKING:
    from graphscale.analysis.roles.dependence import Dependence

__all__ = ["VIEWS", "Facts"]

VIEWS = Trait.RESHAPE | Trait.CAST | Trait.PERMUTE
_COMPARING = frozenset(("Sub", "Div", "Less", "Greater", "LessOrEqual", "GreaterOrEqual"))
_CLIPPED = VIEWS | Trait.BOUND
_HANDS_ON = VIEWS | Trait.REPEAT | Trait.BOUND | Trait.MOVE | Trait.PART


class Facts:
    """The inputs, stored values and outputs of a main graph, and the contents of outputs.

    Args:
        topology: the topology of the graph, for its loss.
        plan: the places of the loss scale, and of the divisions by it.

    Attributes:
        sources: the inputs and initializers.
        holders: the inputs, and the initializers that may hold state.
        outputs: the outputs, each once.
        held: returns the inputs and initializers in an output, with their coefficients.
        held_firmly: returns those whose coefficients are computed from constants alone.
        held_possibly: returns those in products that are terms of the output, with any other factors.
        takes_gradient: returns whether an output is a sum with a gradient of its type, times or divided by any values.
    """

    def __init__(self, topology: Topology, plan: Plan) -> None:
        self.topology, self.plan, self.graph = topology, plan, topology.graph
        self.factors = topology.factors
        self._shares = shares(self.factors)
        self.sources = sources = {*self.graph.inputs, *self.graph.initializers.values()}
        self.held = functools.cache(functools.partial(self._find_held, self.factors))
        self.held_firmly = functools.cache(self._find_held_firmly)
        self._known = known_factors(self.factors.origins)
        self._uncertain: set[ir.Value] = set()  # outputs that hold values by factors that may differ
        possible = possible_factors(self.factors)
        self.held_possibly = functools.cache(lambda output: find_coefficients(output, sources, possible, _HANDS_ON))
        self.takes_gradient = functools.cache(self._takes_gradient)
        self.comparing = functools.cache(self._comparing)  # many outputs are views of one value
        self.holders = tuple(dict.fromkeys((*self.graph.inputs, *self._stored())))
        self.outputs = tuple(dict.fromkeys(self.graph.outputs))
        self._holders, self._gradients = ByType(self.holders), ByType(plan.unscaled)

    def _stored(self) -> Iterator[ir.Value]:
        """Yield the initializers that may hold state."""
        for value in self.graph.initializers.values():
            if not (value.is_graph_input() or _is_selected_zero(value)):
                yield value

    @functools.cached_property
    def stores_weights(self) -> bool:
        """True if weights are initializers: other states may be initializers, too."""
        return self.topology.may_store_state(self.plan.unscaled.keys())

    def inputs_like(self, value: ir.Value) -> Set[ir.Value]:
        """Return the inputs and initializers of a value's type."""
        return self._holders.like(value)

    def _find_held(self, factors: Factors, output: ir.Value) -> Mapping[ir.Value, float]:
        factors.is_certain = True
        held = find_coefficients(output, self.sources, factors, _HANDS_ON)
        if not factors.is_certain:
            self._uncertain.add(output)
        return {value: c for value, c in held.items() if not self.is_number(value)}

    def _find_held_firmly(self, output: ir.Value) -> Mapping[ir.Value, float]:
        held = self.held(output)
        return self._find_held(self._known, output) if output in self._uncertain else held

    def is_number(self, value: ir.Value) -> bool:
        """Return whether an initializer is filled with one number, and so no weight or moment."""
        if value.is_graph_input() or is_scalar(value) or value in self.topology.forward:
            return False
        return _is_selected_zero(value) or self.factors[value] != 0

    def remains(self, value: ir.Value, state: ir.Value, least: float = NEXT_STATE) -> bool:
        """Return whether a value holds a state, by at least a coefficient, in each branch where it is chosen."""
        node = value.producer()
        if node is None or node.op_type not in ("If", "Where"):
            return value is state or abs(self.held(value).get(state, 0.0)) >= least
        index, bodies = value.index() or 0, subgraphs(node)
        branches = [body.outputs[index] for body in bodies] if bodies else inputs_of(node)[1:]
        return all(self.remains(self.topology.origin(branch), state, least) for branch in branches)

    def holds_one_of(self, output: ir.Value, values: Collection[ir.Value]) -> bool:
        """Return whether an output contains one of some values with a coefficient near one."""
        return any(c >= NEXT_STATE for c in find_coefficients(output, values, self.factors, _HANDS_ON).values())

    def holds_a_share(self, output: ir.Value, value: ir.Value) -> bool:
        """Return whether an output is a sum with any multiple of a value."""
        return value in self.held(output) or value in find_coefficients(output, [value], self._shares, _HANDS_ON)

    def above(self, value: ir.Value) -> set[ir.Value]:
        """Return a value and its ancestors."""
        return set(reach([self.topology.origin(value)], self.topology.flat.above))

    def sources_of(self, value: ir.Value) -> list[ir.Value]:
        """Return the inputs and initializers that a value depends on."""
        return [each for each in self.above(value) if self.topology.flat.is_source(each)]

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

    def _comparing(self, value: ir.Value) -> list[ir.Node]:
        """Return the readers of a value that compare it with another one."""
        return [node for node in self.topology.consumers(value) if node.op_type in _COMPARING]

    def has_gradient(self, value: ir.Value) -> bool:
        """Return whether a value is a weight: the loss reads it, and the graph has a gradient of its type."""
        is_read = value in self.topology.forward and value not in self.topology.targets
        return is_read and bool(self._gradients.like(value))

    def _takes_gradient(self, output: ir.Value) -> bool:
        gradients = self._gradients.like(output)
        return bool(gradients and find_coefficients(output, gradients, possible_factors(self.factors), least=0.0))

    def is_ignored(self, value: ir.Value) -> bool:
        """Return whether an input is for the update alone: the loss does not depend on it."""
        return value.is_graph_input() and value not in self.topology.forward

    @functools.cached_property
    def behind_gradients(self) -> Collection[ir.Value]:
        """The values that depend on a gradient."""
        return self.topology.descendants(self.plan.unscaled.keys())

    @functools.cached_property
    def dependence(self) -> Dependence:
        """The dependence of all values on the holders, on paths without gradients and the loss."""
        return self.dependence_on(self.holders)

    def dependence_on(self, inputs: Iterable[ir.Value]) -> Dependence:
        """Return the dependence of all values on some inputs, on such paths."""
        from graphscale.analysis.roles.dependence import Dependence  # most pairs have stronger evidence

        return Dependence(self.topology, inputs, {*self.plan.unscaled, self.topology.loss})

    @functools.cached_property
    def updates_weights(self) -> bool:
        """True if an output is the next value of a weight: the gradients do not leave the graph for another step."""
        weights = {v for v in self.holders if v in self.topology.forward and is_float(v) and not is_scalar(v)}
        return any(
            c >= NEXT_STATE and same_type(output, value) and self.copied_input(output) is not value
            for output in self.outputs
            for value, c in self.held(output).items()
            if value in weights
        )

    def weights_like(self, value: ir.Value) -> list[ir.Value]:
        """Return the inputs of a type whose gradients may leave the graph: none in a graph that updates weights."""
        if self.updates_weights:
            return []
        return [v for v in self.inputs_like(value) if v in self.topology.forward and v.is_graph_input()]


def _is_selected_zero(value: ir.Value) -> bool:
    """Return whether an initializer of zeros is only selected or squared, unlike a moment."""
    if is_scalar(value) or value.is_graph_input() or not is_known_zero(value):
        return False
    readers = [node for node, _ in value.uses()]
    return bool(readers) and all(
        n.op_type == "Where" or (n.op_type == "Mul" and {*n.inputs} == {value}) for n in readers
    )


class Gradients:
    """The gradients of a step, in contrast to moments and gradients that it keeps for the next one.

    Attributes:
        includes: returns whether a value is a gradient, viewed, clipped, summed, or times other values.
    """

    def __init__(self, facts: Facts) -> None:
        self._facts = facts
        wholes = {whole for each in facts.plan.unscaled.values() for whole in each.wholes}
        # The sum of a gradient and a small share of a weight is a gradient with decay.
        wholes = {whole for whole in wholes if not self._holds_state(whole)}
        self.doubtful = self._unknown_shares(wholes) if wholes else set()
        self._values = {*facts.plan.unscaled, *wholes} - self.doubtful
        self.includes = functools.cache(self._includes)

    @functools.cached_property
    def _memory(self) -> Dependence:
        """The dependence of all values on inputs outside the loss."""
        facts = self._facts
        ignored = (value for value in facts.graph.inputs if facts.is_ignored(value))
        return facts.dependence_on(ignored)

    def _unknown_shares(self, wholes: set[ir.Value]) -> set[ir.Value]:
        """Return the sums with an unknown share of a weight, or with a filled initializer."""
        facts = self._facts
        weights = [value for value in facts.graph.inputs if value in facts.topology.forward]
        dependence = facts.dependence_on(weights)
        found = set()
        for whole in wholes:
            known = find_coefficients(whole, facts.sources, facts.factors, least=0.0)
            stored = any(c >= NEXT_STATE and same_type(whole, v) for v, c in known.items() if not v.is_graph_input())
            if stored or any(v not in known for v, _ in dependence.alike(whole)):
                found.add(whole)
        return found

    def _includes(self, value: ir.Value) -> bool:
        def above(each: ir.Value) -> tuple[ir.Value, ...]:
            if (node := each.producer()) is None:
                return ()
            operands = inputs_of(node)
            if node.op_type in ("Mul", "Where"):
                return operands if len({*operands}) == len(operands) else ()  # a square is no gradient
            return operands[:1] if node.op_type in ("Div", "ReduceSum") or has_trait(node, _CLIPPED) else ()

        return any(each in self._values for each in reach([value], above))

    def remembers(self, value: ir.Value) -> bool:
        """Return whether a value may be the next value of a weight or a moment."""
        return self._holds_state(value) or any(self._memory.alike(value)) or bool(self.met(value))

    def are_counted(self, output: ir.Value) -> bool:
        """Return whether there is a weight for each output of a type that scales with the loss."""
        return len(self._outputs.like(output)) <= len(self._facts.weights_like(output))

    @functools.cached_property
    def _outputs(self) -> ByType:
        return ByType(filter(self.includes, self._facts.outputs))

    def _holds_state(self, value: ir.Value) -> bool:
        held = self._facts.held(value).items()
        return any(c >= NEXT_STATE or self._facts.is_ignored(v) for v, c in held if same_type(value, v))

    def met(self, value: ir.Value) -> list[ir.Value]:
        """Return the inputs of its type outside the loss that a gradient is added to or subtracted from."""
        facts, topology = self._facts, self._facts.topology
        readers = (node for view in facts.views(value) for node in topology.consumers(view))
        others = (each for node in readers if node.op_type in ("Add", "Sub") for each in topology.operands(node))
        return [each for each in others if facts.is_ignored(each) and same_type(value, each)]


class Strength(enum.IntEnum):
    """The strength of evidence for a pair, the weakest first."""

    TYPE = 0  # nothing excludes the pair
    DEPENDS = 1
    PLAIN = 2  # on a path without a contraction
    SHARE = 3  # a term of a sum, with a factor that is no constant
    HOLDS = 4  # any constant multiple of an input outside the loss
    STAYS = 5  # with a constant coefficient near one
    REMAINS = 6  # in each branch of a choice


@dataclasses.dataclass(frozen=True, order=True)
class Evidence:
    """Evidence for a pair.

    Attributes:
        strength: its strength.
        text: the reason, for a reader.
    """

    strength: Strength
    text: str


Row = dict[ir.Value, Evidence]
Found = Iterator[tuple[ir.Value, Evidence]]
Finder = Callable[[Facts, Gradients, ir.Value], Found]


def without_stored(facts: Facts, row: Row) -> Row:
    """Leave out initializers no stronger than an input, where weights are inputs, as all states then are."""
    if facts.stores_weights or all(map(ir.Value.is_graph_input, row)):
        return row
    least = max((each.strength for v, each in row.items() if v.is_graph_input()), default=None)
    if least is None:
        return row
    return {value: each for value, each in row.items() if value.is_graph_input() or each.strength > least}
