"""Files that other tools wrote: renamed ones are verified, changed ones not proved, and wrong ones still fail."""

from __future__ import annotations

import base64
import zlib
from collections.abc import Callable

import onnx
import pytest

import graphscale as gs
from graphscale.checks.verification.verify_report import VerifyReport
from graphscale.graph.original import ORIGINAL_KEY
from tests.conftest import load_example


def _scaled(name: str, **options: object) -> tuple[onnx.ModelProto, onnx.ModelProto]:
    original = load_example(name).model()
    scaled = onnx.ModelProto()
    scaled.CopyFrom(gs.scale(original, **options).model)
    return original, scaled


def _statuses(report: VerifyReport) -> dict[str, str]:
    return {check.name: check.status for check in report.checks}


def _rename(graph: onnx.GraphProto) -> None:
    """Rename all that is neither input nor output, as compilers do, in bodies too."""
    kept = {value.name for value in (*graph.input, *graph.output)}
    names: dict[str, str] = {}

    def new(name: str) -> str:
        return name if not name or name in kept else names.setdefault(name, f"renamed_{len(names)}")

    def walk(graph: onnx.GraphProto) -> None:
        for node in graph.node:
            node.name = new(f"node {node.name}")
            node.input[:], node.output[:] = map(new, node.input), map(new, node.output)
            for attribute in node.attribute:
                if attribute.type == attribute.GRAPH:
                    walk(attribute.g)
        for each in (*graph.input, *graph.output, *graph.value_info, *graph.initializer):
            each.name = new(each.name)

    walk(graph)


def _rename_a_constant(graph: onnx.GraphProto) -> None:
    inputs = {value.name for value in graph.input}
    constant = next(tensor for tensor in graph.initializer if tensor.name not in inputs)
    for node in graph.node:
        node.input[:] = ["renamed" if name == constant.name else name for name in node.input]
    constant.name = "renamed"


@pytest.mark.parametrize("change", [_rename_a_constant, _rename])
@pytest.mark.parametrize("name", ["jax/mlp_adam", "pytorch/mlp_momentum"])
def test_a_renamed_file_is_verified(name: str, change: Callable[[onnx.GraphProto], None]) -> None:
    original, scaled = _scaled(name)
    change(scaled.graph)
    report = gs.verify(original, scaled, runs=1)
    assert report.verdict.startswith("verified"), report.checks


def test_a_forged_record_fails_where_constants_were_renamed() -> None:
    """The record is right by the constants that the original gives, whatever the file calls them."""
    original, scaled = _scaled("jax/mlp_adam")
    _rename_a_constant(scaled.graph)
    (entry,) = [entry for entry in scaled.metadata_props if entry.key == ORIGINAL_KEY]
    record = onnx.ModelProto.FromString(zlib.decompress(base64.b64decode(entry.value)))
    small = [t for t in record.graph.initializer if t.external_data and not t.dims]
    references = [tensor.external_data[0] for tensor in small]
    references[0].value, references[1].value = references[1].value, references[0].value
    entry.value = base64.b64encode(zlib.compress(record.SerializeToString())).decode()
    (check,) = gs.verify(original, scaled, runs=0).failures
    assert check.name == "metadata of the scaling" and "the constant 'dot_bias_0' is" in check.detail, check
