"""Calls in a child process with limits: the result, an error, an end without a word, and too much memory."""

from __future__ import annotations

import json
import os
from typing import Any

import pytest

from graphscale.process.child import ChildError, call_in_child


def echo(value: Any) -> Any:
    return value


def fail() -> None:
    raise ValueError("a\nb")


def end() -> None:
    os._exit(3)


def fill() -> int:
    return len(bytearray(2**31))


HERE = "tests.process.test_child"


def test_a_call_in_a_child() -> None:
    limits: dict[str, int] = {"seconds": 5, "memory": 2**28}
    value = {"text": "é\n" * 100_000}
    assert call_in_child(f"{HERE}:echo", value, **limits) == json.loads(json.dumps(value))
    for name, text in {"fail": "ValueError: a b", "end": "code 3", "fill": "268435456 bytes of memory"}.items():
        with pytest.raises(ChildError, match=text):
            call_in_child(f"{HERE}:{name}", **limits)
