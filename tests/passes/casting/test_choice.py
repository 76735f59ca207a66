"""The choice of nodes and the places of casts: weights once, the loss and the seed in float32, statistics too."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import onnx
import pytest

import graphscale as gs
from tests.build import BACKWARD, FORWARD, LINEAR_BACKWARD, feeds_for, linear_step, step
from tests.conftest import Level, load_example, run_once
from tests.passes.casting.borders import assert_well_cast, dtypes_in, is_ours
from tests.passes.casting.rounding import is_rounded, rounded, run_all_values

FLOAT, FLOAT16 = onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16


def cast(model: onnx.ModelProto, **options: Any) -> gs.AutocastModel:
    """The result, whose casts stand as they should, also if it is emulated."""
    result = gs.autocast(model, **options)
    assert_well_cast(model, result)
    emulated = gs.autocast(model, **{**options, "emulate": True})
    assert_well_cast(model, emulated)
    return result


def readers(model: onnx.ModelProto, name: str) -> list[str]:
    return [node.op_type for node in model.graph.node if name in node.input]


def ops(result: gs.AutocastModel) -> dict[str, tuple[int, int]]:
    return {op.op: (op.low, op.kept) for op in result.report.ops}


def reasons(result: gs.AutocastModel, op: str) -> dict[str, int]:
    return next(entry.reasons for entry in result.report.ops if entry.op == op)


class TestWeights:
    def test_cast_once_for_both_passes(self) -> None:
        """The forward product reads the weight, the backward one its transpose; the optimizer reads it in float32."""
        nodes = "u1 = Mul(dw1, rate) w1_next = Sub(w1, u1) u2 = Mul(dw2, rate) w2_next = Sub(w2, u2)"
        outputs = "float[4,5] w1_next, float[5,3] w2_next"
        result = cast(step(nodes, outputs=outputs, constants="float rate = {0.1}"))
        assert result.report.optimizer_nodes == 4
        model = result.model
        for name in ("w1", "w2"):
            assert sorted(readers(model, name)) == ["Cast", "Sub"]
        assert sorted(readers(model, "w2.float16")) == ["MatMul", "Transpose"]
        dtypes = dtypes_in(model)
        assert [dtypes[name] for name in ("w1", "w1_next", "dw1.float", "u1")] == [FLOAT] * 4
        assert [dtypes[name] for name in ("dw1", "w2t", "h")] == [FLOAT16] * 3

    def test_shared_by_two_layers(self) -> None:
        forward = FORWARD.replace(
            "y = MatMul(a, w2)", "k = MatMul(a, square_w) k2 = MatMul(k, square_w) y = MatMul(k2, w2)"
        )
        result = cast(step(forward=forward, inputs="float[5,5] square_w"))
        assert readers(result.model, "square_w") == ["Cast"]
        assert readers(result.model, "square_w.float16") == ["MatMul", "MatMul"]

    @pytest.mark.parametrize("shapes", [True, False], ids=["known shapes", "unknown shapes"])
    @pytest.mark.parametrize("weights", ["inputs", "initializers", "both"])
    def test_kept_as_they_are(self, weights: str, shapes: bool) -> None:
        """As inputs, as initializers, and as both; whether or not the gradients tell their shapes."""
        model = step()
        values = feeds_for(model)
        for name in ("w1", "w2"):
            if weights != "inputs":
                model.graph.initializer.append(onnx.numpy_helper.from_array(values[name], name))
            if weights == "initializers":
                model.graph.input.remove(next(value for value in model.graph.input if value.name == name))
        if not shapes:
            for output in model.graph.output[1:]:
                output.type.tensor_type.ClearField("shape")
        for result in (cast(model), gs.autocast(model, emulate=True)):
            kept = {tensor.name: tensor.data_type for tensor in result.model.graph.initializer}
            assert {kept.get(name, FLOAT) for name in ("w1", "w2")} == {FLOAT}

    def test_a_weight_of_one_number(self) -> None:
        """The slope of a PRelu, an initializer, with its gradient."""
        layer = "a = PRelu(h, slope1)"
        more = "gated = Mul(da, h) dslope = ReduceSum<keepdims = 0>(gated)"
        model = step(more, layer=layer, slope="slope = Sub(one, a)", outputs="float[4,5] dw1, float dslope")
        model.graph.initializer.append(onnx.numpy_helper.from_array(np.float32([0.1]), "slope1"))
        result = cast(model, loss="loss")
        assert {t.data_type for t in result.model.graph.initializer if t.name == "slope1"} == {FLOAT}

    def test_a_factor_that_is_cast_from_integers(self) -> None:
        """The cast stays float32, but computed nothing in it: the product follows its neighbours."""
        layer = "mask1 = Cast<to = 1>(mask) a = Mul(h, mask1)"
        slope = "slope = Identity(mask1)"
        assert ops(cast(step(layer=layer, slope=slope, inputs="bool[8,5] mask")))["Mul"] == (
            2,
            2,
        )  # those of the loss and its seed stay

    def test_a_contraction_alone(self) -> None:
        """Nothing between the casts: each operand is cast, and the result back."""
        result = cast(linear_step())
        assert ops(result)["MatMul"] == (2, 0)
        assert result.report.casts == 5  # x, w, dy; y and dw back

    def test_gradients_return_before_they_are_unscaled(self) -> None:
        result = gs.scale(step(), autocast="float16")
        makers = {name: node for node in result.model.graph.node for name in node.output}
        divisions = [n for n in result.model.graph.node if n.op_type == "Div"]
        assert len(divisions) == 2
        for node in divisions:
            maker = makers[node.input[0]]
            assert is_ours(maker)
            assert maker.attribute[0].i == FLOAT


class TestLossAndSeed:
    def test_the_loss_and_what_gives_it_stay_wide(self) -> None:
        result = cast(step())
        assert reasons(result, "ReduceMean") == {"the loss stays float32": 1}
        assert reasons(result, "Sub")["the loss stays float32"] == 1
        dtypes = dtypes_in(result.model)
        assert [dtypes[name] for name in ("loss", "square", "d", "dy")] == [FLOAT] * 4

    @pytest.mark.parametrize(
        "ending",
        [
            'loss = Einsum<equation = "ij,ij->">(d, d)',
            "flat = Reshape(d, row) turned = Transpose(flat) sum = MatMul(flat, turned) loss = Reshape(sum, none)",
            "flat = Reshape(d, row) turned = Transpose(flat) sum = Gemm(flat, turned) loss = Squeeze(sum)",
        ],
        ids=["einsum", "matmul", "gemm"],
    )
    @pytest.mark.parametrize("shapes", [True, False], ids=["known shapes", "unknown shapes"])
    def test_a_loss_that_a_contraction_gives(self, ending: str, shapes: bool) -> None:
        model = linear_step(
            forward=f"y = MatMul(x, w) d = Sub(y, t) {ending}", constants="int64[2] row = {1, -1}, int64[0] none = {}"
        )
        model = onnx.shape_inference.infer_shapes(model) if shapes else model
        result = cast(model)
        dtypes = dtypes_in(result.model)
        assert (dtypes["loss"], dtypes["d"], dtypes["dy"]) == (FLOAT, FLOAT, FLOAT)
        assert ops(result)["MatMul"][0] == 2
        values = run_all_values(gs.autocast(model, emulate=True).model, feeds_for(model), Level.ORT_DISABLE_ALL)
        assert not is_rounded(values["d"], "float16")
        np.testing.assert_allclose(values["loss"], (values["d"].astype(np.float64) ** 2).sum(), rtol=1e-6)

    def test_where_the_scale_enters_is_float32(self) -> None:
        for name in ("pytorch/mlp_momentum", "pytorch/two_losses", "jax/attention", "pytorch/attention_adamw_clip"):
            model = gs.scale(load_example(name).model(), 1024, autocast="float16").model
            dtypes = dtypes_in(model)
            entered = [
                n
                for n in model.graph.node
                if ("graphscale.pass", "scale-loss") in {(e.key, e.value) for e in n.metadata_props}
            ]
            assert entered
            for node in entered:
                assert {dtypes.get(value, FLOAT) for value in (*node.input, *node.output)} == {FLOAT}, name

    @pytest.mark.parametrize("way", [{"emulate": True}, {}], ids=["emulated", "typed"])
    def test_a_scale_of_two_to_the_24_does_not_overflow_by_itself(self, way: dict[str, Any]) -> None:
        """It is no float16 number, and need not be: the cotangents fit, times the scale, and so do the gradients."""
        model = linear_step()
        # In eighths, so that the product is exact.
        feeds = {name: np.round(8 * value) / np.float32(8) for name, value in feeds_for(model).items()}
        y = feeds["x"] @ feeds["w"]
        feeds["t"] = y + np.float32(2**-9)
        result = gs.scale(gs.autocast(model, **way).model, 2.0**24, skip_nonfinite=True)
        outputs, _ = run_once(result.model, feeds, Level.ORT_DISABLE_ALL)
        assert outputs["all_finite"]
        expected = run_once(model, feeds)[0]["dw"]
        np.testing.assert_allclose(outputs["dw"], expected, rtol=0, atol=2e-3 * np.abs(expected).max())
        if way:  # Only a real overflow overflows; one that is typed, on a CPU, does not.
            too_far, _ = run_once(result.model, {**feeds, "t": y + np.float32(1)}, Level.ORT_DISABLE_ALL)
            assert not too_far["all_finite"]

    def test_a_first_cotangent_that_is_a_cast(self) -> None:
        """Of a comparison: the scale enters in front of the rounding, and what overflows there does so."""
        model = linear_step(
            forward="y = MatMul(x, w) c = Relu(y) loss = ReduceSum<keepdims = 0>(c)",
            backward=LINEAR_BACKWARD.replace("dy = Mul(d, two_over_n)", "on = Greater(y, zero) dy = Cast<to = 1>(on)"),
            constants="float zero = {0}",
        )
        model = onnx.shape_inference.infer_shapes(model)
        feeds = feeds_for(model)
        feeds["x"] *= np.float32(2**-13)  # So that the gradient fits, times 2**24.
        expected = run_once(model, feeds)[0]["dw"]
        for scale, finite in ((2.0**12, True), (2.0**24, False)):
            result = gs.scale(gs.autocast(model, emulate=True).model, scale, skip_nonfinite=True)
            outputs, _ = run_once(result.model, feeds, Level.ORT_DISABLE_ALL)
            assert outputs["all_finite"] == finite
            if finite:
                np.testing.assert_allclose(outputs["dw"], expected, rtol=0, atol=2e-3 * np.abs(expected).max())

    def test_the_expanded_seed_of_a_mean(self) -> None:
        """dy = 1 / 24 in every element: times 2**20 it is 43690, and fits."""
        model = linear_step(
            forward="y = MatMul(x, w) loss = ReduceMean<keepdims = 0>(y)",
            backward=LINEAR_BACKWARD.replace("Mul(d,", "Mul(e,").replace(
                "dy =", "n = Shape(y) e = Expand(seed, n) dy ="
            ),
            constants="float seed = {0.5}",
        )
        feeds = {name: value * np.float32(0.1) for name, value in feeds_for(model).items()}
        result = gs.scale(gs.autocast(model, emulate=True).model, 2.0**20, skip_nonfinite=True)
        outputs, _ = run_once(result.model, feeds, Level.ORT_DISABLE_ALL)
        assert outputs["all_finite"]
        np.testing.assert_allclose(outputs["dw"], run_once(model, feeds)[0]["dw"], rtol=0, atol=1e-4)


class TestPropagation:
    def test_what_stands_between_two_contractions(self) -> None:
        """One node of each kind between two products: nothing is cast in between."""
        layer = "p = Add(h, b) q = Relu(p) a = Tanh(q)"
        result = cast(step(layer=layer, inputs="float[5] b"))
        assert (ops(result)["Add"], ops(result)["Relu"], ops(result)["Tanh"]) == ((1, 0), (1, 0), (1, 0))
        assert readers(result.model, "h") == ["Add"]
        assert dtypes_in(result.model)["q"] == FLOAT16

    @pytest.mark.full
    def test_behind_a_denied_one(self) -> None:
        """The result of an exponential is in float32, and so are its readers, up to the next contraction."""
        layer = "e = Exp(h) p = Add(e, one) q = Relu(p) a = Tanh(q)"
        result = cast(step(layer=layer))
        assert ops(result)["Exp"] == (0, 1)
        assert reasons(result, "Add") == {"it reads the result of a float32 operator": 1}
        assert dtypes_in(result.model)["a"] == FLOAT

    def test_a_move_behind_a_denied_one_takes_the_cast(self) -> None:
        """Softmax, transposed, and then two products: it is cast once, before or after the move."""
        layer = "s = Softmax(h) st = Transpose(s) k = MatMul(square_w, st) kt = Transpose(k) a = Add(kt, s)"
        result = cast(step(layer=layer, inputs="float[5,5] square_w"))
        assert (
            sum(source in ("s", "st") for node in result.model.graph.node if is_ours(node) for source in node.input)
            == 1
        )

    def test_nothing_to_do(self) -> None:
        """No contraction, no mixed precision."""
        model = linear_step(
            forward="y = Mul(x, w) d = Sub(y, t) square = Mul(d, d) loss = ReduceMean<keepdims = 0>(square)",
            backward="dy = Mul(d, two_over_n) dw = Mul(dy, x)",
            inputs="float[8,3] w",
            outputs="float[8,3] dw",
        )
        model.graph.input[0].type.tensor_type.shape.dim[1].dim_value = 3
        result = cast(model)
        assert (result.report.low_nodes, result.report.casts) == (0, 0)
        assert any("no node runs in the small type" in warning for warning in result.report.warnings)

    @pytest.mark.parametrize(("rows", "low"), [("256", True), ("257", False), ("N", False)])
    def test_long_sums_stay_wide(self, rows: str, low: bool) -> None:
        """More than 256 elements, or who knows how many."""
        layer = "big = MatMul(wide, k) z = ReduceSum<keepdims = 1>(big, axes) v = MatMul(z, k) a = Add(h, v)"
        model = step(layer=layer, inputs=f"float[{rows},5] wide, float[5,5] k", constants="int64[1] axes = {0}")
        result = cast(onnx.shape_inference.infer_shapes(model))
        assert ops(result)["ReduceSum"] == (low, not low)
        if not low:
            assert list(reasons(result, "ReduceSum")) == ["it sums more than 256 elements"]

    def test_kept_nodes(self) -> None:
        model = step(forward=FORWARD.replace("h = MatMul", "[first] h = MatMul"))
        result = cast(model, keep=["first"])
        assert reasons(result, "MatMul") == {"kept by the user": 1}
        assert dtypes_in(result.model)["h"] == FLOAT


class TestStatistics:
    def test_layer_normalization(self) -> None:
        """The mean and the spread that the backward pass reads are float32, and computed in it."""
        layer = "n, mean, spread = LayerNormalization<axis = -1>(h, g, b) a = Tanh(n)"
        model = step(
            "stat = Add(mean, spread)",
            layer=layer,
            inputs="float[5] g, float[5] b",
            outputs="float[4,5] dw1, float[8,1] stat",
        )
        result = cast(model)
        dtypes = dtypes_in(result.model)
        assert [dtypes[name] for name in ("n", "mean", "spread", "stat")] == [FLOAT16, FLOAT, FLOAT, FLOAT]
        emulated = gs.autocast(model, emulate=True).model
        values = run_all_values(emulated, feeds_for(model), Level.ORT_DISABLE_ALL)
        assert not is_rounded(values["mean"], "float16")
        assert not is_rounded(values["spread"], "float16")

    def test_statistics_of_float16_are_left_alone(self) -> None:
        layer = "n, mean, spread = LayerNormalization<axis = -1, stash_type = 16>(h, g, b) a = Tanh(n)"
        result = cast(step(layer=layer, inputs="float[5] g, float[5] b"))
        assert reasons(result, "LayerNormalization") == {"its statistics are not float32": 1}

    @pytest.mark.parametrize("opset", [12, 13, 14, 15, 20])
    def test_batch_normalization(self, opset: int) -> None:
        """In training: scale, bias, running statistics stay float32 where ONNX lets them; else the node does."""
        inputs = "float[5] g, float[5] b, float[5] mean, float[5] var"
        call = "BatchNormalization<training_mode = 1>" if opset >= 14 else "BatchNormalization"
        results = "n, mean_next, var_next" if opset >= 14 else "n"
        layer = f"{results} = {call}(h, g, b, mean, var) a = Tanh(n)"
        outputs = "float[4,5] dw1" + (", float[5] mean_next, float[5] var_next" if opset >= 14 else "")
        model = step(layer=layer, inputs=inputs, outputs=outputs, opset=opset, ir_version=8)
        result = cast(model)
        onnx.shape_inference.infer_shapes(result.model, check_type=True, strict_mode=True)
        low = opset >= 15
        assert ops(result)["BatchNormalization"] == (low, not low)
        assert dtypes_in(result.model)["n"] == (FLOAT16 if low else FLOAT)
        feeds = feeds_for(model, var=np.ones(5, np.float32))
        actual, _ = run_once(result.model, feeds)
        expected, _ = run_once(model, feeds)
        for name, value in expected.items():
            np.testing.assert_allclose(actual[name], value, rtol=0, atol=5e-3 * np.abs(value).max(), err_msg=name)


def test_squares_stay_wide() -> None:
    """A square leaves the range soonest: h * h, a ** 2."""
    layer = "q = Mul(h, h) k = MatMul(q, square_w) p = Pow(k, one) a = Tanh(p)"
    result = cast(step(layer=layer, inputs="float[5,5] square_w"))
    assert "a square leaves the range of float16" in reasons(result, "Mul")
    assert ops(result)["Pow"] == (0, 1)


def test_bounds_that_are_attributes() -> None:
    """Clip has its bounds in float32 attributes up to opset 10; Clip without attributes is cast."""
    model = step(
        layer="c = Clip<max = 1.5>(h) e = Clip<min = 0.0>(c) k = MatMul(e, s) f = Clip(k) m = MatMul(f, s) a = Tanh(m)",
        inputs="float[5,5] s",
        opset=10,
    )
    result = cast(model)
    assert reasons(result, "Clip") == {"its bounds are attributes, which are float32": 2}
    assert ops(result)["Clip"] == (1, 2)


def test_several_results_in_and_out() -> None:
    """Both halves of a split are low; one of them is also an output, the other read by the loss."""
    layer = "top, rest = Split<axis = 0, num_outputs = 2>(h) joined = Concat<axis = 0>(rest, top) a = Tanh(joined)"
    model = step("shown = Exp(rest)", layer=layer, outputs="float[4,5] dw1, float[4,5] top, float[4,5] shown")
    roles = {"metrics": ["top", "shown"]}
    result = cast(model, roles=roles)
    assert ops(result)["Split"] == (1, 0)
    dtypes = dtypes_in(result.model)
    assert (dtypes["top"], dtypes["rest"], dtypes["rest.float"]) == (FLOAT, FLOAT16, FLOAT)
    feeds = feeds_for(model)
    emulated, _ = run_once(gs.autocast(model, emulate=True, roles=roles).model, feeds)
    h = rounded(rounded(feeds["x"], "float16") @ rounded(feeds["w1"], "float16"), "float16")
    np.testing.assert_array_equal(emulated["top"], h[:4])
    np.testing.assert_allclose(emulated["shown"], np.exp(h[4:]), rtol=1e-6)


def test_a_value_that_is_an_output_and_read_on() -> None:
    """`a` goes out in float32 under its name, and on in float16."""
    model = step(outputs="float[4,5] dw1, float[5,3] dw2, float[8,5] a, float[8,5] h")
    result = cast(model)
    dtypes = dtypes_in(result.model)
    assert [dtypes[name] for name in ("a", "h", "a.low", "h.low")] == [FLOAT, FLOAT, FLOAT16, FLOAT16]
    actual, _ = run_once(gs.autocast(model, emulate=True).model, feeds_for(model))
    assert is_rounded(actual["a"], "float16")


def test_names_that_are_taken() -> None:
    """A graph that has used the names of the casts already."""
    taken = '"x.float16" = Identity(x) h = MatMul("x.float16", w1)'
    model = step(forward=FORWARD.replace("h = MatMul(x, w1)", taken))
    model.graph.node[0].name = "graphscale/autocast/w1.float16"
    result = cast(model)
    names = Counter(name for node in result.model.graph.node for name in (*node.output, node.name) if name)
    assert max(names.values()) == 1
    onnx.checker.check_model(result.model)


def test_bfloat16() -> None:
    """It says that it needs no loss scale, and runs where there are kernels for it; emulated everywhere."""
    model = step()
    for target in ("onnx", "ort-training"):
        with pytest.raises(gs.errors.TargetError, match="emulate"):
            gs.autocast(model, "bfloat16", target=target)
        assert gs.autocast(model, "bfloat16", target=target, emulate=True).report.low_nodes
    for target in ("ort-cuda", "ort-training-cuda"):
        report = gs.autocast(model, "bfloat16", target=target).report
        assert report.warnings == ("bfloat16 has the range of float32: no loss scale is needed",)
    assert gs.autocast(model).report.warnings == ()
    values = run_all_values(gs.autocast(model, "bfloat16", emulate=True).model, feeds_for(model), Level.ORT_DISABLE_ALL)
    assert is_rounded(values["a.rounded"], "bfloat16")
    assert not is_rounded(values["a"], "bfloat16")


def test_backward_only_is_the_seed_up_to_the_first_contraction() -> None:
    """A residual connection around it leads on to the next one, and that is no seed."""
    assert "Transpose" in LINEAR_BACKWARD
    result = cast(step(backward=BACKWARD))
    assert reasons(result, "Mul")["the seed of the backward pass stays float32"] == 1
    assert ops(result)["Transpose"] == (3, 0)
