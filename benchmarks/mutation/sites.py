"""The inserted nodes of a scaled graph that can be damaged, found by the marks of the passes."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import onnx_ir as ir

from benchmarks.mutation.damaged import FLOAT, Damaged
from graphscale.graph.builder import PASS_KEY


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


def rows(d: Damaged) -> Iterator[str]:
    return _names(d.by("check-finite", "MatMul"))


def summed_rows(d: Damaged) -> Iterator[str]:
    return _names([n for n in d.by("check-finite", "MatMul") if n.outputs[0].uses()[0].node.op_type == "Sum"])


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


# --- the original's values and nodes ------------------------------------------------------------------------------


def originals(d: Damaged, *op_types: str) -> list[ir.Node]:
    """The original's nodes in the main graph, of these operators or of all."""
    return [n for n in d.graph if PASS_KEY not in n.metadata_props and (not op_types or n.op_type in op_types)]


def of(*op_types: str) -> Callable[[Damaged], Iterator[str]]:
    """The first results of the original's nodes of some operators."""

    def sites(d: Damaged) -> Iterator[str]:
        for node in originals(d, *op_types):
            if any(value.uses() or value.is_graph_output() for value in node.outputs):
                yield node.outputs[0].name or ""

    return sites


def with_attribute(name: str, *op_types: str) -> Callable[[Damaged], Iterator[str]]:
    """The first results of the original's nodes that have an attribute."""

    def sites(d: Damaged) -> Iterator[str]:
        yield from (n.outputs[0].name or "" for n in originals(d, *op_types) if name in n.attributes)

    return sites


def forward(d: Damaged) -> list[ir.Node]:
    """The nodes that the loss depends on, from the last one on."""
    loss = d.role("loss")
    pending = [None if loss is None else loss.producer()]
    seen = {*pending}
    for node in pending:
        for value in node.inputs if node is not None else ():
            before = None if value is None else value.producer()
            if before is not None and before not in seen:
                seen.add(before)
                pending.append(before)
    return [node for node in pending if node is not None]


def activations(d: Damaged) -> Iterator[str]:
    products = ("MatMul", "Gemm", "Conv", "FusedMatMul", "Einsum", "LSTMTraining")
    for node in reversed(forward(d)):
        value = node.outputs[0]
        if node.op_type in products and value.dtype is FLOAT and PASS_KEY not in node.metadata_props:
            yield value.name or ""


def gradients(d: Damaged) -> Iterator[str]:
    """Gradients without the scale, in float32."""
    for name in quotients(d):
        if d.nodes[name].outputs[0].dtype is FLOAT:
            yield d.nodes[name].outputs[0].name or ""


def twin_gradients(d: Damaged) -> Iterator[str]:
    """Pairs of gradients of one shape."""
    yield from _twins([d.nodes[name].outputs[0] for name in quotients(d)])


def _twins(values: list[ir.Value]) -> Iterator[str]:
    for i, one in enumerate(values):
        for other in values[i + 1 :]:
            if (one.dtype, one.shape) == (other.dtype, other.shape) and one.shape is not None:
                yield f"{one.name} {other.name}"


def pair_of(d: Damaged, site: str) -> tuple[ir.Value, ir.Value]:
    """The two values of a site that names both."""
    one, other = site.split(" ")
    return d.values[one], d.values[other]


def states(*sorts: str, dtype: ir.DataType | None = FLOAT) -> Callable[[Damaged], Iterator[str]]:
    """Carried states of the original that are read: weights, moments, counters."""

    def sites(d: Damaged) -> Iterator[str]:
        for name in original_states(d):
            value = d.values.get(name)
            if value is not None and dtype in (None, value.dtype) and sort_of_state(d, value) in sorts:
                yield name

    return sites


def original_states(d: Damaged) -> list[str]:
    own = {*d.stamp.names.values()}
    return [row["input"] for row in d.stamp.report["state"] if row["input"] not in own]


def twin_states(d: Damaged) -> Iterator[str]:
    """Pairs of states of one shape that are fed back, a weight and its moment first."""
    known = [d.values[name] for name in original_states(d) if name in d.stamp.state]
    twins = list(_twins(known))
    of_different_sorts = [t for t in twins if len({sort_of_state(d, value) for value in pair_of(d, t)}) == 2]
    yield from of_different_sorts or twins


def weights(d: Damaged) -> Iterator[str]:
    """Weights that are states, or else are fed."""
    found = [*states("weight")(d)]
    rows = d.stamp.report["roles"]
    found += [row["name"] for row in rows if row["kind"] == "input" and row["role"] == "weight"]
    yield from (name for name in found if d.values[name].dtype is FLOAT and d.values[name].uses())


def batches(d: Damaged) -> Iterator[str]:
    rows = d.stamp.report["roles"]
    yield from (row["name"] for row in rows if row["kind"] == "input" and row["role"] == "batch")


def symbolic_batches(d: Damaged) -> Iterator[str]:
    for name in batches(d):
        shape = d.values[name].shape
        if shape is not None and len(shape) > 0 and not isinstance(shape[0], int):
            yield name


def symbolic_sizes(d: Damaged) -> Iterator[str]:
    """Results of Shape whose operand has a symbolic axis."""
    for node in originals(d, "Shape"):
        value = node.inputs[0]
        if value is not None and value.shape is not None and not value.shape.is_static() and node.outputs[0].uses():
            yield node.outputs[0].name or ""


def rates(d: Damaged) -> Iterator[str]:
    """Scalars that are fed and not carried."""
    carried = {*d.stamp.carried, *d.stamp.names.values()}
    for value in d.graph.inputs:
        is_scalar = value.shape is not None and all(size == 1 for size in value.shape)
        if value.dtype is FLOAT and is_scalar and value.name not in carried and value.uses():
            yield value.name or ""


def constants(d: Damaged) -> Iterator[str]:
    """Constants of the original that a node reads and that are not empty."""
    for name, value in d.graph.initializers.items():
        fed = value.is_graph_input()
        tensor = value.const_value
        if not fed and tensor is not None and tensor.dtype is FLOAT and tensor.size > 0 and value.uses():
            yield name


def held(d: Damaged) -> Iterator[str]:
    """States of the original with an initial value."""
    for name in original_states(d):
        if d.values[name].const_value is not None and d.values[name].dtype is FLOAT:
            yield name


def all_of(sites: Callable[[Damaged], Iterator[str]], least: int = 1) -> Callable[[Damaged], Iterator[str]]:
    """One site for all of these, where there are enough."""
    return lambda d: iter(["all"] if len(list(sites(d))) >= least else [])


def role(name: str) -> Callable[[Damaged], Iterator[str]]:
    """The value of a role, where the graph has one."""
    return lambda d: iter([name] if d.role(name) is not None else [])


def next_value(name: str) -> Callable[[Damaged], Iterator[str]]:
    """The next value of the state of a role, where an output holds it."""

    def sites(d: Damaged) -> Iterator[str]:
        following = d.stamp.state.get(d.stamp.names.get(name, ""))
        if following is not None:
            yield following

    return sites


def anywhere(d: Damaged) -> Iterator[str]:
    return iter(["graph"])
