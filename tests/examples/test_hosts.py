"""The hosts of examples/ train without graphscale as gs.Session does: the same weights, scales and skipped step."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import onnxruntime as ort
import pytest

import graphscale as gs
from examples.prepare import OVERFLOW, STEPS, prepare

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
LEARNING_RATE = 0.005
LINE = re.compile(r"step (\d+)  loss (\S+)  loss scale (\S+)(  skipped)?")

NODE_MODULES = Path(os.environ.get("NODE_MODULES", EXAMPLES / "node" / "node_modules"))
HEADERS = os.environ.get("ONNXRUNTIME_HEADERS")
LIBRARIES = sorted((Path(ort.__file__).parent / "capi").glob("libonnxruntime.so.*"))
needs_node = pytest.mark.skipif(
    shutil.which("node") is None or not (NODE_MODULES / "onnxruntime-node").is_dir(),
    reason="needs npm install --ignore-scripts --prefix examples/node",
)
needs_headers = pytest.mark.skipif(
    HEADERS is None or not LIBRARIES or shutil.which("g++") is None,
    reason="needs g++, stock onnxruntime, and its C++ headers in the folder ONNXRUNTIME_HEADERS",
)
TARGETS = ["onnx", "ort-cpu"]

Arrays = dict[str, np.ndarray]
Steps = list[tuple[int, float, float, bool]]


@pytest.fixture(scope="module", params=TARGETS)
def files(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("files")
    prepare(folder, request.param)
    return folder


@pytest.fixture(scope="module")
def expected(files: Path) -> tuple[Arrays, list[float], list[float]]:
    """The state, the losses and the loss scales of the same training with gs.Session."""
    images = np.fromfile(files / "images.bin", np.float32).reshape(STEPS, -1, 64)
    labels = np.fromfile(files / "labels.bin", np.int64).reshape(STEPS, -1)
    losses, scales = [], []
    with gs.Session(files / "step.onnx", state=dict(np.load(files / "start.npz"))) as session:
        for x, y in zip(images, labels, strict=True):
            result = session.step({"images": x, "labels": y, "learning_rate": np.array(LEARNING_RATE, np.float32)})
            losses.append(float(result["loss"]))
            scales.append(session.loss_scale)
        return session.state_dict(), losses, scales


def run(*command: str | Path, cwd: Path | None = None) -> tuple[str, str]:
    """Run a command; return its standard output and its standard error."""
    done = subprocess.run(command, cwd=cwd, capture_output=True, check=False, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


def read_steps(printed: str) -> Steps:
    """Read what a host prints: number of the step, loss, loss scale, skipped."""
    rows = [LINE.fullmatch(line) for line in printed.splitlines()]
    assert all(rows), printed
    return [(int(row[1]), float(row[2]), float(row[3]), row[4] is not None) for row in rows if row]


def train(*command: str | Path) -> Steps:
    printed, errors = run(*command)
    assert errors == ""
    return read_steps(printed)


def check_steps(steps: Steps, losses: list[float], scales: list[float]) -> None:
    assert [number for number, *_ in steps] == sorted([*range(10, STEPS + 1, 10), OVERFLOW])
    assert [number for number, *_, skipped in steps if skipped] == [OVERFLOW]
    for number, loss, scale, skipped in steps:
        assert scale == scales[number - 1]
        assert np.isnan(loss) if skipped else loss == pytest.approx(losses[number - 1], rel=1e-5)
    assert losses[-1] < losses[0] / 2 and scales[OVERFLOW - 1] == scales[OVERFLOW - 2] / 2 and max(scales) > scales[0]


def check_state(found: Arrays, wanted: Arrays) -> None:
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert found[name].dtype == value.dtype
        np.testing.assert_allclose(found[name], value, rtol=1e-5, atol=1e-5, err_msg=name)


def read_trained(folder: Path, like: Arrays) -> Arrays:
    """Read the raw files of a state."""
    assert {path.stem for path in (folder / "trained").iterdir()} == like.keys()
    return {
        name: np.fromfile(folder / "trained" / f"{name}.bin", value.dtype).reshape(value.shape)
        for name, value in like.items()
    }


@pytest.fixture
def folder(files: Path, tmp_path: Path) -> Path:
    """A copy of the files, for a host to write to."""
    return Path(shutil.copytree(files, tmp_path / "files"))


@pytest.mark.full
def test_python(folder: Path, expected: tuple[Arrays, list[float], list[float]]) -> None:
    state, losses, scales = expected
    script = EXAMPLES / "python_loop" / "train.py"
    check_steps(train(sys.executable, script, folder), losses, scales)
    check_state(dict(np.load(folder / "state.npz")), state)
    assert "graphscale" not in re.findall(r"^(?:import|from) (\w+)", script.read_text("utf-8"), re.MULTILINE)
    resumed = train(sys.executable, script, folder, folder / "state.npz")
    assert resumed[0][2] == scales[-1] and resumed[-1][1] < losses[-1] / 2


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example in C++, compiled."""
    build = tmp_path_factory.mktemp("build")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHON", sys.executable)
        run(EXAMPLES / "cpp" / "build.sh", str(HEADERS), build)
    return build / "train"


@needs_headers
def test_cpp(folder: Path, expected: tuple[Arrays, list[float], list[float]], program: Path) -> None:
    state, losses, scales = expected
    check_steps(train(program, folder), losses, scales)
    check_state(read_trained(folder, state), state)


@needs_node
def test_node(folder: Path, expected: tuple[Arrays, list[float], list[float]]) -> None:
    state, losses, scales = expected
    for name in ("train.js", "package.json"):  # a module finds libraries beside itself
        shutil.copy(EXAMPLES / "node" / name, folder)
    (folder / "node_modules").symlink_to(NODE_MODULES.absolute())
    check_steps(train("node", folder / "train.js", folder), losses, scales)
    check_state(read_trained(folder, state), state)


@needs_headers
@needs_node
def test_the_commands_of_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All shell commands of the page, in order, but for those that install what is here already."""
    page = (ROOT / "docs" / "start" / "deploy.md").read_text("utf-8")
    block = r"^<!-- not run: tests/examples/test_hosts[^\n]+\n```bash\n(.*?)^```"
    blocks = re.findall(block, page, re.MULTILINE | re.DOTALL)
    shutil.copytree(EXAMPLES, tmp_path / "examples", ignore=shutil.ignore_patterns("node_modules", "site"))
    (tmp_path / "examples" / "node" / "node_modules").symlink_to(NODE_MODULES.absolute())
    (tmp_path / "onnxruntime" / "lib").mkdir(parents=True)
    for name in ("libonnxruntime.so", "libonnxruntime.so.1"):
        (tmp_path / "onnxruntime" / "lib" / name).symlink_to(LIBRARIES[0])
    for name in ("headers", "onnxruntime/include"):
        (tmp_path / name).symlink_to(Path(str(HEADERS)).absolute())
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    printed = []
    for line in "".join(blocks).splitlines():
        if re.match(r"pip install|npm install|examples/cpp/get_headers.sh", line):
            continue
        output, _ = run("bash", "-euc", line, cwd=tmp_path)
        if "examples.prepare" in line:
            assert output.startswith("files: the scaled step"), output
        else:
            printed += read_steps(output)
    shown = read_steps("\n".join(re.findall(r"^step \d+  loss .*$", page, re.MULTILINE)))
    assert len(printed) == 4 * (STEPS // 10 + 1), "two programs in C++, one in Python, one in JavaScript"
    assert len(shown) >= 4
    for number, loss, scale, skipped in printed:
        alike = [row for row in shown if row[0] == number]
        assert alike in ([], [(number, pytest.approx(loss, rel=1e-3, nan_ok=True), scale, skipped)])


# --- the pages on a wrong loop ------------------------------------------------------------------


@pytest.mark.full
def test_inputs_of_a_session_leave_out_the_loss_scale(files: Path) -> None:
    session = ort.InferenceSession(files / "step.onnx", providers=["CPUExecutionProvider"])
    listed = {value.name for value in session.get_inputs()}
    hidden = {value.name for value in session.get_overridable_initializers()}
    assert hidden == {"current_loss_scale", "good_steps"} and not hidden & listed
    carried: Arrays = dict(np.load(files / "start.npz"))
    names = [value.name for value in session.get_outputs()]
    images = np.full((64, 64), np.inf, np.float32)
    batch = {"images": images, "labels": np.zeros(64, np.int64), "learning_rate": np.array(LEARNING_RATE, np.float32)}
    for _ in range(3):
        results = dict(zip(names, session.run(names, batch | carried), strict=True))
        # The mistake: what is no input of the list is not fed back.
        carried = {name: results[f"{name}.next"] for name in listed if f"{name}.next" in results}
        assert results["current_loss_scale.next"] == 512, "without an error, the scale never falls further"


@pytest.mark.full
@pytest.mark.parametrize("level", [2, 3])
def test_each_initializer_that_is_an_input_is_one_warning(files: Path, level: int) -> None:
    code = (
        "import sys, onnxruntime as ort\n"
        f"options = ort.SessionOptions()\noptions.log_severity_level = {level}\n"
        "ort.InferenceSession(sys.argv[1], options, providers=['CPUExecutionProvider'])"
    )
    _, errors = run(sys.executable, "-c", code, files / "step.onnx")
    warnings = re.findall(r"Initializer (\S+) appears in graph inputs", errors)
    assert sorted(warnings) == (["current_loss_scale", "good_steps"] if level == 2 else [])
    assert errors.count("\n") == len(warnings)


@needs_node
def test_node_ignores_feeds_of_inputs_with_an_initializer(files: Path, tmp_path: Path) -> None:
    (tmp_path / "node_modules").symlink_to(NODE_MODULES.absolute())
    (tmp_path / "package.json").write_text('{"type": "module"}')
    model = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["": 20]>'
        "g (float[1] x, float[1] s) => (float[1] y) <float[1] s = {2}> { y = Mul(x, s) }"
    )
    onnx.save(model, tmp_path / "model.onnx")
    (tmp_path / "run.js").write_text(
        "import ort from 'onnxruntime-node';\n"
        "const session = await ort.InferenceSession.create('model.onnx', { logSeverityLevel: 3 });\n"
        "const one = (value) => new ort.Tensor('float32', Float32Array.of(value), [1]);\n"
        "const { y } = await session.run({ x: one(1), s: one(5) });\n"
        "console.log(session.inputNames.join(), y.data[0]);\n"
    )
    assert run("node", "run.js", cwd=tmp_path) == ("x 2\n", "")
