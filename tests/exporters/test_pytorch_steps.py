"""Training steps of PyTorch modules: exported, scaled without a hint, trained beside PyTorch, loaded back."""

from __future__ import annotations

import importlib.util
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import graphscale as gs
from graphscale.errors import ExportError, SessionError

if any(importlib.util.find_spec(name) is None for name in ("torch", "onnxscript")):
    pytest.skip("needs PyTorch and onnxscript", allow_module_level=True)

import torch
from torch import nn
from torch.nn.functional import cross_entropy, interpolate, max_pool2d, mse_loss, one_hot

pytestmark = [pytest.mark.pytorch, pytest.mark.filterwarnings("ignore")]

STEPS = 6
POLICY = gs.DynamicLossScale(1024, increment_period=3)


class Convolutions(nn.Module):
    """Batch normalization, whose statistics are carried, and a constant buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(1, 4, 3, padding=1, stride=2), nn.BatchNorm2d(4)
        self.out = nn.Linear(64, 3)
        self.register_buffer("shift", torch.tensor(0.25))

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return self.out(torch.relu(self.norm(self.conv(image + self.shift))).flatten(1))


class Unet(nn.Module):
    """Pooled and resized channels, whose gradients have another order in memory than the weights."""

    def __init__(self) -> None:
        super().__init__()
        self.fine, self.coarse, self.out = (
            nn.Conv2d(1, 4, 3, padding=1),
            nn.Conv2d(4, 4, 3, padding=1),
            nn.Conv2d(8, 1, 1),
        )

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        fine = torch.relu(self.fine(image))
        coarse = interpolate(self.coarse(max_pool2d(fine, 2)), scale_factor=2, mode="bilinear")
        return self.out(torch.cat([fine, coarse], dim=1))


class Tied(nn.Module):
    """One matrix for the embedding and the output."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.out = nn.Embedding(12, 8), nn.Linear(8, 12, bias=False)
        self.out.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.out(torch.tanh(self.embedding(tokens)))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cells, self.out = nn.LSTM(4, 5, batch_first=True), nn.Linear(5, 2)

    def forward(self, series: torch.Tensor) -> torch.Tensor:
        return self.out(self.cells(series)[0][:, -1])


class Likelihood(nn.Module):
    """A loss of a distribution, which checks its parameters."""

    def forward(self, found: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return -torch.distributions.Normal(found, found.exp()).log_prob(target).mean()


class Bags(nn.Module):
    """Bags of embeddings, and windows that end behind the border."""

    def __init__(self) -> None:
        super().__init__()
        self.bags, self.pool = nn.EmbeddingBag(12, 10, padding_idx=3), nn.AvgPool2d(2, ceil_mode=True)
        self.out = nn.Linear(3, 4)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.out(self.pool(self.bags(words).unflatten(1, (1, 2, 5))).flatten(1))


class Products(nn.Module):
    """Products over an axis, and rows added to others."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.out = nn.Linear(8, 6), nn.Linear(7, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = self.layer(x).sigmoid()
        found = torch.cat([found.cumprod(1), found.prod(1, keepdim=True)], dim=1)
        return self.out(torch.zeros_like(found).index_add(0, torch.arange(x.shape[0]).flip(0), found))


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.SiLU(), nn.LayerNorm(16), nn.Linear(16, 4))


def classes(count: int, size: int) -> torch.Tensor:
    return torch.randint(count, (size,))


def ignoring(module: nn.Module, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    logits, target = module(batch["tokens"]).flatten(0, 1), batch["target"].flatten()
    right = (logits.argmax(-1) == target).float().mean()
    return cross_entropy(logits, target, ignore_index=-100), {"accuracy": right}


def tokens() -> dict[str, torch.Tensor]:
    target = torch.randint(12, (4, 5))
    target[0, :2] = -100
    return {"tokens": torch.randint(12, (4, 5)), "target": target}


SGD = (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01})
CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[], Any], Any, Any, dict[str, Any]]] = {
    "clipped": (perceptron, lambda: (torch.randn(6, 8), classes(4, 6)), cross_entropy, "adamw", {"clip_norm": 0.1}),
    "statistics": (Convolutions, lambda: (torch.randn(5, 1, 8, 8), classes(3, 5)), cross_entropy, SGD, {}),
    "resized": (Unet, lambda: (torch.randn(3, 1, 8, 8), torch.randn(3, 1, 8, 8)), mse_loss, "adamw", {}),
    "tied": (Tied, tokens, ignoring, "adamw", {}),
    "bags": (Bags, lambda: (torch.randint(12, (5, 3)), classes(4, 5)), cross_entropy, SGD, {}),
    "rprop": (Products, lambda: (torch.randn(6, 8), classes(4, 6)), cross_entropy, (torch.optim.Rprop, {}), {}),
    "recurrent": (Recurrent, lambda: (torch.randn(4, 3, 4), torch.randn(4, 2)), Likelihood(), SGD, {}),
}


def export(name: str, path: Path) -> tuple[nn.Module, dict[str, torch.Tensor], Any]:
    """Export a case; return its module, its batch by the names of the step, and the report."""
    torch.manual_seed(0)
    make, draw, loss, optimizer, options = CASES[name]
    module, batch = make(), draw()
    before = {key: value.clone() for key, value in module.state_dict().items()}
    report = gs.exporters.pytorch.export_step(module, batch, loss, optimizer, path, **options)
    assert all(torch.equal(value, before[key]) for key, value in module.state_dict().items())
    named = batch if isinstance(batch, dict) else dict(zip(report.inputs, batch, strict=True))
    return module, named, report


def train(name: str, module: nn.Module, batch: dict[str, torch.Tensor]) -> None:
    """Train a module as its user would."""
    _, _, loss, optimizer, options = CASES[name]
    kind, settings = (torch.optim.AdamW, {}) if optimizer == "adamw" else optimizer
    made = kind(module.parameters(), **settings)
    for _ in range(STEPS):
        made.zero_grad()
        inputs = [value for key, value in batch.items() if key != "target"]
        value = loss(module, batch)[0] if loss is ignoring else loss(module(*inputs), batch["target"])
        value.backward()
        if "clip_norm" in options:
            nn.utils.clip_grad_norm_(module.parameters(), options["clip_norm"])
        made.step()


@pytest.mark.parametrize("name", CASES)
def test_a_trained_step_is_the_trained_module(name: str, tmp_path: Path) -> None:
    module, batch, report = export(name, tmp_path / "step.onnx")
    assert report.largest_error < 1e-3
    scaled = gs.scale(tmp_path / "step.onnx", POLICY)
    assert scaled.report.coverage == 1.0
    assert {state.input for state in scaled.report.state} >= {key for key, _ in module.named_parameters()}
    with gs.Session(scaled) as session:
        for _ in range(STEPS):
            assert session.step({key: value.numpy() for key, value in batch.items()}).applied
        assert session.loss_scale > 1024
        trained = CASES[name][0]()
        gs.exporters.pytorch.load_weights(session, trained)
    train(name, module, batch)
    for key, value in module.state_dict().items():
        wanted = value.detach().double().numpy()
        error = np.abs(trained.state_dict()[key].double().numpy() - wanted).max() / np.abs(wanted).max()
        assert error < 1e-4, key


def test_the_file_says_what_is_what(tmp_path: Path) -> None:
    _, _, report = export("tied", tmp_path / "step.onnx")
    model = onnx.load(tmp_path / "step.onnx")
    names = [value.name for value in model.graph.input]
    initializers = {tensor.name for tensor in model.graph.initializer}
    assert {"tokens", "target", "learning_rate", "embedding.weight", "embedding.weight.exp_avg"} <= set(names)
    assert "out.weight" not in names, "a tied weight has one name"
    assert initializers >= set(names) - {"tokens", "target"}
    (roles,) = (json.loads(entry.value) for entry in model.metadata_props if entry.key == "graphscale.roles")
    assert roles["losses"] == ["loss"] and roles["metrics"] == ["accuracy"]
    assert roles["states"]["embedding.weight.next"] == "embedding.weight"
    assert report.inputs == ("tokens", "target") and "step.onnx" in str(report)


def test_dropout_draws_from_a_carried_state(tmp_path: Path) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(8, 32), nn.Dropout(0.5), nn.Linear(32, 4))
    batch = (torch.randn(6, 8), classes(4, 6))
    gs.exporters.pytorch.export_step(module, batch, cross_entropy, "sgd", tmp_path / "step.onnx")
    scaled = gs.scale(tmp_path / "step.onnx", POLICY)
    assert "random_state" in {state.input for state in scaled.report.state}
    feeds = {"input": batch[0].numpy(), "target": batch[1].numpy(), "learning_rate": np.float32(0)}
    with gs.Session(scaled) as first, gs.Session(scaled) as second:
        losses = [float(first.step(feeds)["loss"]) for _ in range(3)]
        assert len(set(losses)) == 3, "each step draws another mask"
        assert losses == [float(second.step(feeds)["loss"]) for _ in range(3)]


def test_masters_are_float32(tmp_path: Path) -> None:
    torch.manual_seed(0)
    # Adam makes whole steps of gradients that float16 rounds to zero.
    module = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))
    batch = {"x": torch.randn(16, 8), "y": classes(4, 16)}

    def loss(module: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return cross_entropy(module(batch["x"]).float(), batch["y"])

    gs.exporters.pytorch.export_step(module, batch, loss, "adamw", tmp_path / "step.onnx", masters=True)
    scaled = gs.scale(tmp_path / "step.onnx", POLICY)
    with gs.Session(scaled) as session:
        assert session.step({key: value.numpy() for key, value in batch.items()}).applied
        state = session.state_dict()
        assert state["0.weight"].dtype == np.float16 and state["0.weight.master"].dtype == np.float32
        gs.exporters.pytorch.load_weights(session, module)
    assert np.array_equal(module[0].weight.detach().numpy(), state["0.weight.master"])


def test_masters_of_features_that_are_added_by_their_places(tmp_path: Path) -> None:
    """Gradients of maxima and of a table are sums by places, which ONNX Runtime has no kernel for in float16."""
    torch.manual_seed(0)
    features = nn.Sequential(nn.Embedding(12, 8), nn.MaxPool2d(3, 2, 1), nn.Flatten(), nn.Linear(8, 4))
    batch = (torch.randint(12, (6, 4)), classes(4, 6))
    report = gs.exporters.pytorch.export_step(
        features, batch, cross_entropy, "adamw", tmp_path / "step.onnx", masters=True
    )
    assert not [node for node in onnx.load(tmp_path / "step.onnx").graph.node if node.op_type == "ScatterND"]
    scaled = gs.scale(tmp_path / "step.onnx", POLICY)
    assert scaled.report.coverage == 1.0 and gs.verify(tmp_path / "step.onnx", scaled, runs=1).ok
    with gs.Session(scaled) as session:
        feeds = dict(zip(report.inputs, (value.numpy() for value in batch), strict=True))
        losses = [float(session.step(feeds)["loss"]) for _ in range(STEPS)]
    assert losses[-1] < losses[0]


def test_a_rule_of_the_user(tmp_path: Path) -> None:
    torch.manual_seed(0)
    module = nn.Linear(8, 4)

    def signed(gradients: Any, weights: Any, state: Any, rate: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        moments = {f"{name}.m": 0.9 * state[f"{name}.m"] + g for name, g in gradients.items()}
        return {name: w - rate * moments[f"{name}.m"].sign() for name, w in weights.items()}, moments

    first = {f"{name}.m": torch.zeros_like(value) for name, value in module.named_parameters()}
    batch = (torch.randn(6, 8), classes(4, 6))
    gs.exporters.pytorch.export_step(module, batch, cross_entropy, (signed, first), tmp_path / "step.onnx")
    assert {state.input for state in gs.scale(tmp_path / "step.onnx").report.state} >= {"weight", "weight.m"}


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(11, 4), nn.Linear(4 + 3, 5)

    def forward(self, word: torch.Tensor, kind: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
        found = self.table(word) + self.table.weight[place]
        return self.head(torch.cat([found, one_hot(kind, 3).to(found.dtype)], -1))


def test_indices_that_pytorch_refuses_stop_the_step(tmp_path: Path) -> None:
    torch.manual_seed(0)
    module = Words()
    batch = {"word": classes(11, 6), "kind": classes(3, 6), "place": classes(11, 6), "target": classes(5, 6)}

    def loss(module: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        logits = module(batch["word"], batch["kind"], batch["place"])
        return cross_entropy(logits, batch["target"], ignore_index=-1)

    gs.exporters.pytorch.export_step(module, batch, loss, "sgd", tmp_path / "step.onnx", dynamic_batch=False)
    with gs.Session(gs.scale(tmp_path / "step.onnx")) as session:
        first = session.state_dict()
        for name, number in itertools.product(batch, (-1, -2, -12, 11)):
            changed = {key: value.clone() for key, value in batch.items()}
            changed[name][0] = number
            feeds = {key: value.numpy() for key, value in changed.items()} | {"learning_rate": np.float32(0)}
            # An index in brackets may count from the end.
            if (name, number) in {("target", -1), ("place", -1), ("place", -2)}:
                np.testing.assert_allclose(session.step(feeds)["loss"], loss(module, changed).item(), 1e-5)
                continue
            with pytest.raises((IndexError, RuntimeError)):
                loss(module, changed)
            with pytest.raises(SessionError, match=r"(?i)out of|invalid ind"):
                session.step(feeds)
        assert all(np.array_equal(first[name], value) for name, value in session.state_dict().items() if "." in name)


def test_weights_that_do_not_fit_change_nothing(tmp_path: Path) -> None:
    module = nn.Linear(8, 4)
    before = module.weight.detach().clone()
    for state in ({}, {"weight": np.zeros((4, 8), np.float32)}, {"weight": np.zeros((3, 8)), "bias": np.zeros(4)}):
        with pytest.raises(ExportError):
            gs.exporters.pytorch.load_weights(state, module)
    assert torch.equal(module.weight, before)
