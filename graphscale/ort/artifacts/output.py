"""Writing a folder so that it is there as a whole or not at all."""

from __future__ import annotations

import contextlib
import ctypes
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from graphscale.errors import OutputError

__all__ = ["check_output_folder", "new_folder"]

_AT_FDCWD, _RENAME_EXCHANGE = -100, 2  # linux/fcntl.h, linux/fs.h


def check_output_folder(source: Path, out: str | os.PathLike[str], force: bool) -> Path:
    """Return the absolute path of a folder to be written.

    Raises:
        OutputError: it is there and not empty, without `force`; it is a file; it holds the source.
    """
    target = Path(out).absolute()
    try:
        if target.resolve() in (source.resolve(), *source.resolve().parents):
            raise OutputError(f"{out} holds the folder that is read; write the new folder somewhere else")
        if not target.parent.is_dir():
            raise OutputError(f"the folder {target.parent} does not exist; create it, or write somewhere else")
        if os.path.lexists(target) and not target.is_dir():
            raise OutputError(f"{out} is a file; name a folder to write")
        if target.is_symlink():
            raise OutputError(f"{out} is a link; name the folder it leads to")
        if target.is_dir() and any(target.iterdir()) and not force:
            raise OutputError(f"{out} is not empty; write somewhere else, or replace it with --force (force=True)")
    except OSError as error:
        raise OutputError(f"cannot write {out}: {error.strerror or error}") from error
    return target


@contextlib.contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """A new folder to be filled, that becomes `target` at the end, or vanishes if there is an error.

    Raises:
        OutputError: the file system refuses.
    """
    try:
        # Beside the target, since a rename must not cross file systems.
        with tempfile.TemporaryDirectory(prefix=".graphscale-", dir=target.parent) as temporary:
            folder = Path(temporary, "folder")
            folder.mkdir()
            yield folder
            if target.is_dir() and any(target.iterdir()):
                _exchange(folder, target)
            else:
                os.replace(folder, target)
    except OSError as error:
        raise OutputError(f"cannot write {target}: {error.strerror or error}") from error


def _exchange(new: Path, old: Path) -> None:
    """Swap two folders, in one step where the system can."""
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.renameat2(_AT_FDCWD, os.fsencode(new), _AT_FDCWD, os.fsencode(old), _RENAME_EXCHANGE) == 0:
            return
    aside = new.with_name("old")
    os.rename(old, aside)
    try:
        os.rename(new, old)
    except BaseException:
        os.rename(aside, old)
        raise
