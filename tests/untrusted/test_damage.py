"""Damage from earlier failures of commands, and disks that refuse a step: one line, and no partial output."""

from __future__ import annotations

import errno
import os
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest

from fuzz.hostile import bench, processes
from graphscale.errors import OutputError
from graphscale.files import model_files, saving, writing
from graphscale.training.checkpoints import Checkpoints
from tests.cli.command import contents, refuse
from tests.files.test_writing import external, make

pytestmark = pytest.mark.static

# The calls that read an .npz file, with the file.
ARRAYS = sorted(bench.calls_on(".npz"))
TEXTS = sorted(bench.calls_on(".json"))


def encrypt(path: Path) -> None:
    """Set the flag of encryption of all members."""
    data = bytearray(path.read_bytes())
    for at in range(len(data)):
        if data.startswith((b"PK\x03\x04", b"PK\x01\x02"), at):
            data[at + (6 if data[at + 2] == 3 else 8)] |= 1
    path.write_bytes(data)


def unknown_method(path: Path) -> None:
    data = bytearray(path.read_bytes())
    for at in range(len(data)):
        if data.startswith((b"PK\x03\x04", b"PK\x01\x02"), at):
            struct.pack_into("<H", data, at + (8 if data[at + 2] == 3 else 10), 77)
    path.write_bytes(data)


def objects(path: Path) -> None:
    with np.load(path) as stored:
        arrays = dict(stored)
    np.savez(path, **{name: np.array([{}, None], dtype=object) for name in arrays})  # type: ignore[arg-type]


def with_header(text: str) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        with np.load(path) as stored:
            names = stored.files
        header = b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text.encode()
        with zipfile.ZipFile(path, "w") as archive:
            for name in names:
                archive.writestr(f"{name}.npy", header + bytes(64))

    return write


DAMAGES = {
    "encrypted members": encrypt,
    "an unknown method": unknown_method,
    "objects": objects,
    "60 GB": with_header("{'descr': '<f4', 'fortran_order': False, 'shape': (15000000000,)}\n"),
    "2**62 elements": with_header("{'descr': '<f4', 'fortran_order': False, 'shape': (4611686018427387904,)}\n"),
    "a negative size": with_header("{'descr': '<f4', 'fortran_order': False, 'shape': (-1,)}\n"),
    "a deep header": with_header("(" * 5000 + "\n"),
    "texts of 8 GB": with_header("{'descr': '<U2000000000', 'fortran_order': False, 'shape': (1,)}\n"),
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize(("call", "name"), ARRAYS)
def test_arrays(call: str, name: str, damage: str, folder: Path) -> None:
    DAMAGES[damage](folder / name)
    refuse(folder, *bench.words_of(call), words=(name,))


@pytest.mark.sample(1)
@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 100_000, "1" * 10_000, "NaN", "\ud800", "", "{", "7"])
@pytest.mark.parametrize(("call", "name"), TEXTS)
def test_json(call: str, name: str, text: str, folder: Path) -> None:
    (folder / name).write_bytes(text.encode(errors="surrogatepass"))
    refuse(folder, *bench.words_of(call), words=(name,))


# An empty report, which is JSON of the right kind, among others.
GARBAGE = ("{}", "[]", "null", "", "x", "[" * 100_000, '{"a": ' * 50_000, "1" * 5000, "NaN", "\x00", '{"": null}')
GARBAGE += ('{"state": 5}', '{"state": [1]}', '{"state": [{}]}')


@pytest.mark.full
@pytest.mark.cover(4)
@pytest.mark.parametrize("key", ["report", "names", "state", "policy", "telemetry", "original", "target", "version"])
@pytest.mark.parametrize("call", sorted({call for call, _ in bench.calls_on("step.onnx")}))
def test_garbage_in_metadata(call: str, key: str, folder: Path) -> None:
    for text in GARBAGE:
        model = onnx.load(bench.make_bench() / "step.onnx")
        held = {item.key: item for item in model.metadata_props}
        item = held.get(f"graphscale.{key}") or model.metadata_props.add(key=f"graphscale.{key}")
        item.value = text
        (folder / "step.onnx").write_bytes(model.SerializeToString())
        assert processes.hold([*bench.words_of(call), "--force"], folder) is None


def test_an_original_with_a_value_that_nothing_computes(folder: Path) -> None:
    """And with an operator that ONNX's checker does not know, at which it stops."""
    model = onnx.load(folder / "original.onnx")
    model.graph.node[0].op_type = "Unknown"
    model.graph.node[5].input[0] = "ghost"
    onnx.save(model, folder / "original.onnx")
    refuse(folder, "verify", "original.onnx", "step.onnx", words=("original.onnx", "'ghost', which nothing computes"))


@pytest.mark.sample(2)
@pytest.mark.parametrize(("call", "name"), sorted(bench.calls_on()))
def test_a_pipe_as_any_file(call: str, name: str, folder: Path) -> None:
    """The pipe has no writer: opening it would wait."""
    (folder / name).unlink()
    os.mkfifo(folder / name)
    assert processes.hold(bench.words_of(call), folder, codes=(2,)) is None


@pytest.mark.sample(2)
@pytest.mark.parametrize(("call", "name"), sorted(bench.calls_on()))
def test_a_device_as_any_file(call: str, name: str, folder: Path) -> None:
    """It has no end."""
    (folder / name).unlink()
    (folder / name).symlink_to("/dev/zero")
    assert processes.hold(bench.words_of(call), folder, codes=(2,)) is None


# --- a disk that refuses ----------------------------------------------------------------------------------------------


def test_an_old_checkpoint_that_cannot_be_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse_removal(path: Path, missing_ok: bool = False) -> None:
        raise OSError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "unlink", refuse_removal)
    with pytest.raises(OutputError, match=r"cannot remove .*step-00000001\.safetensors: Permission denied"):
        Checkpoints(tmp_path)._remove(tmp_path / "step-00000001.safetensors")


@pytest.mark.parametrize("replacing", [False, True])
def test_weights_beside_a_model_that_cannot_be_written(
    replacing: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever file cannot take its name, the old pair, or none, is there; or the new one."""
    make(tmp_path / "new" / "step.onnx", "another", 200, 200)
    model, real, whole = model_files.load(tmp_path / "new" / "step.onnx"), os.replace, 0
    for failing in range(1, 6):
        out = tmp_path / f"out{failing}"
        if replacing:
            make(out / "step.onnx", "old", 300, 300)
        else:
            out.mkdir()
        before, calls = contents(out), iter(range(1, 100))

        def replace(source: object, target: object, *, at: int = failing, calls: object = calls) -> None:
            if next(calls) == at:  # type: ignore[call-overload]
                raise OSError(errno.EIO, "Input/output error")
            real(source, target)  # type: ignore[call-overload]

        monkeypatch.setattr(writing.os, "replace", replace)
        try:
            saving.save(model, out / "step.onnx")
        except OutputError:
            assert contents(out) == before
        else:
            whole += 1
            assert {float(tensor.numpy()[0]) for tensor in external(out / "step.onnx")} == {7.0}
        monkeypatch.undo()
    assert 0 < whole < 5
