"""Modules and losses of PyTorch that change Python values: refused where the step depends on them."""

from __future__ import annotations

import importlib.util
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import graphscale as gs
from graphscale.errors import ExportError

if any(importlib.util.find_spec(name) is None for name in ("torch", "onnxscript")):
    pytest.skip("needs PyTorch and onnxscript", allow_module_level=True)

import torch
from torch import nn
from torch.nn.functional import cross_entropy

pytestmark = [pytest.mark.pytorch, pytest.mark.filterwarnings("ignore")]

STEPS = [0]


class Layered(nn.Module):
    """Two layers; subclasses change what is between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 4)
        self.calls: Any = 0
        self.held: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.between(self.first(x)))

    def between(self, x: torch.Tensor) -> torch.Tensor:
        return x


class After(Layered):
    """Another step after ten thousand."""

    def between(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x / 2 if self.calls > 9_999 else x


class Every(Layered):
    """Another gradient in each fiftieth step."""

    def between(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x.detach() if self.calls % 50 == 0 else x


class Scheduled(Layered):
    """A temperature that falls slowly."""

    def between(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x * 0.999999**self.calls


class Averaged(Layered):
    """A moving average that is no buffer."""

    def between(self, x: torch.Tensor) -> torch.Tensor:
        mean = x.detach().mean(0)
        self.held = mean if self.held is None else 0.9999 * self.held + 0.0001 * (mean + 1)
        return x - 0.001 * self.held


class Grown(Layered):
    """Another step once a list is long."""

    def between(self, x: torch.Tensor) -> torch.Tensor:
        self.held = [*(self.held or []), x.shape]
        return x / 2 if len(self.held) > 6 else x


class Global(Layered):
    """A counter of the whole program."""

    def between(self, x: torch.Tensor) -> torch.Tensor:
        STEPS[0] += 1
        return x / 2 if STEPS[0] >= 100 else x


class Drawn(Layered):
    """Now and then another step, by a generator of its own."""

    def __init__(self, generator: Any) -> None:
        super().__init__()
        self.held = generator

    def between(self, x: torch.Tensor) -> torch.Tensor:
        return x / 2 if self.held.random() < 1e-3 else x


class Whole(Layered):
    """Whole numbers by a generator of its own."""

    def between(self, x: torch.Tensor) -> torch.Tensor:
        self.held = torch.Generator()
        return x[:, torch.randint(8, (8,), generator=self.held)]


class Noisy(Layered):
    """Noise from a generator of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.held = torch.Generator()

    def between(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.rand(x.shape, generator=self.held)


class Legal(Layered):
    """Caches, counters for a log, and activations that others read."""

    def __init__(self) -> None:
        super().__init__()
        self.mask: Any = None
        self.sizes: dict[int, torch.Tensor] = {}
        self.features: tuple[torch.Tensor, ...] = ()
        self.first.register_forward_hook(self.keep)

    def keep(self, module: nn.Module, args: Any, found: torch.Tensor) -> None:
        self.features = (found,)

    def between(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls % 100 == 0:
            self.message = f"{self.calls} calls"
        if self.mask is None:
            self.mask = torch.ones(8, 8).tril()[3]
        self.shape, self.last = x.shape, x
        return x * self.mask + self.sizes.setdefault(x.shape[1], torch.linspace(0, 1, x.shape[1]))


def export(path: Path, module: nn.Module, loss: Any = cross_entropy) -> Any:
    torch.manual_seed(0)
    batch = (torch.randn(6, 8), torch.randint(4, (6,)))
    return gs.exporters.pytorch.export_step(module, batch, loss, "sgd", path / "step.onnx")


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        *((After, "calls"), (Every, "calls"), (Scheduled, "calls"), (Averaged, "held"), (Grown, "held, .*")),
        (Global, r"STEPS\[0\]"),
    ],
)
def test_a_step_that_depends_on_them_is_refused(kind: type[nn.Module], name: str, tmp_path: Path) -> None:
    STEPS[0] = 0
    with pytest.raises(ExportError, match=f"^the step depends on {name}, Python values .* or pass them in the batch$"):
        export(tmp_path, kind())
    assert list(tmp_path.iterdir()) == [] and STEPS[0] <= 1


def test_a_loss_that_depends_on_them_is_refused(tmp_path: Path) -> None:
    calls = 0

    def loss(module: nn.Module, batch: Any) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return cross_entropy(module(batch[0]), batch[1]) * (2 if calls >= 1000 else 1)

    with pytest.raises(ExportError, match=r"^the step depends on calls, Python values"):
        export(tmp_path, Layered(), loss)


@pytest.mark.parametrize("generator", [np.random.default_rng(0), random.Random(0)])
def test_numbers_of_a_generator_are_refused(generator: Any, tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=r"^the step draws random numbers by the generator held, which"):
        export(tmp_path, Drawn(generator))


def test_whole_numbers_of_a_generator_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=r"^the step draws random numbers by aten\.randint\.generator, which"):
        export(tmp_path, Whole())


def test_noise_of_a_generator_is_drawn_from_the_state(tmp_path: Path) -> None:
    assert any("random_state" in note for note in export(tmp_path, Noisy()).notes)
    feeds = {"x": np.ones((6, 8), np.float32), "target": np.zeros(6, np.int64), "learning_rate": np.float32(0)}
    with gs.Session(gs.scale(tmp_path / "step.onnx")) as session:
        assert len({float(session.step(feeds)["loss"]) for _ in range(3)}) == 3


def test_values_that_no_step_depends_on_get_a_note(tmp_path: Path) -> None:
    module = Legal()
    notes = [note for note in export(tmp_path, module).notes if "Python" in note]
    assert notes == ["each call changes calls in Python; the graph keeps the decisions that the export made by them"]
    assert module.calls == 0 and module.features == ()
