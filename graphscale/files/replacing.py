"""Which existing files a command may replace: those that graphscale wrote, and that it does not read."""

from __future__ import annotations

import contextlib
import filecmp
from collections.abc import Iterator, Sequence
from pathlib import Path

import google.protobuf.message

from graphscale.errors import ModelFileError, OutputError
from graphscale.files.model_size import parse_model

__all__ = ["MARK_KEY", "ROLES_KEY", "WRITER", "metadata_of_picture", "protecting", "refuse_loss", "refuse_replacement"]

WRITER = "graphscale"
# The metadata property of a model that has no other of graphscale's.
MARK_KEY = "graphscale.written"
# The metadata property of a training graph that states roles, as a roles file does: exporters write it.
ROLES_KEY = "graphscale.roles"

# Where files other than models name their writer: pictures, pages, SARIF logs, counterexamples, metrics.
_MARKS = (
    b"Software\0graphscale",
    b"<dc:title>graphscale</dc:title>",
    b"/Creator (graphscale)",
    b'<meta name="generator" content="graphscale">',
    b'"driver": {\n          "name": "graphscale"',
    b"graphscale.case.npy",
)
_FIRST = (b'{"step": 1, "epoch": 1, "loss": ', b"step,epoch,loss,loss_scale,next_loss_scale,")
_ENDS = 2**16  # bytes at the beginning and at the end of a file, where its mark is

_protected: Sequence[Path] | None = None


@contextlib.contextmanager
def protecting(named: Sequence[Path]) -> Iterator[None]:
    """Refuse, in the block, to replace a file that is named twice or that graphscale did not write.

    Args:
        named: the existing files that a command line names, each as often as it does.
    """
    global _protected  # noqa: PLW0603
    _protected, before = named, _protected
    try:
        yield
    finally:
        _protected = before


def refuse_loss(target: Path, named: bool = True) -> None:
    """Refuse to replace a file that is read, where files are protected.

    Args:
        target: the file.
        named: whether the command line names it as an output, too; stages of a split step have names of their own.

    Raises:
        OutputError: it is, under this name or another one, of a link for instance.
    """
    if _protected is not None and sum(_is_same(target, path) for path in _protected) > named:
        raise OutputError(f"{target} is read, and would be replaced; name another file, or pass --force")


def refuse_replacement(target: Path, written: Path | None = None) -> None:
    """Refuse to replace a file that graphscale did not write, where files are protected.

    Args:
        target: the file; it need not exist.
        written: the new file, which may replace one of the same content.

    Raises:
        OutputError: it did not.
    """
    if _protected is None or not target.exists() or _is_own(target):
        return
    if written is None or not filecmp.cmp(target, written, shallow=False):
        raise OutputError(
            f"{target} exists, and graphscale cannot tell that it wrote it; name another file, or pass --force"
        )


def metadata_of_picture(suffix: str) -> dict[str, str]:
    """Return the metadata for matplotlib by which a picture is known."""
    return {"Software" if suffix == ".png" else "Creator": WRITER}


def _is_same(target: Path, path: Path) -> bool:
    try:
        return target.samefile(path)
    except OSError:
        return False


def _is_own(path: Path) -> bool:
    """Return whether graphscale wrote a file; an empty one counts, since nothing is lost with it."""
    size = path.stat().st_size
    with path.open("rb") as file:
        head = file.read(_ENDS)
        file.seek(max(0, size - _ENDS))
        tail = file.read()
    if not size or head.startswith(_FIRST) or any(mark in end for mark in _MARKS for end in (head, tail)):
        return True
    try:
        entries = parse_model(path.read_bytes(), str(path)).metadata_props
        return any(entry.key.startswith(f"{WRITER}.") and entry.key != ROLES_KEY for entry in entries)
    except (google.protobuf.message.DecodeError, ModelFileError, UnicodeDecodeError):
        return False
