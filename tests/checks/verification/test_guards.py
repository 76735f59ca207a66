"""A guard is recognized by its effect: on a skipped step the state is kept, bit for bit, and on an applied one not."""

from __future__ import annotations

import onnx
import onnx.parser
import pytest

import graphscale as gs
from tests.build import linear_step

pytestmark = pytest.mark.static

STEP = linear_step("w_next = Sub(w, dw)", outputs="float[4,3] w_next")
FIXED = linear_step("held = Identity(w) w_next = Identity(held)", outputs="float[4,3] dw, float[4,3] w_next")
WINDOW = linear_step(
    "added = com.microsoft.InPlaceAccumulatorV2(total, dw, reset)",
    inputs="float[4,3] w, float[4,3] total, bool[1] reset",
    outputs="bool[1] added",
    domains=["com.microsoft"],
)
INPUTS = "bool flag, float[4,3] new, float[4,3] w, float[4,3] x, float[4,3] total, float one"
IF = """p = If({}) <then_branch = t () => (float[4,3] a) {{ a = Identity({}) }},
    else_branch = e () => (float[4,3] b) {{ b = Identity({}) }}>"""
NUMBER = "f = Cast<to = 1>(flag)"
ZERO, MINUS = (f"z = Constant<value_float = {number}>()" for number in ("0.0", "-0.0"))
CAST = "c = Cast<to = {0}>(new) d = Cast<to = {0}>(w) s = Where(flag, c, d) p = Cast<to = 1>(s)"


def edited(scaled: onnx.ModelProto, names: dict[str, str], nodes: str) -> onnx.ModelProto:
    """A copy with other nodes in place of the one with the output that is called `p` in them."""
    graph = onnx.parser.parse_graph(f"g ({INPUTS}) => (float[4,3] p) {{ {nodes} }}")
    bodies = [a.g for node in graph.node for a in node.attribute if a.type == onnx.AttributeProto.GRAPH]
    for node in (*graph.node, *(inner for body in bodies for inner in body.node)):
        for fields in (node.input, node.output):
            fields[:] = [names.get(name, f"own.{name}" if name else "") for name in fields]
    for body in bodies:
        body.output[0].name = f"own.{body.output[0].name}"
    copy = onnx.ModelProto()
    copy.CopyFrom(scaled)
    at = next(i for i, node in enumerate(copy.graph.node) if names["p"] in node.output)
    rest = [*graph.node, *copy.graph.node[at + 1 :]]
    del copy.graph.node[at:]
    copy.graph.node.extend(rest)
    return copy


def fault(original: onnx.ModelProto, scaled: onnx.ModelProto) -> str:
    (check,) = (c for c in gs.verify(original, scaled, runs=0).checks if c.name == "carried state guarded")
    assert (check.status == "holds") == ("not kept" not in check.detail)
    return "" if check.status == "holds" else check.detail


def unequal(original: onnx.ModelProto, scaled: onnx.ModelProto) -> str:
    """Return the differences to the original, or to the policy's step, of a file with guards."""
    assert fault(original, scaled) == ""
    checks = gs.verify(original, scaled, runs=0, exact=False).checks
    return "; ".join(c.detail for c in checks if c.name.startswith("equal to the original") and c.status != "holds")


CASES = {
    "an If": (IF.format("flag", "new", "w"), ""),
    "an If, its branches swapped": (
        IF.format("flag", "w", "new"),
        "'If -> w_next' gives 'w_next.un",
    ),
    "a negated select": ("n = Not(flag) p = Where(n, w, new)", ""),
    "a select within another": ("a = Where(flag, new, w) p = Where(flag, a, w)", ""),
    "a selected change": (f"{ZERO} a = Sub(w, new) s = Where(flag, a, z) p = Sub(w, s)", ""),
    "a selected sum": (f"{MINUS} s = Where(flag, new, z) p = Add(w, s)", ""),
    "a sum that loses a sign": (f"{ZERO} s = Where(flag, new, z) p = Add(w, s)", "not the old value"),
    "a product": (f"{NUMBER} a = Sub(w, new) s = Mul(f, a) p = Sub(w, s)", "not the old value"),
    "a select by arithmetic": (
        f"{NUMBER} n = Not(flag) g = Cast<to = 1>(n) a = Mul(f, new) b = Mul(g, w) p = Add(a, b)",
        "not the old value",
    ),
    "a select in float64": (CAST.format(11), ""),
    "a select in float16": (CAST.format(10), "selects in FLOAT16, which does not hold all numbers of FLOAT"),
    "a constant": ("y = Constant<value_int = 1>() c = Cast<to = 9>(y) p = Where(c, new, w)", "not the old value"),
    "no select": ("p = Identity(new)", "'Identity -> w_next' gives 'w_next', not the old value"),
    "another value": ("n = Neg(w) p = Where(flag, new, n)", "'Where -> w_next' gives 'own.n', not"),
}


@pytest.fixture(scope="module")
def scaled() -> onnx.ModelProto:
    model = gs.scale(STEP).model
    assert isinstance(model, onnx.ModelProto)
    return model


@pytest.mark.parametrize("case", CASES)
def test_forms(scaled: onnx.ModelProto, case: str) -> None:
    nodes, expected = CASES[case]
    names = {"flag": "all_finite", "new": "w_next.unguarded", "w": "w", "p": "w_next"}
    found = fault(STEP, edited(scaled, names, nodes))
    assert bool(found) == bool(expected) and expected in found


@pytest.mark.parametrize("nodes", ["p = Where(flag, w, w)", "c = Identity(w) p = Where(flag, c, w)"])
def test_the_old_value_on_an_applied_step(scaled: onnx.ModelProto, nodes: str) -> None:
    """It is kept, and it is not the original's next value."""
    names = {"flag": "all_finite", "new": "w_next.unguarded", "w": "w", "p": "w_next"}
    assert "'w_next' is computed in another way" in unequal(STEP, edited(scaled, names, nodes))


def test_a_state_that_the_original_passes_on() -> None:
    """An applied step keeps it as well."""
    hints = {"updates": {"w_next": "w"}}
    report = gs.verify(FIXED, gs.scale(FIXED, **hints), runs=0, **hints)
    assert all(check.status == "holds" for check in report.checks if check.name == "carried state guarded")


def test_a_step_that_is_accepted_although_it_is_not_finite() -> None:
    """The select is by both flags; by the finite check alone, a stuck step is not applied."""
    model = gs.scale(STEP, gs.DynamicLossScale(on_stuck="accept", max_consecutive_skips=3)).model
    names = {"flag": "all_finite", "new": "w_next.unguarded", "w": "w", "p": "w_next", "one": "stuck"}
    assert fault(STEP, model) == ""
    assert fault(STEP, edited(model, names, "e = Or(one, flag) p = Where(e, new, w)")) == ""
    assert "should be by Where of 'applies'" in unequal(STEP, edited(model, names, "p = Where(flag, new, w)"))
    assert "not the old value" in fault(STEP, edited(model, names, "e = Not(flag) p = Where(e, new, w)"))


@pytest.mark.parametrize("on_stuck", ["flag", "stop", "reset"])
def test_a_stuck_step_that_is_not_accepted(on_stuck: str) -> None:
    model = gs.scale(STEP, gs.DynamicLossScale(on_stuck=on_stuck, max_consecutive_skips=3)).model
    assert fault(STEP, model) == ""


def test_a_sum_that_is_reset_on_a_skipped_step() -> None:
    """The old value is that after the reset; an applied step adds to it."""
    model = gs.scale(WINDOW).model
    assert fault(WINDOW, model) == ""
    select = next(node for node in model.graph.node if "total.next" in node.output)
    select.input[1] = select.input[2]
    assert "'total.next' is computed in another way" in unequal(WINDOW, model)


NOT = "n = Not(flag) r = Constant<value_ints = [1]>() v = Reshape(n, r)"


@pytest.mark.parametrize(
    ("nodes", "reset", "expected"),
    [
        (f"{MINUS} p = Where(flag, new, z)", "reset", ""),
        (f"{ZERO} p = Where(flag, new, z)", "reset", "not kept"),
        (f"{MINUS} p = Where(flag, z, new)", "reset", "not kept"),
        ("p = Identity(new)", "reset", "adds 'dw.unscaled"),
        (f"{MINUS} p = Where(flag, new, z)", "", "turns -0.0 into 0.0"),
        (f"{NOT} p = Where(flag, new, w)", "own.v", ""),
        (f"{NOT} p = Where(flag, new, new)", "own.v", "not the old value"),
        (f"{NOT} p = Where(flag, new, w)", "all_finite", "not kept"),
    ],
)
def test_accumulators(nodes: str, reset: str, expected: str) -> None:
    """A skipped step adds -0.0, or overwrites the buffer with itself."""
    names = {"flag": "all_finite", "new": "dw.unscaled", "w": "total", "p": "dw.unscaled.guarded"}
    model = edited(gs.scale(WINDOW, target="ort-training").model, names, nodes)
    writer = next(node for node in model.graph.node if "added" in node.output)
    writer.input[2] = reset
    found = fault(WINDOW, model)
    assert bool(found) == bool(expected) and expected in found
