"""The matching of outputs with inputs by elimination."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import TypeVar

__all__ = ["eliminate"]

_Output = TypeVar("_Output")
_Input = TypeVar("_Input")


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
