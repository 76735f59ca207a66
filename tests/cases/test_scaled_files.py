"""Wrong files of graphscale 0.2.0, which verified them: `scaled/`, each with its original beside the folder."""

from __future__ import annotations

import onnx
import pytest

import graphscale as gs
from tests.cases.steps import FOLDER, read

NAMES = sorted(path.stem for path in (FOLDER / "scaled").glob("*.onnx"))
REJECTED = {
    *("best_loss_stored", "linear_head_beside_network", "no_backward_pass", "svrg_snapshot_network"),
    *("clip_one_bound", "float16_accumulator", "float16_update", "gradient_fused_into_momentum"),
    *("gradient_fused_into_update", "own_scale_in_the_loss", "relu_on_a_gradient"),
    *("leapfrog", "logged_adversarial_example", "lora_merged", "nesterov_two_sequences"),  # asked about
}
shares_mistakes = pytest.mark.xfail(strict=True, reason="verify shares the mistakes of scale")


def scaled(name: str) -> onnx.ModelProto:
    return onnx.load(FOLDER / "scaled" / f"{name}.onnx")


def is_verified(name: str) -> bool:
    try:
        return gs.verify(read(name), scaled(name), runs=0).ok
    except gs.GraphscaleError:
        return False


@pytest.mark.parametrize(
    "name", [name if name in REJECTED else pytest.param(name, marks=shares_mistakes) for name in NAMES]
)
def test_verify_rejects(name: str) -> None:
    assert not is_verified(name)


@pytest.mark.parametrize("name", ["clip_one_bound", "relu_on_a_gradient"])
def test_lint_and_verify_agree(name: str) -> None:
    assert "GS306" in {finding.code for finding in gs.lint(scaled(name)).findings}
    checks = {check.name: check for check in gs.verify(read(name), scaled(name), runs=0).checks}
    assert checks["every gradient checked"].status == "fails"
    assert "overflow" in checks["every gradient checked"].detail
