"""The proof by itself, on graphs written by hand."""

from __future__ import annotations

import onnx.parser
import onnx_ir as ir
import pytest

from graphscale.analysis.proof import prove
from graphscale.errors import ProofError
from graphscale.graph.values import values_by_name

pytestmark = pytest.mark.static

STEP = """
<ir_version: 10, opset_import: ["" : 20]>
step (float[4] x, float[4] w, float scale) => (float loss, float[4] dw, float[4] whole, bool all_finite)
{
   product = Mul(x, w)
   loss = ReduceSum <keepdims = 0> (product)
   scaled = Mul(x, scale)
   dw = Div(scaled, scale)
   whole = Add(dw, w)
   zero = Constant <value_float = 0.0> ()
   probe = Mul(whole, zero)
   total = ReduceSum <keepdims = 0> (probe)
   nan = IsNaN(total)
   all_finite = Not(nan)
}
"""


def proved(text: str, *checked: str, dynamic: bool = True, guarded: dict[str, str] | None = None) -> None:
    graph = ir.from_proto(onnx.parser.parse_model(text)).graph
    values = values_by_name(graph)
    prove(
        graph,
        values["scale"],
        values["loss"],
        checked=[values[name] for name in checked],
        all_finite=values["all_finite"] if dynamic else None,
        guarded={values[following]: values[state] for following, state in (guarded or {}).items()},
    )


def test_a_gradient_that_is_tested_as_a_share_of_another() -> None:
    proved(STEP, "dw", "whole")
    proved(STEP, "dw")


def test_a_gradient_that_is_not_tested() -> None:
    with pytest.raises(ProofError, match="gradient 'dw' would not be tested"):
        proved(STEP.replace("Add(dw, w)", "Add(x, w)"), "whole", "dw")


def test_what_is_not_among_the_gradients() -> None:
    with pytest.raises(
        ProofError, match="the multiple 'scaled' of the scale reaches 'dw', and no finite check tests it"
    ):
        proved(STEP, "whole")


@pytest.mark.parametrize("bound", ["Clip(multiple)", "Relu(multiple)", "Max(multiple, zero)"])
def test_an_overflow_that_a_bound_makes_finite(bound: str) -> None:
    nodes = f"zero = Constant <value_float = 0.0> () multiple = Mul(x, scale) scaled = {bound}"
    with pytest.raises(ProofError, match="an overflow would not reach the finite check of 'dw'"):
        proved(
            STEP.replace("zero = Constant <value_float = 0.0> ()", "").replace("scaled = Mul(x, scale)", nodes), "dw"
        )


GUARDS = {
    "a select": ("next = Where(all_finite, moved, w)", True),
    "an If": (
        "next = If(all_finite) <then_branch = t () => (float[4] a) { a = Identity(moved) }, "
        "else_branch = e () => (float[4] b) { b = Identity(w) }>",
        True,
    ),
    "a select in float64": (
        "a = Cast<to = 11>(moved) b = Cast<to = 11>(w) c = Where(all_finite, a, b) next = Cast<to = 1>(c)",
        True,
    ),
    "a reset": ("kept = Where(reset, zero, w) next = Where(all_finite, moved, kept)", True),
    "a reset by the loss": (
        "late = Greater(loss, zero) kept = Where(late, zero, w) next = Where(all_finite, moved, kept)",
        False,
    ),
    "swapped branches": ("next = Where(all_finite, w, moved)", False),
    "another flag": ("next = Where(reset, moved, w)", False),
    "another state": ("next = Where(all_finite, moved, x)", False),
    "a product": ("number = Cast<to = 1>(all_finite) step = Mul(number, dw) next = Sub(w, step)", False),
}


@pytest.mark.parametrize("name", GUARDS)
def test_guards(name: str) -> None:
    nodes, right = GUARDS[name]
    text = STEP.replace("float scale)", "float scale, bool reset)").replace(
        "bool all_finite)", "bool all_finite, float[4] next)"
    )
    text = text.replace("all_finite = Not(nan)", f"all_finite = Not(nan) moved = Sub(w, dw) {nodes}")
    if right:
        proved(text, "dw", "whole", guarded={"next": "w"})
    else:
        with pytest.raises(ProofError, match="the next value 'next' of carried state would not be guarded"):
            proved(text, "dw", "whole", guarded={"next": "w"})


def test_a_loss_that_depends_on_the_scale() -> None:
    """Its degree is 0, and still it is another number at another scale, by rounding."""
    text = STEP.replace("loss = ReduceSum <keepdims = 0> (product)", "loss = ReduceSum <keepdims = 0> (back)")
    text = text.replace("product = Mul(x, w)", "product = Mul(x, w) up = Mul(product, scale) back = Div(up, scale)")
    with pytest.raises(ProofError, match="the loss 'loss' would depend on the loss scale"):
        proved(text, "dw")


def test_a_loss_that_depends_on_the_scale_within_a_branch() -> None:
    """A value captured by a branch is an operand of the If: a loss behind it is rejected as a flat one is."""
    text = STEP.replace("float scale)", "float scale, bool train)")
    text = text.replace(
        "loss = ReduceSum <keepdims = 0> (product)",
        """loss = If (train) <
            then_branch = then () => (float own) {
                up = Mul(product, scale) back = Div(up, scale) own = ReduceSum <keepdims = 0> (back)
            },
            else_branch = other () => (float sum) { sum = ReduceSum <keepdims = 0> (product) }
        >""",
    )
    for dynamic in (True, False):
        with pytest.raises(ProofError, match="the loss 'loss' would depend on the loss scale"):
            proved(text, "dw", dynamic=dynamic)
        free = text.replace("Mul(product, scale)", "Mul(product, w)").replace("Div(up, scale)", "Div(up, w)")
        proved(free, "dw", dynamic=dynamic)
