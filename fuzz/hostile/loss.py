"""Ways to lose a file: outputs that are inputs or the user's, processes killed at any step, failing disks."""

from __future__ import annotations

import atexit
import collections
import dataclasses
import errno
import functools
import mmap
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx

import graphscale as gs
from fuzz.hostile import bench
from fuzz.hostile.processes import contents, find_fault, hold, run
from fuzz.hostile.runner import Category
from graphscale.training.metrics import read_metrics
from tests.cli.bad_graphs import sgd
from tests.conftest import ROOT
from tests.files.killed_writer import Steps

_MINE = (
    b"the only copy of my thesis, which says: graphscale.scale(model), written by graphscale",
    b"\x93NUMPY",
    b"{}",
    b'{"step": 1}\n',
    b"\0" * 5000,
    b"PK\x03\x04",
)
# System calls that change what is on the disk.
_CALLS = (
    *("write", "pwrite64", "writev", "copy_file_range", "sendfile", "fsync", "fdatasync", "ftruncate", "rename"),
    *("renameat2", "link", "linkat", "unlink", "unlinkat", "mkdir", "mkdirat", "rmdir", "chmod", "fchmodat", "symlink"),
)


def _outputs(words: list[str]) -> list[int]:
    return [at for at, word in enumerate(words) if word.startswith("out")]


def own_input(folder: Path, choices: random.Random) -> str | None:
    """Write over a file that is read, by another spelling or through a link."""
    bench.fill(folder)
    call = choices.choice([call for call in bench.CALLS if _outputs(bench.words_of(call))])
    words, read = bench.words_of(call), choices.choice(bench.inputs_of(call))
    at = choices.choice(_outputs(words))
    words[at] = _spell(folder, read, choices)
    return hold(words, folder, codes=(2,))


def _spell(folder: Path, name: str, choices: random.Random) -> str:
    path = folder / name
    match choices.randrange(7):
        case 0:
            return f"../{folder.name}/./{name}"
        case 1:
            (folder / "link").symlink_to(path)
            return "link"
        case 2:
            (folder / "hard").hardlink_to(path)
            return "hard"
        case 3:
            (folder / "there").symlink_to(".")
            return f"there/{name}"
        case 4:
            (folder / "first").symlink_to("second")
            (folder / "second").symlink_to(path)
            return "first"
        case 5:
            return str(path)
    return name


def foreign(folder: Path, choices: random.Random) -> str | None:
    """Write over a file, or into a folder, that graphscale did not write."""
    bench.fill(folder)
    words = bench.words_of(choices.choice([call for call in bench.CALLS if _outputs(bench.words_of(call))]))
    path = folder / words[choices.choice([at for at in _outputs(words) if words[at] != "outkept"] or [-1])]
    if path.name == "outfolder":
        path.mkdir(exist_ok=True)
        path = path / choices.choice(("training_model.onnx", "thesis", ".hidden"))
    elif path.name == "kept":
        path = path / choices.choice(("thesis.txt", "step-00000003.safetensors", "best.safetensors"))
    elif choices.random() < 0.4:
        (folder / "mine").write_bytes(b"")
        path.symlink_to("mine")
        path = folder / "mine"
    _write_mine(path, choices)
    before = path.read_bytes()
    codes = (0, 2) if path.parent.name == "kept" or not words[-1].startswith("out") else (2,)
    fault = hold(words, folder, codes=codes)
    if fault is None and path.read_bytes() != before:
        return f"graphscale {' '.join(words)}: {path.name} of the user was replaced"
    return fault


def _write_mine(path: Path, choices: random.Random) -> None:
    kind = choices.randrange(3)
    if kind == 0:
        with path.open("wb") as file:
            np.savez(file, thesis=np.arange(choices.randrange(1, 99)))
    elif kind == 1:
        model = onnx.load(bench.make_bench() / "original.onnx")
        model.metadata_props.add(
            key=choices.choice(("graphscale", "Graphscale.version", "graphscale.roles")), value="1"
        )
        path.write_bytes(model.SerializeToString())
    else:
        path.write_bytes(choices.choice(_MINE) + choices.randbytes(choices.randrange(200)))


# --- killed, or refused by the disk, at any step ----------------------------------------------------------------------

_WRITERS = {
    "scale": "scale original.onnx -o out.onnx",
    "scale FOLDER": "scale artifacts -o outfolder",
    "scale external": "scale external/model.onnx -o out.onnx",
    "autocast": "autocast original.onnx -o out.onnx",
    "lower": "lower step.onnx -o out.onnx",
    "strip": "strip step.onnx -o out.onnx",
    "strip external": "strip external/step.onnx -o out.onnx",
    "split": "split step.onnx -o out.onnx out2.onnx --stages 2",
    "fuse": "fuse artifacts -o out.onnx",
    "export-weights": "export-weights state.npz external/model.onnx -o out.onnx --partial",
    "inspect": "inspect original.onnx --html out.html --roles-out out.json",
    "lint": "lint step.onnx --sarif out.sarif",
    "plot": "plot run.jsonl -o out.png",
    "train": "train step.onnx --data data.npz --max-steps 4 --quiet --state state.npz --metrics out.jsonl -o out.onnx",
    "train csv": "train step.onnx --data data.npz --max-steps 4 --quiet --state state.npz --metrics out.csv",
    "train --checkpoint-dir": (
        "train step.onnx --data data.npz --max-steps 6 --quiet --state state.npz --checkpoint-dir outkept "
        "--checkpoint-every 1 --keep-checkpoints 2 --metrics out.jsonl --resume"
    ),
}


@dataclasses.dataclass(frozen=True)
class _Writer:
    """A command that writes, what it writes from old and from new files, and in how many steps."""

    words: list[str]
    old: Path
    new: Path
    fresh: Path
    steps: int

    def fill(self, folder: Path, replacing: bool) -> None:
        """Put the new files to read into a folder, and the outputs of the old ones."""
        shutil.copytree(self.fresh, folder, dirs_exist_ok=True)
        if replacing:
            for path in self.old.glob("out*.onnx*"):
                shutil.copy(path, folder)

    def find_loss(self, folder: Path) -> str | None:
        """Return the output that is neither whole and old, nor whole and new, nor missing."""
        for word in self.words:
            path = folder / word
            if not word.startswith("out") or not os.path.lexists(path) or path.name == "outkept":
                continue
            if path.suffix in (".jsonl", ".csv"):
                records = read_metrics(path)
                if records != read_metrics(self.new / word)[: len(records)]:
                    return f"{word} has other records"
            elif _digest(path) not in (_digest(self.old / word), _digest(self.new / word)):
                return f"{word} is neither old nor new"
        return None

    def find_hindrance(self, folder: Path) -> str | None:
        """Run the command again; return how it is hindered by what is left."""
        again = run([*self.words, "--force"], folder)
        if again.code != 0:
            return f"the next run fails: {again.err!r}"
        for word in self.words:
            if word.startswith("out") and word != "outkept" and _digest(folder / word) != _digest(self.new / word):
                return f"the next run writes another {word}"
        return None


def _digest(path: Path) -> Any:
    """Return the content of an output, of a model with its weights wherever they are."""
    if not path.exists():
        return None
    if path.is_dir():
        return {file.name: file.read_bytes() for file in path.iterdir()}
    if path.suffix != ".onnx":
        return path.read_bytes()
    model = onnx.load(path)
    for function in model.functions:
        del function.value_info[:]  # the order of these changes when a model is read and written again
    return model.SerializeToString()


@functools.cache
def _writer(name: str) -> _Writer:
    made = [Path(tempfile.mkdtemp(prefix=f"graphscale-{kind}-", dir=bench.make_bench().parent)) for kind in "ofn"]
    for folder in made:
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        bench.fill(folder)
    old, fresh, new = made
    for folder, value in ((old, 1.0), (fresh, 2.0), (new, 2.0)):
        _write_external(folder, value)
    for path in old.glob("*.onnx"):
        model = onnx.load(path)
        model.graph.doc_string = "old"
        onnx.save(model, path)
    words, counted = _WRITERS[name].split(), mmap.mmap(-1, 8)
    for folder, count in ((old, mmap.mmap(-1, 8)), (new, counted)):
        outcome = run(words, folder, _Steps(count).install)
        if outcome.code:
            raise RuntimeError(f"{name} fails on good files: {outcome.err!r}")
    return _Writer(words, old, new, fresh, int.from_bytes(counted[:], "little"))


def _write_external(folder: Path, value: float) -> None:
    """Write a training step, and a scaled one, with large weights in a file beside them."""
    (folder / "external").mkdir()
    model = sgd()
    for tensor_input in [item for item in model.graph.input if item.name in ("w1", "w2")]:
        shape = [dim.dim_value for dim in tensor_input.type.tensor_type.shape.dim]
        array = np.full(shape, value, np.float32)
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, tensor_input.name))
    for name, saved in (
        ("model", model),
        ("step", onnx.ModelProto.FromString(gs.scale(model).model.SerializeToString())),
    ):
        path = folder / "external" / f"{name}.onnx"
        onnx.save(saved, path, save_as_external_data=True, location=f"{name}.bin", size_threshold=16)


class _Steps(Steps):
    """Counts the steps in which a process changes files, and acts at one of them, or at all from there on."""

    functions = (*Steps.functions, "write", "truncate", "ftruncate", "utime")

    def __init__(
        self, count: mmap.mmap, last: int = 0, act: Callable[[], None] = lambda: None, once: bool = True
    ) -> None:
        self._shared, self._last, self._act, self._once = count, last, act, once

    def step(self) -> None:
        count = int.from_bytes(self._shared[:], "little") + 1
        self._shared[:] = count.to_bytes(8, "little")
        if self._last and (count == self._last if self._once else count >= self._last):
            self._act()


def _chosen(choices: random.Random) -> tuple[str, _Writer, bool]:
    name = choices.choice([*_WRITERS])
    writer = _writer(name)
    # Files of strip and export-weights are the user's: they do not replace them.
    return name, writer, writer.words[0] not in ("strip", "export-weights") and choices.random() < 0.6


def killed(folder: Path, choices: random.Random) -> str | None:
    """Kill a command at one of its steps; what is there is old or new, and the next run is not hindered."""
    name, writer, replacing = _chosen(choices)
    writer.fill(folder, replacing)
    last = choices.randrange(1, writer.steps + 1)
    kill = _Steps(mmap.mmap(-1, 8), last, lambda: os.kill(os.getpid(), signal.SIGKILL))
    outcome = run(writer.words, folder, kill.install)
    fault = None if outcome.code in (0, -signal.SIGKILL) else f"exit code {outcome.code}: {outcome.err!r}"
    fault = fault or writer.find_loss(folder) or writer.find_hindrance(folder)
    return fault and f"{name}, killed at step {last} of {writer.steps}, replacing {replacing}: {fault}"


@functools.cache
def _system_calls(name: str) -> dict[str, int]:
    """Count the system calls of a writer that change files."""
    writer = _writer(name)
    with tempfile.TemporaryDirectory() as folder:
        writer.fill(Path(folder), True)
        log = Path(folder, "log")
        _trace(writer.words, Path(folder), "-o", str(log))
        found = collections.Counter(re.findall(r"^(?:\d+ +)?(\w+)\(", log.read_text(errors="replace"), re.MULTILINE))
    return {call: found[call] for call in _CALLS if found[call]}


def _trace(words: list[str], folder: Path, *options: str) -> int:
    traced = ",".join(_CALLS)
    command = ["strace", "-f", "-qq", "-e", f"trace={traced}", "-e", "signal=none", *options]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1", "MPLCONFIGDIR": str(folder)}
    done = subprocess.run(
        [*command, sys.executable, "-m", "graphscale", *words],
        cwd=folder,
        env=environment,
        capture_output=True,
        check=False,
        timeout=300,
    )
    return done.returncode


def killed_in_system_calls(folder: Path, choices: random.Random) -> str | None:
    """Kill a command at one of its system calls that change files, by strace."""
    name, writer, replacing = _chosen(choices)
    writer.fill(folder, replacing)
    call, count = choices.choice([*_system_calls(name).items()])
    last = choices.randrange(1, count + 1)
    _trace(writer.words, folder, "-o", os.devnull, "-e", f"inject={call}:signal=KILL:when={last}")
    fault = writer.find_loss(folder) or writer.find_hindrance(folder)
    return fault and f"{name}, killed at {call} {last} of {count}, replacing {replacing}: {fault}"


def failing(folder: Path, choices: random.Random) -> str | None:
    """Let the disk refuse one step, or all from one on: one line, and all files are old, or all are new."""
    name, writer, replacing = _chosen(choices)
    writer.fill(folder, replacing)
    last, once = choices.randrange(1, writer.steps + 1), choices.random() < 0.7
    number = choices.choice((errno.ENOSPC, errno.EIO, errno.EACCES, errno.EDQUOT))

    def fail() -> None:
        raise OSError(number, os.strerror(number))

    before = contents(folder)
    outcome = run(writer.words, folder, _Steps(mmap.mmap(-1, 8), last, fail, once).install)
    fault = find_fault(writer.words, outcome, (0, 2)) or writer.find_loss(folder)
    if fault is None and outcome.code == 2 and once and writer.words[0] != "train":
        after, named = contents(folder), [word for word in writer.words if word.startswith("out")]
        if writer.words[0] == "inspect":  # its page and its roles are two outputs
            after, before = ({k: v for k, v in each.items() if k not in named} for each in (after, before))
        fault = None if after == before or _is_new(writer, folder) else "refused, and yet something was written"
    fault = fault or writer.find_hindrance(folder)
    often = "once" if once else "from there on"
    what = f"{os.strerror(number)} {often} at step {last} of {writer.steps}, replacing {replacing}"
    return fault and f"{name}, {what}: {fault}"


def _is_new(writer: _Writer, folder: Path) -> bool:
    names = [word for word in writer.words if word.startswith("out")]
    return all(_digest(folder / name) == _digest(writer.new / name) for name in names)


CATEGORY = Category(
    "loss",
    "no file of the user is replaced; after a kill or an error at any step each output is whole, old or new",
    {
        "its own input": own_input,
        "files of the user": foreign,
        "killed": killed,
        "a failing disk": failing,
        "killed in system calls": killed_in_system_calls,
    },
)
