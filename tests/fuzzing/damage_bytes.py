"""Damage to a file as bytes: what a bad disk, a cut transfer or a wrong tool leaves."""

from __future__ import annotations

import random
from collections.abc import Callable


def damage_bytes(data: bytes, other: bytes, choices: random.Random) -> bytes:
    """A damaged copy of a file.

    Args:
        data: the file.
        other: another file, whose parts may get into it.
        choices: decides what happens.
    """
    kinds: list[Callable[[bytearray, bytes, random.Random], bytes]] = [
        _flip,
        _flip,
        _cut,
        _remove,
        _repeat,
        _overwrite,
        _splice,
        _insert,
        _lengths,
    ]
    return choices.choice(kinds)(bytearray(data), other, choices)


def _flip(data: bytearray, other: bytes, choices: random.Random) -> bytes:
    for _ in range(choices.choice((1, 1, 2, 8, 64))):
        data[choices.randrange(len(data))] ^= 1 << choices.randrange(8)
    return bytes(data)


def _cut(data: bytearray, other: bytes, choices: random.Random) -> bytes:
    return bytes(data[: choices.randrange(len(data))])


def _span(data: bytearray | bytes, choices: random.Random) -> slice:
    start = choices.randrange(len(data))
    return slice(start, start + choices.choice((1, 2, 4, 16, 64, 256)))


def _remove(data: bytearray, other: bytes, choices: random.Random) -> bytes:
    del data[_span(data, choices)]
    return bytes(data)


def _repeat(data: bytearray, other: bytes, choices: random.Random) -> bytes:
    span = _span(data, choices)
    data[span.stop : span.stop] = data[span]
    return bytes(data)


def _overwrite(data: bytearray, other: bytes, choices: random.Random) -> bytes:
    span = _span(data, choices)
    length = len(data[span])
    data[span] = choices.choice((bytes(length), b"\xff" * length, choices.randbytes(length)))
    return bytes(data)


def _splice(data: bytearray, other: bytes, choices: random.Random) -> bytes:
    at = choices.randrange(len(data))
    return bytes(data[:at]) + other[choices.randrange(len(other)) :]


def _insert(data: bytearray, other: bytes, choices: random.Random) -> bytes:
    at = choices.randrange(len(data))
    data[at:at] = choices.choice((choices.randbytes(choices.randrange(1, 32)), other[_span(other, choices)]))
    return bytes(data)


def _lengths(data: bytearray, other: bytes, choices: random.Random) -> bytes:
    """Small bytes are often the tags and lengths of a protocol buffer, or the offsets of a flatbuffer."""
    small = [i for i, byte in enumerate(data) if byte < 64]
    for _ in range(choices.choice((1, 2, 4))):
        data[choices.choice(small)] = choices.choice((0, 1, 0x7F, 0x80, 0xFF, choices.randrange(256)))
    return bytes(data)
