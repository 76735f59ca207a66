"""Roles that a model states."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.numpy_helper
import onnx_ir as ir
import pytest

import graphscale as gs
from graphscale.errors import RolesError, UnsupportedModelError
from graphscale.files import model_files, saving
from tests.analysis.roles.steps import hidden_state_step, momentum_step, roles_of, swappable_step, update_step
from tests.build import assert_skips, feeds_for, linear_step
from tests.cli.command import succeed

KEY = "graphscale.roles"
STATED = f"stated by {KEY}"


def stating(model: onnx.ModelProto, content: Any) -> onnx.ModelProto:
    """A model with a statement of its roles: text, or what becomes JSON."""
    model.metadata_props.add(key=KEY, value=content if isinstance(content, str) else json.dumps(content))
    return model


def evidence_of(model: Any, name: str) -> str:
    return next(entry.evidence for entry in gs.roles(model) if entry.name == name)


class TestTheKey:
    def test_it_answers_what_the_graph_leaves_open(self) -> None:
        model = stating(hidden_state_step(), {"losses": ["loss"], "states": {"h_next": "h"}, "kept": ["h_next"]})
        report = gs.scale(model).report
        assert report.loss_found == STATED
        assert {s.output: s.how for s in report.state}["h_next"] == STATED
        assert evidence_of(stating(hidden_state_step(), {"metrics": ["h_next"]}), "h_next") == STATED
        assert gs.scale(stating(swappable_step(), {"states": {"b_next": "b", "a_next": "a"}})).report.proved

    def test_stated_state_is_guarded(self) -> None:
        model = stating(hidden_state_step(), {"states": {"h_next": "h"}})
        assert_skips(gs.scale(model), feeds_for(model))

    def test_autocast_keeps_it_and_scale_does_not(self) -> None:
        model = stating(hidden_state_step(), {"states": {"h_next": "h"}})
        mixed = gs.autocast(model).model
        scaled = gs.scale(mixed).model
        assert isinstance(mixed, onnx.ModelProto) and isinstance(scaled, onnx.ModelProto)
        assert [KEY in {p.key for p in each.metadata_props} for each in (model, mixed, scaled)] == [True, True, False]
        assert gs.strip(gs.strip(scaled)).SerializeToString() == model.SerializeToString()
        assert gs.verify(model, gs.scale(model), runs=1)

    def test_a_user_who_names_a_role_is_right(self) -> None:
        model = stating(hidden_state_step(), {"losses": ["nope"], "states": {"h_next": "h"}, "kept": ["h_next"]})
        assert roles_of(model, {"losses": ["loss"], "metrics": ["h_next"]})["h_next"] == "metric"
        for field in ("losses", "metrics"):
            report = gs.scale(stating(linear_step(), {field: ["dw"]}), gradients=["dw"]).report
            assert [entry.role for entry in report.roles if entry.kind == "output"] == ["loss", "gradient"]
        swapped = stating(momentum_step(), {"states": {"m_next": "w"}})
        for named in ({"w_next": "w"}, {"m_next": "m"}):
            assert gs.scale(swapped, updates=named).report.state

    @pytest.mark.parametrize(
        ("content", "words"),
        [
            ("{", "it is not JSON"),
            ("[" * 100_000, "it is not JSON"),
            ([], "expected an object with losses"),
            ({"metric": ["w_next"]}, "there is no field 'metric'"),
            ({"metrics": ["loss"], "losses": ["loss"]}, "'loss' has two roles"),
            ({"losses": ["nope"]}, "no value of this name"),
            ({"states": {"nope": "w"}}, "no output 'nope'"),
            ({"states": {"w_next": "x"}}, "cannot be the next value of x"),
            ({"states": {"w_next": "w", "m_next": "w"}}, "'w' is named for two outputs"),
            ({"gradients": ["nope"]}, "no output 'nope'"),
            ({"kept": ["loss"]}, "no carried state"),
            ({"states": {"m_next": "w", "w_next": "m"}}, "it holds 'm' 0.9 times"),
            ({"metrics": ["w_next"]}, "it holds 'w' 1 times"),
        ],
        ids=lambda value: str(value)[:40],
    )
    def test_a_wrong_one_is_an_error_that_names_it(self, content: Any, words: str) -> None:
        for force in (False, True):
            with pytest.raises(gs.GraphscaleError, match=words) as raised:
                gs.scale(stating(momentum_step(), content), force_roles=force)
            assert str(raised.value).startswith(KEY) and "\n" not in str(raised.value)
            assert "--force-roles" not in str(raised.value)

    def test_a_contradiction_can_be_overruled_output_by_output(self) -> None:
        model = stating(momentum_step(), {"metrics": ["w_next"]})
        with pytest.raises(RolesError, match="name its role with --roles"):
            gs.scale(model)
        assert roles_of(model, {"states": {"w_next": "w"}})["w_next"] == "next w"

    def test_all_that_analyses_the_step_reads_it(self) -> None:
        model = update_step("length = ReduceL2(w_next, keepdims=0)", outputs="float length")
        wrong = stating(update_step("", outputs=""), {"losses": ["nope"]})
        for function in (gs.inspect, gs.roles, gs.autocast, gs.scale):
            with pytest.raises(gs.GraphscaleError, match=f"^{KEY} nope"):
                function(wrong)
        with pytest.raises(gs.GraphscaleError, match=f"^{KEY} nope"):
            gs.verify(wrong, gs.scale(update_step()))
        assert gs.lint(stating(model, {"losses": ["loss"]})).findings == gs.lint(model).findings


def binding(model: onnx.ModelProto, **bindings: str) -> onnx.ModelProto:
    """A model whose `training_info` binds inputs to outputs, and draws a weight that the graph holds as `seen`."""
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.ones(3, np.float32), "seen"))
    info = model.training_info.add()
    for value, output in bindings.items():
        info.update_binding.add(key=value, value=output)
    info.initialization.node.add(op_type="RandomNormal", output=["drawn"])
    info.initialization_binding.add(key="seen", value="drawn")
    return model


class TestTrainingInfo:
    def test_its_bindings_are_roles(self) -> None:
        model = binding(hidden_state_step(), h="h_next", w="w_next")
        assert evidence_of(model, "h_next") == "stated by training_info"
        result = gs.scale(model)
        assert result.report.warnings == (
            "training_info was read as roles, and left out of the new model, its initialization included; "
            "graphscale.state has the carried state",
        )
        assert isinstance(result.model, onnx.ModelProto) and not result.model.training_info
        assert_skips(result, feeds_for(model))
        assert gs.verify(model, result, runs=1)

    def test_strip_restores_it(self, tmp_path: Path) -> None:
        model = binding(hidden_state_step(), h="h_next")
        scaled = gs.scale(model)
        assert gs.strip(scaled.model).SerializeToString() == model.SerializeToString()
        scaled.save(tmp_path / "scaled.onnx")
        succeed(tmp_path, "strip", "scaled.onnx", "-o", "stripped.onnx")
        assert onnx.load(tmp_path / "stripped.onnx").training_info == model.training_info
        again = gs.scale(gs.strip(tmp_path / "scaled.onnx"))
        assert {"h", "w"} < {state.input for state in again.report.state}
        assert gs.strip(ir.to_proto(again.model)).training_info == model.training_info
        again.save(tmp_path / "again.onnx")
        assert not onnx.load(tmp_path / "again.onnx").training_info

    def test_it_stays_with_weights_in_several_files(self, tmp_path: Path) -> None:
        model = binding(update_step(), w="w_next")
        model.graph.initializer.append(onnx.numpy_helper.from_array(np.ones(5, np.float32), "more"))
        files = {"all_tensors_to_one_file": False, "size_threshold": 0, "save_as_external_data": True}
        (tmp_path / "there").mkdir()
        onnx.save(model, tmp_path / "there" / "step.onnx", **files)
        saving.save(model_files.load(tmp_path / "there" / "step.onnx"), tmp_path / "here.onnx")
        assert onnx.load(tmp_path / "here.onnx").training_info == model.training_info

    def test_autocast_hands_the_roles_on(self) -> None:
        model = binding(stating(hidden_state_step(), {"losses": ["loss"]}), h="h_next")
        mixed = gs.autocast(model)
        assert mixed.report.warnings[0].startswith("training_info was read as roles")
        assert isinstance(mixed.model, onnx.ModelProto) and not mixed.model.training_info
        assert evidence_of(mixed.model, "h_next") == STATED
        assert gs.strip(gs.strip(gs.scale(mixed.model).model)).SerializeToString() == model.SerializeToString()

    @pytest.mark.parametrize(
        ("bindings", "words"),
        [
            ({"m": "w_next", "w": "m_next"}, "training_info: output .* it holds"),
            ({"m": "nope"}, "training_info nope=m: the graph has no output"),
            ({"nope": "m_next"}, "training_info m_next=nope: the graph has no input"),
            ({"w": "m_next", "m": "m_next"}, "training_info m_next=m: training_info gives 'm_next' another role"),
            ({"w": "n_next"}, "training_info n_next=w: graphscale.roles gives 'n_next' another role"),
        ],
        ids=str,
    )
    def test_a_wrong_binding(self, bindings: dict[str, str], words: str) -> None:
        with pytest.raises(gs.GraphscaleError, match=words):
            gs.scale(binding(stating(momentum_step(), {"states": {"n_next": "n"}}), **bindings))

    def test_more_than_bindings_of_one_step(self) -> None:
        twice, unbound = (binding(update_step(), w="w_next") for _ in range(2))
        twice.training_info.append(twice.training_info[0])
        unbound.training_info[0].initialization_binding[0].key = "nope"
        for model, words in ((twice, "several steps"), (unbound, "names 'nope', which is no initializer")):
            with pytest.raises(UnsupportedModelError, match=words):
                gs.scale(model)

    def test_diff_shows_it(self) -> None:
        change = gs.diff(update_step(), binding(update_step(), w="w_next")).metadata
        assert [(each.name, each.before, each.after) for each in change] == [("training_info", "", "w_next=w")]
