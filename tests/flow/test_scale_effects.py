"""The effect of a scale on values, through branches and rounds, and the values computed from numbers alone."""

from __future__ import annotations

import onnx
import onnx_ir as ir
import pytest

from graphscale.flow.degree import DegreeDomain, Mixed, is_small_zero
from graphscale.flow.interpreter import Flow
from graphscale.flow.scale_effects import BENT, FREED, KEPT, TOUCHED, Numbers, ScaleDomain, ScaleEffect, is_single_flag
from tests.build import parse

pytestmark = pytest.mark.static

SCALED = TOUCHED | KEPT


def graph_of(nodes: str) -> tuple[ir.Graph, dict[str, ir.Value]]:
    """Return a graph, and its values by name, with those of bodies."""
    model = parse(f"""
        <ir_version: 10, opset_import: ["" : 20]>
        flow (float[3] g, float[3] w, float scale, float rate, int64 rounds, bool go, bool[3] mask) => (float[3] out)
            <float two = {{2}}, float[3] zeros = {{0, 0, 0}}> {{ {nodes} out = Identity(w) }}
    """)
    graph = ir.from_proto(onnx.shape_inference.infer_shapes(model)).graph
    made = [value for node in graph.all_nodes() for value in node.outputs]
    return graph, {str(value.name): value for value in (*graph.inputs, *graph.initializers.values(), *made)}


def numbers_of(graph: ir.Graph, *names: str) -> Numbers:
    return Numbers(graph, {value for value in graph.inputs if value.name in names}, is_single_flag)


def effects(nodes: str, *, goes_on: bool = False) -> tuple[dict[str, ScaleEffect], set[str | None]]:
    """Return the effect of the scale on each value, and the names of the unscaled gradients."""
    graph, values = graph_of(nodes)
    known = {values["scale"]: ScaleEffect(1, SCALED)}
    numbers = numbers_of(graph, "scale", "rate")
    domain = ScaleDomain(DegreeDomain(is_small_zero), known, numbers, goes_on=goes_on)
    flow = Flow[ScaleEffect](domain, known)
    flow.visit_all(graph)
    return {name: flow.of(value) for name, value in values.items()}, {value.name for value in domain.unscaled}


def test_the_scale_comes_out_through_its_exact_inverse_alone() -> None:
    found, unscaled = effects("""
        a = Mul(g, scale) b = Div(a, scale) small = Div(rate, scale) c = Mul(a, small)
        n = ReduceL2<keepdims = 0>(a) normed = Div(a, n) sign = Sign(a) r = Div(n, scale) most = Max(r, two)
        limit = Mul(most, scale) clipped = Div(a, limit) d = Div(scale, a)
    """)
    assert unscaled == {"b", "c", "r", "clipped"}
    free = ScaleEffect(0, TOUCHED | FREED)
    assert [found[name] for name in ("b", "c", "r", "clipped")] == [free] * 4
    assert [found[name] for name in ("normed", "sign", "d")] == [ScaleEffect(0, SCALED)] * 3
    assert found["small"] == ScaleEffect(-1, SCALED) and found["limit"].power == 1


def test_numbers_cancel_without_a_gradient() -> None:
    found, unscaled = effects("one = Div(scale, scale) half = Mul(rate, scale) again = Div(half, scale)")
    assert [found[name] for name in ("one", "again")] == [ScaleEffect(0, TOUCHED)] * 2 and not unscaled


def test_a_single_flag_carries_no_gradient_and_a_mask_does() -> None:
    found, _ = effects("""
        a = Mul(g, scale) sum = ReduceSum<keepdims = 0>(a) bad = IsNaN(sum) moved = Where(bad, w, g)
        bads = IsNaN(a) kept = Where(bads, w, g)
    """)
    assert (found["bad"], found["moved"]) == (ScaleEffect(0, TOUCHED), ScaleEffect(0, TOUCHED))
    assert (found["bads"], found["kept"]) == (ScaleEffect(0, SCALED), ScaleEffect(0, SCALED))


@pytest.mark.parametrize("goes_on", [False, True])
def test_behind_a_conflict(goes_on: bool) -> None:
    found, unscaled = effects("a = Mul(g, scale) sum = Add(a, w) b = Div(sum, scale)", goes_on=goes_on)
    assert isinstance(found["sum"].power, Mixed) and found["sum"].degree == 1
    assert found["b"].marks & BENT and found["b"].marks & KEPT
    assert unscaled == ({"b"} if goes_on else set())


def branches(then: str, other: str) -> str:
    return f"""r = If(go) <then_branch = t () => (float[3] p) {{ {then} }},
        else_branch = e () => (float[3] q) {{ {other} }}>"""


def test_a_scale_that_enters_in_one_branch_has_no_power_behind() -> None:
    found, _ = effects(branches("p = Mul(g, scale)", "q = Identity(g)") + "b = Div(r, scale)")
    assert found["p"] == ScaleEffect(1, SCALED)
    assert isinstance(found["r"].power, Mixed) and found["b"].marks & BENT


def test_a_scale_that_enters_in_both_branches_or_beside_zeros() -> None:
    for other in ("q = Mul(w, scale)", "q = Identity(zeros)"):
        found, unscaled = effects(branches("p = Mul(g, scale)", other) + "b = Div(r, scale)")
        assert (found["r"], found["b"]) == (ScaleEffect(1, SCALED), ScaleEffect(0, TOUCHED | FREED))
        assert unscaled == {"b"}


def test_a_gradient_unscaled_in_one_branch_is_kept_by_the_other() -> None:
    """The other branch gives the weight, or the gradient with the scale."""
    before = "a = Mul(g, scale)"
    found, _ = effects(before + branches("p = Div(a, scale)", "q = Identity(w)"))
    assert found["r"] == ScaleEffect(0, TOUCHED | FREED)
    found, _ = effects(before + branches("p = Div(a, scale)", "q = Identity(a)"))
    assert found["r"].marks == TOUCHED | FREED | KEPT | BENT


def test_the_choice_of_a_branch_by_the_scale() -> None:
    found, _ = effects(
        "large = Greater(scale, two)" + branches("p = Identity(w)", "q = Identity(g)").replace("go", "large")
    )
    assert found["r"].marks & TOUCHED and found["r"].degree == 0


def rounds(body: str, start: str, last: str = "last", on: str = "on") -> str:
    return f"""{last} = Loop(rounds, go, {start}) <body = l (int64 i, bool more, float[3] before)
        => (bool {on}, float[3] after) {{ {on} = Identity(more) {body} }}>"""


def test_a_scale_that_enters_in_the_rounds_of_a_loop() -> None:
    body = "p = Mul(g, scale) after = Add(before, p)"
    found, unscaled = effects(rounds(body, "zeros") + "b = Div(last, scale)")
    assert (found["after"], found["last"], found["b"]) == (
        ScaleEffect(1, SCALED),
        ScaleEffect(1, SCALED),
        ScaleEffect(0, TOUCHED | FREED),
    )
    assert unscaled == {"b"}
    found, _ = effects(rounds(body, "w") + "b = Div(last, scale)")
    assert found["b"].marks & BENT


def test_powers_that_grow_from_round_to_round_end() -> None:
    found, _ = effects(rounds("after = Mul(before, scale)", "w") + "b = Div(last, scale)")
    assert found["last"].marks & BENT and found["b"].marks & KEPT


def test_a_step_in_each_round_unscales_its_gradient() -> None:
    body = "d = Mul(before, g) p = Mul(d, scale) q = Div(p, scale) after = Sub(before, q)"
    found, unscaled = effects(rounds(body, "w"))
    assert unscaled == {"q"} and found["last"] == ScaleEffect(0, TOUCHED | FREED)


def test_numbers_through_bodies() -> None:
    """A flag of data decides on numbers; what is carried from round to round may begin with data."""
    graph, values = graph_of(f"""
        sum = ReduceSum<keepdims = 0>(g) bad = IsNaN(sum) counted = Cast<to = 1>(bad) chosen = Where(bad, rate, two)
        n, d = If(bad) <then_branch = t () => (float p, float[3] u) {{ p = Mul(rate, two) u = Identity(g) }},
            else_branch = e () => (float q, float[3] v) {{ q = Identity(rate) v = Identity(zeros) }}>
        wide = Cast<to = 1>(mask) length = Shape(g)
        {rounds("after = Mul(before, rate)", "zeros")}
        {rounds("late = Mul(early, rate)", "g", "end", "off").replace("before", "early").replace("after", "late")}
    """)
    numbers = numbers_of(graph, "rate", "rounds")
    inside = {name for name, value in values.items() if value in numbers}
    assert inside >= {"rate", "two", "bad", "counted", "chosen", "n", "p", "q", "last", "after", "length"}
    assert inside.isdisjoint({"g", "sum", "d", "u", "wide", "mask", "end", "late"})
    assert {value.name for value in numbers.counts} >= {"counted", "chosen", "n"}
    assert {name for name in inside if numbers.is_constant(values[name])} >= {"two", "rate", "after", "length"}
    assert not any(numbers.is_constant(values[name]) for name in ("bad", "counted", "n", "last"))
    assert {str(node.outputs[0].name) for node in numbers.nodes} >= {"counted", "chosen", "n", "last", "end"}
