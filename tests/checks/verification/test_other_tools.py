"""Files of other tools: renamed ones are verified, changed ones not proved, and wrong ones still fail."""

from __future__ import annotations

import base64
import tempfile
import zlib
from collections.abc import Callable

import onnx
import onnx_ir as ir
import pytest
from onnx_ir.passes.common import IdentityEliminationPass

import graphscale as gs
from benchmarks.mutation import KINDS
from benchmarks.mutation.damaged import Damaged
from graphscale.graph.original import ORIGINAL_KEY
from tests.build import linear_step
from tests.conftest import load_example

STUCK = gs.DynamicLossScale(1024, 3, on_stuck="flag", max_consecutive_skips=4)


def _scaled(name: str, **options: object) -> tuple[onnx.ModelProto, onnx.ModelProto]:
    original = linear_step("grad = Identity(dw)", outputs="float[4,3] grad") if name == "identity" else None
    original = load_example(name).model() if original is None else original
    scaled = onnx.ModelProto()
    scaled.CopyFrom(gs.scale(original, **options).model)
    return original, scaled


def _rename(graph: onnx.GraphProto) -> None:
    """Rename all that is neither input nor output, as compilers do, in bodies too."""
    kept = {value.name for value in (*graph.input, *graph.output)}
    names: dict[str, str] = {}

    def new(name: str) -> str:
        return name if not name or name in kept else names.setdefault(name, f"renamed_{len(names)}")

    def walk(graph: onnx.GraphProto) -> None:
        for node in graph.node:
            node.name = new(f"node {node.name}")
            node.input[:], node.output[:] = map(new, node.input), map(new, node.output)
            for attribute in node.attribute:
                if attribute.type == attribute.GRAPH:
                    walk(attribute.g)
        for each in (*graph.input, *graph.output, *graph.value_info, *graph.initializer):
            each.name = new(each.name)

    walk(graph)


def _rename_a_constant(graph: onnx.GraphProto) -> None:
    inputs = {value.name for value in graph.input}
    constant = next(tensor for tensor in graph.initializer if tensor.name not in inputs)
    for node in graph.node:
        node.input[:] = ["renamed" if name == constant.name else name for name in node.input]
    constant.name = "renamed"


@pytest.mark.full
@pytest.mark.parametrize("change", [_rename_a_constant, _rename])
@pytest.mark.parametrize("name", ["jax/mlp_adam", "pytorch/mlp_momentum"])
def test_a_renamed_file_is_verified(name: str, change: Callable[[onnx.GraphProto], None]) -> None:
    original, scaled = _scaled(name)
    change(scaled.graph)
    report = gs.verify(original, scaled, runs=1)
    assert report.verdict.startswith("verified"), report.checks


@pytest.mark.full
def test_a_forged_record_fails_where_constants_were_renamed() -> None:
    """The record is right by the constants that the original gives, whatever the file calls them."""
    original, scaled = _scaled("jax/mlp_adam")
    _rename_a_constant(scaled.graph)
    (entry,) = [entry for entry in scaled.metadata_props if entry.key == ORIGINAL_KEY]
    record = onnx.ModelProto.FromString(zlib.decompress(base64.b64decode(entry.value)))
    small = [t for t in record.graph.initializer if t.external_data and not t.dims]
    references = [tensor.external_data[0] for tensor in small]
    references[0].value, references[1].value = references[1].value, references[0].value
    entry.value = base64.b64encode(zlib.compress(record.SerializeToString())).decode()
    (check,) = gs.verify(original, scaled, runs=0).failures
    assert check.name == "metadata of the scaling" and "the constant 'dot_bias_0' is" in check.detail, check


def _copy_a_value(model: onnx.ModelProto) -> onnx.ModelProto:
    """Put an `Identity` into the middle of the graph."""
    nodes, kept = model.graph.node, {value.name for value in model.graph.output}
    index = next(i for i in range(len(nodes) // 2, len(nodes)) if nodes[i].output[0] not in kept)
    name = nodes[index].output[0]
    for node in nodes:
        node.input[:] = ["a copy" if each == name else each for each in node.input]
    nodes.insert(index + 1, onnx.helper.make_node("Identity", [name], ["a copy"]))
    return model


def _rename_and_copy(model: onnx.ModelProto) -> onnx.ModelProto:
    _rename(model.graph)
    return _copy_a_value(model)


def _exchange_names(model: onnx.ModelProto) -> onnx.ModelProto:
    """Give the matrix products, of equal shapes among them, each other's names."""
    products = [node for node in model.graph.node if node.op_type in ("MatMul", "Gemm")]
    outputs = [node.output[0] for node in products]
    names = dict(zip(outputs, [*outputs[1:], outputs[0]], strict=True))
    del model.graph.value_info[:]
    for node in model.graph.node:
        node.input[:] = [names.get(name, name) for name in node.input]
        node.output[:] = [names.get(name, name) for name in node.output]
        node.name = node.output[0]
    return _copy_a_value(model)


def _prefix(model: onnx.ModelProto) -> onnx.ModelProto:
    options = {"rename_inputs": False, "rename_outputs": False, "rename_initializers": False}
    return onnx.compose.add_prefix(model, "p/", **options)


def _remove_identities(model: onnx.ModelProto) -> onnx.ModelProto:
    made = ir.from_proto(model)
    IdentityEliminationPass()(made)
    return ir.to_proto(made)


def _drop_constants(model: onnx.ModelProto) -> onnx.ModelProto:
    """Make initializers that no input is nodes."""
    inputs = {value.name for value in model.graph.input}
    constants = [tensor for tensor in model.graph.initializer if tensor.name not in inputs]
    for tensor in constants:
        model.graph.node.insert(0, onnx.helper.make_node("Constant", [], [tensor.name], value=tensor))
        model.graph.initializer.remove(tensor)
    return model


def _optimize(model: onnx.ModelProto) -> onnx.ModelProto:
    """Let ONNX Runtime fold constants."""
    import onnxruntime as ort

    with tempfile.TemporaryDirectory() as folder:
        options = ort.SessionOptions()
        options.log_severity_level = 4
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_BASIC
        options.optimized_model_filepath = f"{folder}/model.onnx"
        ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
        return onnx.load(f"{folder}/model.onnx")


CHANGES = {
    "a further node": ("pytorch/mlp_momentum", _copy_a_value),
    "renamed, and a further node": ("pytorch/attention_sgd", _rename_and_copy),
    "names exchanged, and a further node": ("pytorch/mlp_momentum", _exchange_names),
    "a function renamed": ("pytorch/attention_sgd", _prefix),
    "identities removed": ("identity", _remove_identities),
    "initializers made nodes": ("jax/mlp_adam", _drop_constants),
    "constants folded": ("pytorch/mlp_momentum", _optimize),
    "constants folded, with a fixed scale": ("pytorch/mlp_momentum", _optimize),
    "renamed, and a further node, with a fixed scale": ("pytorch/mlp_momentum", _rename_and_copy),
}


@pytest.mark.full
@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_file_is_not_proved(change: str) -> None:
    name, edit = CHANGES[change]
    options = {"loss_scale": 1024.0} if "scale" in change else {"loss_scale": STUCK} if "fold" in change else {}
    original, scaled = _scaled(name, **options)
    found = edit(scaled)
    report = gs.verify(original, found, runs=1)
    assert report.verdict.startswith("not proved; numbers agree on "), report.failures
    assert gs.verify(original, found, runs=1, numeric=True).ok


DAMAGES = (
    "drop an unscaling",
    "unguard a moment",
    "leave a gradient out of the check",
    "another period",
    "unscale where the scale enters",
    "multiply instead of unscaling",
    "tell the share of gradients that are not zero",
)


@pytest.mark.full
@pytest.mark.parametrize("edit", [_copy_a_value, _rename_and_copy, _exchange_names])
@pytest.mark.parametrize("kind", DAMAGES)
def test_a_wrong_file_fails_though_it_was_changed(
    kind: str, edit: Callable[[onnx.ModelProto], onnx.ModelProto]
) -> None:
    (damage,) = [each for each in KINDS if each.name == kind]
    original, scaled = _scaled("pytorch/mlp_momentum", telemetry=True)
    model = Damaged(ir.from_proto(scaled))
    damage.damage(model, next(iter(damage.sites(model))))
    report = gs.verify(original, edit(ir.to_proto(model.finish())), runs=1, numeric=True)
    assert report.failures, report.checks


@pytest.mark.full
def test_reports_on_gradients_that_are_not_found_are_not_proved() -> None:
    original, scaled = _scaled("pytorch/attention_sgd", telemetry=True)
    found = _rename_and_copy(scaled)
    for report in (gs.verify(original, found, runs=1), gs.verify(original, found, runs=1, numeric=True)):
        assert not report.ok and not report.failures, report.failures
        assert [check.status for check in report.checks if check.name == "reports of telemetry"] == ["not proved"]


def test_a_scale_that_is_gone_and_no_power_of_two_takes_a_tolerance() -> None:
    original, scaled = _scaled("pytorch/mlp_momentum", loss_scale=1000.0)
    found = _rename_and_copy(scaled)
    assert not gs.verify(original, found, runs=1, numeric=True).ok
    assert gs.verify(original, found, runs=1, numeric=True, tolerance=1e-4).ok


def test_the_name_of_a_gradient_that_another_operator_computes() -> None:
    """The name belongs to the gradient with the scale; telemetry divides it before its report."""
    original = linear_step("w_next = Sub(w, dw)", outputs="float[4,3] w_next")
    scaled = gs.scale(original, telemetry=True).model
    assert isinstance(scaled, onnx.ModelProto)
    (node,) = [node for node in scaled.graph.node if "dw" in node.output]
    node.op_type, node.name = "Gemm", "another"
    report = gs.verify(original, scaled, runs=1)
    assert not report.ok and not report.failures, report.failures


def test_a_stranger_is_named_once() -> None:
    original, scaled = _scaled("pytorch/mlp_momentum")
    check = gs.verify(original, _prefix(scaled), runs=0).checks[0]
    assert check.detail.count("node 'p/graphscale/update-loss-scale/next_scale'") == 1, check


def test_another_value_by_a_name_of_the_metadata() -> None:
    original, scaled = _scaled("pytorch/mlp_momentum", loss_scale=STUCK)
    (rule,) = [node for node in scaled.graph.node if "stuck" in node.output]
    for node in scaled.graph.node:
        for names in (node.input, node.output):
            names[:] = ["hidden" if name == "stuck" else name for name in names]
    scaled.graph.node.append(onnx.helper.make_node("Not", ["hidden"], ["stuck"]))
    assert "hidden" in rule.output and gs.verify(original, scaled, runs=1, numeric=True).failures


def test_a_name_of_the_metadata_that_changed_hands() -> None:
    original, scaled = _scaled("pytorch/mlp_momentum", loss_scale=1024.0)
    names = {"current_loss_scale": "scalar_tensor", "scalar_tensor": "current_loss_scale"}
    for node in scaled.graph.node:
        node.input[:] = [names.get(name, name) for name in node.input]
    for tensor in scaled.graph.initializer:
        tensor.name = names.get(tensor.name, tensor.name)
    (check,) = [each for each in gs.verify(original, scaled, runs=0).checks if each.name == "metadata of the scaling"]
    words = "the metadata call 'current_loss_scale' the loss scale, which is another value in this graph"
    assert check.status == "fails" and words in check.detail, check
