"""lower-training-ops: replace ONNX Runtime's training operators. Only its training builds have kernels for them."""

from __future__ import annotations

import dataclasses
from collections import Counter

import onnx_ir as ir
from onnx_ir.passes import PassResult

from graphscale.errors import UnsupportedModelError
from graphscale.graph.builder import Editor
from graphscale.graph.inference import complete_results, complete_types
from graphscale.graph.marks import LOWER_TRAINING_OPS, PASS_KEY
from graphscale.graph.stamp import ROLES_KEY
from graphscale.graph.values import node_name, op_name
from graphscale.operators import MICROSOFT
from graphscale.operators.stock_kernels import needs_training_build
from graphscale.passes.graph_pass import GraphPass
from graphscale.passes.lower_training_ops import FORMULAS
from graphscale.passes.lower_training_ops.without_form import WITHOUT_FORM
from graphscale.passes.lower_training_ops.writer import Writer
from graphscale.passes.lower_training_ops.written_states import expose_states, find_flags, stated_roles

__all__ = ["LowerTrainingOps"]


@dataclasses.dataclass
class LowerTrainingOps(GraphPass):
    """Replace the operators of ONNX Runtime's training builds by standard ones, in bodies of others as well.

    Before: `dx = com.microsoft.TanhGrad(dy, y)`
    After:  `dx = Mul(dy, Sub(1, Mul(y, y)))`

    The formulas are in the modules beside this one, one per family. The next value of a state that a node writes in
    place becomes an output of the graph.

    Attributes:
        counts: `{operator: nodes}`, the replaced nodes of the last run.
        exposed: `{output: input}` of the states that these nodes wrote in place. The model states these pairs as roles.
    """

    name = LOWER_TRAINING_OPS
    sign = "↧"
    optional = True

    counts: dict[str, int] = dataclasses.field(default_factory=dict, init=False)
    exposed: dict[str, str] = dataclasses.field(default_factory=dict, init=False)

    @staticmethod
    def applies(model: ir.Model) -> bool:
        """Return whether a model has such operators."""
        return any(needs_training_build(node) for node in model.graph.all_nodes())

    def call(self, model: ir.Model) -> PassResult:
        nodes = [node for node in model.graph.all_nodes() if needs_training_build(node)]
        for node in nodes:
            operator = (node.domain, node.op_type)
            if operator not in FORMULAS:
                reason = f": {WITHOUT_FORM[operator]}" if operator in WITHOUT_FORM else ""
                raise UnsupportedModelError(
                    f"node {node_name(node)!r} is a {op_name(node)}, which stock ONNX Runtime lacks, and which has no "
                    f"standard form here{reason}; export the model without it, or run it on onnxruntime-training "
                    "(target ort-training)"
                )
        self.counts = dict(sorted(Counter(node.op_type for node in nodes).items()))
        self.exposed = {}
        if not nodes:
            return PassResult(model, modified=False)
        editor, replaced = Editor(model.graph), set(nodes)
        flags = [name for node in nodes for name in find_flags(node)]
        for node in nodes:
            if node.graph is model.graph:
                self._expose(editor, node)
        complete_types(model, [value for node in nodes for value in node.inputs if value is not None])
        for node in tuple(model.graph.all_nodes()):
            if node in replaced:
                self._lower(editor, node)
            else:
                complete_results(node, model.opset_imports.get("", 1))
        if self.exposed or flags:
            roles = stated_roles(model.metadata_props.get(ROLES_KEY), self.exposed, flags)
            model.metadata_props[ROLES_KEY] = roles
        if all(node.domain != MICROSOFT for node in model.graph.all_nodes()):
            model.opset_imports.pop(MICROSOFT, None)
        return PassResult(model, modified=True)

    def _expose(self, editor: Editor, node: ir.Node) -> None:
        for output, state in expose_states(editor, node).items():
            if state in self.exposed.values():
                raise UnsupportedModelError(
                    f"node {node_name(node)!r} writes {state!r} in place a second time; export the model with one write"
                )
            self.exposed[output] = state

    def _lower(self, editor: Editor, node: ir.Node) -> None:
        f = Writer.before(node, self.builder(editor))
        results = list(FORMULAS[node.domain, node.op_type](f))
        taken: set[ir.Value] = set()
        for i, old in enumerate(node.outputs):
            new = results[i] if i < len(results) else None
            if new is None:
                if f.wants(i):
                    raise f.refusal(f"output {i} ({old.name!r}) is read, and there is no formula for it")
            elif f.wants(i):
                if new in taken or not self._made_for(node, new):
                    new = f("Identity", new, like=new)
                taken.add(new)
                editor.replace_result(old, new, "lowered")
        assert node.graph is not None
        node.graph.remove(node, safe=True)

    def _made_for(self, node: ir.Node, value: ir.Value) -> bool:
        """Return whether a value is only a result of a formula, in the graph of the replaced node.

        A gradient that the formula itself reads is not the end of the backward pass.
        """
        maker = value.producer()
        is_own = maker is not None and maker.metadata_props.get(PASS_KEY) == self.name
        return (
            is_own and maker is not None and maker.graph is node.graph and not (value.is_graph_output() or value.uses())
        )
