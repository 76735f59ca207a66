"""Files and folders, written as a whole or not at all, even if the process is killed or the power fails.

A command replaces only files that graphscale wrote, and none of its inputs.
"""

from __future__ import annotations

import contextlib
import ctypes
import filecmp
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import google.protobuf.message

from graphscale.errors import ModelFileError, OutputError
from graphscale.files.descriptors import descriptor_of
from graphscale.files.model_size import parse_model
from graphscale.files.stream_files import send

__all__ = [
    "MARK_KEY",
    "WRITER",
    "check_new_output",
    "check_output",
    "check_output_folder",
    "metadata_of_picture",
    "protecting",
    "write_file",
    "write_files",
    "write_folder",
]

WRITER = "graphscale"
# The metadata property of a model without another property of graphscale.
MARK_KEY = "graphscale.written"

# Marks of their writer in files other than models: pictures, pages, SARIF logs, counterexamples, metrics.
_MARKS = (
    b"Software\0graphscale",
    b"<dc:title>graphscale</dc:title>",
    b"/Creator (graphscale)",
    b'<meta name="generator" content="graphscale">',
    b'"driver": {\n          "name": "graphscale"',
    b"graphscale.case.npy",
)
_FIRST = (b'{"step": 1, "epoch": 1, "loss": ', b"step,epoch,loss,loss_scale,next_loss_scale,")
_ENDS = 2**16  # bytes at the beginning and at the end of a file that may hold its mark

_protected: Sequence[Path] | None = None

_AT_FDCWD, _RENAME_EXCHANGE = -100, 2  # linux/fcntl.h, linux/fs.h


def check_output(path: str | os.PathLike[str]) -> Path:
    """Return the absolute path of an output file.

    Raises:
        OutputError: its folder does not exist, or the path is a folder, or the file system refuses the name.
    """
    target = Path(path).absolute()
    if descriptor_of(path) is not None:
        return target
    try:
        if target.is_dir():
            raise OutputError(f"{path} is a folder; name the file to write")
        if not target.parent.is_dir():
            raise OutputError(f"the folder {target.parent} does not exist; create it, or write somewhere else")
        if target.exists() and not target.is_file():
            raise OutputError(f"{path} is no regular file, and would be replaced by one; name a file to write")
    except (OSError, ValueError) as error:  # a name with a NUL byte is a ValueError
        raise OutputError(f"cannot write {path}: {getattr(error, 'strerror', None) or error}") from error
    return target


def check_new_output(path: str | os.PathLike[str], marked: bool = True, named: bool = True) -> Path:
    """Return the absolute path of an output file of a command, before the work begins.

    Args:
        path: the file.
        marked: the new file will name its writer; else an existing one may be replaced only by its own content, which
            `write_file` compares.
        named: as for `_refuse_loss`.

    Raises:
        OutputError: as `check_output`; or the file is protected.
    """
    target = check_output(path)
    _refuse_loss(Path(path), named)
    if marked:
        _refuse_replacement(Path(path))
    return target


@contextlib.contextmanager
def write_file(path: str | os.PathLike[str], replaces: bool = False) -> Iterator[Path]:
    """Write a temporary file, and rename it to the file when the block ends without an error.

    Its content is on the disk before the renaming: a power cut leaves the old file or the new one.

    Args:
        path: the file.
        replaces: True for a part of a replaceable file: it may be replaced, too.

    Yields:
        The path of the temporary file.

    Raises:
        OutputError: the folder does not exist or cannot be written, the block raised an OSError, or the file is
            protected; an existing file is unchanged.
    """
    with write_files(path, replaces=replaces) as (temporary,):
        yield temporary


@contextlib.contextmanager
def write_files(*paths: str | os.PathLike[str], replaces: bool = False) -> Iterator[list[Path]]:
    """Write several files as `write_file` does: all are on the disk before the first is renamed.

    Raises:
        OutputError: as `write_file`; all existing files are unchanged.
    """
    targets = [check_output(path) for path in paths]
    streams = any(descriptor_of(path) is not None for path in paths)
    try:
        with contextlib.ExitStack() as stack:
            temporaries = []
            for target in targets:
                beside = None if streams else target.parent
                folder = tempfile.TemporaryDirectory(prefix=".graphscale-", suffix=".tmp", dir=beside)
                temporaries.append(Path(stack.enter_context(folder), target.name))
            yield temporaries
            if streams:
                _send(temporaries, targets)
                return
            for path, temporary, target in zip(paths, temporaries, targets, strict=True):
                if not replaces:
                    _refuse_replacement(Path(path), temporary)
                os.chmod(temporary, _find_mode(target))
                _sync(temporary)
            _replace(temporaries, targets)
            for parent in {target.parent for target in targets}:
                _sync(parent)
    except OSError as error:
        raise OutputError(f"cannot write {', '.join(map(str, paths))}: {error.strerror or error}") from error


def _send(temporaries: Sequence[Path], targets: Sequence[Path]) -> None:
    if len(targets) > 1:
        raise OutputError("standard output takes one file; name the files to write")
    send(temporaries[0], targets[0])


def _replace(temporaries: Sequence[Path], targets: Sequence[Path]) -> None:
    """Rename files: all of them, or none if one cannot be renamed."""
    undo = contextlib.ExitStack()
    with undo:
        for temporary, target in zip(temporaries, targets, strict=True):
            if len(targets) > 1:
                undo.callback(_restore, target, _keep(target, temporary))
            os.replace(temporary, target)
        undo.pop_all()


def _keep(target: Path, temporary: Path) -> Path | None:
    """Give an existing file a second name beside its replacement."""
    if not os.path.lexists(target):
        return None
    old = temporary.with_name(f"{temporary.name}.old")
    try:
        os.link(target, old, follow_symlinks=False)
    except OSError:  # some file systems have no second names
        shutil.copy2(target, old, follow_symlinks=False)
    return old


def _restore(target: Path, old: Path | None) -> None:
    if old is None:
        target.unlink(missing_ok=True)
    elif old.exists():
        os.replace(old, target)


def _find_mode(target: Path) -> int:
    """Return the mode of the replaced file, else that of a new file."""
    if target.exists():
        return target.stat().st_mode & 0o7777
    mask = os.umask(0)
    os.umask(mask)
    return 0o666 & ~mask


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def check_output_folder(source: Path, out: str | os.PathLike[str], force: bool) -> Path:
    """Return the absolute path of a folder to be written.

    Raises:
        OutputError: the folder is not empty, without `force`; it is a file; it holds the source.
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
def write_folder(target: Path) -> Iterator[Path]:
    """Write a new folder, and rename it to the folder when the block ends without an error.

    Yields:
        The path of the new folder, which is empty.

    Raises:
        OutputError: the file system refuses.
    """
    try:
        # Beside the target, since a rename must not cross file systems.
        with tempfile.TemporaryDirectory(prefix=".graphscale-", dir=target.parent) as temporary:
            folder = Path(temporary, "folder")
            folder.mkdir()
            yield folder
            for file in folder.iterdir():
                _sync(file)
            _sync(folder)
            if target.is_dir() and any(target.iterdir()):
                _exchange(folder, target)
            else:
                os.replace(folder, target)
            _sync(target.parent)
    except OSError as error:
        raise OutputError(f"cannot write {target}: {error.strerror or error}") from error
    except OutputError as error:
        raise OutputError(str(error).replace(str(folder), str(target))) from error


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


@contextlib.contextmanager
def protecting(named: Sequence[Path]) -> Iterator[None]:
    """Protect files in a `with` block: those named twice, and those that graphscale did not write.

    Args:
        named: the existing files in a command line, repeated as they are there.
    """
    global _protected  # noqa: PLW0603
    _protected, before = named, _protected
    try:
        yield
    finally:
        _protected = before


def _refuse_loss(target: Path, named: bool = True) -> None:
    """Refuse to replace an input of the command, where files are protected.

    Args:
        target: the file.
        named: True if the command line names it as an output, too; stages of a split step have names of their own.

    Raises:
        OutputError: the file is an input, under this name or another, such as that of a link.
    """
    if _protected is not None and sum(_is_same(target, path) for path in _protected) > named:
        raise OutputError(f"{target} is read, and would be replaced; name another file, or pass --force")


def _refuse_replacement(target: Path, written: Path | None = None) -> None:
    """Refuse to replace a file that graphscale did not write, where files are protected.

    Args:
        target: the file; it need not exist.
        written: the new file, which may replace one of the same content.

    Raises:
        OutputError: graphscale did not write the file.
    """
    if _protected is None or descriptor_of(target) is not None or not target.exists() or _is_own(target):
        return
    if written is None or not filecmp.cmp(target, written, shallow=False):
        raise OutputError(
            f"{target} exists, and graphscale cannot tell that it wrote it; name another file, or pass --force"
        )


def metadata_of_picture(suffix: str) -> dict[str, str]:
    """Return the metadata for matplotlib that marks a picture as graphscale's."""
    return {"Software" if suffix == ".png" else "Creator": WRITER}


def _is_same(target: Path, path: Path) -> bool:
    try:
        return target.samefile(path)
    except OSError:
        return False


def _is_own(path: Path) -> bool:
    """Return whether graphscale wrote a file; an empty file counts, since it holds nothing to lose."""
    from graphscale.files.training_info import ROLES_KEY  # with onnx_ir, which the command line loads later

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
