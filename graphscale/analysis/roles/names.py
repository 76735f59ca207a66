"""Evidence by names, weak and never needed: it chooses among proposals."""

from __future__ import annotations

import itertools
import re

import onnx_ir as ir

__all__ = ["common_words", "likeness", "words_of"]


def likeness(value: ir.Value, output: ir.Value) -> tuple[float, int]:
    """Return how much of an input's name an output's name begins or ends with, in words: a share, and a length."""
    name, other = words_of(value), words_of(output)
    common = max(_length(common_words(name, other)), _length(common_words(name[::-1], other[::-1])))
    return common / max(_length(name), 1), common


def words_of(value: ir.Value) -> list[str]:
    """Return the words, the numbers and what stands between them in a value's name."""
    return re.findall(r"[^\W\d_]+|\d+|[\W_]+", value.name or "")


def common_words(one: list[str], other: list[str]) -> list[str]:
    """Return the words that two names begin with."""
    return [word for word, same in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))]


def _length(words: list[str]) -> int:
    """Return the length of words; numbers alone have none."""
    return sum(map(len, words)) if any(map(str.isalpha, words)) else 0
