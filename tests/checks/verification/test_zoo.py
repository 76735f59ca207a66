"""Verify accepts the packed steps of models/zoo, scaled: no false alarm."""

from __future__ import annotations

import onnx
import pytest

from models.zoo import check_trial, pack
from tests.checks.linting.test_zoo import CARRYING, REFUSED
from tests.conftest import HAS_TRAINING, TARGETS

# Steps without kernels on a CPU: in any build, and in onnxruntime-training 1.19.2, which loads no opset above 21.
NOWHERE = {"torch-muon.nesterov", "wrap-everything.square"}
NEWER = {"opset-23-export.sgd", "keras-layers.noise"} if HAS_TRAINING else set()
NAMES = [name for name in sorted({*pack.names()} - REFUSED - CARRYING)[::4] if name not in NOWHERE | NEWER]


@pytest.mark.cover(1)
@pytest.mark.sample(3)
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", NAMES)
def test_no_alarm(name: str, target: str) -> None:
    content, truth = pack.read(name)
    assert check_trial.find(onnx.load_from_string(content), truth, target, runs=1) == []
