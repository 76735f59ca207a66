"""A checksum of a safetensors file in its own metadata: the SHA-256 of all other bytes.

It shows damage, such as that of a disk or a transfer, but no change on purpose, whose author can compute another.
"""

from __future__ import annotations

import hashlib
import mmap

__all__ = ["BLANK", "KEY", "is_intact", "seal"]

KEY = "graphscale.checksum"
BLANK = "0" * hashlib.sha256().digest_size * 2  # holds the place of the checksum

# JSON escapes quotes inside a text, so that these bytes stand nowhere else.
_MARK = f'"{KEY}":"'.encode()

Buffer = bytes | bytearray | mmap.mmap


def seal(data: bytearray | mmap.mmap) -> None:
    """Write the checksum into the metadata.

    Raises:
        ValueError: the metadata has no place for it.
    """
    place = _find_place(data)
    data[place] = _digest(data, place)


def is_intact(data: Buffer) -> bool:
    """Return whether the checksum fits the content."""
    try:
        place = _find_place(data)
    except ValueError:
        return False
    return data[place] == _digest(data, place)


def _find_place(data: Buffer) -> slice:
    at = data.find(_MARK, 0, 8 + int.from_bytes(data[:8], "little"))
    if at < 0:
        raise ValueError(f"the file has no {KEY}")
    return slice(at + len(_MARK), at + len(_MARK) + len(BLANK))


def _digest(data: Buffer, place: slice) -> bytes:
    with memoryview(data) as view:
        digest = hashlib.sha256(view[: place.start])
        digest.update(view[place.stop :])
    return digest.hexdigest().encode()
