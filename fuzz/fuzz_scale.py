"""A target for coverage-guided fuzzing: bytes as a model, through every command that reads one.

tests/fuzzing/ runs some thousand damaged files with every test run; this goes on for as long as it is let. It needs
atheris (Linux or macOS), in an environment of its own:

    python3.11 -m venv .fuzz && .fuzz/bin/pip install atheris -e '.[test]'
    .fuzz/bin/python fuzz/fuzz_scale.py                             # until it finds something, or Ctrl-C
    .fuzz/bin/python fuzz/fuzz_scale.py -max_total_time=3600 corpus/  # an hour; what covers new code is kept in corpus/
    .fuzz/bin/python fuzz/fuzz_scale.py crash-0123...               # once more what it found

The arguments are those of libFuzzer. The first byte chooses the command and its options; the rest is the file. New
files come from `tests/fuzzing/damage_models.py`, which keeps most of them protocol buffers, and from libFuzzer itself.
A finding is an exception that is none of graphscale's, more than 10 seconds, or an output of a command that failed;
atheris writes the input to crash-* and prints the traceback.
"""

from __future__ import annotations

import random
import sys
import tempfile
from pathlib import Path

import atheris

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # tests/ is no installed package

with atheris.instrument_imports(include=["graphscale", "onnx_ir"]):
    import graphscale as gs
    from graphscale.cli import COMMANDS, make_command

    for command in COMMANDS:
        make_command(command)

import onnx

from tests.fuzzing import seeds
from tests.fuzzing.damage_bytes import damage_bytes
from tests.fuzzing.damage_models import damage_model
from tests.fuzzing.holding import complaint

GOOD = "good.onnx"
COMMANDS: tuple[tuple[str, ...], ...] = (
    ("scale", "bad.onnx", "-o", "out.onnx"),
    ("scale", "bad.onnx", "-o", "out.onnx", "--target=ort-training", "--telemetry"),
    ("scale", "bad.onnx", "-o", "out.onnx", "--autocast=float16"),
    ("inspect", "bad.onnx", "--json"),
    ("inspect", "bad.onnx", "--html=page.html"),
    ("autocast", "bad.onnx", "-o", "out.onnx"),
    ("autocast", "bad.onnx", "-o", "out.onnx", "--emulate"),
    ("lint", "bad.onnx", "--json"),
    ("lower", "bad.onnx", "-o", "out.onnx"),
    ("strip", "bad.onnx", "-o", "out.onnx"),
    ("diff", GOOD, "bad.onnx", "--json"),
    ("diff", "bad.onnx", GOOD, "--html=page.html"),
    ("verify", GOOD, "bad.onnx", "--runs=0", "--json"),
)


class FoundError(Exception):
    """A promise that was broken."""


def test_one_input(data: bytes) -> None:
    """Run the command that the first byte names on the rest as a file."""
    if len(data) < 2:
        return
    arguments = COMMANDS[data[0] % len(COMMANDS)]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / GOOD).write_bytes(seeds.originals()[1].SerializeToString())
        (folder / "bad.onnx").write_bytes(data[1:])
        _, what = complaint(arguments, folder, (0, 1, 2))
    if what is not None:
        raise FoundError(f"graphscale {' '.join(arguments)}: {what}")


def mutate(data: bytes, largest: int, seed: int) -> bytes:
    """Another input from one: damage that keeps it a model, where it is one, else what libFuzzer does to bytes."""
    choices = random.Random(seed)
    if len(data) < 2 or choices.random() < 0.3:
        return bytes(atheris.Mutate(data, largest))
    head = data[:1] if choices.random() < 0.8 else choices.randbytes(1)
    other = choices.choice(seeds.rewritten())
    try:
        model = onnx.ModelProto.FromString(data[1:])
        body = damage_model(model, other, choices)
    except Exception:  # no protocol buffer, or one that cannot be written again: protobuf raises many kinds
        body = damage_bytes(data[1:], other.SerializeToString(), choices)
    return (head + body)[:largest]


def corpus(folder: Path) -> None:
    """Write the undamaged models, each with every command."""
    models = [*seeds.originals(), *seeds.rewritten()]
    for number, model in enumerate(models):
        for index in range(len(COMMANDS)):
            (folder / f"{number}-{index}").write_bytes(bytes([index]) + model.SerializeToString())


def main() -> None:
    """Fuzz."""
    assert issubclass(gs.GraphscaleError, Exception)
    with tempfile.TemporaryDirectory() as folder:
        corpus(Path(folder))
        given = sys.argv[1:] or [folder]
        replays = any(not word.startswith("-") and Path(word).is_file() for word in given)
        arguments = [sys.argv[0], *given, *([] if replays or folder in given else [folder])]
        atheris.Setup(arguments, test_one_input, custom_mutator=mutate)
        atheris.Fuzz()


if __name__ == "__main__":
    main()
