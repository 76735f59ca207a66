"""Damaged arrays, tensors and JSON that are hostile to parsers."""

from __future__ import annotations

import io
import json
import random
import struct
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from google.protobuf.message import Message

from fuzz.hostile.state_files import HOSTILE
from tests.fuzzing.damage_bytes import damage_bytes

# --- .npz and .npy ----------------------------------------------------------------------------------------------------

_SHAPES = (
    *("(15000000000,)", "(2**62,)", "(4611686018427387904,)", "(9223372036854775807, 2)", "(99999999999999999999,)"),
    *("(-1,)", "(0, -1)", "(1e400,)", "(None,)", "()", "(True,)", "3", "('a',)", "(1,)*9999", "((1,),)"),
    *("(0, 4611686018427387904)", f"({'1, ' * 65})", f"({'1, ' * 5000})", f"({'9' * 5000},)"),
)
_DESCRIPTIONS = (
    *("'<f4'", "'|O'", "'<U9'", "'|S0'", "'<M8[ns]'", "'|V99'", "'<f16'", "'<c16'", "'>f4'", "'|b1'", "'<U2000000000'"),
    *("[('a', '<f4')]", "'x'", "None", "''", "'O'", "[]", "'<f4' * 9", "'<q'", "'(2,2)<f4'", "'|V2147483647'"),
)


def npy_header(choices: random.Random) -> bytes:
    """Return an .npy file with a hostile header."""
    text = f"{{'descr': {choices.choice(_DESCRIPTIONS) if choices.random() < 0.5 else _DESCRIPTIONS[0]}, "
    text += f"'fortran_order': {choices.choice(('False', 'True', '0', 'None'))}, "
    text += f"'shape': {choices.choice(_SHAPES)}, }}"
    if choices.random() < 0.2:
        nested = "(" * choices.choice((50, 150, 5000))
        text = choices.choice((nested, "{" * 5000, "\0" * 99, "'" * 9999, text * 999, "__import__('os')", "{}", "1"))
    version = choices.choice((1, 1, 2, 3, 9))
    data = text.encode() + b"\n"
    length = len(data) if choices.random() < 0.8 else choices.choice((0, 2**16 - 1, 2**31, 2**32 - 1))
    packed = struct.pack("<H", min(length, 2**16 - 1)) if version == 1 else struct.pack("<I", length)
    return b"\x93NUMPY" + bytes([version, 0]) + packed + data + choices.randbytes(choices.choice((0, 16, 4096)))


def npz(path: Path, choices: random.Random) -> None:
    """Damage an .npz file: methods, flags, sizes, headers, objects, members."""
    with zipfile.ZipFile(path) as archive:
        content = {name: archive.read(name) for name in archive.namelist()}
    chosen = choices.choice([*content])
    kind = choices.randrange(6)
    if kind == 0:
        content[chosen] = npy_header(choices)
    elif kind == 1:
        objects: Any = np.array([{}, choices.choice((None, "x", 2**70, path))], dtype=object)
        content[chosen] = _npy(objects)
    elif kind == 2:
        content[choices.choice((f"../{chosen}", f"/{chosen}", "a/", "", ".npy", f"{chosen}.npy", "x" * 60000))] = b"x"
    elif kind == 3:
        content[chosen] = _npy(choices.choice(_arrays()))
    with zipfile.ZipFile(path, "w", choices.choice((zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED))) as archive:
        for name, data in content.items():
            archive.writestr(zipfile.ZipInfo(name), data)
    if kind >= 4:
        path.write_bytes(_damaged_archive(bytearray(path.read_bytes()), choices))


def _npy(array: np.ndarray[Any, Any]) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, array, allow_pickle=True)
    return buffer.getvalue()


def _arrays() -> list[np.ndarray[Any, Any]]:
    return [
        np.array(["a", "b"]),
        np.array([b"a"]),
        np.array(["2020-01-01"], "M8[D]"),
        np.zeros(3, [("a", "f4"), ("b", "O")])[["a"]],
        np.array(1j),
        np.float16(1) * np.ones(2, np.float16),
        np.array([np.nan, np.inf]),
        np.zeros((0, 4)),
        np.zeros((1,) * 32),
        np.array(2**63, np.uint64),
        np.longdouble([1]),
        np.array(True),
    ]


def _damaged_archive(data: bytearray, choices: random.Random) -> bytes:
    """Change a flag, a method, a size, an offset or a count in the headers of an archive."""
    # Signature of a header, and the places in it with their formats.
    fields = {
        b"PK\x03\x04": {4: "<H", 6: "<H", 8: "<H", 14: "<I", 18: "<I", 22: "<I", 26: "<H", 28: "<H"},
        b"PK\x01\x02": {6: "<H", 8: "<H", 10: "<H", 16: "<I", 20: "<I", 24: "<I", 28: "<H", 30: "<H", 42: "<I"},
        b"PK\x05\x06": {4: "<H", 8: "<H", 10: "<H", 12: "<I", 16: "<I", 20: "<H"},
    }
    for _ in range(choices.choice((1, 1, 2))):
        signature = choices.choice([*fields])
        places = [at for at in range(len(data)) if data.startswith(signature, at)]
        place, form = choices.choice([*fields[signature].items()])
        values = (
            0,
            1,
            8,
            9,
            12,
            14,
            93,
            95,
            99,
            2**11,
            2**16 - 1,
            0xFFFF,
            *(() if form == "<H" else (2**31, 2**32 - 1)),
        )
        for at in places if choices.random() < 0.5 else [choices.choice(places)]:
            struct.pack_into(form, data, at + place, choices.choice(values))
    return bytes(data)


# --- tensors ----------------------------------------------------------------------------------------------------------

_SIZES = (-1, -(2**63), 0, 1, 2**31, 2**40, 2**62, 2**63 - 1)
_NUMBERS = ("-1", "0", "1e3", "x", "", str(2**63), str(2**70), "9" * 5000, "\0", " 4", "4\n", "0x10", "٣")
_LOCATIONS = ("a\0b", "\0", "", ".", "..", "/", "missing", "./", "x" * 300, "a/" * 3000, "original.onnx", "\ud7ff", " ")


def spoil_tensor(tensor: onnx.TensorProto, choices: random.Random) -> None:
    """Damage a tensor: its type, shape, content, and where its content is."""
    kind = choices.randrange(6)
    if kind <= 1:
        for name in ("raw_data", "float_data", "int32_data", "int64_data", "string_data", "double_data"):
            tensor.ClearField(name)
        tensor.data_location = onnx.TensorProto.EXTERNAL
        location = choices.choice(_LOCATIONS)
        keys = [("location", location)] * choices.choice((0, 1, 1, 1, 1, 2))
        for key in ("offset", "length", "checksum", "basepath", "other"):
            if choices.random() < 0.4:
                keys.append((key, choices.choice(_NUMBERS)))
        for key, value in keys:
            tensor.external_data.add(key=key, value=value)
    if kind in (1, 2):
        tensor.data_type = choices.choice((onnx.TensorProto.STRING, 0, *range(1, 28), 99, -1))
    elif kind == 3:
        tensor.dims[:] = [choices.choice(_SIZES) for _ in range(choices.choice((0, 1, 2, 9)))]
    elif kind == 4:
        tensor.raw_data = choices.randbytes(choices.choice((0, 1, 3, 4096)))
    elif kind == 5:
        tensor.string_data.extend([b"\xff", b"x" * 999])
        tensor.segment.begin = choices.choice(_SIZES)


def messages(message: Message, kind: type[Any]) -> Iterator[Any]:
    """Yield the messages of a kind within a message."""
    if isinstance(message, kind):
        yield message
    for field, value in message.ListFields():
        if field.message_type is not None:
            for item in value if hasattr(value, "add") else [value]:
                yield from messages(item, kind)


def spoil_sizes(model: onnx.ModelProto, choices: random.Random) -> None:
    """Give axes of values, and elements of constants, hostile sizes."""
    dims = [*messages(model.graph, onnx.TensorShapeProto.Dimension)]
    for dim in choices.sample(dims, min(len(dims), choices.choice((1, 3, len(dims))))):
        dim.dim_value = choices.choice(_SIZES)
    numbers = [
        tensor for tensor in messages(model.graph, onnx.TensorProto) if tensor.data_type == onnx.TensorProto.INT64
    ]
    for tensor in numbers:
        if choices.random() < 0.5:
            count = max(1, int(np.prod(tensor.dims)))
            tensor.raw_data = struct.pack(f"<{count}q", *(choices.choice(_SIZES) for _ in range(count)))
            tensor.ClearField("int64_data")


# --- JSON -------------------------------------------------------------------------------------------------------------

_WHOLE = (
    *(
        b"",
        b"\xff",
        b"\xef\xbb\xbf{}",
        b"\x00",
        "{}".encode("utf-16"),
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b"NaN",
        b"{}",
    ),
    *(
        b"[]",
        b"null",
        b"true",
        b"0",
        b'""',
        b"-",
        b'{"a": 1, "a": 2}',
        b'{"\\ud800": "\\udfff"}',
        b"1" * 10_000,
        b"1e999",
    ),
    *(b"{'a': 1}", b'{"a": 1,}', b"// x\n{}", b"[1, 2", b'"' * 9, b"\n" * 9, b"{}{}", b'{"class_name": {}}', b"[[[]]]"),
)


def json_text(good: bytes, choices: random.Random) -> bytes:
    """Return hostile JSON: another text, or the good one with a value replaced, or damaged."""
    kind = choices.randrange(3)
    if kind == 0:
        return choices.choice(_WHOLE)
    if kind == 1:
        return damage_bytes(good, good, choices)
    mark = "mark-of-a-place"
    spoiled = json.dumps(_marked(json.loads(good), mark, choices))
    return spoiled.replace(f'"{mark}"', choices.choice([*HOSTILE.values()])).encode()


def _marked(value: Any, mark: str, choices: random.Random) -> Any:
    if isinstance(value, dict) and value and choices.random() < 0.85:
        key = choices.choice([*value])
        if choices.random() < 0.15:
            return {other: item for other, item in value.items() if other != key}
        return {**value, key: _marked(value[key], mark, choices)}
    if isinstance(value, list) and value and choices.random() < 0.85:
        at = choices.randrange(len(value))
        return [*value[:at], _marked(value[at], mark, choices), *value[at + 1 :]]
    return mark


def record(good: bytes, choices: random.Random) -> bytes:
    """Return a packed record with damage inside of its packing."""
    content = damage_bytes(zlib.decompress(good), good, choices)
    return zlib.compress(content)
