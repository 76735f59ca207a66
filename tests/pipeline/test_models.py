"""Every training graph of models/: the scaled graph computes the original's results, on the real runtime."""

from __future__ import annotations

import copy
import functools
import re
from collections.abc import Iterator

import numpy as np
import onnx
import onnx_ir as ir
import pytest

import graphscale as gs
from graphscale.analysis.training_graph import analyse
from graphscale.errors import TargetError
from tests.conftest import (
    MODEL_NAMES,
    TARGETS,
    Arrays,
    Example,
    Level,
    assert_all_same_bits,
    assert_same_bits,
    load_example,
    make_session,
    run_once,
    run_session,
)

pytestmark = pytest.mark.sample(2)

HALF_PRECISION = "pytorch/mlp_float16"
# The bias of a convolution before a batch norm moves nothing: its gradient is 0, and rounding depends on the CPU.
ZEROS = {f"{layer}.bias_grad.accumulation.buffer" for layer in ("conv1", "conv2")}
CONTRACTIONS = {"Conv", "ConvTranspose", "Einsum", "FusedMatMul", "Gemm", "MatMul"}
GRADIENT_OPERATOR = re.compile("Grad(_|$)")
FOLDERS = ("jax", "ort", "pytorch", "tensorflow")
# The weight to spoil in the graphs whose batch is whole numbers: the result depends on it everywhere.
WEIGHT_OF = {"jax/language_model": "query.weight", "ort/transformer": "position.weight", "pytorch/": "positions"}


@functools.cache
def scaled(name: str, loss_scale: str | float, target: str = "onnx") -> gs.ScaledModel:
    return gs.scale(load_example(name).model(), loss_scale, target=target)


def test_there_are_graphs_of_each_exporter() -> None:
    counts = {folder: sum(name.startswith(folder) for name in MODEL_NAMES) for folder in FOLDERS}
    assert min(counts.values()) >= 7, counts


def test_the_export_computes_what_the_framework_did(example: Example) -> None:
    outputs, left = run_once(example.path, example.feeds)
    tolerance = 5e-3 if example.name == HALF_PRECISION else 2e-5
    assert example.expected
    for actual, expected in ((outputs, example.expected), (left, example.after)):
        for name, wanted in expected.items():
            assert (actual[name].dtype, actual[name].shape) == (wanted.dtype, wanted.shape), name
            if example.name == "ort/conv" and name in ZEROS:
                assert max(np.abs(actual[name]).max(), np.abs(wanted).max()) < 1e-6
                continue
            largest = max(float(np.abs(wanted).max()), 1e-6)
            np.testing.assert_allclose(actual[name], wanted, rtol=0, atol=tolerance * largest, err_msg=name)


def test_a_fixed_scale_changes_no_bit(example: Example) -> None:
    """At ONNX Runtime's default optimization level: outputs, carried state and buffers written in place."""
    example = example.as_for("onnx")
    outputs, left = run_once(example.model(), example.feeds)
    actual_outputs, actual_left = run_once(scaled(example.name, 1024).model, example.feeds)
    assert list(actual_outputs) == list(outputs)
    assert_all_same_bits(actual_outputs, outputs)
    assert_all_same_bits(actual_left, left)
    assert set(example.after) <= {name for name, value in left.items() if (value != example.feeds[name]).any()}


@pytest.mark.parametrize("target", TARGETS)
def test_a_dynamic_scale_changes_no_bit(example: Example, target: str) -> None:
    """Without ONNX Runtime's own optimizations.

    It moves constant factors through matrix products, which rounds; whether it does depends on the nodes around them,
    and so differs between the original of pytorch/two_losses and the scaled graph.
    """
    example = example.as_for(target)
    outputs, left = run_once(example.model(), example.feeds, Level.ORT_DISABLE_ALL)
    result = scaled(example.name, "dynamic", target)
    actual_outputs, actual_left = run_once(result.model, example.feeds, Level.ORT_DISABLE_ALL)
    moved = {state.input for state in result.report.state if state.output is None}
    assert_all_same_bits(actual_outputs, outputs)
    assert_all_same_bits({name: actual_left[name] for name in left}, left)
    assert actual_outputs["all_finite"] == np.True_
    assert actual_outputs["current_loss_scale.next"] == 2**15
    assert actual_outputs["good_steps.next"] == 1
    assert ("current_loss_scale" in moved) == (target == "ort-training")


def is_valid_onnx(model: onnx.ModelProto) -> bool:
    """Not so where ONNX Runtime keeps operators of its own in ONNX's domain, such as MaxPoolGrad."""
    try:
        onnx.checker.check_model(model)
    except onnx.checker.ValidationError:
        return False
    return True


@pytest.mark.static
def test_most_graphs_are_valid_onnx() -> None:
    valid = [name for name in MODEL_NAMES if is_valid_onnx(load_example(name).model())]
    assert len(valid) > 0.8 * len(MODEL_NAMES)


@pytest.mark.static
@pytest.mark.cover(1)
@pytest.mark.full
@pytest.mark.parametrize("loss_scale", [1024, "dynamic"])
def test_versions_are_kept(example: Example, loss_scale: str | float) -> None:
    model, result = example.as_for("onnx").model(), scaled(example.name, loss_scale).model
    assert result.ir_version == model.ir_version
    versions = {entry.domain: entry.version for entry in result.opset_import}
    before = {entry.domain: entry.version for entry in model.opset_import}
    assert {domain: versions[domain] for domain in before} == before
    assert set(versions) - set(before) <= {"graphscale"}
    if is_valid_onnx(model):
        onnx.checker.check_model(result)


# --- coverage ---------------------------------------------------------------------------------------------------------


def backward_contractions(model: onnx.ModelProto, loss: str) -> Iterator[onnx.NodeProto]:
    """Contractions and gradient operators that the loss does not depend on: by name of operator alone."""
    producers = {name: node for node in model.graph.node for name in node.output if name}
    forward: set[str] = set()
    pending = [loss]
    while pending:
        node = producers.get(pending.pop())
        if node is not None and node.output[0] not in forward:
            forward.add(node.output[0])
            pending.extend(name for name in node.input if name)
    for node in model.graph.node:
        if node.output[0] not in forward and (node.op_type in CONTRACTIONS or GRADIENT_OPERATOR.search(node.op_type)):
            yield node


def measured_target(name: str) -> str:
    """The target that leaves all contractions and gradient operators of a graph unchanged."""
    return "ort-training" if name.startswith("ort/") else "onnx"


def operands_and_results(name: str, loss_scale: float, nodes: set[str]) -> dict[str, tuple[list, list]]:
    """Return the operands and results of these nodes in the graph with this scale; constants left out."""
    model = onnx.ModelProto()
    model.CopyFrom(scaled(name, loss_scale, measured_target(name)).model)
    by_name = {node.name: node for node in model.graph.node if node.name in nodes}
    computed = {value for node in model.graph.node for value in node.output if value}
    probes: dict[str, str] = {}
    for node in by_name.values():
        for value in (*node.input, *node.output):
            if value in computed and value not in probes:
                probes[value] = f"probe.{len(probes)}"
                # By way of float32, so that no type needs to be known; integers and masks are harmless.
                model.graph.node.append(onnx.helper.make_node("Cast", [value], [probes[value]], to=1))
                output = onnx.helper.make_tensor_value_info(probes[value], onnx.TensorProto.FLOAT, None)
                model.graph.output.append(output)
    values, _ = run_once(model, load_example(name).feeds, Level.ORT_DISABLE_ALL)
    return {
        node.name: (
            [values[probes[v]] if v in probes else None for v in node.input],
            [values[probes[v]] if v in probes else None for v in node.output],
        )
        for node in by_name.values()
    }


def is_scaled_by_1024(one: np.ndarray | None, other: np.ndarray | None, half: bool) -> bool:
    if one is None or other is None or not one.any():
        return False
    if half:
        # With a scale of 1 small numbers are subnormal in float16, and have lost bits.
        return np.allclose(other, 1024 * one, rtol=2**-9, atol=1024 * 2**-23) and not np.allclose(other, one)
    return (1024 * one).tobytes() == other.tobytes()


def test_the_scale_reaches_every_backward_contraction(example: Example) -> None:
    """Reported, and measured: with scales of 1 and 1024 an operand, and a result, are exactly 1024 apart."""
    report = scaled(example.name, 1024, measured_target(example.name)).report
    wanted = {node.name for node in backward_contractions(example.model(), report.loss)}
    analysed = analyse(ir.from_proto(example.model()).graph).coverage
    assert {node.name for node in analysed.nodes} == wanted
    assert (report.coverage, report.missed, report.contractions) == (1.0, (), len(wanted))
    assert len(wanted) >= 3

    small, large = (operands_and_results(example.name, number, wanted) for number in (1, 1024))
    half = example.name == HALF_PRECISION
    for name in wanted:
        for part, ones, others in zip(("operand", "result"), small[name], large[name], strict=True):
            pairs = zip(ones, others, strict=True)
            proved = any(is_scaled_by_1024(one, other, half) for one, other in pairs)
            assert proved, f"no {part} of {name} carries the scale"


# --- a step that overflows --------------------------------------------------------------------------------------------


def spoiled_input(example: Example) -> str:
    """The input to put an overflow into: the batch, or a weight where the batch has no real numbers."""
    for name in ("x", "input", "sample_weight"):
        if name in example.feeds and example.feeds[name].dtype.kind == "f":
            return name
    return next(weight for prefix, weight in WEIGHT_OF.items() if example.name.startswith(prefix))


def spoil(example: Example, feeds: Arrays, number: float) -> Arrays:
    name = spoiled_input(example)
    array = feeds[name].copy()
    array.flat[array.size // 2] = number
    return {**feeds, name: array}


def in_use(example: Example) -> Arrays:
    """The sample inputs with buffers that hold something, to which the step adds."""
    feeds = {**example.feeds, **example.after}
    if "lazy_reset_grad" in feeds:
        feeds["lazy_reset_grad"] = np.array([False])
    return feeds


@pytest.mark.cover(2)
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("number", [np.nan, np.inf])
@pytest.mark.parametrize("level", [Level.ORT_DISABLE_ALL, Level.ORT_ENABLE_ALL], ids=["plain", "optimized"])
def test_an_overflow_changes_nothing_and_the_next_step_proceeds(
    example: Example, level: Level, number: float, target: str
) -> None:
    feeds, example = in_use(example), example.as_for(target)
    result = scaled(example.name, "dynamic", target)
    bad = spoil(example, feeds, number)
    carried = {state.input: state.output for state in result.report.state if state.output is not None}
    session = make_session(result.model, level)

    outputs, left = run_session(session, bad)
    assert outputs["all_finite"] == np.False_
    assert_same_bits(outputs["current_loss_scale.next"], np.float32(2**14), "scale")
    assert outputs["good_steps.next"] == 0
    for name, following in carried.items():
        if name in bad:
            assert_same_bits(outputs[following], bad[name], following)
    assert_all_same_bits(left, bad)

    state = {name: outputs[following] for name, following in carried.items() if name != spoiled_input(example)}
    outputs, left = run_session(session, {**feeds, **state})
    assert outputs["all_finite"] == np.True_
    assert_same_bits(outputs["current_loss_scale.next"], np.float32(2**14), "scale")
    assert outputs["good_steps.next"] == 1
    changed = [name for name in carried if name in feeds and (outputs[carried[name]] != feeds[name]).any()]
    assert len(changed) == len([name for name in carried if name in feeds])
    assert {name for name in left if name in feeds and (left[name] != feeds[name]).any()} == set(example.after)
    if level is Level.ORT_DISABLE_ALL:
        # Dropout draws new numbers in each run of a session: this one is the second.
        original = make_session(example.model(), level)
        run_session(original, bad)
        expected_outputs, expected_left = run_session(original, feeds)
        assert_all_same_bits(outputs, expected_outputs)
        assert_all_same_bits(left, expected_left)


@pytest.mark.cover(1)
@pytest.mark.static
@pytest.mark.parametrize("kept", ["names", "marks"])
@pytest.mark.parametrize("target", ["onnx", "ort-training"])
@pytest.mark.parametrize("name", MODEL_NAMES)
def test_without_its_metadata_it_is_known_all_the_same(name: str, target: str, kept: str) -> None:
    original = load_example(name).model()
    for loss_scale in ("dynamic", 1024):
        try:
            model = copy.deepcopy(scaled(name, loss_scale, target).model)
        except TargetError:
            continue
        assert isinstance(model, onnx.ModelProto)
        del model.metadata_props[:]
        for node in model.graph.node:
            node.ClearField("name" if kept == "marks" else "metadata_props")
        lost = "was scaled by graphscale, and another tool has dropped its metadata; scale the original"
        for use in (gs.scale, gs.autocast, gs.split, gs.Session, functools.partial(gs.verify, original)):
            with pytest.raises(gs.GraphscaleError, match=lost):
                use(model)
