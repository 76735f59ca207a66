"""The degrees claimed for a case, compared with a runtime's results for scaled operands."""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from graphscale.flow.degree import ZERO, Degree
from tests.operators.cases import Case, opsets_of
from tests.operators.claims import Claim, claim_degrees
from tests.operators.runtimes import Run, open_case
from tests.operators.values import Data, find_difference, is_float_data, is_narrow, scale_data, tame_data

# By powers of two, products, quotients and sums are exact, whatever the order of their terms. The number of bytes of
# the smallest type among a node's values says how much room there is.
_FACTORS = {4: (1024.0, 0.125), 2: (8.0, 0.25), 1: (2.0, 0.5)}
# Of more operands than that, each is scaled alone, or with one other, or with all of them.
_COMBINED = 3
# Powers, roots and Fourier transforms of a runtime's library are not the same to the last bit.
_ROUNDED = {"LpPool": 1e-5, "GlobalLpPool": 1e-5, "Pow": 1e-5, "Sqrt": 1e-5, "ReduceL2": 1e-5}

# An output, the factor, and how its value differs.
_Contradiction = tuple[int, float, str]


@dataclasses.dataclass(frozen=True)
class Wrong:
    """A claim that a runtime contradicts."""

    case: str
    operator: tuple[str, str]
    opset: int
    operands: Mapping[str, Degree]
    claimed: Sequence[Degree]
    contradiction: _Contradiction

    def __str__(self) -> str:
        (domain, name), (output, factor, text) = self.operator, self.contradiction
        return (
            f"{self.case}: {domain}{'::' if domain else ''}{name}, opset {self.opset}: operands of degree "
            f"{dict(self.operands)} are claimed to give {tuple(self.claimed)}; output {output}, by {factor:g}: {text}"
        )


@dataclasses.dataclass
class Trial:
    """The outcome for one case.

    Attributes:
        case: the case.
        claims: the number of claims that a runtime was asked about, by opset.
        conflicts: the number of assignments that the table forbids, by opset.
        wrong: the claims that do not hold.
        forbidden: for each set of operands that may have degree 1 in no opset, the degrees of 0 and 1 that all
            outputs have nevertheless; empty unless asked for.
    """

    case: Case
    claims: Counter[int] = dataclasses.field(default_factory=Counter)
    conflicts: Counter[int] = dataclasses.field(default_factory=Counter)
    wrong: list[Wrong] = dataclasses.field(default_factory=list)
    forbidden: dict[tuple[str, ...], set[int]] = dataclasses.field(default_factory=dict)


def try_case(case: Case, claim: Claim = claim_degrees, *, strictness: bool = False) -> Trial:
    """Hold the claims for a case against a runtime.

    Args:
        case: the case.
        claim: the function that makes the claims.
        strictness: measure forbidden assignments, too.

    Raises:
        RefusedError: no runtime runs the case.
    """
    trial = Trial(case)
    measure = _Measure(case)
    nodes = [build_node(case, measure.outputs, typed) for typed in (True, False)]
    opsets = opsets_of(case)
    for operands in _assign_degrees(case):
        answers: dict[tuple[Degree, ...], list[_Contradiction] | None] = {}
        for opset, node in itertools.product(opsets, nodes):
            if not case.operator[0]:
                node.graph.opset_imports[""] = opset
            claimed = claim(node, operands)
            if claimed is None:
                trial.conflicts[opset] += 1
                continue
            if claimed not in answers:
                answers[claimed] = measure.contradict(operands, claimed)
            contradictions = answers[claimed]
            if contradictions is None:
                continue
            trial.claims[opset] += 1
            trial.wrong += [Wrong(case.name, case.operator, opset, operands, claimed, one) for one in contradictions]
        if strictness and not answers and opsets and ZERO not in operands.values():
            trial.forbidden[tuple(operands)] = measure.find_degrees(operands)
    return trial


def build_node(case: Case, outputs: Sequence[Data], typed: bool) -> ir.Node:
    """Build the node with the types of its values or without: a graph need not have them."""
    graph = ir.from_proto(case.model).graph
    for value in (*graph.inputs, *graph.outputs):
        if not typed:
            value.type = value.shape = None
    for value, data in zip(graph.outputs, outputs, strict=True):
        if typed and value.type is None and isinstance(data, np.ndarray):
            value.type = ir.TensorType(ir.DataType.from_numpy(data.dtype))
    return graph.node(0)


def _assign_degrees(case: Case) -> Iterator[dict[str, Degree]]:
    """Choose degrees for the operands that are floating-point numbers, those among them that a subgraph captures."""
    operands = [name for name, value in case.feeds.items() if is_float_data(value)]
    if len(operands) > _COMBINED:
        yield from ({name: degree} for name in operands for degree in (1, ZERO))
        yield from ({one: 1, two: 1} for one, two in itertools.combinations(operands, 2))
        yield dict.fromkeys(operands, 1)
        return
    for degrees in itertools.product((0, 1, ZERO), repeat=len(operands)):
        chosen = {name: degree for name, degree in zip(operands, degrees, strict=True) if degree != 0}
        if chosen:
            yield chosen


class _Measure:
    """A runtime that compares results with those of scaled operands."""

    def __init__(self, case: Case) -> None:
        self._places = [list(case.node.output).index(value.name) for value in case.model.graph.output]
        self._tolerance = _ROUNDED.get(case.operator[1], 0.0)
        self._run: Run = open_case(case)
        self.outputs = self._run(case.feeds)
        values = (*case.feeds.values(), *self.outputs)
        self._factors = _FACTORS[next((size for size in (1, 2) if any(is_narrow(v, size) for v in values)), 4)]
        self._last: tuple[Any, list[tuple[float, list[Data], list[Data] | str]]] = (None, [])
        self._feeds = {name: tame_data(value, max(self._factors)) for name, value in case.feeds.items()}
        if any(self._feeds[name] is not case.feeds[name] for name in self._feeds):
            self.outputs = self._run(self._feeds)

    def contradict(self, operands: Mapping[str, Degree], claimed: Sequence[Degree]) -> list[_Contradiction] | None:
        """Return each output that is not of the claimed degree; None if the operands cannot be scaled like that."""
        pairs = self._run_scaled(operands)
        if not pairs:
            return None
        result: list[_Contradiction] = []
        for factor, outputs, changed in pairs:
            if isinstance(changed, str):
                result.append((0, factor, f"scaled operands are refused: {changed}"))
                continue
            for i, before, after in zip(self._places, outputs, changed, strict=True):
                text = find_difference(before, after, claimed[i], factor, self._tolerance)
                if text:
                    result.append((i, factor, text))
        return result

    def find_degrees(self, operands: Mapping[str, Degree]) -> set[int]:
        """Return the degrees of 0 and 1 that all outputs have."""
        count = max(self._places, default=0) + 1
        degrees = (0, 1) if all(map(is_float_data, self.outputs)) else (0,)
        return {degree for degree in degrees if self.contradict(operands, (degree,) * count) == []}

    def _run_scaled(self, operands: Mapping[str, Degree]) -> list[tuple[float, list[Data], list[Data] | str]]:
        """Return each factor with the results before and after, or with the reason why there are none after."""
        key = tuple(operands.items())
        if key != self._last[0]:
            self._last = key, list(self._iterate_factors(operands))
        return self._last[1]

    def _iterate_factors(self, operands: Mapping[str, Degree]) -> Iterator[tuple[float, list[Data], list[Data] | str]]:
        feeds, outputs = dict(self._feeds), self.outputs
        zeros = {name: scale_data(feeds[name], 0) for name, degree in operands.items() if degree is ZERO}
        if any(value is None for value in zeros.values()):
            return
        if zeros:
            feeds |= zeros
            try:
                outputs = self._run(feeds)
            except Exception:  # the runtimes' exceptions share no public base class
                return
        degrees = {name: degree for name, degree in operands.items() if degree}
        for factor in self._factors if degrees else self._factors[:1]:
            scaled = {name: scale_data(feeds[name], factor**degree) for name, degree in degrees.items()}
            if any(value is None for value in scaled.values()):
                continue
            try:
                yield factor, outputs, self._run(feeds | scaled) if scaled else outputs
            except Exception as error:
                yield factor, outputs, str(error)
