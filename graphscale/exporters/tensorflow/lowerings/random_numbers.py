"""Random numbers of `tf.random.stateless_*`, bit by bit: Philox 4x32-10 in integer operators.

The seed is an input of the step, so each step draws the numbers that TensorFlow draws. Algorithm: Salmon et al.,
"Parallel random numbers: as easy as 1, 2, 3" (2011); constants, the mixing of the seed and the conversion to floats as
in TensorFlow's philox_random.h, random_distributions_utils.h and stateless_random_ops_v2.cc.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from onnx import TensorProto

from graphscale.exporters.tensorflow.lowerings.lowering_writer import NodeWriter, lower

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_SEED_KEY = (0x3EC8F720, 0x02461E29)
_ROUNDS = 10
_WORD = 0xFFFFFFFF
# The smallest argument of the logarithm.
_LEAST = 1e-7


class _Words:
    """Writes Philox on pairs of 32-bit words, kept as int64 of shape [2, count]."""

    def __init__(self, write: NodeWriter) -> None:
        self.write = write
        self.mask = write.constant(_WORD, np.int64)
        self.swapped = write.integers([1, 0])
        self.multipliers = self.column(_MULTIPLIERS)
        self.half = write.constant(32, np.uint64)

    def column(self, values: Any) -> str:
        return self.write.constant(np.reshape(values, (-1, 1)), np.int64)

    def split(self, value: str) -> tuple[str, str]:
        """Return the upper and the lower word of 64-bit numbers."""
        write = self.write
        whole = write.op("Cast", value, to=TensorProto.UINT64)
        upper = write.op("Cast", write.op("BitShift", whole, self.half, direction="RIGHT"), to=TensorProto.INT64)
        return upper, write.op("BitwiseAnd", value, self.mask)

    def philox(self, even: str, odd: str, key: str) -> tuple[str, str]:
        """Return the words 0 and 2, and the words 1 and 3, after ten rounds."""
        write = self.write
        for number in range(_ROUNDS):
            step = self.column([number * each & _WORD for each in _WEYL])
            own = write.op("BitwiseAnd", write.op("Add", key, step), self.mask)
            upper, lower_word = self.split(write.op("Mul", even, self.multipliers))
            crossed = write.op("Gather", upper, self.swapped, axis=0)
            even = write.op("BitwiseXor", write.op("BitwiseXor", crossed, odd), own)
            odd = write.op("Gather", lower_word, self.swapped, axis=0)
        return even, odd


def _draw(write: NodeWriter, node: Any) -> tuple[str, str, str]:
    """Return a pair of words for each four numbers of the result, and how many numbers that is."""
    source = node.inputs[1]
    while source.type in ("Identity", "IdentityN"):
        source = source.inputs[0]
    if source.type != "StatelessRandomGetKeyCounter":
        raise NotImplementedError("a key of its own")
    words = _Words(write)
    seed = write.reshape(write.op("Cast", source.input[0], to=TensorProto.INT64), [2, 1])
    upper, lower_word = words.split(seed)
    key, counter = words.philox(lower_word, upper, words.column(_SEED_KEY))
    # Word 0 and 1 of the mixture are the key; words 2 and 3 the upper half of the counter.
    first, second = write.integers([0]), write.integers([1])
    low, high = ([write.op("Gather", each, row, axis=0) for each in (key, counter)] for row in (first, second))
    count = write.op("ReduceProd", write.op("Cast", node.input[0], to=TensorProto.INT64), keepdims=0)
    groups = write.op("Div", write.op("Add", count, write.constant(3, np.int64)), write.constant(4, np.int64))
    index = write.op("Range", write.constant(0, np.int64), groups, write.constant(1, np.int64))
    row = write.reshape(index, [1, -1])
    none = write.op("Mul", row, write.constant(0, np.int64))
    even = write.op("Concat", row, write.op("Add", none, high[0]), axis=0)
    odd = write.op("Concat", none, write.op("Add", none, high[1]), axis=0)
    even, odd = words.philox(even, odd, write.op("Concat", *low, axis=0))
    return even, odd, count


def _arrange(write: NodeWriter, node: Any, even: str, odd: str, count: str) -> str:
    """Bring numbers into the order of the words, and into the shape of the result."""
    pairs = [write.op("Unsqueeze", each, write.integers([1])) for each in (even, odd)]
    rows = write.reshape(write.op("Concat", *pairs, axis=1), [4, -1])
    flat = write.reshape(write.op("Transpose", rows, perm=[1, 0]), [-1])
    used = write.op("Slice", flat, write.integers([0]), write.reshape(count, [1]), write.integers([0]))
    return write.op("Reshape", used, write.op("Cast", node.input[0], to=TensorProto.INT64))


def _to_unit(write: NodeWriter, word: str, dtype: Any = None) -> str:
    """Return numbers in [0, 1): as many low bits of a word as a float has in its mantissa."""
    kind = np.dtype(dtype or write.dtype)
    if kind not in (np.float32, np.float16):
        raise NotImplementedError(f"random numbers of {kind}")
    bits = np.finfo(kind).nmant
    low = write.op("BitwiseAnd", word, write.constant(2**bits - 1, np.int64))
    wide = write.op("Cast", low, to=TensorProto.FLOAT)
    unit = write.op("Mul", wide, write.constant(2.0**-bits, np.float32))
    return write.op("Cast", unit, to=TensorProto.FLOAT16) if kind == np.float16 else unit


@lower("StatelessRandomUniformV2")
def uniform(write: NodeWriter, node: Any) -> str:
    """Draw numbers in [0, 1), of float32 or float16."""
    even, odd, count = _draw(write, node)
    return _to_unit(write, _arrange(write, node, even, odd, count))


@lower("StatelessRandomNormalV2")
def normal(write: NodeWriter, node: Any) -> str:
    """Transform pairs of uniform numbers by Box and Muller's formula."""
    if write.dtype != np.float32:
        raise NotImplementedError(f"random numbers of {np.dtype(write.dtype)}")
    even, odd, count = _draw(write, node)
    least = write.op("Max", _to_unit(write, even), write.constant(_LEAST))
    radius = write.op("Sqrt", write.op("Mul", write.op("Log", least), write.constant(-2)))
    angle = write.op("Mul", _to_unit(write, odd), write.constant(2 * math.pi))
    sine, cosine = (write.op("Mul", write.op(name, angle), radius) for name in ("Sin", "Cos"))
    return _arrange(write, node, sine, cosine, count)


@lower("StatelessRandomUniformIntV2")
def uniform_integer(write: NodeWriter, node: Any) -> str:
    """Draw int32 numbers between two bounds: a word, modulo their difference."""
    if write.dtype != np.int32:
        raise NotImplementedError(f"random numbers of {np.dtype(write.dtype)}")
    low, high = (write.op("Cast", node.input[index], to=TensorProto.INT64) for index in (4, 5))
    word = _arrange(write, node, *_draw(write, node))
    number = write.op("Add", low, write.op("Mod", word, write.op("Sub", high, low)))
    return write.op("Cast", number, to=TensorProto.INT32)
