"""Calls in a child process with limits: the result, an error, an end without a word, and too much memory."""

from __future__ import annotations

import contextlib
import gc
import json
import os
from collections.abc import Iterator
from typing import Any

import onnxruntime as ort
import pytest

from graphscale.process.child import ChildError, call_in_child
from tests.conftest import MODELS


def echo(value: Any) -> Any:
    return value


def fail() -> None:
    raise ValueError("a\nb")


def end() -> None:
    os._exit(3)


def fill() -> int:
    return len(bytearray(2**31))


def collect() -> int:
    return gc.collect() and 1


@contextlib.contextmanager
def left_session() -> Iterator[None]:
    """Leave a session of ONNX Runtime, with threads, to the collector, which does not run in this process."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = 4
    gc.disable()
    circle: list[object] = [ort.InferenceSession(MODELS / "jax/mlp.onnx", options, providers=["CPUExecutionProvider"])]
    circle.append(circle)
    del circle
    try:
        yield
    finally:
        gc.enable()


HERE = "tests.process.test_child"


def test_a_session_of_the_caller_is_not_collected_in_the_child() -> None:
    """Its threads are not there."""
    with left_session():
        assert call_in_child(f"{HERE}:collect", seconds=5, memory=2**28) in (0, 1)


def test_a_call_in_a_child() -> None:
    limits: dict[str, int] = {"seconds": 5, "memory": 2**28}
    value = {"text": "é\n" * 100_000}
    assert call_in_child(f"{HERE}:echo", value, **limits) == json.loads(json.dumps(value))
    for name, text in {"fail": "ValueError: a b", "end": "code 3", "fill": "268435456 bytes of memory"}.items():
        with pytest.raises(ChildError, match=text):
            call_in_child(f"{HERE}:{name}", **limits)
