"""The verdict says what a file promises: its policy, its types, and what a skipped step changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import graphscale as gs
from tests.cli.command import graphscale, refuse
from tests.conftest import MODELS

ORIGINAL = MODELS / "pytorch" / "mlp_momentum.onnx"
ACCEPTING = gs.DynamicLossScale(1, max_consecutive_skips=1, on_stuck="accept")
FIXED = gs.FixedLossScale(1)


def verify(policy: Any, **options: Any) -> Any:
    return gs.verify(ORIGINAL, gs.scale(ORIGINAL, policy), runs=0, **options)


@pytest.mark.parametrize("policy", [ACCEPTING, FIXED], ids=["accepting", "fixed"])
def test_a_policy_that_applies_non_finite_gradients(policy: gs.LossScale) -> None:
    report = gs.verify(ORIGINAL, gs.scale(ORIGINAL, policy), runs=1)
    assert report.verdict == f"verified, exact; applies non-finite gradients: {policy!r}"
    assert "a non-finite gradient is skipped" not in {check.name for check in report.checks}
    what = "applied" if policy is FIXED else "applied once the scale is stuck"
    assert report.notes[0] == f"a step with a non-finite gradient is {what}: {policy!r}"


@pytest.mark.parametrize("policy", ["dynamic", gs.DynamicLossScale(4, max_consecutive_skips=1, on_stuck="hold")])
def test_a_policy_that_skips(policy: Any) -> None:
    report = verify(policy)
    assert report.verdict == "verified, exact"
    assert report.notes[0] == f"a step with a non-finite gradient is skipped: {gs.get(policy)!r}"


def test_a_fixed_scale_with_a_check() -> None:
    scaled = gs.scale(ORIGINAL, 1024, skip_nonfinite=True)
    assert gs.verify(ORIGINAL, scaled, runs=0).verdict == "verified, exact"


@pytest.mark.parametrize(
    ("policy", "expected", "ok"),
    [
        ("dynamic", "dynamic", True),
        (gs.DynamicLossScale(4), "dynamic", True),
        (gs.DynamicLossScale(4), gs.DynamicLossScale(4), True),
        (gs.DynamicLossScale(4), gs.DynamicLossScale(8), False),
        (ACCEPTING, "dynamic", False),
        (FIXED, "dynamic", False),
        (FIXED, 1, True),
        (FIXED, 2, False),
    ],
)
def test_an_expected_policy(policy: Any, expected: Any, ok: bool) -> None:
    report = verify(policy, expect_policy=expected)
    assert report.ok is ok
    (check,) = (check for check in report.checks if check.name == "policy as expected")
    assert (check.status == "holds") is ok and repr(gs.get(policy)) in check.detail


def test_an_expected_type() -> None:
    plain, half = gs.scale(ORIGINAL), gs.scale(ORIGINAL, autocast="float16")
    for scaled, dtype, ok in ((plain, "float32", True), (plain, "float16", False), (half, "float16", True)):
        assert gs.verify(ORIGINAL, scaled, runs=0, expect_dtype=dtype).ok is ok
    report = gs.verify(ORIGINAL, half, runs=0, expect_dtype="float32")
    assert "the file computes in float16, and float32 was expected" in str(report.failures)
    assert "the file computes in float16 where the original computes in float32" in report.notes


def test_kept_states() -> None:
    name = "fc1.weight.momentum.next"
    scaled = gs.scale(ORIGINAL, roles={"kept": [name]})
    report = gs.verify(ORIGINAL, scaled, runs=0, keep=[name])
    assert "a skipped step changes fc1.weight.momentum all the same" in report.notes


def test_the_command(tmp_path: Path) -> None:
    gs.scale(ORIGINAL, FIXED).save(tmp_path / "scaled.onnx")
    words = ("verify", ORIGINAL, tmp_path / "scaled.onnx", "--runs=0", "--expect-policy")
    assert graphscale(*words, "1").returncode == 0
    done = graphscale(*words, "dynamic")
    assert done.returncode == 1 and "policy as expected" in done.stdout
    refuse(tmp_path, *words, "steady", words=["--expect-policy steady"])
