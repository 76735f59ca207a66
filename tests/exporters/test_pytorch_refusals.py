"""Modules, losses and optimizers of PyTorch that cannot be exported: each is refused in one line."""

from __future__ import annotations

import importlib.util
import random
from collections.abc import Callable
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
from torch.nn.functional import cross_entropy, ctc_loss, grid_sample, mse_loss

pytestmark = [pytest.mark.pytorch, pytest.mark.filterwarnings("ignore")]


def classes(count: int, size: int) -> torch.Tensor:
    return torch.randint(count, (size,))


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) if x.sum() > 0 else -self.layer(x)


class Skipping(nn.Module):
    """A layer that is skipped by chance."""

    def __init__(self, draw: Callable[[], float]) -> None:
        super().__init__()
        self.layer, self.draw = nn.Linear(8, 8), draw

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.layer(x) if self.draw() < 0.999 else self.layer(x)


def of_numpy() -> float:
    return float(np.random.rand())


def _bags(**options: Any) -> tuple[Any, ...]:
    module = nn.Sequential(nn.EmbeddingBag(12, 8, **options), nn.Linear(8, 4))
    return module, (torch.randint(12, (6, 3)), classes(4, 6)), cross_entropy, "sgd"


def _batch(rows: int = 6) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(rows, 8), classes(4, rows)


def autocast_loss(module: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return cross_entropy(module(batch[0]), batch[1])


def faint(module: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Compute a loss whose squared gradients are zero in float16, as is Adam's epsilon."""
    return cross_entropy(module(batch[0]).float(), batch[1]) * 1e-4


def normed() -> nn.Module:
    module = nn.utils.weight_norm(nn.Linear(8, 4))
    module(torch.randn(2, 8))
    return module


def called() -> nn.Module:
    """Return a module that keeps its last activations."""
    module = nn.Linear(8, 4)
    module.register_forward_hook(lambda module, args, found: setattr(module, "last", found))
    module(torch.randn(2, 8))
    return module


class Narrow(torch.optim.SGD):
    """An optimizer of a user that computes in bfloat16."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for weight in group["params"]:
                weight.sub_(weight.grad.bfloat16() * group["lr"])


class Alignment(nn.Module):
    """A loss that decides by the lengths of its targets."""

    def forward(self, found: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        lengths = torch.full((6,), 4), torch.full((6,), 2)
        return ctc_loss(found.log_softmax(1).expand(4, 6, 4), target.expand(2, 6).t() + 1, *lengths)


class Sampled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return grid_sample(x[:, None, :, None], self.layer(x).reshape(-1, 2, 2, 2), align_corners=False).flatten(1)


# Each of them is exported; the others of torch.optim are not.
OFFERED = (
    "; pass its rule as a function, or one of 'adadelta', 'adagrad', 'adam', 'adamax', 'adamw', 'asgd', 'nadam', "
    "'radam', 'rmsprop', 'rprop', 'sgd'"
)
REFUSED: dict[str, tuple[Callable[[], tuple[Any, ...]], dict[str, Any], str]] = {
    "no parameter": (lambda: (nn.ReLU(), (torch.randn(6, 8), torch.randn(6, 8)), mse_loss, "sgd"), {}, "no parameter"),
    "no module": (lambda: (torch.relu, _batch(), cross_entropy, "sgd"), {}, "pass a torch.nn.Module"),
    "no optimizer": (lambda: (nn.Linear(8, 4), _batch(), cross_entropy, "adamm"), {}, OFFERED),
    "several losses": (lambda: (nn.Linear(8, 4), _batch(), nn.CrossEntropyLoss(reduction="none"), "sgd"), {}, "loss"),
    "one row": (lambda: (nn.Linear(8, 4), _batch(1), cross_entropy, "sgd"), {}, "1 row"),
    "a branch": (lambda: (Branching(), _batch(), cross_entropy, "sgd"), {}, "depends on the values of a tensor"),
    "Python's random": (lambda: (Skipping(random.random), _batch(), cross_entropy, "sgd"), {}, "by Python's random"),
    "NumPy's random": (
        lambda: (Skipping(of_numpy), _batch(), cross_entropy, "sgd"),
        {},
        "by numpy.random",
    ),
    "LBFGS": (lambda: (nn.Linear(8, 4), _batch(), cross_entropy, torch.optim.LBFGS), {}, "LBFGS"),
    "Adafactor": (lambda: (nn.Linear(8, 4), _batch(), cross_entropy, "adafactor"), {}, OFFERED),
    "CTC": (lambda: (nn.Linear(8, 4), _batch(), Alignment(), "sgd"), {}, "ctc_loss cannot be exported"),
    "grid": (lambda: (Sampled(), _batch(), cross_entropy, "sgd"), {}, "the forward of Sampled has no ONNX form"),
    "a bag of maxima": (lambda: _bags(mode="max"), {}, "mode='sum'"),
    "scaled bags": (lambda: _bags(scale_grad_by_freq=True), {}, "scale_grad_by_freq"),
    "sparse bags": (lambda: _bags(sparse=True), {}, "0.weight is sparse"),
    "max_norm": (lambda: _bags(max_norm=1.0), {}, "changes its weight 0.weight in the forward pass"),
    "complex": (
        lambda: (nn.Linear(8, 4, dtype=torch.complex64), _batch(), cross_entropy, "sgd"),
        {},
        "weight is complex",
    ),
    "FFT": (
        lambda: (nn.Linear(8, 4), _batch(), lambda m, b: torch.fft.rfft(m(b[0])).abs().sum(), "sgd"),
        {},
        "complex numbers",
    ),
    "averaged statistics": (
        lambda: (nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4, momentum=None)), _batch(), cross_entropy, "sgd"),
        {},
        "(batchnorm.py:",
    ),
    "old weight_norm": (lambda: (normed(), _batch(), cross_entropy, "sgd"), {}, "torch.nn.utils.parametrizations"),
    "kept activations": (
        lambda: (called(), _batch(), cross_entropy, "sgd"),
        {},
        "(last); delete it or keep its .detach()",
    ),
    "no backward pass": (
        lambda: (nn.Linear(8, 4), _batch(), lambda m, b: m(b[0]).exp().mul_(2).sum(), "sgd"),
        {},
        "modified by an inplace operation",
    ),
    "Muon": (lambda: (nn.Linear(8, 4), _batch(), cross_entropy, "muon"), {}, "torch.optim.Muon cannot be exported"),
    "another in bfloat16": (lambda: (nn.Linear(8, 4), _batch(), cross_entropy, Narrow), {}, "Narrow computes in bfl"),
    "bfloat16": (lambda: (nn.Linear(8, 4).bfloat16(), _batch(), cross_entropy, "sgd"), {}, "pass module.float()"),
    "bfloat16 masters": (
        lambda: (nn.Linear(8, 4).bfloat16(), _batch(), cross_entropy, "sgd"),
        {"masters": True},
        "pass module.float()",
    ),
    "bfloat16 batch": (
        lambda: (nn.Linear(8, 4), [_batch()[0].bfloat16(), _batch()[1]], cross_entropy, "sgd"),
        {},
        "pass float32",
    ),
    "float64": (lambda: (nn.Linear(8, 4).double(), _batch(), cross_entropy, "sgd"), {}, "pass module.float()"),
    "float64 with Adam": (
        lambda: (
            nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 4)).double(),
            (_batch()[0].double(), _batch()[1]),
            *(cross_entropy, "adam"),
        ),
        {},
        "pass module.float() and a batch of float32",
    ),
    "float64 with another reason": (
        lambda: (_bags(max_norm=1.0)[0].double(), *_bags()[1:]),
        {},
        "as an embedding with max_norm does, and only the optimizer may; leave that out",
    ),
    "float64 with a branch": (
        lambda: (Branching().double(), (_batch()[0].double(), _batch()[1]), cross_entropy, "sgd"),
        {},
        "write it with torch.where, or masks",
    ),
    "autocast": (lambda: (nn.Linear(8, 4), _batch(), autocast_loss, "sgd"), {}, "leave out torch.autocast"),
    "float16": (lambda: (nn.Linear(8, 4).half(), _batch(), cross_entropy, "sgd"), {}, "pass masters=True"),
    "float16 epsilon": (
        lambda: (nn.Linear(8, 4).half(), (_batch()[0].half(), _batch()[1]), faint, "adamw"),
        {},
        "step 1 makes weight.next infinite or NaN on the example batch; pass another batch, or options of the "
        "optimizer; "
        "the module is in float16: pass masters=True",
    ),
    "float16 normalization": (
        lambda: (
            nn.Sequential(nn.Linear(8, 4), nn.LayerNorm(4)).half(),
            (_batch()[0].half(), _batch()[1]),
            cross_entropy,
            "sgd",
        ),
        {},
        "pass masters=True",
    ),
    "clipping": (lambda: (nn.Linear(8, 4), _batch(), cross_entropy, "sgd"), {"clip_norm": -1}, "clip_norm"),
}
# Another type of the module may help here.
ADVISED = ("float64", "float64 with Adam", "float16", "float16 epsilon", "float16 normalization")


@pytest.mark.parametrize("case", REFUSED)
def test_a_refusal_is_one_line_and_writes_nothing(case: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    make, options, words = REFUSED[case]
    with pytest.raises(ExportError) as refused:
        gs.exporters.pytorch.export_step(*make(), tmp_path / "step.onnx", **options)
    assert words in str(refused.value) and "\n" not in str(refused.value)
    assert ("; the module is in float" in str(refused.value)) == (case in ADVISED)
    assert list(tmp_path.iterdir()) == []
