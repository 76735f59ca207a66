"""From the trace of a step to its ONNX model: names, first values, and the roles that the model states."""

from __future__ import annotations

import contextlib
import json
import logging
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import onnx_ir as ir
import onnxscript.optimizer
import onnxscript.rewriter
import torch
from onnx_ir.passes import common
from onnxscript import opset20 as op
from onnxscript.rewriter.rules.common import no_op_transpose_rule

from graphscale.exporters.pytorch.traced_step import LOSS, RATE, StepFunction
from graphscale.exporters.scattered_sums import rewrite_scattered_sums
from graphscale.exporters.step_file import complete_step, next_name

__all__ = ["EXPORT_KEY", "convert", "embed_first_values"]

# The newest that PyTorch's translations are written for; newer opsets have random operators without kernels.
_OPSET = 20
# The metadata property with the names of the module's tensors that the step does not change.
EXPORT_KEY = "graphscale.exporter"


def convert(graph: Any, step: StepFunction, dynamic: Mapping[str, bool]) -> ir.Model:
    """Return the ONNX model of a traced step, whose inputs have no first values yet."""
    values = tuple(step.inputs.values())
    batch = torch.export.Dim("batch", min=1)
    shapes = tuple({0: batch} if dynamic.get(name) else None for name in step.inputs)
    with _quiet():
        program = torch.export.export(graph, values, dynamic_shapes=shapes)
        exported = torch.onnx.export(
            program,
            dynamo=True,
            dynamic_shapes=shapes if any(dynamic.values()) else None,
            opset_version=_OPSET,
            custom_translation_table={torch.ops.prims.prod.default: _prod},
            # The optimizer of onnxscript takes sums with 1e-8 for sums with zero, as that with Adam's epsilon.
            optimize=False,
            verbose=False,
        )
    model: ir.Model = exported.model
    _simplify(model)
    _rename(model.graph, list(step.inputs), step.outputs)
    rewrite_scattered_sums(model)
    return model


def _prod(x: Any, dims: list[int] | None, output_dtype: int | None = None) -> Any:
    """Translate the product over axes, which PyTorch's exporter lacks."""
    axes = op.Constant(value_ints=dims) if dims else None
    return op.ReduceProd(x if output_dtype is None else op.Cast(x, to=output_dtype), axes, keepdims=0)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "onnx_ir")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def _simplify(model: ir.Model) -> None:
    """Fold constants and remove what is not needed, without the rules that take small numbers for zero."""
    common.InlinePass()(model)
    for _ in range(2):
        onnxscript.optimizer.fold_constants(model, onnx_shape_inference=True)
        common.RemoveUnusedNodesPass()(model)
    # ONNX Runtime 1.19.2 takes any transpose of a matrix before a Gemm for one that swaps its axes.
    onnxscript.rewriter.rewrite(model, [no_op_transpose_rule])
    common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
    common.DeduplicateInitializersPass()(model)
    common.CommonSubexpressionEliminationPass()(model)
    common.RemoveUnusedOpsetsPass()(model)
    common.ClearMetadataAndDocStringPass()(model)


def _rename(graph: ir.Graph, inputs: list[str], outputs: list[str]) -> None:
    """Name inputs and outputs, with a value of its own for each."""
    seen: set[int] = set()
    for index, value in enumerate(graph.outputs):
        if value.is_graph_input() or value.is_initializer() or id(value) in seen:
            node = ir.node("Identity", [value])
            node.outputs[0].type, node.outputs[0].shape = value.type, value.shape
            graph.append(node)
            graph.outputs[index] = node.outputs[0]
        seen.add(id(graph.outputs[index]))
    wanted = dict(zip(map(id, graph.inputs), inputs, strict=True))
    wanted |= dict(zip(map(id, graph.outputs), outputs, strict=True))
    initializers = list(graph.initializers.values())
    graph.initializers.clear()
    taken = {*wanted.values()}
    numbers: dict[str, int] = {}
    values = [*graph.inputs, *initializers, *(v for node in graph.all_nodes() for v in node.outputs)]
    for value in values:
        name = wanted.get(id(value))
        if name is None:
            name = base = value.name or "value"
            while name in taken:
                numbers[base] = numbers.get(base, 0) + 1
                name = f"{base}_{numbers[base]}"
            taken.add(name)
        value.name = name
    for value in initializers:
        graph.initializers.add(value)


def embed_first_values(model: ir.Model, step: StepFunction, label: str) -> None:
    """Give inputs their first values, and name the roles.

    Weights, moments, buffers and the learning rate stay inputs. Constants do not. `label` is the module's name.
    """
    graph = model.graph
    complete_step(
        model,
        {name: _to_array(value) for name, value in step.carried.items()},
        {next_name(name): name for name in step.carried},
        losses=[LOSS],
        metrics=step.metrics,
        documentation=f"Training step of {label}, exported from PyTorch {torch.__version__}.",
    )
    others = {**step.constants, RATE: step.rate}
    for value in list(graph.inputs):
        tensor = others.get(value.name or "")
        if tensor is None:
            continue
        if value.name != RATE or not value.uses():
            graph.inputs.remove(value)
        if value.uses():
            value.const_value = ir.tensor(_to_array(tensor), name=value.name)
            graph.initializers.add(value)
    model.metadata_props[EXPORT_KEY] = json.dumps({"framework": "pytorch", "unchanged": list(step.constants)})


def _to_array(tensor: Any) -> Any:
    return tensor.detach().contiguous().numpy()
