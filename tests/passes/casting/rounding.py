"""Rounding to float16 and bfloat16 with numpy, and runs of single nodes in float32, for comparison with emulation."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from typing import Any

import ml_dtypes
import numpy as np
import onnx

from tests.conftest import Arrays, Level, make_session, run_session

KINDS = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
# Infinities, NaN, both zeros, float16's largest number, its neighbours, what overflows in it; its smallest normal and
# subnormal numbers, a tie and what underflows; a tie between two numbers; what bfloat16 rounds.
_RARE = """
    inf -inf nan 0 -0.0 65504 65519 65520 -1e6 3e38 6.1035156e-05 6e-05 5.9604645e-08 2.9802322e-08 2.99e-08 -1e-9 1e-39
    1.0004883 1.0014648 -1.00390625 257 2049 -1e-4 300
"""
RARE = np.array(_RARE.split(), np.float32)


def rounded(array: np.ndarray, dtype: str) -> np.ndarray:
    """The numbers that a small type holds, as float32."""
    with np.errstate(all="ignore"):
        return np.asarray(array, np.float32).astype(KINDS[dtype]).astype(np.float32)


def is_rounded(array: np.ndarray, dtype: str) -> bool:
    """Return whether a small type holds all of these numbers exactly."""
    return bool(np.array_equal(_bits(rounded(array, dtype)), _bits(array)))


def assert_same_numbers(actual: np.ndarray, expected: np.ndarray, name: str) -> None:
    """The same bits, but for those of a NaN, which has many."""
    assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape), name
    if not np.array_equal(_bits(actual), _bits(expected)):
        different = _bits(actual) != _bits(expected)
        raise AssertionError(f"{name}: {different.sum()} differ: {actual[different][:4]} {expected[different][:4]}")


def _bits(array: np.ndarray) -> np.ndarray:
    if array.dtype.kind != "f":
        return array
    return np.where(np.isnan(array), array.dtype.type(np.nan), array).view(f"u{array.dtype.itemsize}")


def with_outputs(model: onnx.ModelProto, names: Iterable[str]) -> onnx.ModelProto:
    """A copy of a model with more outputs, whose types ONNX Runtime finds."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    present = {output.name for output in copy.graph.output}
    for name in names:
        if name and name not in present:
            present.add(name)
            copy.graph.output.add().name = name
    return copy


def run_all_values(model: onnx.ModelProto, feeds: Mapping[str, np.ndarray], level: Level | None = None) -> Arrays:
    """Every value of the main graph: inputs, initializers, and what the nodes give, but no bfloat16 ones.

    numpy has no such type, and ONNX Runtime does not hand them out.
    """
    names = [name for node in model.graph.node if not _gives_bfloat16(node) for name in node.output]
    values, _ = run_session(make_session(with_outputs(model, names), level), feeds)
    constants = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    return {**constants, **feeds, **values}


def _gives_bfloat16(node: onnx.NodeProto) -> bool:
    return node.op_type == "Cast" and node.attribute[0].i == onnx.TensorProto.BFLOAT16


def run_node(
    node: onnx.NodeProto, values: Mapping[str, np.ndarray], opsets: Iterable[onnx.OperatorSetIdProto]
) -> Arrays:
    """The results of one node alone on these values, at ONNX Runtime's lowest optimization level.

    Args:
        node: the node.
        values: its operands, and its results for their types, which ONNX Runtime does not infer for all operators.
        opsets: the opset imports.
    """
    given = {name: values[name] for name in node.input if name}
    results = [name for name in node.output if name]
    types = tuple((name, values[name].dtype, values[name].shape) for name in given)
    imports = tuple((entry.domain, entry.version) for entry in opsets)
    wanted = tuple((name, values[name].dtype, values[name].shape) for name in results)
    session = _session(node.SerializeToString(deterministic=True), types, wanted, imports)
    return dict(zip(results, session.run(results, given), strict=True))


@functools.lru_cache(maxsize=4096)
def _session(data: bytes, types: tuple[Any, ...], wanted: tuple[Any, ...], imports: tuple[Any, ...]) -> Any:
    node = onnx.NodeProto.FromString(data)
    make, code = onnx.helper.make_tensor_value_info, onnx.helper.np_dtype_to_tensor_dtype
    inputs, outputs = ([make(name, code(dtype), shape) for name, dtype, shape in side] for side in (types, wanted))
    graph = onnx.helper.make_graph([node], "one", inputs, outputs)
    opsets = [onnx.helper.make_opsetid(*entry) for entry in imports]
    return make_session(onnx.helper.make_model(graph, ir_version=10, opset_imports=opsets), Level.ORT_DISABLE_ALL)
