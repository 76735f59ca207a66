"""From a training step to ONNX: traced to ATen operators with its backward pass, exported by PyTorch's own exporter."""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Iterator
from typing import Any

import onnx_ir as ir
import onnx_ir.passes.common
import onnxscript.optimizer
import torch
from torch._dispatch.python import enable_python_dispatcher
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention import SDPBackend, sdpa_kernel

from graphscale.errors import ExportError, one_line
from graphscale.exporters.pytorch.backward_operators import decompositions
from graphscale.exporters.pytorch.training_step import LEARNING_RATE, TrainingStep

__all__ = ["Traced", "to_onnx", "trace"]

_OPSET = 20
aten = torch.ops.aten


@dataclasses.dataclass(frozen=True)
class Traced:
    """A traced step.

    Attributes:
        module: its graph of ATen operators.
        comparable: the same graph with a dropout that keeps every element, if there is dropout.
        notes: facts that a user should know.
    """

    module: Any
    comparable: Any = None
    notes: tuple[str, ...] = ()


@contextlib.contextmanager
def portable_kernels() -> Iterator[None]:
    """Let PyTorch choose operators that have a translation: no fused attention, no oneDNN."""
    with sdpa_kernel(SDPBackend.MATH), torch.backends.mkldnn.flags(enabled=False):
        yield


def trace(step: TrainingStep, dynamic: bool) -> Traced:
    """Trace a step.

    Raises:
        ExportError: its Python code depends on values, or it draws random numbers other than dropout's.
    """
    values = _inputs(step)
    if dynamic and any(step.batch[name].shape[0] < 2 for name in step.dynamic):
        raise ExportError(
            "a batch of one row stands for no other length: pass two rows at least, or dynamic_batch=False"
        )

    def flat(*tensors: Any) -> tuple[Any, ...]:
        return tuple(step.run(dict(zip(values, tensors, strict=True))).values())

    with portable_kernels(), enable_python_dispatcher(), _explained("trace"):
        module = make_fx(flat, decompositions(), tracing_mode="symbolic" if dynamic else "real")(*values.values())
    return _examine(module)


def _inputs(step: TrainingStep) -> dict[str, Any]:
    return step.batch | step.first | step.constants


def _examine(module: Any) -> Traced:
    """Look for random operators: dropout is exported, the others are refused."""
    random = [
        node
        for node in module.graph.nodes
        if isinstance(node.target, torch._ops.OpOverload) and torch.Tag.nondeterministic_seeded in node.target.tags
    ]
    for node in random:
        if node.target is not aten.native_dropout.default:
            raise ExportError(
                f"the step draws random numbers ({node.target}): feed them as a tensor of the batch. Dropout alone is "
                "exported"
            )
    if not random:
        return Traced(module)
    comparable = torch.fx.GraphModule(module, _copy_graph(module.graph))
    for node in list(comparable.graph.nodes):
        if node.target is aten.native_dropout.default:
            with comparable.graph.inserting_before(node):
                x, p = node.args[:2]
                mask = comparable.graph.call_function(aten.ones_like.default, (x,), {"dtype": torch.bool})
                mask.meta = dict(node.meta)
                kept = comparable.graph.call_function(aten.div.Scalar, (x, 1 - p))
                kept.meta = dict(node.meta)
            for user in list(node.users):
                user.replace_all_uses_with(kept if user.args[1] == 0 else mask)
                comparable.graph.erase_node(user)
            comparable.graph.erase_node(node)
    comparable.recompile()
    return Traced(
        module, comparable, ("dropout draws a new mask in each run; in the comparison it kept every element",)
    )


def _copy_graph(graph: Any) -> Any:
    copy = torch.fx.Graph()
    copy.output(copy.graph_copy(graph, {}))
    return copy


def to_onnx(step: TrainingStep, module: Any, dynamic: bool) -> ir.Model:
    """Export a traced step, under the names of its inputs and outputs.

    Raises:
        ExportError: the exporter has no translation for an operator, or fixes the length of the batch.
    """
    values = _inputs(step)
    batch = torch.export.Dim("batch", min=1)
    shapes = tuple({0: batch} if name in step.dynamic else None for name in values) if dynamic else None
    with portable_kernels(), _explained("export"):
        program = torch.export.export(module, tuple(values.values()), dynamic_shapes=shapes)
        exported = torch.onnx.export(
            program,
            dynamo=True,
            input_names=[_inner(name) for name in values],
            output_names=[_inner(name) for name in step.outputs],
            opset_version=_OPSET,
            dynamic_shapes=shapes,
            # The rewrite rules behind it take an epsilon of 1e-8 for zero.
            optimize=False,
            verbose=False,
        )
    model: ir.Model = exported.model
    onnxscript.optimizer.optimize(model)
    onnx_ir.passes.common.ClearMetadataAndDocStringPass()(model)
    _name_values(model, step, list(values))
    return model


def _inner(name: str) -> str:
    """Return a name for the exporter: it may use the plain one for a value of the inside."""
    return f"step:{name}"


def _name_values(model: ir.Model, step: TrainingStep, names: list[str]) -> None:
    """Give inputs and outputs their names, and constants their values."""
    graph = model.graph
    if len(graph.inputs) != len(names) or len(graph.outputs) != len(step.outputs):
        raise ExportError("PyTorch's exporter left out an input or an output of the step")
    taken = {*names, *step.outputs}
    for node in graph.all_nodes():
        for value in node.outputs:
            if value.name in taken:
                value.name = f"{value.name}.inner"
    for value in list(graph.initializers.values()):
        if value.name in taken:
            value.name = f"{value.name}.constant"
    _separate_outputs(graph)
    for value, name in zip(graph.outputs, step.outputs, strict=True):
        value.name = name
    for value, name in zip(list(graph.inputs), names, strict=True):
        value.name = name
        if name in step.constants:
            array = step.arrays({name: step.constants[name]})[name]
            value.const_value = ir.tensor(array, name=name)
            graph.inputs.remove(value)
            if value.uses():
                graph.register_initializer(value)
        elif name == LEARNING_RATE:
            value.doc_string = f"the learning rate; {step.rule.text} was given {step.rule.learning_rate:g}"
    graph.name = "training_step"


def _separate_outputs(graph: ir.Graph) -> None:
    """Put an Identity before each output that is an input, an initializer or another output."""
    seen: set[ir.Value] = set()
    for index, value in enumerate(graph.outputs):
        if value in seen or value.is_graph_input() or value.is_initializer():
            node = ir.node("Identity", [value])
            node.outputs[0].type, node.outputs[0].shape = value.type, value.shape
            graph.append(node)
            graph.outputs[index] = node.outputs[0]
        seen.add(value)


@contextlib.contextmanager
def _explained(verb: str) -> Iterator[None]:
    """Turn an error of PyTorch into one line: the operator, or the line of the user's code."""
    try:
        yield
    except ExportError:
        raise
    except Exception as error:  # PyTorch's share no base class
        text = str(error)
        operator = re.search(r"No ONNX function found for <OpOverload\(op='([\w.]+)'", text)
        if operator:
            raise ExportError(
                f"PyTorch's exporter has no translation for {operator[1]}, which the step computes: write this part of "
                "the module with other operators"
            ) from error
        if "Constraints violated" in text or "specialized" in text:
            raise ExportError(
                "the step fixes the length of the batch, for it computes with it in Python: pass dynamic_batch=False"
            ) from error
        first = next((line for line in text.splitlines() if line.strip()), type(error).__name__)
        raise ExportError(f"PyTorch cannot {verb} the step: {type(error).__name__}: {one_line(first)}") from error
