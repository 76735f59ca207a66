"""If, Loop, Scan and model-local functions: their bodies hold contractions, or read values of the small type."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

import graphscale as gs
from tests.analysis.recurrent import recurrent_step
from tests.analysis.test_control_flow import (
    FUNCTIONS,
    ROWS,
    TestFunctions,
    choice,
    step_with_activations,
    step_with_products,
)
from tests.build import BACKWARD, FORWARD, feeds_for, step
from tests.conftest import OPTIMIZATION_LEVELS, Arrays, Level, run_once
from tests.passes.casting.borders import assert_well_cast, dtypes_in, is_ours, nodes_in
from tests.passes.casting.rounding import rounded
from tests.passes.casting.test_choice import ops
from tests.passes.casting.test_lists import said_or_ran

pytestmark = pytest.mark.sample(1)

FLOAT, FLOAT16 = onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16


@pytest.fixture(params=[True, False], ids=["then", "else"])
def flag(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def check(model: onnx.ModelProto, *, low: bool = True, **given: object) -> gs.AutocastModel:
    """Typed and emulated: valid, well cast, runs at every level, computes and scales as the original; the typed one."""
    onnx.checker.check_model(model)
    feeds = feeds_for(model, **given)
    expected, _ = run_once(model, feeds)
    results = [gs.autocast(model, emulate=emulate) for emulate in (True, False)]
    for result in results:
        assert_well_cast(model, result)
        onnx.checker.check_model(result.model)
        onnx.shape_inference.infer_shapes(result.model, check_type=True, strict_mode=True)
        assert (result.report.low_nodes > 0) == low
        for level in OPTIMIZATION_LEVELS:
            assert_close(run_once(result.model, feeds, level)[0], expected)
        scaled = gs.scale(result.model, 1024)
        assert scaled.report.coverage == 1.0
        assert_close(run_once(scaled.model, feeds, Level.ORT_DISABLE_ALL)[0], expected)
    assert results[0].report.ops == results[1].report.ops
    return results[1]


def assert_close(actual: Arrays, expected: Arrays) -> None:
    for name, value in expected.items():
        atol = 5e-3 * max(np.abs(value).max(), 1e-3)
        np.testing.assert_allclose(actual[name], value, rtol=0, atol=atol, err_msg=name)


class TestIf:
    def test_around_an_activation(self, flag: bool) -> None:
        check(step_with_activations(), flag=flag)

    def test_around_contractions(self, flag: bool) -> None:
        """One of the values from outside is in the small type already."""
        result = check(step_with_products(), flag=flag)
        assert ops(result)["MatMul"] == (6, 0)

    def test_a_layer_in_a_branch(self, flag: bool) -> None:
        """Two products in the branch with a low value between them: no cast stands there."""
        layer = "k = MatMul(h, inner) q = Relu(k) k2 = MatMul(q, inner) out = Tanh(k2)"
        layer = choice("a", layer, "out = Tanh(h)")
        model = step(layer=layer, slope="slope = Sub(one, a)", inputs="bool flag, float[5,5] inner")
        result = check(model, flag=flag)
        assert (ops(result)["MatMul"], ops(result)["Relu"]) == ((7, 0), (1, 0))
        body = next(node for node in result.model.graph.node if node.op_type == "If").attribute[0].g
        inside = [node.op_type for node in nodes_in(body)]
        assert inside.index("Relu") == inside.index("MatMul") + 1
        assert sum(name == "inner" for node in nodes_in(result.model.graph) for name in node.input) == 1

    def test_a_low_value_read_in_a_branch(self, flag: bool) -> None:
        """`h` is float16, and the exponential of it in the branch reads it in float32."""
        branches = choice("b", "out = Exp(h)", "out = Exp(g)")
        layer = f"g = Relu(h) {branches} c = MatMul(g, inner) a = Add(b, c)"
        model = step(layer=layer, inputs="bool flag, float[5,5] inner")
        result = check(model, flag=flag)
        dtypes = dtypes_in(result.model)
        assert (dtypes["h"], dtypes["g"]) == (FLOAT16, FLOAT16)

    def test_the_last_layer_in_a_branch(self, flag: bool) -> None:
        """The loss comes behind it: what follows the If is the head, not the If."""
        forward = FORWARD.replace(
            "y = MatMul(a, w2)", choice("y", "out = MatMul(a, w2)", "out = MatMul(h, w2)", "float[8,3]")
        )
        result = check(step(forward=forward, inputs="bool flag"), flag=flag)
        assert ops(result)["MatMul"] == (6, 0)
        assert ops(result)["ReduceMean"] == (0, 1)

    def test_a_branch_that_gives_a_constant(self, flag: bool) -> None:
        zeros = "out = Constant<value = float[8,5] {" + ", ".join(["0.1"] * 40) + "}>()"
        layer = choice("a", "out = Tanh(h)", zeros)
        check(step(layer=layer, slope="slope = Sub(one, a)", inputs="bool flag"), flag=flag)

    @pytest.mark.full
    def test_nested(self, flag: bool) -> None:
        """A branch in a branch reads a value of the outer branch and one of the graph."""
        inner = choice("b", "out = MatMul(k, inner)", "out = Add(k, h)", flag="other")
        layer = choice("a", f"k = MatMul(h, inner) {inner} out = Tanh(b)", "out = Tanh(h)")
        for other in (True, False):
            model = step(layer=layer, inputs="bool flag, bool other, float[5,5] inner")
            check(model, flag=flag, other=other)


@pytest.mark.parametrize("kind", ["Scan", "Loop"])
class TestLoops:
    @pytest.mark.parametrize("zeros", ["initializers", "computed"])
    def test_backpropagation_through_time(self, kind: str, zeros: str) -> None:
        """The products of both bodies run in the small type; state and sums of gradients are carried in float32."""
        result = check(recurrent_step(kind, zeros))
        assert ops(result)["MatMul"] == (5, 0)
        for node in result.model.graph.node:
            if node.op_type == kind:
                body = node.attribute[-1].g if node.attribute[-1].HasField("g") else node.attribute[0].g
                kinds = {v.type.tensor_type.elem_type for v in (*body.input, *body.output)}
                assert FLOAT16 not in kinds

    def test_weights_are_cast_outside(self, kind: str) -> None:
        """A weight that the body reads is cast before the loop, once."""
        result = check(recurrent_step(kind))
        outside = [node.input[0] for node in result.model.graph.node if is_ours(node)]
        assert {"u", "v"} <= set(outside)
        assert len(outside) == len(set(outside))

    def test_with_sgd_inside(self, kind: str) -> None:
        nodes = "u_step = Mul(du, one) u_next = Sub(u, u_step) v_step = Mul(dv, one) v_next = Sub(v, v_step)"
        model = recurrent_step(kind, more=nodes, outputs="float[3,4] u_next, float[4,4] v_next")
        check(model)
        report = gs.scale(model, autocast="float16").report
        state = {state.input: state.output for state in report.state}
        assert (state["u"], state["v"]) == ("u_next", "v_next")

    def test_emulated_numbers(self, kind: str) -> None:
        """Each product in the body has rounded operands and a rounded result: a recurrence by hand, in numpy."""
        model = recurrent_step(kind)
        feeds = feeds_for(model)
        h = feeds["h0"]
        u, v = (rounded(feeds[name], "float16") for name in "uv")
        for x_t in feeds["x"]:
            xu = rounded(rounded(x_t, "float16") @ u, "float16")
            hv = rounded(rounded(h, "float16") @ v, "float16")
            h = np.tanh(xu + hv)
        loss = np.mean((h - feeds["t"]) ** 2)
        actual, _ = run_once(gs.autocast(model, emulate=True).model, feeds, Level.ORT_DISABLE_ALL)
        free, _ = run_once(model, feeds, Level.ORT_DISABLE_ALL)
        np.testing.assert_allclose(actual["loss"], loss, rtol=1e-6)
        assert abs(float(free["loss"]) - loss) > 2e-6 * loss


def test_a_loop_that_collects_products() -> None:
    """The rows of a product, one by one: a scan output."""
    backward = BACKWARD.replace("da = MatMul(dy, w2t)", f"{ROWS} da = Identity(rows)")
    result = check(step(backward=backward, constants="int64 eight = {8}, bool go = {1}"))
    assert ops(result)["MatMul"] == (5, 0)


def test_functions() -> None:
    """They are inlined, and cast as what they hold."""
    model = TestFunctions().model()
    assert "nets" in FUNCTIONS
    onnx.checker.check_model(model)
    expected, _ = run_once(model, feeds_for(model))
    plain = gs.autocast(step())
    for options in ({}, {"emulate": True}):
        result = gs.autocast(model, **options)
        assert any("inlined" in warning for warning in result.report.warnings)
        assert result.report.low_nodes == plain.report.low_nodes
        assert not result.model.functions
        onnx.checker.check_model(result.model)
        assert_close(run_once(result.model, feeds_for(model))[0], expected)
        assert gs.scale(result.model).report.coverage == 1.0


def test_allowing_what_has_bodies_is_harmless_or_refused(flag: bool) -> None:
    """--allow If: the types of its results are those of its bodies."""
    for operator in ("If", "Loop", "Scan"):
        assert operator in said_or_ran(step_with_activations(), operator, flag=flag)
    for kind in ("Scan", "Loop"):
        assert kind in said_or_ran(recurrent_step(kind), kind)


def test_a_body_without_types() -> None:
    """The bodies' values have no value_info; what they hold follows from what they read."""
    model = recurrent_step("Scan")
    for result in (gs.autocast(model), gs.autocast(model, emulate=True)):
        declared = {value.name for value in model.graph.value_info}
        assert not declared
        assert result.report.low_nodes >= 5
