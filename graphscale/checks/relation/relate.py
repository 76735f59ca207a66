"""The relation: on an applied step, each output of the scaled graph has the original's term, and no power of the scale."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import InlinePass

from graphscale.checks.patterns import input_at
from graphscale.checks.relation.numbering import Numbering
from graphscale.checks.relation.terms import Number, Operation, Source, Terms
from graphscale.flow.degree import ZERO
from graphscale.graph.inference import infer_types
from graphscale.graph.values import values_by_name
from graphscale.operators import Trait, nodes_with

__all__ = ["Relation"]


class Relation:
    """An original and a scaled graph, numbered in one table, with the finite flag of the scaled one set.

    Args:
        original: the original, without nodes that hide the gradient path, in the mixed precision of the scaled one.
        scaled: the scaled model.
        scale: the name of its loss scale.
        flags: the names of the flags that are true on an applied step.
        rounds: True to join operations whose results may differ in the last bits.

    Attributes:
        original: the copy of the original that is numbered: functions are inlined, and all types are inferred anew.
        scaled: the copy of the scaled model that is numbered.
        terms: the table.
        first: the numbers of the original.
        second: the numbers of the scaled graph.
    """

    def __init__(
        self, original: ir.Model, scaled: ir.Model, scale: str, flags: Collection[str], *, rounds: bool = False
    ) -> None:
        self.original, self.scaled, self.terms = _copy(original), _copy(scaled), Terms()
        inputs = {value.name for value in self.scaled.graph.inputs}
        # A state that is an initializer becomes an input of the scaled graph.
        states = [value for name, value in self.original.graph.initializers.items() if name in inputs]
        given = {v: Number(self.terms.add(Source("input", v.name, v.dtype), v.dtype)) for v in states}
        self.first = Numbering(self.terms, self.original, given, rounds=rounds)
        values = values_by_name(self.scaled.graph)
        given = {values[name]: Number(self.terms.true) for name in flags if name in values}
        if scale in values:
            given[values[scale]] = Number(self.terms.array_term(np.array(1, np.float32)), 1)
        self.second = Numbering(self.terms, self.scaled, given, rounds=rounds)

    def find_differences(self, states: Mapping[str, str | None]) -> Iterator[str]:
        """Yield outputs and states that are not the original's.

        Args:
            states: `{input: output}` of the original's carried state, None for a state written in place.
        """
        outputs = {value.name: value for value in self.scaled.graph.outputs}
        written = [_writes(numbering, model) for numbering, model in self._sides()]
        inputs = {output: state for state, output in states.items() if output is not None}
        for value in self.original.graph.outputs:
            name = value.name or ""
            found = written[1].get(inputs.get(name, ""))
            if found is None and name in outputs:
                found = self.second.of(outputs[name])
            yield from self._compare(name, self.first.of(value), found)
        for name, number in written[0].items():
            yield from self._compare(name, number, written[1].get(name))

    def _sides(self) -> tuple[tuple[Numbering, ir.Model], ...]:
        return (self.first, self.original), (self.second, self.scaled)

    def _compare(self, name: str, wanted: Number, found: Number | None) -> Iterator[str]:
        if found is None:
            yield f"{name!r} is gone"
        elif found.term != self._as_wide(wanted.term, found.term):
            yield f"{name!r} is not the original's: {self._explain(wanted.term, found.term)}"
        elif found.degree not in (0, ZERO):
            yield f"{name!r} carries the loss scale to the power {found.degree:g}"

    def _as_wide(self, term: int, found: int) -> int:
        """Return a term in the wider type of the other one: gradients may leave in float32."""
        dtype = self.terms.dtypes[found]
        if dtype is not ir.DataType.FLOAT or self.terms.dtypes[term] in (dtype, None):
            return term
        cast = Operation("", "Cast", (("to", int(dtype)),), (term,))
        return self.terms.add(cast, dtype, self.terms.shapes[term])

    def _explain(self, wanted: int, found: int) -> str:
        one, other = list(self.terms.pair_up(wanted, found))[-1]
        names = [
            _names(numbering, model, term) for (numbering, model), term in zip(self._sides(), (one, other), strict=True)
        ]
        return f"{self._describe(other, names[1])} stands for {self._describe(one, names[0])}"

    def _describe(self, term: int, name: str | None) -> str:
        key = self.terms.keys[term]
        text = str(key) if isinstance(key, Operation) else f"{key.kind} {key}"
        return text if name is None else f"{text} {name!r}"


def _copy(model: ir.Model) -> ir.Model:
    """Copy a model, inline its functions, and infer its types anew: a file may declare others."""
    copy = model.clone()
    if copy.functions:
        InlinePass()(copy)
    outputs = set(copy.graph.outputs)
    for node in copy.graph.all_nodes():
        for value in node.outputs:
            if value not in outputs:
                value.shape = None
    infer_types(copy)
    return copy


def _writes(numbering: Numbering, model: ir.Model) -> dict[str, Number]:
    """Return the next values of the states that are written in place."""
    found, terms = {}, numbering.terms
    for node in nodes_with(model.graph, Trait.ACCUMULATOR):
        state, value, flag = node.inputs[0], node.inputs[1], input_at(node, 2)
        assert state is not None and value is not None
        number, decided = numbering.of(value), None if flag is None else numbering.of(flag).term
        if node.op_type != "InPlaceAccumulatorV2" or decided != terms.true:
            operands = (numbering.of(state).term, number.term, None if decided == terms.true else decided)
            key = Operation(node.domain, node.op_type, (), operands)
            number = Number(terms.add(key, state.dtype), number.degree)
        found[state.name or ""] = number
    return found


def _names(numbering: Numbering, model: ir.Model, term: int) -> str | None:
    """Return the name of a value with a term."""
    values = (value for node in model.graph for value in node.outputs)
    return next((value.name for value in values if numbering.of(value).term == term), None)
