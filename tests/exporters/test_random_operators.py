"""Random operators of exported steps, whose numbers have the distributions of PyTorch's own."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import pytest

if importlib.util.find_spec("torch") is None:
    pytest.skip("needs PyTorch", allow_module_level=True)

import torch
from torch.nn import functional

from graphscale.exporters.pytorch.random_operators import RandomOperators
from graphscale.exporters.pytorch.traced_step import plain_kernels

pytestmark = pytest.mark.pytorch

COUNT = 40_000
ONES = torch.ones(COUNT)
CHANCES = torch.linspace(0, 1, COUNT)
# The comparison of an exported step with PyTorch draws by these operators on both sides: here alone they are compared
# with those of PyTorch.
DRAWS: dict[str, Callable[[], Any]] = {
    "dropout": lambda: functional.dropout(ONES, 0.2),
    "native_dropout": lambda: torch.native_dropout(ONES, 0.2, True)[0],
    "mask": lambda: torch.native_dropout(ONES, 0.2, True)[1] * 1.0,
    "all dropped": lambda: functional.dropout(ONES, 1.0),
    "evaluated": lambda: functional.dropout(ONES, 0.2, training=False),
    "whole channels": lambda: functional.dropout1d(torch.ones(COUNT // 2, 2), 0.2),
    "alpha_dropout": lambda: functional.alpha_dropout(ONES, 0.2, training=True),
    "bernoulli": lambda: torch.bernoulli(CHANCES) - CHANCES,
    "bernoulli with a number": lambda: torch.bernoulli(ONES, 0.3),
    "bernoulli_": lambda: torch.empty(COUNT).bernoulli_(0.3),
    "bernoulli_ with chances": lambda: torch.empty(COUNT).bernoulli_(CHANCES) - CHANCES,
    "uniform_": lambda: torch.empty(COUNT).uniform_(-2, 5),
    "normal_": lambda: torch.empty(COUNT).normal_(3, 2),
    "exponential_": lambda: torch.empty(COUNT).exponential_(0.5),
    "rand": lambda: torch.rand(COUNT),
    "rand_like": lambda: torch.rand_like(ONES),
    "randn": lambda: torch.randn(COUNT, dtype=torch.float64),
    "randn_like": lambda: torch.randn_like(ONES),
}


@pytest.mark.parametrize("name", DRAWS)
@pytest.mark.parametrize("is_taken_apart", [False, True])
def test_draws_have_the_distribution_of_pytorch(name: str, is_taken_apart: bool) -> None:
    torch.manual_seed(0)
    wanted = DRAWS[name]()
    random = RandomOperators(torch.tensor(7))
    if is_taken_apart:
        with plain_kernels(), random:
            got = DRAWS[name]()
    else:
        with random:
            got = DRAWS[name]()
    assert random.refused == []
    assert (got.dtype, got.shape) == (wanted.dtype, wanted.shape)
    quantiles = torch.tensor([0.02, 0.1, 0.3, 0.5, 0.7, 0.9, 0.98], dtype=torch.float64)
    first, second = got.double().flatten(), wanted.double().flatten()
    if len(set(second.tolist())) <= 2:  # a mask: the same two numbers, as often
        torch.testing.assert_close(first.unique(), second.unique())
    else:
        torch.testing.assert_close(first.quantile(quantiles), second.quantile(quantiles), rtol=0.02, atol=0.06)
    torch.testing.assert_close(first.mean(), second.mean(), rtol=0, atol=0.05)
    torch.testing.assert_close(first.std(), second.std(), rtol=0.05, atol=0.01)


def test_draws_are_independent() -> None:
    with RandomOperators(torch.tensor(7)):
        first, second = torch.rand(COUNT), torch.rand(COUNT)
    with RandomOperators(torch.tensor(8)):
        third = torch.rand(COUNT)
    drawn = torch.stack([first, first.roll(1), second, third])
    assert (torch.corrcoef(drawn) - torch.eye(4)).abs().max() < 0.03


def test_gradients_of_dropout_have_its_mask() -> None:
    leaf = torch.linspace(-3, 3, 100).requires_grad_()
    with RandomOperators(torch.tensor(7)):
        found = torch.native_dropout(leaf, 0.2, True)[0]
        (gradient,) = torch.autograd.grad(found.sum(), leaf)
    torch.testing.assert_close(leaf * gradient, found)
    torch.testing.assert_close(gradient.unique(), torch.tensor([0, 1.25]))
