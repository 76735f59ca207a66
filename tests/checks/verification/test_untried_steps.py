"""Reasons for no trial: no runtime, an original that cannot be run, and limits; weights are not read for it."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.external_data_helper
import onnx_ir as ir
import pytest
from onnx import helper, numpy_helper

import graphscale as gs
from graphscale.files.limits import TRIAL_MEMORY, Limits, limiting
from graphscale.step import step_trial
from tests.checks.verification.trial_steps import FREE, free, give, node_of, slow, tried, write


def test_without_a_runtime(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert tried(free()) == "not tried: no onnxruntime is installed"


def test_without_the_runtime_of_the_target(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_trial, "installed_runtime", lambda target: None)
    assert tried(free(), target="ort-training").startswith("not tried: onnxruntime-training 1.19.2 is not installed")
    assert tried(free()).startswith("tried")


def test_a_large_model() -> None:
    with limiting(Limits(max_memory=2**8)):
        assert "bytes of weights are more than an eighth of 256 (--max-memory)" in tried(free())


def test_an_original_that_does_not_run() -> None:
    model = write(FREE)
    give(model, "dd", "Unheard", "d", "d")
    node_of(model, "dd").domain = "strange"
    model.opset_import.append(helper.make_opsetid("strange", 1))
    assert "not tried: ONNX Runtime" in tried(model) and "cannot load the original" in tried(model)


def test_an_original_without_finite_values() -> None:
    model = write("  nil = Sub(rate, rate)\n  far = Div(rate, nil)\n" + FREE.replace("Identity(fit)", "Add(fit, far)"))
    assert tried(model) == "not tried: it computes a loss or gradients that are not finite on random feeds"


def test_limits() -> None:
    assert tried(slow(3)).startswith("tried")
    with limiting(Limits(max_seconds=1)):
        assert tried(slow(2**50)) == "not tried: it takes more than 1 s of CPU time (--max-seconds)"
    large = free()
    large.graph.initializer.append(numpy_helper.from_array(np.int64([2**30]), "many"))
    large.graph.node.insert(8, helper.make_node("Expand", ["fit", "many"], ["wide"]))
    large.graph.node.insert(9, helper.make_node("ReduceMean", ["wide"], ["mean"], keepdims=0))
    give(large, "loss", "Identity", "mean")
    assert tried(large) == f"not tried: it takes more than {TRIAL_MEMORY} bytes of memory (--max-memory)"


def refuse_in_child(read: Callable[..., Any]) -> Callable[..., Any]:
    """Let the compiler alone read a tensor, and the trial none; the analysis reads constants."""
    parent = os.getpid()
    return lambda self, *more, **options: read(self, *more, **options) if os.getpid() == parent else pytest.fail("read")


def test_weights_in_other_files_are_mapped_by_the_runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, weight = free(), numpy_helper.from_array(np.full((3, 2), 0.5, np.float32), "w")
    onnx.external_data_helper.set_external_data(weight, "weights.bin")
    model.graph.initializer.append(weight)
    onnx.save(model, tmp_path / "model.onnx")
    for name in ("numpy", "tobytes", "__array__"):
        monkeypatch.setattr(ir.ExternalTensor, name, refuse_in_child(getattr(ir.ExternalTensor, name)))
    trial = gs.scale(tmp_path / "model.onnx", trial=True).report.trial
    assert trial is not None and "values, scale 1, 1024, 8192; 4 runs" in trial
