"""The public surface: names, signatures, kinds of models, and what a scaled graph carries. It may grow, not change."""

from __future__ import annotations

import dataclasses
import inspect
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest

import graphscale as gs
from graphscale import errors
from tests.build import LINEAR, LINEAR_BACKWARD, feeds_for, linear_step, step
from tests.conftest import MODELS, initial_values, load_example, run_once

PINNED = {
    "DynamicLossScale",
    "FixedLossScale",
    "GraphscaleError",
    "LossScale",
    "ScaledModel",
    "Session",
    "get",
    "inspect",
    "scale",
}
MOMENTUM = MODELS / "pytorch" / "mlp_momentum.onnx"
LOSS_SCALE_STATE = {"current_loss_scale", "good_steps"}


def properties(carrier: Any) -> dict[str, str]:
    return {entry.key: entry.value for entry in carrier.metadata_props}


class TestNames:
    def test_they_are_there(self) -> None:
        assert set(gs.__all__) >= PINNED
        assert gs.__all__ == sorted(gs.__all__)
        for name in gs.__all__:
            assert inspect.getdoc(getattr(gs, name)), f"{name} has no docstring"

    def test_signatures(self) -> None:
        analysis = "*, loss=None, seed=None, gradients=None, updates=None"
        pinned = {
            gs.scale: f"model, loss_scale='dynamic', {analysis}, target='onnx'",
            gs.inspect: f"model, {analysis}",
            gs.Session: "model, providers=None, session_options=None, state=None",
            gs.FixedLossScale: "loss_scale_value",
            gs.DynamicLossScale: "initial_loss_scale=32768, increment_period=2000, multiplier=2.0",
            gs.get: "identifier",
            gs.ScaledModel.save: "self, path",
            gs.Session.step: "self, feeds",
            gs.LossScale.bind: "self, graph, target='onnx'",
        }
        for function, expected in pinned.items():
            parameters = list(inspect.signature(function).parameters.values())
            words = []
            for parameter in parameters:
                if parameter.kind is parameter.KEYWORD_ONLY and "*" not in words:
                    words.append("*")
                default = "" if parameter.default is parameter.empty else f"={parameter.default!r}"
                words.append(parameter.name + default)
            assert ", ".join(words).startswith(expected), function
            # Later parameters are optional, and given by keyword.
            for word, parameter in zip(reversed([w for w in words if w != "*"]), reversed(parameters), strict=True):
                if word in expected:
                    break
                assert parameter.kind is parameter.KEYWORD_ONLY
                assert parameter.default is not parameter.empty

    def test_a_name_that_is_not_there(self) -> None:
        assert set(gs.__all__) <= set(dir(gs))
        with pytest.raises(AttributeError, match="'graphscale' has no attribute 'scales'"):
            gs.scales  # noqa: B018

    def test_errors_have_one_base(self) -> None:
        kinds = [kind for kind in vars(errors).values() if isinstance(kind, type)]
        assert gs.GraphscaleError in kinds and all(issubclass(kind, gs.GraphscaleError) for kind in kinds)
        assert issubclass(errors.InvalidLossScaleError, ValueError)

    @pytest.mark.parametrize(
        "name", ["", *(pytest.param(name, marks=pytest.mark.full) for name in (".cli", ".passes", ".ort.artifacts"))]
    )
    def test_importing_is_light(self, name: str) -> None:
        """No runtime and no framework: those that transform graphs offline need none."""
        module = f"graphscale{name}"
        code = f"import sys, {module}; print(*sorted(name for name in sys.modules if '.' not in name))"
        result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
        loaded = set(result.stdout.split())
        # Policies need numpy alone, and a command imports the rest when it runs.
        assert ("onnx_ir" in loaded) == (name in (".passes", ".ort.artifacts"))
        assert not loaded & {"onnxruntime", "flatbuffers", "torch", "matplotlib", "sklearn", "jax", "tensorflow"}


class TestKindsOfModels:
    def test_each_gives_the_same_and_is_left_as_it_was(self, tmp_path: Path) -> None:
        model, proto = ir.load(MOMENTUM), onnx.load(MOMENTUM)
        before, nodes = proto.SerializeToString(deterministic=True), list(model.graph)
        results = [gs.scale(given) for given in (MOMENTUM, str(MOMENTUM), model, proto)]
        assert [type(result.model) for result in results] == [ir.Model, ir.Model, ir.Model, onnx.ModelProto]
        assert proto.SerializeToString(deterministic=True) == before
        assert ir.to_proto(model) == ir.to_proto(ir.load(MOMENTUM))
        assert list(model.graph) == nodes and not model.meta
        written = []
        for result in results:
            assert result.report == results[0].report
            result.save(tmp_path / "scaled.onnx")
            written.append(onnx.load(tmp_path / "scaled.onnx"))
            assert written[-1].graph == written[0].graph
            assert properties(written[-1]) == properties(written[0])

    def test_a_refusal_changes_nothing(self) -> None:
        model = ir.from_proto(step())
        before = ir.to_proto(model).SerializeToString(deterministic=True)
        with pytest.raises(gs.GraphscaleError):
            gs.scale(model, updates={"dw2": "w1"})
        assert ir.to_proto(model).SerializeToString(deterministic=True) == before

    def test_a_scaled_one_is_refused_in_every_form(self, tmp_path: Path) -> None:
        result = gs.scale(MOMENTUM)
        result.save(tmp_path / "scaled.onnx")
        for model in (result.model, ir.to_proto(result.model), tmp_path / "scaled.onnx"):
            with pytest.raises(errors.AlreadyScaledError):
                gs.scale(model)
            assert gs.inspect(model) == result.report

    @pytest.mark.full
    def test_a_session_takes_every_form(self, tmp_path: Path) -> None:
        feeds = load_example("pytorch/mlp_momentum").feeds
        result = gs.scale(MOMENTUM)
        result.save(tmp_path / "scaled.onnx")
        carried = {state.input for state in result.report.state} - LOSS_SCALE_STATE
        state = {name: feeds[name] for name in carried}
        batch = {name: array for name, array in feeds.items() if name not in carried}
        for model in (result, result.model, ir.to_proto(result.model), tmp_path / "scaled.onnx"):
            session = gs.Session(model, state=state)
            assert set(session.step(batch)) == {"loss", "all_finite"}
            assert (session.loss_scale, session.good_steps) == (2.0**15, 1)


LOSS_SCALES: list[Any] = [
    256,
    256.0,
    np.float32(256),
    gs.FixedLossScale(256),
    {"class_name": "FixedLossScale", "config": {"loss_scale_value": 256}},
]


@pytest.mark.parametrize("loss_scale", LOSS_SCALES, ids=lambda value: type(value).__name__)
def test_kinds_of_loss_scales(loss_scale: Any) -> None:
    result = gs.scale(linear_step(), loss_scale)
    assert result.report.policy == {"class_name": "FixedLossScale", "config": {"loss_scale_value": 256.0}}


def test_the_report_is_data() -> None:
    report = gs.scale(MOMENTUM).report
    assert dataclasses.is_dataclass(report)
    data = json.loads(json.dumps(report.to_dict()))
    assert set(data) >= {
        *("loss", "places", "coverage", "gradients", "state", "policy", "target", "warnings", "inserted"),
        *("nodes_before", "nodes_after", "renamed"),
    }
    with pytest.raises(dataclasses.FrozenInstanceError):
        report.loss = "another"  # type: ignore[misc]


@pytest.mark.parametrize("target", ["onnx", "ort-cuda", "ort-training", "ort-training-cuda"])
class TestTheGraph:
    def test_state_outputs_and_marks(self, target: str) -> None:
        original = onnx.load(MOMENTUM)
        model = gs.scale(original, target=target).model
        inputs = {value.name: value.type.tensor_type for value in model.graph.input}
        values = initial_values(model)
        assert (values["current_loss_scale"], values["current_loss_scale"].dtype) == (2**15, np.float32)
        assert values["good_steps"] == 0
        assert values["current_loss_scale"].shape == values["good_steps"].shape == ()
        assert all(len(inputs[name].shape.dim) == 0 for name in LOSS_SCALE_STATE)

        outputs = [(value.name, value.type) for value in model.graph.output]
        expected = [(value.name, value.type) for value in original.graph.output]
        # The weights of this export have no initializers, so that no target writes them in place.
        assert outputs[: len(expected)] == expected
        name, kind = outputs[-1]
        assert (name, kind.tensor_type.elem_type) == ("all_finite", onnx.TensorProto.BOOL)
        assert len(kind.tensor_type.shape.dim) == 0
        if "training" not in target:
            assert {name for name, _ in outputs} >= {"current_loss_scale.next", "good_steps.next"}

        marked = [node for node in model.graph.node if "graphscale.pass" in properties(node)]
        unmarked = [node.name for node in model.graph.node if "graphscale.pass" not in properties(node)]
        assert unmarked == [node.name for node in original.graph.node]
        assert {properties(node)["graphscale.pass"] for node in marked} <= {
            *("scale-loss", "unscale-gradients", "check-finite", "update-loss-scale", "guard-updates", "order-writes"),
        }
        assert len({node.name for node in model.graph.node}) == len(model.graph.node)

    def test_the_metadata(self, target: str) -> None:
        result = gs.scale(onnx.load(MOMENTUM), gs.DynamicLossScale(4, 5, 3), target=target)
        found = properties(result.model)
        assert found["graphscale.version"]
        assert found["graphscale.target"] == target
        assert json.loads(found["graphscale.policy"]) == {
            "class_name": "DynamicLossScale",
            "config": {"initial_loss_scale": 4.0, "increment_period": 5, "multiplier": 3.0},
        }
        state = json.loads(found["graphscale.state"])
        assert state == {s.input: s.output for s in result.report.state if s.output is not None}
        assert state.keys() <= {value.name for value in result.model.graph.input}
        assert set(state.values()) <= {value.name for value in result.model.graph.output}
        assert (state.keys() >= LOSS_SCALE_STATE) == ("training" not in target)


def test_taken_names_get_suffixes_and_the_report_says_so() -> None:
    """A graph that calls things as graphscale does."""
    model = linear_step(
        "all_finite = Mul(dw, rate)\n w_next = Sub(w, all_finite)",
        outputs="float[4,3] w_next",
        constants="float rate = {0.1}",
        forward=LINEAR.replace("square", "good_steps"),
        backward=LINEAR_BACKWARD.replace("dy", "current_loss_scale"),
    )
    result = gs.scale(model)
    renamed = {"current_loss_scale": "current_loss_scale_1", "good_steps": "good_steps_1"}
    assert result.report.renamed.items() >= renamed.items()
    assert {"current_loss_scale_1", "good_steps_1"} <= initial_values(result.model).keys()
    assert result.model.graph.output[-1].name == result.report.renamed["all_finite"] == "all_finite_1"
    state = json.loads(properties(result.model)["graphscale.state"])
    assert state["current_loss_scale_1"] == "current_loss_scale_1.next"
    feeds = feeds_for(model)
    expected, _ = run_once(model, feeds)
    session = gs.Session(result, state={"w": feeds.pop("w")})
    outputs = session.step(feeds)
    assert outputs["loss"] == expected["loss"] and outputs["all_finite_1"]
    assert (session.loss_scale, session.good_steps) == (2.0**15, 1)
