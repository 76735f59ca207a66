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


def proved(text: str, *checked: str, dynamic: bool = True) -> None:
    graph = ir.from_proto(onnx.parser.parse_model(text)).graph
    values = values_by_name(graph)
    prove(
        graph,
        values["scale"],
        values["loss"],
        checked=[values[name] for name in checked],
        all_finite=values["all_finite"] if dynamic else None,
    )


def test_a_gradient_that_is_tested_as_a_share_of_another() -> None:
    proved(STEP, "dw", "whole")
    proved(STEP, "dw")


def test_a_gradient_that_is_not_tested() -> None:
    with pytest.raises(ProofError, match="gradient 'dw' would not be tested"):
        proved(STEP.replace("Add(dw, w)", "Add(x, w)"), "whole", "dw")


def test_what_is_not_among_the_gradients() -> None:
    with pytest.raises(ProofError, match="output 'dw' would depend on a gradient that is not tested"):
        proved(STEP, "whole")


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
