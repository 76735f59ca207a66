"""Types of values that the model does not declare: by ONNX's inference, and dtypes by the operators alone."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator

import onnx_ir as ir
from onnx_ir.convenience import create_value_mapping
from onnx_ir.passes.common.shape_inference import infer_shapes

from graphscale.errors import UnsupportedModelError
from graphscale.graph.values import own_dtype, subgraphs
from graphscale.graph.walks import reach
from graphscale.operators import Kind, rule_of

__all__ = ["complete_types", "dtype_of", "dtypes_of"]


def complete_types(model: ir.Model) -> None:
    """Add the dtypes and shapes that ONNX infers, where an output of the model lacks one; what is declared stays."""
    if all(value.dtype is not None and value.shape is not None for value in model.graph.outputs):
        return
    # A model that cannot be inferred is refused where a type is needed, in one line rather than by a traceback.
    log = logging.getLogger(infer_shapes.__module__)
    silent, log.disabled = log.disabled, True
    try:
        inferred = infer_shapes(model.clone(), check_type=False, strict_mode=False)
    finally:
        log.disabled = silent
    for graph, twin in zip(model.graphs(), inferred.graphs(), strict=True):
        types = create_value_mapping(twin, include_subgraphs=False)
        for name, value in create_value_mapping(graph, include_subgraphs=False).items():
            if value.shape is None:
                value.shape = types[name].shape
            if value.dtype is None and (dtype := types[name].dtype) is not None:
                value.dtype = dtype


def dtype_of(value: ir.Value) -> ir.DataType:
    """Return the dtype of a floating-point value: its own, or that of the data it is computed from.

    Raises:
        UnsupportedModelError: the model does not say, and it cannot be told from the operators.
    """
    for current in reach([value], _of_the_same_dtype):
        dtype = own_dtype(current)
        if dtype is not None:
            return dtype
    raise UnsupportedModelError(
        f"the dtype of value {value.name!r} is not known; run shape inference on the model before scaling it"
    )


def dtypes_of(nodes: Iterable[ir.Node]) -> dict[ir.Value, ir.DataType]:
    """Return the dtypes of the results of some nodes, as far as they are known, in one pass.

    Args:
        nodes: in execution order, those of bodies after the node that has them.
    """
    found: dict[ir.Value, ir.DataType] = {}
    for node in nodes:
        for i, value in enumerate(node.outputs):
            dtype = own_dtype(value)
            if dtype is None and ((rule := rule_of(node)) is None or rule.has_degree(i)):
                sources = (found.get(v) or own_dtype(v) for v in _of_the_same_dtype(value))
                dtype = next((source for source in sources if source is not None), None)
            if dtype is not None:
                found[value] = dtype
    return found


def _of_the_same_dtype(value: ir.Value) -> Iterator[ir.Value]:
    """Yield the values whose dtype a value has by its operator's definition."""
    node = value.producer()
    if node is None:
        return
    rule, bodies = rule_of(node), subgraphs(node)
    if bodies:
        # A Loop's body gives its condition first.
        yield bodies[0].outputs[(value.index() or 0) + (1 if node.op_type == "Loop" else 0)]
    elif rule is not None and (rule.kind not in (Kind.SHAPE, Kind.DEGREE_0, Kind.COMPARE) or node.op_type == "Sign"):
        indices = (1,) if node.op_type == "CastLike" else rule.operands(len(node.inputs))
        yield from (operand for i in indices if (operand := node.inputs[i]) is not None)
