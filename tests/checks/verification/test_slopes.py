"""The derivative check within a verification."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx
import pytest

import graphscale as gs
from graphscale.checks.verification import verifier
from graphscale.errors import VerifyError
from tests.build import BACKWARD, step
from tests.cli.command import graphscale, succeed

NAME = "gradients are slopes of the loss"


def row(report: gs.VerifyReport) -> tuple[str, str]:
    """The status and the detail of the row."""
    (check,) = [check for check in report.checks if check.name == NAME]
    return check.status, check.detail


def test_gradients_of_the_loss_hold() -> None:
    model = step()
    report = gs.verify(model, gs.scale(model), runs=0, derivatives=True)
    assert report.ok and row(report) == ("holds", "2 of 2 agree with 'loss' in float64")
    assert all(check.name != NAME for check in gs.verify(model, gs.scale(model), runs=0).checks)


def test_gradients_of_another_loss_fail() -> None:
    model = step(
        backward=BACKWARD.replace("MatMul(at, dy)", "MatMul(ht, dy)").replace("at =", "ht = Transpose(h) at =")
    )
    report = gs.verify(model, gs.scale(model), runs=0, derivatives=True)
    assert not report.ok
    status, detail = row(report)
    assert status == "fails" and detail.startswith("'dw2' of 'w2' is no slope of 'loss'")


def test_what_cannot_be_evaluated_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise VerifyError("nothing can evaluate it")

    monkeypatch.setattr(verifier, "check_gradients", refuse)
    model = step()
    report = gs.verify(model, gs.scale(model), runs=0, derivatives=True)
    assert report.ok and row(report) == ("skipped", "nothing can evaluate it")


def test_the_option(tmp_path: Path) -> None:
    onnx.save(step(), tmp_path / "step.onnx")
    succeed(tmp_path, "scale", "step.onnx", "-o", "scaled.onnx")
    done = graphscale("verify", "step.onnx", "scaled.onnx", "--runs", "0", "--derivatives", folder=tmp_path)
    assert done.returncode == 0 and NAME in done.stdout
