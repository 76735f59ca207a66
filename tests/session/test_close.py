"""Closing: the memory of the state and of ONNX Runtime's session is freed; a closed session says so."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import graphscale as gs
from graphscale.errors import SessionError
from tests.build import linear_step
from tests.conftest import TARGETS, with_initializers
from tests.session.dangerous import CASES, ONES
from tests.session.digits import batch, make, refused
from tests.session.plain import buffers

pytestmark = pytest.mark.sample(1)

MEGABYTES, ROWS = 100, 100 * 2**20 // (4 * 1024)


def large_step(rows: int) -> onnx.ModelProto:
    """A step that takes little time and memory beside its weight [rows, 1024]."""
    return linear_step(
        "u = Mul(rate, dw)  w_next = Sub(w, u)",
        inputs=f"float[{rows},1024] w",
        outputs=f"float[{rows},1024] w_next",
        constants="float rate = {0.1}, float tiny = {0.001}",
        forward="h = ReduceMean<keepdims = 0>(x) e = Mul(w, h) s = Mul(e, e) loss = ReduceMean<keepdims = 0>(s)",
        backward="de = Mul(e, tiny)  dw = Mul(de, h)",
    )


LARGE = large_step(ROWS)


def resident() -> float:
    """The memory of this process, in MB, without what the allocator keeps for later."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096 / 2**20


linux = pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads /proc")


def large(target: str, initial: bool) -> gs.ScaledModel:
    """A step with a state of 100 MB."""
    model = LARGE
    if initial:
        model = with_initializers(model, {"w": np.ones((ROWS, 1024), np.float32)})
    return gs.scale(model, target=target, updates={"w_next": "w"}, gradients=["dw"])


def open_large(target: str, how: str, folder: Path) -> gs.Session:
    """A session on that step, the weights as first state, or in the model, or in its file."""
    if how == "state":
        return gs.Session(large(target, False), state={"w": np.ones((ROWS, 1024), np.float32)})
    result = large(target, True)
    if how == "model":
        return gs.Session(result)
    result.save(folder / "large.onnx")
    return gs.Session(folder / "large.onnx")


@pytest.mark.full
@linux
@pytest.mark.parametrize(
    ("target", "ending", "how"),
    [
        ("onnx", "close", "state"),
        ("onnx", "close", "file"),
        ("onnx", "with", "state"),
        ("onnx", "del", "state"),
        pytest.param("ort-training", "close", "model", marks=pytest.mark.training),
        pytest.param("ort-training", "close", "file", marks=pytest.mark.training),
    ],
)
def test_closing_gives_the_memory_back(target: str, ending: str, how: str, tmp_path: Path) -> None:
    """Also while somebody still holds the session and what its last step returned."""
    open_large(target, how, tmp_path).close()  # what is needed once in a process
    before = resident()
    session: gs.Session | None = open_large(target, how, tmp_path)
    assert session is not None
    with session if ending == "with" else contextlib.nullcontext():
        result = session.step(ONES)
        assert resident() - before > MEGABYTES
    if ending == "close":
        session.close()
    elif ending == "del":
        session = None
    assert resident() - before < 0.2 * MEGABYTES
    assert result.applied
    assert np.isfinite(result["loss"])


@pytest.mark.full
@linux
@pytest.mark.parametrize(
    ("target", "how"),
    [("onnx", "state"), ("onnx", "file"), pytest.param("ort-training", "file", marks=pytest.mark.training)],
)
def test_state_takes_its_size_once(target: str, how: str, tmp_path: Path) -> None:
    """One buffer, and no further copy of the first values; the model of the caller aside."""
    open_large(target, how, tmp_path).close()
    before = resident()
    session = open_large(target, how, tmp_path)
    assert resident() - before < 1.3 * MEGABYTES
    session.close()


@pytest.mark.full
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("ending", ["close", "with", "del"])
def test_nothing_holds_the_buffers(ending: str, target: str) -> None:
    """No cycle either: they go at once, without the garbage collector."""
    gc.collect()
    gc.disable()
    try:
        session: gs.Session | None = gs.Session(CASES["metric"].scaled("dynamic", target))
        assert session is not None
        with session if ending == "with" else contextlib.nullcontext():
            results = [session.step(ONES), session.step(ONES, fetch=["loss"])]
            held = [weakref.ref(buffer) for group in buffers(session) for buffer in group.values()]
            held.append(weakref.ref(session._session))
        if ending == "close":
            session.close()
        elif ending == "del":
            session = None
        assert [reference() for reference in held] == [None] * len(held)
        assert all(result.applied for result in results)
    finally:
        gc.enable()


CALLS: dict[str, Callable[[gs.Session], Any]] = {
    "step": lambda session: session.step(batch()),
    "state_dict": lambda session: session.state_dict(),
    "load_state_dict": lambda session: session.load_state_dict({}),
    "save_state": lambda session: session.save_state("state.safetensors"),
    "load_state": lambda session: session.load_state("state.safetensors"),
    "export": lambda session: session.export("step.onnx"),
    "loss_scale": lambda session: session.loss_scale,
    "good_steps": lambda session: session.good_steps,
}


@pytest.mark.parametrize("call", CALLS)
def test_a_closed_session_can_do_nothing_more(call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    session = make()
    session.step(batch())
    session.close()
    with refused(SessionError, ("closed",)):
        CALLS[call](session)
    assert list(tmp_path.iterdir()) == []


def test_what_a_closed_session_still_tells() -> None:
    session = make()
    session.close()
    session.close()
    assert session.output_names == ("loss", "logits", "all_finite")
    assert set(session.inputs) == {"images", "labels", "learning_rate"}
    assert session.stamp.names["loss"] == "loss"


def test_with_closes_after_an_error_too() -> None:
    session = make()

    def fail() -> None:
        with session:
            session.step(batch())
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    with pytest.raises(SessionError, match="closed"):
        session.step(batch())


@pytest.mark.full
def test_a_session_that_could_not_be_made_leaves_nothing() -> None:
    """Its buffers were made before ONNX Runtime refused the model."""
    if not Path("/proc/self/statm").exists():
        pytest.skip("reads /proc")
    model = onnx.ModelProto()
    model.CopyFrom(large("onnx", True).model)
    model.graph.node[0].op_type = "Nothing"
    before = resident()
    for _ in range(2):
        with pytest.raises(SessionError):
            gs.Session(model)
    assert resident() - before < 0.2 * MEGABYTES
