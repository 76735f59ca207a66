"""Graphs that are in a small type already, in part or whole, in float64, without types, with weights elsewhere."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest

import graphscale as gs
from graphscale import errors
from tests.build import BACKWARD, FORWARD, feeds_for, linear_step, parse, step
from tests.conftest import MODEL_NAMES, Level, load_example, run_once
from tests.passes.cases import float16
from tests.passes.casting.borders import assert_well_cast, dtypes_in, is_ours, target_of
from tests.passes.casting.test_choice import cast, ops

FLOAT, FLOAT16 = onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16
# Without declared types ONNX Runtime itself dies while it loads these.
NEED_TYPES = ("ort/conv", "ort/indexing")


class TestSmallAlready:
    @pytest.mark.parametrize("optimizer", [False, True])
    @pytest.mark.parametrize("options", [{}, {"emulate": True}], ids=["typed", "emulated"])
    def test_forward_and_backward_in_float16(self, optimizer: bool, options: dict[str, bool]) -> None:
        """It is unchanged, and the report says so."""
        model = float16(optimizer)
        result = gs.autocast(model, **options)
        assert (result.report.low_nodes, result.report.casts) == (0, 0)
        assert any("compute in a small type already" in warning for warning in result.report.warnings)
        untouched = ir.to_proto(ir.from_proto(model)).graph
        assert result.model.graph.SerializeToString() == untouched.SerializeToString()
        assert gs.scale(result.model).report.coverage == 1.0

    def test_bfloat16(self) -> None:
        text = onnx.printer.to_text(float16()).replace("float16", "bfloat16").replace("to: int = 10", "to: int = 16")
        model = parse(text.replace("11605", "15787"))
        assert FLOAT16 not in set(dtypes_in(model).values())
        for options in ({}, {"emulate": True}, {"dtype": "bfloat16", "emulate": True}):
            result = gs.autocast(model, **options)
            assert (result.report.low_nodes, result.report.casts) == (0, 0)
            assert any("small type already" in warning for warning in result.report.warnings)

    def test_one_layer_of_two(self) -> None:
        """The first layer is in float16 by the exporter's own casts, the second is not: it is cast, the first left."""
        forward = FORWARD.replace(
            "h = MatMul(x, w1)",
            "x16 = Cast<to = 10>(x) w16 = Cast<to = 10>(w1) h16 = MatMul(x16, w16) h = Cast<to = 1>(h16)",
        )
        backward = BACKWARD.replace(
            "xt = Transpose<perm = [1, 0]>(x)", "xt = Transpose<perm = [1, 0]>(x16) dh16 = Cast<to = 10>(dh)"
        )
        backward = backward.replace("dw1 = MatMul(xt, dh)", "dw1h = MatMul(xt, dh16) dw1 = Cast<to = 1>(dw1h)")
        model = onnx.shape_inference.infer_shapes(step(forward=forward, backward=backward))
        onnx.checker.check_model(model)
        result = cast(model)
        assert ops(result)["MatMul"] == (3, 0)
        assert any(warning.startswith("6 nodes compute in a small type already") for warning in result.report.warnings)
        untyped = onnx.ModelProto.FromString(model.SerializeToString())
        del untyped.graph.value_info[:]
        assert gs.autocast(untyped).report.warnings == result.report.warnings
        actual, _ = run_once(gs.autocast(model, emulate=True).model, feeds_for(model), Level.ORT_DISABLE_ALL)
        expected, _ = run_once(model, feeds_for(model), Level.ORT_DISABLE_ALL)
        for name, value in expected.items():
            np.testing.assert_allclose(actual[name], value, rtol=0, atol=5e-3 * np.abs(value).max())
        scaled = gs.scale(result.model).report
        assert (scaled.coverage, scaled.missed) == (1.0, ())

    def test_a_cast_of_the_original_behind_a_low_value(self) -> None:
        """Values that the original casts to float16 are not cast to float32 first, or at least compute the same."""
        layer = "g = Relu(h) g16 = Cast<to = 10>(g) r16 = Tanh(g16) a = Cast<to = 1>(r16)"
        result = cast(step(layer=layer))
        run_once(result.model, feeds_for(step()))


class TestFloat64:
    def test_all_of_it(self) -> None:
        model = parse(onnx.printer.to_text(step()).replace("float", "double"))
        for options in ({}, {"emulate": True}, {"dtype": "bfloat16", "emulate": True}):
            with pytest.raises(errors.AutocastError, match=r"float64.*float32"):
                gs.autocast(model, **options)
            with pytest.raises(errors.AutocastError, match=r"float64.*float32"):
                gs.scale(model, autocast="float16")

    def test_a_part_of_it(self) -> None:
        """A loss in float64 behind a network in float32: the network is cast, float64 is left."""
        forward = FORWARD.replace(
            "d = Sub(y, t)\n    square = Mul(d, d)", "d = Sub(y, t) d64 = Cast<to = 11>(d) square = Mul(d64, d64)"
        ).replace("loss =", "loss64 =")
        model = step("loss = Cast<to = 1>(loss64)", forward=forward)
        result = cast(model)
        assert ops(result)["MatMul"] == (5, 0)
        dtypes = dtypes_in(result.model)
        assert (dtypes["square"], dtypes["loss64"]) == (onnx.TensorProto.DOUBLE,) * 2

    def test_between_two_products(self) -> None:
        layer = "wide = Cast<to = 11>(h) k = Sin(wide) a = Cast<to = 1>(k)"
        model = step(layer=layer)
        result = cast(model)
        assert dtypes_in(result.model)["k"] == onnx.TensorProto.DOUBLE
        run_once(result.model, feeds_for(model))


class TestWithoutTypes:
    @pytest.mark.sample(2)
    @pytest.mark.parametrize("name", [name for name in MODEL_NAMES if name not in NEED_TYPES])
    def test_models_without_value_info(self, name: str) -> None:
        """Dtypes then follow from the operators; as many contractions are taken as with them."""
        example = load_example(name)
        model = example.model()
        with_types = gs.autocast(model).report
        del model.graph.value_info[:]
        for options in ({}, {"emulate": True}):
            result = gs.autocast(model, **options)
            allowed = {op.op: op.low for op in result.report.ops if op.op in ("MatMul", "Gemm", "Conv", "Einsum")}
            assert allowed == {op.op: op.low for op in with_types.ops if op.op in allowed}
            outputs, _ = run_once(result.model, example.feeds, Level.ORT_DISABLE_ALL)
            for output, value in example.expected.items():
                assert outputs[output].dtype == value.dtype
            np.testing.assert_allclose(
                outputs["loss" if "loss" in outputs else next(iter(outputs))],
                example.expected.get("loss", next(iter(example.expected.values()))),
                rtol=1e-2,
            )

    def test_an_operand_whose_type_only_its_operator_tells(self) -> None:
        """OneHot has the type of its values, Range that of its limits, EyeLike that of its attribute."""
        layer = """
            table = OneHot<axis = -1>(picks, five, on_off)
            first = MatMul(table, inner)
            eye = EyeLike<dtype = 1>(inner)
            second = MatMul(first, eye)
            numbers = Range(nought, five_f, one)
            third = MatMul(second, inner)
            sum = Add(third, numbers)
            b = Tanh(h)
            a = Add(sum, b)
        """
        model = step(
            layer=layer,
            inputs="int64[8] picks, float[5,5] inner",
            constants="int64 five = {5}, float[2] on_off = {0, 1}, float nought = {0}, float five_f = {5}",
        )
        feeds = feeds_for(model, picks=np.arange(8) % 5)
        expected, _ = run_once(model, feeds)
        for options in ({}, {"emulate": True}):
            result = gs.autocast(model, **options)
            onnx.shape_inference.infer_shapes(result.model, check_type=True, strict_mode=True)
            actual, _ = run_once(result.model, feeds)
            np.testing.assert_allclose(actual["loss"], expected["loss"], rtol=1e-2)

    @pytest.mark.parametrize(
        ("operator", "layer"),
        [
            ("Where", "open = Greater(h, zero) a = Where(open, h, zero)"),
            ("Reshape", "size = Shape(h) a = Reshape(h, size)"),
            ("Expand", "size = Shape(h) a = Expand(h, size)"),
            (
                "Gather",
                "best = ArgMax<axis = 1, keepdims = 0>(h) first = Mul(best, none) a = Gather<axis = 0>(h, first)",
            ),
            ("Slice", "size = Shape(h) begin = Sub(size, size) a = Slice(h, begin, size)"),
        ],
    )
    def test_conditions_indices_and_shapes(self, operator: str, layer: str) -> None:
        """Values that can be no floats need no declared type."""
        model = step(layer=layer, slope="slope = Sub(one, a)", constants="float zero = {0}, int64 none = {0}")
        assert not model.graph.value_info
        result = cast(model)
        assert ops(result)[operator] == (1, 0)
        run_once(result.model, feeds_for(model))

    def test_an_operator_of_ones_own(self) -> None:
        """Its result's type is unknown: what reads it is not cast on a guess."""
        layer = "k = acme.Mix(x) h2 = MatMul(k, w1) h3 = Add(h, h2) a = Tanh(h3)"
        model = step(layer=layer, domains=["acme"])
        result = gs.autocast(model)
        dtypes = dtypes_in(result.model)
        for node in result.model.graph.node:
            if node.op_type == "MatMul":
                kinds = {dtypes.get(name) for name in node.input}
                assert kinds in ({FLOAT16}, {FLOAT}, {FLOAT, None}, {None}), node


class TestExternalWeights:
    def save(self, folder: Path) -> tuple[Path, onnx.ModelProto]:
        model = step()
        values = feeds_for(model)
        for name in ("w1", "w2"):
            model.graph.initializer.append(onnx.numpy_helper.from_array(values[name], name))
        whole = onnx.ModelProto()
        whole.CopyFrom(model)
        onnx.save_model(model, folder / "model.onnx", save_as_external_data=True, location="data", size_threshold=0)
        return folder / "model.onnx", whole

    @pytest.mark.parametrize("options", [{}, {"emulate": True}], ids=["typed", "emulated"])
    def test_they_stay_in_their_file(self, options: dict[str, bool], tmp_path: Path) -> None:
        path, whole = self.save(tmp_path)
        before = (tmp_path / "data").read_bytes()
        result = gs.autocast(path, **options)
        assert isinstance(result.model, ir.Model)
        kept = result.model.graph.initializers["w1"].const_value
        assert isinstance(kept, ir.ExternalTensor)
        result.save(tmp_path / "out.onnx")
        (tmp_path / "elsewhere").mkdir()
        result.save(tmp_path / "elsewhere" / "out.onnx")
        feeds = {name: value for name, value in feeds_for(whole).items() if name in ("x", "t")}
        expected, _ = run_once(gs.autocast(whole, **options).model, feeds, Level.ORT_DISABLE_ALL)
        for file in (tmp_path / "out.onnx", tmp_path / "elsewhere" / "out.onnx"):
            actual, _ = run_once(file, feeds, Level.ORT_DISABLE_ALL)
            for name, value in expected.items():
                np.testing.assert_array_equal(actual[name], value)
        assert (tmp_path / "data").read_bytes() == before


@pytest.mark.full
def test_opsets() -> None:
    """Every opset that ONNX Runtime executes here: operators without a float16 definition are unchanged."""
    for opset in range(10, 22):
        model = step(opset=opset, ir_version=5 if opset < 13 else 8)
        result = cast(model)
        onnx.checker.check_model(result.model)
        assert ops(result)["MatMul"] == (5, 0)
        run_once(result.model, feeds_for(model))
        bfloat16 = gs.autocast(model, "bfloat16", emulate=True)
        assert (bfloat16.report.low_nodes > 0) == (opset >= 13)


def test_an_output_that_is_an_input() -> None:
    """A weight that goes out as it came in is not touched."""
    model = linear_step("w_same = Identity(w)", outputs="float[4,3] dw, float[4,3] w_same")
    result = cast(model)
    (reader,) = (node for node in result.model.graph.node if node.op_type == "Identity")
    assert list(reader.input) == ["w"]
    assert {target_of(node) for node in result.model.graph.node if is_ours(node)} == {FLOAT, FLOAT16}


def test_an_unread_result_of_a_contraction() -> None:
    """A product that nothing reads: it is no part of the step, and stays."""
    model = linear_step("unread = MatMul(x, w)")
    assert_well_cast(model, gs.autocast(model))
    assert_well_cast(model, gs.autocast(model, emulate=True))


def test_the_same_value_twice() -> None:
    """Both operands of one node are one value: one cast serves both."""
    layer = "turned = Transpose(k) b = MatMul(k, turned) c = MatMul(b, b) a = MatMul(h, c)"
    result = cast(step(layer=layer, inputs="float[5,5] k"))
    assert ops(result)["MatMul"] == (8, 0)
