"""The relation of two models: each output and state of one has the term of the other's, and no power of the scale."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType

import onnx_ir as ir
from onnx_ir.passes.common import InlinePass

from graphscale.checks.patterns import input_at
from graphscale.checks.relation.term_numbering import Numbering, shape_of
from graphscale.checks.relation.terms import Number, Operation, Source, Terms
from graphscale.flow.degree import ZERO
from graphscale.graph.inference import infer_types
from graphscale.graph.values import values_by_name
from graphscale.operators import Trait, nodes_with

__all__ = ["Given", "Relation", "Side", "no_numbers"]

# Gives numbers by the names of values, in a table.
Given = Callable[[Terms], Mapping[str, Number]]


def no_numbers(terms: Terms) -> Mapping[str, Number]:
    """Return no numbers: each input is a source of its own."""
    return {}


class Relation:
    """Two models, numbered in one table.

    Args:
        first: a model.
        second: a model that should compute the same.
        given: of each model, numbers of values by name, such as the scale and the finite flag of an applied step.
        states: `{input: output}` of the carried state of the first, None for a state written in place.
        rounds: True to join operations whose results may differ in the last bits.

    Attributes:
        terms: the table.
        first: the numbers of the first model.
        second: those of the second.
    """

    def __init__(
        self,
        first: ir.Model,
        second: ir.Model,
        given: tuple[Given, Given] = (no_numbers, no_numbers),
        states: Mapping[str, str | None] = MappingProxyType({}),
        *,
        rounds: bool = False,
    ) -> None:
        self.terms, models, self._states = Terms(), (_copy(first), _copy(second)), states
        inputs = {value.name for value in models[1].graph.inputs}
        # A state that is an initializer becomes an input of the scaled graph.
        stored = [v for name, v in models[0].graph.initializers.items() if name in inputs and name in states]
        sources = {v: Number(self.terms.add(Source("input", v.name, v.dtype), v.dtype, shape_of(v))) for v in stored}
        self.first, self.second = (
            Side(model.graph, Numbering(self.terms, model, {**sources, **self._named(model, each)}, rounds=rounds))
            for model, each in zip(models, given, strict=True)
        )

    def _named(self, model: ir.Model, given: Given) -> dict[ir.Value, Number]:
        values = values_by_name(model.graph)
        return {values[name]: number for name, number in given(self.terms).items() if name in values}

    def find_differences(self) -> Iterator[str]:
        """Yield results of the second model that are not those of the first."""
        first, second = self.first, self.second
        inputs = {output: state for state, output in self._states.items() if output is not None}
        for name, wanted in first.outputs.items():
            yield from self._compare(name, wanted, second.written.get(inputs.get(name, ""), second.outputs.get(name)))
        for name, wanted in first.written.items():
            yield from self._compare(name, wanted, second.written.get(name))

    def _compare(self, name: str, wanted: Number, found: Number | None) -> Iterator[str]:
        if found is None:
            yield f"{name!r} is gone"
        elif found.term != self._as_wide(wanted.term, found.term):
            yield f"{name!r} is computed in another way: {self._explain(wanted.term, found.term)}"
        elif found.degree != wanted.degree and found.degree not in (0, ZERO):
            yield f"{name!r} carries the loss scale to the power {found.degree:g}"

    def _as_wide(self, term: int, found: int) -> int:
        """Return a term in the wider type of the other one: gradients may leave in float32."""
        dtype = self.terms.dtypes[found]
        if dtype is not ir.DataType.FLOAT or self.terms.dtypes[term] in (dtype, None):
            return term
        cast = Operation("", "Cast", (("to", int(dtype)),), (term,))
        return self.terms.add(cast, dtype, self.terms.shapes[term])

    def _explain(self, wanted: int, found: int) -> str:
        pair = list(self.terms.pair_up(wanted, found))[-1]
        one, other = (self._describe(term, side) for term, side in zip(pair, (self.first, self.second), strict=True))
        return f"by {other}, and should be by {one}"

    def _describe(self, term: int, side: Side) -> str:
        key, name, number = self.terms.keys[term], side.name_of(term), self.terms.array(term)
        text = str(key) if isinstance(key, Operation) or key.kind == "constant" else f"{key.kind} {key}"
        if number is not None and number.size == 1:
            text = f"the number {number.reshape(-1)[0]}"
        elif isinstance(key, Source) and key.kind == "unknown":
            text = f"no power of the scale ({key})"
        return text if name is None else f"{text} at {name!r}"


class Side:
    """A model of a relation.

    Attributes:
        outputs: the numbers of its outputs by name.
        written: the next values of the states that are written in place, by the state's name.
        nodes: its nodes, those of bodies included.
        of: the number of a value.
    """

    def __init__(self, graph: ir.Graph, numbers: Numbering) -> None:
        self._graph, self._numbers = graph, numbers
        self.nodes, self.of = tuple(graph.all_nodes()), numbers.of
        self.outputs = {value.name or "": numbers.of(value) for value in graph.outputs}
        self.written = dict(self._writes())

    @functools.cached_property
    def numbers(self) -> set[Number]:
        """The numbers of all results of its nodes."""
        return {self.of(value) for node in self.nodes for value in node.outputs}

    @functools.cached_property
    def _by_name(self) -> Mapping[str, ir.Value]:
        return values_by_name(self._graph)

    def named(self, name: str) -> Number | None:
        """Return the number of the value with a name; None without one."""
        value = self._by_name.get(name)
        return None if value is None else self.of(value)

    def terms_by_name(self) -> dict[str, int]:
        """Return the terms of the values of the main graph by name."""
        return {name: self.of(value).term for name, value in self._by_name.items()}

    def is_one(self, term: int) -> bool:
        """Return whether a term is the number 1, as the scale is beside its power."""
        return self._numbers.terms.holds(term, 1)

    def _writes(self) -> Iterator[tuple[str, Number]]:
        terms, of = self._numbers.terms, self._numbers.of
        for node in nodes_with(self._graph, Trait.ACCUMULATOR):
            state, value, flag = node.inputs[0], node.inputs[1], input_at(node, 2)
            assert state is not None and value is not None
            number, decided = of(value), None if flag is None else of(flag).term
            is_set = terms.is_true(decided)
            if node.op_type != "InPlaceAccumulatorV2" or not is_set:
                operands = (of(state).term, number.term, None if is_set else decided)
                key = Operation(node.domain, node.op_type, (), operands)
                number = Number(terms.add(key, state.dtype), number.degree)
            yield state.name or "", number

    def name_of(self, term: int) -> str | None:
        """Return the name of a value with a term."""
        values = (value for node in self._graph for value in node.outputs)
        return next((value.name for value in values if self._numbers.of(value).term == term), None)


def _copy(model: ir.Model) -> ir.Model:
    """Copy a model, inline its functions, and infer its shapes anew: those that a file declares may be stale.

    Where inference knows none, as behind optimizers of ONNX Runtime, the declared ones stay.
    """
    copy = model.clone()
    if copy.functions:
        InlinePass()(copy)
    outputs = set(copy.graph.outputs)
    declared = {v: v.shape for node in copy.graph.all_nodes() for v in node.outputs if v not in outputs}
    for value in declared:
        value.shape = None
    infer_types(copy)
    for value, shape in declared.items():
        value.shape = value.shape or shape
    return copy
