"""On the CUDA targets, ONNX Runtime copies no values between GPU and host for inserted nodes.

Without a GPU, the check uses the facts of `tests.benchmarks.cuda_kernels`; with one, ONNX Runtime's own graph.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir
import pytest

import graphscale as gs
from graphscale.graph.builder import PASS_KEY
from graphscale.lowering.delay_update import DelayUpdate
from graphscale.lowering.lower_model import lower_step
from tests.benchmarks.cuda_kernels import NEWEST_OPSET, Release, misplaced
from tests.build import linear_step, parse, step
from tests.conftest import HAS_TRAINING, MODEL_NAMES, load_example, make_session
from tests.expressions import nodes
from tests.passes.cases import float16, logged_weight
from tests.passes.test_lower_optimizers import OPTIMIZERS
from tests.passes.test_lower_optimizers import model_of as optimizer_step

TARGETS = {"ort-cuda": (Release.GPU, Release.TRAINING), "ort-training-cuda": (Release.TRAINING,)}

each_telemetry = pytest.mark.parametrize("telemetry", [False, True], ids=["plain", "telemetry"])


def opset_of(model: onnx.ModelProto) -> int:
    return next(item.version for item in model.opset_import if item.domain == "")


def found(model: onnx.ModelProto, loss_scale: Any = "dynamic", **options: Any) -> list[str]:
    """Scale a step for each CUDA target; what is misplaced in it on the releases that run it."""
    lines = []
    # com.microsoft operators of training are in training builds only.
    trains = any(node.domain == "com.microsoft" for node in model.graph.node)
    for target, releases in TARGETS.items():
        suitable = [release for release in releases if opset_of(model) <= NEWEST_OPSET[release]]
        suitable = [release for release in suitable if release is Release.TRAINING or not trains]
        if suitable:
            scaled = ir.from_proto(gs.scale(model, loss_scale, target=target, **options).model)
            assert marks(scaled) >= {"scale-loss", "unscale-gradients", "check-finite"}
            assert "update-loss-scale" in marks(scaled) or "skip_nonfinite" in options
            assert ("telemetry" in marks(scaled)) == bool(options.get("telemetry"))
            lines += [f"{target}: {line}" for release in suitable for line in misplaced(scaled, release)]
    return lines


def marks(model: ir.Model) -> set[str]:
    """The passes that inserted nodes."""
    return {node.metadata_props[PASS_KEY] for node in model.graph if PASS_KEY in node.metadata_props}


@pytest.mark.sample(3)
@each_telemetry
@pytest.mark.parametrize("name", MODEL_NAMES)
def test_every_graph(name: str, telemetry: bool) -> None:
    assert found(load_example(name).model(), telemetry=telemetry) == []


@each_telemetry
@pytest.mark.parametrize("name", ["jax/mlp_adam", "ort/digits_mlp", "pytorch/mlp_float16"])
def test_a_fixed_scale_that_skips(name: str, telemetry: bool) -> None:
    assert found(load_example(name).model(), 1024, skip_nonfinite=True, telemetry=telemetry) == []


@pytest.mark.full
@each_telemetry
@pytest.mark.parametrize("name", gs.presets.NAMES)
def test_the_policy_of_each_peer(name: str, telemetry: bool) -> None:
    for on_stuck in ("hold", "flag", "stop", "reset", "accept"):
        policy = getattr(gs.presets, name)(on_stuck=on_stuck, max_consecutive_skips=3)
        for model in (step(), load_example("pytorch/mlp_momentum").model()):
            assert found(model, policy, telemetry=telemetry) == []


@pytest.mark.sample(3)
@each_telemetry
@pytest.mark.parametrize("opset", range(10, 27))
def test_every_opset(opset: int, telemetry: bool) -> None:
    """With the rule as a function where the model can have one, and spelled out where it cannot."""
    model = step(opset=opset, ir_version=5 if opset < 12 else 10)
    assert found(model, gs.presets.deepspeed(max_loss_scale=2.0**20), telemetry=telemetry) == []


@pytest.mark.full
@pytest.mark.parametrize("part", ["step", "gradients"])
@pytest.mark.parametrize("name", ["mlp-8-sgd", "transformer-4-adamw"])
def test_mixed_precision(name: str, part: str) -> None:
    """Casts alone, and with a loss scale, in the file and with the fence of a session."""
    model = onnx.load(Path(__file__).with_name("step_graphs") / f"{name}.{part}.onnx")
    cast = ir.from_proto(gs.autocast(model, "float16", target="ort-cuda").model)
    assert marks(cast) == {"autocast"}
    scaled = ir.from_proto(gs.scale(model, target="ort-cuda", autocast="float16").model)
    assert marks(scaled) >= {"autocast", "scale-loss", "unscale-gradients", "check-finite", "update-loss-scale"}
    before = [misplaced(model, release) for model in (cast, scaled) for release in Release]
    lower_step(scaled, "cuda")
    assert [*before, *(misplaced(scaled, release) for release in Release)] == [[]] * 6


def of_dtype(dtype: str) -> onnx.ModelProto:
    """The two-layer step, all of it in one dtype."""
    text = onnx.printer.to_text(step())
    if dtype == "bfloat16":
        # In the text form its numbers are whole, the bits: those of 1/12, and of 1.
        text = text.replace("{0.083333336}", "{15787}").replace("{1}", "{16256}")
    return parse(text.replace("float", dtype))


DTYPES = {
    "float16": float16,
    "float16-and-float32": lambda: float16(optimizer=True),
    "float64": lambda: of_dtype("double"),
    "bfloat16": lambda: of_dtype("bfloat16"),
}


@each_telemetry
@pytest.mark.parametrize("name", DTYPES)
def test_gradients_of_each_dtype(name: str, telemetry: bool) -> None:
    for policy in (gs.DynamicLossScale(), gs.presets.torch()):
        assert found(DTYPES[name](), policy, telemetry=telemetry) == []


@each_telemetry
def test_gradients_of_unknown_size(telemetry: bool) -> None:
    text = onnx.printer.to_text(step()).replace("[4,5]", "[n,5]").replace("[8,4]", "[8,n]")
    assert found(parse(text), telemetry=telemetry) == []


@pytest.mark.parametrize("dtype", ["float16", "float", "double", "int32", "int64"])
def test_carried_state_of_each_dtype(dtype: str) -> None:
    model = linear_step(
        nodes("w_next = w - dw * rate; c_next = c + c"),
        inputs=f"float[4,3] w, {dtype}[4] c",
        outputs=f"float[4,3] w_next, {dtype}[4] c_next",
        constants="float rate = {0.1}",
    )
    assert found(model, updates={"c_next": "c", "w_next": "w"}) == []


def test_writes_that_wait() -> None:
    """For a metric that reads the weight, and for the scaled loss."""
    scaled = ir.from_proto(gs.scale(logged_weight(), target="ort-training-cuda", expose_scaled_loss=True).model)
    assert "order-writes" in marks(scaled)
    assert misplaced(scaled, Release.TRAINING) == []


def test_a_step_that_decides_last() -> None:
    """A session lets the decision wait for what could fail, such as a metric that looks something up."""
    model = linear_step(
        nodes("w_next = w - dw * rate; m = Gather(table, index)"),
        inputs="float[4,3] w, int64[2] index",
        outputs="float[4,3] w_next, float[2] m",
        constants="float rate = {0.1}, float[3] table = {1, 2, 3}",
    )
    for target, releases in TARGETS.items():
        scaled = ir.from_proto(gs.scale(model, target=target).model)
        lower_step(scaled, "cuda")
        assert DelayUpdate.name in marks(scaled)
        assert [misplaced(scaled, release) for release in releases] == [[]] * len(releases)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_that_are_spelled_out(name: str) -> None:
    assert found(optimizer_step(name)) == []


def marked(text: str, opset: int = 20) -> ir.Model:
    """A graph of nodes that all count as inserted."""
    model = parse(f"""
        <ir_version: 10, opset_import: ["" : {opset}, "com.microsoft" : 1]>
        marked (float[n] x, int64[1] fed) => (float[m] y) <int64[1] flat = {{-1}}> {{ {text} }}
    """)
    for node in model.graph.node:
        node.metadata_props.add(key=PASS_KEY, value="a pass")
    result = ir.from_proto(model)
    result.graph.outputs[0].type = None
    return result


@pytest.mark.parametrize(
    ("text", "release", "expected"),
    [
        ("n = Size(x) y = Cast<to = 1>(n)", Release.GPU, "Cast reads n on the GPU, and it is made in CPU memory"),
        (
            "s = Add(fed, fed) y = Reshape(x, s)",
            Release.GPU,
            "Reshape reads s in CPU memory, and it is made on the GPU",
        ),
        ("s = Add(fed, fed) y = Reshape(x, fed)", Release.GPU, "fed is fed to one side, and read on both"),
        ("y = ArgMax(x)", Release.TRAINING, "has no CUDA kernel for ArgMax(FLOAT) at opset 20"),
        ("y = com.microsoft.IsAllFinite(x)", Release.GPU, "has no CUDA kernel for IsAllFinite(FLOAT) at opset 20"),
        ("h = Cast<to = 10>(x) y = IsInf(h)", Release.GPU, "has no CUDA kernel for IsInf(FLOAT16) at opset 20"),
        ("f = Cast<to = 9>(x) y = Where(f, f, f)", Release.GPU, "has no CUDA kernel for Where(BOOL, BOOL, BOOL)"),
        ("z = com.microsoft.IsAllFinite(x) y = Or(z, z)", Release.GPU, "Or reads z on the GPU, and it is made in CPU"),
    ],
)
def test_what_is_misplaced_is_found(text: str, release: Release, expected: str) -> None:
    lines = misplaced(marked(text), release)
    assert [line for line in lines if expected in line], lines


@pytest.mark.parametrize("text", ["y = Reshape(x, flat)", "s = Add(flat, flat) y = Reshape(x, s)", "y = ArgMax(x)"])
def test_what_is_in_its_place_is_not(text: str) -> None:
    assert misplaced(marked(text), Release.GPU) == []


def test_an_operator_without_facts_is_an_error() -> None:
    with pytest.raises(LookupError, match=r"ai\.onnx Erf"):
        misplaced(marked("y = Erf(x)"), Release.GPU)


def test_the_rule_that_is_a_function_is_looked_into() -> None:
    scaled = ir.from_proto(gs.scale(step(), target="onnx").model)
    (function,) = scaled.functions.values()
    function.append(ir.node("Erf", [function.inputs[0]], name="new"))
    with pytest.raises(LookupError, match=r"ai\.onnx Erf \(new\)"):
        misplaced(scaled, Release.GPU)


def copies(model: onnx.ModelProto, path: Path) -> list[str]:
    """The Memcpy nodes in the graph that ONNX Runtime makes of a model."""
    make_session(model, providers=("CUDAExecutionProvider",), optimized=path)
    return [node.name for node in onnx.load(path).graph.node if node.op_type.startswith("Memcpy")]


@pytest.mark.cuda
@each_telemetry
@pytest.mark.parametrize("name", MODEL_NAMES)
def test_onnx_runtime_makes_no_more_copies_than_before(name: str, telemetry: bool, tmp_path: Path) -> None:
    model = load_example(name).model()
    if name.startswith("ort/") and not HAS_TRAINING:
        pytest.skip("the graph has operators that only training builds have")
    if HAS_TRAINING and opset_of(model) > NEWEST_OPSET[Release.TRAINING]:
        pytest.skip("this release has no CUDA kernels for many operators of the graph's opset")
    before = copies(model, tmp_path / "before.onnx")
    for target in ("ort-cuda", "ort-training-cuda") if HAS_TRAINING else ("ort-cuda",):
        scaled = gs.scale(model, target=target, telemetry=telemetry).model
        assert len(copies(scaled, tmp_path / f"{target}.onnx")) <= len(before)
