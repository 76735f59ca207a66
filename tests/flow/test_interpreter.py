"""The interpreter: bodies, captures, functions, the number of visits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import onnx
import onnx_ir as ir
import pytest

from graphscale.flow.interpreter import Domain, Flow, run
from graphscale.graph.values import values_by_name
from tests.build import parse

pytestmark = pytest.mark.static


class Names(Domain[frozenset[str]]):
    """The sets of names of sources, a lattice as high as the number of sources."""

    default: frozenset[str] = frozenset()

    def __init__(self, decided: bool | None = None) -> None:
        self.visits: Counter[str] = Counter()
        self._decided = decided

    def transfer(self, node: ir.Node, operands: Sequence[frozenset[str]]) -> Sequence[frozenset[str]]:
        self.visits[node.outputs[0].name or ""] += 1
        return [frozenset().union(*operands)] * len(node.outputs)

    def opaque(self, node: ir.Node, operands: Sequence[frozenset[str]]) -> Sequence[frozenset[str]]:
        return [frozenset({"opaque"}).union(*operands)] * len(node.outputs)

    def join(self, node: ir.Node, elements: Sequence[frozenset[str]]) -> frozenset[str]:
        return frozenset().union(*elements)

    def decide(self, condition: frozenset[str]) -> bool | None:
        return self._decided


def interpret(text: str, domain: Names, seeds: str) -> dict[str, str]:
    """Return the sources of each output."""
    model = parse(text)
    graph = ir.from_proto(model).graph
    values = values_by_name(graph)
    flow = run(graph, domain, {values[name]: frozenset({name}) for name in seeds.split()})
    return {str(value.name): " ".join(sorted(flow.of(value))) for value in graph.outputs}


def step(outputs: str, nodes: str) -> str:
    return f"""
        <ir_version: 10, opset_import: ["" : 20]>
        flow (bool flag, int64 count, float a, float b, float c, float d, float[3] xs) => ({outputs}) {{ {nodes} }}
    """


IF = """u, v = If(flag) <then_branch = t () => (float p, float q) { p = Neg(a) q = Neg(b) },
    else_branch = e () => (float p2, float q2) { p2 = Neg(c) q2 = Neg(b) }>"""


@pytest.mark.parametrize(("decided", "expected"), [(None, "a c"), (True, "a"), (False, "c")])
def test_branches_join_or_are_decided(decided: bool | None, expected: str) -> None:
    found = interpret(step("float u, float v", IF), Names(decided), "a b c")
    assert found == {"u": expected, "v": "b"}


def test_the_order_of_branches_in_the_file_does_not_matter() -> None:
    model = parse(step("float u, float v", IF))
    attributes = model.graph.node[0].attribute
    attributes.extend([attributes.pop(0)])
    assert attributes[0].name == "else_branch"
    found = interpret(onnx.printer.to_text(model), Names(True), "a b c")
    assert found == {"u": "a", "v": "b"}


def test_a_carried_value_gathers_what_the_rounds_add() -> None:
    """Each round hands a value on to the next: the last one is reached after three rounds."""
    nodes = """u, v, w = Loop(count, flag, a, b, c) <body = l (int64 i, bool more, float p, float q, float r)
        => (bool on, float p2, float q2, float r2)
        { on = Identity(more) p2 = Add(p, d) q2 = Add(q, p) r2 = Add(r, q) }>"""
    assert interpret(step("float u, float v, float w", nodes), Names(), "a b c d") == {
        "u": "a d",
        "v": "a b d",
        "w": "a b c d",
    }


def test_scans_stack_and_functions_are_entered() -> None:
    nodes = """u, s = Scan(a, xs) <num_scan_inputs = 1, body = s (float p, float x) => (float p2, float y)
        { p2 = Add(p, x) y = Mul(x, d) }>"""
    assert interpret(step("float u, float[3] s", nodes), Names(), "a d xs") == {"u": "a xs", "s": "d xs"}
    model = onnx.parser.parse_model("""
        <ir_version: 10, opset_import: ["" : 20, "local" : 1]>
        flow (float a, float b) => (float u, float v) { u = local.F(a) v = local.F(b) }
        <domain: "local", opset_import: ["" : 20]> F (x) => (y) { y = Neg(x) }
    """)
    read = ir.from_proto(model)
    values = values_by_name(read.graph)
    flow = Flow(Names(), {values[name]: frozenset({name}) for name in "ab"}, read.functions)
    flow.visit_all(read.graph)
    assert [flow.of(value) for value in read.graph.outputs] == [{"a"}, {"b"}]


def test_other_bodies_are_opaque_with_their_captures() -> None:
    nodes = "u = SequenceMap(a, b) <body = m (float p, float q) => (float p2) { p2 = Mul(p, c) }>"
    assert interpret(step("float u", nodes), Names(), "a c") == {"u": "a c opaque"}


def test_a_second_interpretation_forgets_the_first() -> None:
    """A visit interprets the bodies anew, by the present elements of the operands."""
    model = parse(step("float u, float v", IF))
    graph = ir.from_proto(model).graph
    values = values_by_name(graph)
    flow = Flow(Names(), {values["a"]: frozenset({"a"})})
    assert flow.visit(graph[0]) == [values["u"]]
    flow.elements[values["a"]] = frozenset()
    assert flow.visit(graph[0]) == [values["u"]]
    assert flow.of(values["u"]) == frozenset()


@pytest.mark.parametrize("depth", [1, 3, 6])
def test_the_visits_of_a_node_do_not_grow_with_nesting(depth: int) -> None:
    """Loops in loops: a node is visited again only where an operand rose, not once for each combination of rounds."""
    body = "x{0} = Add(p{0}, d) "
    nodes = ""
    for level in reversed(range(depth)):
        inner = body.format(level) + (nodes and f"{nodes} y{level} = Add(x{level}, r{level + 1})")
        result = f"y{level}" if nodes else f"x{level}"
        start = f"p{level - 1}" if level else "a"
        nodes = (
            f"r{level} = Loop(count, flag, {start}) <body = l{level} (int64 i{level}, bool m{level}, float p{level}) "
            f"=> (bool o{level}, float {result}) {{ o{level} = Identity(m{level}) {inner} }}>"
        )
    domain = Names()
    assert interpret(step("float u", f"{nodes} u = Neg(r0)"), domain, "a d") == {"u": "a d"}
    assert max(domain.visits.values()) <= 3


def test_a_chain_deeper_than_the_stack() -> None:
    nodes = " ".join(f"n{i + 1} = Neg({'a' if i == 0 else f'n{i}'})" for i in range(3000))
    assert interpret(step("float n3000", nodes), Names(), "a") == {"n3000": "a"}
