"""Verify accepts the packed steps of models/zoo, scaled: no false alarm."""

from __future__ import annotations

import onnx
import pytest

from graphscale.targets import TARGETS
from models.zoo import check_trial, pack
from tests.checks.linting.test_zoo import CARRYING, REFUSED


@pytest.mark.sample(6)
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", sorted({*pack.names()} - REFUSED - CARRYING)[::4])
def test_no_alarm(name: str, target: str) -> None:
    content, truth = pack.read(name)
    assert check_trial.find(onnx.load_from_string(content), truth, target, runs=1) == []
