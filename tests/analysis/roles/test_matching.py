"""Pairs by elimination: those in every assignment of different inputs to all outputs."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from graphscale.graph.walks import eliminate

pytestmark = pytest.mark.static

Candidates = dict[str, list[int]]


def pairs(candidates: Candidates) -> dict[str, int]:
    found = list(eliminate(candidates))
    assert len({output for output, _ in found}) == len({value for _, value in found}) == len(found)
    return dict(found)


def test_an_output_with_one_candidate_takes_it_from_the_others() -> None:
    assert pairs({"a": [1, 2, 3], "b": [2, 3], "c": [3]}) == {"a": 1, "b": 2, "c": 3}


def test_the_order_of_outputs_does_not_matter() -> None:
    assert pairs({"c": [3], "b": [3, 2], "a": [3, 1, 2]}) == {"a": 1, "b": 2, "c": 3}


def test_two_outputs_with_the_same_two_candidates_stay_open() -> None:
    assert pairs({"a": [1, 2], "b": [1, 2], "c": [3]}) == {"c": 3}


def test_two_outputs_whose_only_candidate_is_one_input_stay_open() -> None:
    assert pairs({"a": [1], "b": [1], "c": [2]}) == {"c": 2}


def test_an_output_without_a_candidate_takes_part_in_nothing() -> None:
    assert pairs({"a": [], "b": [1]}) == {"b": 1}
    assert pairs({}) == {}


@st.composite
def _candidates(draw: st.DrawFn) -> Candidates:
    inputs = st.lists(st.integers(0, 4), unique=True, max_size=4)
    return {f"o{i}": draw(inputs) for i in range(draw(st.integers(0, 5)))}


def _assignments(candidates: Candidates) -> Iterator[dict[str, int]]:
    outputs = [output for output, values in candidates.items() if values]
    for values in itertools.product(*(candidates[output] for output in outputs)):
        if len(set(values)) == len(values):
            yield dict(zip(outputs, values, strict=True))


@given(_candidates())
def test_every_pair_is_in_every_assignment(candidates: Candidates) -> None:
    found = pairs(candidates)
    for assignment in _assignments(candidates):
        assert found.items() <= assignment.items()


@example({"a": [1], "b": [1, 2], "c": [2]})
@given(_candidates())
def test_the_pairs_do_not_depend_on_the_order(candidates: Candidates) -> None:
    backwards = {output: values[::-1] for output, values in reversed(candidates.items())}
    assert pairs(backwards) == pairs(candidates)


@pytest.mark.full
@given(st.permutations(range(5)), st.data())
def test_a_triangle_is_settled_whole(order: list[int], data: st.DataObject) -> None:
    """The k-th output has one candidate that no earlier one has: one assignment, found by elimination."""
    candidates = {
        f"o{k}": data.draw(st.permutations([order[k], *data.draw(st.sets(st.sampled_from(order[:k] or order[:1])))]))
        for k in range(5)
    }
    candidates = {output: list(dict.fromkeys(values)) for output, values in candidates.items()}
    assert pairs(candidates) == {f"o{k}": order[k] for k in range(5)}
