"""If, Loop, Scan and model-local functions, forward and backward: right answers, or refused by name."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

import graphscale as gs
from tests.analysis.optimizers import NEXT, NUMBERS, SGD
from tests.analysis.recurrent import recurrent_step
from tests.build import BACKWARD, FORWARD, assert_same_step, feeds_for, parse, step

pytestmark = pytest.mark.static


def choice(result: str, then: str, otherwise: str, shape: str = "float[8,5]", flag: str = "flag") -> str:
    """`result` computed by the nodes of either branch, and each calls it `out`."""
    branches = []
    for name, nodes in (("then_branch", then), ("else_branch", otherwise)):
        text = nodes.replace("out =", f"{result}_{name[:4]} =")
        branches.append(f"{name} = {result}_{name} () => ({shape} {result}_{name[:4]}) {{ {text} }}")
    return f"{result} = If({flag}) <{', '.join(branches)}>"


@pytest.fixture(params=[True, False], ids=["then", "else"])
def flag(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def right(model: onnx.ModelProto, *gradients: str, contractions: int, **given: object) -> gs.Report:
    """Bit for bit the unscaled step, with every backward contraction scaled, also inside of the bodies."""
    report = assert_same_step(model, feeds_for(model, **given))
    assert (report.coverage, report.contractions) == (1.0, contractions)
    assert {gradient.value for gradient in report.gradients} == set(gradients)
    return report


def step_with_activations() -> onnx.ModelProto:
    """Either branch is an activation between two products; and so backwards."""
    forward = FORWARD.replace("a = Tanh(h)", choice("a", "out = Tanh(h)", "out = Sigmoid(h)"))
    slope = choice("slope", "aa = Mul(a, a) out = Sub(one, aa)", "na = Sub(one, a) out = Mul(a, na)")
    backward = BACKWARD.replace("aa = Mul(a, a)", "").replace("slope = Sub(one, aa)", slope)
    return step(forward=forward, backward=backward, inputs="bool flag")


def step_with_products() -> onnx.ModelProto:
    """Each branch holds a product of values from outside."""
    then = "xt = Transpose<perm = [1, 0]>(x) out = MatMul(xt, dh)"
    otherwise = "dht = Transpose<perm = [1, 0]>(dh) half = MatMul(dht, x) out = Transpose<perm = [1, 0]>(half)"
    backward = BACKWARD.replace("xt = Transpose<perm = [1, 0]>(x)", "")
    backward = backward.replace("dw1 = MatMul(xt, dh)", choice("dw1", then, otherwise, "float[4,5]"))
    return step(backward=backward, inputs="bool flag")


# `rows` is the product of dy and w2t, row by row.
ROWS = """
    rows = Loop(eight, go) <body = row_by_row (int64 i, bool more) => (bool going, float[5] row) {
        going = Identity(more)
        dy_i = Gather<axis = 0>(dy, i)
        row = MatMul(dy_i, w2t)
    }>
"""


class TestIf:
    def test_in_the_forward_pass(self, flag: bool) -> None:
        right(step_with_activations(), "dw1", "dw2", contractions=3, flag=flag)

    def test_in_the_backward_pass(self, flag: bool) -> None:
        """The gradient enters both branches, and leaves either."""
        dh = choice("dh", "aa = Mul(a, a) slope = Sub(one, aa) out = Mul(da, slope)", "out = Identity(da)")
        backward = BACKWARD.replace("aa = Mul(a, a)", "").replace("slope = Sub(one, aa)", "")
        backward = backward.replace("dh = Mul(da, slope)", dh)
        right(step(backward=backward, inputs="bool flag"), "dw1", "dw2", contractions=3, flag=flag)

    def test_around_contractions(self, flag: bool) -> None:
        right(step_with_products(), "dw1", "dw2", contractions=4, flag=flag)

    def test_a_gradient_or_zeros(self, flag: bool) -> None:
        """A layer that is frozen in some steps."""
        nodes = choice("g1", "out = Identity(dw1)", "out = Mul(dw1, zero)", "float[4,5]") + "\n g2 = Identity(dw2)\n"
        model = step(nodes + SGD, inputs="bool flag", outputs=NEXT, constants=NUMBERS)
        assert assert_same_step(model, feeds_for(model, flag=flag)).coverage == 1.0

    def test_clipped_if_it_is_too_long(self, flag: bool) -> None:
        """The norm decides; it is no linear function of the gradient, and neither branch is scaled."""
        norm = "square1 = Mul(dw1, dw1) sum1 = ReduceSum<keepdims = 0>(square1) norm = Sqrt(sum1)"
        clip = choice("g1", "out = Div(dw1, norm)", "out = Identity(dw1)", "float[4,5]", flag="too_long")
        nodes = f"{norm} too_long = Greater(norm, limit)\n {clip}\n g2 = Identity(dw2)\n {SGD}"
        limit = 1e-3 if flag else 1e3
        model = step(nodes, outputs=NEXT, constants=f"{NUMBERS}, float limit = {{{limit}}}")
        assert "dw1" in {gradient.value for gradient in assert_same_step(model).gradients}

    def test_an_optimizer_that_runs_every_other_step(self, flag: bool) -> None:
        """The whole update is in a branch: its gradient is unscaled where it enters."""
        update = choice("w1_next", "u1 = Mul(dw1, rate) out = Sub(w1, u1)", "out = Identity(w1)", "float[4,5]")
        model = step(update, inputs="bool flag", outputs="float[4,5] w1_next", constants=NUMBERS)
        report = assert_same_step(model, feeds_for(model, flag=flag), updates={"w1_next": "w1"})
        assert {gradient.value for gradient in report.gradients} == {"dw1"}


@pytest.mark.parametrize("kind", ["Scan", "Loop"])
class TestLoops:
    @pytest.mark.parametrize("zeros", ["initializers", "computed"])
    def test_backpropagation_through_time(self, kind: str, zeros: str) -> None:
        """The contractions are in the bodies; the sums of gradients begin at zero, which has every degree."""
        right(recurrent_step(kind, zeros), "du", "dv", "dh0", contractions=3)

    def test_with_sgd_inside(self, kind: str) -> None:
        nodes = "u_step = Mul(du, one) u_next = Sub(u, u_step) v_step = Mul(dv, one) v_next = Sub(v, v_step)"
        model = recurrent_step(kind, more=nodes, outputs="float[3,4] u_next, float[4,4] v_next")
        report = assert_same_step(model)
        state = {state.input: state.output for state in report.state}
        assert (state["u"], state["v"]) == ("u_next", "v_next")
        assert report.coverage == 1.0

    def test_a_sum_of_gradients_that_begins_at_a_number(self, kind: str) -> None:
        """0.5 + the sum of gradients: no factor comes out of that. Unscaled inside, or refused by name."""
        model = recurrent_step(kind)
        [start] = [tensor for tensor in model.graph.initializer if tensor.name == "no_du"]
        start.CopyFrom(onnx.numpy_helper.from_array(np.full((3, 4), 0.5, np.float32), "no_du"))
        try:
            gs.scale(model)
        except gs.GraphscaleError:
            with pytest.raises(gs.GraphscaleError, match=r"'(no_)?du"):
                gs.scale(model)
        else:
            assert_same_step(model)


class TestNested:
    def test_if_in_a_loop(self, flag: bool) -> None:
        """Each step of the recurrent network chooses its activation."""
        model = recurrent_step("Loop")
        text = onnx.printer.to_text(model)
        forward = choice("h_out", "out = Tanh(z)", "out = Identity(z)", "float[2,4]")
        backward = choice(
            "dz", "s = Mul(after_t, after_t) r = Sub(one, s) out = Mul(dh, r)", "out = Identity(dh)", "float[2,4]"
        )
        text = text.replace("h_out = Tanh (z)", forward).replace("dz = Mul (dh, slope)", backward)
        text = text.replace("float[4,4] v)", "float[4,4] v, bool flag)", 1)
        model = parse(text)
        assert sum(node.op_type == "Loop" for node in model.graph.node) == 2
        right(model, "du", "dv", "dh0", contractions=3, flag=flag)

    def test_loop_in_an_if(self, flag: bool) -> None:
        """The first product is computed at once, or row by row."""
        product = "out = MatMul(dy, w2t)"
        backward = BACKWARD.replace("da = MatMul(dy, w2t)", choice("da", product, f"{ROWS} out = Identity(rows)"))
        model = step(backward=backward, inputs="bool flag", constants="int64 eight = {8}, bool go = {1}")
        assert assert_same_step(model, feeds_for(model, flag=flag)).coverage == 1.0


FUNCTIONS = "\n".join(
    f'<domain: "nets", opset_import: ["" : 20, "nets" : 1]> {function}'
    for function in (
        "dense (v, w) => (r) { p = MatMul(v, w) r = Tanh(p) }",
        "dense_slope (r) => (s) { square = Mul(r, r) s = nets.one_minus(square) }",
        "one_minus (v) => (r) { number = Constant<value = float {1.0}>() r = Sub(number, v) }",
        "dense_gradients (v, r, dr) => (dz, dw) "
        "{ s = nets.dense_slope(r) dz = Mul(dr, s) vt = Transpose<perm = [1, 0]>(v) dw = MatMul(vt, dz) }",
        "error_gradient (d) => (dy) { factor = Constant<value = float {0.083333336}>() dy = Mul(d, factor) }",
    )
)


class TestFunctions:
    """Model-local functions are inlined: the scale may have to enter inside of one."""

    def model(self, more: str = "", outputs: str = "float[4,5] dw1, float[5,3] dw2") -> onnx.ModelProto:
        forward = FORWARD.replace("h = MatMul(x, w1)", "").replace("a = Tanh(h)", "a = nets.dense(x, w1)")
        backward = """
            dy = nets.error_gradient(d)
            at = Transpose<perm = [1, 0]>(a)
            dw2 = MatMul(at, dy)
            w2t = Transpose<perm = [1, 0]>(w2)
            da = MatMul(dy, w2t)
            dh, dw1 = nets.dense_gradients(x, a, da)
        """
        rest = {"constants": NUMBERS, "domains": ["nets"], "functions": FUNCTIONS}
        return step(more, forward=forward, backward=backward, outputs=outputs, **rest)

    def test_forward_and_backward(self) -> None:
        report = right(self.model(), "dw1", "dw2", contractions=3)
        assert len(report.places) == 1
        (warning,) = report.warnings
        assert all(name in warning for name in ("nets::dense", "nets::error_gradient", "inlined"))

    def test_an_optimizer_as_a_function(self) -> None:
        model = self.model("w1_next = nets.sgd(w1, dw1)\n w2_next = nets.sgd(w2, dw2)", NEXT)
        sgd = parse("""
            <ir_version: 10, opset_import: ["" : 20]> unused () => () {}
            <domain: "nets", opset_import: ["" : 20]>
            sgd (w, g) => (n) { rate = Constant<value = float {0.1}>() u = Mul(g, rate) n = Sub(w, u) }
        """)
        model.functions.extend(sgd.functions)
        report = assert_same_step(model)
        assert {state.input for state in report.state} == {"current_loss_scale", "good_steps", "w1", "w2"}

    def test_the_functions_are_gone(self) -> None:
        scaled = gs.scale(self.model()).model
        assert {(function.domain, function.name) for function in scaled.functions} == {
            ("graphscale", "UpdateLossScale")
        }
        onnx.checker.check_model(scaled)

    def test_an_unknown_operator_in_a_function(self) -> None:
        model = self.model()
        for function in model.functions:
            if function.name == "dense_gradients":
                function.opset_import.append(onnx.helper.make_opsetid("acme", 1))
                function.node[1].CopyFrom(onnx.helper.make_node("FastTanhGrad", ["dr", "r"], ["dz"], domain="acme"))
        model.opset_import.append(onnx.helper.make_opsetid("acme", 1))
        with pytest.raises(gs.GraphscaleError, match="acme::FastTanhGrad"):
            gs.scale(model)


def test_an_unknown_operator_in_a_branch() -> None:
    dh = choice("dh", "out = acme.FastTanhGrad(da, a)", "out = Identity(da)")
    backward = BACKWARD.replace("dh = Mul(da, slope)", dh)
    with pytest.raises(gs.GraphscaleError, match="acme::FastTanhGrad"):
        gs.scale(step(backward=backward, inputs="bool flag", domains=["acme"]))
