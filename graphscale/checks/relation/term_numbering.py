"""The numbers of all values of a graph: terms in normal form, and degrees by the rules of the operator table."""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence

import numpy as np
import onnx
import onnx.reference
import onnx_ir as ir

from graphscale.checks.relation import layout_forms  # noqa: F401  (its normal forms)
from graphscale.checks.relation.forms import Call, build
from graphscale.checks.relation.shape_inference import infer_results, sizes_of
from graphscale.checks.relation.terms import Number, Operation, Shape, Source, Terms
from graphscale.flow.degree import ZERO, Degree, DegreeDomain, Mixed
from graphscale.flow.term import attribute_key
from graphscale.graph.cones import carried_by
from graphscale.graph.values import constant_tensor, has_bodies, own_dtype, subgraphs
from graphscale.operators import Trait, has_trait, optimizer_of

__all__ = ["Numbering", "shape_of"]

_FOLDED = 4096  # elements of a folded result
_PLAIN = (ir.AttributeType.INT, ir.AttributeType.FLOAT, ir.AttributeType.STRING)
_LISTS = (ir.AttributeType.INTS, ir.AttributeType.FLOATS, ir.AttributeType.STRINGS)


class Numbering:
    """The numbers of the values of a model.

    Args:
        terms: the table.
        model: the model, without calls of model-local functions.
        given: the numbers of some values, such as the scale and the finite flag.
        rounds: True to use normal forms that round differently.
        narrow: a type of mixed precision, whose casts from and to float32 are left out.
    """

    def __init__(
        self,
        terms: Terms,
        model: ir.Model,
        given: Mapping[ir.Value, Number],
        *,
        rounds: bool,
        narrow: ir.DataType | None = None,
    ) -> None:
        self.terms, self.narrow = terms, narrow
        self._given, self._opsets, self._rounds = dict(given), model.opset_imports, rounds
        self._numbers: dict[ir.Value, Number] = {}
        self._degrees = DegreeDomain()
        self._level = 0
        self._draws = Counter[Hashable]()
        self._outputs = set(model.graph.outputs)
        self._visit(model.graph)

    def of(self, value: ir.Value) -> Number:
        """Return the number of a value."""
        found = self._numbers.get(value)
        if found is None:
            found = self._numbers[value] = self._given.get(value) or self._source(value)
        return found

    def _source(self, value: ir.Value) -> Number:
        tensor = constant_tensor(value)
        if tensor is None:
            return Number(self.terms.add(Source("input", value.name, value.dtype), value.dtype, shape_of(value)))
        term = self.terms.constant(tensor)
        if tensor.dtype is self.narrow:
            term = self.terms.wide_constant(term)
        return Number(term, ZERO if self._degrees.is_zero(value) else 0)

    def _visit(self, nodes: Iterable[ir.Node]) -> None:
        for node in nodes:
            for value, number in zip(node.outputs, self._results(node), strict=True):
                self._numbers[value] = self._given.get(value, number)

    def _results(self, node: ir.Node) -> Sequence[Number]:
        if node.op_type == "Constant" and not node.domain:
            return [self._source(node.outputs[0])]
        operands = [None if value is None else self.of(value) for value in node.inputs]
        if not subgraphs(node):
            return self._operation(node, operands)
        if node.op_type == "If" and not node.domain:
            return self._selection(node, operands)
        if has_bodies(node):
            return self._rounds_of(node, operands)
        return [Number(self.terms.unknown(f"the body of {node.name!r}", value.dtype)) for value in node.outputs]

    def _operation(self, node: ir.Node, operands: Sequence[Number | None]) -> Sequence[Number]:
        terms = [None if n is None else n.term for n in operands]
        degrees = [0 if n is None else n.degree for n in operands]
        if node.op_type == "Where" and terms[0] in (self.terms.true, self.terms.false):
            degrees[1:] = [degrees[1 if terms[0] == self.terms.true else 2]] * 2
        elements = self._degrees.transfer(node, degrees)
        if self.narrows(node) and operands[0] is not None:
            return [operands[0]]
        optimizer = optimizer_of(node)
        signal = None if optimizer is None else optimizer.update_signal
        if signal is not None and signal < len(terms) and self.terms.is_true(terms[signal]):
            terms[signal] = None  # an omitted signal says the same
        types = self._types(node, terms)
        if len(elements) == 1 and not isinstance(elements[0], Mixed):
            folded = self._fold(node, terms, *types[0])
            if folded is not None:
                return [Number(folded, ZERO if self.terms.holds(folded, 0) else elements[0])]
        attributes, results = self._attributes(node), []
        if has_trait(node, Trait.RANDOM):  # draws of equal operators differ by their order
            key = (self._level, node.op_identifier(), *attributes.items(), *terms)
            attributes[""] = self._draws[key]
            self._draws[key] += 1
        for index, (value, element, known) in enumerate(zip(node.outputs, elements, types, strict=True)):
            if isinstance(element, Mixed):
                results.append(Number(self.terms.unknown(element.reason, known[0])))
                continue
            call = Call(
                *(self.terms, node.domain, node.op_type, attributes, terms, index, *known),
                is_final=value in self._outputs,
                rounds=self._rounds,
            )
            results.append(Number(build(call), element))
        return results

    def _wide(self, dtype: ir.DataType | None) -> ir.DataType | None:
        return ir.DataType.FLOAT if dtype is not None and dtype is self.narrow else dtype

    def narrows(self, node: ir.Node) -> bool:
        """Return whether a node is a cast from float32 to the type of mixed precision."""
        to = node.attributes.get_int("to", 0) if self.narrow is not None and node.op_type == "Cast" else 0
        value = node.inputs[0] if to and to == self.narrow else None
        return value is not None and self.terms.dtypes[self.of(value).term] is ir.DataType.FLOAT

    def _types(self, node: ir.Node, operands: Sequence[int | None]) -> list[tuple[ir.DataType | None, Shape]]:
        """Return the type and the shape of each result, by the file and by its operands."""
        said = [(self._wide(own_dtype(value)), shape_of(value)) for value in node.outputs]
        if all(dtype is not None and sizes_of(shape) is not None for dtype, shape in said):
            return said
        told = infer_results(self.terms, node, operands, self._opsets)
        known = [told.get(value.name or "", (None, None)) for value in node.outputs]
        pairs = zip(said, known, strict=True)
        return [(one[0] or other[0], one[1] if other[1] is None else other[1]) for one, other in pairs]

    def _fold(
        self, node: ir.Node, operands: Sequence[int | None], dtype: ir.DataType | None, shape: Shape
    ) -> int | None:
        """Return the term of the result of an operator on small constants; None for other nodes."""
        arrays = {
            v.name or "": self.terms.array(t) for v, t in zip(node.inputs, operands, strict=True) if v is not None
        }
        if node.domain or not arrays or any(array is None for array in arrays.values()) or len(node.outputs) != 1:
            return None
        sizes = sizes_of(shape)
        # A short file can ask for a large result, such as an expansion.
        if has_trait(node, Trait.RANDOM) or "" in arrays or sizes is None or math.prod(sizes) > _FOLDED:
            return None
        try:
            evaluator = onnx.reference.ReferenceEvaluator(ir.serde.serialize_node(node), opsets=dict(self._opsets))
            (result,) = map(np.asarray, evaluator.run(None, arrays))
        except Exception:  # the evaluator has errors of all kinds; then the operator stays
            return None
        is_right = dtype is None or dtype.numpy() == result.dtype
        return self.terms.array_term(result) if is_right else None

    def _attributes(self, node: ir.Node) -> dict[str, Hashable]:
        held = node.attributes.data
        if not held:
            return {}
        defaults = _defaults(node.domain, node.op_type, self._opsets.get(node.domain, 1))
        found = {name: _plain(value) for name, value in held.items() if value.type is not ir.AttributeType.GRAPH}
        return {name: value for name, value in found.items() if name not in defaults or defaults[name] != value}

    # --- bodies ---

    def _body(self, body: ir.Graph) -> list[Number]:
        self._visit(body)
        return [self.of(value) for value in body.outputs]

    def _selection(self, node: ir.Node, operands: Sequence[Number | None]) -> Sequence[Number]:
        graphs = {a.name: a.as_graph() for a in node.attributes.values() if a.type is ir.AttributeType.GRAPH}
        branches = [graphs["then_branch"], graphs["else_branch"]]
        # If a result is known, such as the flag of an applied step, so it is in both branches.
        for value, *ends in zip(node.outputs, *(branch.outputs for branch in branches), strict=True):
            self._given.update((end, self._given[value]) for end in ends if value in self._given)
        condition = None if operands[0] is None else operands[0].term
        if condition in (self.terms.true, self.terms.false):
            return self._body(branches[condition == self.terms.false])
        pairs = zip(*map(self._body, branches), node.outputs, strict=True)
        return [self._join(node, condition, *pair) for pair in pairs]

    def _join(self, node: ir.Node, condition: int | None, one: Number, other: Number, value: ir.Value) -> Number:
        degrees = _meet(one.degree, other.degree)
        if degrees is None:
            return Number(self.terms.unknown(f"the branches of {node.name!r} disagree on the scale", value.dtype))
        if one.term == other.term:
            return Number(one.term, degrees[0])
        key = Operation("", "If", (), (condition, one.term, other.term))
        return Number(self.terms.add(key, own_dtype(value), shape_of(value)), degrees[0])

    def _rounds_of(self, node: ir.Node, operands: Sequence[Number | None]) -> Sequence[Number]:
        """Visit the body of a Loop or a Scan with arguments for its inputs, until their degrees stand."""
        (body,), (first, count, ahead) = subgraphs(node), carried_by(node)
        given = [n if n is None or i > 0 or not ahead else None for i, n in enumerate(operands)]
        degrees: list[Degree] = [0 if n is None else n.degree for n in given]
        degrees += [0] * (len(body.inputs) - len(degrees))
        self._level += 1
        while True:
            for i, (value, degree) in enumerate(zip(body.inputs, degrees, strict=False)):
                shape = shape_of(value)
                source = Source("argument", (self._level, i, shape), value.dtype)
                self._numbers[value] = Number(self.terms.add(source, value.dtype, shape), degree)
            results = self._body(body)
            met = [_meet(degrees[first + j], results[ahead + j].degree) for j in range(count)]
            risen = [degrees[first + j] if each is None else each[0] for j, each in enumerate(met)]
            if None in met or risen == degrees[first : first + count]:
                break
            degrees[first : first + count] = risen
        self._level -= 1
        if None in met:
            reason = f"the rounds of {node.name!r} disagree on the scale"
            return [Number(self.terms.unknown(reason, value.dtype)) for value in node.outputs]
        above = tuple(None if n is None else n.term for n in operands)
        carried = tuple(n.term for n in results[: ahead + count])
        found, attributes = [], tuple(sorted(self._attributes(node).items()))
        for j, value in enumerate(node.outputs):
            result = results[ahead + j]
            key = Operation(node.domain, node.op_type, attributes, (*above, None, *carried, result.term), j)
            degree = degrees[first + j] if j < count else result.degree
            found.append(Number(self.terms.add(key, own_dtype(value), shape_of(value)), degree))
        return found


def _meet(one: Degree, other: Degree) -> tuple[Degree] | None:
    """Return the common degree, in a tuple, or None."""
    known = {one, other} - {ZERO}
    return None if len(known) > 1 else (next(iter(known), ZERO),)


def shape_of(value: ir.Value) -> Shape:
    """Return the shape of a value; None if one of its axes is unknown."""
    if value.shape is None:
        return None
    axes = tuple(axis if isinstance(axis, int) else axis.value for axis in value.shape)
    return None if None in axes else axes  # type: ignore[return-value]


def _plain(attribute: ir.Attr) -> Hashable:
    if attribute.is_ref():
        return ("reference", attribute.ref_attr_name)
    if attribute.type in _PLAIN:
        return attribute.value  # type: ignore[no-any-return]
    return tuple(attribute.value) if attribute.type in _LISTS else attribute_key(attribute)


@functools.cache
def _defaults(domain: str, op_type: str, version: int) -> Mapping[str, Hashable]:
    """Return the default values of an operator's attributes."""
    try:
        schema = onnx.defs.get_schema(op_type, version, domain)
    except onnx.defs.SchemaError:
        return {}
    held = ((name, each.default_value) for name, each in schema.attributes.items() if each.default_value.name)
    return {name: _plain(ir.serde.deserialize_attribute(value)) for name, value in held}
