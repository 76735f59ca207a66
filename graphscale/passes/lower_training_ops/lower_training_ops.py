"""lower-training-ops: spell out ONNX Runtime's training operators. Only its training builds have kernels for them."""

from __future__ import annotations

import dataclasses
from collections import Counter

import onnx
import onnx_ir as ir
from onnx_ir.passes import PassResult

from graphscale.errors import UnsupportedModelError
from graphscale.graph.builder import Editor
from graphscale.graph.marks import PASS_KEY
from graphscale.graph.values import node_name, op_name
from graphscale.operators import MICROSOFT
from graphscale.passes.graph_pass import GraphPass
from graphscale.passes.lower_training_ops import FORMULAS
from graphscale.passes.lower_training_ops.writer import Writer
from graphscale.targets import STOCK_OPERATORS

__all__ = ["LowerTrainingOps"]


@dataclasses.dataclass
class LowerTrainingOps(GraphPass):
    """Replace the operators of ONNX Runtime's training builds by standard ones, in bodies of others as well.

    Before: `dx = com.microsoft.TanhGrad(dy, y)`
    After:  `dx = Mul(dy, Sub(1, Mul(y, y)))`

    The formulas are in the modules beside this one, a family each.

    Attributes:
        counts: `{operator: nodes}` of what the last run replaced.
    """

    name = "lower-training-ops"
    sign = "↧"
    optional = True

    counts: dict[str, int] = dataclasses.field(default_factory=dict, init=False)

    @staticmethod
    def applies(model: ir.Model) -> bool:
        """Return whether a model has such operators."""
        return any(_needs_training(node) for node in model.graph.all_nodes())

    def call(self, model: ir.Model) -> PassResult:
        nodes = [node for node in model.graph.all_nodes() if _needs_training(node)]
        for node in nodes:
            if (node.domain, node.op_type) not in FORMULAS:
                raise UnsupportedModelError(
                    f"node {node_name(node)!r} is a {op_name(node)}, which stock ONNX Runtime lacks, and which has no "
                    "standard form here; export the model without it, or run it on onnxruntime-training"
                )
        self.counts = dict(sorted(Counter(node.op_type for node in nodes).items()))
        editor = Editor(model.graph)
        for node in nodes:
            self._lower(editor, node)
        if all(node.domain != MICROSOFT for node in model.graph.all_nodes()):
            model.opset_imports.pop(MICROSOFT, None)
        return PassResult(model, modified=bool(nodes))

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
        """Return whether a formula has made a value, in the graph of the node that it replaces."""
        maker = value.producer()
        is_own = maker is not None and maker.metadata_props.get(PASS_KEY) == self.name
        return is_own and maker is not None and maker.graph is node.graph and not value.is_graph_output()


def _needs_training(node: ir.Node) -> bool:
    """Return whether stock ONNX Runtime lacks a node's operator: it has a formula, or no stock kernel."""
    if (node.domain, node.op_type) in FORMULAS:
        return True
    is_undefined = node.domain == MICROSOFT or (not node.domain and not onnx.defs.has(node.op_type))
    return is_undefined and (node.domain, node.op_type) not in STOCK_OPERATORS
