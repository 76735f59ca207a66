"""Damage that parsers stumble over, streams that fail, and Ctrl-C at any time: one line, never a traceback."""

from __future__ import annotations

import base64
import functools
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import onnx

from fuzz.hostile import bench, damage
from fuzz.hostile.processes import Outcome, find_fault, hold, run
from fuzz.hostile.runner import Category
from fuzz.hostile.state_files import Case, forgeries
from tests.conftest import ROOT
from tests.fuzzing import seeds
from tests.fuzzing.damage_bytes import damage_bytes
from tests.fuzzing.damage_models import damage_model


def arrays(folder: Path, choices: random.Random) -> str | None:
    """Damage an .npz or .npy file."""
    words, path = bench.choose(choices, folder, ".npz", ".npy")
    if path.suffix == ".npz":
        damage.npz(path, choices)
    else:
        path.write_bytes(damage.npy_header(choices))
    return hold(words, folder)


def tensors(folder: Path, choices: random.Random) -> str | None:
    """Damage a tensor of a model: of an initializer, or of an attribute."""
    words, path = bench.choose(choices, folder, ".onnx")
    model = onnx.load(path)
    found = [*damage.messages(model, onnx.TensorProto)] or [model.graph.initializer.add(name="w")]
    for tensor in choices.sample(found, min(len(found), choices.choice((1, 1, 3)))):
        damage.spoil_tensor(tensor, choices)
    path.write_bytes(model.SerializeToString())
    return hold(words, folder)


def sizes(folder: Path, choices: random.Random) -> str | None:
    """Give axes and constants of a model negative and huge sizes."""
    words, path = bench.choose(choices, folder, ".onnx")
    model = onnx.load(path)
    damage.spoil_sizes(model, choices)
    path.write_bytes(model.SerializeToString())
    return hold(words, folder)


def models(folder: Path, choices: random.Random) -> str | None:
    """Damage a model in any way that keeps it a protocol buffer."""
    words, path = bench.choose(choices, folder, ".onnx")
    path.write_bytes(damage_model(onnx.load(path), choices.choice(seeds.rewritten()), choices))
    return hold(words, folder)


def json_files(folder: Path, choices: random.Random) -> str | None:
    """Damage a JSON file, or a line of metrics."""
    words, path = bench.choose(choices, folder, ".json", ".jsonl", ".csv")
    lines = path.read_bytes().splitlines()
    if path.suffix == ".json":
        path.write_bytes(damage.json_text(b"\n".join(lines), choices))
    elif path.suffix == ".jsonl":
        path.write_bytes(b"\n".join(damage.json_text(line, choices) for line in lines) + b"\n")
    else:
        path.write_bytes(damage_bytes(b"\n".join(lines), b',,"\n\0' * 99, choices) + b"\n")
    return hold(words, folder)


def metadata(folder: Path, choices: random.Random) -> str | None:
    """Damage graphscale's own metadata in a model."""
    words, path = bench.choose(choices, folder, ".onnx")
    model = onnx.load(path)
    own = [item for item in model.metadata_props if item.key.startswith("graphscale.")]
    for item in choices.sample(own, min(len(own), choices.choice((1, 1, 2)))):
        if item.key == "graphscale.original" and choices.random() < 0.8:
            item.value = base64.b64encode(damage.record(base64.b64decode(item.value), choices)).decode()
        elif item.value[:1] in "{[":
            item.value = damage.json_text(item.value.encode(), choices).decode(errors="replace")
        else:
            item.value = choices.choice(("", "{}", "x" * 100_000, "é", "\0", "0.0.0", "===="))
    if not own:
        key = choices.choice(
            ("version", "roles", "original", "report", "names", "state", "policy", "target", "autocast")
        )
        model.metadata_props.add(
            key=f"graphscale.{key}", value=choices.choice(("", "{}", "[]", "x", "null", "[" * 9999))
        )
    path.write_bytes(model.SerializeToString())
    return hold(words, folder)


@functools.cache
def _forgeries() -> tuple[Case, ...]:
    return tuple(forgeries((bench.make_bench() / "kept" / "step-00000002.safetensors").read_bytes()))


def states(folder: Path, choices: random.Random) -> str | None:
    """Forge a state file or a checkpoint, the position in it among others; or damage it."""
    words, path = bench.choose(choices, folder, ".safetensors")
    data = choices.choice(_forgeries()).data if choices.random() < 0.7 else path.read_bytes()
    path.write_bytes(damage_bytes(data, data, choices) if choices.random() < 0.4 else data)
    return hold(words, folder)


def any_bytes(folder: Path, choices: random.Random) -> str | None:
    """Damage any file as bytes, or put a file of another kind in its place."""
    words, path = bench.choose(choices, folder)
    data = path.read_bytes()
    if choices.random() < 0.3:
        data = (folder / choices.choice(bench.calls_on())[1]).read_bytes()
    path.write_bytes(damage_bytes(data, data, choices) if data and choices.random() < 0.9 else data)
    return hold(words, folder)


# --- streams and signals ----------------------------------------------------------------------------------------------


def streams(folder: Path, choices: random.Random) -> str | None:
    """Let stdout be full, closed, or a pipe that is read for some bytes."""
    bench.fill(folder)
    words = bench.words_of(choices.choice([*bench.CALLS]))
    kind = choices.choice(("full", "closed", "unread", "read"))
    if kind == "full":
        with Path("/dev/full").open("wb") as full:
            outcome = run(words, folder, stdout=full.fileno())
        codes: tuple[int, ...] = (2,) if "--quiet" not in words else (0,)
    elif kind == "closed":
        outcome = run(words, folder, lambda: os.close(1))
        codes = (2,) if "--quiet" not in words else (0,)
    else:
        outcome = _piped(words, folder, choices.choice((1, 10, 100, 5000)) if kind == "read" else 0)
        codes = (0, -signal.SIGPIPE)
    if words[0] == "lint":
        codes += (1,)
    fault = find_fault(words, outcome, codes)
    if fault is None and outcome.code != 2 and outcome.err:
        fault = f"on stderr: {outcome.err!r}"
    return fault and f"graphscale {' '.join(words)}, stdout {kind}: {fault}"


def _piped(words: list[str], folder: Path, count: int) -> Outcome:
    reading, writing = os.pipe()

    def read() -> None:
        if count:
            os.read(reading, count)
        os.close(reading)

    reader = threading.Thread(target=read)
    if count:
        reader.start()
        outcome = run(words, folder, lambda: os.close(reading), writing)
        os.close(writing)
        reader.join()
    else:
        read()
        outcome = run(words, folder, stdout=writing)
        os.close(writing)
    return outcome


def interrupted(folder: Path, choices: random.Random) -> str | None:
    """Send SIGINT, once or twice, at any time of a command whose imports are done."""
    bench.fill(folder)
    words = bench.words_of(choices.choice([*bench.CALLS]))
    delays = [choices.random() * choices.choice((0.02, 0.1, 0.4)) for _ in range(choices.choice((1, 1, 2)))]

    def prepare() -> None:
        signal.signal(signal.SIGALRM, _interrupt)
        signal.setitimer(signal.ITIMER_REAL, delays[0], delays[-1])

    return _end_of_interrupted(words, run(words, folder, prepare), f"SIGINT after {delays}")


def _interrupt(*_: object) -> None:
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:  # the command has begun
        signal.raise_signal(signal.SIGINT)


def interrupted_imports(folder: Path, choices: random.Random) -> str | None:
    """Send SIGINT at any time to a process that begins with its imports."""
    bench.fill(folder)
    words = bench.words_of(choices.choice([*bench.CALLS]))
    delay = choices.random() * choices.choice((0.3, 1.5))
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}
    with subprocess.Popen(
        [sys.executable, "-m", "graphscale", *words],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        time.sleep(delay)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=120)
    if b"Traceback" in err and b"graphscale" not in err:
        return None  # Python was still starting, before the first line of graphscale
    return _end_of_interrupted(words, Outcome(process.returncode, out, err), f"SIGINT after {delay:.3f} s")


def _end_of_interrupted(words: list[str], outcome: Outcome, what: str) -> str | None:
    codes = (0, 130, -signal.SIGINT, *((1,) if words[0] == "lint" else ()))
    fault = find_fault(words, outcome, codes)
    if (
        fault is None
        and outcome.err
        and (words[0] != "train" or not outcome.err.startswith(b"graphscale: interrupted"))
    ):
        fault = f"on stderr: {outcome.err!r}"
    return fault and f"graphscale {' '.join(words)}, {what}: {fault}"


_KINDS: dict[str, Callable[[Path, random.Random], str | None]] = {
    "arrays": arrays,
    "tensors": tensors,
    "sizes": sizes,
    "models": models,
    "JSON": json_files,
    "metadata": metadata,
    "state files": states,
    "any bytes": any_bytes,
    "streams": streams,
    "interrupted": interrupted,
    "interrupted imports": interrupted_imports,
}
CATEGORY = Category("tracebacks", "done, or one line and exit code 2; never a traceback", _KINDS)
