"""Python values of a user's objects and functions: each change is found, and numbers can be put back."""

from __future__ import annotations

import functools
import itertools
import random
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from graphscale.exporters.python_state import changed, read_values, restore

COUNTS = [0]
DRAWS = np.random.default_rng(0)


class Holder:
    """An object with a value, of its own or of the class."""

    total = 0

    def __init__(self, value: Any = None) -> None:
        self.value = value

    def count(self) -> None:
        COUNTS[0] += 1

    def draw(self) -> None:
        DRAWS.random()


def counting() -> Callable[[], None]:
    calls = 0

    def call() -> None:
        nonlocal calls
        calls += 1

    return call


def remembering(cache: list[int] = COUNTS) -> None:
    cache[0] += 1


def set_value(value: Any) -> Callable[[Any], None]:
    return lambda holder: setattr(holder, "value", value)


CASES: dict[str, tuple[Callable[[], Any], Callable[[Any], Any], list[str]]] = {
    "an attribute": (lambda: Holder(1), set_value(2), ["value"]),
    "a new attribute": (lambda: Holder(1), lambda holder: setattr(holder, "more", 2), ["more"]),
    "an item": (
        lambda: Holder({"a": [1, 2]}),
        lambda holder: holder.value["a"].append(3),
        ["value['a']", "value['a'][2]"],
    ),
    "a set": (lambda: Holder({1}), lambda holder: holder.value.add(2), ["value"]),
    "an array": (lambda: Holder(np.zeros(2)), lambda holder: holder.value.fill(1), ["value"]),
    "an inner object": (lambda: Holder(types.SimpleNamespace(n=1)), lambda h: vars(h.value).update(n=2), ["value.n"]),
    "an equal tuple": (lambda: Holder((1, 2)), lambda holder: setattr(holder, "value", (1, 3 - 1)), []),
    "the class": (Holder, lambda _: setattr(Holder, "total", Holder.total + 1), ["Holder.total"]),
    "a global of a method": (Holder, lambda holder: holder.count(), ["COUNTS[0]"]),
    "a global generator": (Holder, lambda holder: holder.draw(), ["DRAWS"]),
    "a generator": (lambda: Holder(random.Random(0)), lambda holder: holder.value.random(), ["value"]),
    "a state of numpy": (lambda: Holder(np.random.RandomState(0)), lambda holder: holder.value.rand(), ["value"]),
    "a count": (lambda: Holder(itertools.count()), lambda holder: next(holder.value), ["value"]),
    "a closure": (counting, lambda call: call(), ["calls"]),
    "a part of a function": (lambda: functools.partial(counting()), lambda call: call(), ["calls"]),
    "a default": (lambda: remembering, lambda call: call(), ["cache[0]"]),
    "nothing": (lambda: Holder([1, None, "a", {2: 3.0}]), lambda holder: None, []),
}


@pytest.mark.parametrize("case", CASES)
def test_a_change_is_found(case: str) -> None:
    make, change, names = CASES[case]
    root = make()

    def read() -> Any:
        return read_values({"": root}, lambda _: None)

    before = read()
    assert read() == before
    change(root)
    found = [each.name for each in changed(before, read())]
    assert found[: len(names)] == names and bool(found) == bool(names)


def test_numbers_are_put_back() -> None:
    root, call = Holder([1, "a"]), counting()

    def read() -> Any:
        return read_values({"": root, "call": call}, lambda _: None)

    before = read()
    root.value[0], Holder.total = 5, Holder.total + 3
    call()
    root.count()
    restore(before, read())
    assert read() == before and root.value == [1, "a"]


def test_objects_that_hold_each_other() -> None:
    first, second = Holder(), Holder()
    first.value, second.value = second, first
    assert not changed(read_values({"": first}, lambda _: None), read_values({"": first}, lambda _: None))
