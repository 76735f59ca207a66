"""Sessions on a GPU: the numbers of the CPU up to rounding, the state on the device, no copies in between."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest

import graphscale as gs
from tests.conftest import Arrays, Level, assert_all_same_bits, load_example, with_initializers
from tests.session.dangerous import ONES
from tests.session.plain import batches, buffers, carried_inputs, first_state, options, shared_states
from tests.session.test_close import ROWS, large_step

pytestmark = pytest.mark.cuda

# Matrix products in full float32, as on the CPU.
CUDA = [("CUDAExecutionProvider", {"device_id": "0", "use_tf32": "0"})]
TARGETS = ["ort-cuda", pytest.param("ort-training-cuda", marks=pytest.mark.training)]
# Adam divides each gradient by its own size, and turns a rounding error of a tiny one into a whole step.
SMOOTH = ["jax/mlp_sgd", "pytorch/attention_sgd", "pytorch/clip_by_value", "pytorch/mlp_momentum"]
ADAM = ["jax/mlp_adam", "jax/mlp_adamw_clip", "pytorch/attention_adamw_clip"]
STEPS = 12


def open_session(result: gs.ScaledModel, state: Arrays, providers: Any, **more: Any) -> gs.Session:
    made = options(None)
    for name, value in more.items():
        setattr(made, name, value)
    return gs.Session(result, providers, made, state)


def scaled(name: str, target: str, initial: bool = False, **more: Any) -> gs.ScaledModel:
    """A step; with its weights as initializers they are written in place where the target does so."""
    example = load_example(name)
    model = example.model()
    if initial:
        carried = carried_inputs(gs.scale(model)) & set(example.feeds)
        model = with_initializers(model, {key: example.feeds[key] for key in sorted(carried)})
    return gs.scale(model, gs.DynamicLossScale(2.0**10, increment_period=3), target=target, **more)


def pair(name: str, target: str, **more: Any) -> tuple[gs.Session, gs.Session, Iterator[Arrays]]:
    """A session on the GPU, one on the CPU on the portable target, and batches for both."""
    example = load_example(name)
    on_gpu, on_cpu = scaled(name, target, target != "ort-cuda", **more), scaled(name, "onnx", **more)
    gpu = open_session(on_gpu, first_state(on_gpu, example.feeds) if target == "ort-cuda" else {}, CUDA)
    cpu = open_session(on_cpu, first_state(on_cpu, example.feeds), None)
    return gpu, cpu, batches(example, carried_inputs(on_cpu), STEPS)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", SMOOTH)
def test_steps_on_the_gpu_equal_those_on_the_cpu(name: str, target: str) -> None:
    gpu, cpu, steps = pair(name, target)
    for number, feeds in enumerate(steps):
        ours, theirs = gpu.step(feeds), cpu.step(feeds)
        assert set(ours) == set(theirs)
        assert ours.applied == theirs.applied
        for key, value in theirs.items():
            np.testing.assert_allclose(ours[key], value, rtol=1e-3, atol=1e-4, err_msg=f"{key}, step {number}")
        assert (gpu.loss_scale, gpu.good_steps) == (cpu.loss_scale, cpu.good_steps)
    state = gpu.state_dict()
    for key, value in cpu.state_dict().items():
        np.testing.assert_allclose(state[key], value, rtol=1e-3, atol=1e-4, err_msg=key)
    assert gpu.good_steps or gpu.loss_scale > 2.0**10


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", ADAM)
def test_adam_on_the_gpu_trains_as_on_the_cpu(name: str, target: str) -> None:
    gpu, cpu, steps = pair(name, target)
    for feeds in steps:
        ours, theirs = gpu.step(feeds), cpu.step(feeds)
        assert ours.applied == theirs.applied
        loss = cpu.stamp.names["loss"]
        np.testing.assert_allclose(ours[loss], theirs[loss], rtol=2e-2)
        assert (gpu.loss_scale, gpu.good_steps) == (cpu.loss_scale, cpu.good_steps)


@pytest.mark.parametrize("target", TARGETS)
def test_the_state_is_on_the_gpu_and_a_step_leaves_it_there(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, _, steps = pair("pytorch/attention_adamw_clip", target)
    feeds = next(steps)
    seen: dict[str, set[int]] = {name: set() for name in gpu.state_dict()}
    shared, bound = shared_states(gpu), set(gpu._carried.outputs)

    def forbidden(*arguments: Any, **keywords: Any) -> None:
        raise AssertionError("state crosses to the host")

    with monkeypatch.context() as patch:
        for name in ("numpy", "ortvalue_from_numpy", "update_inplace"):
            patch.setattr(ort.OrtValue, name, forbidden)
        for _ in range(4):
            gpu.step(feeds)
            for name, buffer in buffers(gpu)[0].items():
                assert buffer.device_name().lower() == "cuda", name
                seen[name].add(buffer.data_ptr())
    for name, found in seen.items():
        assert len(found) == (2 if name in bound - shared else 1), name
    assert len(shared) >= len(bound) - 4


# --- the graph that ONNX Runtime makes of it --------------------------------------------------------------------------


def optimized(result: gs.ScaledModel, state: Arrays, path: Path) -> onnx.ModelProto:
    """The graph that a session executes on the GPU."""
    more = {"optimized_model_filepath": str(path), "graph_optimization_level": Level.ORT_ENABLE_EXTENDED}
    open_session(result, state, CUDA, **more)
    return onnx.load(path)


def is_inserted(node: onnx.NodeProto) -> bool:
    """Return whether graphscale inserted this node, or ONNX Runtime made it of an inserted one (a function's body)."""
    return "graphscale" in node.name or "UpdateLossScale" in node.name


def copies(model: onnx.ModelProto) -> list[onnx.NodeProto]:
    return [node for node in model.graph.node if node.op_type in ("MemcpyToHost", "MemcpyFromHost")]


@pytest.mark.parametrize("telemetry", [False, True], ids=["silent", "telemetry"])
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", [*SMOOTH, *ADAM])
def test_no_copy_beside_what_graphscale_inserted(name: str, target: str, telemetry: bool, tmp_path: Path) -> None:
    """None is fed by an inserted node, feeds one, or stands where the unscaled graph has none."""
    example = load_example(name)
    result = scaled(name, target, initial=target != "ort-cuda", telemetry=telemetry)
    state = first_state(result, example.feeds) if target == "ort-cuda" else {}
    model = optimized(result, state, tmp_path / "scaled.onnx")
    inserted = [node for node in model.graph.node if is_inserted(node)]
    assert len(inserted) >= 10
    made = {value for node in inserted for value in node.output}
    read = {value for node in inserted for value in node.input}
    for copy in copies(model):
        assert not made & set(copy.input), f"{copy.name} copies what an inserted node gives"
        assert not read & set(copy.output), f"{copy.name} copies what an inserted node reads"
    assert len(copies(model)) <= len(copies(unscaled(name, tmp_path)))


def unscaled(name: str, folder: Path) -> onnx.ModelProto:
    """The graph that ONNX Runtime makes of the step without a loss scale."""
    made = options(Level.ORT_ENABLE_EXTENDED)
    made.optimized_model_filepath = str(folder / "unscaled.onnx")
    ort.InferenceSession(load_example(name).model().SerializeToString(), made, providers=CUDA)
    return onnx.load(made.optimized_model_filepath)


# --- state and feeds --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", TARGETS)
def test_state_goes_from_gpu_to_file_and_back(target: str, tmp_path: Path) -> None:
    one, _, steps = pair("pytorch/mlp_momentum", target)
    other, _, _ = pair("pytorch/mlp_momentum", target)
    feeds = list(steps)
    for batch in feeds[:5]:
        one.step(batch)
    one.save_state(tmp_path / "state", {"epoch": "1"})
    assert other.load_state(tmp_path / "state") == {"epoch": "1"}
    assert_all_same_bits(other.state_dict(), one.state_dict())
    one.export(tmp_path / "step.onnx")
    third = open_session(tmp_path / "step.onnx", {}, CUDA)  # type: ignore[arg-type]
    assert_all_same_bits(third.state_dict(), one.state_dict())
    for batch in feeds[5:]:
        results = [session.step(batch) for session in (one, other, third)]
        losses = {float(result["loss"]) for result in results if result.applied}
        assert len({result.applied for result in results}) == 1
        assert len(losses) <= 1 or np.ptp(list(losses)) < 1e-5


def test_a_state_of_the_cpu_goes_on_on_the_gpu(tmp_path: Path) -> None:
    """The target's operators are standard ones, so that its graph runs on the CPU as well."""
    example, result = load_example("pytorch/mlp_momentum"), scaled("pytorch/mlp_momentum", "ort-cuda")
    cpu, gpu = (open_session(result, first_state(result, example.feeds), where) for where in (None, CUDA))
    steps = list(batches(example, carried_inputs(result), 6))
    for feeds in steps[:3]:
        cpu.step(feeds)
    cpu.save_state(tmp_path / "state")
    gpu.load_state(tmp_path / "state")
    assert_all_same_bits(gpu.state_dict(), cpu.state_dict())
    for feeds in steps[3:]:
        ours, theirs = gpu.step(feeds), cpu.step(feeds)
        np.testing.assert_allclose(ours["loss"], theirs["loss"], rtol=1e-3)


def to_torch(array: np.ndarray) -> Any:
    torch = pytest.importorskip("torch", reason="needs PyTorch")
    if not torch.cuda.is_available():
        pytest.skip("this PyTorch has no CUDA")
    tensor = torch.tensor(array, device="cuda")
    torch.cuda.synchronize()
    return tensor


@pytest.mark.parametrize("move", [lambda array: ort.OrtValue.ortvalue_from_numpy(array, "cuda", 0), to_torch])
def test_feeds_that_are_on_the_gpu_already(move: Callable[[np.ndarray], Any]) -> None:
    one, other = (pair("pytorch/mlp_momentum", "ort-cuda")[0] for _ in range(2))
    _, _, steps = pair("pytorch/mlp_momentum", "ort-cuda")
    for feeds in steps:
        ours, theirs = one.step({name: move(value) for name, value in feeds.items()}), other.step(feeds)
        np.testing.assert_allclose(ours["loss"], theirs["loss"], rtol=1e-5)


@pytest.mark.parametrize("target", TARGETS)
def test_telemetry_on_the_gpu(target: str) -> None:
    gpu, cpu, steps = pair("pytorch/mlp_momentum", target, telemetry=True)
    causes = set()
    for feeds in steps:
        ours, theirs = gpu.step(feeds, fetch=[]), cpu.step(feeds, fetch=[])
        assert (ours.applied, ours.cause, ours.offender) == (theirs.applied, theirs.cause, theirs.offender)
        assert ours.zero_fraction == pytest.approx(theirs.zero_fraction, abs=0.01)
        causes.add(ours.cause)
    assert gpu.counters == cpu.counters
    assert None in causes and len(causes) > 1


def free_memory() -> int:
    """Bytes that are free on the first GPU, as its driver says."""
    driver = ctypes.CDLL("libcuda.so.1")
    context, free, total = ctypes.c_void_p(), ctypes.c_size_t(), ctypes.c_size_t()
    assert driver.cuInit(0) == 0
    assert driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == 0
    assert driver.cuCtxPushCurrent_v2(context) == 0
    assert driver.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total)) == 0
    assert driver.cuCtxPopCurrent_v2(ctypes.byref(context)) == 0
    return free.value


def test_sessions_one_after_the_other_take_no_more_memory_than_one() -> None:
    """ONNX Runtime may keep the memory of a closed session, but for the next one."""
    rows = ROWS // 2
    result = gs.scale(large_step(rows), target="ort-cuda", updates={"w_next": "w"}, gradients=["dw"])
    state = {"w": np.ones((rows, 1024), np.float32)}
    left = []
    for _ in range(6):
        with open_session(result, state, CUDA) as session:
            assert session.step(ONES).applied
        left.append(free_memory())
    assert left[0] - left[-1] < 50 * 2**20
