"""The kind of a file that is not of the kind that was expected, for messages."""

from __future__ import annotations

import difflib
import os
import zipfile
from pathlib import Path
from typing import NamedTuple

from graphscale.errors import DOCS_URL
from graphscale.files.descriptors import is_stream

__all__ = ["ORT_CHECKPOINT", "describe_file", "describe_folder", "explain_unreadable"]

# At byte 4 of a checkpoint of ONNX Runtime's training.
ORT_CHECKPOINT = b"ODTC"

_SAVEZ = "write arrays by name: numpy.savez(FILE, NAME=array)"


class _Kind(NamedTuple):
    """A kind of file: its name, the remedy where a model is expected, and where arrays are."""

    name: str
    remedy: str
    arrays: str = _SAVEZ


def _damage(name: str, remedy: str) -> _Kind:
    return _Kind(name, remedy, remedy)


_PYTORCH = _Kind("a file of PyTorch", f"export a training step of the module: {DOCS_URL}start/pytorch/")
_KERAS = _Kind("a Keras model", f"export a training step of it: {DOCS_URL}start/tensorflow/")
_ARRAYS = "pass an ONNX model here, and arrays by an option such as --data, --state or --feeds"
_ONNX = _damage("an ONNX model", _SAVEZ)
_NPZ = _Kind("an .npz file", _ARRAYS)
_SAFETENSORS = _Kind("a safetensors file", _ARRAYS)
_EXPECTED = {"onnx": _ONNX, "npz": _NPZ, "safetensors": _SAFETENSORS}
_BEGINNINGS = {
    b"\x89HDF\r\n": _KERAS,
    b"\x93NUMPY": _Kind("an .npy file", _ARRAYS),
    b"\x80\x02": _PYTORCH,
    b"\x1f\x8b": _damage("compressed by gzip", "unpack it with gunzip"),
    b"version https://git-lfs": _damage("a pointer of Git LFS", "fetch the file itself: git lfs pull"),
    b"<": _damage("a page of HTML or XML", "download the file itself"),
}


def describe_file(path: str | os.PathLike[str], expected: str) -> str:
    """Describe an unreadable file, and name a remedy.

    Args:
        path: the file.
        expected: the kind that was expected: "onnx", "npz" or "safetensors".

    Returns:
        the description; empty where the file seems to be of that kind, or of none that is known.
    """
    if is_stream(path):
        return ""
    try:
        kind = _find_kind(Path(path))
    except OSError:
        return ""
    if kind is None or kind is _EXPECTED[expected]:
        return ""
    return f"it seems to be {kind.name}; {kind.remedy if expected == 'onnx' else kind.arrays}"


def describe_folder(path: str | os.PathLike[str]) -> str:
    """Describe a folder in place of a model, and name the right argument."""
    folder = Path(path)
    if (folder / "saved_model.pb").is_file():
        return f"a SavedModel of TensorFlow; {_KERAS.remedy}"
    if (folder / "training_model.onnx").is_file():
        return (
            f"a folder of artifacts; pass a model in it, such as {folder / 'training_model.onnx'}, or make one step of "
            "it before it is scaled: graphscale fuse FOLDER -o OUT"
        )
    models = sorted(file.name for file in folder.glob("*.onnx"))
    if not models:
        return "a folder without ONNX files; pass an ONNX file"
    return f"a folder; pass an ONNX file in it, such as {folder / models[0]}"


def explain_unreadable(path: str | os.PathLike[str], error: OSError) -> str:
    """Return the reason of an error and a remedy: of a missing file, the nearest name beside it."""
    reason = error.strerror or str(error)
    if isinstance(error, IsADirectoryError):
        return "it is a folder; name a file"
    if not isinstance(error, FileNotFoundError):
        return reason
    wanted = Path(path)
    if wanted.is_symlink():
        return f"it is a link to {os.readlink(wanted)}, which does not exist"
    try:
        names = os.listdir(wanted.parent)
    except OSError:
        return reason
    close = difflib.get_close_matches(wanted.name, names, 1, cutoff=0.8)
    return f"{reason}; did you mean {wanted.with_name(close[0])}?" if close else reason


def _find_kind(path: Path) -> _Kind | None:
    with path.open("rb") as file:
        first = file.read(4096)
    if not first:
        return _damage("an empty file", "write it again")
    for beginning, kind in _BEGINNINGS.items():
        if first.startswith(beginning):
            return kind
    if first.startswith(b"PK"):
        return _find_archive(path)
    if first[4:8] == b"TFL3":
        return _Kind("a TensorFlow Lite model", _KERAS.remedy)
    if first[8:10] == b'{"':
        return _SAFETENSORS
    if first[4:8] == ORT_CHECKPOINT:
        return _Kind("a checkpoint of ONNX Runtime", "pass its folder, with training_model.onnx in it")
    return _find_text(path, first)


def _find_archive(path: Path) -> _Kind:
    """Find the kind of a zip archive by the names in it."""
    try:
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
    except Exception:  # zipfile raises many kinds for damaged archives
        return _damage("a damaged zip archive", "copy or download it again")
    if any(name.endswith("data.pkl") for name in names):
        return _PYTORCH
    if any(name.endswith(".weights.h5") for name in names):
        return _KERAS
    if names and all(name.endswith(".npy") for name in names):
        return _NPZ
    return _damage("a zip archive", "unpack it")


def _find_text(path: Path, first: bytes) -> _Kind | None:
    text = first.decode(errors="replace")
    if not "".join(text.split()).isprintable() or "\ufffd" in text:
        # Exporters write the first field of a model, its IR version, first.
        return _ONNX if first[0] == 8 else None
    if path.suffix == ".py":
        return _Kind("a Python program", f"export a training step first: {DOCS_URL}start/pytorch/")
    return _damage("JSON" if text.lstrip()[:1] in ("{", "[") else "text", "name the right file")
