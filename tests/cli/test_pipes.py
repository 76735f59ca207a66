"""Files through standard input, standard output and the pipes of a shell."""

from __future__ import annotations

import io
import json
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest

import graphscale as gs
from graphscale.analysis.roles.roles_file import roles_file
from graphscale.errors import OutputError
from graphscale.files.descriptors import descriptor_of
from graphscale.training.record import StepRecord
from tests.build import feeds_for
from tests.cli.bad_graphs import sgd
from tests.cli.command import contents

pytestmark = pytest.mark.static

PROGRAM = shlex.join([sys.executable, "-m", "graphscale"])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    onnx.save(sgd(), tmp_path / "original.onnx")
    gs.scale(sgd()).save(tmp_path / "step.onnx")
    arrays = feeds_for(sgd())
    np.savez(tmp_path / "feeds.npz", **arrays)
    np.savez(tmp_path / "state.npz", w1=arrays["w1"], w2=arrays["w2"])
    np.savez(tmp_path / "data.npz", x=arrays["x"], t=arrays["t"])
    session = gs.Session(tmp_path / "step.onnx", state={name: arrays[name] for name in ("w1", "w2")})
    session.save_state(tmp_path / "state.safetensors", {"epoch": "1"})
    (tmp_path / "scale.json").write_text(gs.presets.torch().to_json())
    (tmp_path / "roles.json").write_text(roles_file(gs.inspect(sgd()).roles))
    rows = (StepRecord(step, 1, 0.5, 8.0, 8.0, True).to_row() for step in (1, 2))
    (tmp_path / "run.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return tmp_path


def shell(folder: Path, line: str, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    """Run a line of bash, in which GS is the program; the exit code is that of the last command of a pipe."""
    words = ["bash", "-c", line.replace("GS", PROGRAM)]
    return subprocess.run(words, cwd=folder, input=stdin, capture_output=True, check=False, timeout=120)


READING = {
    "a model": ("original.onnx", "GS inspect - --json", "GS inspect original.onnx --json"),
    "roles": (
        "roles.json",
        "GS inspect original.onnx --roles=- --json",
        "GS inspect original.onnx --roles roles.json --json",
    ),
    "a loss scale": (
        "scale.json",
        "GS scale original.onnx --loss-scale - --dry-run --json",
        "GS scale original.onnx --loss-scale torch --dry-run --json",
    ),
    "feeds": (
        "feeds.npz",
        "GS verify original.onnx step.onnx --runs=1 --feeds - --json",
        "GS verify original.onnx step.onnx --runs=1 --feeds feeds.npz --json",
    ),
    "a state": (
        "state.safetensors",
        "GS export-weights - original.onnx -o out.onnx --partial --json",
        "GS export-weights state.safetensors original.onnx -o out.onnx --partial --json",
    ),
    "metrics": ("run.jsonl", "GS plot - -o run.png --json", "GS plot run.jsonl -o run.png --json"),
    "a step": ("step.onnx", "GS lint /dev/stdin --json", "GS lint step.onnx --json"),
}


@pytest.mark.full
@pytest.mark.parametrize("kind", READING)
def test_reading(kind: str, folder: Path) -> None:
    file, through, named = READING[kind]
    piped = shell(folder, f"cat {file} | {through}")
    assert (piped.returncode, piped.stderr) == (0, b"")
    assert json.loads(piped.stdout) == json.loads(shell(folder, named).stdout)


@pytest.mark.full
def test_training_from_pipes(folder: Path) -> None:
    line = "GS train <(cat step.onnx) --data - --state <(cat state.npz) --max-steps=2 --json < <(cat data.npz)"
    done = shell(folder, line)
    assert (done.returncode, done.stderr) == (0, b"")
    assert json.loads(done.stdout)["steps"] == 2


@pytest.mark.full
def test_a_pipe_of_commands(folder: Path) -> None:
    assert shell(folder, "GS scale original.onnx -o named.onnx").returncode == 0
    expected = (folder / "named.onnx").read_bytes()
    done = shell(folder, "GS scale original.onnx -o - | tee piped.onnx | GS verify original.onnx - --runs=1")
    assert done.returncode == 0 and b"verified" in done.stdout
    assert done.stderr.splitlines()[0] == b"original.onnx scaled -> /dev/stdout"
    assert (folder / "piped.onnx").read_bytes() == expected


@pytest.mark.full
@pytest.mark.parametrize("output", ["-o -", "--output=-", "-o-", "-o /dev/stdout"])
def test_writing(output: str, folder: Path) -> None:
    done = shell(
        folder, f"GS scale original.onnx {output} -q > redirected.onnx; GS scale original.onnx -o named.onnx -q"
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")
    assert (folder / "redirected.onnx").read_bytes() == (folder / "named.onnx").read_bytes()


REFUSED = {
    "twice": ("cat original.onnx | GS verify - -", "standard input can be read once"),
    "nothing": ("GS inspect - < /dev/null", "/dev/stdin is not an ONNX model"),
    "text": ("echo hello | GS inspect -", "/dev/stdin is not an ONNX model"),
    "object and file": ("GS scale original.onnx -o - --json", "--json and -o - both need standard output"),
    "a picture": ("GS plot run.jsonl -o -", "/dev/stdout"),
    "weights elsewhere": ("cat apart.onnx | GS inspect -", "weights in files beside it"),
    "weights to go": ("GS strip apart_step.onnx -o -", "the weights need another one"),
    "closed": ("GS strip step.onnx -o - >&-", "cannot write /dev/stdout"),
    "full": ("GS strip step.onnx -o - >/dev/full", "cannot write /dev/stdout: No space left on device"),
    "a pipe with a name": ("mkfifo pipe; GS inspect pipe; code=$?; rm pipe; exit $code", "it is no regular file"),
}


@pytest.mark.full
@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str, folder: Path) -> None:
    """In one line, with nothing written."""
    if "apart" in REFUSED[case][0]:
        model = sgd()
        weights = [onnx.numpy_helper.from_array(value, name) for name, value in feeds_for(model).items() if "w" in name]
        model.graph.initializer.extend(weights)
        onnx.save(model, folder / "apart.onnx", save_as_external_data=True, location="apart.data", size_threshold=0)
        gs.scale(folder / "apart.onnx").save(folder / "apart_step.onnx")
    line, words = REFUSED[case]
    before = contents(folder)
    done = shell(folder, line)
    assert (done.returncode, done.stdout) == (2, b""), done.stderr
    (said,) = done.stderr.decode().splitlines()
    assert said.startswith("graphscale: ") and words in said
    assert contents(folder) == before


@pytest.mark.full
def test_a_terminal_is_not_read(folder: Path) -> None:
    script = shutil.which("script")
    if script is None:
        pytest.skip("needs script, which makes a terminal")
    for line, words in (("inspect -", "pipe a file into it"), ("strip step.onnx -o -", "redirect it")):
        done = subprocess.run(
            [script, "-qec", f"{PROGRAM} {line}", "/dev/null"],
            cwd=folder,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        assert done.returncode == 2 and words in done.stdout


@pytest.mark.parametrize(
    ("path", "number"),
    [("/dev/stdin", 0), ("/dev/stdout", 1), ("/dev/fd/63", 63), ("/proc/self/fd/7", 7), ("stdin", None), ("-", None)],
)
def test_paths_of_descriptors(path: str, number: int | None) -> None:
    assert descriptor_of(path) == descriptor_of(Path(path)) == number


@pytest.mark.full
def test_python_writes_there_too(folder: Path) -> None:
    code = "import graphscale as gs; gs.scale('original.onnx').save('/dev/stdout')"
    done = shell(folder, f"{sys.executable} -c {shlex.quote(code)} | cat")
    assert done.returncode == 0 and onnx.load(io.BytesIO(done.stdout)).graph.output[-1].name == "all_finite"
    with pytest.raises(OutputError, match="takes one file"):
        gs.split(folder / "step.onnx").save("/dev/stdout", folder / "update.onnx")
