"""Every graph of models/ in mixed precision: well formed, loads, computes, keeps its coverage, is refused twice."""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest

import graphscale as gs
from graphscale.files.training_info import to_proto
from graphscale.graph.original import ORIGINAL_KEY
from graphscale.passes import Autocast
from tests.conftest import MODEL_NAMES, Example, Level, load_example, run_once
from tests.passes.casting.borders import assert_well_cast, is_ours, target_of
from tests.passes.casting.execute import executed
from tests.passes.casting.rounding import assert_same_numbers, run_all_values
from tests.pipeline.test_models import is_valid_onnx

pytestmark = pytest.mark.sample(2)
# Ways to put a graph into mixed precision, and the runtimes of each.
WAYS = {
    "typed": {},
    "emulated": {"emulate": True},
    "typed for CUDA": {"target": "ort-cuda"},
    "bfloat16": {"dtype": "bfloat16", "target": "ort-cuda"},
    "emulated bfloat16": {"dtype": "bfloat16", "emulate": True},
}
RUNNABLE = ("typed", "emulated", "emulated bfloat16")
# A number on which a Relu or a Min turns is so near its edge that rounding moves it across: a gradient comes or goes.
ON_THE_EDGE = ("pytorch/bce", "ort/activations")
NOTHING_TO_DO = "pytorch/mlp_float16"
each_way = pytest.mark.parametrize("way", WAYS)


def options_for(name: str, way: str) -> dict[str, Any]:
    """A way to treat a graph, for a target that has kernels for all of it."""
    given = WAYS[way]
    if not name.startswith("ort/"):
        return given
    return {**given, "target": "ort-training-cuda" if "target" in given else "ort-training"}


def target_for(name: str) -> str:
    return str(options_for(name, "typed").get("target", "onnx"))


@functools.cache
def mixed(name: str, way: str) -> gs.AutocastModel:
    return gs.autocast(load_example(name).model(), **options_for(name, way))


@pytest.mark.static
@pytest.mark.cover(2)
@each_way
def test_casts_stand_at_borders_alone(example: Example, way: str) -> None:
    result = mixed(example.name, way)
    assert_well_cast(example.model(), result)
    without = example.name == NOTHING_TO_DO or (example.name == "ort/opset12" and "bfloat16" in way)
    assert (result.report.low_nodes > 0) == (not without)


@pytest.mark.static
@pytest.mark.cover(2)
@each_way
def test_it_is_valid_where_the_original_is(example: Example, way: str) -> None:
    model = mixed(example.name, way).model
    onnx.shape_inference.infer_shapes(model, check_type=True)
    if is_valid_onnx(example.model()):
        onnx.checker.check_model(model)
        onnx.shape_inference.infer_shapes(model, check_type=True, strict_mode=True)


@pytest.mark.cover(3)
@pytest.mark.parametrize("level", [Level.ORT_DISABLE_ALL, Level.ORT_ENABLE_ALL], ids=["plain", "optimized"])
@pytest.mark.parametrize("way", RUNNABLE)
def test_it_computes_what_float32_does_up_to_rounding(example: Example, way: str, level: Level) -> None:
    outputs, left = run_once(mixed(example.name, way).model, example.feeds, level)
    tolerance = 0.05 if "bfloat16" in way else 5e-3
    for actual, expected in ((outputs, example.expected), (left, example.after)):
        overall = max((float(np.abs(wanted).max()) for name, wanted in expected.items() if name != "loss"), default=1)
        for name, wanted in expected.items():
            assert (actual[name].dtype, actual[name].shape) == (wanted.dtype, wanted.shape), name
            if example.name not in ON_THE_EDGE or name == "loss":
                largest = float(np.abs(wanted).max())
                # The gradient of a bias in front of a normalization is zero but for what rounding leaves of it.
                largest = largest if largest > 1e-4 * overall else overall
                np.testing.assert_allclose(actual[name], wanted, rtol=0, atol=tolerance * largest, err_msg=name)


def without_record(model: onnx.ModelProto) -> bytes:
    """A rewritten model without its record of the original, which is packed as the model was read."""
    without = onnx.ModelProto()
    without.CopyFrom(model)
    (record,) = (entry for entry in without.metadata_props if entry.key == ORIGINAL_KEY)
    without.metadata_props.remove(record)
    return without.SerializeToString(deterministic=True)


@pytest.mark.static
@pytest.mark.cover(1)
@pytest.mark.parametrize("way", ["typed", "emulated"])
def test_the_original_is_untouched_and_the_result_always_the_same(example: Example, way: str) -> None:
    model = example.model()
    given = model.SerializeToString(deterministic=True)
    expected = mixed(example.name, way).model
    again = gs.autocast(model, **options_for(example.name, way)).model
    assert again.SerializeToString(deterministic=True) == expected.SerializeToString(deterministic=True)
    assert model.SerializeToString(deterministic=True) == given
    graph = ir.from_proto(model)
    before = to_proto(graph).SerializeToString(deterministic=True)
    stored = onnx.load(example.path).SerializeToString(deterministic=True)
    for source, original in ((graph, before), (example.path, stored)):
        result = gs.autocast(source, **options_for(example.name, way))
        assert isinstance(result.model, ir.Model)
        proto = to_proto(result.model)
        assert without_record(proto) == without_record(expected)
        assert gs.strip(proto).SerializeToString(deterministic=True) == original
    assert to_proto(graph).SerializeToString(deterministic=True) == before


@pytest.mark.static
@pytest.mark.parametrize("way", ["typed", "emulated"])
def test_it_can_be_scaled(example: Example, way: str) -> None:
    """At once or in two steps, which comes to the same; every backward contraction is covered and all is proved."""
    in_two_steps = gs.scale(mixed(example.name, way).model, target=target_for(example.name))
    report = in_two_steps.report
    assert (report.coverage, report.missed, report.proved) == (1.0, (), True)
    autocast = Autocast(**options_for(example.name, way))
    at_once = gs.scale(example.model(), autocast=autocast, target=target_for(example.name))
    assert at_once.model.graph.SerializeToString(deterministic=True) == in_two_steps.model.graph.SerializeToString(
        deterministic=True
    )
    unscaled = gs.scale(example.model(), target=target_for(example.name)).report
    assert report.loss == unscaled.loss
    assert [(state.input, state.output) for state in report.state] == [(s.input, s.output) for s in unscaled.state]
    assert at_once.report.autocast == mixed(example.name, way).report.to_dict()


@pytest.mark.static
@pytest.mark.full
def test_carried_state_and_gradients_are_float32(example: Example) -> None:
    """Behind the casts that follow the last contraction; only what was float16 in the original is float16."""
    typed = mixed(example.name, "typed").model
    report = gs.scale(typed, target=target_for(example.name)).report
    dtypes = {value.name: value.type.tensor_type.elem_type for value in (*typed.graph.input, *typed.graph.output)}
    for state in report.state:
        for name in (state.input, state.output):
            assert dtypes.get(name) not in (onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16)
    makers = {name: node for node in typed.graph.node for name in node.output}
    for gradient in report.gradients:
        maker = makers[gradient.value]
        if is_ours(maker):
            assert target_of(maker) == onnx.TensorProto.FLOAT, gradient


# --- the emulated graph does what the typed one says ------------------------------------------------------------------


def random_numbers(model: onnx.ModelProto) -> bool:
    return any(node.op_type in ("Dropout", "RandomNormalLike", "RandomUniformLike") for node in model.graph.node)


EXACT_NAMES = [name for name in MODEL_NAMES if name != NOTHING_TO_DO and not random_numbers(load_example(name).model())]


@pytest.mark.parametrize("name", EXACT_NAMES)
def test_emulation_computes_what_the_dtypes_of_the_typed_graph_say(name: str) -> None:
    """The typed graph, executed node by node with numpy's float16 where it says so, against the emulated graph."""
    example = load_example(name)
    emulated = mixed(name, "emulated").model
    actual = run_all_values(emulated, example.feeds, Level.ORT_DISABLE_ALL)
    expected = executed(mixed(name, "typed for CUDA").model, emulated, example.feeds, actual)
    outputs = {output.name for output in emulated.graph.output}
    for output in outputs - set(example.after):
        assert_same_numbers(actual[output], expected[output], output)


@pytest.mark.static
@pytest.mark.parametrize("way", ["typed", "emulated"])
def test_the_bytes_of_activations(example: Example, way: str) -> None:
    """Values that the loss is computed from and the rest of the step reads, counted by hand."""
    model, typed = example.model(), mixed(example.name, "typed" if way == "typed" else "typed for CUDA").model
    shapes = {v.name: v.type.tensor_type for v in (*model.graph.value_info, *model.graph.output)}
    makers = {name: node for node in model.graph.node for name in node.output if name}
    forward, pending = set(), [gs.inspect(model).loss]
    while pending:
        node = makers.get(pending.pop())
        if node is not None and node.output[0] not in forward:
            forward.add(node.output[0])
            pending += [name for name in node.input if name]
    read = {name for node in model.graph.node if node.output[0] not in forward for name in node.input}
    kept = [n for n, node in makers.items() if node.output[0] in forward and n in read and n in shapes]
    kept = [name for name in kept if shapes[name].elem_type == onnx.TensorProto.FLOAT]
    small = {v.name for v in typed.graph.value_info if v.type.tensor_type.elem_type == onnx.TensorProto.FLOAT16}
    counts = {name: math.prod(d.dim_value or 1 for d in shapes[name].shape.dim) for name in kept}
    report = mixed(example.name, way).report
    assert report.activation_bytes_before == sum(4 * count for count in counts.values())
    assert report.activation_bytes_after == sum(
        (2 if name in small or f"{name}.low" in small else 4) * count for name, count in counts.items()
    )
