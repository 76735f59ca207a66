"""The values of a main graph as numbers in execution order, and sets of them as one byte for each.

A walk through all nodes of a large graph is bound by memory: a set of a hundred thousand objects is read at random,
with each object for its hash; a row of bytes is read from one end to the other.
"""

from __future__ import annotations

import bisect
import itertools
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set

import onnx_ir as ir

from graphscale.graph.values import is_source

__all__ = ["Numbering", "Part", "Row", "ValueSet"]

# A node, some of its results, and their operands.
Part = tuple[ir.Node, Sequence[ir.Value], tuple[ir.Value, ...]]

# The node of a part, and numbers: that of its first result, that after its last result, and those of its operands.
Row = tuple[ir.Node, int, int, tuple[int, ...]]


class Numbering:
    """Numbers for the values of a main graph: inputs and initializers first, then the results of node after node.

    Args:
        graph: the main graph.
        parts: nodes with some of their results, and the operands of these, in execution order.
        same: values that are others, with the numbers of these.

    Attributes:
        values: the values, each at its number.
        numbers: the number of each value.
        rows: the parts by numbers.
        ordered: True if each value is an input, an initializer, or computed before all its readers; else the numbers
            are useless.
    """

    def __init__(self, graph: ir.Graph, parts: Iterable[Part], same: Mapping[ir.Value, ir.Value] | None = None) -> None:
        self.values = list(dict.fromkeys((*graph.inputs, *graph.initializers.values())))
        self.numbers = numbers = {value: number for number, value in enumerate(self.values)}
        self.rows: list[Row] = []
        self.ordered = all(value.producer() is not None or is_source(value) for value in graph.outputs)
        end = len(numbers)
        for node, results, values in parts:
            try:
                operands = tuple([numbers[value] for value in values])
            except KeyError:
                unknown = [value for value in dict.fromkeys(values) if value not in numbers]
                if not all(map(is_source, unknown)):
                    self.ordered = False
                    return
                numbers.update(zip(unknown, itertools.count(end), strict=False))
                self.values += unknown
                end = len(numbers)
                operands = tuple([numbers[value] for value in values])
            first = end
            for value in results:
                numbers[value] = end
                end += 1
            self.values += results
            self.rows.append((node, first, end, operands))
        numbers.update((value, numbers[origin]) for value, origin in (same or {}).items() if origin in numbers)

    def count_rows(self, number: int) -> int:
        """Return the number of rows that begin with a value of a number, or before it."""
        return bisect.bisect_right(self.rows, number, key=operator.itemgetter(1))

    def marks(self, values: Iterable[ir.Value] = ()) -> bytearray:
        """Return a byte for each value: 1 for these, else 0; values of subgraphs have none."""
        found, numbers = bytearray(len(self.values)), self.numbers
        for value in values:
            number = numbers.get(value)
            if number is not None:
                found[number] = 1
        return found


class ValueSet(Set[ir.Value]):
    """A view of some values of a main graph; operators such as `&` return Python's sets.

    Args:
        numbering: the numbering of the main graph.
        marks: a byte for each of its values: 1 for those in the set, else 0. Changes of the bytes change the set.
    """

    def __init__(self, numbering: Numbering, marks: bytearray) -> None:
        self._values = numbering.values
        self._numbers = numbering.numbers
        self.marks = marks

    def include(self, values: Iterable[ir.Value]) -> None:
        """Add values of the main graph."""
        for value in values:
            self.marks[self._numbers[value]] = 1

    def exclude(self, values: Iterable[ir.Value]) -> None:
        """Remove values of the main graph."""
        for value in values:
            self.marks[self._numbers[value]] = 0

    def __contains__(self, value: object) -> bool:
        number = self._numbers.get(value)  # type: ignore[call-overload]
        return number is not None and bool(self.marks[number])

    def __iter__(self) -> Iterator[ir.Value]:
        return itertools.compress(self._values, self.marks)

    def __len__(self) -> int:
        return self.marks.count(1)

    @classmethod
    def _from_iterable(cls, values: Iterable[ir.Value]) -> set[ir.Value]:  # type: ignore[override]
        return set(values)
