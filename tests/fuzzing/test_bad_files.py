"""Thousands of damaged models, and every command that reads one: success, or a refusal in one line.

The files are the same in every run. Set GRAPHSCALE_FUZZ_KEEP=FOLDER to find the files of failures there, and
GRAPHSCALE_FUZZ_TIMES=N for N times as many files; fuzz/fuzz_scale.py runs until it is stopped.
"""

from __future__ import annotations

import collections
import importlib.util
import os
import random
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import onnx
import pytest

from tests.fuzzing import seeds
from tests.fuzzing.damage_bytes import damage_bytes
from tests.fuzzing.damage_models import damage_model, random_model
from tests.fuzzing.holding import Broken, choices_for, hold

pytestmark = pytest.mark.static

TIMES = int(os.environ.get("GRAPHSCALE_FUZZ_TIMES", "1"))
# Files of each part; there are PARTS parts of each command, so that several processes can share the work.
FILES, PARTS = 45, 8
HAS_LINT = importlib.util.find_spec("graphscale.cli.lint") is not None

Damage = Callable[[onnx.ModelProto, onnx.ModelProto, random.Random], bytes]


def damaged(model: onnx.ModelProto, other: onnx.ModelProto, choices: random.Random) -> bytes:
    """A damaged file of a model; rarely one that has nothing of it."""
    kind = choices.randrange(20)
    if kind == 0:
        return random_model(choices)
    if kind <= 5:
        return damage_bytes(model.SerializeToString(), other.SerializeToString(), choices)
    return damage_model(model, other, choices)


def command(name: str, folder: Path, choices: random.Random) -> list[str]:
    """Put a bad file, and what else the command needs, into a folder; return the command's arguments."""
    options = {
        "scale": [
            *([], ["--target=ort-training"], ["--loss-scale=1024"], ["--autocast=float16"]),
            *(["--telemetry"], ["--telemetry=ranges,activations"]),
        ],
        "autocast": [[], ["--emulate"], ["--dtype=bfloat16"], ["--loss-scale=dynamic"]],
        "inspect": [[], ["--json"], ["--html=page.html"]],
        "lint": [[], ["--json"], ["--sarif=out.sarif"]],
        "diff": [[], ["--json"], ["--html=page.html"], ["--exit-code"]],
        "verify": [["--runs=0"], ["--runs=0", "--json"]],
        "strip": [[]],
    }
    given = choices.choice(options[name])
    original, scaled = choices.choice(seeds.pairs())
    if name in ("diff", "verify"):
        good, bad = (original, scaled) if choices.random() < 0.75 else (scaled, original)
        (folder / "good.onnx").write_bytes(good.SerializeToString())
        files = ["good.onnx", "bad.onnx"] if bad is scaled else ["bad.onnx", "good.onnx"]
    elif name == "strip":
        bad, files = choices.choice(seeds.rewritten()), ["bad.onnx", "-o", "out.onnx"]
    elif name in ("inspect", "lint"):
        bad, files = choices.choice((*seeds.originals(), scaled)), ["bad.onnx"]
    else:
        bad, files = choices.choice(seeds.originals()), ["bad.onnx", "-o", "out.onnx"]
    (folder / "bad.onnx").write_bytes(damaged(bad, choices.choice(seeds.rewritten()), choices))
    return [name, *files, *given]


COMMANDS = ["scale", "scale", "inspect", "autocast", "verify", "diff", "strip", *(["lint"] if HAS_LINT else [])]


@pytest.mark.sample(2)
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("index", range(len(COMMANDS)), ids=lambda index: f"{COMMANDS[index]}-{index}")
def test_a_bad_file(index: int, part: int, tmp_path: Path) -> None:
    name, codes, broken = COMMANDS[index], collections.Counter[int | None](), list[Broken]()
    for number in range(part * FILES * TIMES, (part + 1) * FILES * TIMES):
        where = f"{name}-{index}-{number}"
        folder = tmp_path / where
        folder.mkdir()
        arguments = command(name, folder, choices_for(index, *divmod(number, 2 * FILES)))
        code, found = hold(arguments, folder, where, allowed(name))
        codes[code] += 1
        broken += found
        shutil.rmtree(folder)
    assert_nothing(broken)
    assert codes[2] > 0.2 * codes.total(), codes
    assert codes[0] + codes[1] > 0.02 * codes.total(), codes


def allowed(name: str) -> Sequence[int]:
    """The exit codes of a command: 1 only where it checks something."""
    return (0, 1, 2) if name in ("verify", "diff", "lint") else (0, 2)


def assert_nothing(broken: Sequence[Broken]) -> None:
    """Nothing went wrong; else each defect once, with a file that shows it and how many do."""
    kinds = collections.defaultdict[str, list[str]](list)
    for each in broken:
        kinds[each.what.partition(": ")[0]].append(f"{each.where}: {each.what}")
    lines = [f"{len(found)} x {found[0]}" for found in kinds.values()]
    assert not lines, "\n".join([f"{len(broken)} files, {len(lines)} kinds", *lines])
