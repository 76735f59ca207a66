"""Wrong files that graphscale 0.2.0 wrote and verified, in scaled.zip: verify rejects each by a rule that stands alone.

Nothing is asked of the match with the original scaled again.
"""

from __future__ import annotations

import zipfile

import onnx
import pytest

import graphscale as gs
from graphscale.checks.verification.verify_report import FAILS, UNPROVED
from graphscale.errors import AlreadyScaledError, RolesError, SeedNotFoundError
from models.zoo import pack
from tests.cases.steps import FOLDER, read

pytestmark = pytest.mark.static

PAIRS = {"metadata of the scaling", "carried state guarded"}
# The checks that reject a file, or the error by which its original is refused or asked about.
REJECTED: dict[str, set[str] | type[gs.GraphscaleError]] = {
    "best_loss_stored": PAIRS,
    "clip_one_bound": {"every gradient checked"},
    "float16_accumulator": {"what is applied is checked"},
    "float16_update": {"what is applied is checked"},
    "fresh-contrast-queue.plain": {"what is applied is checked"},
    "fresh-eligibility-traces.plain": SeedNotFoundError,
    "fresh-estimated-rates.initializers": {"what is applied is checked"},
    "fresh-evolution.plain": SeedNotFoundError,
    "fresh-hand-gemm-momentum.nesterov": {"backward contractions scaled"},
    "fresh-hand-local-rules.k-means": SeedNotFoundError,
    "fresh-hand-local-rules.oja": SeedNotFoundError,
    "fresh-hand-local-rules.perceptron": SeedNotFoundError,
    "fresh-hand-merged-adapter.plain": {"metadata of the scaling"},
    "fresh-hand-weight-soup.federated": RolesError,
    "fresh-heads-on-frozen-feature.plain": {"backward contractions scaled"},
    "fresh-kalman-noise.plain": RolesError,
    "fresh-learnt-filter.plain": PAIRS,
    "fresh-merged-adapter.embedded": {"metadata of the scaling"},
    "fresh-nesterov-sequences.plain": PAIRS,
    "fresh-rotated-models.plain": RolesError,
    "gradient_fused_into_momentum": {"backward contractions scaled"},
    "gradient_fused_into_update": {"backward contractions scaled"},
    "leapfrog": PAIRS,
    "linear_head_beside_network": {"backward contractions scaled"},
    "logged_adversarial_example": RolesError,
    "lora_merged": {"metadata of the scaling"},
    "nesterov_two_sequences": PAIRS,
    "no_backward_pass": SeedNotFoundError,
    "own_scale_in_the_loss": AlreadyScaledError,
    "relu_on_a_gradient": {"every gradient checked"},
    "svrg_snapshot_network": {"scale enters at seeds"},
    # Right, but for needless scaling: the residual is scaled where its product with the activation is unscaled again.
    "implicit_layer": {"equal to the original scaled again"},
}


def original(name: str) -> onnx.ModelProto:
    return onnx.load_from_string(pack.read(name, pack.FRESH)[0]) if name.startswith("fresh-") else read(name)


def scaled(name: str) -> onnx.ModelProto:
    with zipfile.ZipFile(FOLDER / "scaled.zip") as archive:
        return onnx.load_from_string(archive.read(f"{name}.onnx"))


def test_each_file_has_its_row() -> None:
    with zipfile.ZipFile(FOLDER / "scaled.zip") as archive:
        assert {name.removesuffix(".onnx") for name in archive.namelist()} == REJECTED.keys()


@pytest.mark.parametrize("name", REJECTED)
def test_verify_rejects(name: str) -> None:
    rejected = REJECTED[name]
    if isinstance(rejected, type):
        with pytest.raises(rejected):
            gs.verify(original(name), scaled(name), runs=0)
        return
    for exact in (True, False):
        checks = gs.verify(original(name), scaled(name), runs=0, exact=exact).checks
        faults = {check.name for check in checks if check.status in (FAILS, UNPROVED)}
        assert rejected - ({"equal to the original scaled again"} if exact else set()) <= faults
        assert faults


@pytest.mark.parametrize("name", ["clip_one_bound", "relu_on_a_gradient"])
def test_lint_and_verify_agree(name: str) -> None:
    assert "GS306" in {finding.code for finding in gs.lint(scaled(name)).findings}
    checks = {check.name: check for check in gs.verify(original(name), scaled(name), runs=0).checks}
    assert checks["every gradient checked"].status == FAILS
    assert "overflow" in checks["every gradient checked"].detail
