"""The nodes and values that a drawing shows, and its words for them."""

from __future__ import annotations

import onnx_ir as ir
import pytest

import graphscale as gs
from graphscale.analysis.proof import prove
from graphscale.analysis.training_graph import analyse
from graphscale.checks.drawing import fitting
from graphscale.checks.drawing.drawing_context import DrawingContext, Phase, make_context
from graphscale.checks.drawing.fitting import fit
from graphscale.checks.drawing.page import degree_of, list_facts
from graphscale.errors import GraphscaleError
from graphscale.files import model_files
from tests.build import step
from tests.checks.drawing.graphs import deep_network, scaled_model, scene_of
from tests.cli.bad_graphs import inference
from tests.conftest import MODEL_NAMES, MODELS
from tests.passes.cases import cross_entropy

pytestmark = pytest.mark.static


def named(values: dict[str, str]) -> dict[str, str]:
    return {name: degree for name, degree in values.items() if degree not in ("0", "any")}


def degrees(context: DrawingContext) -> dict[str, str]:
    return {v.name: degree_of(context, v) for node in context.step.graph for v in node.outputs if v.name}


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", MODEL_NAMES)
def test_degrees_are_those_of_the_proof_and_of_the_plan(name: str) -> None:
    scaled = make_context(scaled_model(name).clone(), name)
    assert not scaled.unclear
    assert scaled.scale is not None
    rule = {"update-loss-scale", "order-writes"}
    rule_nodes = frozenset(node for node, mark in scaled.passes.items() if mark in rule)
    proved = prove(scaled.step.graph, scaled.scale, scaled.step.loss, rule_nodes=rule_nodes)
    assert scaled.step.degrees == proved
    # Before scaling, a value has the degree that it has afterwards.
    unscaled = make_context(ir.load(MODELS / f"{name}.onnx"), name)
    before, after = degrees(unscaled), degrees(scaled)
    moved = {v.name for v in unscaled.step.graph.outputs} | {place.value.name for place in unscaled.step.places}
    shared = (before.keys() & after.keys()) - moved
    assert len(shared) >= 0.6 * len(before)
    assert {n: before[n] for n in shared} == {n: after[n] for n in shared}
    assert named({n: before[n] for n in shared})


def test_a_value_that_the_scale_would_enter_at_has_it_for_all_readers() -> None:
    model = model_files.from_proto(cross_entropy())
    context = make_context(model, "the model")
    [place] = context.step.places
    assert place.edge is None and place.value.producer() is not None
    found = degrees(context)
    assert {name for name, degree in found.items() if degree == "1"} == {place.value.name, "dw"}
    scene = fit(context).scene
    assert "enters" in scene.boxes[scene.box_of[place.value.producer()]].badges


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", MODEL_NAMES)
def test_the_marks_of_an_unscaled_graph_are_its_places_and_gradients(name: str) -> None:
    scene = scene_of(name, scaled=False)
    found = analyse(scene.context.step.graph)
    boxes = [box for box in scene.boxes if box.output is None]
    leaving = {box for box in boxes if "leaves" in box.badges}
    assert leaving == {boxes[scene.box_of[v.producer()]] for v in found.gradients if v.producer() is not None}
    entering = [box for box in boxes if "enters" in box.badges]
    assert 1 <= len(entering) <= sum(1 if p.edge else max(1, len(p.value.uses())) for p in found.places)
    for place in found.places:
        if place.edge is not None:
            assert boxes[scene.box_of[place.edge.node]] in entering
    assert any(box.output is found.loss and "loss" in box.badges for box in scene.boxes) or not (
        found.loss.is_graph_output()
    )


@pytest.mark.cover(1)
@pytest.mark.sample(3)
@pytest.mark.parametrize("scaled", [True, False])
@pytest.mark.parametrize("name", MODEL_NAMES)
@pytest.mark.parametrize("whole", [True, False])
def test_every_node_is_in_one_box(name: str, scaled: bool, whole: bool) -> None:
    scene = scene_of(name, scaled=scaled, whole=whole)
    graph = scene.context.step.graph
    drawn = [node for box in scene.boxes for node in box.nodes]
    assert len(drawn) == len(set(drawn))
    assert set(drawn) == {node for node in graph if node.op_type != "Constant"}
    for i, box in enumerate(scene.boxes):
        assert all(scene.box_of[node] == i for node in box.nodes)
        assert len({(scene.context.phases[node], scene.context.passes.get(node)) for node in box.nodes}) <= 1
    if whole:
        assert all(len(box.nodes) <= 1 for box in scene.boxes)
        outputs = {box.output for box in scene.boxes if box.output is not None}
        assert outputs == {value for value in graph.outputs if value.producer() is not None}
    elif scaled:
        [place, *_] = [box for box in scene.boxes if box.mark == "scale-loss"]
        assert len(place.nodes) == 1
    else:
        assert any("enters" in box.badges and len(box.nodes) == 1 for box in scene.boxes)
    assert (
        sum(box.output is scene.context.step.loss for box in scene.boxes) == scene.context.step.loss.is_graph_output()
    )


def test_links_carry_what_nodes_read() -> None:
    scene = scene_of("pytorch/mlp_momentum", scaled=True)
    read = {
        (producer, node)
        for node in scene.context.step.graph
        for value in node.inputs
        if value is not None and (producer := value.producer()) is not None
    }
    drawn = {
        (scene.boxes[link.source].nodes[0], scene.boxes[link.target].nodes[0])
        for link in scene.links
        if scene.boxes[link.target].nodes
    }
    assert drawn == read
    for link in scene.links:
        [giver] = scene.boxes[link.source].nodes
        read_by = scene.boxes[link.target]
        values = [v for v in giver.outputs if v is read_by.output or v in [i for n in read_by.nodes for i in n.inputs]]
        assert (link.degree == 1) == any(scene.context.step.degrees.get(value) == 1 for value in values)


def test_before_scaling_links_end_where_the_scale_would_come_out() -> None:
    scene = scene_of("pytorch/mlp_momentum", scaled=False)
    leaving = [i for i, box in enumerate(scene.boxes) if "leaves" in box.badges]
    assert len(leaving) == 4
    assert [link.degree for link in scene.links if link.source in leaving] == [0] * 4
    assert any(link.degree == 1 and link.target in leaving for link in scene.links)
    for link in scene.links:
        assert link.degree == 0 or scene.boxes[link.target].phase is Phase.BACKWARD


@pytest.mark.full
def test_a_huge_graph_is_folded_but_for_a_few_gradients() -> None:
    model = deep_network(280)
    assert len(model.graph.node) > 3000
    scaled = gs.scale(model_files.from_proto(model)).model
    assert isinstance(scaled, ir.Model)
    assert len(scaled.graph) > 5000
    scene = fit(make_context(scaled, "deep")).scene
    assert len(scene.boxes) < 150
    assert sum(len(box.nodes) for box in scene.boxes) == len(scaled.graph)
    for mark in ("unscale-gradients", "check-finite", "guard-updates"):
        single = [box for box in scene.boxes if box.mark == mark and len(box.nodes) == 1]
        folded = [box for box in scene.boxes if box.mark == mark and len(box.nodes) > 1]
        assert len(single) >= 6 and len(folded) == 1
    assert any(box.mark == "scale-loss" for box in scene.boxes)
    names = [name for fact in list_facts(scene) for name in fact.get("names", [])]
    assert len(names) == sum(len(box.nodes) for box in scene.boxes if len(box.nodes) > 1)


@pytest.mark.full
@pytest.mark.parametrize("most", [0, 5, 20, 60])
def test_any_limit_gives_a_drawing(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fitting, "_MOST", most)
    for name in ("pytorch/attention_adamw_clip", "tensorflow/keras_transformer_adamw_clip", "ort/recurrent"):
        for scaled in (True, False):
            scene = scene_of(name, scaled=scaled)
            drawn = [box for box in scene.boxes if box.nodes]
            assert sum(len(box.nodes) for box in drawn) == len(scene.box_of)
            # At least the kinds: phases, their sections, and the passes.
            assert len(drawn) <= max(most, 45)


@pytest.mark.full
def test_sampled_gradients_keep_their_boxes_to_the_end() -> None:
    """Each gradient that stands for all has its unscaling, its check and its guards, one by one."""
    scaled = gs.scale(model_files.from_proto(deep_network(40))).model
    assert isinstance(scaled, ir.Model)
    scene = fit(make_context(scaled, "deep")).scene
    single = {box.nodes[0] for box in scene.boxes if len(box.nodes) == 1}
    starts = [node for node in single if node.metadata_props.get("graphscale.pass") == "unscale-gradients"]
    assert len(starts) == 6
    for start in starts:
        weight = start.inputs[0].name.removeprefix("dw")
        guards = {node for node in single if node.name and node.op_type == "Where"}
        outputs = {value.name for node in guards for value in node.outputs}
        assert {f"w{weight}_next", f"m{weight}_next"} <= outputs
        checks = [use.node for use in start.outputs[0].uses() if use.node.op_type == "Mul" and use.node in single]
        assert checks


def test_subgraphs_and_functions_are_counted_in_their_boxes() -> None:
    scene = scene_of("pytorch/mlp_momentum", scaled=True)
    update = next(i for i, box in enumerate(scene.boxes) if box.title == "UpdateLossScale")
    function = next(iter(scene.context.step.model.functions.values()))
    assert scene.boxes[update].subtitle == f"{len(function)} nodes inside"
    assert sum(count for _, count in list_facts(scene)[update]["ops"]) == len(function)


def test_phases_follow_the_flow() -> None:
    scene = scene_of("pytorch/attention_sgd", scaled=True, whole=True)
    order = {Phase.FORWARD: 0, Phase.BACKWARD: 1, Phase.UPDATE: 2}
    for link in scene.links:
        assert order[scene.boxes[link.source].phase] <= order[scene.boxes[link.target].phase]
    counts = [sum(box.phase is phase for box in scene.boxes) for phase in order]
    assert min(counts) > 20


class TestWhatIsNoTrainingGraph:
    def test_is_refused_or_drawn_without_phases(self) -> None:
        model = model_files.from_proto(inference())
        with pytest.raises(GraphscaleError):
            make_context(model.clone(), "the model")
        context = make_context(model, "the model", strict=False)
        assert context.note is not None and "loss" in context.note
        assert set(context.phases.values()) == {Phase.UNKNOWN}
        assert all(fact["phase"] == "" for fact in list_facts(fit(context).scene))

    def test_a_scale_that_does_not_cancel_out_is_drawn_as_unclear(self) -> None:
        original = model_files.from_proto(step("grown = Exp(dw1)", outputs="float[4,5] grown"))
        model = gs.scale(original, roles={"metrics": ["grown"]}).model
        assert isinstance(model, ir.Model)
        exponential = next(node for node in model.graph if node.op_type == "Exp")
        unscale = exponential.inputs[0].producer()
        assert unscale.op_type == "Div"
        exponential.replace_input_with(0, unscale.inputs[0])
        context = make_context(model, "the model")
        assert exponential.outputs[0] in context.unclear
        assert degree_of(context, exponential.outputs[0]) == "?"
