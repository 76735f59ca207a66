"""Opening a session: models, providers and options that do not fit, each with one clear line and a clean terminal."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import onnxruntime as ort
import pytest

import graphscale as gs
from graphscale.errors import GraphscaleError, ModelFileError, SessionError
from tests.build import linear_step
from tests.conftest import HAS_TRAINING, ROOT, has_cuda, load_example
from tests.session.dangerous import CASES, ONES
from tests.session.digits import DIGITS, SCALED, assert_one_line, batch, first_state, make, refused
from tests.session.plain import first_state as first_state_of
from tests.session.plain import options

pytestmark = pytest.mark.sample(1)

OPEN = """
import sys
import graphscale as gs
from tests.session.digits import SCALED, batch, first_state
try:
    gs.Session(SCALED, providers=eval(sys.argv[1]), state=first_state())
except gs.GraphscaleError as error:
    print(type(error).__name__, error)
"""


def assert_refused(providers: str, *fragments: str) -> None:
    """In a process of its own: ONNX Runtime writes to the terminal past Python's own streams."""
    command = [sys.executable, "-c", OPEN, providers]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=ROOT, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    (line,) = done.stdout.splitlines()
    assert line.startswith("SessionError ")
    for fragment in fragments:
        assert fragment in line


@pytest.mark.full
@pytest.mark.parametrize("form", ["[{}]", "[{}, CPU]", "[CPU, {}]", "[({}, dict(device_id=1))]"])
@pytest.mark.parametrize(
    "provider", ["Tensorrt", pytest.param("CUDA", marks=pytest.mark.skipif(has_cuda(), reason="here it starts"))]
)
def test_a_provider_that_is_not_installed_or_cannot_start(provider: str, form: str) -> None:
    """The training build has CUDA compiled in; without a GPU it does not start."""
    name, cpu = f"{provider}ExecutionProvider", "CPUExecutionProvider"
    words = [name] if name in ort.get_available_providers() else [name, cpu, ort.__version__]
    assert_refused(form.format(repr(name)).replace("CPU", repr(cpu)), *words)


@pytest.mark.full
def test_a_provider_that_does_not_exist() -> None:
    assert_refused("['CpuExecutionProvider']", "CpuExecutionProvider", "CPUExecutionProvider")


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "providers",
    [
        None,
        [],
        ["CPUExecutionProvider"],
        "CPUExecutionProvider",
        ("CPUExecutionProvider",),
        [("CPUExecutionProvider", {})],
    ],
    ids=str,
)
def test_the_cpu_by_any_way_of_naming_it(providers: Any) -> None:
    session = gs.Session(SCALED, providers, state=first_state())
    assert session.step(batch())["loss"] == make().step(batch())["loss"]


@pytest.mark.parametrize("providers", [5, [5], [("CPUExecutionProvider", 5)], [None]], ids=str)
def test_providers_that_are_none(providers: Any) -> None:
    with refused(SessionError, ()):
        gs.Session(SCALED, providers, state=first_state())


# --- models -----------------------------------------------------------------------------------------------------------


def changed(change: Callable[[onnx.ModelProto], object]) -> Callable[[Path], onnx.ModelProto]:
    """A model that was scaled, and then changed."""

    def make_model(folder: Path) -> onnx.ModelProto:
        model = onnx.ModelProto()
        model.CopyFrom(SCALED.model)
        change(model)
        return model

    return make_model


def damage_metadata(model: onnx.ModelProto) -> None:
    next(entry for entry in model.metadata_props if entry.key == "graphscale.state").value = "{"


def truncated(tmp_path: Path) -> Any:
    SCALED.save(tmp_path / "whole.onnx")
    (tmp_path / "cut.onnx").write_bytes((tmp_path / "whole.onnx").read_bytes()[:-1000])
    return tmp_path / "cut.onnx"


def state_file(tmp_path: Path) -> Any:
    make().save_state(tmp_path / "state.safetensors")
    return tmp_path / "state.safetensors"


BAD_MODELS: dict[str, tuple[Callable[[Path], Any], type[GraphscaleError], tuple[str, ...]]] = {
    "unscaled": (lambda folder: DIGITS, ModelFileError, ("carries no loss scale", "graphscale scale")),
    "unscaled file": (
        lambda folder: load_example("jax/mlp_sgd").path,
        ModelFileError,
        ("mlp_sgd.onnx", "no loss scale"),
    ),
    "no file": (lambda folder: folder / "missing.onnx", ModelFileError, ("missing.onnx",)),
    "a folder": (lambda folder: folder, ModelFileError, ("folder",)),
    "truncated": (truncated, ModelFileError, ("cut.onnx",)),
    "a state file": (state_file, ModelFileError, ("state.safetensors",)),
    "damaged metadata": (changed(damage_metadata), ModelFileError, ("metadata",)),
    "newer IR version": (
        changed(lambda model: setattr(model, "ir_version", 99)),
        SessionError,
        ("cannot load", ort.__version__),
    ),
    "an operator that does not exist": (
        changed(lambda model: setattr(model.graph.node[0], "op_type", "Nothing")),
        SessionError,
        ("cannot load", "Nothing"),
    ),
    "a number": (lambda folder: 5, SessionError, ("int",)),
    "None": (lambda folder: None, SessionError, ("NoneType",)),
    "bytes": (lambda folder: SCALED.model.SerializeToString(), SessionError, ("bytes",)),
}


@pytest.mark.parametrize("case", BAD_MODELS)
def test_a_model_that_will_not_do(case: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    make_model, kind, fragments = BAD_MODELS[case]
    model = make_model(tmp_path)
    with pytest.raises(kind) as caught:
        gs.Session(model, state=first_state())
    assert type(caught.value) is kind
    assert_one_line(caught.value, fragments)
    assert capfd.readouterr() == ("", "")


def test_a_target_that_needs_a_gpu(capfd: pytest.CaptureFixture[str]) -> None:
    """The kernel of IsAllFinite is one for CUDA; the stock build has not even heard of writing in place."""
    example = load_example("pytorch/mlp_momentum")
    result = gs.scale(example.model(), target="ort-training-cuda")
    stock = ("com.microsoft", "pip install onnxruntime-training==1.19.2", "scale the original with --target onnx")
    with refused(SessionError, ("cannot load", *(stock if not HAS_TRAINING else ("IsAllFinite",)))):
        gs.Session(result, state=first_state_of(result, example.feeds))
    assert capfd.readouterr() == ("", "")


# --- options ----------------------------------------------------------------------------------------------------------


@pytest.mark.training
def test_options_of_another_session(capfd: pytest.CaptureFixture[str]) -> None:
    """They hold the buffers of its state, which is written in place: two sessions must not share them."""
    result = CASES["metric"].scaled("dynamic", "ort-training")
    given = options()
    first = gs.Session(result, session_options=given)
    with refused(SessionError, ("options", "another session")):
        gs.Session(result, session_options=given)
    assert first.step(ONES).applied


def test_options_are_used(tmp_path: Path) -> None:
    given = options()
    given.optimized_model_filepath = str(tmp_path / "optimized.onnx")
    for _ in range(2):
        gs.Session(SCALED, session_options=given, state=first_state())
    assert onnx.load(tmp_path / "optimized.onnx").graph.node


@pytest.mark.parametrize("target", ["onnx", pytest.param("ort-training", marks=pytest.mark.training)])
def test_two_sessions_on_one_model_are_apart(target: str) -> None:
    result = CASES["metric"].scaled("dynamic", target)
    one, other = gs.Session(result), gs.Session(result)
    before = other.state_dict()["w"]
    assert one.step(ONES).applied
    assert (one.good_steps, other.good_steps) == (1, 0)
    assert (other.state_dict()["w"] == before).all()
    assert (one.state_dict()["w"] != before).any()


def test_a_model_whose_inputs_are_no_tensors_is_refused() -> None:
    model = linear_step(
        "m = SequenceLength(parts)", inputs="float[4,3] w, seq(float[2]) parts", outputs="float[4,3] dw, int64 m"
    )
    with refused(GraphscaleError, ("parts", "seq")):
        gs.Session(gs.scale(model))
