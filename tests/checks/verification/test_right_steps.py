"""Right steps that verify once rejected: undeclared and small types, counts at their limit, texts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest

import graphscale as gs
from graphscale.checks.verification import verify
from graphscale.checks.verification.counterexample import load_case, save_case
from graphscale.checks.verification.verify_report import Case
from tests.build import parse

STEP = """<ir_version: 10, opset_import: ["" : 20]>
g (float[4,3] x, float[4,2] t, float[3,2] w{inputs}) => (float loss, float[3,2] w_next{outputs})
<float n = {{0.25}}, float rate = {{0.1}}>
{{
  y = MatMul(x, w)
  d = Sub(y, t)
  dd = Mul(d, d)
  loss = ReduceMean<keepdims=0>(dd)
  dy = Mul(d, n)
  {more}
  xt = Transpose(x)
  gw = MatMul(xt, dz)
  u = Mul(gw, rate)
  w_next = Sub(w, u)
}}"""
FLOAT8 = {
    name: getattr(onnx.TensorProto, name) for name in ("FLOAT8E5M2", "FLOAT8E4M3FN", "FLOAT8E4M3FNUZ", "FLOAT8E5M2FNUZ")
}


def step(more: str = "dz = Identity(dy)", inputs: str = "", outputs: str = "") -> onnx.ModelProto:
    """A step without value_info."""
    return parse(STEP.format(more=more, inputs=inputs, outputs=outputs))


def assert_verified(original: onnx.ModelProto, loss_scale: object = "dynamic", target: str = "onnx") -> None:
    report = verify(original, gs.scale(original, loss_scale, target=target, trial=True), runs=2)
    assert report.verdict == "verified, exact", report.failures


@pytest.mark.parametrize("dtype", [onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16], ids=["float16", "bfloat16"])
def test_a_cast_on_the_backward_path_of_a_step_without_types(dtype: int) -> None:
    assert_verified(step(f"dh = Cast<to={dtype}>(dy)  dz = Cast<to=1>(dh)"))


@pytest.mark.parametrize("name", FLOAT8)
def test_a_float8_cast_without_saturation(name: str) -> None:
    assert_verified(step(f"dh = Cast<to={FLOAT8[name]}, saturate=0>(dy)  dz = Cast<to=1>(dh)"))


def test_a_float8_gradient_that_is_wrong() -> None:
    """The tolerance of a small type still notices a gradient that is twice the right one."""
    original = step(f"dh = Cast<to={FLOAT8['FLOAT8E5M2']}, saturate=0>(dy)  dz = Cast<to=1>(dh)")
    scaled = gs.scale(original).model
    assert isinstance(scaled, onnx.ModelProto)
    narrow = next(node for node in scaled.graph.node if node.op_type == "Cast" and node.attribute[0].i != 1)
    twice = onnx.helper.make_node("Add", [narrow.input[0]] * 2, ["twice"])
    scaled.graph.node.insert([*scaled.graph.node].index(narrow), twice)
    narrow.input[0] = "twice"
    failures = {check.name for check in verify(original, scaled, runs=1, numeric=True).failures}
    assert "values as in the original" in failures


@pytest.mark.parametrize("target", ["onnx", "ort-cpu", pytest.param("ort-training", marks=pytest.mark.training)])
@pytest.mark.parametrize("delay", ["none", "first", "always"])
def test_the_longest_period(delay: str, target: str) -> None:
    period = 2**24 - (delay == "always")
    assert_verified(step(), gs.DynamicLossScale(increment_period=period, growth_delay=delay), target)


TEXTS = {
    "unread": ("", ", string[2] names", ""),
    "compared": ("  same = Equal(names, names)", ", string[4] names", ", bool[4] same"),
    "handed on": ("  same = Identity(names)", ", string[4] names", ", string[4] same"),
    "read as numbers": ("  same = Cast<to=1>(names)", ", string[4] names", ", float[4] same"),
}


@pytest.mark.parametrize("kind", TEXTS)
def test_an_input_of_texts(kind: str) -> None:
    more, inputs, outputs = TEXTS[kind]
    assert_verified(step(f"dz = Identity(dy){more}", inputs, outputs))


def test_texts_that_differ() -> None:
    more, inputs, outputs = TEXTS["handed on"]
    original = step(f"dz = Identity(dy){more}", inputs, outputs)
    scaled = gs.scale(original).model
    assert isinstance(scaled, onnx.ModelProto)
    handing = next(node for node in scaled.graph.node if "names" in node.input)
    handing.op_type = "StringConcat"
    handing.input.append("names")
    feeds = {"names": np.asarray(["a", "b", "c", "d"])}
    report = verify(original, scaled, runs=1, numeric=True, feeds=feeds)
    (failure,) = report.failures
    assert "[0] is aa, not a (as in the original); 4 of 4 elements differ" in failure.detail


def test_texts_in_a_counterexample(tmp_path: Path) -> None:
    names = np.asarray(["a", "bc"], dtype=object)
    save_case(Case("step", {"names": names, "x": np.zeros(2, np.float32)}), tmp_path / "case.npz")
    found = load_case(tmp_path / "case.npz").feeds["names"]
    assert (found.dtype, [*found]) == (names.dtype, [*names])
