"""Files are complete or missing, a model together with its weights, at any kill of the process."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import pytest

from graphscale.errors import OutputError
from graphscale.files import model_files, saving, writing

pytestmark = pytest.mark.static

NAMES = ["step.onnx", "step.onnx.data"]
# The sizes of the weights: within the model, in a file that is copied as a whole, and in two files.
SMALL, COPIED, TENSORS = (1,), (200, 200), (200, 200, 200)
PAIR = (300, 300)


def make(path: Path, name: str, *sizes: int) -> None:
    """Write a model whose weights all hold the length of its name, the third and further ones in a second file."""
    path.parent.mkdir(parents=True)
    proto = onnx.parser.parse_model(
        f'<ir_version: 10, opset_import: ["" : 20]> {name} (float[1] x) => (float[1] x) {{ }}'
    )
    for i, size in enumerate(sizes):
        array = np.full(size, len(name), np.float32)
        tensor = onnx.numpy_helper.from_array(array, f"w{i}")
        if size > 1:
            location = f"{path.name}.data" if i < 2 else "more.data"
            with (path.parent / location).open("ab") as file:
                onnx.external_data_helper.set_external_data(tensor, location, file.tell(), array.nbytes)
                file.write(tensor.raw_data)
            tensor.ClearField("raw_data")
        proto.graph.initializer.append(tensor)
    onnx.save(proto, path)


@pytest.mark.full
@pytest.mark.parametrize(
    ("old", "new"),
    [
        pytest.param((), SMALL, id="a new file", marks=pytest.mark.full),
        pytest.param(SMALL, SMALL, id="over a file", marks=pytest.mark.full),
        pytest.param((), COPIED, id="a new pair", marks=pytest.mark.full),
        pytest.param(PAIR, COPIED, id="over a pair"),
        pytest.param(PAIR, TENSORS, id="over a pair, by tensors", marks=pytest.mark.full),
    ],
)
def test_killed_at_any_step(old: tuple[int, ...], new: tuple[int, ...], tmp_path: Path) -> None:
    if old:
        make(tmp_path / "old" / "step.onnx", "old", *old)
    else:
        (tmp_path / "old").mkdir()
    make(tmp_path / "new" / "step.onnx", "another", *new)
    command = [sys.executable, Path(__file__).with_name("killed_writer.py"), tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    states, names = zip(*json.loads(done.stdout), strict=True)
    assert len(states) > 5
    before, *after = (state for state, _ in itertools.groupby(states))
    if old:
        assert before == "old"
    else:
        assert "cannot read" in before and "No such file" in before
    assert after == ["another"]
    # And each time, the files that were written next are all that there is.
    assert {tuple(found) for found in names} == {tuple(NAMES if len(new) > 1 else NAMES[:1])}


def test_names_are_the_same_when_a_pair_is_replaced(tmp_path: Path) -> None:
    make(tmp_path / "new" / "step.onnx", "another", 200, 200)
    for _ in range(3):
        saving.save(model_files.load(tmp_path / "new" / "step.onnx"), tmp_path / "step.onnx")
        assert sorted(path.name for path in tmp_path.iterdir() if path.is_file()) == NAMES
    locations = {tensor.location for tensor in external(tmp_path / "step.onnx")}
    assert locations == {"step.onnx.data"}


def external(path: Path) -> list[ir.ExternalTensor]:
    tensors = [value.const_value for value in model_files.load(path).graph.initializers.values()]
    return [tensor for tensor in tensors if isinstance(tensor, ir.ExternalTensor)]


def test_weights_beside_a_file_that_is_no_model(tmp_path: Path) -> None:
    make(tmp_path / "new" / "step.onnx", "another", 200, 200)
    (tmp_path / "step.onnx").write_bytes(b"\xff\xff\xff\xff")
    saving.save(model_files.load(tmp_path / "new" / "step.onnx"), tmp_path / "step.onnx")
    assert len(external(tmp_path / "step.onnx")) == 2


def fail(path: Path, error: type[Exception]) -> None:
    with writing.write_file(path) as temporary:
        temporary.write_text("half")
        raise error


def test_a_file_that_a_folder_cannot_take_is_named_as_it_would_be(tmp_path: Path) -> None:
    target = tmp_path / "new"
    with pytest.raises(OutputError) as caught, writing.write_folder(target) as folder:
        fail(folder / "nowhere" / "file", RuntimeError)
    assert str(caught.value).startswith(f"the folder {target}/nowhere does not exist")
    assert list(tmp_path.iterdir()) == []


def test_a_block_that_fails_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("old")
    path.chmod(0o640)
    for error, expected in ((RuntimeError, RuntimeError), (OSError, OutputError)):
        with pytest.raises(expected):
            fail(path, error)
        assert [file.name for file in tmp_path.iterdir()] == ["file"]
        assert path.read_text() == "old"
    with writing.write_file(path) as temporary:
        temporary.write_text("new")
    assert path.read_text() == "new"
    assert path.stat().st_mode & 0o777 == 0o640


FAILING = """
import resource, signal, sys
from graphscale.errors import OutputError
from graphscale.files import model_files, saving
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
model = model_files.load(sys.argv[1])
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[3]), resource.RLIM_INFINITY))
try:
    saving.save(model, sys.argv[2])
except OutputError as error:
    sys.exit(f"refused: {error}")
"""


@pytest.mark.full
@pytest.mark.parametrize("new", [SMALL, COPIED, TENSORS], ids=["a file", "a pair", "by tensors"])
def test_a_write_that_fails_at_any_byte(new: tuple[int, ...], tmp_path: Path) -> None:
    """The old pair stays, and nothing beside it."""
    make(tmp_path / "new" / "step.onnx", "another", *new)
    sizes = [path.stat().st_size for path in (tmp_path / "new").iterdir()]
    for limit in sorted({0, 1, 100, *(size - 1 for size in sizes), *(size // 2 for size in sizes), sum(sizes)}):
        folder = tmp_path / f"out{limit}"
        make(folder / "step.onnx", "old", *PAIR)
        before = {path.name: path.read_bytes() for path in folder.iterdir()}
        command = [sys.executable, "-c", FAILING, tmp_path / "new" / "step.onnx", folder / "step.onnx", str(limit)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        if limit < sum(sizes):
            assert done.returncode in (0, 1) and "Traceback" not in done.stderr, done.stderr
        if done.returncode:
            assert "refused: cannot write" in done.stderr
            assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
        else:
            assert limit >= min(sizes)
            assert model_files.load(folder / "step.onnx").graph.name == "another"
