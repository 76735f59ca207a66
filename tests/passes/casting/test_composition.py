"""Autocast as an onnx_ir pass, in one sequence with those of the loss scale; and through every public function."""

from __future__ import annotations

from typing import Any

import onnx_ir as ir
import pytest
from onnx_ir.passes import PassError, Sequential

import graphscale as gs
from graphscale import errors
from graphscale.passes import AddTelemetry, Autocast, ScaleLoss, standard_passes
from tests.build import step
from tests.conftest import MODEL_NAMES, load_example
from tests.passes.cases import sgd, two_layers
from tests.passes.test_golden import text_of

pytestmark = pytest.mark.static

KINDS: dict[str, dict[str, Any]] = {
    "typed": {},
    "emulated": {"emulate": True},
    "bfloat16": {"dtype": "bfloat16", "emulate": True},
}
each_way = pytest.mark.parametrize("way", KINDS.values(), ids=KINDS)


def without_stamp(model: ir.Model) -> str:
    model.metadata_props.clear()
    model.doc_string = None  # its note names the target; the texts have no others
    return text_of(model)


ALONE = {
    **{f"{kind} {scale}": (two_layers, way, scale, False) for kind, way in KINDS.items() for scale in ("dynamic", 256)},
    "wide": (sgd, None, "dynamic", False),
    "telemetry": (sgd, {"emulate": True}, "dynamic", True),
    **{
        name: (load_example(name).model, {}, "dynamic", False)
        for name in MODEL_NAMES
        if name.startswith(("jax/mlp", "pytorch/attention"))
    },
}


@pytest.mark.sample(3)
@pytest.mark.parametrize("case", ALONE)
def test_a_sequence_is_what_scale_does(case: str) -> None:
    graph, way, loss_scale, telemetry = ALONE[case]
    model = ir.from_proto(graph())
    mixed = None if way is None else Autocast(**way)
    chosen = [each for each in (mixed, AddTelemetry() if telemetry else None) if each]
    result = Sequential(*standard_passes(ScaleLoss(loss_scale), *chosen))(model)
    assert result.modified
    assert result.model is model
    at_once = gs.scale(graph(), loss_scale, autocast=mixed, telemetry=telemetry).model
    assert without_stamp(model) == without_stamp(ir.from_proto(at_once))


def test_all_ways_to_say_it() -> None:
    """`gs.autocast(loss_scale=...)`, `gs.scale(autocast=...)` by name and by pass, and both in two steps."""
    texts = {
        text_of(ir.from_proto(model))
        for model in (
            gs.autocast(sgd(), loss_scale="dynamic").model,
            gs.scale(sgd(), autocast="float16").model,
            gs.scale(sgd(), autocast=Autocast("float16")).model,
        )
    }
    assert len(texts) == 1
    in_two_steps = ir.from_proto(gs.scale(gs.autocast(sgd()).model).model)
    assert without_stamp(in_two_steps) == without_stamp(ir.from_proto(gs.scale(sgd(), autocast="float16").model))


@pytest.mark.parametrize("count", range(1, 7))
def test_after_a_loss_scale(count: int) -> None:
    """In any later place it would cast the loss scale's own nodes: refused, and the graph is unchanged."""
    model = ir.from_proto(sgd())
    Sequential(*standard_passes()[:count])(model)
    before = text_of(model)
    with pytest.raises(PassError) as raised:
        Sequential(Autocast())(model)
    assert isinstance(raised.value.__cause__, errors.AutocastError)
    assert "scale" in str(raised.value.__cause__)
    assert text_of(model) == before


@each_way
def test_twice(way: dict[str, Any]) -> None:
    model = ir.from_proto(sgd())
    Autocast(**way)(model)
    before = text_of(model)
    for other in KINDS.values():
        with pytest.raises(errors.AutocastError, match="mixed precision already"):
            Autocast(**other)(model)
        for given in (model, ir.to_proto(model)):
            with pytest.raises(errors.AutocastError, match="autocast the original"):
                gs.autocast(given, **other)
            with pytest.raises(errors.AutocastError, match="autocast the original"):
                gs.scale(given, autocast=Autocast(**other))
    assert text_of(model) == before
    with pytest.raises((errors.AutocastError, errors.AlreadyScaledError), match="the original"):
        gs.autocast(gs.scale(model).model)


@pytest.mark.parametrize(
    "refused",
    [Autocast("float8"), Autocast("bfloat16"), Autocast(loss="nope"), Autocast(target="tpu"), Autocast(seed="a:0")],
    ids=["type", "bfloat16", "loss", "target", "seed"],
)
def test_what_is_refused_changes_nothing(refused: Autocast) -> None:
    model = ir.from_proto(sgd())
    before = text_of(model)
    with pytest.raises(errors.GraphscaleError):
        refused(model)
    assert text_of(model) == before


def test_a_pass_is_a_value_and_can_be_used_again() -> None:
    assert Autocast() == Autocast("float16", target="onnx") != Autocast("bfloat16")
    mixed = Autocast()
    first = gs.scale(sgd(), autocast=mixed).model.SerializeToString(deterministic=True)
    assert mixed.report is not None
    assert gs.scale(sgd(), autocast=mixed).model.SerializeToString(deterministic=True) == first
    assert gs.scale(two_layers(), autocast=mixed).report.autocast == gs.autocast(two_layers()).report.to_dict()
    gs.scale(step(), autocast=mixed, target="ort-training", loss="loss")
    assert gs.scale(sgd(), autocast=mixed).model.SerializeToString(deterministic=True) == first


def test_the_arguments_of_scale_reach_the_pass() -> None:
    """A loss, a gradient, pairs and a target that are given once hold for both."""
    model = step("other = ReduceMean<keepdims = 0>(y)", outputs="float[4,5] dw1, float[5,3] dw2, float other")
    for mixed in ("float16", Autocast()):
        report = gs.scale(model, autocast=mixed, loss="loss", target="ort-training").report
        assert (report.loss, report.loss_found, report.target) == ("loss", "named", "ort-training")
        assert report.coverage == 1.0
    assert Autocast() == Autocast(loss=None)
    with pytest.raises(errors.AutocastError, match="loss"):
        gs.scale(model, autocast=Autocast(loss="other"), loss="loss")
