"""The execution of a typed graph node by node, with numpy's float16 for float16 values."""

from __future__ import annotations

import numpy as np
import onnx

from tests.conftest import Arrays
from tests.passes.casting.borders import is_ours, target_of
from tests.passes.casting.rounding import assert_same_numbers, rounded, run_node


def executed(typed: onnx.ModelProto, emulated: onnx.ModelProto, feeds: Arrays, actual: Arrays) -> Arrays:
    """The values of a typed graph, those of the small type as float32 numbers.

    Each node runs alone in float32, and its result is rounded if it is of the small type. Each node's result is
    compared with that of the same node in the emulated graph.

    Args:
        typed: the graph in mixed precision.
        emulated: the same graph, emulated.
        feeds: the values of the inputs.
        actual: all values of the emulated graph.
    """
    small = {v.name for v in typed.graph.value_info if v.type.tensor_type.elem_type == onnx.TensorProto.FLOAT16}
    small |= {n.output[0] for n in typed.graph.node if n.op_type == "Cast" and target_of(n) == onnx.TensorProto.FLOAT16}
    constants = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in typed.graph.initializer}
    values = {n: a.astype(np.float32) if a.dtype == np.float16 else a for n, a in constants.items()} | feeds
    twins = iter([node for node in emulated.graph.node if not is_ours(node)])
    for node in typed.graph.node:
        if is_ours(node):
            values[node.output[0]] = values[node.input[0]]
        else:
            twin = next(twins)
            assert (twin.op_type, twin.name) == (node.op_type, node.name)
            alone = onnx.NodeProto()
            alone.CopyFrom(twin)
            del alone.input[:]
            alone.input.extend(node.input)
            known = {name: values[name] for name in node.input if name} | {n: actual[n] for n in twin.output if n}
            for name, result in run_node(alone, known, typed.opset_import).items():
                assert_same_numbers(actual[name], result, name)
                values[node.output[list(twin.output).index(name)]] = result
        for name in node.output:
            if name in small and values[name].dtype == np.float32:
                values[name] = rounded(values[name], "float16")
    assert next(twins, None) is None
    return values
