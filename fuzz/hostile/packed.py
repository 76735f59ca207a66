"""Packed records and archives that unpack to gigabytes."""

from __future__ import annotations

import base64
import functools
import io
import random
import struct
import zipfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from fuzz.hostile import bench
from fuzz.hostile.processes import hold
from graphscale.files.ort_checkpoint import Checkpoint, OptimizerGroup, _Writer
from tests.cli.bad_graphs import sgd

_GIB = 2**30
_PIECE = 2**24  # bytes of zeros that are packed at once


def field(number: int, data: bytes) -> bytes:
    """Return a field of a protocol buffer that holds bytes."""
    return varint(number << 3 | 2) + varint(len(data)) + data


def varint(value: int) -> bytes:
    """Return a number as protocol buffers write it."""
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes([*out, value])


@functools.cache
def _deflate_zeros(size: int, head: bytes) -> tuple[bytes, int, int]:
    """Pack a head and zeros; return the packed bytes, the CRC and the Adler checksum of the unpacked ones."""
    packer = zlib.compressobj(9, zlib.DEFLATED, -15)
    begin = packer.compress(head) + packer.flush(zlib.Z_FULL_FLUSH)
    piece = packer.compress(bytes(_PIECE)) + packer.flush(zlib.Z_FULL_FLUSH)  # the same each time after a full flush
    crc, adler = zlib.crc32(head), zlib.adler32(head)
    for _ in range(size // _PIECE):
        crc, adler = zlib.crc32(bytes(_PIECE), crc), zlib.adler32(bytes(_PIECE), adler)
    return begin + piece * (size // _PIECE) + packer.flush(), crc, adler


def _zeros(size: int, head: bytes = b"") -> bytes:
    """Pack a head and zeros by zlib."""
    packed, _, adler = _deflate_zeros(size, head)
    return b"\x78\xda" + packed + struct.pack(">I", adler)


def records(folder: Path, choices: random.Random) -> str | None:
    """Forge the record of the original, or metadata, such that it unpacks to gigabytes or nests deeply."""
    words, path = bench.choose(choices, folder, "step.onnx", "training_model.onnx", "fused.onnx")
    model = onnx.load(path)
    metadata = {item.key: item for item in model.metadata_props}
    kind = choices.randrange(5)
    key = "graphscale.original"
    match kind:
        case 0:
            size = choices.choice((2**28, _GIB, 3 * _GIB))
            value = base64.b64encode(_zeros(size)).decode()
        case 1:
            # A text of gigabytes in a sound model.
            size = choices.choice((2**28, _GIB))
            head = sgd().SerializeToString() + varint(6 << 3 | 2) + varint(size)
            value = base64.b64encode(_zeros(size, head)).decode()
        case 2:
            content = sgd().SerializeToString() + empty_parts(choices, choices.choice((10**5, 10**6, 10**7, 2 * 10**7)))
            value = base64.b64encode(zlib.compress(content, 1)).decode()
        case 3:
            key = choices.choice(("graphscale.report", "graphscale.names", "graphscale.state", "graphscale.policy"))
            value = choices.choice(
                ("[" * 10**7, '{"a":' * 10**6, "[" + "0," * 5 * 10**6 + "0]", "9" * 10**7, '"' * 10**7)
            )
        case _:
            key = choices.choice(
                ("graphscale.original", "graphscale.report", "graphscale.telemetry", "graphscale.roles")
            )
            value = "A" * choices.choice((10**7, 10**8))
    if key in metadata:
        metadata[key].value = value
    else:
        model.metadata_props.add(key=key, value=value)
    path.write_bytes(model.SerializeToString())
    fault = hold(words, folder)
    return fault and f"kind {kind} of records, {key}: {fault}"


# Paths of field numbers to a repeated field: nodes, initializers, types, metadata,
# quantization, opsets, training_info, functions; attributes, inputs, metadata and bodies of a node.
PARTS = ((7, 1), (7, 5), (7, 13), (7, 16), (14,), (7, 14), (8,), (20,), (25,))
PARTS += ((7, 1, 5), (7, 1, 1), (7, 1, 9), (7, 1, 5, 11))


def empty_parts(path: Sequence[int], count: int) -> bytes:
    """Return parts of a model without content: two bytes become an object each."""
    *outer, last = path
    content = field(last, b"") * count
    for number in reversed(outer):
        content = field(number, content)
    return content


def _npy_head(count: int, kind: bytes = b"'<f4'") -> bytes:
    header = b"{'descr': %s, 'fortran_order': False, 'shape': (%d,), }\n" % (kind, count)
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header


def _archive(name: str, size: int, lies: bool) -> bytes:
    """Return an archive with one array of zeros; one that lies claims to unpack to a few bytes."""
    head = _npy_head(size // 4)
    packed, crc, _ = _deflate_zeros(size, head)
    label = f"{name}.npy".encode()
    sizes = struct.pack("<IIIHH", crc, len(packed), 100 if lies else size + len(head), len(label), 0)
    local = b"PK\x03\x04" + struct.pack("<HHHHH", 20, 0, 8, 0, 0) + sizes + label + packed
    central = b"PK\x01\x02" + struct.pack("<HHHHHH", 20, 20, 0, 8, 0, 0) + sizes + bytes(14) + label
    end = struct.pack("<HHHHIIH", 0, 0, 1, 1, len(central), len(local), 0)
    return local + central + b"PK\x05\x06" + end


@functools.cache
def _many_members(count: int) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for i in range(count):
            archive.writestr(f"m{i}.npy", b"")
    return buffer.getvalue()


def archives(folder: Path, choices: random.Random) -> str | None:
    """Pack gigabytes of zeros, or a hundred thousand members, into an .npz file; lie about the size."""
    words, path = bench.choose(choices, folder, ".npz")
    with np.load(path) as stored:
        name = choices.choice(stored.files)
    kind = choices.choice(("zeros", "zeros", "lie", "many", "shape", "no bytes"))
    if kind == "no bytes":
        element = choices.choice((b"[('a','>f4',(0,))]", b"'S0'", b"'U0'", b"'V0'", b"('>f4',(0,))", b"[]"))
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr(f"{name}.npy", _npy_head(choices.choice((2**60, 2**40)), element))
    elif kind == "shape":
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr(f"{name}.npy", _npy_head(choices.choice((15 * 10**9, 2**58, 2**29))) + bytes(99))
    elif kind == "many":
        path.write_bytes(_many_members(100_000))
    else:
        path.write_bytes(_archive(name, choices.choice((2**28, _GIB - _PIECE, 3 * _GIB)), kind == "lie"))
    fault = hold(words, folder)
    return fault and f"an archive of kind {kind}: {fault}"


class _Sharer(_Writer):
    """Writes the bytes and the vectors of tensors once."""

    def __init__(self) -> None:
        super().__init__()
        self._made = dict[int, Any]()

    def _once(self, thing: object, make: Callable[[], Any]) -> Any:
        if id(thing) not in self._made:
            self._made[id(thing)] = make()
        return self._made[id(thing)]

    def _tensors(self, tensors: Mapping[str, Any]) -> Any:
        return self._once(tensors, lambda: super(_Sharer, self)._tensors(tensors))

    def _tensor(self, name: str, array: Any) -> Any:
        raw = self._once(array, lambda: self._builder.CreateByteVector(array.tobytes()))
        label, dims = self._string(name), self._builder.CreateNumpyVector(np.asarray(array.shape, np.int64))
        return self._table("Tensor", Name=label, Dims=dims, DataType=1, RawData=raw)


def share(tensors: int, size: int, states: int = 0) -> bytes:
    """Return a checkpoint with one content for all tensors, and one set of tensors for all optimizer states."""
    held = dict.fromkeys((f"p{i}" for i in range(tensors)), np.zeros(size // 4, np.float32))
    groups = {"g": OptimizerGroup(1, 0.1, dict.fromkeys((f"p{i}" for i in range(states)), held))} if states else {}
    return _Sharer().checkpoint(Checkpoint(held, {}, groups=groups))
