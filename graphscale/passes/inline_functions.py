"""inline-functions: inline the functions of a model, since a loss scale may have to enter in a body."""

from __future__ import annotations

import onnx_ir as ir
from onnx_ir.passes import PassResult
from onnx_ir.passes.common import InlinePass

from graphscale.graph.builder import Editor
from graphscale.passes.graph_pass import GraphPass

__all__ = ["InlineFunctions"]


class InlineFunctions(GraphPass):
    """Replace each call of a function by the nodes of its body, as `onnx_ir.passes.common.InlinePass` does.

    Before: `y = my::Double(x)`, where `my::Double(a) = Add(a, a)`
    After:  `y = Add(x, x)`
    """

    name = "inline-functions"

    def call(self, model: ir.Model) -> PassResult:
        _unshare_tensors(model)
        _name_results_of_calls(model)
        texts = [value.doc_string for value in model.graph.outputs]
        result = InlinePass()(model)
        for value, text in zip(model.graph.outputs, texts, strict=True):
            value.doc_string = text  # the body's result has taken the place of the output
        return result


def _unshare_tensors(model: ir.Model) -> None:
    """Copy the tensors of the functions' constants: inlining renames them, and a clone shares them."""
    for function in model.functions.values():
        for node in function.all_nodes():
            for name, attribute in node.attributes.items():
                if attribute.type is ir.AttributeType.TENSOR and not attribute.is_ref():
                    tensor = attribute.as_tensor()
                    node.attributes[name] = ir.AttrTensor(name, ir.tensor(tensor.numpy().copy(), name=tensor.name))


def _name_results_of_calls(model: ir.Model) -> None:
    """Add all results of its function to each call: inlining loses omitted ones."""
    editor = Editor(model.graph)
    for node in [*model.graph.all_nodes(), *(n for each in model.functions.values() for n in each.all_nodes())]:
        function = model.functions.get(node.op_identifier())
        if function is None or len(node.outputs) > len(function.outputs):
            continue
        node.resize_outputs(len(function.outputs))
        for value in node.outputs:
            value.name = value.name or editor.unique("unused")
