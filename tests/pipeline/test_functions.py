"""Models with inlined functions, and models without room for functions."""

from __future__ import annotations

import onnx.helper as h
import onnxruntime as ort
import pytest

import graphscale as gs
from graphscale.errors import TargetError
from tests.build import linear_step


@pytest.mark.parametrize("results", [["", "p"], ["p"], ["p", ""]], ids=str)
def test_a_call_that_leaves_out_results(results: list[str]) -> None:
    """Inlining would lose them."""
    model = linear_step("p = own.both(dw) m = ReduceSum <keepdims = 0> (p)", outputs="float[4,3] dw, float m")
    model.opset_import.add(domain="own", version=1)
    body = [h.make_node("Neg", ["a"], ["b"]), h.make_node("Abs", ["a"], ["c"])]
    model.functions.append(h.make_function("own", "both", ["a"], ["b", "c"], body, [h.make_opsetid("", 20)]))
    next(node for node in model.graph.node if node.domain == "own").output[:] = results
    scaled = gs.scale(model, roles={"metrics": ["m"]}).model
    assert [node.op_type for node in scaled.graph.node].count("Abs") == 1
    ort.InferenceSession(scaled.SerializeToString(), providers=["CPUExecutionProvider"])


def test_an_ir_version_in_which_constants_are_inputs() -> None:
    model = linear_step()
    model.ir_version = 3
    with pytest.raises(TargetError, match="IR version 3, without constants"):
        gs.scale(model)
