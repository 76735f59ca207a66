"""The relation of two models: each output and state of one has the term of the other's, and no power of the scale."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Container, Iterator, Mapping
from types import MappingProxyType

import onnx_ir as ir
from onnx_ir.passes.common import InlinePass

from graphscale.checks.patterns import input_at
from graphscale.checks.relation.term_numbering import Numbering, shape_of
from graphscale.checks.relation.terms import Number, Operation, Source, Terms
from graphscale.flow.degree import ZERO
from graphscale.graph.inference import infer_types
from graphscale.graph.values import node_name, values_by_name
from graphscale.operators import Trait, nodes_with

__all__ = ["Given", "Relation", "Side", "find_cases", "no_numbers"]

# Operators on flags, with a result that decides their operands.
_DECIDES = {("And", True), ("Or", False), ("Not", True), ("Not", False), ("Identity", True), ("Identity", False)}

_CONDITIONS = 4  # of branches that give a flag; each doubles the cases
_EXPLAINED = 3  # differences; reports show no more

# Gives numbers by the names of values, in a table.
Given = Callable[[Terms], Mapping[str, Number]]


def no_numbers(terms: Terms) -> Mapping[str, Number]:
    """Return no numbers: each input is a source of its own."""
    return {}


def find_cases(model: ir.Model, flag: str) -> Iterator[Mapping[str, bool]]:
    """Yield what is known where a flag is set, by names of values: each case of the branches that give the flag."""
    graph, terms = (copy := _copy(model)).graph, Terms()
    numbers, named = Numbering(terms, copy, {}, rounds=False), values_by_name(graph)
    values = [value for node in graph for value in node.outputs]
    term = numbers.of(named[flag]).term if flag in named else None
    known = {value.name or "": True for value in values if numbers.of(value).term == term}
    givers = (node for node in graph if node.op_type == "If" and any(v.name in known for v in node.outputs))
    conditions = sorted({value.name or "" for node in givers if (value := node.inputs[0]) is not None})
    conditions = conditions if len(conditions) <= _CONDITIONS else []
    for decided in itertools.product((True, False), repeat=len(conditions)):
        case = {**known, **dict(zip(conditions, decided, strict=True))}
        pending = list(case)
        while pending:
            node = named[name].producer() if (name := pending.pop()) in named else None
            if node is not None and (node.op_type, case[name]) in _DECIDES:
                operands = {v.name or "": case[name] != (node.op_type == "Not") for v in node.inputs if v is not None}
                pending += operands.keys() - case.keys()
                case = {**operands, **case}
        yield case


class Relation:
    """Two models, numbered in one table.

    Args:
        first: a model.
        second: a model that should compute the same.
        given: of each model, numbers of values by name, such as the scale and the finite flag of an applied step.
        states: `{input: output}` of the carried state of the first, None for a state written in place.
        rounds: True to join operations whose results may differ in the last bits.
        narrow: the type of the second model's mixed precision, whose casts are left out; see `find_wide`.

    Attributes:
        terms: the table.
        first: the numbers of the first model.
        second: those of the second.
        differs: True if a result was found to differ.
        scaled: True if one was found to differ by a power of the scale alone.
    """

    def __init__(
        self,
        first: ir.Model,
        second: ir.Model,
        given: tuple[Given, Given] = (no_numbers, no_numbers),
        states: Mapping[str, str | None] = MappingProxyType({}),
        *,
        rounds: bool = False,
        narrow: ir.DataType | None = None,
    ) -> None:
        self._explained, self.differs, self.scaled = 0, False, False
        self.terms, models, self._states = Terms(), (_copy(first), _copy(second)), states
        inputs = {value.name for value in models[1].graph.inputs}
        # A state that is an initializer becomes an input of the scaled graph.
        stored = [v for name, v in models[0].graph.initializers.items() if name in inputs and name in states]
        sources = {v: Number(self.terms.add(Source("input", v.name, v.dtype), v.dtype, shape_of(v))) for v in stored}
        # The second time, shapes that one model tells are known in the other one.
        for _ in range(1 + rounds):
            self.first, self.second = (
                Side(
                    model.graph,
                    Numbering(self.terms, model, {**sources, **self._named(model, each)}, rounds=rounds, narrow=small),
                )
                for model, each, small in zip(models, given, (None, narrow), strict=True)
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

    def find_wide(self, allowed: Container[str]) -> tuple[list[str], int]:
        """Find casts and operators of mixed precision beside the operands and results of some operators.

        Args:
            allowed: the names of values of the first model that may be computed in a small type.

        Returns:
            a sentence for each, and the number of casts to the small type.
        """
        first, second = self.first, self.second
        terms = {number.term for value, number in first.results if value.name in allowed}
        return second.find_wide(terms)

    def _compare(self, name: str, wanted: Number, found: Number | None) -> Iterator[str]:
        self.differs = self.differs or found is None or found.term != self._as_wide(wanted.term, found.term)
        if found is None:
            yield f"{name!r} is gone"
        elif found.term != self._as_wide(wanted.term, found.term):
            self._explained += 1
            is_shown = self._explained <= _EXPLAINED
            reason = f": {self._explain(wanted.term, found.term)}" if is_shown else ""
            yield f"{name!r} is computed in another way{reason}"
        elif found.degree != wanted.degree and found.degree not in (0, ZERO):
            self.scaled = True
            yield f"{name!r} carries the loss scale to the power {found.degree:g}"

    def _as_wide(self, term: int, found: int) -> int:
        """Return a term in the wider type of the other one: gradients may leave in float32."""
        dtype = self.terms.dtypes[found]
        if dtype is not ir.DataType.FLOAT or self.terms.dtypes[term] in (dtype, None):
            return term
        cast = Operation("", "Cast", (("to", int(dtype)),), (term,))
        return self.terms.add(cast, dtype, self.terms.shapes[term])

    def _explain(self, wanted: int, found: int) -> str:
        """Return a sentence about the first operations without an equal, each with its operands, which have one."""
        one, other = self.first, self.second
        first, *_ = [*self._without_equal(found, one), found]
        operands = {*self.terms.operands(first)}
        seconds = [*self._without_equal(wanted, other), wanted]
        second = max(seconds, key=lambda term: len(operands & {*self.terms.operands(term)}))
        return f"by {self._describe(first, other)}, and should be by {self._describe(second, one)}"

    def _without_equal(self, term: int, other: Side) -> list[int]:
        known, terms = other.terms, self.terms
        return [t for t in terms.below([term], known) if all(each in known for each in terms.operands(t))]

    def _describe(self, term: int, side: Side) -> str:
        name, read = side.name_of(term), self.terms.operands(term)
        known = [repr(side.name_of(t) or self.terms.label(t)) for t in read]
        return (
            self.terms.label(term) + (f" of {', '.join(known)}" * bool(read)) + (f" at {name!r}" * (name is not None))
        )


class Side:
    """A model of a relation.

    Attributes:
        outputs: the numbers of its outputs by name.
        written: the next values of the states that are written in place, by the state's name.
        graph: its main graph.
        of: the number of a value.
        results: the results of all nodes, those of bodies included, with their numbers.
        terms: all terms from which the outputs and the written states follow.
    """

    def __init__(self, graph: ir.Graph, numbers: Numbering) -> None:
        self.graph, self.of, self._numbers = graph, numbers.of, numbers
        self.results = [(value, numbers.of(value)) for node in graph.all_nodes() for value in node.outputs]
        self.outputs = {value.name or "": numbers.of(value) for value in graph.outputs}
        self.written = dict(self._writes())
        self.terms = set(numbers.terms.below(n.term for n in (*self.outputs.values(), *self.written.values())))

    @functools.cached_property
    def _by_name(self) -> Mapping[str, ir.Value]:
        return values_by_name(self.graph)

    def named(self, name: str) -> Number | None:
        """Return the number of the value with a name; None without one."""
        value = self._by_name.get(name)
        return None if value is None else self.of(value)

    def terms_by_name(self) -> dict[str, int]:
        """Return the terms of the values of the main graph by name."""
        return {name: self.of(value).term for name, value in self._by_name.items()}

    def _writes(self) -> Iterator[tuple[str, Number]]:
        terms, of = self._numbers.terms, self.of
        for node in nodes_with(self.graph, Trait.ACCUMULATOR):
            state, value, flag = node.inputs[0], node.inputs[1], input_at(node, 2)
            assert state is not None and value is not None
            number, decided = of(value), None if flag is None else of(flag).term
            is_set = terms.is_true(decided)
            if node.op_type != "InPlaceAccumulatorV2" or not is_set:
                operands = (of(state).term, number.term, None if is_set else decided)
                key = Operation(node.domain, node.op_type, (), operands)
                number = Number(terms.add(key, state.dtype), number.degree)
            yield state.name or "", number

    def find_wide(self, allowed: Container[int]) -> tuple[list[str], int]:
        """Find casts and operators of mixed precision; `allowed` are the terms that may be rounded."""
        of = self.of
        scaled = {number.term for _, number in self.results if number.degree not in (0, ZERO)}
        outputs, found, count = set(self.graph.outputs), list[str](), 0

        def may_round(value: ir.Value) -> bool:
            number = of(value)
            is_unscaled = number.term in scaled and number.degree == 0
            return number.term in allowed and not is_unscaled

        def is_operand(value: ir.Value) -> bool:
            """Return whether all readers of a cast, behind further casts, may round."""
            readers = [use.node for use in value.uses()]
            return value not in outputs and all(
                all(is_operand(each) if reader.op_type == "Cast" else may_round(each) for each in reader.outputs)
                for reader in readers
            )

        for node in self.graph.all_nodes():
            source = node.inputs[0] if node.inputs else None
            if self._numbers.narrows(node) and source is not None:
                count += 1
                is_right = may_round(source) or (bool(node.outputs[0].uses()) and is_operand(node.outputs[0]))
            else:
                computed = (value for value in node.outputs if value.dtype is self._numbers.narrow)
                is_right = node.op_type in ("Cast", "Constant") or all(map(may_round, computed))
            if not is_right:
                found.append(f"{node_name(node)!r} rounds a value that should stay float32")
        return found, count

    def name_of(self, term: int) -> str | None:
        """Return the name of a value with a term."""
        return self._names.get(term)

    @functools.cached_property
    def _names(self) -> dict[int, str | None]:
        values = [value for node in self.graph for value in node.outputs]
        return {self.of(value).term: value.name for value in reversed(values)}


def _copy(model: ir.Model) -> ir.Model:
    """Copy a model, inline its functions, and infer its shapes anew: those that a file declares may be stale.

    Where inference knows no shape, or no size, as behind optimizers of ONNX Runtime, the declared one stays.
    """
    copy = model.clone()
    if copy.functions:
        InlinePass()(copy)
    declared = {v: v.shape for node in copy.graph.all_nodes() for v in node.outputs}
    for value in declared:
        value.shape = None
    infer_types(copy)
    for value, shape in declared.items():
        value.shape = _complete(value.shape, shape)
    return copy


def _complete(inferred: ir.Shape | None, declared: ir.Shape | None) -> ir.Shape | None:
    """Return an inferred shape, its unknown axes as declared."""
    if inferred is None or declared is None or len(inferred) != len(declared):
        return declared if inferred is None else inferred
    # onnx names what it cannot infer.
    unknown = [isinstance(axis, ir.SymbolicDim) and (axis.value or "unk__").startswith("unk__") for axis in inferred]
    return ir.Shape([b if is_open else a for a, b, is_open in zip(inferred, declared, unknown, strict=True)])
