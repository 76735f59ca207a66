"""The inserted nodes of a scaled graph that can be damaged, found by the marks of the passes."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import onnx_ir as ir

from graphscale.graph.builder import PASS_KEY, Editor, replace_reads
from graphscale.graph.stamp import read_stamp

FLOAT = ir.DataType.FLOAT


class Damaged:
    """A copy of a scaled model, with its inserted nodes by the pass that made them.

    Args:
        model: the scaled model; it is not changed.
    """

    def __init__(self, model: ir.Model) -> None:
        self.model = model.clone()
        self.graph = self.model.graph
        self.stamp = read_stamp(self.model.metadata_props, "the model")
        self.editor = Editor(self.graph)
        self.values = {v.name: v for v in (*self.graph.inputs, *self.graph.initializers.values())}
        self.values.update((v.name, v) for node in self.graph for v in node.outputs)
        self.nodes = {node.name: node for node in self.graph}

    def by(self, pass_name: str, op_type: str | None = None) -> list[ir.Node]:
        """The nodes that a pass inserted."""
        return [
            node
            for node in self.graph
            if node.metadata_props.get(PASS_KEY) == pass_name and op_type in (None, node.op_type)
        ]

    def role(self, name: str) -> ir.Value | None:
        """The value that the metadata give a role."""
        return self.values.get(self.stamp.names.get(name, ""))

    @property
    def scale(self) -> ir.Value:
        value = self.role("loss_scale")
        assert value is not None
        return value

    @property
    def rule(self) -> ir.Function | None:
        """The update rule, where it is a function."""
        return self.model.functions.get(("graphscale", "UpdateLossScale", ""))

    def make(
        self,
        op_type: str,
        inputs: list[ir.Value],
        after: ir.Node | None,
        dtype: ir.DataType | None = FLOAT,
        **attributes: object,
    ) -> ir.Value:
        """Insert a node after another one; return its output."""
        at = None if after is None else ("after", after)
        return self.editor.builder("mutant", "mutant", at=at).op(op_type, inputs, dtype=dtype, **attributes)

    def constant(self, array: np.ndarray) -> ir.Value:
        return self.editor.constant("mutant.constant", array)

    def replace(self, old: ir.Value, new: ir.Value, keep: tuple[ir.Node, ...] = ()) -> None:
        """Let what reads one value read another one, and leave the graph in its place."""
        replace_reads(old, new, [use for use in old.uses() if use.node not in keep])
        if old.is_graph_output():
            if new.is_graph_input() or new.is_graph_output() or new.is_initializer():
                new = self.make("Identity", [new], new.producer(), old.dtype)
            self.editor.take_over_output(old, new, "mutated")

    def around(self, value: ir.Value, op_type: str, *others: ir.Value, dtype: ir.DataType | None = None) -> None:
        """Put an operator on a value, for whatever reads it."""
        new = self.make(op_type, [value, *others], value.producer(), dtype or value.dtype)
        self.replace(value, new, keep=(new.producer(),))  # type: ignore[arg-type]

    def tidy(self) -> None:
        """Put the nodes in order, and remove inserted ones that nothing reads any more."""
        self.graph.sort()
        for node in reversed(list(self.graph)):
            unread = not any(value.uses() or value.is_graph_output() for value in node.outputs)
            if unread and PASS_KEY in node.metadata_props and not node.op_type.startswith("InPlace"):
                self.graph.remove(node, safe=True)


def _names(nodes: list[ir.Node]) -> Iterator[str]:
    return (node.name or "" for node in nodes)


def quotients(d: Damaged) -> Iterator[str]:
    return _names(d.by("unscale-gradients", "Div"))


def products(d: Damaged) -> Iterator[str]:
    return _names([n for n in d.by("scale-loss", "Mul") if not (n.outputs[0].name or "").startswith("scaled_loss")])


def several(d: Damaged) -> Iterator[str]:
    found = list(products(d))
    return iter(found if len(found) > 1 else [])


def shared_constants(d: Damaged) -> Iterator[str]:
    for name in products(d):
        value = d.nodes[name].inputs[0]
        if value is not None and value.is_initializer() and len(value.uses()) > 1:
            yield name


def outputs_only(d: Damaged) -> Iterator[str]:
    """Quotients that leave the graph, where the update rule's result can be read without a cycle."""
    if d.role("good_steps") is not None:
        yield from (name for name in quotients(d) if d.nodes[name].outputs[0].is_graph_output())


def guards(d: Damaged) -> list[ir.Node]:
    """The selects between the next value and the old one."""
    return [n for n in d.by("guard-updates", "Where") if n.inputs[1] is not n.inputs[2]]


def guards_of(d: Damaged, wanted: str) -> Iterator[str]:
    for node in guards(d):
        state = state_of(node)
        if state is not None and sort_of_state(d, state) == wanted:
            yield node.name or ""


def state_of(guard: ir.Node) -> ir.Value | None:
    value = guard.inputs[2]
    node = None if value is None else value.producer()
    return node.inputs[0] if node is not None and node.op_type == "Cast" else value


def sort_of_state(d: Damaged, state: ir.Value) -> str:
    if not (state.is_graph_input() or state.is_initializer()):
        return "nothing"
    if state.is_initializer() and not state.is_graph_input():
        return "nothing"  # -0.0, which an accumulator adds
    if state.shape is not None and len(state.shape) == 0:
        return "counter"
    loss = d.role("loss")
    pending, seen = [loss], {loss}
    while pending:
        node = pending.pop().producer()  # type: ignore[union-attr]
        for value in node.inputs if node is not None else ():
            if value is not None and value not in seen:
                seen.add(value)
                pending.append(value)
    return "weight" if state in seen else "moment"


def accumulators(d: Damaged) -> Iterator[str]:
    return _names(
        [n for n in d.graph if n.op_type.startswith("InPlaceAccumulator") and PASS_KEY not in n.metadata_props]
    )


def zero_adders(d: Damaged) -> Iterator[str]:
    for node in guards(d):
        value = node.inputs[2]
        if value is not None and value.is_initializer() and not value.is_graph_input():
            yield node.name or ""


def probes(d: Damaged) -> Iterator[str]:
    return _names(d.by("check-finite", "Mul"))


def several_probes(d: Damaged) -> Iterator[str]:
    found = list(probes(d))
    return iter(found if len(found) > 1 else [])


def flag(d: Damaged) -> Iterator[str]:
    if d.role("all_finite") is not None:
        yield "all_finite"


def applied_guards(d: Damaged) -> Iterator[str]:
    return _names(guards(d))


def dynamic(d: Damaged) -> Iterator[str]:
    if d.role("good_steps") is not None:
        yield "rule"


def function(d: Damaged) -> Iterator[str]:
    if d.rule is not None and d.role("good_steps") is not None:
        yield "rule"


def ordered(d: Damaged) -> Iterator[str]:
    return _names(d.by("order-writes", "Where"))


def telemetry(op_type: str, start: str) -> Callable[[Damaged], Iterator[str]]:
    def sites(d: Damaged) -> Iterator[str]:
        found = [n for n in d.by("telemetry", op_type) if (n.outputs[0].name or "").startswith(start)]
        # A select between equal values only makes its result wait.
        return _names([n for n in found if op_type != "Where" or n.inputs[1] is not n.inputs[2]])

    return sites


def clipped(d: Damaged) -> Iterator[str]:
    for name in quotients(d):
        if any(use.node.op_type in ("Clip", "Max", "Min") for use in d.nodes[name].outputs[0].uses()):
            yield name


def explicit_state(d: Damaged) -> Iterator[str]:
    return iter(d.stamp.state)


def loss(d: Damaged) -> Iterator[str]:
    loss = d.role("loss")
    if loss is not None and loss.is_graph_output():
        yield loss.name or ""


def writes(d: Damaged) -> Iterator[str]:
    return _names([n for n in d.graph if n.op_type == "InPlaceAccumulatorV2" and PASS_KEY in n.metadata_props])


def kernels(d: Damaged) -> Iterator[str]:
    return _names([node for node in d.by("check-finite", "IsAllFinite") if len(node.inputs) > 1])


def stale_guards(d: Damaged) -> Iterator[str]:
    """Guards of a graph that counts good steps."""
    if d.role("good_steps") is not None:
        yield from _names(guards(d))
