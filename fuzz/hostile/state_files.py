"""Hostile checkpoints of `graphscale train`: flipped bits, cut files, and forged values under a checksum that fits.

    python -m fuzz.hostile.state_files              # every case, some minutes
    python -m fuzz.hostile.state_files --every 50   # every fiftieth

prints how many were tried, and what went wrong. A case must be refused in one line that names the file, or, where its
values are allowed, be read.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import itertools
import json
import random
import re
import struct
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx

import graphscale as gs
from graphscale.errors import GraphscaleError
from graphscale.files.checksum import BLANK, KEY, seal
from graphscale.training.checkpoints import Checkpoints, Position

STEPS = 5  # of the good checkpoint
SCALE, COUNT = "current_loss_scale", "good_steps"
_FLOATS = {"nan": np.nan, "inf": np.inf, "-inf": -np.inf, "-1": -1, "0": 0, "-0": -0.0}
_COUNTS = {"-1": -1, "-2": -2, "-2**63": -(2**63), "2**63-1": 2**63 - 1, "2**62": 2**62}
# JSON that stands where a number or a text is expected; as a text it is hostile, too.
HOSTILE = {
    "NaN": "NaN",
    "infinite": "-Infinity",
    "negative": "-1",
    "zero": "0",
    "half": "0.5",
    "whole float": "5.0",
    "2**63": str(2**63),
    "1e400": "1e400",
    "5000 digits": "9" * 5000,
    "4000 digits": "9" * 4000,
    "a text": '"5"',
    "an empty text": '""',
    "a surrogate": '"\\ud800"',
    "line breaks": '"a\\nb\\u2028c"',
    "true": "true",
    "null": "null",
    "a list": "[5]",
    "a list of pairs": '[["steps", 5]]',
    "an object": "{}",
    "nested deeply": "[" * 100_000 + "]" * 100_000,
    "nested": '{"a":' * 900 + "1" + "}" * 900,
    "a long text": json.dumps("x" * 100_000),
    "no JSON": "{",
}


@dataclasses.dataclass(frozen=True)
class Case:
    """A hostile file.

    Attributes:
        name: the damage.
        data: its content.
        may_pass: whether it may be read: its values are allowed.
    """

    name: str
    data: bytes
    may_pass: bool = False


def cases(good: bytes) -> Iterator[Case]:
    """Yield every case that is made from a good checkpoint."""
    yield from flips(good)
    yield from cuts(good)
    yield from forgeries(good)


def flips(good: bytes) -> Iterator[Case]:
    """Flip each bit, and replace each byte by delimiters, digits, white space and end marks of parsers."""
    for place, byte in enumerate(good):
        others = {byte ^ 1 << bit for bit in range(8)} | set(b'\x00\xff \n\t"09AZ')
        for other in sorted(others - {byte}):
            yield Case(f"byte {place}: {byte:#04x} to {other:#04x}", good[:place] + bytes([other]) + good[place + 1 :])


def cuts(good: bytes) -> Iterator[Case]:
    """Cut the file at each length, and let it go on."""
    for length in range(len(good)):
        yield Case(f"{length} of {len(good)} bytes", good[:length])
    for more in (b"\0", b" " * 8, good):
        yield Case(f"{len(more)} bytes more", good + more)


def forgeries(good: bytes) -> Iterator[Case]:
    """Forge each field, with a checksum that fits, as whoever writes such a file by hand would."""
    file = _File.parse(good)
    yield Case("nothing forged", file.pack(), True)
    yield from _forged_arrays(file)
    yield from _forged_header(file)
    yield from _forged_metadata(file)
    yield from _forged_position(file)


def _forged_arrays(file: _File) -> Iterator[Case]:
    for name, value in _FLOATS.items():
        yield Case(f"scale {name}", file.with_array(SCALE, np.float32(value)).pack())
    for name, value in _COUNTS.items():
        yield Case(f"count {name}", file.with_array(COUNT, np.int64(value)).pack())
    for dtype in (np.float64, np.int64, np.int32, np.bool_):
        yield Case(f"scale as {dtype.__name__}", file.with_array(SCALE, dtype(1)).pack())
        if dtype is not np.int64:
            yield Case(f"count as {dtype.__name__}", file.with_array(COUNT, dtype(1)).pack())
    for name in file.entries:
        yield Case(f"{name} in a list", file.with_array(name, file.array(name)[None]).pack())
        yield Case(f"{name} left out", file.without(name).pack())
        yield Case(f"{name} renamed", file.renamed(name, name + "'").pack())


def _forged_header(file: _File) -> Iterator[Case]:
    for name, entry in file.entries.items():
        for field, (kind, text) in itertools.product(entry, HOSTILE.items()):
            raw = {**{key: json.dumps(value) for key, value in entry.items()}, field: text}
            yield Case(f"{field} of {name}: {kind}", file.pack({json.dumps(name): _object(raw)}))
    for kind, text in HOSTILE.items():
        yield Case(f"an array too many: {kind}", file.pack({'"more"': text}))
        yield Case(f"metadata: {kind}", file.pack({'"__metadata__"': text}))
        yield Case(f"a header that is {kind}", struct.pack("<Q", len(text)) + text.encode() + file.body)
    for length in (0, 1, 2**31, 2**32, 2**63, 2**64 - 1):
        yield Case(f"a header of {length} bytes", struct.pack("<Q", length) + file.pack()[8:])


def _forged_metadata(file: _File) -> Iterator[Case]:
    for key in file.metadata:
        free = key == "graphscale.version"
        yield Case(f"{key} left out", file.with_metadata(**{key: None}).pack(), free)
        for kind, text in HOSTILE.items():
            forged = file.with_metadata(**{key: text})
            yield Case(f"{key}: {kind}", forged.pack(), free)
            raw = {json.dumps(name): json.dumps(value) for name, value in file.metadata.items()}
            whole = _object({**raw, json.dumps(key): text}, quoted=True)
            is_text = text.startswith('"') and free
            yield Case(f"{key} as JSON: {kind}", file.pack({'"__metadata__"': whole}), is_text)


def _forged_position(file: _File) -> Iterator[Case]:
    extra = json.loads(file.metadata["graphscale.extra"])
    noted = json.loads(extra["graphscale.train"])

    def forged(name: str, text: str, may_pass: bool = False) -> Case:
        kept = json.dumps({**extra, "graphscale.train": text})
        return Case(name, file.with_metadata(**{"graphscale.extra": kept}).pack(), may_pass)

    position = {key: json.dumps(value) for key, value in noted["position"].items()}
    settings = {key: json.dumps(value) for key, value in noted["settings"].items()}
    for kind, text in HOSTILE.items():
        yield forged(f"graphscale.train: {kind}", text)
        yield forged(f"position: {kind}", _object({"position": text, "settings": _object(settings)}))
        yield forged(f"settings: {kind}", _object({"position": _object(position), "settings": text}))
        for field in (*position, "more"):
            whole = _object({"position": _object({**position, field: text}), "settings": _object(settings)})
            yield forged(f"{field}: {kind}", whole, (field, kind) in _ALLOWED)
        for name, value in settings.items():
            whole = _object({"position": _object(position), "settings": _object({**settings, name: text})})
            yield forged(f"{name}: {kind}", whole, text == value)
    for steps, applied in ((0, 0), (STEPS - 1, 0), (STEPS + 1, 0), (STEPS, STEPS + 1), (2**62, 0), (STEPS, 2**62)):
        changed = _object({**position, "steps": str(steps), "applied": str(applied)})
        whole = _object({"position": changed, "settings": _object(settings)})
        yield forged(f"{applied} applied of {steps} steps", whole)
    for field in position:
        rest = {key: value for key, value in position.items() if key != field}
        yield forged(f"no {field}", _object({"position": _object(rest), "settings": _object(settings)}))


# A run without metrics, or with an empty file; fewer steps were applied than the state knows of.
_ALLOWED = {("metrics_bytes", "null"), ("metrics_bytes", "zero"), ("metrics_bytes", "2**63"), ("applied", "zero")}


@dataclasses.dataclass(frozen=True)
class _File:
    """The parts of a safetensors file."""

    metadata: Mapping[str, str]
    entries: Mapping[str, Any]
    body: bytes

    @classmethod
    def parse(cls, data: bytes) -> _File:
        (length,) = struct.unpack("<Q", data[:8])
        header = json.loads(data[8 : 8 + length])
        metadata = header.pop("__metadata__")
        metadata.pop(KEY)
        return cls(metadata, header, data[8 + length :])

    def pack(self, raw: Mapping[str, str] | None = None) -> bytes:
        """Write the file, with a checksum that fits; `raw` JSON replaces entries of the header."""
        metadata = {json.dumps(key): json.dumps(value) for key, value in {**self.metadata, KEY: BLANK}.items()}
        entries = {json.dumps(name): json.dumps(entry) for name, entry in self.entries.items()}
        header = _object({'"__metadata__"': _object(metadata, quoted=True), **entries, **(raw or {})}, quoted=True)
        text = header.encode()
        text += b" " * (-len(text) % 8)
        data = bytearray(struct.pack("<Q", len(text)) + text + self.body)
        if b"graphscale.checksum" in data:
            with contextlib.suppress(ValueError):
                seal(data)
        return bytes(data)

    def array(self, name: str) -> np.ndarray[Any, Any]:
        entry = self.entries[name]
        begin, end = entry["data_offsets"]
        dtype = {"F32": np.float32, "I64": np.int64}[entry["dtype"]]
        return np.frombuffer(self.body[begin:end], dtype).reshape(entry["shape"])

    def with_metadata(self, **changes: str | None) -> _File:
        merged = {**self.metadata, **changes}
        return dataclasses.replace(self, metadata={key: value for key, value in merged.items() if value is not None})

    def with_array(self, name: str, array: Any) -> _File:
        names = {"float32": "F32", "float64": "F64", "int64": "I64", "int32": "I32", "bool": "BOOL"}
        arrays = {key: self.array(key) for key in self.entries} | {name: np.asarray(array)}
        return self._laid_out({key: (names[value.dtype.name], value) for key, value in arrays.items()})

    def without(self, name: str) -> _File:
        kept = {key: (entry["dtype"], self.array(key)) for key, entry in self.entries.items() if key != name}
        return self._laid_out(kept)

    def renamed(self, name: str, other: str) -> _File:
        return dataclasses.replace(self, entries={other if k == name else k: v for k, v in self.entries.items()})

    def _laid_out(self, arrays: Mapping[str, tuple[str, np.ndarray[Any, Any]]]) -> _File:
        entries, body = {}, b""
        for name, (dtype, array) in arrays.items():
            end = len(body) + array.nbytes
            entries[name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": [len(body), end]}
            body += array.tobytes()
        return _File(self.metadata, entries, body)


def _object(members: Mapping[str, str], quoted: bool = False) -> str:
    """Return a JSON object of members that are JSON themselves."""
    return "{" + ",".join(f"{key if quoted else json.dumps(key)}:{value}" for key, value in members.items()) + "}"


class Target:
    """A run of a small step in a folder, whose checkpoint is replaced by hostile ones.

    Args:
        folder: an empty folder.

    Attributes:
        good: the undamaged checkpoint.
    """

    def __init__(self, folder: Path) -> None:
        self._session = gs.Session(_small_step(), state={"w": np.ones((2, 2), np.float32)})
        self._checkpoints = Checkpoints(folder)
        self._checkpoints.settings = {"the step": "sha256:0", "--batch-size": 16, "--seed": 0, "shuffling": True}
        with self._checkpoints.opened():
            self.path = self._checkpoints.save(self._session, Position(STEPS, STEPS - 1, None))
        self.good = self.path.read_bytes()

    def complaint(self, case: Case) -> str | None:
        """Resume from a hostile checkpoint; return the fault of graphscale, if there is one."""
        self.path.write_bytes(case.data)
        before = self._session.state_dict()
        try:
            self._checkpoints.resume(self._session)
            self._checkpoints.newest_state()
        except GraphscaleError as error:
            text = str(error)
            if len(text.splitlines()) != 1 or str(self.path) not in text:
                return f"not one line that names the file: {text[:300]!r}"
            return None if len(text) < 2000 else f"a line of {len(text)} characters"
        except Exception as error:
            return f"{type(error).__name__}: {str(error)[:200]}"
        finally:
            self._session.load_state_dict(before)
        return None if case.may_pass else "read as if nothing were wrong"


def _small_step() -> gs.ScaledModel:
    text = """<ir_version: 8, opset_import: ["" : 17]>
        step (float[2,2] w, float[2,2] x) => (float loss, float[2,2] w_next) {
        rate = Constant<value = float {0.1}>()  y = MatMul(x, w)  loss = ReduceSum<keepdims = 0>(y)
        one = Constant<value = float[1] {1.0}>()  shape = Shape(y)  dy = Expand(one, shape)
        xt = Transpose(x)  dw = MatMul(xt, dy)  u = Mul(rate, dw)  w_next = Sub(w, u) }"""
    return gs.scale(onnx.parser.parse_model(text))


def attempt(make: Callable[[bytes], Iterator[Case]], folder: Path, choices: random.Random) -> str | None:
    """Try one case of a kind."""
    target = Target(folder)
    case = choices.choice(_all_cases(make, target.good))
    fault = target.complaint(case)
    return fault and f"{case.name}: {fault}"


@functools.lru_cache(3)
def _all_cases(make: Callable[[bytes], Iterator[Case]], good: bytes) -> tuple[Case, ...]:
    return tuple(make(good))


def try_all(target: Target, chosen: Iterable[Case]) -> tuple[int, list[str]]:
    """Return the number of cases tried, and the faults found."""
    tried, faults = 0, []
    for case in chosen:
        tried += 1
        if (fault := target.complaint(case)) is not None:
            faults.append(f"{case.name}: {fault}")
    return tried, faults


def main() -> int:
    """Try the cases, and print what was wrong by kind."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--every", type=int, default=1)
    every = parser.parse_args().every
    kinds: dict[str, Callable[[bytes], Iterator[Case]]] = {"flips": flips, "cuts": cuts, "forgeries": forgeries}
    wrong = 0
    with tempfile.TemporaryDirectory() as folder:
        target = Target(Path(folder))
        for name, make in kinds.items():
            tried, faults = try_all(target, itertools.islice(make(target.good), 0, None, every))
            print(f"{name}: {len(faults)} of {tried} wrong")
            for line in sorted(re.sub(r"\s+", " ", fault)[:160] for fault in faults)[:40]:
                print(f"    {line}")
            wrong += len(faults)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
