"""Each operator that a schema defines has a row of the table, or a reason for having none."""

from __future__ import annotations

import re
from pathlib import Path

import onnx
import pytest

from graphscale.operators import MICROSOFT, OPERATORS
from graphscale.operators.unruled import UNRULED

ONNX_DOMAINS = ("", "ai.onnx.preview.training")
# Operators that ONNX Runtime registers in the domain of ONNX.
RUNTIME_ONLY = (
    "AveragePoolGrad MaxPoolGrad SimplifiedLayerNormalization SparseSoftmaxCrossEntropy SparseSoftmaxCrossEntropyGrad"
)


def test_no_operator_is_in_both_lists() -> None:
    assert not OPERATORS.keys() & UNRULED.keys()


def test_every_operator_of_onnx_is_known() -> None:
    schemas = {(schema.domain, schema.name) for schema in onnx.defs.get_all_schemas_with_history()}
    known = {key for key in OPERATORS.keys() | UNRULED.keys() if key[0] in ONNX_DOMAINS}
    assert {key for key in schemas if key[0] in ONNX_DOMAINS} == known - {("", name) for name in RUNTIME_ONLY.split()}


@pytest.mark.training
@pytest.mark.full
def test_every_operator_of_the_runtime_is_known() -> None:
    known = {name for domain, name in OPERATORS.keys() | UNRULED.keys() if domain == MICROSOFT}
    assert not {name for name in known if not is_registered(name)}
    assert not {name for name in library_words() - known if is_registered(name)}


def library_words() -> set[str]:
    """Return the words in ONNX Runtime's library that could be names of operators; it lists none of its operators."""
    from onnxruntime.capi import onnxruntime_pybind11_state as library

    words = re.findall(rb"(?<![A-Za-z0-9_])[A-Z][A-Za-z0-9_]{2,60}", Path(library.__file__).read_bytes())
    return {word.decode() for word in words}


def is_registered(name: str) -> bool:
    """Return whether ONNX Runtime knows an operator of com.microsoft."""
    import onnxruntime as ort

    node = onnx.helper.make_node(name, [], ["y"], domain=MICROSOFT)
    graph = onnx.helper.make_graph([node], "graph", [], [onnx.ValueInfoProto(name="y")])
    versions = [onnx.helper.make_opsetid("", 21), onnx.helper.make_opsetid(MICROSOFT, 1)]
    model = onnx.helper.make_model(graph, opset_imports=versions, ir_version=10)
    options = ort.SessionOptions()
    options.log_severity_level = 4
    try:
        ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # ORT's exceptions share no public base class
        return "is not a registered function/op" not in str(error)
    return True
