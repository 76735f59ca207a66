"""Formulas of ATen operators, traced and compared with the operators of PyTorch."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

if importlib.util.find_spec("torch") is None or importlib.util.find_spec("onnxscript") is None:
    pytest.skip("needs PyTorch and onnxscript", allow_module_level=True)

import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional

from graphscale.exporters.pytorch.aten_formulas import formulas
from graphscale.exporters.pytorch.traced_step import composite_formulas, plain_kernels

pytestmark = [pytest.mark.pytorch, pytest.mark.filterwarnings("ignore")]

WORDS = torch.tensor([3, 1, 1, 0, 4, 3, 2, 5, 1])
STARTS = torch.tensor([0, 4, 4, 6])  # an empty bag
ENDS = torch.tensor([0, 4, 4, 6, 9])
WEIGHTS = torch.tensor([0.5, -1.0, 2.0, 0.25, 1.5, -0.5, 1.0, 3.0, 0.75])
TABLE = torch.linspace(-1, 2, 2 * 5 * 3).reshape(2, 5, 3)
BIAS = torch.tensor([0.5, -1.0])
ZEROS = torch.tensor([[1.0, 1, 0, 1, 1], [0, 1, 1, 0, 1], [1, 1, 1, 1, 0]])

CASES: dict[str, tuple[tuple[int, ...], Any]] = {
    "sum": ((6, 3), lambda x: functional.embedding_bag(WORDS, x, STARTS, mode="sum")),
    "mean": ((6, 3), lambda x: functional.embedding_bag(WORDS, x, STARTS, mode="mean")),
    "mean without padding": ((6, 3), lambda x: functional.embedding_bag(WORDS, x, STARTS, padding_idx=3)),
    "ends": ((6, 3), lambda x: functional.embedding_bag(WORDS, x, ENDS, include_last_offset=True)),
    "rows": ((6, 3), lambda x: functional.embedding_bag(WORDS.reshape(3, 3), x, mode="sum")),
    "weighted": (
        (6, 3),
        lambda x: functional.embedding_bag(
            WORDS, x, STARTS, mode="sum", per_sample_weights=WEIGHTS * x[0, 0], padding_idx=1
        ),
    ),
    "bilinear": ((4, 5), lambda x: functional.bilinear(x, x[:, :3], TABLE * x[0, 0], BIAS)),
    "cumulative product": ((3, 5), lambda x: torch.cumprod(x, 1)),
    "cumulative product with zeros": ((3, 5), lambda x: torch.cumprod(x * ZEROS, 1)),
    "one-hot codes": ((6, 3), lambda x: functional.one_hot(WORDS.reshape(3, 3), 6).to(x.dtype) @ x),
    "sums by indices": ((9, 3), lambda x: torch.ones(6, 3).index_add(0, WORDS, x, alpha=2)),
    "copies by indices": ((4, 3), lambda x: torch.ones(6, 3).index_copy(0, STARTS[[0, 1, 3]] // 2, x[:3])),
    "RReLU": ((3, 5), lambda x: functional.rrelu(x, training=False)),
    "pool 1": ((2, 3, 8), lambda x: functional.avg_pool1d(x, 3, 2, ceil_mode=True)),
    "pool 2": ((2, 3, 6, 5), lambda x: functional.avg_pool2d(x, (3, 2), 2, 1, ceil_mode=True)),
    "pool 2 without border": (
        (2, 3, 6, 5),
        lambda x: functional.avg_pool2d(x, 3, 2, 1, ceil_mode=True, count_include_pad=False),
    ),
    "pool 2 by a divisor": (
        (2, 3, 6, 5),
        lambda x: functional.avg_pool2d(x, 3, 2, 1, ceil_mode=True, divisor_override=5),
    ),
    "pool 3": ((2, 3, 4, 5, 6), lambda x: functional.avg_pool3d(x, 2, 3, 1, ceil_mode=True)),
}


@pytest.mark.parametrize("case", CASES)
def test_a_formula_is_its_operator(case: str) -> None:
    shape, function = CASES[case]
    torch.manual_seed(0)
    x = torch.randn(shape, dtype=torch.float32)
    cotangent = torch.randn(function(x).shape)

    def both(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        result = function(leaf := x.detach().requires_grad_())
        return result.detach(), torch.autograd.grad(result, leaf, cotangent)[0]

    with plain_kernels(), composite_formulas():
        traced = make_fx(both, formulas())(x)
    replaced = {"embedding_bag", "avg_pool", "trilinear", "max", "rrelu_with_noise.default"}
    assert not [node for node in traced.graph.nodes if any(name in str(node.target) for name in replaced)]
    # The loss scale enters a backward pass where a contraction reads a cotangent.
    assert case != "bilinear" or any("mm" in str(node.target) for node in traced.graph.nodes)
    for got, wanted in zip(traced(x), both(x), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["index_add", "index_copy"])
def test_negative_indices_are_refused(name: str) -> None:
    def change(index: torch.Tensor) -> Any:
        return getattr(torch.zeros(6), name)(0, index, torch.ones(2))

    with plain_kernels(), composite_formulas():
        traced = make_fx(change, formulas())(torch.tensor([1, 5]))
    torch.testing.assert_close(traced(torch.tensor([1, 5])), change(torch.tensor([1, 5])))
    for computed in (traced, change):
        with pytest.raises((IndexError, RuntimeError), match="out of"):
            computed(torch.tensor([1, -1]))
