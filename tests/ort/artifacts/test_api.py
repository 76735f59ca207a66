"""Scaled folders in `onnxruntime.training.api` itself, which imports PyTorch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import graphscale as gs
from tests.conftest import assert_same_bits
from tests.ort.artifacts.conftest import Scaled
from tests.ort.artifacts.training_session import FOLDERS, STATES, sample

pytestmark = [pytest.mark.training, pytest.mark.pytorch]
SCRIPT = Path(__file__).with_name("train_digits.py")


@pytest.fixture
def api() -> Any:
    pytest.importorskip("torch", reason="onnxruntime.training.api imports torch, which is not installed")
    from onnxruntime.training import api

    return api


def trained(folder: Path) -> dict[str, Any]:
    result = subprocess.run([sys.executable, SCRIPT, folder], capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


@pytest.mark.parametrize("name", ["digits_adamw", "digits_adamw_clip"])
def test_a_script_trains_as_well_on_the_scaled_folder(name: str, api: Any, scaled: Scaled) -> None:
    original, found = trained(FOLDERS / name), trained(scaled(name, gs.DynamicLossScale(2**15, 50)))
    assert original["accuracy"] > 0.93
    assert found["accuracy"] == pytest.approx(original["accuracy"], abs=0.01)
    np.testing.assert_allclose(found["losses"], original["losses"], rtol=1e-3 if "clip" in name else 0)
    np.testing.assert_allclose(found["test_loss"], original["test_loss"], rtol=1e-3 if "clip" in name else 0)


def test_an_overflowing_scale_comes_down_and_the_script_goes_on(api: Any, scaled: Scaled) -> None:
    name = "digits_adamw"
    found, harmless = trained(scaled(name, gs.DynamicLossScale(3e38, 10))), trained(FOLDERS / name)
    assert found["losses"][:2] == harmless["losses"][:2]
    assert found["losses"] != harmless["losses"], "no step was skipped; the test needs a larger scale"
    assert found["accuracy"] > 0.93 and np.isfinite(found["losses"]).all()


def test_the_state_is_to_be_seen_and_set(api: Any, scaled: Scaled, tmp_path: Path) -> None:
    folder = scaled("digits_adamw")
    state = api.CheckpointState.load_checkpoint(folder / "checkpoint")
    module = api.Module(folder / "training_model.onnx", state, folder / "eval_model.onnx")
    optimizer = api.Optimizer(folder / "optimizer_model.onnx", module)
    original = api.CheckpointState.load_checkpoint(FOLDERS / "digits_adamw" / "checkpoint")
    plain = api.Module(FOLDERS / "digits_adamw" / "training_model.onnx", original)
    batch = [sample("digits_adamw")[name] for name in module.input_names()]
    loss, expected = module(*batch), plain(*batch)
    assert type(loss) is type(expected)
    assert_same_bits(loss, expected, "loss")
    assert_same_bits(
        module.get_contiguous_parameters(True).numpy(), plain.get_contiguous_parameters(True).numpy(), "parameters"
    )
    assert [float(state.parameters[name].data) for name in STATES] == [1024, 0, 1]
    assert not any(state.parameters[name].requires_grad for name in STATES)
    optimizer.step()
    module.lazy_reset_grad()
    state.parameters["current_loss_scale"] = np.asarray(8, np.float32)
    module(*batch)
    assert [float(state.parameters[name].data) for name in STATES] == [8, 1, 1]
    api.CheckpointState.save_checkpoint(state, tmp_path / "saved")
    loaded = api.CheckpointState.load_checkpoint(tmp_path / "saved")
    assert [float(loaded.parameters[name].data) for name in STATES] == [8, 1, 1]
