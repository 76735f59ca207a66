"""Versions of models and of runtimes: what each release loads, the newest opsets and IR version, missing kernels."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import onnx
import onnx.version_converter
import onnx_ir as ir
import onnxruntime as ort
import pytest

import graphscale as gs
from graphscale.checks.running.private import Runner
from graphscale.errors import SessionError, TargetError, VerifyError
from graphscale.graph import releases
from graphscale.graph.releases import installed_runtime, release_of
from graphscale.targets import RELEASES, get_target
from tests.build import feeds_for, linear_step, step
from tests.cli.command import graphscale
from tests.conftest import Arrays, load_example

NEWEST = RELEASES[-1]
INSTALLED = release_of(ort.__version__)
# Products by Einsum, blocks of an image, a running product: each is defined anew in opset 26 or 28.
FORWARD = """
    p = CumProd(x, last)
    y = Einsum<equation = "ij,jk->ik">(x, w)
    y4 = Reshape(y, image)
    t4 = Reshape(t, image)
    d4 = Sub(y4, t4)
    d = SpaceToDepth<blocksize = 2, mode = "CRD">(d4)
    square = Mul(d, d)
    loss = ReduceMean<keepdims = 0>(square)
"""
BACKWARD = """
    dd = Mul(d, two_over_n)
    dy4 = DepthToSpace<blocksize = 2, mode = "CRD">(dd)
    dy = Reshape(dy4, matrix)
    dw = Einsum<equation = "ij,ik->jk">(x, dy)
    change = Mul(dw, rate)
    w_next = Sub(w, change)
"""


@pytest.mark.parametrize(
    ("number", "expected"),
    [
        ("1.18.1", None),
        ("1.19.2", (21, 10)),
        ("1.20.0", (21, 10)),
        ("1.22.1", (22, 10)),
        ("1.24.4", (25, 13)),
        ("1.31.1", (26, 13)),
        ("1.32.0", (28, 14)),
        ("1.33.0", None),
        ("unknown", None),
    ],
)
def test_what_a_release_loads(number: str, expected: tuple[int, int] | None) -> None:
    release = release_of(number)
    assert (None if release is None else (release.max_opset, release.max_ir_version)) == expected


@pytest.mark.skipif(INSTALLED is None, reason="this release was not tried")
def test_the_installed_release_loads_what_the_table_says() -> None:
    assert INSTALLED is not None
    opset, ir_version = INSTALLED.max_opset, INSTALLED.max_ir_version
    assert loads(opset, ir_version)
    assert not loads(opset + 1, ir_version)
    assert not loads(opset, ir_version + 1)


def loads(opset: int, ir_version: int) -> bool:
    """Return whether the installed runtime loads a model of these versions."""
    options = ort.SessionOptions()
    options.log_severity_level = 4
    model = linear_step(opset=opset, ir_version=ir_version).SerializeToString()
    try:
        ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    except Exception:  # ORT's exceptions share no public base class
        return False
    return True


def pretend(monkeypatch: pytest.MonkeyPatch, **installed: str) -> None:
    """Let these distributions be installed, and no others."""

    def version(package: str) -> str:
        if package.replace("-", "_") not in installed:
            raise PackageNotFoundError(package)
        return installed[package.replace("-", "_")]

    monkeypatch.setattr(releases, "version", version)


TOO_NEW = {
    "opset": ({"opset": 29}, "the model has opset 29, and target 'onnx' (onnxruntime 1.32) takes 10 to 28"),
    "IR version": (
        {"ir_version": 15},
        "the model has IR version 15, and target 'onnx' (onnxruntime 1.32) loads up to 14",
    ),
}


@pytest.mark.parametrize("case", TOO_NEW)
@pytest.mark.parametrize(
    ("installed", "clause"),
    [
        ({}, ";"),
        (
            {"onnxruntime": "1.20.1"},
            " (onnxruntime 1.20.1, installed here, loads up to opset 21 and IR version 10);",
        ),
        (
            {"onnxruntime_training": "1.19.2"},
            " (onnxruntime-training 1.19.2, installed here, loads up to opset 21 and IR version 10);",
        ),
        ({"onnxruntime_gpu": "1.99.0"}, " (onnxruntime-gpu 1.99.0, installed here, was not tried);"),
    ],
    ids=str,
)
def test_the_refusal_names_the_installed_runtime(
    installed: dict[str, str], clause: str, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    versions, words = TOO_NEW[case]
    pretend(monkeypatch, **installed)
    with pytest.raises(TargetError) as caught:
        gs.scale(linear_step(**versions))
    assert str(caught.value).startswith(f"{words}{clause} export it")


@pytest.mark.parametrize("installed", [{}, {"onnxruntime": "1.20.1"}], ids=str)
def test_the_newest_versions_are_scaled_whatever_is_installed(
    installed: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(monkeypatch, **installed)
    model = linear_step(opset=NEWEST.max_opset, ir_version=NEWEST.max_ir_version)
    scaled = gs.scale(model)
    assert (scaled.model.opset_import[0].version, scaled.model.ir_version) == (28, 14)
    assert not scaled.report.warnings


@pytest.mark.parametrize(("target", "opset"), [("ort-cpu", 28), ("ort-cuda", 26), ("ort-training", 21)])
def test_each_target_has_the_limits_of_its_own_runtime(target: str, opset: int) -> None:
    assert gs.scale(linear_step(opset=opset), target=target).report.proved
    with pytest.raises(TargetError, match=f"opset {opset + 1}, and target '{target}' .* takes 10 to {opset}"):
        gs.scale(linear_step(opset=opset + 1), target=target)


def test_only_a_runtime_of_the_target_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, onnxruntime="1.32.0")
    assert installed_runtime(get_target("ort-cpu")) == ("onnxruntime", "1.32.0")
    assert installed_runtime(get_target("ort-training")) is None


@pytest.mark.skipif(INSTALLED is None, reason="this release was not tried")
@pytest.mark.parametrize(
    ("error", "start"),
    [
        (SessionError, gs.Session),
        (VerifyError, lambda model: Runner(ir.from_proto(model), None, "the model")),
    ],
    ids=["Session", "verify"],
)
def test_a_runtime_that_is_too_old_says_what_it_takes(
    error: type[Exception], start: Callable[[onnx.ModelProto], object]
) -> None:
    assert INSTALLED is not None
    opset, newest = INSTALLED.max_opset, INSTALLED.max_ir_version
    model = gs.scale(linear_step()).model
    model.ir_version = newest + 1
    with pytest.raises(error) as caught:
        start(model)
    words = f"cannot load the model (it loads up to opset {opset} and IR version {newest}; the model has opset 20 and"
    assert f"ONNX Runtime {ort.__version__} {words} IR version {newest + 1}): " in str(caught.value)
    assert "\n" not in str(caught.value)


# --- steps in the newest versions -------------------------------------------------------------------------------------


def converted(name: str, opset: int) -> tuple[onnx.ModelProto, Arrays]:
    """An exported step, converted to an opset and to the newest IR version."""
    example = load_example(name)
    model = onnx.version_converter.convert_version(example.model(), opset)
    model.ir_version = NEWEST.max_ir_version
    return ir.to_proto(ir.from_proto(model)), example.feeds


def handwritten() -> tuple[onnx.ModelProto, Arrays]:
    """A step of operators that changed lately."""
    model = linear_step(
        inputs="float[4,3] w",
        outputs="float[8,4] p, float[4,3] w_next",
        constants="int64[4] image = {1, 1, 4, 6}, int64[2] matrix = {8, 3}, int64 last = {1}, float rate = {0.125}",
        forward=FORWARD,
        backward=BACKWARD,
        opset=NEWEST.max_opset,
        ir_version=NEWEST.max_ir_version,
    )
    return ir.to_proto(ir.from_proto(model)), feeds_for(model)


STEPS = {
    "PyTorch, 27": (lambda: converted("pytorch/mlp_momentum", 27), "ort-cpu"),
    "PyTorch, 28": (lambda: converted("pytorch/mlp_momentum", 28), "onnx"),
    "JAX, 27": (lambda: converted("jax/mlp_sgd", 27), "onnx"),
    "JAX, 28": (lambda: converted("jax/mlp_adam", 28), "ort-cpu"),
    "by hand, 28": (handwritten, "onnx"),
    "by hand, 28, lowered": (handwritten, "ort-cpu"),
}


@pytest.mark.parametrize("case", STEPS)
def test_a_step_in_the_newest_versions(case: str) -> None:
    """Scale, verify, strip and train; where the runtime is too old, train nothing and verify the proof alone."""
    make, target = STEPS[case]
    model, feeds = make()
    roles = {"metrics": ["p"]} if make is handwritten else None
    result = gs.scale(model, target=target, roles=roles)
    assert not result.report.warnings
    assert (result.model.opset_import[0].version, result.model.ir_version) == (model.opset_import[0].version, 14)
    assert gs.strip(result.model).SerializeToString(deterministic=True) == model.SerializeToString(deterministic=True)
    # A release that was not tried is newer than all that were.
    runs_here = INSTALLED is None or INSTALLED.max_opset >= model.opset_import[0].version
    assert gs.verify(model, result.model, roles=roles, runs=3 if runs_here else 0).ok
    state = {entry.input: feeds[entry.input] for entry in result.report.state if entry.input in feeds}
    if not runs_here:
        with pytest.raises(SessionError, match="cannot load the model"):
            gs.Session(result, state=state)
        return
    session = gs.Session(result, state=state)
    batch = {name: value for name, value in feeds.items() if name not in state}
    losses = [float(session.step(batch)["loss"]) for _ in range(4)]
    plain = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"]).run(["loss"], feeds)
    assert losses[0] == plain[0]
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < losses[0]


# --- missing kernels --------------------------------------------------------------------------------------------------

NOISE = "noise = RandomNormal<shape = [4, 5], seed = 1.0> () n = Mul(noise, dw1)"


def noisy(opset: int, nodes: str = NOISE) -> onnx.ModelProto:
    return step(nodes, outputs="float[4,5] dw1, float[5,3] dw2, float[4,5] n", opset=opset)


@pytest.mark.parametrize("target", ["onnx", "ort-cpu"])
def test_a_missing_kernel_is_told(target: str) -> None:
    roles = {"metrics": ["n"]}
    (warning,) = gs.scale(noisy(24), target=target, roles=roles).report.warnings
    assert warning == (
        "onnxruntime 1.32 has no CPU kernel for RandomNormal of opset 24, so its CPU provider cannot run the step; "
        "export with opset 21"
    )
    assert not gs.scale(noisy(21), target=target, roles=roles).report.warnings
    assert not gs.scale(noisy(24), target="ort-cuda", roles=roles).report.warnings


def test_the_command_says_so_in_one_line(tmp_path: Path) -> None:
    path = tmp_path / "step.onnx"
    onnx.save(linear_step("noise = RandomUniform<shape = [3]> ()", outputs="float[4,3] dw", opset=22), path)
    result = graphscale("scale", path, "-o", tmp_path / "scaled.onnx", "--target", "ort-cpu")
    assert result.returncode == 0
    (line,) = result.stderr.splitlines()
    assert line.startswith("warning: onnxruntime 1.32 has no CPU kernel for RandomUniform of opset 22")


def test_missing_kernels_in_bodies_are_told() -> None:
    nodes = """
        yes = Greater(loss, loss)
        n = If (yes) <
            then_branch = one () => (float[4,5] a) { noise = RandomUniform<shape = [4, 5]> () a = Mul(noise, dw1) },
            else_branch = two () => (float[4,5] b) { s = Swish(dw1) b = Identity(s) }
        >
    """
    (warning,) = gs.scale(noisy(25, nodes), roles={"metrics": ["n"]}).report.warnings
    assert "for RandomUniform, Swish of opset 25" in warning
    assert warning.endswith("export with opset 21")
