"""Gradient graphs of onnxruntime-training, lowered, against PyTorch's autograd."""

from __future__ import annotations

import numpy as np
import pytest

import graphscale as gs
from tests.conftest import run_once
from tests.passes.training_ops.emitted_operators import load_forward_operators, read_graphs
from tests.passes.training_ops.forward.node import FORWARD

pytestmark = pytest.mark.pytorch
pytest.importorskip("torch", reason="needs PyTorch")

load_forward_operators()
TRIED = sorted(name for name in read_graphs() if FORWARD[name].torch is not None and not FORWARD[name].is_refused)


def autograd(name: str) -> dict[str, np.ndarray]:
    """Return the gradients of a forward case, by the operands' names, as PyTorch computes them in float64."""
    import torch

    case = FORWARD[name]
    operands = [None if value is None else torch.from_numpy(np.array(value)) for value in case.operands]
    for i, value in enumerate(operands):
        if value is not None and value.is_floating_point():
            operands[i] = value.double().requires_grad_(i in case.varied)
    assert case.torch is not None
    torch.sin(case.torch(torch, *operands)).sum().backward()
    gradients = {f"x{i}": operands[i].grad for i in case.varied}  # type: ignore[union-attr]
    return {key: value.numpy() for key, value in gradients.items()}


@pytest.mark.parametrize("name", TRIED)
def test_gradients(name: str) -> None:
    lowered = gs.lower_training_ops(read_graphs()[name]).model
    outputs, _ = run_once(lowered, FORWARD[name].feeds())
    for operand, expected in autograd(name).items():
        actual = outputs[f"{operand}_grad"]
        assert actual.shape == expected.shape
        assert np.abs(actual - expected).max() <= 1e-5 * np.abs(expected).max(), operand
