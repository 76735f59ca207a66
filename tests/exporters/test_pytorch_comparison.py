"""Wrong translations of PyTorch's steps that the comparison refuses, and right ones where rounding decides."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import graphscale as gs
from graphscale.errors import ExportError

if any(importlib.util.find_spec(name) is None for name in ("torch", "onnxscript")):
    pytest.skip("needs PyTorch and onnxscript", allow_module_level=True)

import torch
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss, silu

from graphscale.exporters.pytorch import aten_formulas, traced_step

pytestmark = [pytest.mark.pytorch, pytest.mark.filterwarnings("ignore")]

Batch = tuple[torch.Tensor, torch.Tensor]


def translate(monkeypatch: pytest.MonkeyPatch, operator: Any, formula: Callable[..., Any]) -> None:
    """Let exports translate an operator by a formula."""
    right = traced_step.formulas
    monkeypatch.setattr(traced_step, "formulas", lambda: right() | {operator: formula})


def multiplied(factor: float) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """Return a formula of the gradient of SiLU, times a factor."""

    def formula(grad: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        slope = torch.sigmoid(x)
        return factor * grad * slope * (1 + x * (1 - slope))

    return formula


def classified(rows: int = 6, columns: int = 8) -> Batch:
    return torch.randn(rows, columns), torch.randint(4, (rows,))


class Dropped(nn.Module):
    """Products over an axis, some of them dropped."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.layer, self.drop, self.out = nn.Linear(8, 6), nn.Dropout(rate), nn.Linear(6, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.drop(self.layer(x).sigmoid().cumprod(1)))


class Rooted(nn.Module):
    """A root of zero, whose slope is infinite."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(8, 4), nn.Parameter(torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return silu(self.layer(x)) + self.scale.sqrt()


class Widened(nn.Module):
    """A ReLU of zero in float32, and of 1.5e-8 in float64."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.out, self.scale = nn.Linear(8, 6), nn.Linear(6, 4), nn.Parameter(torch.tensor(10.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = silu(self.layer(x))
        zero = self.scale * torch.tensor(0.1).to(x.dtype) - 1
        return self.out(0.1 * found + torch.relu(zero + (found - found.detach())))


class Nearly(nn.Module):
    """A ReLU of a difference that rounding decides, and others."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.out = nn.Linear(2, 5, bias=False), nn.Linear(5, 4)
        with torch.no_grad():
            self.layer.weight[0] = torch.tensor([1.0, -1.0])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(torch.relu(self.layer(x)))


def near() -> Batch:
    first = torch.linspace(0.6, 0.9, 6)
    return torch.stack([first, torch.nextafter(first, torch.zeros(6))], dim=1), torch.randint(4, (6,))


def falling(gradients: Any, weights: Any, state: Any, rate: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Move by signs, never below zero: a root of zero stays one."""
    return {name: (w - rate * gradients[name].sign()).clamp(min=0) for name, w in weights.items()}, {}


def export(path: Path, module: nn.Module, batch: Batch, loss: Any = cross_entropy, optimizer: Any = "sgd") -> Any:
    return gs.exporters.pytorch.export_step(module, batch, loss, optimizer, path / "step.onnx")


@pytest.mark.parametrize("formula", [lambda grad, x: grad, multiplied(1.001)], ids=["identity", "factor"])
def test_a_wrong_translation_is_noticed(
    formula: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    translate(monkeypatch, torch.ops.aten.silu_backward.default, formula)
    (tmp_path / "step.onnx").write_text("before")
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(8, 16), nn.SiLU(), nn.Linear(16, 4))
    with pytest.raises(ExportError, match=r"another 0\.weight\.gradient than PyTorch in step 1: .*nothing is written"):
        export(tmp_path, module, classified())
    assert [path.read_text() for path in tmp_path.iterdir()] == ["before"]


@pytest.mark.parametrize("rate", [0.0, 0.5])
def test_a_wrong_formula_is_no_part_of_the_reference(
    rate: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    operator = torch.ops.aten.cumprod_backward.default
    monkeypatch.setitem(aten_formulas.COMPOSITE_FORMULAS, operator, lambda grad, x, dim, output: 2 * grad)
    torch.manual_seed(0)
    with pytest.raises(ExportError, match=r"another layer\.weight\.gradient than PyTorch in step 1"):
        export(tmp_path, Dropped(rate), classified())
    assert list(tmp_path.iterdir()) == []


def test_an_infinite_gradient_excuses_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    translate(monkeypatch, torch.ops.aten.silu_backward.default, multiplied(2))
    with pytest.raises(ExportError, match=r"PyTorch's own step 1 makes scale\.gradient infinite or NaN on the"):
        export(tmp_path, Rooted(), (torch.randn(6, 8), torch.randn(6, 4) - 9), mse_loss, falling)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("is_right", [True, False])
def test_another_way_in_float64_excuses_nothing(
    is_right: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    if is_right:
        export(tmp_path, Widened(), classified())
        return
    translate(monkeypatch, torch.ops.aten.silu_backward.default, multiplied(2))
    with pytest.raises(ExportError, match=r"another layer\.weight\.gradient than PyTorch in step 1"):
        export(tmp_path, Widened(), classified())


@pytest.mark.parametrize(("least", "is_right"), [(1e-6, True), (0.2, False)])
def test_a_relu_may_round_otherwise(
    least: float, is_right: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The translation takes results below `least` for zero, as kernels do that round otherwise."""

    def passed(grad: torch.Tensor, result: torch.Tensor, threshold: float) -> torch.Tensor:
        return torch.where(result > least, grad, 0.0)

    translate(monkeypatch, torch.ops.aten.threshold_backward.default, passed)
    torch.manual_seed(0)
    if is_right:
        assert export(tmp_path, Nearly(), near()).largest_error < 1e-4
        return
    with pytest.raises(ExportError, match=r"another layer\.weight\.gradient than PyTorch in step 1"):
        export(tmp_path, Nearly(), near())
