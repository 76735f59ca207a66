"""Names of constants are free: sessions, scaling and `strip` must not confuse them."""

from __future__ import annotations

import base64
import zlib
from collections.abc import Callable

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import helper, numpy_helper

import graphscale as gs
from graphscale.graph.original import ORIGINAL_KEY
from tests.build import feeds_for, linear_step
from tests.conftest import load_example, run_once, with_initializers

ZERO = "graphscale/zero.float"  # of the finite check


def _renamed(model: onnx.ModelProto, names: dict[str, str]) -> onnx.ModelProto:
    changed = onnx.ModelProto.FromString(model.SerializeToString())
    for tensor in changed.graph.initializer:
        tensor.name = names.get(tensor.name, tensor.name)
    for node in changed.graph.node:
        node.input[:] = [names.get(name, name) for name in node.input]
    return changed


def _scaled(name: str) -> tuple[onnx.ModelProto, onnx.ModelProto]:
    """Return a step as onnx_ir writes it, for records of equal text, and the scaled step."""
    original = ir.to_proto(ir.from_proto(load_example(name).model()))
    model = gs.scale(original).model
    assert isinstance(model, onnx.ModelProto)
    return original, model


def _large_step() -> onnx.ModelProto:
    model = linear_step("step = Mul(dw, rate) w_next = Sub(w, step)", outputs="float[4,3] w_next")
    model.graph.initializer.append(numpy_helper.from_array(np.float32(0.1), "rate"))
    sizes = {4: 512, 3: 512}
    for value in (*model.graph.input, *model.graph.output):
        for axis in value.type.tensor_type.shape.dim:
            axis.dim_value = sizes.get(axis.dim_value, axis.dim_value)
    del model.graph.value_info[:]
    return onnx.shape_inference.infer_shapes(model)


@pytest.mark.full
def test_a_session_takes_no_constant_for_a_zero() -> None:
    original = _large_step()
    scaled = gs.scale(original, gs.DynamicLossScale(2.0**15)).model
    assert isinstance(scaled, onnx.ModelProto)
    renamed = _renamed(scaled, {ZERO: "zero", "rate": ZERO})
    assert gs.verify(original, renamed, runs=1).ok
    feeds = feeds_for(original)
    feeds["x"][:], feeds["t"][:], feeds["w"][:] = 1e18, -1e18, 0  # the gradients are infinite, and none is NaN
    for model in (scaled, renamed):
        with gs.Session(model, state={"w": feeds["w"]}) as session:
            result = session.step({"x": feeds["x"], "t": feeds["t"]})
            assert not result["all_finite"] and session.loss_scale == 2.0**14
            assert np.array_equal(session.state_dict()["w"], feeds["w"])


@pytest.mark.parametrize("target", ["onnx", pytest.param("ort-training-cuda", marks=pytest.mark.training)])
def test_scaling_takes_no_constant_for_a_zero(target: str) -> None:
    original = linear_step("step = Mul(dw, rate) w_next = Sub(w, step)", outputs="float[4,3] w_next")
    feeds = feeds_for(original)
    original.graph.initializer.append(numpy_helper.from_array(np.float32(0.1), "rate"))
    original = _renamed(with_initializers(original, {"w": feeds["w"]}), {"rate": ZERO})
    scaled = gs.scale(original, target=target).model
    assert gs.verify(original, scaled, runs=1).ok
    if target == "onnx":
        assert isinstance(scaled, onnx.ModelProto)
        feeds["x"][:], feeds["t"][:] = 1e18, -1e18
        assert not run_once(scaled, feeds)[0]["all_finite"]


def _exchange(model: onnx.ModelProto) -> onnx.ModelProto:
    return _renamed(model, {"val_25": "val_26", "val_26": "val_25"})


def _leave_another(model: onnx.ModelProto, where: int | None = None) -> onnx.ModelProto:
    changed = _renamed(model, {"val_25": "momentum"})
    decoy = numpy_helper.from_array(np.float32(123), "val_25")
    tensors = [*changed.graph.initializer]
    tensors.insert(len(tensors) if where is None else where, decoy)
    del changed.graph.initializer[:]
    changed.graph.initializer.extend(tensors)
    return changed


@pytest.mark.parametrize("change", [_exchange, _leave_another, lambda model: _leave_another(model, 0)])
def test_strip_would_give_another_constant(change: Callable[[onnx.ModelProto], onnx.ModelProto]) -> None:
    original, scaled = _scaled("pytorch/mlp_momentum")
    held = {tensor.name: numpy_helper.to_array(tensor) for tensor in original.graph.initializer}
    assert held["val_25"] != held["val_26"]
    (check,) = gs.verify(original, change(scaled), runs=0).failures
    assert check.name == "metadata of the scaling"
    assert "the original has a constant 'val_25', which is" in check.detail


def test_a_constant_that_nothing_reads() -> None:
    original = linear_step("w_next = Sub(w, dw)", outputs="float[4,3] w_next")
    original.graph.initializer.append(numpy_helper.from_array(np.float32([1, 2]), "unread"))
    original = ir.to_proto(ir.from_proto(original))
    scaled = gs.scale(original).model
    assert isinstance(scaled, onnx.ModelProto)
    assert gs.verify(original, scaled, runs=0).ok
    (tensor,) = [each for each in scaled.graph.initializer if each.name == "unread"]
    tensor.CopyFrom(numpy_helper.from_array(np.float32([1, 3]), "unread"))
    (check,) = gs.verify(original, scaled, runs=0).failures
    assert check.detail == "the original has a constant 'unread', which is 3.0 at [1], and should be 2.0"


def _reverse(record: onnx.ModelProto) -> None:
    nodes = [*record.graph.node][::-1]
    del record.graph.node[:]
    record.graph.node.extend(nodes)


RECORDS: dict[str, tuple[Callable[[onnx.ModelProto], object], str]] = {
    "IR version": (lambda record: setattr(record, "ir_version", 11), "the IR version of the original is 11"),
    "order": (_reverse, "the original is not in topological order"),
}


@pytest.mark.parametrize("name", RECORDS)
def test_a_record_that_no_runtime_loads(name: str) -> None:
    original, scaled = _scaled("pytorch/mlp_momentum")
    damage, words = RECORDS[name]
    (entry,) = [entry for entry in scaled.metadata_props if entry.key == ORIGINAL_KEY]
    record = onnx.ModelProto.FromString(zlib.decompress(base64.b64decode(entry.value)))
    damage(record)
    entry.value = base64.b64encode(zlib.compress(record.SerializeToString())).decode()
    (check,) = gs.verify(original, scaled, runs=0).failures
    assert check.name == "metadata of the scaling" and words in check.detail, check


def _branches() -> onnx.ModelProto:
    """A step with a value `found` in two branches, of unknown size in the first."""
    return linear_step(
        """
        large = Greater(loss, limit)
        count = If(large) <
            then_branch = then () => (int64[2] b) { positive = Greater(d, limit) found = NonZero(positive)
                b = Shape(found) },
            else_branch = else () => (int64[2] a) { k = Constant<value = int64[2,3] {1, 1, 1, 1, 1, 1}>() found = Neg(k)
                a = ReduceSum<keepdims = 0>(found, axis) }
        >
        """,
        outputs="float[4,3] dw, int64[2] count",
        constants="float limit = {0}, int64[1] axis = {1}",
    )


@pytest.mark.parametrize(("sizes", "verdict"), [((2, 3), False), ((2, "unk__7"), True)], ids=str)
def test_a_size_of_the_other_branch(sizes: tuple[int | str, ...], verdict: bool) -> None:
    original = _branches()
    scaled = gs.scale(original).model
    assert isinstance(scaled, onnx.ModelProto)
    (node,) = [node for node in scaled.graph.node if node.op_type == "If"]
    (branch,) = [attribute.g for attribute in node.attribute if attribute.name == "then_branch"]
    branch.value_info.append(helper.make_tensor_value_info("found", onnx.TensorProto.INT64, sizes))
    report = gs.verify(original, scaled, runs=0)
    assert report.ok == verdict, report.checks
    assert verdict or "'found' is declared of shape [2,3], and should be of [2,unk__" in report.checks[0].detail


def test_what_inference_finds_in_branches_is_no_alarm() -> None:
    original = _branches()
    scaled = gs.scale(original).model
    assert isinstance(scaled, onnx.ModelProto)
    assert gs.verify(original, onnx.shape_inference.infer_shapes(scaled), runs=0).ok
