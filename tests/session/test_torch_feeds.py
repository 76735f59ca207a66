"""Tensors of PyTorch as feeds and as state, by DLPack; skipped where there is no PyTorch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import graphscale as gs
from graphscale.errors import SessionError
from tests.conftest import HAS_TRAINING, assert_all_same_bits, assert_same_bits
from tests.session.dangerous import ONES
from tests.session.digits import BFLOAT16, DIGITS, batch, first_state, make, refused

pytestmark = pytest.mark.pytorch

torch = pytest.importorskip("torch", reason="needs PyTorch")


def mixed_session() -> gs.Session:
    """A step that gives the sum of its bfloat16 input."""
    return gs.Session(gs.scale(BFLOAT16, 1024), state={"w": np.ones((4, 3), np.float32)})


def test_a_batch_of_tensors_without_a_copy(bound: dict[str, int]) -> None:
    feeds = {name: torch.tensor(value) for name, value in batch().items()}
    actual = make().step(feeds)
    assert {name: tensor.data_ptr() for name, tensor in feeds.items()}.items() <= bound.items()
    assert_all_same_bits(actual, make().step(batch()))


def test_a_tensor_by_columns() -> None:
    feeds = batch()
    feeds["images"] = torch.tensor(feeds["images"].T.copy()).T
    assert not feeds["images"].is_contiguous()
    assert_same_bits(make().step(feeds)["loss"], make().step(batch())["loss"], "loss")


@pytest.mark.skipif(not HAS_TRAINING, reason="onnxruntime has DLPack in its training build")
def test_bfloat16_without_a_copy(bound: dict[str, int]) -> None:
    session = mixed_session()
    note = torch.tensor([[1, 2, 3], [4, 5, 6]], dtype=torch.bfloat16)
    assert session.step({**ONES, "note": note})["total"] == 21
    assert bound["note"] == note.data_ptr()


BAD: dict[str, tuple[Any, tuple[str, ...]]] = {
    "float64": (torch.ones(8, 4, dtype=torch.float64), ("x", "float64", "float32")),
    "bfloat16": (torch.ones(8, 4, dtype=torch.bfloat16), ("x", "DLPack")),
    "complex": (torch.ones(8, 4, dtype=torch.complex64), ("x", "complex64")),
    "rank": (torch.ones(8), ("x", "1 ax")),
    "gradient": (torch.ones(8, 4, requires_grad=True), ("x", "detach")),
    "sparse": (torch.ones(8, 4).to_sparse(), ("x", "strided")),
    "meta": (torch.ones(8, 4, device="meta"), ("x", "meta")),
}


@pytest.mark.parametrize("case", BAD)
def test_what_does_not_fit_is_one_clear_line(case: str) -> None:
    tensor, fragments = BAD[case]
    with refused(SessionError, fragments):
        mixed_session().step({**ONES, "x": tensor, "note": torch.ones(2, 3, dtype=torch.bfloat16)})


@pytest.mark.parametrize("tensor", [torch.ones(3, 2, dtype=torch.bfloat16).T, torch.ones(2, 3)], ids=["T", "float32"])
def test_bfloat16_that_does_not_fit(tensor: Any) -> None:
    with refused(SessionError, ("note",)):
        mixed_session().step({**ONES, "note": tensor})


def test_state_of_tensors() -> None:
    weights = {name: torch.tensor(value) for name, value in first_state().items()}
    one, other = gs.Session(gs.scale(DIGITS), state=weights), make()
    one.step(batch())
    other.step(batch())
    assert_all_same_bits(one.state_dict(), other.state_dict())
    one.load_state_dict({name: torch.tensor(value) for name, value in one.state_dict().items()})
    for name, value in weights.items():
        assert_same_bits(value.numpy(), first_state()[name], f"{name}: the tensor given is not written to")


def test_state_that_requires_a_gradient_is_one_clear_line() -> None:
    weights: dict[str, Any] = dict(first_state())
    weights["fc1.weight"] = torch.tensor(weights["fc1.weight"], requires_grad=True)
    with refused(SessionError, ("fc1.weight",)):
        gs.Session(gs.scale(DIGITS), state=weights)
