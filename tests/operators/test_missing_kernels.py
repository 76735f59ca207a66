"""The operators without a CPU kernel in the newest stock release, compared with the release."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import onnx
import onnxruntime as ort
import pytest

from graphscale.graph.releases import release_of
from graphscale.targets import RELEASES, WITHOUT_KERNEL
from tests.operators.suite import suite_cases

NEWEST = RELEASES[-1]
pytestmark = pytest.mark.skipif(release_of(ort.__version__) is not NEWEST, reason="the list is that of another release")

FLOATS, ONE = "float[2,4] x", "float[1] s, int8[1] z"
# For each operator a node, with the inputs of its graph.
NODES = {
    "RandomNormal": ("", "RandomNormal<shape = [2]> ()"),
    "RandomNormalLike": (FLOATS, "RandomNormalLike(x)"),
    "RandomUniform": ("", "RandomUniform<shape = [2]> ()"),
    "RandomUniformLike": (FLOATS, "RandomUniformLike(x)"),
    "Bernoulli": (FLOATS, "Bernoulli(x)"),
    "Multinomial": (FLOATS, "Multinomial(x)"),
    "RoiAlign": ("float[1,1,4,4] x, float[1,4] r, int64[1] b", "RoiAlign(x, r, b)"),
    "Swish": (FLOATS, "Swish(x)"),
    "SwiGLU": (FLOATS, "SwiGLU(x, x)"),
    "QuantizeLinear": (f"{FLOATS}, {ONE}", "QuantizeLinear(x, s, z)"),
    "DequantizeLinear": (f"int8[2,4] x, {ONE}", "DequantizeLinear(x, s, z)"),
    "OptionalHasElement": (FLOATS, "OptionalHasElement(x)"),
    "OptionalGetElement": (FLOATS, "OptionalGetElement(x)"),
}


def refusal(model: onnx.ModelProto, opset: int) -> str:
    """Return the message of the runtime on a model in an opset; empty if it loads."""
    loaded = onnx.ModelProto()
    loaded.CopyFrom(model)
    loaded.ir_version = min(loaded.ir_version, NEWEST.max_ir_version)
    for entry in loaded.opset_import:
        if entry.domain in ("", "ai.onnx"):
            entry.version = opset
    options = ort.SessionOptions()
    options.log_severity_level = 4
    try:
        ort.InferenceSession(loaded.SerializeToString(), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # ORT's exceptions share no public base class
        return str(error)
    return ""


@pytest.mark.parametrize("operator", WITHOUT_KERNEL)
def test_the_kernel_is_missing_from_this_opset_on(operator: str) -> None:
    first = WITHOUT_KERNEL[operator]
    inputs, node = NODES[operator]
    model = onnx.parser.parse_model(
        f'<ir_version: 10, opset_import: ["" : 28]> case ({inputs}) => (y) {{ y = {node} }}'
    )
    for opset in {first, NEWEST.max_opset}:
        assert "NOT_IMPLEMENTED" in refusal(model, opset), opset
    if onnx.defs.has(operator, first - 1, ""):
        assert not refusal(model, first - 1)


@pytest.mark.full
def test_no_other_kernel_is_missing() -> None:
    refused: dict[str, Any] = defaultdict(list)
    ran = set()
    for case in suite_cases():
        domain, name = case.operator
        if domain or name in ran:
            continue
        text = refusal(case.model, NEWEST.max_opset)
        if text:
            refused[name].append(text)
        else:
            ran.add(name)
    missing = {name for name, texts in refused.items() if name not in ran and "NOT_IMPLEMENTED" in texts[0]}
    # It decodes files: no step that is differentiated has it.
    assert missing - {"ImageDecoder"} <= WITHOUT_KERNEL.keys()
    assert len(ran) > 150
