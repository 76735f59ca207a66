"""Forward and backward pass together in the body of a Loop, a Scan or an If: right answers, or a refusal by name."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

import graphscale as gs
from tests.build import EXACT, assert_same_step, feeds_for, numbers, parse
from tests.conftest import assert_all_same_bits, run_once
from tests.expressions import nodes

FORWARD = nodes("d = x_i @ w - t_i; loss_i = ReduceMean(d * d, keepdims=0)")
BACKWARD = nodes("dw = x_i.T @ (d * two_over_n)")
SUM = "total_out = Add(total_in, dw)"
MEAN = "loss = ReduceMean<keepdims = 0>(losses)"
SGD = nodes("w_next = w - total * rate")
MOMENT = f", float[4,3] moment = {numbers(12)}"
NEXT = "float[4,3] w_next"


def micro_batches(
    kind: str,
    body: str = SUM,
    *,
    start: str = "zeros",
    first: str = "0",
    after: str = "",
    outputs: str = "float[4,3] total",
    inputs: str = "float[4,3] w",
    before: str = "",
    rounds: str = "five",
    going: str = "going = Identity(more)",
    forward: str = FORWARD,
    backward: str = BACKWARD,
    leaving: bool = False,
    constants: str = "",
) -> onnx.ModelProto:
    """Five batches of eight rows; each round adds its gradient to `total_in`, and the last gives `total`.

    Args:
        kind: "Scan" or "Loop".
        body: the nodes from the gradient `dw` and `total_in` to `total_out`.
        start: the first `total_in`.
        first: the number that the initializer `zeros` is filled with.
        after: nodes behind the loop.
        outputs: the outputs after the loss.
        inputs: the inputs behind the batch.
        before: nodes before the loop.
        rounds: the number of rounds of a Loop.
        going: the nodes that say whether a Loop goes on.
        forward: the nodes from the batch to the difference `d` and `loss_i`.
        backward: the nodes from the difference `d` to the gradient `dw`.
        leaving: let `dy` leave the body as well, in the output `dys`.
        constants: more initializers, after a comma.
    """
    body = forward + backward + body
    of_round, given_back = "float[4,3] total_in", "float[4,3] total_out, float loss_i"
    given_back += ", float[8,3] dy" * leaving
    loop = {
        "Scan": f"""Scan({start}, x, t) <num_scan_inputs = 2, body = batches
            ({of_round}, float[8,4] x_i, float[8,3] t_i) => ({given_back})
            {{ {body} }}>""",
        "Loop": f"""Loop({rounds}, go, {start}) <body = batches
            (int64 i, bool more, {of_round}) => (bool going, {given_back})
            {{ x_i = Gather<axis = 0>(x, i) t_i = Gather<axis = 0>(t, i) {body} {going} }}>""",
    }[kind]
    given = f"float[5,8,4] x, float[5,8,3] t, {inputs}"
    values = f"float[4,3] zeros = {numbers(12, first)}, float rate = {{0.1}}"
    values += ", float two_over_n = {0.083333336}, int64 five = {5}, bool go = {1}, float limit = {0.5}"
    values += constants
    return parse(f"""
        <ir_version: 10, opset_import: ["" : 20]>
        micro_batches ({given}) => (float loss, {outputs}) <{values}>
        {{ {before} total, losses{", dys" * leaving} = {loop} {MEAN} {after} }}
    """)


def right(model: onnx.ModelProto, contractions: int = 1, **options: object) -> gs.Report:
    """Bit for bit the unscaled step, with every backward contraction of the body scaled."""
    report = assert_same_step(model, **options)
    assert (report.coverage, report.contractions) == (1.0, contractions)
    return report


def refused(model: onnx.ModelProto, *words: str) -> None:
    with pytest.raises(gs.GraphscaleError) as caught:
        gs.scale(model)
    assert all(word in str(caught.value) for word in words), str(caught.value)


@pytest.mark.parametrize("kind", ["Scan", "Loop"])
class TestMicroBatches:
    def test_gradients_that_leave(self, kind: str) -> None:
        report = right(micro_batches(kind))
        assert [gradient.value for gradient in report.gradients] == ["total"]

    @pytest.mark.full
    def test_an_optimizer_outside(self, kind: str) -> None:
        report = right(micro_batches(kind, after=SGD, outputs=NEXT))
        assert ("w", "w_next") in {(state.input, state.output) for state in report.state}

    def test_moments_that_are_initializers(self, kind: str) -> None:
        momentum = nodes("moment_next = moment * limit + total; w_next = w - moment_next * rate")
        report = right(micro_batches(kind, after=momentum, outputs=f"{NEXT}, float[4,3] moment_next", constants=MOMENT))
        assert ("moment", "moment_next") in {(state.input, state.output) for state in report.state}

    def test_weight_decay_outside(self, kind: str) -> None:
        """The sum is tested for finiteness, not the share."""
        decay = nodes("whole = total + w * rate; w_next = w - whole * rate")
        model = micro_batches(kind, after=decay, outputs=NEXT)
        right(model)
        probes = [node.input[0] for node in gs.scale(model).model.graph.node if node.name.endswith(".zeroed")]
        assert probes == ["whole"]

    def test_weights_that_are_computed_outside(self, kind: str) -> None:
        """The backward pass goes on behind the body, with a gradient that is measured there."""
        model = micro_batches(
            kind,
            before="w = MatMul(u, v)",
            after=nodes("du = total @ v.T; dv = u.T @ total"),
            inputs="float[4,2] u, float[2,3] v",
            outputs="float[4,2] du, float[2,3] dv, float[4,3] total",
        )
        report = right(model, 3)
        assert {gradient.value for gradient in report.gradients} >= {"total", "du", "dv"}

    def test_two_losses(self, kind: str) -> None:
        """Both lead to the same scaled graph."""
        other = "other = ReduceSum<keepdims = 0>(losses)"
        assert right(micro_batches(kind, after=other, outputs="float other, float[4,3] total")).missed == ()

    def test_a_residual_that_is_the_cotangent(self, kind: str) -> None:
        """The scale enters inside of the body: no constant is the seed."""
        model = micro_batches(kind, backward=nodes("dw = x_i.T @ d"))
        report = right(model)
        assert [place.value for place in report.places] == ["d"]
        assert report.inserted["scale-loss"] == {"Mul": 1}

    @pytest.mark.parametrize(
        ("dy", "places"), [("dy = d * t_i", {"dy"}), ("dy = d * d", {"dy", "dys"})], ids=["product", "recomputed"]
    )
    def test_a_cotangent_that_leaves_the_body(self, kind: str, dy: str, places: set[str]) -> None:
        """The scale enters at an output of the body, or behind it where the loss is computed from that output."""
        backward = nodes(f"{dy}; dw = x_i.T @ dy")
        report = right(
            micro_batches(kind, backward=backward, leaving=True, outputs="float[4,3] total, float[5,8,3] dys")
        )
        assert {place.value for place in report.places} == places
        assert {gradient.value for gradient in report.gradients} == {"total", "dys"}

    @pytest.mark.full
    def test_verify_looks_into_the_body(self, kind: str) -> None:
        model = micro_batches(kind, backward=nodes("dy = d * t_i; dw = x_i.T @ dy"), after=SGD, outputs=NEXT)
        scaled = gs.scale(model).model
        assert gs.verify(model, scaled).ok
        for node in (node for loop in scaled.graph.node for a in loop.attribute for node in a.g.node):
            if "graphscale/scale-loss" in node.name and node.op_type == "Mul":
                node.op_type = "Div"
        assert not gs.verify(model, scaled).ok

    def test_a_sum_that_decays(self, kind: str) -> None:
        right(micro_batches(kind, nodes("total_out = total_in * rate + dw")))

    def test_a_sum_that_begins_at_numbers(self, kind: str) -> None:
        """No factor comes out of numbers plus the scaled gradients of any number of rounds."""
        refused(micro_batches(kind, first="0.5"), kind, "body", "'dw'")
        refused(micro_batches(kind, start="w"), kind, "body", "'dw'")
        refused(micro_batches(kind, "total_out = Identity(dw)", first="0.5"), kind, "body", "begin with zeros")

    @pytest.mark.parametrize("after", ["", SGD], ids=["gradients", "SGD"])
    def test_a_gradient_that_is_clipped(self, kind: str, after: str) -> None:
        model = micro_batches(
            kind,
            nodes("total_out = total_in + Min(dw, limit)"),
            after=after,
            outputs=NEXT if after else "float[4,3] total",
        )
        refused(model, kind, "body", "dw")

    def test_a_gradient_that_is_squared(self, kind: str) -> None:
        refused(micro_batches(kind, nodes("total_out = total_in + dw * dw")), kind, "body", "dw")

    @pytest.mark.parametrize("dy", ["d * two_over_n", "d * t_i"], ids=["outside", "inside"])
    def test_a_gradient_that_the_next_round_squares(self, kind: str, dy: str) -> None:
        """The first round sees zeros there, wherever the scale enters."""
        body, backward = nodes("total_out = total_in * total_in + dw"), nodes(f"dy = {dy}; dw = x_i.T @ dy")
        refused(micro_batches(kind, body, backward=backward), kind, "body", "'total_in'")

    @pytest.mark.parametrize(
        "seed", ["Constant<value = float {0.083333336}>()", "Neg(minus)"], ids=["node", "computed"]
    )
    def test_a_seed_in_the_body(self, kind: str, seed: str) -> None:
        backward = f"seed = {seed} {nodes('dw = x_i.T @ (d * seed)')}"
        right(micro_batches(kind, backward=backward, constants=", float minus = {-0.083333336}"))

    def test_a_seed_that_is_an_initializer_of_the_body(self, kind: str) -> None:
        model = micro_batches(kind, backward=nodes("dw = x_i.T @ (d * seed)"))
        [body] = [attribute.g for node in model.graph.node for attribute in node.attribute if attribute.HasField("g")]
        body.initializer.append(onnx.helper.make_tensor("seed", onnx.TensorProto.FLOAT, [], [0.083333336]))
        report = right(model)
        assert [place.value for place in report.places] == ["seed"]

    def test_losses_of_rounds(self, kind: str) -> None:
        """There is no mean of them."""
        model = micro_batches(kind)
        [losses] = [value for value in model.graph.output if value.name == "loss"]
        losses.name, losses.type.tensor_type.shape.dim.add().dim_value = "losses", 5
        refused(model, kind, "body", "losses", "mean")
        with pytest.raises(gs.GraphscaleError, match="lose: the graph has no value of this name"):
            gs.scale(model, loss="lose")

    def test_a_gradient_that_no_sum_reads(self, kind: str) -> None:
        """A scale behind the body would protect nothing."""
        refused(
            micro_batches(kind, nodes("total_out = total_in * rate"), after=SGD, outputs=NEXT), "no place was found"
        )

    def test_a_loss_that_reads_the_gradients_before(self, kind: str) -> None:
        step = nodes("loss_i = ReduceMean(d * d, keepdims=0) + ReduceSum(total_in, keepdims=0)")
        model = micro_batches(kind, forward=nodes("d = x_i @ w - t_i") + step)
        refused(model, kind, "body", "loss_i")

    def test_non_finite_gradients_that_are_left_out(self, kind: str) -> None:
        body = nodes("total_out = total_in + Where(IsNaN(dw), zeros, dw)")
        refused(micro_batches(kind, body), kind, "body", "dw")

    def test_a_gradient_plus_weights(self, kind: str) -> None:
        """Weight decay in the body: a share of degree 0 in a sum of degree 1."""
        refused(micro_batches(kind, nodes("total_out = total_in + dw + w * rate")), kind, "body")


class TestLoops:
    def test_a_number_of_rounds_that_is_fed(self) -> None:
        model = micro_batches("Loop", rounds="count", inputs="float[4,3] w, int64 count")
        for count in (1, 4):
            right(model, feeds=feeds_for(model, count=count))

    def test_the_loss_ends_it(self) -> None:
        model = micro_batches("Loop", going=nodes("going = Greater(loss_i, rate)"))
        right(model)

    def test_the_gradient_ends_it(self) -> None:
        going = nodes("going = Greater(ReduceMax(dw, keepdims=0), rate)")
        refused(micro_batches("Loop", going=going), "Loop", "body", "'dw'")


WHOLE = """
    h_THEN = MatMul(x, w)
    d_THEN = Sub(h_THEN, t)
    dy_THEN = Mul(d_THEN, two_over_n)
    xt_THEN = Transpose<perm = [1, 0]>(x)
"""


def branches(then: str, otherwise: str, after: str = "", outputs: str = "float[4,3] dw") -> onnx.ModelProto:
    """A loss outside, and an If whose branches give `dw`; each branch calls it `out`."""
    bodies = []
    for name, body in (("then", then), ("else", otherwise)):
        text = body.replace("THEN", name).replace("out =", f"out_{name} =")
        bodies.append(f"{name}_branch = b_{name} () => (float[4,3] out_{name}) {{ {text} }}")
    values = f"float[4,3] zeros = {numbers(12)}, float two_over_n = {{0.083333336}}, float tenth = {{0.1}}"
    return parse(f"""
        <ir_version: 10, opset_import: ["" : 20]>
        branches (float[8,4] x, float[8,3] t, float[4,3] w, bool flag) => (float loss, {outputs})
        <{values}> {{
            y = MatMul(x, w) d = Sub(y, t) square = Mul(d, d) loss = ReduceMean<keepdims = 0>(square)
            dw = If(flag) <{", ".join(bodies)}> {after}
        }}
    """)


GRADIENT = f"{WHOLE} out = MatMul(xt_THEN, dy_THEN)"


class TestBranches:
    @pytest.mark.parametrize("flag", [True, False])
    def test_a_backward_pass_or_zeros(self, flag: bool) -> None:
        model = branches(GRADIENT, "out = Identity(zeros)")
        assert gs.scale(model).report.contractions == 1
        feeds = feeds_for(model, flag=flag)
        expected, _ = run_once(model, feeds, EXACT)
        actual, _ = run_once(gs.scale(model, 1024).model, feeds, EXACT)
        assert_all_same_bits(actual, expected)

    def test_a_backward_pass_in_each(self) -> None:
        """The other one is of half the loss."""
        half = GRADIENT.replace("two_over_n", "half_n").replace("d_THEN =", "half_n = Mul(two_over_n, tenth) d_THEN =")
        model = branches(GRADIENT, half)
        for flag in (True, False):
            right(model, 2, feeds=feeds_for(model, flag=flag))

    def test_an_optimizer_outside(self) -> None:
        model = branches(GRADIENT, "out = Identity(zeros)", nodes("w_next = w - dw * tenth"), NEXT)
        right(model, feeds=feeds_for(model, flag=True))

    @pytest.mark.parametrize("flag", [True, False])
    def test_a_backward_pass_without_contractions_in_the_other(self, flag: bool) -> None:
        """No demand reaches its constants, and both must scale."""
        sums = f"{WHOLE} r_THEN = ReduceSum(xt_THEN, one) c_THEN = ReduceSum(dy_THEN, none) out = Mul(r_THEN, c_THEN)"
        model = branches(GRADIENT, sums)
        model.graph.initializer.extend(
            onnx.numpy_helper.from_array(np.array([axis]), name) for name, axis in (("one", 1), ("none", 0))
        )
        right(model, feeds=feeds_for(model, flag=flag))

    def test_a_branch_of_numbers(self) -> None:
        """Decay in place of a gradient: no factor comes out of that."""
        refused(branches(GRADIENT, "out = Mul(w, tenth)"), "If", "body")

    def test_a_branch_that_clips(self) -> None:
        clipped = f"{WHOLE} g_THEN = MatMul(xt_THEN, dy_THEN) out = Min(g_THEN, tenth)"
        refused(branches(clipped, "out = Identity(zeros)"), "If", "body", "g_then")


@pytest.mark.parametrize(("term", "accepted"), [("Mul(total_in, tenth)", True), ("Mul(total_in, dh)", False)])
def test_a_cotangent_of_the_main_graph(term: str, accepted: bool) -> None:
    """The second round multiplies a sum of gradients by the cotangent: the body cannot be scaled, and is left alone."""
    model = parse(f"""
        <ir_version: 10, opset_import: ["" : 20]>
        rounds (float[8,4] x, float[8,4] t, float[4,4] w) => (float loss, float[8,4] dx)
        <int64[2] shape = {{8, 4}}, float two_over_n = {{0.0625}}, float tenth = {{0.1}}, int64 three = {{3}},
         bool go = {{1}}> {{
            y = MatMul(x, w) d = Sub(y, t) square = Mul(d, d) loss = ReduceMean<keepdims = 0>(square)
            dy = Mul(d, two_over_n) wt = Transpose<perm = [1, 0]>(w) dh = MatMul(dy, wt) zeros = ConstantOfShape(shape)
            dx = Loop(three, go, zeros) <body = round (int64 i, bool more, float[8,4] total_in)
                => (bool going, float[8,4] total_out)
                {{ going = Identity(more) term = {term} dx_i = MatMul(dh, w) total_out = Add(term, dx_i) }}>
        }}
    """)
    if accepted:
        right(model, 2)
    else:
        refused(model, "'dx'", "no certain role")
